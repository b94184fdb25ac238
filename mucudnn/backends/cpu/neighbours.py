"""Who else computes on the processors that this process may use, while it measures."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from mucudnn.backends.base import Result
from mucudnn.backends.cpu.environment import usable_processors
from mucudnn.backends.failures import is_lack_of_memory
from mucudnn.interruptions import pass_on_interruption

_STAT = Path("/proc/stat")

_BUSY = (1, 2, 3, 6, 7, 8)
"""Fields of a processor's line in which it was not idle: user, nice and system, interrupts, and what other
guests of the host took (steal). Time of guests of its own is in the user's already."""

_LEAST_S = 1.0
"""Seconds that have to be watched: the kernel counts in hundredths."""

_LEAST_SHARE = 0.05
"""Of the processors, which others may take unsaid."""

_TICKS_OFF = 2
"""Hundredths of a second, as the kernel counts, by which a short watch may be off."""

_PATIENCE = 0.2
"""Of the time watched so far, what may be spent on measuring once more what others disturbed."""

_LONGEST_PATIENCE_S = 10.0
"""Seconds after which that ends: a program that starts is over by then, others compute all day."""

_PAUSE_S = 0.5
"""Seconds to wait for others before measuring once more."""


@dataclasses.dataclass
class _Watch:
    """What one watch saw: its seconds, and those of processors that others took, None if unknown."""

    elapsed_s: float = 0.0
    taken_s: float | None = None

    @property
    def taken(self) -> float:
        """How many processors others took; 0 if that is not known."""
        return (self.taken_s or 0.0) / self.elapsed_s if self.elapsed_s else 0.0


class ProcessorNeighbours:
    """Watches what others take of the processors.

    A processor that this process leaves idle is theirs: what counts is what they take beyond that.

    Args:
        stat: the kernel's account.
        clock: seconds.
        own: seconds of processors that this process has taken.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        stat: Path = _STAT,
        clock: Callable[[], float] = time.monotonic,
        own: Callable[[], float] = time.process_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._stat = stat
        self._clock = clock
        self._own = own
        self._sleep = sleep
        self._watched_s = self._taken_s = 0.0
        self._waited_s = 0.0
        self._threads = 1

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch during the block, in which times are measured."""
        with self._watch() as seen:
            yield
        self._count(seen)

    def undisturbed(self, measure: Callable[[], Result]) -> tuple[Result, float]:
        """Return what `measure` returns while others leave it alone, as far as that can be had soon.

        With it comes how many processors they took all the same, 0 if it was not disturbed.

        Whoever takes a core for a while slows one algorithm more than another, whatever the order of the
        rounds. So what others disturbed is measured once more after a pause, and what they disturbed least
        counts, also if memory is lacking the next time. Nothing more is begun when all of that has taken a
        fifth as long as what was watched.

        Raises:
            Exception: whatever `measure` raises, unchanged.
        """
        best, found = self._tried(measure)
        seen = best
        while self._is_disturbed(seen) and self._has_patience(seen.elapsed_s + _PAUSE_S):
            self._sleep(_PAUSE_S)
            try:
                seen, again = self._tried(measure)
            except Exception as failure:
                pass_on_interruption(failure)
                if not is_lack_of_memory(failure):
                    raise
                break
            self._waited_s += seen.elapsed_s + _PAUSE_S
            if seen.taken < best.taken or not self._is_disturbed(seen):
                best, found = seen, again
        self._count(best)
        return found, best.taken if self._is_disturbed(best) else 0.0

    def _has_patience(self, seconds: float) -> bool:
        """Return whether so many seconds more may be spent."""
        most_s = min(_PATIENCE * self._watched_s, _LONGEST_PATIENCE_S)
        return self._waited_s + seconds <= most_s

    def _tried(self, measure: Callable[[], Result]) -> tuple[_Watch, Result]:
        with self._watch() as seen:
            found = measure()
        return seen, found

    @contextlib.contextmanager
    def _watch(self) -> Iterator[_Watch]:
        """Yield what holds, after the block, what was seen during it."""
        self._threads = torch.get_num_threads()
        seen = _Watch()
        start_s, before_s = self._clock(), self._others_s()
        yield seen
        after_s = self._others_s()
        seen.elapsed_s = self._clock() - start_s
        if before_s is not None and after_s is not None:
            seen.taken_s = after_s - before_s

    def _count(self, seen: _Watch) -> None:
        if seen.taken_s is not None:
            self._watched_s += seen.elapsed_s
            self._taken_s += seen.taken_s

    def _is_disturbed(self, seen: _Watch) -> bool:
        noise_s = _TICKS_OFF / os.sysconf("SC_CLK_TCK")
        return seen.taken_s is not None and seen.taken_s > self._allowed * seen.elapsed_s + noise_s

    @property
    def _allowed(self) -> float:
        """How many processors others may take unsaid: those left idle here, and a little more."""
        processors = len(usable_processors())
        return max(processors - self._threads, 0) + _LEAST_SHARE * processors

    @property
    def taken(self) -> float | None:
        """How many processors others took on average while they were watched; None after too short a time."""
        return max(self._taken_s / self._watched_s, 0.0) if self._watched_s >= _LEAST_S else None

    def complaint(self) -> str | None:
        """Return what others took, in a sentence, if it may have moved the times."""
        taken, processors = self.taken, len(usable_processors())
        if taken is None or taken <= self._allowed:
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
        except OSError as error:
            pass_on_interruption(error)
            return None
        fields = [line.split() for line in lines if line.startswith("cpu")]
        usable = {f"cpu{number}" for number in usable_processors()}
        ticks = sum(int(each[place]) for each in fields if each[0] in usable for place in _BUSY)
        return ticks / os.sysconf("SC_CLK_TCK") - self._own()
