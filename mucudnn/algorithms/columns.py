"""Convolution as one matrix product an image: explicit im2col and GEMM.

Every output pixel's inputs are copied into one column, so that with X the matrix of columns (c·r·s, p·q), W
the filter (k, c·r·s) and Y the output (k, p·q) of an image

    fprop  Y = W X
    dgrad  dX = W' dY, each column added back to where it came from
    wgrad  dW = dY X'

One image is taken at a time, so the workspace does not grow with the micro-batch, or some rows of its result,
whose columns a cache may hold. Filters of one tap that need no copy have an algorithm of their own
(`pointwise`). Source: Chellapilla, Puri, Simard, IWFHR 2006.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from mucudnn.algorithms.base import GradientSum, Region, SliceKernel, SumKernel, carve, total_bytes
from mucudnn.algorithms.cutting import Band, band_problems, bands_of
from mucudnn.algorithms.layouts import laid_out
from mucudnn.algorithms.names import Names
from mucudnn.problem import ConvOp, ConvProblem, Layout

_DTYPES = ("float32", "float64")


@dataclasses.dataclass(frozen=True)
class ColumnAlgorithm:
    """Explicit im2col and GEMM; the reference among the algorithms, and the one for every stride.

    Attributes:
        rows: of a result, in three dimensions slices, whose columns are made at once; 0 for all.
    """

    names: ClassVar[Names] = Names("im2col", rows="rows")

    rows: int = 0

    @property
    def name(self) -> str:
        """Id without the backend's prefix, such as im2col_rows8."""
        return self.names.name("im2col", self)

    def refusal(self, problem: ConvProblem) -> str | None:
        """Return why the problem cannot be computed this way, or None if it can."""
        if problem.dtype not in _DTYPES:
            return f"columns are for {' and '.join(_DTYPES)}"
        if problem.layout is Layout.CHANNELS_LAST and problem.groups != 1:
            return "columns of several groups need contiguous tensors"
        if 0 in (*problem.output_size, *problem.input_size, problem.batch):
            return "there is nothing to compute"
        if self.rows >= problem.output_size[0]:
            return "there are no more rows than that"
        return None

    def workspace_bytes(self, problem: ConvProblem) -> int:
        """Return the bytes of buffer that a kernel for this micro-batch needs."""
        return total_bytes(self._regions(problem))

    def slice_kernel(self, problem: ConvProblem, buffer: Tensor) -> SliceKernel:
        """Return a kernel for fprop or dgrad of this micro-batch that works in `buffer`."""
        kind = _ColumnFprop if problem.op is ConvOp.FPROP else _ColumnDgrad
        return kind(self._bands(problem, buffer))

    def sum_kernel(self, problem: ConvProblem, buffer: Tensor) -> SumKernel:
        """Return a kernel for wgrad of this micro-batch that works in `buffer`."""
        return _ColumnWgrad(self._bands(problem, buffer))

    def _regions(self, problem: ConvProblem) -> tuple[Region, ...]:
        return _regions(problem, band_problems(problem, self._most(problem))[0])

    def _bands(self, problem: ConvProblem, buffer: Tensor) -> "_Bands":
        return _Bands(problem, self._most(problem), carve(buffer, self._regions(problem)))

    def _most(self, problem: ConvProblem) -> int:
        """Rows of a band."""
        return self.rows or problem.output_size[0]


def _padded_size(band: ConvProblem) -> tuple[int, ...]:
    return tuple(size + 2 * pad for size, pad in zip(band.input_size, band.padding, strict=True))


def _regions(problem: ConvProblem, band: ConvProblem) -> tuple[Region, ...]:
    """The workspace; "filter" is W or the sum of dW, which outlives a part, as does the sum of W's values."""
    taps, pixels = math.prod(problem.kernel_size), math.prod(band.output_size)
    needs_padded = any(problem.padding) or problem.op is ConvOp.DGRAD
    padded = (problem.in_channels, *_padded_size(band)) if needs_padded else (0,)
    return (
        Region("filter", (math.prod(problem.filter_shape),), problem.dtype),
        Region("filter_sum", (1,), problem.dtype),
        Region("padded", (math.prod(padded),), problem.dtype),
        Region("columns", (problem.in_channels * taps * pixels,), problem.dtype),
    )


