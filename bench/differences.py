"""How far two models that should be equal are from one another."""

import dataclasses
import math
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Differences:
    """Largest differences between two models after the same step, relative to the largest value.

    Attributes:
        outputs: of the scores.
        gradients: of the parameter whose gradient differs most.
        statistics: of the batch-norm buffer that differs most.
    """

    outputs: float
    gradients: float
    statistics: float


def largest(distances: Iterable[float]) -> float:
    """Return the largest distance; infinity if one is no number, which `max` may pass over."""
    return max((each if math.isfinite(each) else math.inf for each in distances), default=0.0)
