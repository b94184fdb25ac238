"""Plans made by hand, for tests."""

from bench.by_hand import LIMIT_BYTES, a_plan_for, a_plan_of
from mucudnn.plan import Plan

__all__ = ["LIMIT_BYTES", "a_plan_for", "a_plan_of", "algorithms_of"]


def algorithms_of(plan: Plan) -> set[str]:
    return {part.algorithm for division in plan.sites.values() for part in division.parts}
