"""Which trial a failure belongs to, and what it says of it."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from mucudnn.errors import BackendError
from mucudnn.profile import Trial

REFUSING = (BackendError, RuntimeError, MemoryError)
"""Errors by which backends, PyTorch and its allocators refuse.

Before a trial is timed all others are faults of our own or of the host, for which no algorithm is to blame.
"""


class TrialError(Exception):
    """A call of a trial has failed."""

    def __init__(self, trial: Trial, failure: Exception) -> None:
        self.trial = trial
        self.failure = failure
        super().__init__(trial, failure)


class LastTrial:
    """Remembers which trial ran last: on a card its failure may show only when the card is waited for."""

    def __init__(self) -> None:
        self._last: Trial | None = None

    def made(self, trial: Trial, make: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """Return the call that `make` makes, remembered as that of `trial`.

        Nothing of it runs yet, so that errors which do not refuse are not its fault.

        Raises:
            TrialError: it cannot be made.
        """
        try:
            return self.remembered(trial, make())
        except REFUSING as failure:
            raise TrialError(trial, failure) from failure

    def remembered(self, trial: Trial, call: Callable[[], None]) -> Callable[[], None]:
        """Return a call that is remembered as that of `trial`."""

        def remembered() -> None:
            self._last = trial
            call()

        return remembered

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Blame the last trial of the block for its failure.

        Raises:
            TrialError: the block has failed, and some trial had run in it.
        """
        self._last = None
        try:
            yield
        except Exception as failure:
            if self._last is None:
                raise
            raise TrialError(self._last, failure) from failure


def is_lack_of_memory(failure: Exception) -> bool:
    """Whether a run failed for a reason that may be gone tomorrow, and so says nothing of the algorithm.

    On a slice of a card (MIG), and wherever NVML refuses, PyTorch's allocator says so by an assertion that
    fails, and does not count it as refused (pytorch#112377, #197312). Only the first line counts: a trace of
    calls may stand below it, which names the allocator of whatever failed.
    """
    text = str(failure).partition("\n")[0].lower()
    is_kind = isinstance(failure, MemoryError | torch.OutOfMemoryError)
    return is_kind or "alloc" in text or "out of memory" in text
