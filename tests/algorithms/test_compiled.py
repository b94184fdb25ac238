"""Convolution by tiles in C: its compiler, what is compiled, who shares the work, and when it is tried."""

import contextlib
import ctypes
import errno
import gc
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mucudnn.algorithms import Algorithm, libraries, named
from mucudnn.algorithms.compiled import compiler as compilers
from mucudnn.algorithms.compiled import offers
from mucudnn.algorithms.compiled.axes import Axis
from mucudnn.algorithms.compiled.compiler import Compiler, compiler, description, library
from mucudnn.algorithms.compiled.shares import Shares
from mucudnn.algorithms.compiled.source import source_of
from mucudnn.errors import BackendError, BackendWarning, CompilationError
from mucudnn.problem import ConvOp, Layout
from tests.algorithms.kernels import algorithm_of, compute
from tests.algorithms.strict_c import assert_is_c_without_a_warning
from tests.algorithms.tried import a_layer, a_volume, names, winograd
from tests.algorithms.vectors import have_vectors
from tests.breadth import in_turn
from tests.forks import in_a_child
from tests.operands import a_convolution, operands_of, reference, relative_error

pytestmark = pytest.mark.usefixtures("one_thread", "wide_products")

ONE_TAP = Axis(outputs=1, taps=1, stride=1, padding=0, is_transposed=False)

UNSTRIDED = Axis(outputs=4, taps=3, stride=1, padding=1, is_transposed=False)

STRIDED = [replace(UNSTRIDED, outputs=2, stride=2, is_transposed=is_dgrad) for is_dgrad in (False, True)]


@pytest.fixture
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A process that has asked for no compiler yet, and will have asked for none afterwards."""
    _forget()
    yield monkeypatch
    monkeypatch.undo()
    _forget()


class _Clock:
    """A clock of the compiler's that goes when it is told to."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(asked_anew: pytest.MonkeyPatch, tmp_path: Path) -> _Clock:
    """That by which the compiler of this process, which has nothing kept, believes its failures."""
    asked_anew.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler()
    found = _Clock()
    asked_anew.setattr(compilers, "time", found)
    return found


def _forget() -> None:
    compiler.cache_clear()
    compilers._able.cache_clear()
    compilers._known.clear()


@in_turn(
    "dtype",
    ["float32", "float64"],
    vector_bytes=[16, 32, 64],
    depth=[ONE_TAP, replace(UNSTRIDED, outputs=2)],
    width=[UNSTRIDED, *STRIDED],
)
def test_the_source_is_c_without_a_warning_whatever_the_vectors(
    width: Axis, depth: Axis, vector_bytes: int, dtype: str, tmp_path: Path
) -> None:
    assert_is_c_without_a_warning(source_of((depth, ONE_TAP, width), dtype, vector_bytes), tmp_path)


@pytest.mark.parametrize("vector_bytes", [16, 32, 64])
@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("size", [(9, 21), (6, 3, 13)], ids=["2-D", "3-D"])
@pytest.mark.parametrize("name", ["cc_winograd4_rows2", "cc_winograd4_fma_rows2"])
def test_vectors_of_any_length_compute_the_same(
    vector_bytes: int,
    op: ConvOp,
    layout: Layout,
    size: tuple[int, ...],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mucudnn.algorithms.compiled import kernels

    have_vectors(vector_bytes, monkeypatch, kernels)
    monkeypatch.setattr(kernels, "library", library)  # not by the first level, which would come last
    kernels.functions.cache_clear()
    ones, threes = (1,) * len(size), (3,) * len(size)
    problem = a_convolution(
        op=op, in_channels=23, out_channels=21, input_size=size, layout=layout, dtype="float64",
        kernel_size=threes, stride=ones, dilation=ones, padding=ones,
    )  # fmt: skip

    result, is_good = compute(algorithm_of(name), problem, *operands_of(problem))

    kernels.functions.cache_clear()
    assert is_good
    assert relative_error(result, reference(problem, *operands_of(problem))) <= 1e-12


def test_without_a_compiler_there_is_nothing_in_c(asked_anew: pytest.MonkeyPatch) -> None:
    asked_anew.setenv("CC", "none")

    assert description() == "none"
    assert algorithm_of("cc_winograd4").refusal(a_layer()) == "there is no C compiler"
    with pytest.raises(BackendError, match="There is no C compiler"):
        library("int one(void) { return 1; }")


@pytest.mark.parametrize(
    "words",
    [
        "no-such-compiler",
        "'gcc",
        "gcc -include no-such-header.h",
        "gcc -fuse-ld=no-such-linker",
        "gcc -fsanitize=address",  # whose library ends a process that does not know it
    ],
)
def test_a_compiler_that_cannot_make_a_library_is_none_and_is_told_of(
    words: str, asked_anew: pytest.MonkeyPatch
) -> None:
    asked_anew.setenv("CC", words)

    with pytest.warns(BackendWarning, match="The variable CC names a compiler that cannot") as told:
        assert description() == "none"

    assert repr(words) in str(told[0].message)
    assert description() == "none"  # without another warning


def test_where_warnings_are_errors_a_compiler_is_asked_once_all_the_same(
    asked_anew: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, ...]] = []
    asked_anew.setattr(compilers, "_asked", lambda words: asked.append(words))
    asked_anew.setenv("CC", "gcc")

    for _ in range(2):
        with pytest.raises(BackendWarning, match="The variable CC names"):
            compiler()

    assert len(asked) == 3  # natively, in two ways, and not


