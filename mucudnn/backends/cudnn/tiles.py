"""Convolution by tiles on a card, of kernels of our own and cuBLAS's batched matrix products.

cuDNN has no fused Winograd on compute capability 9.0: a 3x3 convolution in strict float32 or in float64 is
computed directly there. Here it is Winograd's, and for long filters Fourier's, in the forms that serve the
processor: real matrices, and three real products for a complex one. A micro-batch whose planes fit the
second-level cache need not wait for memory in between; a larger one has larger products. Which is worth more
is for measurements to say.

A weight gradient's products are as large as a filter, whatever the batch: of few channels, too small to keep
a card busy. They are summed over groups of tiles apart, then, and the sums are added up at the end:
`winograd4_sums7` has seven.

A single image may take more than a limit; `winograd4_rows2` computes two tile rows of it at a time.

cuBLAS has a workspace of its own, which PyTorch keeps for each stream that multiplies matrices: it is no part
of this.
"""

import dataclasses
import functools
import math
import re
from typing import NamedTuple

from torch import Tensor

from mucudnn.algorithms.base import total_bytes
from mucudnn.algorithms.choice import likely_fourier, likely_winograd, smallest
from mucudnn.algorithms.tile_geometry import TileGeometry
from mucudnn.algorithms.tiles import TileAlgorithm
from mucudnn.backends.base import OnSlices, PartKernel, PartSumKernel, SumOnSlices
from mucudnn.backends.cudnn.card import Card
from mucudnn.backends.cudnn.tile_planes import CardSliceKernel, CardSumKernel, Launcher, get_ready, regions_of
from mucudnn.choices import Search
from mucudnn.problem import ConvOp, ConvProblem

PREFIX = "cuda:"
"""What ids begin with that are neither cuDNN's nor PyTorch's."""

_WINOGRAD = tuple(TileAlgorithm(outputs=outputs) for outputs in (4, 2, 5, 6))

_FOURIER = tuple(TileAlgorithm(inputs=inputs) for inputs in range(16, 33, 2))
"""With a line of 32 a thread takes up to 213 of its 255 registers in float64."""

_BY_NAME = {each.name: each for each in (*_WINOGRAD, *_FOURIER)}
"""All that there are, by their names without rows and groups of tiles."""

_ID = re.compile(rf"{PREFIX}([a-z]+\d+)(?:_rows([1-9]\d*)|_sums([2-9]|[1-9]\d+))?", re.ASCII)

_BLOCK = 128
"""Rows and columns of a product of which a large one is computed at a time, by one multiprocessor."""

_ENOUGH_BLOCKS = 240
"""Of a weight gradient's products: about two for each of an H200's 132 multiprocessors."""

_MOST_BLOCKS = 4 * _ENOUGH_BLOCKS
"""Of the same, for an exhaustive search."""

_ROWS_BYTES = 2**22
"""Of planes to which images that take more are cut: half of the smallest limit that is usual."""

_FOURIER_RANGES = ((24, 8), (32, 8))
"""Most t, and images, of which the form with the fewest multiplications is tried: small tiles leave small
filters. The images are always as many, for parts of one form share a filter."""


