"""Who else computes while times are measured."""

import os
import time
from pathlib import Path

import pytest
import torch

from mucudnn.backends.cpu.backend import CpuBackend
from mucudnn.backends.cpu.environment import usable_processors
from mucudnn.backends.cpu.neighbours import ProcessorNeighbours

HZ = os.sysconf("SC_CLK_TCK")


class Machine:
    """Four processors, of which this process may use the first two; all times in seconds."""

    def __init__(self, folder: Path) -> None:
        self.now = self.own = 0.0
        self.busy = [100.0, 200.0, 300.0, 400.0]
        self._stat = folder / "stat"
        self.slept: list[float] = []
        self.neighbours = ProcessorNeighbours(self._stat, lambda: self.now, lambda: self.own, self._sleep)
        self._write()

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def _write(self) -> None:
        lines = [f"cpu  {self._fields(sum(self.busy))}"]
        lines += [f"cpu{number} {self._fields(busy)}" for number, busy in enumerate(self.busy)]
        self._stat.write_text("\n".join([*lines, "intr 12345", ""]))

    def _fields(self, busy_s: float) -> str:
        """Half of it the user's, half stolen; idle and waiting time, and guests, are nobody's."""
        half = round(busy_s * HZ / 2)
        return f"{half} 0 0 {round(self.now * HZ)} 777777 0 0 {half} 888888 0"

    def measure(self, seconds: float, own: float, others: tuple[float, float] = (0, 0)) -> None:
        """Have so many seconds pass, in which this process and others take so much of the processors."""
        with self.neighbours.watched():
            self.run(seconds, own, others)

    def run(self, seconds: float, own: float, others: tuple[float, float] = (0, 0)) -> None:
        """Have them pass without a watch."""
        self.now += seconds
        self.own += own
        self.busy = [
            self.busy[0] + own + others[0],
            self.busy[1] + others[1],
            *(each + 99 for each in self.busy[2:]),
        ]
        self._write()

    def undisturbed(self, *tries: tuple[float, float]) -> tuple[int, float]:
        """Have so many seconds measured, of which others take so much.

        Return which try counts, from 1, and how many processors they are said to have taken.
        """
        left = iter(enumerate(tries, 1))

        def measure() -> int:
            tried = next(left, None)
            if tried is None:
                pytest.fail("It was measured once more.")
            number, (seconds, others) = tried
            self.run(seconds, own=2 * seconds - others, others=(others, 0))
            return number

        found, others = self.neighbours.undisturbed(measure)
        return found, pytest.approx(others)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    return Machine(tmp_path)


def on(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)


def test_alone_there_is_nothing_to_complain_of(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, 2)
    machine.measure(10, own=20)

    assert machine.neighbours.complaint() is None


def test_what_others_take_of_busy_processors_is_told(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, 2)
    machine.measure(10, own=5, others=(5, 2))

    assert machine.neighbours.complaint() == (
        "While 2 threads measured times, others took 0.7 of the 2 processors that this process may "
        "use, so these times may be off."
    )


@pytest.mark.parametrize(("taken", "complains"), [(10.9, False), (11.1, True)])
def test_a_processor_that_is_left_idle_is_theirs(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, taken: float, complains: bool
) -> None:
    on(monkeypatch, 1)
    machine.measure(10, own=9, others=(taken - 10, 10))

    assert (machine.neighbours.complaint() is not None) == complains


def test_many_short_watches_add_up(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, 2)
    for _ in range(9):
        machine.measure(0.1, own=0.2, others=(0.05, 0))
    before, taken_before = machine.neighbours.complaint(), machine.neighbours.taken
    for _ in range(11):
        machine.measure(0.1, own=0.2, others=(0.05, 0))

    assert before is None  # too short to tell
    assert taken_before is None
    assert "others took 0.5 of the 2" in str(machine.neighbours.complaint())
    assert machine.neighbours.taken == pytest.approx(0.5)


def test_what_nobody_disturbs_is_measured_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, 2)
    machine.measure(100, own=200)

    assert machine.undisturbed((0.4, 0.05)) == (1, 0)
    assert machine.slept == []


def test_what_is_disturbed_is_measured_again_after_a_pause(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, 2)
    machine.measure(100, own=200)

    assert machine.undisturbed((0.4, 0.3), (0.4, 0.2), (0.4, 0.0)) == (3, 0)
    assert machine.slept == [0.5, 0.5]
    assert machine.neighbours.taken == 0  # what was disturbed is not kept, and not complained of


