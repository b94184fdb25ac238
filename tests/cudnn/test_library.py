"""What is refused before cuDNN is asked anything, and what cuDNN's own refusals say."""

import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mucudnn.backends.cudnn import library as library_module
from mucudnn.backends.cudnn.library import CudnnError, Library, library_of, load_library
from mucudnn.errors import BackendError
from tests.alone import Server
from tests.cudnn.doubles import CUBLASLT, CUDNN, Machine, OpenedCudnn, library_double
from tests.forks import in_a_child


def _machine(cudnn: OpenedCudnn) -> Machine:
    return Machine({CUDNN: cudnn, CUBLASLT: object()})


def test_torch_is_imported_before_anything_is_opened() -> None:
    machine = _machine(OpenedCudnn())

    library_of(machine.system())

    assert machine.events == ["torch", f"open {CUDNN}", f"open {CUBLASLT}"]


def test_a_library_knows_its_version_and_its_file() -> None:
    library = library_of(_machine(OpenedCudnn(version=92000, path="/some/libcudnn.so.9")).system())

    assert (library.version, library.path) == (92000, "/some/libcudnn.so.9")


def test_other_systems_than_linux_are_refused() -> None:
    machine = _machine(OpenedCudnn())

    with pytest.raises(
        BackendError, match=r"^cuDNN can be used on Linux only, but this system is 'win32'\.$"
    ):
        library_of(machine.system(platform="win32"))
    assert machine.events == []


def test_a_machine_without_cudnn_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        BackendError, match=r"^The library libcudnn.so.9 must be .* pip install nvidia-cudnn-cu13"
    ):
        library_of(Machine({CUBLASLT: object()}).system())


def test_a_machine_without_cublaslt_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        BackendError, match=r"libcublasLt\.so\.13, .* must be .* pip install nvidia-cudnn-cu13"
    ):
        library_of(Machine({CUDNN: OpenedCudnn()}).system())


def test_a_cudnn_for_cuda_12_asks_for_the_cublaslt_of_cuda_12() -> None:
    with pytest.raises(BackendError, match=r"libcublasLt\.so\.12, .* is not found"):
        library_of(_machine(OpenedCudnn(cuda=12090)).system())


@pytest.mark.parametrize(
    ("version", "text"), [(8902, r"8\.9\.2"), (90701, r"9\.7\.1"), (100000, r"10\.0\.0"), (0, r"0\.0\.0")]
)
def test_a_version_that_is_not_9_or_before_9_8_is_refused(version: int, text: str) -> None:
    with pytest.raises(BackendError, match=rf"and 9\.8 or later, but /old\.so is {text}\. Install it"):
        library_of(_machine(OpenedCudnn(version, path="/old.so")).system())


def test_version_9_8_is_enough() -> None:
    assert library_of(_machine(OpenedCudnn(90800)).system()).version == 90800


def test_a_library_that_lacks_a_function_is_refused() -> None:
    cudnn = OpenedCudnn()
    del cudnn.cudnnBackendExecute

    with pytest.raises(BackendError, match=r"must have the function cudnnBackendExecute, but /double/"):
        library_of(_machine(cudnn).system())


def test_a_fork_while_another_thread_loads_the_library_leaves_its_child_free_to_load_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_loading, may_end, parent = threading.Event(), threading.Event(), os.getpid()

    def loaded() -> Library:
        if os.getpid() == parent:
            is_loading.set()
            may_end.wait()
        return library_double()

    monkeypatch.setattr(library_module, "_loaded", loaded)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(load_library)
        is_loading.wait()
        found = in_a_child(lambda: load_library().version == library_double().version)
        may_end.set()

    assert found


def test_pointers_are_declared_lest_they_are_cut_to_32_bits() -> None:
    cudnn = OpenedCudnn()
    library_of(_machine(cudnn).system())

    assert [kind.__name__ for kind in cudnn.cudnnBackendSetAttribute.argtypes] == [
        "c_void_p",
        "c_int",
        "c_int",
        "c_long",
        "c_void_p",
    ]


def test_a_status_of_0_passes() -> None:
    library_double().check(0, "Nothing")


def test_any_other_status_names_the_call_and_what_cudnn_says() -> None:
    library = library_double(last_error=b"batch == 0.\n")

    with pytest.raises(
        CudnnError,
        match=r"^Finalising a graph must succeed, but cuDNN gave CUDNN_STATUS_DOUBLE \(2000\): batch == 0\.$",
    ) as caught:
        library.check(2000, "Finalising a graph")
    assert caught.value.status == 2000


@pytest.mark.parametrize(
    ("status", "hint"),
    [
        (1001, r"There is no device"),
        (1002, r"Sub-libraries of two versions of cuDNN are mixed: .* remove one of them"),
        (1008, r"could not be loaded; the driver .* may be missing"),
    ],
)
def test_a_broken_set_up_is_explained(status: int, hint: str) -> None:
    with pytest.raises(CudnnError, match=rf"^Asking must succeed, .* \({status}\)\. .*{hint}"):
        library_double().check(status, "Asking")


@pytest.mark.parametrize(
    ("status", "not_here"),
    [(2000, False), (2999, False), (3000, True), (4001, True), (4003, False), (4004, False), (5000, False)],
)
def test_statuses_of_engines_mean_not_here_but_for_a_lack_of_memory(status: int, not_here: bool) -> None:
    assert CudnnError(status, "Asking", "NAME", "").is_not_supported is not_here


def test_an_error_crosses_processes() -> None:
    error = CudnnError(2000, "Asking", "CUDNN_STATUS_BAD_PARAM", "n == 0")

    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.deviceless
def test_the_real_library_without_cublaslt_is_refused_where_cudnn_would_abort(alone: Server) -> None:
    program = """
import dataclasses
from mucudnn.backends.cudnn.discovery import System
from mucudnn.backends.cudnn.library import library_of
from mucudnn.errors import BackendError

system = System()

def without_cublaslt(name, mode):
    if "cublasLt" in name:
        raise OSError(name)
    return system.open_library(name, mode)

try:
    library_of(dataclasses.replace(system, open_library=without_cublaslt))
except BackendError as error:
    print("refused:", error)
"""
    assert alone.run(program).startswith("refused: The library libcublasLt.so.13, without which cuDNN aborts")


@pytest.mark.deviceless
def test_a_file_that_is_no_library_is_refused(tmp_path: Path, alone: Server) -> None:
    path = tmp_path / "libcudnn.so.9"
    path.write_text("not an ELF file")
    program = f"""
import dataclasses
from mucudnn.backends.cudnn.discovery import System
from mucudnn.backends.cudnn.library import library_of
from mucudnn.errors import BackendError

system = System()

def without_pytorchs(name, mode):
    if name == "libcudnn.so.9":
        raise OSError(name)
    return system.open_library(name, mode)

try:
    library_of(dataclasses.replace(system, override={str(path)!r}, open_library=without_pytorchs))
except BackendError as error:
    print(error)
"""
    assert "must be the path of a libcudnn that can be opened" in alone.run(program)


@pytest.mark.deviceless
def test_the_real_library_is_of_version_9_8_or_later_and_knows_its_file(library: Library) -> None:
    assert library.version >= 90800
    assert Path(library.path).name.startswith("libcudnn.so.9")
    assert Path(library.path).is_file()


@pytest.mark.deviceless
def test_all_threads_have_the_same_library(library: Library) -> None:
    with ThreadPoolExecutor(4) as threads:
        loaded = list(threads.map(lambda _: load_library(), range(8)))

    assert all(one is library for one in loaded)
