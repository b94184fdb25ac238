"""What an algorithm's number of multiplications allows: the bound of its rate, over its name.

The direct algorithm of a problem takes n·k·p·q·(c/groups)·r·s multiplications. One that takes fewer may reach
a rate of nominal operations above that of matrix products: at most by the quotient of the two numbers.
"""

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from mucudnn.problem import ConvOp, ConvProblem

_NAME = re.compile(
    r"cpu:(?P<compiled>cc_)?(?P<family>winograd|fft|im2col|gemm|aten)(?P<size>\d*)(_fma)?"
    r"(_(images|slices|rows|k|c|mt)\d+)*"
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


class _Axis(NamedTuple):
    """One axis that tiles cut.

    Attributes:
        outputs: of y or dy.
        pixels: of the image that tiles make: y, but for dgrad dx.
        taps: of the filter.
        stride: of the convolution.
        tile: pixels of that image for each of the m outputs of F(m, r): the stride in dgrad, else 1.
    """

    outputs: int
    pixels: int
    taps: int
    stride: int
    tile: int

    @property
    def direct(self) -> int:
        """Multiplications of the direct algorithm."""
        return self.outputs * self.taps

    def winograd(self, outputs: int) -> int:
        """F(m, r) of each phase of the stride, m + r - 1 of each, the last tile whole."""
        m = outputs if self.taps > self.stride else 1
        return (self.stride * (m - 1) + self.taps) * _tiles(self.pixels, m * self.tile)


def _axes(problem: ConvProblem, most: int) -> list[_Axis]:
    """Return the last axes, which tiles cut."""
    is_dgrad = problem.op is ConvOp.DGRAD
    pixels = problem.input_size if is_dgrad else problem.output_size
    sizes = zip(problem.output_size, pixels, problem.kernel_size, problem.stride, strict=True)
    return [_Axis(*each, each[-1] if is_dgrad else 1) for each in sizes][-most:]


def _winograd(axes: Sequence[_Axis], outputs: int) -> Fraction:
    return math.prod((Fraction(axis.direct, axis.winograd(outputs)) for axis in axes), start=Fraction(1))


def _fft(every: Sequence[_Axis], length: int) -> Fraction | None:
    """Tiles of t x t values whose spectra have t(t/2 + 1) complex numbers, as they are of real values."""
    axes = [axis for axis in every if axis.taps > 1]
    if not axes or any(axis.taps > length for axis in axes):
        return None
    numbers = length ** (len(axes) - 1) * (length // 2 + 1)
    tiles = math.prod(_tiles(axis.pixels, length - axis.taps + 1) for axis in axes)
    return Fraction(math.prod(axis.direct for axis in axes), _PRODUCTS * numbers * tiles)


def _tiles(pixels: int, outputs: int) -> int:
    return -(-pixels // outputs)
