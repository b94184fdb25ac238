"""Plans made by hand, for tests."""

from bench.by_hand import LIMIT_BYTES, a_plan_for, a_plan_of
from mucudnn.plan import Plan

__all__ = ["LIMIT_BYTES", "MIXED", "a_plan_for", "a_plan_of", "algorithms_of"]


MIXED = {"cpu:aten", "cpu:im2col", "cpu:winograd2", "cpu:cc_winograd4", "cpu:winograd4"}
"""What plans by hand run where filters are 3x3 and of stride 1, among others."""


def algorithms_of(plan: Plan) -> set[str]:
    return {part.algorithm for division in plan.sites.values() for part in division.parts}