def test_a_compiler_that_fails_is_told_with_its_first_words(asked_anew: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match=r"could not compile a convolution: .*error") as raised:
        library("this is no C")

    assert not isinstance(raised.value, CompilationError)


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ("echo No space left on device >&2; exit 1", "No space left on device"),
        ("kill -9 $$", "it ended with -9"),
    ],
)
def test_a_compiler_that_lacks_something_fails_for_now(
    failure: str, words: str, asked_anew: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = _wrapped(f"case $* in *library.so*) {failure};; esac", tmp_path)
    _forget()
    asked_anew.setenv("CC", str(script))
    asked_anew.setenv("XDG_CACHE_HOME", str(tmp_path))

    with pytest.raises(CompilationError, match=f"could not compile a convolution: {words}"):
        library("int five(void) { return 5; }")


@pytest.mark.parametrize("is_named", [True, False])
def test_a_compiler_that_lacks_something_when_it_is_tried_is_told_of(
    is_named: bool, asked_anew: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = _wrapped("case $* in *trial.so*) echo cc1: No space left on device >&2; exit 1;; esac", tmp_path)
    _forget()
    if is_named:
        asked_anew.setenv("CC", str(script))
    else:
        asked_anew.delenv("CC", raising=False)
        asked_anew.setenv("PATH", str(tmp_path))

    with pytest.warns(BackendWarning, match="lacks something now.*cc1: No space left on device"):
        assert description() == "none"


def test_a_compiler_that_lacks_something_is_not_tried_with_fewer_instructions(
    asked_anew: pytest.MonkeyPatch,
) -> None:
    tries: list[Compiler] = []

    def once(found: Compiler) -> bool:
        tries.append(found)
        if len(tries) == 1:
            raise CompilationError("it was killed")
        return True

    asked_anew.setattr(compilers, "_is_able", once)

    with pytest.warns(BackendWarning, match=r"lacks something now.*: it was killed\. Free some room"):
        assert compiler() is None
    assert len(tries) == 1


@pytest.mark.parametrize("is_kept_well", [True, False])
def test_where_nothing_may_be_loaded_from_the_folder_of_drafts_it_is_from_where_libraries_are_kept(
    is_kept_well: bool, asked_anew: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded = compilers._can_be_loaded

    def mounted_without_execution(path: Path) -> bool:
        return is_kept_well and path.is_relative_to(tmp_path) and loaded(path)

    asked_anew.setattr(compilers, "_can_be_loaded", mounted_without_execution)
    asked_anew.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert (compiler() is not None) is is_kept_well
    assert not [*compilers.compiled_folder().iterdir()]


def test_where_no_folder_takes_drafts_the_compiler_is_told_to_lack_one(
    asked_anew: pytest.MonkeyPatch,
) -> None:
    def no_folder() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    asked_anew.setattr(compilers.tempfile, "gettempdir", no_folder)

    with pytest.warns(BackendWarning, match="lacks something now.*No usable temporary directory"):
        assert compiler() is None


def test_a_compiler_writes_where_python_finds_room(asked_anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = _wrapped('[ -w "$TMPDIR" ] || { echo No space left on device >&2; exit 1; }', tmp_path)
    _forget()
    asked_anew.setenv("CC", str(script))
    asked_anew.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked_anew.setenv("TMPDIR", "/proc/nowhere")
    asked_anew.setattr(compilers.tempfile, "tempdir", None)  # sought anew

    assert library("int six(void) { return 6; }").six() == 6


def _wrapped(first: str, folder: Path) -> Path:
    """Return a compiler which does something in the shell first."""
    compiler_path = shutil.which(compilers.needed_compiler().command[0])
    script = folder / "cc"
    script.write_text(f'#!/bin/sh\n{first}\nexec {compiler_path} "$@"\n')
    script.chmod(0o700)
    return script


def test_what_was_compiled_is_compiled_once(asked_anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked_anew.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library("int two(void) { return 2; }").two() == 2
    compilers._known.clear()
    asked_anew.setattr(compilers, "_compile", None)

    assert library("int two(void) { return 2; }").two() == 2
    assert len(list((tmp_path / "mucudnn" / "compiled").iterdir())) == 1


@pytest.mark.parametrize(("name", "more"), [("gcc 12.2.0", ("-O1",)), ("clang 22.1.8", ())])
def test_what_is_plain_is_compiled_by_the_first_level_of_gcc(
    name: str, more: tuple[str, ...], asked_anew: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked_anew.setenv("XDG_CACHE_HOME", str(tmp_path))
    found, source = compilers.needed_compiler()._replace(name=name), "int seven(void) { return 7; }"
    commands: list[tuple[str, ...]] = []

    def seen(by: Compiler, source: str, place: Path) -> None:
        commands.append(by.command)
        compile_(by, source, place)

    compile_ = compilers._compile
    asked_anew.setattr(compilers, "needed_compiler", lambda: found)
    asked_anew.setattr(compilers, "_compile", seen)

    assert [library(source, is_plain=is_plain).seven() for is_plain in (False, True)] == [7, 7]
    assert commands == [found.command, (*found.command, *more)][: 1 + len(more)]


def test_a_failure_keeps_nothing_of_who_has_met_it(asked_anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked_anew.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler()
    asked_anew.setattr(compilers.tempfile, "TemporaryDirectory", _no_room)
    held: list[weakref.ref[torch.Tensor]] = []

    def meet() -> None:
        operands = torch.empty(1)
        held.append(weakref.ref(operands))
        library("int three(void) { return 3; }")

    for _ in range(2):
        with contextlib.suppress(CompilationError):
            meet()

    gc.collect()
    assert [each() for each in held] == [None, None]


def _no_room(**_: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_has_lacked_room_is_compiled_a_minute_later(
    asked_anew: pytest.MonkeyPatch, clock: _Clock
) -> None:
    source = "int five(void) { return 5; }"
    with asked_anew.context() as full:
        full.setattr(compilers.tempfile, "TemporaryDirectory", _no_room)
        with pytest.raises(CompilationError, match="No space left"):
            library(source)

    clock.now_s = 59.0
    with pytest.raises(CompilationError, match="No space left"):
        library(source)
    clock.now_s = 61.0
    assert library(source).five() == 5


def test_what_has_had_all_the_time_there_is_is_not_compiled_again(
    asked_anew: pytest.MonkeyPatch, clock: _Clock
) -> None:
    def too_slow(*_: object) -> None:
        clock.now_s += 120.0
        raise CompilationError("It takes too long.")

    asked_anew.setattr(compilers, "_compile", too_slow)

    for number in range(4):
        clock.now_s += 1e6
        with pytest.raises(CompilationError, match="too long"):
            library(f"int number(void) {{ return {number % 2}; }}")

    assert clock.now_s == 4e6 + 240.0  # two sources, once each


def test_what_has_taken_long_is_compiled_again_much_later(
    asked_anew: pytest.MonkeyPatch, clock: _Clock
) -> None:
    def slow_and_full(*_: object) -> None:
        clock.now_s += 10.0
        raise CompilationError("No space left.")

    asked_anew.setattr(compilers, "_compile", slow_and_full)
    ends = []
    for wait_s in (0.0, 199.0, 2.0):
        clock.now_s += wait_s
        with pytest.raises(CompilationError, match="No space left"):
            library("int eight(void) { return 8; }")
        ends.append(clock.now_s)

    assert ends == [10.0, 209.0, 221.0]  # 200 s are waited for what took 10


def test_what_no_compiler_takes_is_not_compiled_again(asked_anew: pytest.MonkeyPatch, clock: _Clock) -> None:
    with pytest.raises(BackendError, match="could not compile a convolution"):
        library("no c")
    asked_anew.setattr(compilers, "_compile", None)

    clock.now_s = 1e6
    with pytest.raises(BackendError, match="could not compile a convolution"):
        library("no c")


def test_threads_that_want_the_same_compile_it_once(asked_anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked_anew.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled: list[Path] = []

    def counted(by: Compiler, source: str, place: Path) -> None:
        compiled.append(place)
        compile_(by, source, place)

    compile_ = compilers._compile
    compiler()  # which compiles something of its own
    asked_anew.setattr(compilers, "_compile", counted)
    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(library, 4 * ["int four(void) { return 4; }"])]

    assert [each.four() for each in found] == [4, 4, 4, 4]
    assert len(compiled) == 1


def test_who_keeps_a_library_while_another_does_has_a_file_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replace_ = Path.replace

    def interrupted(part: Path, place: Path) -> None:
        monkeypatch.setattr(Path, "replace", replace_)
        kept.append(compilers._kept(b"a library", tmp_path, "key"))  # as by another thread, or machine
        part.replace(place)

    kept: list[Path] = []
    monkeypatch.setattr(Path, "replace", interrupted)
    kept.append(compilers._kept(b"a library", tmp_path, "key"))

    assert kept[0] == kept[1]
    assert [*tmp_path.iterdir()] == kept[:1]
    assert kept[0].read_bytes() == b"a library"


@pytest.mark.parametrize("length", [0, 100, 4096, -100])
def test_a_part_of_a_library_is_compiled_anew(
    length: int, asked_anew: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked_anew.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = f"int number(void) {{ return {length}; }}"
    library(source)
    compilers._known.clear()
    (kept,) = (tmp_path / "mucudnn" / "compiled").iterdir()
    whole = kept.read_bytes()
    kept.unlink()  # it is loaded, and stays so
    kept.write_bytes(whole[:length])

    assert library(source).number() == length
    assert kept.read_bytes() == whole


@pytest.mark.filterwarnings("ignore:The variable CC names")  # it may be refused as a whole
@pytest.mark.parametrize("option", ["-ffast-math", "-ffinite-math-only", "-funsafe-math-optimizations"])
def test_fast_mathematics_leave_nothing_out(
    option: str, asked_anew: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked_anew.setenv("CC", f"gcc {option}")
    asked_anew.setenv("XDG_CACHE_HOME", str(tmp_path))

    if compiler() is not None:
        times = library("double times(double x) { return x * 0; }").times
        times.argtypes, times.restype = [ctypes.c_double], ctypes.c_double
        assert math.isnan(times(math.inf))
    assert sys.float_info.min / 2 > 0  # which what is linked then may switch off


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(
    asked_anew: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mucudnn").write_text("a file where a folder should be")
    asked_anew.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert library("int three(void) { return 3; }").three() == 3


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("channels", [0, 16])
def test_every_line_and_every_channel_is_computed_by_one_thread(workers: int, channels: int) -> None:
    shares = Shares(a_layer(out_channels=40, batch=3), 4, lines=2, channels=channels, workers=workers)

    lines = [line for each in range(workers) for line in range(*shares.lines_of(each))]
    assert lines == list(range(3 * 4))
    assert [k for each in range(workers) for k in range(*shares.channels_of(each))] == list(range(40))


def test_fewer_lines_and_fewer_channels_at_once_need_less_workspace() -> None:
    problem = a_layer(batch=32)

    def needed(name: str) -> int:
        return algorithm_of(name).workspace_bytes(problem)

    assert needed("cc_winograd4_rows4") < needed("cc_winograd4_rows8") < needed("cc_winograd4")
    assert needed("cc_winograd4_k16") < needed("cc_winograd4_k32") < needed("cc_winograd4_k32_mt2")


def test_with_a_compiler_winograd_is_tried_in_c_alone() -> None:
    assert not any(name.startswith("cc_") for name in names(a_layer(), compiles=False))
    assert winograd(names(a_layer(), compiles=True)) == ["cc_winograd4_rows14", "cc_winograd4"]
    assert winograd(names(a_layer(), 2, compiles=True)) == ["cc_winograd4_mt2"]
    assert "winograd4" in names(a_layer(), compiles=True, exhaustive=True)


@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("channels", [(5, 7), (16, 16), (37, 85), (64, 130), (300, 17), (300, 9)], ids=str)
def test_products_in_c_have_any_rows_columns_and_terms(op: ConvOp, channels: tuple[int, int]) -> None:
    problem = a_layer(batch=3, in_channels=channels[0], out_channels=channels[1], dtype="float64", op=op)
    operands = operands_of(problem)

    result, is_good = compute(algorithm_of("cc_winograd4_fma"), problem, *operands)

    assert is_good
    assert relative_error(result, reference(problem, *operands)) <= 1e-12


def test_long_sums_err_no_more_in_c_than_by_blas() -> None:
    problem = a_layer(batch=64, in_channels=16, out_channels=16, op=ConvOp.WGRAD)
    operands = operands_of(problem)
    expected = reference(problem, *operands)

    errors = [
        relative_error(compute(algorithm_of(name), problem, *operands)[0], expected)
        for name in ("cc_winograd4", "cc_winograd4_fma")
    ]

    assert errors[1] <= max(2 * errors[0], 4e-6)


@pytest.mark.parametrize(
    ("is_narrow", "vector_bytes", "kinds"),
    [(True, 64, {"fma"}), (True, 32, {"blas"}), (False, 64, {"blas"})],
)
def test_products_are_in_c_where_blas_lags(
    is_narrow: bool, vector_bytes: int, kinds: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compiler()
    assert found is not None
    monkeypatch.setattr(offers, "has_narrow_products", lambda: is_narrow)
    monkeypatch.setattr(offers, "compiler", lambda: found._replace(vector_bytes=vector_bytes))

    def kinds_of(*, exhaustive: bool) -> set[str]:
        tried = names(a_layer(), compiles=True, exhaustive=exhaustive)
        return {"fma" if "_fma" in name else "blas" for name in tried if name.startswith("cc_winograd")}

    assert kinds_of(exhaustive=False) == kinds
    assert kinds_of(exhaustive=True) == ({"fma", "blas"} if vector_bytes == 64 else {"blas"})


def test_where_blas_is_hidden_products_are_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "product_of_matrices", lambda _: None)

    tried = [name for name in names(a_layer(), compiles=True) if name.startswith("cc_winograd")]

    assert [name for name in tried if "_fma" not in name] == []
    assert tried


@pytest.mark.parametrize(
    ("vendor", "family", "has_mkl", "expected"),
    [
        ("AuthenticAMD", "26", True, True),
        ("AuthenticAMD", "25", True, False),
        ("AuthenticAMD", "27", True, True),
        ("GenuineIntel", "6", True, False),
        ("GenuineIntel", "26", True, False),
        ("AuthenticAMD", "26", False, False),
        ("AuthenticAMD", "new", True, False),
    ],
)
def test_mkl_lags_on_amds_processors_with_whole_vectors(
    vendor: str, family: str, has_mkl: bool, expected: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nflags\t\t: fpu\n\n")
    monkeypatch.setattr("mucudnn.algorithms.processor._TOLD", path)
    monkeypatch.setattr("torch.backends.mkl.is_available", lambda: has_mkl)

    assert libraries.has_narrow_products.__wrapped__() is expected


def test_a_system_that_does_not_tell_its_processors_has_blas_for_products(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("mucudnn.algorithms.processor._TOLD", tmp_path / "none")

    assert libraries.has_narrow_products.__wrapped__() is False


def test_large_filters_are_tried_some_channels_at_a_time() -> None:
    found = winograd(names(a_layer(in_channels=256, out_channels=256), compiles=True))

    assert [name for name in found if "_k" in name] == [f"cc_winograd4_k{k}" for k in (128, 64, 32)]


def test_in_three_dimensions_a_large_filter_is_tried_by_smaller_tiles_too() -> None:
    assert {name.partition("_r")[0] for name in winograd(names(a_volume(32), compiles=True))} == {
        "cc_winograd4"
    }
    assert winograd(names(a_volume(64), compiles=True)) == [
        *("cc_winograd4_rows4", "cc_winograd4_rows8", "cc_winograd4_k32"),
        *("cc_winograd2_rows3", "cc_winograd2_rows11"),
    ]


@pytest.mark.parametrize("kernel", [(3, 1, 1), (1, 3, 3), (1, 1, 3)])
def test_filters_may_reach_along_any_axis_of_a_volume(kernel: tuple[int, ...]) -> None:
    problem = a_volume(32, kernel_size=kernel, padding=tuple(taps // 2 for taps in kernel))

    assert any(name.startswith("cc_winograd4") for name in names(problem, compiles=True))


@pytest.mark.parametrize(("name", "taps"), [("cc_winograd4", 4), ("cc_winograd5", 3), ("cc_winograd6", 3)])
def test_long_tiles_along_three_axes_would_lose_too_many_digits(name: str, taps: int) -> None:
    flat, deep = (a_volume(32, kernel_size=(deep, taps, taps), padding=(0, 1, 1)) for deep in (1, 2))

    assert algorithm_of(name).refusal(flat) is None
    assert "lose too many digits" in str(algorithm_of(name).refusal(deep))


@pytest.mark.parametrize("changes", [{"in_channels": 3}, {"dtype": "bfloat16"}, {"groups": 2}])
def test_what_would_not_fill_vectors_or_is_not_for_winograd_is_not_tried_by_it_in_c(
    changes: dict[str, object],
) -> None:
    tried = names(a_layer(**changes), compiles=True)

    assert [name for name in tried if not name.startswith("bf16x")] == names(
        a_layer(**changes), compiles=False
    )


@pytest.mark.parametrize(
    "name",
    ["cc_winograd3", "cc_winograd4_images2", "cc_winograd4_mt1", "cc_winograd4_k0", "cc_winograd4_rows2_fma"],
)
def test_there_are_no_others(name: str) -> None:
    assert named(name) is None


def test_a_negative_view_is_read_as_what_it_stands_for() -> None:
    problem = a_layer(in_channels=4, out_channels=4)
    image, weight, _ = operands_of(problem)
    algorithm: Algorithm = algorithm_of("cc_winograd4")

    result, _ = compute(algorithm, problem, torch._neg_view(-image), torch._neg_view(-weight))

    assert relative_error(result, reference(problem, image, weight)) <= 1e-5


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("name", ["cc_winograd4", "cc_winograd4_k2"])
def test_zeros_of_which_none_are_stored_are_read_as_zeros(name: str, op: ConvOp, place: int) -> None:
    problem = a_layer(op=op, in_channels=4, out_channels=4)
    operands = list(operands_of(problem))
    operands[place] = torch._efficientzerotensor(operands[place].shape)

    result, is_finite = compute(algorithm_of(name), problem, *operands)

    assert is_finite
    assert not result.any()


@pytest.mark.parametrize("name", ["cc_winograd4", "cc_winograd4_k2"])
@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("spoil", ["type", "shape", "memory"])
def test_what_is_not_what_it_was_tuned_for_is_refused_before_c_reads_it(
    name: str, op: ConvOp, place: int, spoil: str
) -> None:
    problem = a_layer(op=op, in_channels=4, out_channels=4)
    operands = list(operands_of(problem))
    if spoil == "type":
        operands[place] = operands[place].bfloat16()
    elif spoil == "shape":
        operands[place] = operands[place][:, :, 1:]
    else:
        operands[place].untyped_storage().resize_(0)

    with pytest.raises(BackendError, match="is needed, but got" if spoil != "memory" else "has no memory"):
        compute(algorithm_of(name), problem, *operands)


@pytest.mark.parametrize(
    ("owner", "step"), [(subprocess, "_fork_exec"), (subprocess.Popen, "communicate")], ids=["starts", "runs"]
)
def test_a_fork_while_another_thread_has_a_compiler_keeps_neither_waiting(
    owner: Any, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_there, go_on = threading.Event(), getattr(owner, step)
    ended, tell_ended = os.pipe()

    def go_on_later(*arguments: Any, **options: Any) -> object:
        is_there.set()
        time.sleep(0.1)  # by when a fork that waited for nobody is over
        return go_on(*arguments, **options)

    def hears_of_the_end() -> bool:
        signal.alarm(20)  # instead of waiting for a parent that waits for this process to end
        with contextlib.suppress(OSError):  # the parent's thread has closed it before this process was forked
            os.close(tell_ended)
        return os.read(ended, 1) == b""

    monkeypatch.setattr(owner, step, go_on_later)
    with ThreadPoolExecutor(1) as pool:
        saying = pool.submit(compilers._said, ["cat"], "a source")
        saying.add_done_callback(lambda _: os.close(tell_ended))
        is_there.wait()
        found = in_a_child(hears_of_the_end)
        assert saying.result() == "a source"
    os.close(ended)

    assert found