class _Columns:
    """The tensors of one band in the workspace, in the order in which the image's own elements lie.

    Attributes:
        x_rows: of the image, of which the columns are made.
        y_rows: of the result, which they give.
        matrix: (groups, c·r·s / groups, pixels).
    """

    def __init__(self, band: Band, space: Mapping[str, Tensor]) -> None:
        self.problem = band.problem
        self.x_rows, self.y_rows = band.x_rows, band.y_rows
        self._before = band.before
        self._bind_columns(space["columns"])
        padded = (1, band.problem.in_channels, *_padded_size(band.problem))
        memory = space["padded"][: math.prod(padded)]
        self._padded = laid_out(memory, padded, band.problem.layout)[0] if memory.numel() else memory

    def _bind_columns(self, memory: Tensor) -> None:
        problem = self.problem
        c, pixels, rank = problem.in_channels, math.prod(problem.output_size), len(problem.output_size)
        columns = memory[: c * math.prod(problem.kernel_size) * pixels]
        if problem.layout is Layout.CHANNELS_LAST:  # memory: pixels, taps, channels
            lying = columns.view(*problem.output_size, *problem.kernel_size, c)
            self._columns = lying.permute(2 * rank, *range(rank, 2 * rank), *range(rank))
            self.matrix = columns.view(1, pixels, -1).transpose(1, 2)
        else:
            self._columns = columns.view(c, *problem.kernel_size, *problem.output_size)
            self.matrix = columns.view(problem.groups, -1, pixels)

    def fill(self, image: Tensor) -> Tensor:
        """Return the matrix of columns of an image (c, *size)."""
        source = image[:, self.x_rows]
        if self._padded.numel():
            self._padded.zero_()
            self._inside().copy_(source)
            source = self._padded
        self._columns.copy_(self._windows(source))
        return self.matrix

    def add_back(self) -> Tensor:
        """Add the columns up to the rows of an image (c, rows, …) that they were made of, and return it."""
        self._padded.zero_()
        windows = self._windows(self._padded)
        for tap in itertools.product(*(range(count) for count in self.problem.kernel_size)):
            place: tuple[slice | int, ...] = (slice(None), *tap)
            windows[place].add_(self._columns[place])
        return self._inside()

    def pixels(self, result: Tensor) -> Tensor:
        """View the band's rows of a result (k, *size) as (groups, k / groups, pixels)."""
        groups = self.problem.groups
        return result[:, self.y_rows].view(groups, self.problem.out_channels // groups, -1)

    def _inside(self) -> Tensor:
        """The padded image without its padding."""
        rows = self.x_rows.stop - self.x_rows.start
        view = self._padded.narrow(1, self._before, rows)
        others = zip(self.problem.input_size[1:], self.problem.padding[1:], strict=True)
        for axis, (size, pad) in enumerate(others, start=2):
            view = view.narrow(axis, pad, size)
        return view

    def _windows(self, source: Tensor) -> Tensor:
        """View (c, *taps, *output_size) of a padded image (c, *padded_size)."""
        problem = self.problem
        along_taps = [s * d for s, d in zip(source.stride()[1:], problem.dilation, strict=True)]
        along_pixels = [s * d for s, d in zip(source.stride()[1:], problem.stride, strict=True)]
        shape = (problem.in_channels, *problem.kernel_size, *problem.output_size)
        strides = (source.stride(0), *along_taps, *along_pixels)
        return source.as_strided(shape, strides, source.storage_offset())


class _Bands:
    """The bands of an image, one after another in the same workspace, and what they share.

    Attributes:
        problem: of the micro-batch.
        columns: of each band.
        is_whole: whether there is one band, which reads the whole image.
        filter: W, or the sum of dW, in the order in which the image's own elements lie.
        filter_matrix: the same as (groups, k / groups, c·r·s / groups).
        filter_sum: of all weights.
    """

    def __init__(self, problem: ConvProblem, most: int, space: Mapping[str, Tensor]) -> None:
        self.problem = problem
        self.columns = [_Columns(band, space) for band in bands_of(problem, most)]
        self.is_whole = [each.x_rows for each in self.columns] == [slice(0, problem.input_size[0])]
        self.filter = laid_out(space["filter"], problem.filter_shape, problem.layout)
        self.filter_matrix = space["filter"].view(problem.groups, problem.out_channels // problem.groups, -1)
        self.filter_sum = space["filter_sum"][0]


class _ColumnSlices:
    """What fprop and dgrad share: the filter as a matrix."""

    def __init__(self, bands: _Bands) -> None:
        self._bands = bands

    def prepare(self, weight: Tensor) -> None:
        """Lay the filter out as a matrix; once per mini-batch, before the first part.

        An infinite weight times a zero of the padding is no number here, while PyTorch's own leaves the
        padding out; all else comes out alike.
        """
        self._bands.filter.copy_(weight)
        torch.sum(self._bands.filter_matrix, (0, 1, 2), out=self._bands.filter_sum)

    def _is_sound(self) -> bool:
        return math.isfinite(self._bands.filter_sum.item())


class _ColumnFprop(_ColumnSlices):
    """Y = W X."""

    def run(
        self,
        image: Tensor,
        weight: Tensor,  # noqa: ARG002  # prepared before
        out: Tensor,
        bias: Tensor | None,
    ) -> bool:
        """Write the part's result into `out`; return whether it is sound."""
        shift = None if bias is None else bias.view(self._bands.problem.groups, -1, 1)
        for x, y in zip(image, out, strict=True):
            for columns in self._bands.columns:
                product = columns.pixels(y)
                torch.bmm(self._bands.filter_matrix, columns.fill(x), out=product)
                if shift is not None:
                    product.add_(shift)
        return self._is_sound()


class _ColumnDgrad(_ColumnSlices):
    """dX = W' dY, added back to the image."""

    def run(
        self,
        image: Tensor,
        weight: Tensor,  # noqa: ARG002  # prepared before
        out: Tensor,
        bias: Tensor | None,
    ) -> bool:
        """Write the part's result into `out`; return whether it is sound."""
        if bias is not None:
            raise ValueError("dgrad has no bias, but got one.")
        turned = self._bands.filter_matrix.transpose(1, 2)
        is_whole = self._bands.is_whole
        for dy, dx in zip(image, out, strict=True):
            if not is_whole:
                dx.zero_()  # bands overlap, and there may be rows of which nothing is made
            for columns in self._bands.columns:
                torch.bmm(turned, columns.pixels(dy), out=columns.matrix)
                if is_whole:
                    dx.copy_(columns.add_back())
                else:
                    dx[:, columns.x_rows].add_(columns.add_back())
        return self._is_sound()


class _ColumnWgrad:
    """dW = dY X', summed over the images."""

    def __init__(self, bands: _Bands) -> None:
        self._bands = bands

    def add(self, image: Tensor, gradient: Tensor, into: GradientSum, first: bool) -> None:  # noqa: ARG002  # summed apart
        """Add the part's dw to the running sum, or start the sum with it if it is the `first`."""
        total = self._bands.filter_matrix
        is_start = first
        for x, dy in zip(image, gradient, strict=True):
            for columns in self._bands.columns:
                left, right = columns.pixels(dy), columns.fill(x).transpose(1, 2)
                if is_start:
                    torch.bmm(left, right, out=total)
                else:
                    total.baddbmm_(left, right)
                is_start = False

    def finish(self, into: GradientSum) -> bool:
        """Write the sum to `into`, or add it; return whether it is finite (if not, `into` is untouched)."""
        summed = self._bands.filter
        if not math.isfinite(summed.sum().item()):  # a false alarm where finite values overflow, never a miss
            return False
        into.take(summed)
        return True
