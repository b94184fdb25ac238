"""The errors above which what a processor computes is taken for wrong."""

from mucudnn.algorithms import Algorithm
from mucudnn.algorithms.bands import BandAlgorithm
from mucudnn.algorithms.compiled import CompiledTiles
from mucudnn.algorithms.compiled.algorithm import AlgorithmInC
from mucudnn.algorithms.compiled.tiles import taps_of_phases
from mucudnn.algorithms.depthwise import DepthwiseAlgorithm
from mucudnn.algorithms.matrix import MatrixAlgorithm
from mucudnn.algorithms.other_layout import OtherLayoutAlgorithm
from mucudnn.algorithms.tiles import TileAlgorithm
from mucudnn.backends.cpu.environment import fp32_precision
from mucudnn.backends.rounding import rounding_growth
from mucudnn.problem import ConvProblem

ON_OWN = (OtherLayoutAlgorithm, BandAlgorithm)
"""What is PyTorch's own convolution, in the other layout or of some rows."""

_BOUNDS = {"float64": 1e-12, "float32": 1e-6, "float16": 4e-3, "bfloat16": 3e-2}
"""Largest relative error, in the 2-norm, of a sum of few terms."""

_LOST_DIGIT = 10.0
"""Of F(4) to F(6), whose matrices have entries from 1/90 to 8 and more."""

_FOUR_TAPS_FACTOR = 3.0
"""Of F(2) for four taps in a phase, with entries from 1/3 to 8/3; those for three taps have 1/2 and 1.

7x7 and 8x8 of stride 2 erred by 4e-7 to 1.4e-6.
"""

_ROUNDED_ONCE = 4e-3
"""The bound of what is added up in float32 and then rounded to bfloat16: by 2^-8 of a number at most."""

_LOST_BITS = 20.0
"""Of two bfloat16 for a number, which keep 16 of its 24 bits.

A product is off by 3 * 2^-16 of itself at most, but errors of many average out: 3e-6 to 5e-6 is usual, and
2.3e-5 was seen of a result of few numbers, which is refused.
"""

_LONG_CHAIN = 2.0
"""A unit adds up all terms in one chain: of 16,384 and more the bound was exceeded by 5 %."""

_OWN_FACTOR = 4.0
"""PyTorch's own adds up long chains, mostly in weight gradients: 1.7 times the bound seen, in float32."""

_FAST_MATH_BOUND = 3e-2
"""The bound of what PyTorch computes where the user has let float32 convolutions compute in 16 bits."""

_ROUNDED = ("bf16", "tf32")
"""Values of `fp32_precision` that let it."""


def error_bound(problem: ConvProblem, algorithm: Algorithm | None) -> float:
    """Return the relative error against float64, in the 2-norm, above which a result is wrong.

    That of a plain sum, times what an algorithm may lose, and more by the square root of the number of terms
    where very many are added up. What is rounded once to bfloat16, and what PyTorch computes where the user
    lets it round, have bounds of their own.

    Args:
        problem: that is computed.
        algorithm: by which; None for PyTorch's own.
    """
    if problem.dtype == "float32" and _is_rounding(algorithm):
        return _FAST_MATH_BOUND
    if problem.dtype == "bfloat16" and isinstance(algorithm, DepthwiseAlgorithm | MatrixAlgorithm):
        return _ROUNDED_ONCE
    return _BOUNDS[problem.dtype] * rounding_growth(problem) * _factor(problem, algorithm)


def _factor(problem: ConvProblem, algorithm: Algorithm | None) -> float:
    """Return how much more than a plain sum an algorithm may err."""
    match algorithm:
        case _ if isinstance(algorithm, ON_OWN) and problem.itemsize > 2:
            return _OWN_FACTOR
        case MatrixAlgorithm(addends=addends):
            return _LOST_BITS if addends == 2 else _LONG_CHAIN
        case TileAlgorithm(outputs=outputs) | CompiledTiles(outputs=outputs) if outputs >= 4:
            return _LOST_DIGIT
        case CompiledTiles() if max(taps_of_phases(problem)) > 3:
            return _FOUR_TAPS_FACTOR
        case _:
            return 1.0


def may_round() -> bool:
    """Return whether the user lets float32 convolutions be computed with fewer digits."""
    return fp32_precision("conv") in _ROUNDED


def _is_rounding(algorithm: Algorithm | None) -> bool:
    """Return whether PyTorch may round where an algorithm asks it for a convolution, or for products."""
    if not may_round() or isinstance(algorithm, AlgorithmInC):
        return False
    is_own = algorithm is None or isinstance(algorithm, ON_OWN)
    return is_own or fp32_precision("matmul") in _ROUNDED
