"""What was measured of a network in all ways: one line of JSON each."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from bench.cpu.rounds import Rounds
from bench.cpu.step_lines import Tuned
from bench.cpu.way_cases import WAYS, WayCase
from mucudnn.comparing.step_comparison import break_even
from mucudnn.intervals import CONFIDENCE, Estimate, Verdict, compare, estimate, ratio
from mucudnn.problem import OPTIONAL

COPY = "a copy"
"""In proving rounds: one of PyTorch's own once more, in memory of its own."""

OWN, PATCHED = "own", "patched"
"""Of a convolution within its model, unpatched and patched."""


@dataclasses.dataclass(frozen=True)
class Within:
    """A convolution within a model.

    Attributes:
        layout: of images and filters.
        path: the module's.
        runs: what its forward pass runs.
        rounds: of `OWN` and `PATCHED`; spans are of one forward pass of the model.
        claimed: how many times as fast as PyTorch's own the tuner found it; None if it did not compare them.
    """

    layout: str
    path: str
    runs: str
    rounds: Rounds
    claimed: float | None = dataclasses.field(default=None, metadata=OPTIONAL)

    def seconds_of(self, name: str) -> Estimate:
        """Return the median time, with its interval."""
        return estimate(self.rounds.samples_s(name))

    @property
    def speedup(self) -> Estimate:
        """How many times as fast as unpatched it is: the median of the rounds' quotients."""
        return ratio(self.rounds.samples_s(PATCHED), self.rounds.samples_s(OWN))

    @property
    def verdict(self) -> Verdict:
        """What the rounds say of it, patched against unpatched."""
        return compare(self.rounds.samples_s(OWN), self.rounds.samples_s(PATCHED))


@dataclasses.dataclass(frozen=True)
class WayMeasured:
    """What was measured of a network in all ways; ways are named by their texts.

    Attributes:
        case: which.
        shape: of the images, the batch first.
        limit_bytes: of each convolution's workspace.
        tuned: what tuning cost and what came of it, by layout.
        errors: how far results are from float64 on the same weights, relative to the largest: of all scores
            in inference, of the losses of the first two steps in training.
        choosing: rounds of all ways; without patched ones of a layout whose plan patches nothing.
        divided: the fastest of the patched ones in them; None if no plan patches anything.
        proving: fresh rounds of that one and of its unpatched twin, of PyTorch as it comes, of those of
            PyTorch's own that were not told apart from the fastest, and of `COPY`.
        copied: of what that is a copy: the fastest of PyTorch's own in the choosing rounds.
        failed: ways that could not be run, or are wrong, with the reason.
        seconds: that all of it took.
        within: in inference, each patched convolution within its model, run eagerly.
    """

    case: WayCase
    shape: tuple[int, ...]
    limit_bytes: int
    tuned: Mapping[str, Tuned]
    errors: Mapping[str, float]
    choosing: Rounds
    divided: str | None
    proving: Rounds
    copied: str
    failed: Mapping[str, str]
    seconds: float
    within: tuple[Within, ...] = dataclasses.field(default=(), metadata=OPTIONAL)

    @property
    def own(self) -> str:
        """The fastest of PyTorch's own in the proving rounds."""
        able = [way for way in self.proving.spans_ns if way in WAYS and not WAYS[way].is_divided]
        return min(able, key=lambda way: self.seconds_of(way).median)

    def seconds_of(self, way: str) -> Estimate:
        """Return the median time in the proving rounds, with its interval."""
        return estimate(self.proving.samples_s(way))

    def speedup(self, way: str, base: str) -> Estimate:
        """Return the time of a base over that of a way: the median of the proving rounds' quotients."""
        return ratio(self.proving.samples_s(way), self.proving.samples_s(base))

    def verdict(self, way: str) -> Verdict:
        """Return what the rounds say of a way against the fastest of PyTorch's own."""
        return compare(self.proving.samples_s(self.own), self.proving.samples_s(way))

    def break_even(self, way: str) -> Estimate:
        """Return the calls after which tuning of its layout is paid back, against the fastest."""
        before_s, now_s = (self.proving.samples_s(name) for name in (self.own, way))
        return break_even(self.cost(way).seconds, before_s, now_s)

    def cost(self, way: str) -> Tuned:
        """Return what tuning of a way's layout cost."""
        return self.tuned[WAYS[way].layout]


@dataclasses.dataclass(frozen=True)
class WayFailed:
    """A network that could not be measured.

    Attributes:
        case: which.
        reason: in a sentence.
    """

    case: WayCase
    reason: str


def percentile(samples: Sequence[float], share: float) -> Estimate | None:
    """Return the least sample that a share of them is no larger than, with its interval from ranks.

    The l-th and the h-th of n sorted samples enclose the percentile with a probability of 95 % if
    P(B < l) and P(B >= h) are 2.5 % at most, with B binomial of n and the share. None if there is no such h:
    a 95th percentile needs 72 samples, a 99th 368.

    Args:
        samples: in any unit.
        share: between 0 and 1.
    """
    n, outside = len(samples), (1 - CONFIDENCE) / 2
    below = [0.0, *itertools.accumulate(_binomial(n, share, k) for k in range(n))]  # P(B < k)
    low = max((k for k in range(1, n + 1) if below[k] <= outside), default=1)
    high = next((k for k in range(1, n + 1) if 1 - below[k] <= outside), None)
    if high is None:
        return None
    ordered = sorted(samples)
    middle = ordered[math.ceil(share * n) - 1]
    return Estimate(middle, ordered[low - 1], ordered[high - 1], n)


def _binomial(n: int, share: float, k: int) -> float:
    """Return P(B = k)."""
    ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(ways + k * math.log(share) + (n - k) * math.log1p(-share))
