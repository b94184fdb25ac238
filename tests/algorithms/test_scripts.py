"""Functions compiled by TorchScript: the same results, without warnings, and as they are where it cannot."""

import dataclasses
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from mucudnn.algorithms import tile_kernels
from mucudnn.algorithms.scripts import Script, called_from_scripts, compile_all
from mucudnn.problem import ConvOp, ConvProblem, Layout
from tests.algorithms.kernels import BLOCKED, algorithm_of, compute
from tests.operands import operands_of

pytestmark = pytest.mark.usefixtures("one_thread")

LOOPS = ("slice_loop", "sum_loop", "grouped_sum_loop", "filter_loop", "finish_loop")
"""What kernels by tiles call, compiled."""

LONG_S = 60
"""What never takes so long has hung."""

RUNS = 4
"""TorchScript records the first run, compiles again for the second, and takes that from then on."""


def one_more(x: Tensor) -> Tensor:
    """Return x + 1."""
    return x + 1


def runs_compiled(x: Tensor) -> bool:
    return torch.jit.is_scripting()


def with_try(x: Tensor) -> Tensor:
    try:
        return x + 1
    except ValueError:
        return x


def with_function(x: Tensor) -> Tensor:
    def inner() -> Tensor:
        return x + 1

    return inner()


def with_any_number(*some: Tensor) -> Tensor:
    return some[0] + 1


def with_a_value_of_numpy(x: Tensor) -> Tensor:
    return x + torch.tensor(np.ones(1, np.float32))


def with_an_unknown_operation(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() + 1)


def with_a_thread(x: Tensor) -> Tensor:
    return x + threading.current_thread().is_alive()


REJECTED: dict[str, Callable[[Tensor], Tensor]] = {
    "a try block": with_try,
    "a function within": with_function,
    "any number of arguments": with_any_number,
    "a value of NumPy": with_a_value_of_numpy,
    "an unknown operation": with_an_unknown_operation,
    "a thread": with_a_thread,
    "no source": eval("lambda x: x + 1"),
}


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The functions that TorchScript is given from here on; it takes its time."""
    given: list[object] = []
    script = torch.jit.script

    def slowly(function: object) -> object:
        given.append(function)
        time.sleep(0.05)
        return script(function)

    monkeypatch.setattr(torch.jit, "script", slowly)
    return given


def test_what_torchscript_knows_runs_compiled() -> None:
    assert Script(runs_compiled)(torch.ones(1))
    assert not runs_compiled(torch.ones(1))


@pytest.mark.parametrize("name", LOOPS)
def test_the_loops_of_tiles_are_compiled(name: str) -> None:
    assert isinstance(getattr(tile_kernels, name).compile(), torch.jit.ScriptFunction)


def test_a_function_keeps_its_name_and_docstring() -> None:
    script = Script(one_more)

    assert script.__name__ == "one_more"
    assert script.__doc__ == "Return x + 1."
    assert script.__wrapped__ is one_more


def test_a_function_is_compiled_once_by_its_first_call(compiling: list[object]) -> None:
    script = Script(one_more)
    assert compiling == []

    for _ in range(3):
        script(torch.ones(1))

    assert compiling == [one_more]


def test_a_function_that_cannot_be_compiled_is_not_tried_again(compiling: list[object]) -> None:
    script = Script(with_a_thread)

    for _ in range(3):
        script(torch.ones(1))

    assert compiling == [with_a_thread]


def test_what_is_compiled_beforehand_is_not_compiled_by_a_call(compiling: list[object]) -> None:
    script = Script(one_more)

    compile_all()
    beforehand = list(compiling)
    script(torch.ones(1))

    assert one_more in beforehand
    assert compiling == beforehand


def test_first_calls_at_the_same_time_compile_once(compiling: list[object]) -> None:
    script, meeting = Script(one_more), threading.Barrier(4)

    def call(number: int) -> Tensor:
        meeting.wait(LONG_S)
        return script(torch.tensor(number))

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(call, range(4)))

    assert [result.item() for result in results] == [1, 2, 3, 4]
    assert compiling == [one_more]


def test_no_warning_reaches_the_user() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        Script(one_more)(torch.ones(1))
        Script(with_a_thread)(torch.ones(1))

    assert [str(each.message) for each in seen] == []


@pytest.mark.parametrize("function", REJECTED.values(), ids=REJECTED)
def test_what_cannot_be_compiled_runs_as_it_is(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.arange(3.0)

    script = Script(function)

    assert script.compile() is function
    assert torch.equal(script(x), x + 1)


@pytest.mark.parametrize("function", [one_more, with_a_thread], ids=["compiled", "as it is"])
def test_an_error_of_a_function_is_raised(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        Script(function)("text")  # type: ignore[arg-type]  # that is the error


EQUAL = (
    *("winograd4", "winograd4_rows1", "winograd4_images1", "winograd4_slices1", "winograd4_k2", "fft16"),
    *("fft16_k2", "winograd4_c2", "winograd4_mt2"),
)
KINDS = [
    pytest.param(name, problem, id=f"{name}-{problem.op}-{layout}-{key}")
    for name in EQUAL
    for key in ("3x3", "5 tile rows", "7x7, large filter", "3x3x3", "chunks of some rows")
    for op in ConvOp
    for layout in Layout
    for problem in [
        dataclasses.replace(
            BLOCKED[key],
            op=op,
            layout=layout,
            filter_layout=layout,
            bias=BLOCKED[key].bias and op is ConvOp.FPROP,
        )
    ]
    if algorithm_of(name).refusal(problem) is None
]


@pytest.mark.parametrize(("name", "problem"), KINDS)
def test_compiled_loops_compute_bit_by_bit_what_python_computes(
    name: str, problem: ConvProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, operands = algorithm_of(name), operands_of(problem)

    compiled = [compute(algorithm, problem, *operands) for _ in range(RUNS)]
    for loop in LOOPS:
        monkeypatch.setattr(tile_kernels, loop, getattr(tile_kernels, loop).__wrapped__)
    expected, is_sound = compute(algorithm, problem, *operands)

    assert is_sound
    assert all(is_good and torch.equal(result, expected) for result, is_good in compiled)


class _OwnError(Exception):
    """Of a function that a script calls."""


@called_from_scripts
def _broken(kind: int) -> None:
    if kind == 0:
        raise KeyboardInterrupt
    if kind == 1:
        raise _OwnError
    if kind == 3:
        sys.exit(7)
    if kind == 4:
        sys.exit()


@Script
def _breaks(kind: int) -> None:
    _broken(kind)


def test_a_user_may_interrupt_what_a_script_calls() -> None:
    with pytest.raises(KeyboardInterrupt):
        _breaks(0)


@pytest.mark.parametrize(("kind", "status"), [(3, 7), (4, None)])
def test_what_a_script_calls_may_end_the_program(kind: int, status: int | None) -> None:
    with pytest.raises(SystemExit) as raised:
        _breaks(kind)

    assert raised.value.code == status


@Script
def _multiplies(x: Tensor, times: int) -> Tensor:
    for _ in range(times):
        x = torch.mm(x, x)
        _broken(2)
    return x


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_handler_of_signals_may_interrupt_a_script_or_end_the_program(error: type[BaseException]) -> None:
    def handler(*_: object) -> None:
        raise error

    _multiplies(torch.zeros(300, 300), 1)
    former = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(error):
            _multiplies(torch.zeros(300, 300), 100_000)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def test_errors_of_what_a_script_calls_name_their_kind() -> None:
    with pytest.raises(RuntimeError, match="_OwnError"):
        _breaks(1)

    _breaks(2)