@pytest.mark.parametrize(
    ("threads", "tries", "counts"),
    [
        pytest.param(1, [(0.4, 0.4)], 1, id="the processor that is left idle is theirs"),
        pytest.param(2, [(0.04, 0.02)], 1, id="the kernel's count is too coarse to tell"),
        pytest.param(2, [(0.9, 0.12), (0.2, 0.03)], 2, id="and so for the second, which is shorter"),
    ],
)
def test_what_is_not_seen_to_be_disturbed_counts(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    threads: int,
    tries: list[tuple[float, float]],
    counts: int,
) -> None:
    on(monkeypatch, threads)
    machine.measure(100, own=100)

    assert machine.undisturbed(*tries) == (counts, 0)


def test_what_takes_longer_the_second_time_is_paid_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, 2)
    machine.measure(30, own=60)  # so 6 s may be spent

    machine.undisturbed((0.4, 0.4), (4.0, 4.0), (0.4, 0.4))
    assert len(machine.slept) == 1  # 4.5 s are gone, and 4.5 s more are too many


def test_a_time_is_not_lost_where_it_cannot_be_measured_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, 2)
    machine.measure(100, own=200)
    tries = iter([1, None])

    def measure() -> int:
        number = next(tries)
        if number is None:
            raise MemoryError
        machine.run(0.4, own=0.4, others=(0.4, 0))
        return number

    assert machine.neighbours.undisturbed(measure) == (1, pytest.approx(1.0))
    assert machine.neighbours.taken == pytest.approx(0.4 / 100.4)


def test_patience_ends_and_what_was_disturbed_least_counts(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, 2)
    machine.measure(10, own=20)  # so 2 s may be spent

    assert machine.undisturbed((0.4, 0.4), (0.4, 0.2), (0.4, 0.3)) == (2, 0.5)
    assert machine.slept == [0.5, 0.5]
    assert machine.undisturbed((0.4, 0.4)) == (1, 1.0)  # nothing is left
    assert machine.neighbours.taken == pytest.approx((0.2 + 0.4) / 10.8)


def test_patience_is_never_more_than_ten_seconds(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, 2)
    machine.measure(1000, own=2000)

    machine.undisturbed(*[(2.0, 1.0)] * 10)
    assert len(machine.slept) == 4  # 2.5 s each


def test_who_has_measured_nothing_yet_does_not_wait(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, 2)

    assert machine.undisturbed((0.4, 0.4)) == (1, 1.0)


@pytest.mark.parametrize("before", [[], [1]])
def test_a_failure_passes_through_whenever_it_comes(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, before: list[int]
) -> None:
    on(monkeypatch, 2)
    machine.measure(100, own=200)
    left = iter(before)

    def measure() -> None:
        if next(left, None) is None:
            raise RuntimeError("broken")
        machine.run(0.4, own=0.4, others=(0.4, 0))

    with pytest.raises(RuntimeError, match=r"^broken$"):
        machine.neighbours.undisturbed(measure)


def test_where_the_kernel_does_not_tell_nothing_is_said(tmp_path: Path) -> None:
    clock = iter([0.0, 5.0, 5.0, 10.0])
    silent = ProcessorNeighbours(tmp_path / "none", lambda: next(clock), lambda: 0.0)
    with silent.watched():
        pass
    assert silent.undisturbed(lambda: 7) == (7, 0)

    assert silent.complaint() is None
    assert silent.taken is None


def test_who_counts_more_than_the_kernel_does_leaves_nothing_to_others(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, 2)
    machine.measure(10, own=5, others=(-0.02, 0))  # the kernel counts in hundredths, cut off

    assert machine.neighbours.taken == 0


def test_the_processor_s_are_watched() -> None:
    assert isinstance(CpuBackend().neighbours(), ProcessorNeighbours)


def test_the_kernel_s_own_account_is_read() -> None:
    others, everybody = ProcessorNeighbours(), ProcessorNeighbours(own=lambda: 0.0)
    start, end = time.monotonic(), time.process_time() + 0.3
    all_before, others_before = everybody._others_s(), others._others_s()
    while time.process_time() < end:
        pass
    others_after, all_after = others._others_s(), everybody._others_s()
    wall_s = time.monotonic() - start

    assert None not in (all_before, others_before, others_after, all_after)
    others_s, all_s = others_after - others_before, all_after - all_before
    assert all_s < wall_s * len(usable_processors()) + 1  # of seconds, not of ticks
    assert others_s < all_s - 0.2  # what this process took is not others', however busy they were
