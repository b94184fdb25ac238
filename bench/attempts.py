"""Whether processes have ended at one place of some work, by a crash, a hang or a broken device."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MOST = 2
"""Processes that may end at the same place."""


class _Mark(NamedTuple):
    """What a file says of a piece of work that was begun.

    Attributes:
        number: of processes that have begun at that place.
        known: how much was known when the last one began; None if the work is given up.
    """

    number: int
    known: int | None


class Attempts:
    """Attempts at one piece of work, which leave a mark while they last.

    Whoever finds the mark of another one follows a process that has ended in it, without a word. If more is
    known by now than when that one began, it got further, and the place where it ended is another one.

    Attributes:
        path: of the file that is the mark.

    Args:
        path: of that file.
        orderly: exceptions that end an attempt without anything wrong; an interrupt does likewise.
    """

    def __init__(self, path: Path, orderly: tuple[type[BaseException], ...] = ()) -> None:
        self.path = path
        self._orderly: tuple[type[BaseException], ...] = (*orderly, KeyboardInterrupt)

    def give_up_if_vain(self, known: int) -> bool:
        """Give the work up if several processes have ended where so much is known; tell whether it is."""
        mark = self._mark()
        if mark is None or mark.number < _MOST or mark.known not in (known, None):
            return False
        self._write(_Mark(mark.number, None))  # whatever other work adds to what is known
        return True

    @contextlib.contextmanager
    def another(self, known: int) -> Iterator[None]:
        """Leave a mark unless the block comes to its end; an orderly exception leaves what was there."""
        former = self._mark()
        is_stuck = former is not None and former.known == known
        self._write(_Mark(former.number + 1 if former is not None and is_stuck else 1, known))
        try:
            yield
        except self._orderly:
            self._write(former)
            raise
        self._write(None)

    def _mark(self) -> _Mark | None:
        if not self.path.exists():
            return None
        try:
            return _Mark(**json.loads(self.path.read_text(encoding="utf-8")))
        except (ValueError, TypeError):  # torn when its process ended
            return _Mark(1, -1)

    def _write(self, mark: _Mark | None) -> None:
        if mark is None:
            self.path.unlink(missing_ok=True)
        else:
            self.path.write_text(json.dumps(mark._asdict()), encoding="utf-8")
