"""How a section runs: in its share of the time, and whatever fails in it is its answer."""

import dataclasses
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from bench.gpu.ground import Ground, is_alive
from bench.gpu.layers import Layer
from bench.gpu.values import Answer
from mucudnn.timing import Clock

Value = TypeVar("Value")
Kind = TypeVar("Kind")

_LAST_LINES = 6

UNFINISHED = "failed: the process ended before the section did."
"""What the file of a section says while it runs, and for ever where its process dies or hangs."""

_WRITING_NS = 5_000_000_000

Keep = Callable[["Result"], None]
"""Keeps what is known of a section so far."""


class Deadline:
    """A moment by which a section should have ended.

    Args:
        seconds: from now.
        clock: nanoseconds of the host.
    """

    def __init__(self, seconds: float, clock: Clock = time.perf_counter_ns) -> None:
        self._clock = clock
        self._end_ns = clock() + round(seconds * 1e9)

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return self._clock() >= self._end_ns

    def shared(self, cases: int) -> "Deadline":
        """Return a deadline for the first of so many cases: after twice its share of what is left.

        Most take less than theirs; and one that takes long must not take all.
        """
        left_s = (self._end_ns - self._clock()) * 1e-9
        return Deadline(left_s * min(2 / cases, 1.0), self._clock)


@dataclasses.dataclass(frozen=True)
class Task:
    """What a section works on.

    Attributes:
        ground: the card.
        layers: by name.
        middling: the layer for questions that one layer answers.
        tiled: layers that tiles compute, by name.
        deadline: after which nothing new is begun.
    """

    ground: Ground
    layers: Mapping[str, Layer]
    middling: Layer
    tiled: Mapping[str, Layer]
    deadline: Deadline


@dataclasses.dataclass(frozen=True)
class Section:
    """Some questions that are answered together.

    Attributes:
        name: of its file.
        about: what it tells, as a title.
        rows: yields records, each as soon as it is known.
        answers: the records, in one line each.
        share: of the time that is there, beside the shares of the others.
    """

    name: str
    about: str
    rows: Callable[[Task], Iterator[object]]
    answers: Callable[[Sequence[object]], Iterable[Answer]]
    share: float


@dataclasses.dataclass(frozen=True)
class Cut:
    """What was left out, because the time was up."""

    what: str


@dataclasses.dataclass(frozen=True)
class Result:
    """What a section has found.

    Attributes:
        section: which.
        rows: the records, up to where it failed if it did.
        answers: in one line each.
        failure: "failed: " and the last lines of the traceback; None if it did not.
        seconds: that it took.
    """

    section: Section
    rows: tuple[object, ...]
    answers: tuple[Answer, ...]
    failure: str | None
    seconds: float


def run_section(
    section: Section, task: Task, clock: Clock = time.perf_counter_ns, keep: Keep | None = None
) -> Result:
    """Return what a section finds; a failure is part of it, and what was found before is kept.

    Args:
        section: that runs.
        task: what it works on.
        clock: nanoseconds of the host.
        keep: is given an unfinished result in the beginning, and what is found so far every five seconds.
    """
    start = clock()
    rows: list[object] = []
    kept = _Kept(section, rows, keep)
    answers: tuple[Answer, ...] = ()
    failure = None
    try:
        with task.ground.current():
            for row in section.rows(task):
                rows.append(row)  # each is kept even if the next one fails
                kept.now_and_then()
    except Exception:  # noqa: BLE001  # whatever it is, it is the answer
        failure = _told()
    try:
        cuts = (Answer(section.about, f"cut short for want of time: {cut.what}") for cut in only(Cut, rows))
        answers = (*cuts, *section.answers(rows))
    except Exception:  # noqa: BLE001  # whatever it is, it is the answer
        failure = failure or _told()
    if failure is not None:
        last = failure.splitlines()[-1].strip()
        answers = (Answer(section.about, f"failed: {last}"), *answers)
    return Result(section, tuple(rows), answers, failure, (clock() - start) * 1e-9)


class _Kept:
    """Has the rows of a running section kept, so that they outlive its process."""

    def __init__(self, section: Section, rows: Sequence[object], keep: Keep | None) -> None:
        self._section = section
        self._rows = rows
        self._keep = keep
        self._start_ns = self._last_ns = time.perf_counter_ns()
        self._write()

    def now_and_then(self) -> None:
        """Have them kept unless that was done a moment ago."""
        if time.perf_counter_ns() - self._last_ns >= _WRITING_NS:
            self._write()

    def _write(self) -> None:
        if self._keep is not None:
            seconds = (time.perf_counter_ns() - self._start_ns) * 1e-9
            told = (Answer(self._section.about, UNFINISHED),)
            self._keep(Result(self._section, tuple(self._rows), told, UNFINISHED, seconds))
        self._last_ns = time.perf_counter_ns()


def attempted(ground: Ground, call: Callable[[], Value], what: str = "") -> tuple[Value | None, str | None]:
    """Return what `call` returns and None, or None and why it failed.

    Args:
        ground: the card.
        call: that may fail.
        what: is attempted, for whoever looks for what broke the card.

    Raises:
        Exception: what the call raises, if the card works no more.
    """
    try:
        return call(), None
    except Exception as failure:
        if is_alive(ground):
            return None, sentence(failure)
        if what:
            raise RuntimeError(f"{what}: {sentence(failure)}") from failure
        raise


def sentence(failure: Exception) -> str:
    """Return the first line of what an exception says."""
    lines = str(failure).strip().splitlines()
    return lines[0] if lines else type(failure).__name__


def only(kind: type[Kind], rows: Iterable[object]) -> list[Kind]:
    """Return the rows of one kind."""
    return [row for row in rows if isinstance(row, kind)]


def _told() -> str:
    lines = traceback.format_exc().rstrip().splitlines()
    return "failed: " + "\n".join(lines[-_LAST_LINES:])
