"""Convolution by tiles on a card, of kernels of our own and cuBLAS's batched matrix products.

cuDNN has no fused Winograd on compute capability 9.0: a 3x3 convolution in strict float32 or in float64 is
computed directly there. Here it is Winograd's, and for long filters Fourier's, in the forms that serve the
processor: real matrices, and three real products for a complex one. A micro-batch whose planes fit the
second-level cache (50 MB of an H200) does not wait for memory in between: divisions are made for that.

cuBLAS has a workspace of its own, which PyTorch keeps for each stream that multiplies matrices: it is no part
of this.
"""

from torch import Tensor

from mucudnn.algorithms.base import total_bytes
from mucudnn.algorithms.choice import likely_fourier, smallest
from mucudnn.algorithms.tile_geometry import TileGeometry
from mucudnn.algorithms.tiles import TileAlgorithm
from mucudnn.backends.base import OnSlices, PartKernel, PartSumKernel, SumOnSlices
from mucudnn.backends.cudnn.card import Card
from mucudnn.backends.cudnn.tile_planes import CardSliceKernel, CardSumKernel, Launcher, regions_of
from mucudnn.choices import Search
from mucudnn.problem import ConvProblem

PREFIX = "cuda:"
"""What ids begin with that are neither cuDNN's nor PyTorch's."""

_USUAL_OUTPUTS = 4
"""m of the form F(m, r) that is tried: four have the fewest multiplications that lose a digit at most."""

_WINOGRAD = tuple(TileAlgorithm(outputs=outputs) for outputs in (4, 2, 5, 6))

_FOURIER = tuple(TileAlgorithm(inputs=inputs) for inputs in range(16, 33, 2))
"""With a line of 32 a thread takes up to 213 of its 255 registers in float64."""

_TILINGS = {PREFIX + each.name: each for each in (*_WINOGRAD, *_FOURIER)}
"""All that there are, by their ids."""

_FOURIER_RANGES = ((24, 8), (32, 8))
"""Most t, and images, of which the form with the fewest multiplications is tried: small tiles leave small
filters. The images are always as many, for parts of one form share a filter."""


class Tiles:
    """All tiled algorithms on one card.

    Args:
        card: that compiles and runs the kernels.
    """

    def __init__(self, card: Card) -> None:
        self._card = card
        self._launcher = Launcher(card)

    def candidates(self, problem: ConvProblem, search: Search) -> tuple[str, ...]:
        """Return the ids of the algorithms to try for `problem`.

        Where cuDNN may multiply float32 in TF32, on tensor cores, they are not likely to win, and are tried
        in an exhaustive search alone.
        """
        if search is Search.HEURISTIC and problem.dtype == "float32" and self._card.rules.allow_tf32:
            return ()
        able = smallest([each for each in (*_WINOGRAD, *_FOURIER) if self._computes(problem, each)], problem)
        tried = able
        if search is Search.HEURISTIC:
            winograd = [each for each in able if each.outputs == _USUAL_OUTPUTS]
            tried = [*winograd, *likely_fourier(problem, able, _FOURIER_RANGES)]
        return tuple(PREFIX + each.name for each in tried)

    def computes(self, problem: ConvProblem, algorithm: str) -> bool:
        """Return whether `algorithm` is one of these and computes `problem` here and now."""
        tiling = _TILINGS.get(algorithm)
        return tiling is not None and self._computes(problem, tiling)

    def _computes(self, problem: ConvProblem, tiling: TileAlgorithm) -> bool:
        return (
            len(problem.kernel_size) < 3
            and tiling.refusal(problem) is None
            and self._card.may_multiply(problem.dtype)
            and self._can_compile
        )

    def workspace_bytes(self, problem: ConvProblem, algorithm: str) -> int:
        """Return the bytes of buffer that a kernel for this micro-batch needs."""
        return total_bytes(regions_of(_geometry(problem, algorithm)))

    def slice_kernel(self, problem: ConvProblem, algorithm: str, buffer: Tensor) -> PartKernel:
        """Return a kernel for fprop or dgrad of this micro-batch."""
        return OnSlices(CardSliceKernel(_geometry(problem, algorithm), self._launcher, buffer))

    def sum_kernel(self, problem: ConvProblem, algorithm: str, buffer: Tensor) -> PartSumKernel:
        """Return a kernel for wgrad of this micro-batch."""
        return SumOnSlices(CardSumKernel(_geometry(problem, algorithm), self._launcher, buffer))

    @property
    def _can_compile(self) -> bool:
        with self._card.current():
            return self._card.can_compile


def is_id(algorithm: str) -> bool:
    """Return whether an id is that of an algorithm of this module."""
    return algorithm in _TILINGS


def _geometry(problem: ConvProblem, algorithm: str) -> TileGeometry:
    tiling = _TILINGS.get(algorithm)
    if tiling is None:
        raise ValueError(f"{algorithm!r} must be one of {', '.join(_TILINGS)}.")
    return TileGeometry(tiling, problem)
