"""Calls run at the same time on threads that nobody else notices: one contract for a team and for a pool."""

import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mucudnn.algorithms.team import team_of_torch
from mucudnn.algorithms.workers import Workers, run_on_workers, worker_scheme
from tests.alone import LONG_S, Server

Run = Callable[[Sequence[Callable[[], Any]]], list[Any]]
RunAlone = Callable[[str, str], str]

SCHEMES = {"team": "Workers(team_of_torch)", "pool": "Workers(lambda: None)"}
"""Workers of each scheme, in words that a program of its own understands."""


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


WORKERS = {"team": Workers(team_of_torch), "pool": Workers(lambda: None)}


@pytest.fixture
def run(scheme: str) -> Run:
    """`run_on_workers` of workers that are of a scheme."""
    assert WORKERS[scheme].scheme == scheme
    return WORKERS[scheme].run


def interrupt(number: int) -> None:
    """Send a signal to the main thread, which is the one that waits for the calls."""
    waiting = threading.main_thread().ident
    assert waiting is not None
    signal.pthread_kill(waiting, number)


@pytest.fixture
def run_alone(alone: Server) -> RunAlone:
    """Run a program in a process of its own, in which workers `run` calls; return what it prints."""

    def run(script: str, workers: str) -> str:
        start = (
            "import os, sys, threading\n"
            "import torch\n"
            "from mucudnn.algorithms.team import team_of_torch\n"
            "from mucudnn.algorithms.workers import Workers, run_on_workers, worker_scheme\n"
            f"run = {workers}.run\n"
        )
        return alone.run(start + script)

    return run


def test_results_come_in_the_order_of_the_calls(run: Run) -> None:
    meeting = threading.Barrier(3)

    def call(number: int) -> int:
        meeting.wait(LONG_S)
        time.sleep(0.01 * (2 - number))  # the first ends last
        return number

    assert run([lambda number=number: call(number) for number in range(3)]) == [0, 1, 2]


def test_calls_run_at_the_same_time(run: Run) -> None:
    meeting = threading.Barrier(4)  # broken if any of the four is missing

    assert sorted(run([lambda: meeting.wait(LONG_S)] * 4)) == [0, 1, 2, 3]


def test_call_i_runs_on_thread_i_every_time(run: Run) -> None:
    first = run([threading.get_native_id] * 3)

    assert len(set(first)) == 3
    assert run([threading.get_native_id] * 3) == first


def test_no_calls_have_no_results(run: Run) -> None:
    assert run([]) == []


def test_nothing_is_started_before_the_first_call(scheme: str, run_alone: RunAlone) -> None:
    script = (
        "count = lambda: len(os.listdir('/proc/self/task'))\n"
        "torch.set_num_threads(2); before = count(); run([]); between = count()\n"
        "run([str] * 2); print(between - before, count() > before)"
    )

    assert run_alone(script, SCHEMES[scheme]) == "0 True"


def test_the_first_exception_in_order_is_raised_when_all_calls_have_ended(run: Run) -> None:
    ended: list[str] = []

    def fail_at_once() -> None:
        raise ValueError("of the second")

    def fail_late() -> None:
        time.sleep(0.05)
        ended.append("late")
        raise KeyError("of the first")

    with pytest.raises(KeyError, match="of the first"):
        run([fail_late, fail_at_once])
    with pytest.raises(ValueError, match="of the second"):
        run([fail_at_once, fail_late])
    assert ended == ["late", "late"]


@pytest.mark.parametrize("failing", [0, 1])
def test_workers_serve_on_after_an_exception(run: Run, failing: int) -> None:
    before = run([threading.get_native_id] * 2)
    calls: list[Callable[[], object]] = [lambda: 1, lambda: 2]
    calls[failing] = lambda: 1 // 0

    with pytest.raises(ZeroDivisionError):
        run(calls)

    assert run([threading.get_native_id] * 2) == before


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("others", [0, 1])
def test_nothing_of_a_call_is_kept_when_it_is_over(run: Run, fails: bool, others: int) -> None:
    gc.disable()
    try:
        held = torch.zeros(3)
        watched = weakref.ref(held)

        def call(tensor: Tensor = held) -> Tensor:
            if fails:
                raise ValueError(f"of {len(tensor)}")
            return tensor

        try:
            run([*[lambda: None] * others, call])
        except ValueError:
            assert fails
        del held, call

        assert watched() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("worker", [0, 1])
def test_calls_of_a_call_run_in_turn_in_its_thread(run: Run, worker: int) -> None:
    def call() -> tuple[int, list[int]]:
        return threading.get_native_id(), run([threading.get_native_id] * 2)

    here, inside = run([call] * 2)[worker]

    assert inside == [here] * 2