class CardTiles(NamedTuple):
    """An algorithm by tiles on a card.

    Attributes:
        tiling: its form.
        groups: of tiles whose products are summed apart, in a weight gradient.
    """

    tiling: TileAlgorithm
    groups: int = 1

    @property
    def id(self) -> str:
        """Such as "cuda:winograd4_sums7"."""
        return PREFIX + self.tiling.name + (f"_sums{self.groups}" if self.groups > 1 else "")

    def refusal(self, problem: ConvProblem) -> str | None:
        """Return why it does not compute `problem`, of any batch and on any card; None if it does."""
        if len(problem.kernel_size) == 3:
            return "tiles on a card have one or two dimensions"
        if refused := self.tiling.refusal(problem):
            return refused
        if _groupable_tiles(problem, self.tiling) % self.groups:
            return f"the tiles are no {self.groups} groups of equal size"
        return None


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
        able = [each for each in _BY_NAME.values() if CardTiles(each).refusal(problem) is None]
        if not able or self._obstacle(problem) is not None:
            return ()
        tried = smallest(able, problem)
        if search is Search.HEURISTIC:
            tried = [*likely_winograd(problem, able), *likely_fourier(problem, tried, _FOURIER_RANGES)]
        grouped = (
            CardTiles(each, groups) for each in tried for groups in (1, *_tried_groups(problem, each, search))
        )
        in_rows = (CardTiles(each) for family in tried for each in _in_rows(problem, family))
        return tuple(each.id for each in (*grouped, *in_rows))

    def computes(self, problem: ConvProblem, algorithm: str) -> bool:
        """Return whether `algorithm` is one of these and computes `problem` here and now."""
        return is_id(algorithm) and self.refusal(problem, algorithm) is None

    def refusal(self, problem: ConvProblem, algorithm: str) -> str | None:
        """Return why an algorithm of these does not compute `problem` here and now; None if it does."""
        return _parsed(algorithm).refusal(problem) or self._obstacle(problem)

    def is_deterministic(self, problem: ConvProblem, algorithm: str) -> bool:  # noqa: ARG002  # all are
        """Return True: their products are cuBLAS's, which repeats itself on one stream."""
        return True

    def workspace_bytes(self, problem: ConvProblem, algorithm: str) -> int:
        """Return the bytes of buffer that a kernel for this micro-batch needs."""
        tiling, groups = _parsed(algorithm)
        return total_bytes(regions_of(TileGeometry(tiling, problem), groups))

    def get_ready(self, problem: ConvProblem, algorithm: str) -> None:
        """Compile what a kernel for this micro-batch launches; nothing if that was done.

        Raises:
            BackendError: it cannot be compiled.
        """
        tiling, groups = _parsed(algorithm)
        get_ready(TileGeometry(tiling, problem), self._launcher, groups)

    def slice_kernel(self, problem: ConvProblem, algorithm: str, buffer: Tensor) -> PartKernel:
        """Return a kernel for fprop or dgrad of this micro-batch."""
        geometry = TileGeometry(_parsed(algorithm).tiling, problem)
        return OnSlices(CardSliceKernel(geometry, self._launcher, buffer))

    def sum_kernel(self, problem: ConvProblem, algorithm: str, buffer: Tensor) -> PartSumKernel:
        """Return a kernel for wgrad of this micro-batch."""
        tiling, groups = _parsed(algorithm)
        return SumOnSlices(CardSumKernel(TileGeometry(tiling, problem), self._launcher, buffer, groups))

    def _obstacle(self, problem: ConvProblem) -> str | None:
        """Return why none of these computes `problem` here and now, whatever its shape; None if some may."""
        obstacle = self._card.obstacle_to_products(problem.dtype)
        if obstacle is not None:
            return obstacle.reason
        with self._card.current():
            return None if self._card.can_compile else "there is no CuPy that compiles kernels"


def is_id(algorithm: str) -> bool:
    """Return whether an id is that of an algorithm of this module, for whatever problem."""
    return _named(algorithm) is not None


@functools.cache
def _named(algorithm: str) -> CardTiles | None:
    found = _ID.fullmatch(algorithm)
    if found is None or found[1] not in _BY_NAME:
        return None
    return CardTiles(dataclasses.replace(_BY_NAME[found[1]], rows=int(found[2] or 0)), int(found[3] or 1))


def _parsed(algorithm: str) -> CardTiles:
    found = _named(algorithm)
    if found is None:
        names = ", ".join(PREFIX + name for name in _BY_NAME)
        raise ValueError(f"{algorithm!r} must be one of {names}, perhaps with _rows2 or _sums2.")
    return found


def _in_rows(problem: ConvProblem, tiling: TileAlgorithm) -> list[TileAlgorithm]:
    """Return the same for some tile rows at a time, where a single image takes much: parts of one."""
    if problem.batch != 1:
        return []
    geometry = TileGeometry(tiling, problem)
    images = sum(region.n_bytes for region in regions_of(geometry) if region.name in ("x", "y"))
    cut = dataclasses.replace(tiling, rows=max(_ROWS_BYTES * geometry.tiles[0] // images, 1))
    cut = dataclasses.replace(cut, rows=TileGeometry(cut, problem).rows)  # as many in all blocks
    return [cut] if cut.refusal(problem) is None else []


def _groupable_tiles(problem: ConvProblem, tiling: TileAlgorithm) -> int:
    """Return the tiles of an image, which any batch has in as many groups as divide them; 1 if none are made.

    There are groups in weight gradients alone, and none of Fourier's, whose planes are so many that their
    products keep a card busy.
    """
    is_cut = problem.op is ConvOp.WGRAD and not tiling.inputs
    return math.prod(TileGeometry(tiling, problem).tiles) if is_cut else 1


def _tried_groups(problem: ConvProblem, tiling: TileAlgorithm, search: Search) -> list[int]:
    """Return how many groups to try: as few as keep the card busy, if one does not."""
    geometry, tiles = TileGeometry(tiling, problem), _groupable_tiles(problem, tiling)
    blocks = geometry.planes * -(-geometry.x_channels // _BLOCK) * -(-geometry.y_channels // _BLOCK)
    counts = [each for each in range(2, min(_MOST_BLOCKS // blocks, tiles) + 1) if tiles % each == 0]
    if search is Search.EXHAUSTIVE:
        return counts
    enough = [each for each in counts if blocks * each >= _ENOUGH_BLOCKS]
    return [] if blocks >= _ENOUGH_BLOCKS else [*enough, *reversed(counts)][:1]
