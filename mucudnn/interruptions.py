"""Errors that come from outside of whatever runs: from a signal handler of the program.

Python runs handlers between any two instructions. What one raises, as a time limit does, must not be taken
for the failure of what happened to run then.
"""

import functools
import signal
import traceback
from collections.abc import Iterator
from types import CodeType


def is_interruption(error: BaseException) -> bool:
    """Return whether a signal handler of the program raised an error, or what led to it."""
    codes = set(map(_code_of, map(signal.getsignal, signal.valid_signals())))
    frames = (frame for each in _chain(error) for frame, _ in traceback.walk_tb(each.__traceback__))
    return any(frame.f_code in codes for frame in frames)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those in whose wake it was raised."""
    seen: set[int] = set()
    left: BaseException | None = error
    while left is not None and id(left) not in seen:
        seen.add(id(left))
        yield left
        left = left.__cause__ or left.__context__


def _code_of(handler: object) -> CodeType | None:
    """Return what runs when a handler is called; None for the system's, and for what is not in Python."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    for each in (handler, getattr(type(handler), "__call__", None)):  # noqa: B004  # what runs, not whether
        code = getattr(each, "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None
