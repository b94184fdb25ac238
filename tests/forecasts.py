"""Forecasts made by hand: a library whose plans are scripted, and what a model would ask it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mucudnn.forecast import Forecast, Occurrence, forecast
from mucudnn.plan import ConvSite
from mucudnn.problem import ConvOp, ConvProblem
from tests.examples import a_problem

MIB = 2**20

FPROP, DGRAD, WGRAD = ConvOp


@dataclasses.dataclass(frozen=True)
class ScriptedPlan:
    overwriting_bytes: int
    notes: tuple[str, ...] = ()
    accumulating_bytes: int = 0

    @property
    def workspace_bytes(self) -> int:
        return max(self.overwriting_bytes, self.accumulating_bytes)


Rule = Callable[[ConvProblem], Sequence[ScriptedPlan]]


class ScriptedLister:
    """Plans by a rule; keeps what it was asked for."""

    def __init__(self, rule: Rule) -> None:
        self.asked: list[ConvProblem] = []
        self._rule = rule

    def listed(self, problem: ConvProblem) -> Sequence[ScriptedPlan]:
        self.asked.append(problem)
        return self._rule(problem)


def plans_of(mib_per_sample: int) -> Rule:
    """A first-ranked plan on tensor cores that grows with the batch, and one of 1 KiB that does without."""
    return lambda problem: (
        ScriptedPlan(mib_per_sample * problem.batch * MIB, ("TENSOR_CORE",)),
        ScriptedPlan(1024),
    )


def at_sizes(plans: Mapping[int, Sequence[ScriptedPlan]]) -> Rule:
    """Plans by the size of the micro-batch; none at any other."""
    return lambda problem: plans.get(problem.batch, ())


def occurrence(
    path: str, op: ConvOp = ConvOp.FPROP, *, variant: int = 0, is_transposed: bool = False, **changes: Any
) -> Occurrence:
    """An op of 16 samples in bfloat16."""
    problem = a_problem(**{"op": op, "batch": 16, "dtype": "bfloat16", **changes})
    return Occurrence(ConvSite(path, op, variant), problem, is_transposed)


def forecast_of(occurrences: Sequence[Occurrence], rule: Rule, **options: Any) -> Forecast:
    return forecast(
        occurrences, ScriptedLister(rule), **{"device": "Example 9000", "library": "cuDNN 9.9.9", **options}
    )


def a_layer(path: str, *ops: ConvOp, **changes: Any) -> list[Occurrence]:
    return [occurrence(path, op, **changes) for op in ops or tuple(ConvOp)]


def three_layers() -> Forecast:
    """Two equal layers, of which the first needs no input gradient, and a larger one; 1 MiB per sample."""
    return forecast_of(
        [*a_layer("stem", FPROP, WGRAD), *a_layer("block"), *a_layer("head", FPROP, out_channels=48)],
        plans_of(1),
    )


def a_forecast(rule: Any, occurrences: Sequence[Occurrence] | None = None, **options: Any) -> Forecast:
    return forecast_of(occurrences or a_layer("conv", FPROP), rule, **options)
