"""Where cuDNN is found: each place in its turn, and nothing opened beside a copy that is there."""

import os

import pytest

from mucudnn.backends.cudnn.discovery import System, cublaslt_is_loaded, opened_cudnn
from mucudnn.errors import BackendError
from tests.cudnn.doubles import CUBLASLT, CUDNN, Machine, OpenedCudnn

OWN, NAMED, WHEEL, SYSTEM = (OpenedCudnn() for _ in range(4))


def test_the_copy_in_the_process_goes_before_the_one_that_the_user_named() -> None:
    machine = Machine({"/named.so": NAMED, f"/wheel/{CUDNN}": WHEEL}, mapped={CUDNN: OWN})

    assert opened_cudnn(machine.system(override="/named.so")) is OWN
    assert machine.events == []


def test_the_one_that_the_user_named_goes_before_the_wheel() -> None:
    machine = Machine({"/named.so": NAMED, f"/wheel/{CUDNN}": WHEEL, CUDNN: SYSTEM})

    assert opened_cudnn(machine.system(override="/named.so")) is NAMED


def test_the_wheel_goes_before_the_system() -> None:
    machine = Machine({CUDNN: SYSTEM, f"/wheel/{CUDNN}": WHEEL})

    assert opened_cudnn(machine.system()) is WHEEL


def test_the_systems_copy_is_the_last_resort() -> None:
    assert opened_cudnn(Machine({CUDNN: SYSTEM}).system()) is SYSTEM


def test_without_any_copy_there_is_none() -> None:
    assert opened_cudnn(Machine({}).system()) is None


def test_a_named_library_that_cannot_be_opened_is_refused_although_there_is_another() -> None:
    machine = Machine({f"/wheel/{CUDNN}": WHEEL})

    with pytest.raises(
        BackendError, match=r"^MUCUDNN_CUDNN_LIBRARY must be the path .* but got '/no\.so': /no\.so: cannot"
    ):
        opened_cudnn(machine.system(override="/no.so"))


def test_the_environment_variable_names_the_users_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUCUDNN_CUDNN_LIBRARY", "/named.so")

    assert System().override == "/named.so"


def test_an_empty_environment_variable_names_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUCUDNN_CUDNN_LIBRARY", "")

    assert System().override is None


def test_cublaslt_is_opened_from_the_wheel_for_all_libraries_to_see() -> None:
    machine = Machine({f"/wheel/{CUBLASLT}": object(), CUBLASLT: object()})

    assert cublaslt_is_loaded(machine.system(), CUBLASLT)
    assert machine.events == [f"open /wheel/{CUBLASLT}"]
    assert machine.flags[f"/wheel/{CUBLASLT}"] & os.RTLD_GLOBAL


def test_cublaslt_in_the_process_is_not_opened_again() -> None:
    machine = Machine({f"/wheel/{CUBLASLT}": object()}, mapped={CUBLASLT: object()})

    assert cublaslt_is_loaded(machine.system(), CUBLASLT)
    assert machine.events == []


def test_cublaslt_of_another_cuda_version_does_not_count() -> None:
    machine = Machine({"libcublasLt.so.12": object()}, mapped={"libcublasLt.so.12": object()})

    assert not cublaslt_is_loaded(machine.system(), CUBLASLT)
