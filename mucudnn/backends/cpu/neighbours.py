"""Who else computes on the processors that this process may use, while it measures."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from mucudnn.backends.cpu.environment import usable_processors

_STAT = Path("/proc/stat")

_BUSY = (1, 2, 3, 6, 7, 8)
"""Fields of a processor's line in which it was not idle: user, nice and system, interrupts, and what other
guests of the host took (steal). Time of guests of its own is in the user's already."""

_LEAST_S = 1.0
"""Seconds that have to be watched: the kernel counts in hundredths."""

_LEAST_SHARE = 0.05
"""Of the processors, which others may take unsaid."""


class ProcessorNeighbours:
    """Watches what others take of the processors.

    A processor that this process leaves idle is theirs: what counts is what they take beyond that.

    Args:
        stat: the kernel's account.
        clock: seconds.
        own: seconds of processors that this process has taken.
    """

    def __init__(
        self,
        stat: Path = _STAT,
        clock: Callable[[], float] = time.monotonic,
        own: Callable[[], float] = time.process_time,
    ) -> None:
        self._stat = stat
        self._clock = clock
        self._own = own
        self._watched_s = self._taken_s = 0.0
        self._threads = 1

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch during the block, in which times are measured."""
        self._threads = torch.get_num_threads()
        start_s, before_s = self._clock(), self._others_s()
        yield
        after_s = self._others_s()
        if before_s is not None and after_s is not None:
            self._watched_s += self._clock() - start_s
            self._taken_s += after_s - before_s

    @property
    def taken(self) -> float | None:
        """How many processors others took on average while they were watched; None after too short a time."""
        return max(self._taken_s / self._watched_s, 0.0) if self._watched_s >= _LEAST_S else None

    def complaint(self) -> str | None:
        """Return what others took, in a sentence, if it may have moved the times."""
        taken, processors = self.taken, len(usable_processors())
        if taken is None or taken <= max(processors - self._threads, 0) + _LEAST_SHARE * processors:
            return None
        threads = f"{self._threads} thread{'s' * (self._threads > 1)}"
        return (
            f"While {threads} measured times, others took {taken:.1f} "
            f"of the {processors} processors that this process may use, so these times may be off."
        )

    def _others_s(self) -> float | None:
        """Return the seconds that others have taken so far; None where the kernel does not tell."""
        try:
            lines = self._stat.read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        fields = [line.split() for line in lines if line.startswith("cpu")]
        usable = {f"cpu{number}" for number in usable_processors()}
        ticks = sum(int(each[place]) for each in fields if each[0] in usable for place in _BUSY)
        return ticks / os.sysconf("SC_CLK_TCK") - self._own()
