"""Spans of calls that were timed in the same rounds."""

import dataclasses
from collections.abc import Mapping

from mucudnn.profile import Measurement


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Spans of several calls in the same rounds: span i of each comes from round i.

    Attributes:
        calls: how many calls each span holds.
        spans_ns: by the name of the call, such as a division's key.
    """

    calls: int
    spans_ns: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, times: Mapping[str, Measurement]) -> "Rounds":
        """Return what `compare_runs` has timed; every span holds the same number of calls."""
        calls = next(iter(times.values())).calls
        return cls(calls, {name: each.spans_ns for name, each in times.items()})

    def samples_s(self, key: str) -> list[float]:
        """Return seconds per call, one number a round."""
        return [span * 1e-9 / self.calls for span in self.spans_ns[key]]
