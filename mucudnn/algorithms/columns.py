"""Convolution as one matrix product an image: explicit im2col and GEMM.

Every output pixel's inputs are copied into one column, so that with X the matrix of columns (c·r·s, p·q), W
the filter (k, c·r·s) and Y the output (k, p·q) of an image

    fprop  Y = W X
    dgrad  dX = W' dY, each column added back to where it came from
    wgrad  dW = dY X'

One image is taken at a time, so the workspace does not grow with the micro-batch. Filters of one tap that
need no copy have an algorithm of their own (`pointwise`). Source: Chellapilla, Puri, Simard, IWFHR 2006.
"""

import dataclasses
import itertools
import math

import torch
from torch import Tensor

from mucudnn.algorithms.base import GradientSum, Region, SliceKernel, SumKernel, carve, total_bytes
from mucudnn.problem import ConvOp, ConvProblem, Layout

_DTYPES = ("float32", "float64")


@dataclasses.dataclass(frozen=True)
class ColumnAlgorithm:
    """Explicit im2col and GEMM; the reference among the algorithms, and the one for every stride."""

    name: str = "im2col"

    def refusal(self, problem: ConvProblem) -> str | None:
        """Return why the problem cannot be computed this way, or None if it can."""
        if problem.dtype not in _DTYPES:
            return f"columns are for {' and '.join(_DTYPES)}"
        if problem.layout is Layout.CHANNELS_LAST and problem.groups != 1:
            return "columns of several groups need contiguous tensors"
        if 0 in (*problem.output_size, *problem.input_size, problem.batch):
            return "there is nothing to compute"
        return None

    def workspace_bytes(self, problem: ConvProblem) -> int:
        """Return the bytes of buffer that a kernel for this micro-batch needs."""
        return total_bytes(_regions(problem))

    def slice_kernel(self, problem: ConvProblem, buffer: Tensor) -> SliceKernel:
        """Return a kernel for fprop or dgrad of this micro-batch that works in `buffer`."""
        kind = _ColumnFprop if problem.op is ConvOp.FPROP else _ColumnDgrad
        return kind(_Columns(problem, buffer))

    def sum_kernel(self, problem: ConvProblem, buffer: Tensor) -> SumKernel:
        """Return a kernel for wgrad of this micro-batch that works in `buffer`."""
        return _ColumnWgrad(_Columns(problem, buffer))


def _padded_size(problem: ConvProblem) -> tuple[int, ...]:
    return tuple(size + 2 * pad for size, pad in zip(problem.input_size, problem.padding, strict=True))


def _regions(problem: ConvProblem) -> tuple[Region, ...]:
    """The workspace; "filter" is W or the sum of dW, which outlives a part, as does the sum of W's values."""
    taps, pixels = math.prod(problem.kernel_size), math.prod(problem.output_size)
    needs_padded = any(problem.padding) or problem.op is ConvOp.DGRAD
    padded = (problem.in_channels, *_padded_size(problem)) if needs_padded else (0,)
    return (
        Region("filter", (math.prod(problem.filter_shape),), problem.dtype),
        Region("filter_sum", (1,), problem.dtype),
        Region("padded", (math.prod(padded),), problem.dtype),
        Region("columns", (problem.in_channels * taps * pixels,), problem.dtype),
    )