def test_an_exception_of_a_call_of_a_call_is_raised_when_all_of_them_have_ended(run: Run) -> None:
    ended: list[str] = []

    with pytest.raises(ZeroDivisionError):
        run([lambda: None, lambda: run([lambda: 1 // 0, lambda: ended.append("second")])])

    assert ended == ["second"]


def test_callers_of_several_threads_are_served_one_after_the_other(run: Run) -> None:
    running: list[int] = []
    results: list[list[int]] = []

    def call(number: int, seconds: float) -> int:
        running.append(number)
        time.sleep(seconds)
        others = set(running) - {number}
        running.remove(number)
        assert not others
        return number

    def caller(number: int) -> None:
        calls = [lambda: call(number, 0.01), lambda: call(number, 0.001)]  # the second worker is soon free
        results.extend(run(calls) for _ in range(5))

    threads = [threading.Thread(target=caller, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)

    assert sorted(results) == [[number] * 2 for number in range(3) for _ in range(5)]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Interrupts are heard, which processes in the background of a shell are started to ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    if before is not None:  # which it is where none of Python's was set
        signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_caller_waits_for_its_calls(run: Run) -> None:
    ended: list[bool] = []

    def call() -> None:
        interrupt(signal.SIGINT)
        time.sleep(0.05)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        run([lambda: time.sleep(0.02), call])

    assert ended == [True]
    assert run([lambda: 1, lambda: 2]) == [1, 2]


def test_a_caller_that_is_interrupted_anywhere_waits_for_its_calls_and_keeps_its_state(
    scheme: str, run_alone: RunAlone
) -> None:
    script = (
        "import signal, time\n"
        "begun, ended, interrupted = [], [], 0\n"
        "def call():\n"
        "    begun.append(1); (torch.ones(1000) + 1).sum(); ended.append(1)\n"
        "signal.signal(signal.SIGALRM, signal.default_int_handler)\n"
        "run([call] * 2)\n"
        "for step in range(400):\n"
        "    is_over = False\n"
        "    try:\n"
        "        signal.setitimer(signal.ITIMER_REAL, 1e-6 * (step + 1))\n"
        "        run([str, call])\n"
        "        is_over = True\n"
        "        time.sleep(0.1)\n"  # until the signal comes
        "    except KeyboardInterrupt:\n"
        "        interrupted += not is_over\n"
        "    assert len(begun) == len(ended)\n"
        "    assert torch.is_grad_enabled() and workers_differ()\n"
        "assert interrupted > 10, interrupted"
    )
    see = "import threading\nworkers_differ = lambda: len({*run([threading.get_native_id] * 2)}) == 2\n"

    assert run_alone(see + script, SCHEMES[scheme]) == ""


def test_a_signal_handler_may_run_calls_while_its_thread_waits(run: Run) -> None:
    results: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: results.extend(run([lambda: 1, lambda: 2])))
    try:
        run([lambda: time.sleep(0.02), lambda: interrupt(signal.SIGUSR1)])
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert results == [1, 2]


def test_a_forked_child_has_a_pool_of_its_own_and_so_has_its_child(run_alone: RunAlone) -> None:
    script = (
        "sums = lambda: [(torch.ones(2) + 1).sum().item(), torch.get_num_threads()]\n"
        "def child():\n"
        "    print(worker_scheme(), run_on_workers([sums] * 2), flush=True)\n"
        "def fork(then):\n"
        "    number = os.fork()\n"
        "    if number == 0:\n"
        "        then()\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(number, 0)[1] == 0\n"
        "torch.set_num_threads(2)\n"
        "torch.ones(2**20).add_(1); child()\n"
        "fork(lambda: (child(), fork(child)))\n"
    )

    told = run_alone(script, SCHEMES["team"]).splitlines()

    assert told == [f"{scheme} [[4.0, 1], [4.0, 1]]" for scheme in ("team", "pool", "pool")]


def test_the_scheme_of_a_call_that_has_a_team_is_a_pool() -> None:
    assert worker_scheme() == "team"
    assert run_on_workers([worker_scheme] * 2) == ["pool"] * 2


NUMBERS = """
def elsewhere(see):
    seen = []
    thread = threading.Thread(target=lambda: seen.append(see()))
    thread.start()
    thread.join()
    return seen[0]

numbers = lambda calls=2: run([torch.get_num_threads] * calls)
"""


def test_a_call_computes_with_one_thread_whatever_the_caller_sets(scheme: str, run_alone: RunAlone) -> None:
    script = (
        "torch.set_num_threads(3); print(numbers(), numbers(1), torch.get_num_threads())\n"
        "torch.set_num_threads(2); print(numbers(3), numbers(1), torch.get_num_threads())"
    )

    told = run_alone(NUMBERS + script, SCHEMES[scheme]).splitlines()

    assert told == ["[1, 1] [1] 3", "[1, 1, 1] [1] 2"]


def test_threads_started_later_compute_with_the_number_of_the_user(scheme: str, run_alone: RunAlone) -> None:
    script = "torch.set_num_threads(3); numbers(); print(elsewhere(torch.get_num_threads))"

    assert run_alone(NUMBERS + script, SCHEMES[scheme]) == "3"


def test_threads_started_later_compute_with_the_default_where_the_user_sets_none(
    scheme: str, run_alone: RunAlone
) -> None:
    script = "before = elsewhere(torch.get_num_threads); numbers()\n"
    script += "print(before == elsewhere(torch.get_num_threads))"

    assert run_alone(NUMBERS + script, SCHEMES[scheme]) == "True"


def test_the_number_of_the_process_is_kept_where_the_callers_own_is_another(
    scheme: str, run_alone: RunAlone
) -> None:
    script = "torch.get_num_threads(); torch.set_num_threads(4)\n"  # it begins before it is set
    script += "elsewhere(lambda: torch.set_num_threads(3)); numbers()\n"
    script += "print(torch.get_num_threads(), elsewhere(torch.get_num_threads))"

    assert run_alone(NUMBERS + script, SCHEMES[scheme]) == "4 3"


def test_a_call_computes_without_gradients_and_its_caller_goes_on_with_them(run: Run) -> None:
    weight = torch.ones(2, requires_grad=True)

    with torch.enable_grad():
        results = run([lambda: weight * 2] * 2)
        assert torch.is_grad_enabled()

    assert [doubled.requires_grad for doubled in results] == [False, False]


def test_a_caller_without_gradients_stays_without(run: Run) -> None:
    with torch.no_grad():
        run([lambda: None] * 2)
        assert not torch.is_grad_enabled()


@pytest.mark.parametrize("mode", [False, True])
def test_a_call_is_in_inference_mode_when_its_caller_is(run: Run, mode: bool) -> None:
    run([lambda: None] * 2)

    with torch.inference_mode(mode):
        assert run([torch.is_inference_mode_enabled] * 2) == [mode] * 2
        assert [made.is_inference() for made in run([lambda: torch.zeros(1)] * 2)] == [mode] * 2

    assert not torch.is_inference_mode_enabled()
    assert run([torch.is_grad_enabled] * 2) == [False] * 2


@pytest.mark.parametrize("made_in", [False, True])
def test_a_call_writes_in_inference_mode_wherever_its_caller_may(run: Run, made_in: bool) -> None:
    with torch.inference_mode(made_in):
        out = torch.zeros(4)

    with torch.inference_mode():
        run([lambda: out[:2].add_(1), lambda: torch.add(out[2:], 2, out=out[2:])])

    assert out.tolist() == [1, 1, 2, 2]


def test_a_call_writes_outside_of_inference_mode_into_what_was_made_there(run: Run) -> None:
    out = torch.zeros(4)

    run([lambda: out[:2].add_(1), lambda: torch.add(out[2:], 2, out=out[2:])])

    assert out.tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize("worker", [0, 1])
def test_what_a_call_writes_counts_as_a_change(run: Run, worker: int) -> None:
    saved = torch.ones(2)
    weight = torch.ones(2, requires_grad=True)
    product = (weight * saved).sum()

    run([*[lambda: None] * worker, lambda: saved.add_(1)])

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_a_call_stays_out_of_autocast_and_its_caller_in_it(run: Run) -> None:
    ones = torch.ones(2, 2)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run([lambda: (ones @ ones).dtype] * 2) == [torch.float32] * 2
        assert (ones @ ones).dtype is torch.bfloat16


def test_a_call_flushes_denormal_numbers_when_its_caller_does(run: Run) -> None:
    smallest = torch.full((1,), 1e-310, dtype=torch.float64)

    def is_flushed() -> bool:
        return (smallest * 1).item() == 0

    try:
        assert torch.set_flush_denormal(True)
        assert run([is_flushed] * 2) == [True] * 2
        torch.set_flush_denormal(False)
        assert run([is_flushed] * 2) == [False] * 2
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("worker", [0, 1])
def test_what_a_call_sets_ends_with_it(run: Run, worker: int) -> None:
    def call() -> None:
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled("cpu", enabled=True)
        torch.set_flush_denormal(True)

    def see() -> tuple[bool, bool, float]:
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), sys.float_info.min / 2

    before = see()
    run([*[lambda: None] * worker, call])

    assert see() == before
    assert run([see] * 2) == [(False, False, before[2])] * 2
