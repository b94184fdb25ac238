"""What an algorithm's number of multiplications allows: the bound of its rate, over its name.

The direct algorithm of a problem takes n·k·p·q·(c/groups)·r·s multiplications. One that takes fewer may reach
a rate of nominal operations above that of matrix products: at most by the quotient of the two numbers.
"""

import math
import re
from collections.abc import Sequence
from fractions import Fraction

from mucudnn.problem import ConvOp, ConvProblem

_NAME = re.compile(
    r"cpu:(?P<compiled>cc_)?(?P<family>winograd|fft|im2col|gemm|aten)(?P<size>\d*)(_(images|slices|rows|k|c|mt)\d+)*"
)
"""What follows the size says how the work is cut (`_rows4`, `_k128`, `_c64`, `_mt2`), not how much there is.

`gemm` and `im2col` are products of matrices as large as the direct algorithm's work. `onednn_*` has no bound:
oneDNN chooses its algorithm itself.
"""

_PART = re.compile(r"(?P<algorithm>.+)@(?P<batch>\d+)\*(?P<count>\d+)")

_PLANE = 2
"""Dimensions that tiles of torch's operations have at most; taps along a third one are added up directly."""

_SPACE = 3
"""The same in C."""

_PRODUCTS = 3
"""Real multiplications of a product of two complex numbers, at least."""


def saving(problem: ConvProblem, key: str) -> Fraction | None:
    """Return the multiplications of the direct algorithm over those of a division.

    Args:
        problem: of the whole mini-batch.
        key: of the division, such as "cpu:winograd4@8*2".

    Returns:
        At most as many times the rate of matrix products can the division reach, in operations of the direct
        algorithm; None where it has an algorithm of which that is not known.
    """
    counts = []
    for part in key.split("+"):
        found = _PART.fullmatch(part)
        if found is None:
            return None
        factor = algorithm_saving(problem, found["algorithm"])
        if factor is None:
            return None
        counts.append(int(found["batch"]) * int(found["count"]) / factor)
    return problem.batch / sum(counts, Fraction(0))


def algorithm_saving(problem: ConvProblem, algorithm: str) -> Fraction | None:
    """Return the multiplications of the direct algorithm over those of `algorithm`; None if unknown."""
    found = _NAME.fullmatch(algorithm)
    if found is None or (found["family"] in ("winograd", "fft")) is not bool(found["size"]):
        return None
    if found["family"] == "winograd":
        return _winograd(_axes(problem, _SPACE if found["compiled"] else _PLANE), int(found["size"]))
    if found["family"] == "fft":
        return _fft(_axes(problem, _PLANE), int(found["size"]))
    return Fraction(1)


def _axes(problem: ConvProblem, most: int) -> list[tuple[int, int]]:
    """Return (outputs, taps) along the last axes, which tiles cut; dgrad's outputs are the pixels of dx."""
    outputs = problem.input_size if problem.op is ConvOp.DGRAD else problem.output_size
    return list(zip(outputs, problem.kernel_size, strict=True))[-most:]


def _winograd(axes: Sequence[tuple[int, int]], outputs: int) -> Fraction:
    """F(m, r) along each axis: m + r - 1 multiplications for m outputs, the last tile whole."""
    factors = [
        Fraction(pixels * taps, _tiles(pixels, outputs) * (outputs + taps - 1)) if taps > 1 else Fraction(1)
        for pixels, taps in axes
    ]
    return math.prod(factors, start=Fraction(1))


def _fft(every: Sequence[tuple[int, int]], length: int) -> Fraction | None:
    """Tiles of t x t values whose spectra have t(t/2 + 1) complex numbers, as they are of real values."""
    axes = [(pixels, taps) for pixels, taps in every if taps > 1]
    if not axes or any(taps > length for _, taps in axes):
        return None
    numbers = length ** (len(axes) - 1) * (length // 2 + 1)
    tiles = math.prod(_tiles(pixels, length - taps + 1) for pixels, taps in axes)
    return Fraction(_direct(axes), _PRODUCTS * numbers * tiles)


def _direct(axes: Sequence[tuple[int, int]]) -> int:
    return math.prod(pixels * taps for pixels, taps in axes)


def _tiles(pixels: int, outputs: int) -> int:
    return -(-pixels // outputs)
