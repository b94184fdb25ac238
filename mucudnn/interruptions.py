"""Errors that come from outside of whatever runs: from a signal handler of the program.

Python runs handlers between any two instructions. What one raises, as a time limit does, must not be taken
for the failure of what happened to run then, nor be kept as such.
"""

import itertools
import sys
import traceback
from collections.abc import Iterator
from types import FrameType


def pass_on_interruption(error: BaseException) -> None:
    """Raise what a signal handler has raised, if an error is that, or was raised in its wake.

    Raises:
        BaseException: what the handler raised.
    """
    found = interruption_of(error)
    if found is not None:
        raise found


def interruption_of(error: BaseException) -> BaseException | None:
    """Return what a signal handler has raised, be it `error` or what led to it; None if none has."""
    return next(filter(_is_of_a_handler, _chain(error)), None)


def _is_of_a_handler(error: BaseException) -> bool:
    """Return whether a frame is a handler's, of those that an error has left.

    The first is the one that caught it, which goes on: to look at its variables would keep them.
    """
    left = itertools.islice(traceback.walk_tb(error.__traceback__), 1, None)
    return any(_is_handler(frame) for frame, _ in left)


def _is_handler(frame: FrameType) -> bool:
    """Return whether a frame was handed a number and the frame that it interrupts, as handlers are."""
    interrupted = frame.f_back
    if interrupted is None:
        return False
    given: list[object] = []
    for value in frame.f_locals.values():
        given += value if type(value) is tuple else (value,)
    return any(isinstance(number, int) and each is interrupted for number, each in itertools.pairwise(given))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those in whose wake it was raised, without what its callers were handling before."""
    callers, seen = {*_callers(error)}, set[int]()
    left: BaseException | None = error
    while left is not None and id(left) not in seen:
        trace = left.__traceback__
        if left is not error and trace is not None and trace.tb_frame in callers:
            return
        seen.add(id(left))
        yield left
        left = left.__cause__ or left.__context__


def _callers(error: BaseException) -> Iterator[FrameType]:
    """Yield the frames that have called the one in which an error was caught."""
    frame = sys._getframe() if error.__traceback__ is None else error.__traceback__.tb_frame.f_back
    while frame is not None:
        yield frame
        frame = frame.f_back