class _Columns:
    """The tensors of one image in the workspace, in the order in which the image's own elements lie."""

    def __init__(self, problem: ConvProblem, buffer: Tensor) -> None:
        space = carve(buffer, _regions(problem))
        self.problem = problem
        self._is_last = problem.layout is Layout.CHANNELS_LAST
        k, c, *taps = problem.filter_shape
        self.filter = self._ordered(space["filter"], (k,), (c, *taps))
        self.filter_sum = space["filter_sum"][0]
        self.filter_matrix = space["filter"].view(problem.groups, k // problem.groups, -1)
        self.padded = self._ordered(space["padded"], (), (problem.in_channels, *_padded_size(problem)))
        self._bind_columns(space["columns"])

    def _bind_columns(self, columns: Tensor) -> None:
        problem = self.problem
        c, pixels = problem.in_channels, math.prod(problem.output_size)
        if self._is_last:  # memory: pixels, taps, channels
            lying = columns.view(*problem.output_size, *problem.kernel_size, c)
            rank = len(problem.output_size)
            order = (2 * rank, *range(rank, 2 * rank), *range(rank))
            self.columns = lying.permute(order)
            self.matrix = columns.view(1, pixels, -1).transpose(1, 2)
        else:
            self.columns = columns.view(c, *problem.kernel_size, *problem.output_size)
            self.matrix = columns.view(problem.groups, -1, pixels)

    def _ordered(self, flat: Tensor, outer: tuple[int, ...], inner: tuple[int, ...]) -> Tensor:
        """View `flat` as (*outer, *inner), where `inner` starts with channels that may lie innermost."""
        if not flat.numel() or not self._is_last:
            return flat.view(*outer, *inner) if flat.numel() else flat
        lying = flat.view(*outer, *inner[1:], inner[0])
        return lying.movedim(-1, len(outer))

    def fill(self, image: Tensor) -> Tensor:
        """Return the matrix of columns (groups, c·r·s / groups, pixels) of an image (c, *size)."""
        source = image
        if any(self.problem.padding):
            source = self.padded
            source.zero_()
            self.inside().copy_(image)
        self.columns.copy_(self.windows(source))
        return self.matrix

    def pixels(self, image: Tensor, channels: int) -> Tensor:
        """View an image (channels, *size) as (groups, channels / groups, pixels)."""
        return image.view(self.problem.groups, channels // self.problem.groups, -1)

    def inside(self) -> Tensor:
        """The padded image without its padding."""
        view = self.padded
        for axis, (size, pad) in enumerate(
            zip(self.problem.input_size, self.problem.padding, strict=True), start=1
        ):
            view = view.narrow(axis, pad, size)
        return view

    def windows(self, source: Tensor) -> Tensor:
        """View (c, *taps, *output_size) of a padded image (c, *padded_size)."""
        problem = self.problem
        along_taps = [s * d for s, d in zip(source.stride()[1:], problem.dilation, strict=True)]
        along_pixels = [s * d for s, d in zip(source.stride()[1:], problem.stride, strict=True)]
        shape = (problem.in_channels, *problem.kernel_size, *problem.output_size)
        strides = (source.stride(0), *along_taps, *along_pixels)
        return source.as_strided(shape, strides, source.storage_offset())


class _ColumnSlices:
    """What fprop and dgrad share: the filter as a matrix."""

    def __init__(self, columns: _Columns) -> None:
        self._columns = columns

    def prepare(self, weight: Tensor) -> None:
        """Lay the filter out as a matrix; once per mini-batch, before the first part.

        An infinite weight times a zero of the padding is no number here, while PyTorch's own leaves the
        padding out; all else comes out alike.
        """
        self._columns.filter.copy_(weight)
        torch.sum(self._columns.filter_matrix, (0, 1, 2), out=self._columns.filter_sum)

    def _is_sound(self) -> bool:
        return math.isfinite(self._columns.filter_sum.item())


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
        columns = self._columns
        for x, y in zip(image, out, strict=True):
            product = columns.pixels(y, columns.problem.out_channels)
            torch.bmm(columns.filter_matrix, columns.fill(x), out=product)
            if bias is not None:
                product.add_(bias.view(columns.problem.groups, -1, 1))
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
        columns = self._columns
        for dy, dx in zip(image, out, strict=True):
            gradient = columns.pixels(dy, columns.problem.out_channels)
            torch.bmm(columns.filter_matrix.transpose(1, 2), gradient, out=columns.matrix)
            self._add_back()
            dx.copy_(columns.inside())
        return self._is_sound()

    def _add_back(self) -> None:
        columns = self._columns
        columns.padded.zero_()
        windows = columns.windows(columns.padded)
        taps = columns.problem.kernel_size
        for tap in itertools.product(*(range(count) for count in taps)):
            place: tuple[slice | int, ...] = (slice(None), *tap)
            windows[place].add_(columns.columns[place])


class _ColumnWgrad:
    """dW = dY X', summed over the images."""

    def __init__(self, columns: _Columns) -> None:
        self._columns = columns

    def add(self, image: Tensor, gradient: Tensor, into: GradientSum, first: bool) -> None:  # noqa: ARG002  # summed apart
        """Add the part's dw to the running sum, or start the sum with it if it is the `first`."""
        columns = self._columns
        total = columns.filter_matrix
        for number, (x, dy) in enumerate(zip(image, gradient, strict=True)):
            left = columns.pixels(dy, columns.problem.out_channels)
            right = columns.fill(x).transpose(1, 2)
            if first and number == 0:
                torch.bmm(left, right, out=total)
            else:
                total.baddbmm_(left, right)

    def finish(self, into: GradientSum) -> bool:
        """Write the sum to `into`, or add it; return whether it is finite (if not, `into` is untouched)."""
        summed = self._columns.filter
        if not math.isfinite(summed.sum().item()):  # a false alarm where finite values overflow, never a miss
            return False
        into.take(summed)
        return True
