"""Timing training steps in the same rounds."""

import math
from collections.abc import Mapping

from bench.cpu.rounds import Rounds
from bench.cpu.step_models import ReadingStep
from mucudnn.backends.base import Neighbours
from mucudnn.timing import SamplingRule

STEPS = SamplingRule(looks=(15, 20, 30), precision=0.01, warmups=1)
"""Of whole steps, which take seconds: with 15 rounds the interval leaves out three samples at either end."""


def timed(steps: Mapping[str, ReadingStep], neighbours: Neighbours) -> Rounds:
    """Return the times of steps, by their names, in the same rounds; each goes on training as it is timed.

    Raises:
        ValueError: a loss is no number or infinite in the end.
    """
    rounds = Rounds.timed(steps, STEPS, neighbours)
    for name, step in steps.items():
        if not math.isfinite(step.loss):
            raise ValueError(f"The loss of the {name} model must be finite, but got {step.loss}.")
    return rounds
