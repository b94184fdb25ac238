"""PyTorch's own convolution of some rows of an image at a time, where no tiles compute what is asked.

PyTorch copies images, or results, to layouts of its own, so that a micro-batch of one image still takes as
much as that image does. Here a band of rows is copied into the workspace, with the rows of zeros that pad
it; PyTorch convolves it there, and its rows of y are copied to their place. So strided, dilated and grouped
convolutions of large images fit small limits, and what PyTorch hides stays in a cache: the first layer of
ResNet (7x7, stride 2) on 16 contiguous images of 224x224 took 0.72 of the time of PyTorch's own undivided, in
3.4 MiB instead of 49, on one thread of an AMD EPYC (family 25, model 1).

A NaN or an infinity in x comes out where a convolution has it, but in bfloat16, where oneDNN multiplies some
pixels beside a window by zero. One in the filter may not where there are rows of zeros: these are multiplied
here, and the product of zero and infinity is no number.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from torch import Tensor

from mucudnn.algorithms.base import Region, SliceKernel, SumKernel, carve, total_bytes
from mucudnn.algorithms.cutting import band_problems, bands_of
from mucudnn.algorithms.layouts import laid_out
from mucudnn.algorithms.names import Names
from mucudnn.algorithms.own import are_finite, find_extremes, own_convolution
from mucudnn.problem import ConvOp, ConvProblem

_DTYPES = ("float16", "bfloat16", "float32", "float64")


class _Band(NamedTuple):
    """Rows of an image that are computed at once.

    Attributes:
        problem: what PyTorch computes.
        window: its x, in the workspace.
        zeros: its rows above x and below.
        filled: its rows between them.
        x_rows: of x, which they are.
        y_rows: of y, which it gives.
    """

    problem: ConvProblem
    window: Tensor
    zeros: tuple[Tensor, Tensor]
    filled: Tensor
    x_rows: slice
    y_rows: slice


@dataclasses.dataclass(frozen=True)
class BandAlgorithm:
    """PyTorch's own convolution of bands.

    Attributes:
        rows: of y that are computed at once, at most.
    """

    names: ClassVar[Names] = Names(r"aten_rows(?P<rows>[1-9][0-9]*)")

    rows: int

    @property
    def name(self) -> str:
        """Id without the backend's prefix."""
        return f"aten_rows{self.rows}"

    def refusal(self, problem: ConvProblem) -> str | None:
        """Return why the problem cannot be computed this way, or None if it can."""
        if problem.op is not ConvOp.FPROP:
            return "bands of rows are for fprop"
        if len(problem.input_size) != 2:
            return "bands of rows are for images of two dimensions"
        if problem.dtype not in _DTYPES:
            return f"bands of rows are for {', '.join(_DTYPES)}"
        if 0 in (*problem.input_size, problem.batch):
            return "there is nothing to compute"
        if self.rows >= problem.output_size[0]:
            return "there are no more rows than that"
        return None

    def own_problems(self, problem: ConvProblem) -> tuple[ConvProblem, ...]:
        """Return what PyTorch computes: bands of one size or two, the larger first, padded along w alone."""
        return band_problems(problem, self.rows)

    def workspace_bytes(self, problem: ConvProblem) -> int:
        """Return the bytes of buffer that a kernel for this micro-batch needs; PyTorch takes more."""
        return total_bytes(_regions(self.own_problems(problem)[0]))

    def slice_kernel(self, problem: ConvProblem, buffer: Tensor) -> SliceKernel:
        """Return a kernel for fprop of this micro-batch that works in `buffer`."""
        return _BandKernel(problem, self, buffer)

    def sum_kernel(self, problem: ConvProblem, buffer: Tensor) -> SumKernel:  # noqa: ARG002  # none is made
        """Raise, for there is none.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{self.name} computes fprop only, but got {problem}.")


def _regions(band: ConvProblem) -> tuple[Region, ...]:
    return (
        Region("extremes", (2,), band.dtype),
        Region("band", (math.prod(band.input_shape),), band.dtype),
    )


class _BandKernel:
    """fprop of one micro-batch, image by image and band by band."""

    def __init__(self, problem: ConvProblem, algorithm: BandAlgorithm, buffer: Tensor) -> None:
        regions = carve(buffer, _regions(algorithm.own_problems(problem)[0]))
        self._has_zeros = any(problem.padding)  # as they are multiplied where an image is small
        self._extremes = regions["extremes"]
        self._bands = list(_bands(problem, algorithm.rows, regions["band"]))

    def prepare(self, weight: Tensor) -> None:
        """See whether the filter is finite, if it matters; once per mini-batch."""
        if self._has_zeros:
            find_extremes(weight, self._extremes)

    def run(self, image: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> bool:
        """Write the part's result into `out`; return whether it is sound."""
        for x, y in zip(image.split(1), out.split(1), strict=True):
            for problem, window, zeros, filled, x_rows, y_rows in self._bands:
                for rows in zeros if self._has_zeros else ():
                    rows.zero_()
                filled.copy_(x[:, :, x_rows])
                y[:, :, y_rows].copy_(own_convolution(problem, window, weight, bias))  # and it is freed
        return not self._has_zeros or are_finite(self._extremes)


def _bands(problem: ConvProblem, most: int, memory: Tensor) -> Iterator[_Band]:
    """Yield the bands of an image; all windows share the memory."""
    for band, before, x_rows, y_rows in bands_of(problem, most):
        rows = x_rows.stop - x_rows.start
        window = laid_out(memory[: math.prod(band.input_shape)], band.input_shape, band.layout)
        above, filled, below = window.split([before, rows, band.input_size[0] - before - rows], 2)
        yield _Band(band, window, (above, below), filled, x_rows, y_rows)
