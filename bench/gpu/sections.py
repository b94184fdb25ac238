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


@dataclasses.dataclass(frozen=True)
class Task:
    """What a section works on.

    Attributes:
        ground: the card.
        layers: by name.
        middling: the layer for questions that one layer answers.
        deadline: after which nothing new is begun.
    """

    ground: Ground
    layers: Mapping[str, Layer]
    middling: Layer
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


def run_section(section: Section, task: Task, clock: Clock = time.perf_counter_ns) -> Result:
    """Return what a section finds; a failure is part of it, and what was found before is kept."""
    start = clock()
    rows: list[object] = []
    answers: tuple[Answer, ...] = ()
    failure = None
    try:
        with task.ground.current():
            for row in section.rows(task):
                rows.append(row)  # noqa: PERF402  # each is kept even if the next one fails
    except Exception:  # noqa: BLE001  # whatever it is, it is the answer
        failure = _told()
    try:
        answers = tuple(section.answers(rows))
    except Exception:  # noqa: BLE001  # whatever it is, it is the answer
        failure = failure or _told()
    if failure is not None:
        last = failure.splitlines()[-1].strip()
        answers = (Answer(section.about, f"failed: {last}"), *answers)
    return Result(section, tuple(rows), answers, failure, (clock() - start) * 1e-9)


def attempted(ground: Ground, call: Callable[[], Value]) -> tuple[Value | None, str | None]:
    """Return what `call` returns and None, or None and why it failed.

    Raises:
        Exception: what the call raises, if the card works no more.
    """
    try:
        return call(), None
    except Exception as failure:
        if not is_alive(ground):
            raise
        return None, sentence(failure)


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
