"""How rounding errors grow where very many terms are added up."""

import math

from mucudnn.problem import ConvProblem

_MANY_TERMS = 2**14
"""Terms of a sum from which its rounding error is allowed to grow, as their square root."""


def rounding_growth(problem: ConvProblem) -> float:
    """Return by how much more than a sum of few terms the results of a problem may err: at least 1."""
    return max(1.0, math.sqrt(problem.terms / _MANY_TERMS))
