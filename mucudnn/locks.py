"""Locks that a forked child finds free, whichever thread of its parent held them."""

import functools
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakSet

Value = TypeVar("Value")


class ForkSafeLock:
    """A lock that its thread may take again, as a signal handler of it does; copies and pickles are new ones.

    Of the threads of a process only that which forks is there in the child. What another one held would stay
    locked for ever, so the child finds it free. What that thread was about is left as it was. (A thread that
    waits for it already when a signal handler of its own forks waits on in the child.)
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _known.add(self)

    def __reduce__(self) -> tuple[type["ForkSafeLock"], tuple[()]]:
        return ForkSafeLock, ()

    def acquire(self, timeout_s: float = -1) -> bool:
        """Take the lock, and return whether that was possible in so many seconds; -1 waits for ever."""
        return self._lock.acquire(timeout=timeout_s)

    def release(self) -> None:
        """Give it back.

        Raises:
            RuntimeError: this thread has not taken it.
        """
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def free_of_others(self) -> None:
        """Take the lock away from other threads, which are not there any more."""
        if self._lock.acquire(blocking=False):  # nobody's, or this thread's, whose it stays
            self._lock.release()
        else:
            self._lock = threading.RLock()


class cached_property(functools.cached_property[Value]):  # noqa: N801, TID251  # as that one
    """Python's own, that a forked child can compute too, whichever thread of its parent was at it.

    Before Python 3.12 it holds one lock, of all objects, while it computes what one of them has.
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        super().__init__(compute)
        self.lock = ForkSafeLock()


def unforked_lock() -> threading.RLock:
    """Return a lock that whoever forks waits for: what its holder does, no fork cuts in two.

    It is for what is short, and never waits for the thread that forks, nor for another such lock.
    """
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


_known: WeakSet[ForkSafeLock] = WeakSet()


def _free_all() -> None:
    for lock in [*_known]:
        lock.free_of_others()


if hasattr(os, "register_at_fork"):  # where processes fork
    os.register_at_fork(after_in_child=_free_all)
