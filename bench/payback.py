"""After how many steps tuning has paid for itself. Source: the fourth of Hoefler's twelve ways, its cure."""

import math
from collections.abc import Sequence

from mucudnn.intervals import Estimate, estimate


def break_even(tuning_s: float, before_s: Sequence[float], now_s: Sequence[float]) -> Estimate:
    """Return the steps after which the time saved exceeds that of tuning; infinity where nothing is saved.

    Args:
        tuning_s: seconds that tuning took.
        before_s: seconds of a step before, one for each round.
        now_s: seconds of a step now, from the same rounds.
    """
    saved = estimate([before - now for before, now in zip(before_s, now_s, strict=True)])
    median, low, high = (_steps(tuning_s, each) for each in (saved.median, saved.high, saved.low))
    return Estimate(median, low, high, saved.samples)


def _steps(tuning_s: float, saved_s: float) -> float:
    return tuning_s / saved_s if saved_s > 0 else math.inf
