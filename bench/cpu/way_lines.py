"""What was measured of a network in all ways: one line of JSON each."""

import dataclasses
import math
from collections.abc import Mapping

from bench.cpu.rounds import Rounds
from bench.cpu.step_lines import Tuned
from bench.cpu.way_cases import WayCase
from bench.payback import break_even
from mucudnn.intervals import Estimate, Verdict, compare, estimate, ratio

_PATCHED = ", patched"
"""How the text of a patched way ends."""


def is_patched(way: str) -> bool:
    """Whether a way is one of a patched model."""
    return way.endswith(_PATCHED)


def unpatched(way: str) -> str:
    """Return the same way of the unpatched model."""
    return way.removesuffix(_PATCHED)


@dataclasses.dataclass(frozen=True)
class WayMeasured:
    """What was measured of a network in all ways; ways are named by their texts.

    Attributes:
        case: which.
        shape: of the images, the batch first.
        limit_bytes: of each convolution's workspace.
        tuned: what tuning cost and what came of it, by layout.
        ready_s: seconds of the first call of each way, which compiles.
        errors: how far results are from float64 on the same weights, relative to the largest: of all scores
            in inference, of the loss of the first step in training.
        choosing: rounds of all ways.
        divided: the fastest of the patched ones in them.
        proving: fresh rounds of that one, of the fastest of PyTorch's own, of PyTorch as it comes, and of the
            first one's unpatched twin; some of these may be the same.
        failed: ways that could not be run, with the reason.
        seconds: that all of it took.
    """

    case: WayCase
    shape: tuple[int, ...]
    limit_bytes: int
    tuned: Mapping[str, Tuned]
    ready_s: Mapping[str, float]
    errors: Mapping[str, float]
    choosing: Rounds
    divided: str
    proving: Rounds
    failed: Mapping[str, str]
    seconds: float

    @property
    def own(self) -> str:
        """The fastest of PyTorch's own in the proving rounds."""
        able = [way for way in self.proving.spans_ns if not is_patched(way)]
        return min(able, key=lambda way: self.seconds_of(way).median)

    def seconds_of(self, way: str) -> Estimate:
        """Return the median time in the proving rounds, with its interval."""
        return estimate(self.proving.samples_s(way))

    def speedup(self, base: str) -> Estimate:
        """Return the time of a way over that of the fastest patched one: the median of the quotients."""
        return ratio(self.proving.samples_s(self.divided), self.proving.samples_s(base))

    @property
    def verdict(self) -> Verdict:
        """What the rounds say of the fastest patched way against the fastest of PyTorch's own."""
        return compare(self.proving.samples_s(self.own), self.proving.samples_s(self.divided))

    @property
    def break_even(self) -> Estimate:
        """Calls after which tuning of that layout is paid back, against the fastest of PyTorch's own."""
        layout = self.divided.partition(",")[0]
        before_s, now_s = (self.proving.samples_s(name) for name in (self.own, self.divided))
        return break_even(self.tuned[layout].seconds, before_s, now_s)


@dataclasses.dataclass(frozen=True)
class WayFailed:
    """A network that could not be measured.

    Attributes:
        case: which.
        reason: in a sentence.
    """

    case: WayCase
    reason: str


LEAST_SAMPLES: Mapping[float, int] = {0.95: 59, 0.99: 299}
"""Samples from which the largest lies above a percentile with a probability of 95 %: 1 - p^n >= 0.95."""


def percentile(samples: list[float], share: float) -> float | None:
    """Return the least sample that so many are no larger than; None if there are too few to tell.

    Args:
        samples: in any unit.
        share: 0.5, or one of `LEAST_SAMPLES`.
    """
    if len(samples) < LEAST_SAMPLES.get(share, 1):
        return None
    return sorted(samples)[math.ceil(share * len(samples)) - 1]
