"""Spans of calls that were timed in the same rounds."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from mucudnn.problem import OPTIONAL
from mucudnn.timing import Clock, SamplingRule, compare_runs, nothing

if TYPE_CHECKING:
    from mucudnn.backends.base import Neighbours


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Spans of several calls in the same rounds: span i of each comes from round i.

    Attributes:
        calls: how many calls each span holds.
        spans_ns: by the name of the call, such as a division's key.
        others: how many processors others took on average in that time; None if that is not known.
    """

    calls: int
    spans_ns: Mapping[str, tuple[int, ...]]
    others: float | None = dataclasses.field(default=None, metadata=OPTIONAL)

    @classmethod
    def timed(
        cls,
        calls: Mapping[str, Callable[[], None]],
        rule: SamplingRule,
        neighbours: "Neighbours",
        before: Callable[[], None] = nothing,
        clock: Clock = time.perf_counter_ns,
    ) -> "Rounds":
        """Time calls by `compare_runs`; `neighbours`, of these rounds alone, are watched meanwhile."""
        with neighbours.watched():
            times = compare_runs(calls, rule, clock, before=before)
        spans = {name: each.spans_ns for name, each in times.items()}
        return cls(next(iter(times.values())).calls, spans, neighbours.taken)

    def samples_s(self, key: str) -> list[float]:
        """Return seconds per call, one number a round."""
        return [span * 1e-9 / self.calls for span in self.spans_ns[key]]
