"""How finished divisions of one problem do against one another: seen in the same rounds, or predicted.

A prediction adds up what is known of the parts. The median of a division is the sum of the medians of its
parts and set-ups; the ends of its interval are the sums of their ends. That interval is wide on purpose: the
times of different parts need not come from the same rounds, so nothing may cancel. What a whole division
takes beyond its parts, because one part finds the cache as the last one left it, is in no part's time; so a
prediction never counts as seen, and says so.
"""

import dataclasses
import math
import statistics
from collections.abc import Collection, Mapping, Sequence

from mucudnn.division import Division
from mucudnn.intervals import Estimate, Verdict, compare, compare_intervals
from mucudnn.profile import Comparison, Measurement, Record
from mucudnn.timing import HOPELESS

_ROUNDS = max(HOPELESS)
"""Rounds of a race after which the hopeless leave it last; only later is there an interval."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What is known of finished divisions of one problem.

    Attributes:
        estimates: seconds of each division that has times, by its key.
        workspaces: bytes that each takes at most, by its key; also of those that are too large to have times.
        comparison: the rounds in which all were timed; None for a prediction.
    """

    estimates: Mapping[str, Estimate]
    workspaces: Mapping[str, int]
    comparison: Comparison | None = None

    @classmethod
    def of(cls, comparison: Comparison) -> "Outcome":
        """Return what `comparison` shows."""
        estimates = {key: times.estimate for key, times in comparison.times.items()}
        return cls(estimates, dict(comparison.workspaces), comparison)

    @property
    def is_predicted(self) -> bool:
        """Whether the times are sums of parts' times, and no whole division was run."""
        return self.comparison is None

    @property
    def others(self) -> float:
        """How many processors others took in the rounds, where that may have moved the times."""
        return 0.0 if self.comparison is None else self.comparison.others

    def verdict(self, base: str, other: str) -> Verdict:
        """Return whether the division with the key `other` is faster than that with the key `base`."""
        if self.comparison is not None:
            times = self.comparison.times
            return compare(times[base].samples_s, times[other].samples_s)
        if base == other:
            return Verdict.SAME
        return compare_intervals(self.estimates[base], self.estimates[other])

    def speedups(self, base: str) -> tuple[tuple[str, Estimate], ...]:
        """Return how many times as fast as the base each other division is, by its key, in their order.

        Nothing where the base has no times, or of a prediction, which has no rounds.
        """
        if self.comparison is None or base not in self.estimates:
            return ()
        others = sorted(key for key in self.estimates if key != base)
        return tuple((key, self.comparison.speedup(base, key)) for key in others)

    def without(self, keys: Collection[str]) -> "Outcome":
        """Return the same without the times of those divisions; their workspaces stay."""
        kept = {key: each for key, each in self.estimates.items() if key not in keys}
        return dataclasses.replace(self, estimates=kept)


def predicted_estimate(division: Division, records: Sequence[Record]) -> Estimate:
    """Return the seconds of `division` as the times of its parts add up.

    Each algorithm pays its set-up once; where records of its parts have several, the median of their medians
    counts, between the outermost of their ends. `samples` is the least number behind any term.

    Args:
        division: the parts.
        records: of the parts, in their order.

    Raises:
        ValueError: a part has no times.
    """
    set_ups: dict[str, list[Estimate]] = {}
    terms = []
    for part, record in zip(division.parts, records, strict=True):
        if record.times is None:
            raise ValueError(f"Every part must have times, but got none of {part.algorithm}@{part.batch}.")
        terms.append(_bounded(record.times))
        if record.setup is not None:
            set_ups.setdefault(part.algorithm, []).append(_bounded(record.setup))
    return _sum([*terms, *map(_hull, set_ups.values())])


def _bounded(measurement: Measurement) -> Estimate:
    """Return the estimate, with a lower end also where there are too few samples for an interval.

    Only an algorithm that left the race early has so few: the fastest of its three samples took more than
    twice as long as the slowest of a rival. Whatever takes less than half of its fastest sample beats it by
    the same rule, so that half is the lower end. A single sample may have been disturbed, and the warm-up
    that decided then is not kept: with fewer than three the lower end is 0.
    """
    estimate = measurement.estimate
    if math.isfinite(estimate.low):
        return estimate
    samples = measurement.samples_s
    return dataclasses.replace(
        estimate, low=0.0 if len(samples) < _ROUNDS else min(samples) / HOPELESS[_ROUNDS]
    )


def _hull(estimates: Sequence[Estimate]) -> Estimate:
    return Estimate(
        statistics.median(each.median for each in estimates),
        min(each.low for each in estimates),
        max(each.high for each in estimates),
        min(each.samples for each in estimates),
    )


def _sum(terms: Sequence[Estimate]) -> Estimate:
    return Estimate(
        math.fsum(each.median for each in terms),
        sum(each.low for each in terms),
        sum(each.high for each in terms),
        min((each.samples for each in terms), default=0),
    )
