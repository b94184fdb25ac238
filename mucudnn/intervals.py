"""Medians with intervals from ranks, and verdicts on timings, paired or not: no distribution is assumed.

Source: Hoefler and Belli, "Scientific Benchmarking of Parallel Computing Systems", SC15, rules 5 to 7.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from enum import StrEnum

CONFIDENCE = 0.95
"""Least probability that an interval covers the true median."""

TOLERANCE = 0.02
"""Relative difference below which two times count as the same."""


class Verdict(StrEnum):
    """What a paired comparison says of the second of two things."""

    FASTER = "FASTER"
    SLOWER = "SLOWER"
    SAME = "SAME"
    AMBIGUOUS = "AMBIGUOUS"


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A median with the interval that covers the true one with a probability of at least 95 %.

    Whoever asks for another confidence has an interval of that.

    Attributes:
        median: the median of the samples, in their unit.
        low: lower end of the interval; minus infinity with fewer samples than have one, 6 for 95 %.
        high: upper end of the interval; infinity likewise.
        samples: how many samples there are.
    """

    median: float
    low: float
    high: float
    samples: int

    @property
    def relative_half_width(self) -> float:
        """The larger distance from the median to an end of the interval, relative to the median."""
        if self.median == 0:
            return 0.0 if self.low == self.high else math.inf
        return max(self.high - self.median, self.median - self.low) / abs(self.median)


def rank_of_lower_end(n: int, confidence: float = CONFIDENCE) -> int:
    """Return k so that the k-th and the (n + 1 - k)-th of n sorted samples enclose the median, k from 1.

    The largest k whose coverage, 1 - 2 P(Binomial(n, 1/2) < k), reaches `confidence`; 0 where no k does,
    which is the case below 6 samples for 95 %, and below 8 for 99 %.
    """
    outside, ways = 0, 1  # of the 2^n sequences: those outside, and those with `successes` successes
    k = 0
    for successes in range(n // 2):
        outside += 2 * ways
        if outside / 2**n > 1 - confidence:
            break
        ways = ways * (n - successes) // (successes + 1)
        k = successes + 1
    return k


FEWEST_SAMPLES = next(n for n in itertools.count(1) if rank_of_lower_end(n))
"""Of which there is an interval of that confidence: 6."""


def median(samples: Sequence[float]) -> float:
    """Return the middle sample, or the mean of the two middle ones.

    Raises:
        ValueError: there is no sample.
    """
    if not samples:
        raise ValueError("A median needs at least one sample, but got none.")
    return float(statistics.median(samples))


def estimate(samples: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Return the median of `samples` with its interval, which has that confidence.

    Raises:
        ValueError: there is no sample.
    """
    ordered = sorted(samples)
    k = rank_of_lower_end(len(ordered), confidence)
    low, high = (ordered[k - 1], ordered[-k]) if k else (-math.inf, math.inf)
    return Estimate(median(ordered), low, high, len(ordered))


def ratio(base: Sequence[float], other: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Return the median of other / base over rounds in which both were timed, with its interval.

    Raises:
        ValueError: the numbers of samples differ, or there is none.
    """
    return estimate([b / a for a, b in zip(base, other, strict=True)], confidence)


def compare(
    base: Sequence[float],
    other: Sequence[float],
    tolerance: float = TOLERANCE,
    confidence: float = CONFIDENCE,
) -> Verdict:
    """Return whether `other` is faster than `base`, from rounds in which both were timed.

    Raises:
        ValueError: the numbers of samples differ, or there is none.
    """
    relative = ratio(base, other, confidence)
    return verdict_of(relative.low, relative.high, tolerance)


def compare_intervals(base: Estimate, other: Estimate, tolerance: float = TOLERANCE) -> Verdict:
    """Return whether `other` is faster than `base`, from intervals of which nothing is paired.

    As `compare`, where the interval of other / base has the ends [l, u] =
    [other.low / base.high, other.high / base.low]; an end that does not exist is 0 or infinity.
    """
    low = other.low / base.high if 0 < base.high < math.inf else 0.0
    high = other.high / base.low if base.low > 0 else math.inf
    return verdict_of(low, high, tolerance)


def verdict_of(low: float, high: float, tolerance: float = TOLERANCE) -> Verdict:
    """Return what the interval of other / base says of the other.

    With [l, u] the interval and d the tolerance: FASTER if u < 1 - d, SLOWER if l > 1 + d, SAME if [l, u]
    lies in [1 - d, 1 + d], else AMBIGUOUS. An AMBIGUOUS gain is no gain.
    """
    if high < 1 - tolerance:
        return Verdict.FASTER
    if low > 1 + tolerance:
        return Verdict.SLOWER
    if 1 - tolerance <= low and high <= 1 + tolerance:
        return Verdict.SAME
    return Verdict.AMBIGUOUS
