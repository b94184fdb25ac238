"""How far two models that should be equal are from one another."""

import dataclasses


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
