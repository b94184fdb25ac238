"""Convolution by tiles as algorithms: which problems they compute, and their names."""

import dataclasses
from typing import ClassVar

from torch import Tensor

from mucudnn.algorithms.base import SliceKernel, SumKernel, total_bytes
from mucudnn.algorithms.names import Names
from mucudnn.algorithms.tile_geometry import TileGeometry
from mucudnn.algorithms.tile_kernels import GroupedTileSumKernel, TileSliceKernel, TileSumKernel
from mucudnn.algorithms.tiling import Tiling
from mucudnn.problem import ConvOp, ConvProblem

_DTYPES = ("float32", "float64")

WINOGRAD_TAPS = {2: range(2, 4), 4: range(3, 6), 5: range(3, 4), 6: range(3, 4)}
"""By m: taps for which F(m, r) has at most 8 inputs, and so loses no more than a digit."""

_LEAST_FOURIER_TAPS = 5
"""Taps of the longer axis below which Fourier's forms are never the better ones."""

FOURIER_INPUTS = range(16, 65, 2)
"""t of the forms that there are."""


def refusal_of_tiles(problem: ConvProblem) -> str | None:
    """Return why no tiles can compute the problem, whatever its taps and strides; None if they may."""
    if problem.dtype not in _DTYPES:
        return f"{problem.dtype} would lose too many digits in tiles"
    if any(step != 1 for step in problem.dilation) or problem.groups != 1:
        return "tiles need dilation 1 and one group"
    pairs = zip(problem.padding, problem.kernel_size, strict=True)
    if problem.op is ConvOp.DGRAD and any(p >= r for p, r in pairs):
        return "dgrad by tiles needs a padding smaller than the filter"
    if 0 in (*problem.output_size, *problem.input_size, problem.batch):
        return "there is nothing to compute"
    return None


@dataclasses.dataclass(frozen=True)
class TileAlgorithm(Tiling):
    """Convolution by tiles of one family, in blocks of one kind."""

    names: ClassVar[Names] = Names(
        rf"winograd(?P<outputs>[2456])|fft(?P<inputs>{'|'.join(map(str, FOURIER_INPUTS))})",
        images="images",
        slices="slices",
        rows="rows",
        channels="k",
        summed="c",
        workers="mt",
    )

    @property
    def name(self) -> str:
        """Id without the backend's prefix, such as winograd4_rows8_mt2."""
        family = f"fft{self.inputs}" if self.inputs else f"winograd{self.outputs}"
        return self.names.name(family, self)

    @property
    def taps_range(self) -> range:
        """Numbers of taps of the longer axis for which the family is good."""
        return range(_LEAST_FOURIER_TAPS, self.inputs) if self.inputs else WINOGRAD_TAPS[self.outputs]

    def refusal(self, problem: ConvProblem) -> str | None:
        """Return why the problem cannot be computed this way, or None if it can."""
        if any(step != 1 for step in problem.stride):
            return "tiles of torch's operations need stride 1"
        if refused := refusal_of_tiles(problem):
            return refused
        able = self.taps_range
        if max(problem.kernel_size[-2:]) not in able:
            return f"it is for filters of {able[0]} to {able[-1]} taps"
        if self.summed and problem.op is ConvOp.WGRAD:
            return "a weight gradient has no sum over channels"
        return self._refusal_of_blocks(TileGeometry(self, problem))

    def _refusal_of_blocks(self, geometry: TileGeometry) -> str | None:
        """Return why there are no such blocks; never for the batch, so that any part of a division runs."""
        if (self.channels or self.summed) and self.workers > 1:
            return "some channels at a time are for one thread"
        if self.channels and self.summed:
            return "some channels at a time are those of one side"
        if self.rows and not self.rows < geometry.tiles[0]:
            return "there are no more tile rows than that"
        if self.slices and not self.slices < geometry.y_size[0]:
            return "there are no more slices than that"
        for some, total in ((self.channels, geometry.y_channels), (self.summed, geometry.x_channels)):
            if some >= total:
                return "there are no more channels than that"
            if some and total % some:
                return "the channels are no multiple of that"
        return None

    def workspace_bytes(self, problem: ConvProblem) -> int:
        """Return the bytes of buffer that a kernel for this micro-batch needs."""
        return total_bytes(TileGeometry(self, problem).regions)

    def slice_kernel(self, problem: ConvProblem, buffer: Tensor) -> SliceKernel:
        """Return a kernel for fprop or dgrad of this micro-batch that works in `buffer`."""
        return TileSliceKernel(TileGeometry(self, problem), buffer)

    def sum_kernel(self, problem: ConvProblem, buffer: Tensor) -> SumKernel:
        """Return a kernel for wgrad of this micro-batch that works in `buffer`."""
        kind = GroupedTileSumKernel if self.channels else TileSumKernel
        return kind(TileGeometry(self, problem), buffer)
