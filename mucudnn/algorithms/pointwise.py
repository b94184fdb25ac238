"""Convolution by filters of one tap as matrix products on the operands themselves: no copy, no workspace.

With W the filter (k, c), X the pixels of x and Y those of y,

    fprop  Y = W X
    dgrad  dX = W' dY
    wgrad  dW = dY X'

Contiguous images are matrices (c, pixels), one a sample, and take one batched product; channels-last ones
are a single matrix (n · pixels, c), transposed.

Results are always sound: there is neither padding nor a transform, so that every value is the sum of the
same products as in a convolution, and no other value enters into it.
"""

import dataclasses
import math

import torch
from torch import Tensor

from mucudnn.algorithms.base import GradientSum, SliceKernel, SumKernel
from mucudnn.problem import ConvOp, ConvProblem, Layout

_DTYPES = ("float32", "float64")
"""In 16 bits PyTorch's own runs the same products in hardware, and parts would need a sum of 32 bits."""


def refusal_of_products(problem: ConvProblem) -> str | None:
    """Return why products of the operands do not compute the problem, or None if they do."""
    if problem.dtype not in _DTYPES:
        return f"products without a copy are for {' and '.join(_DTYPES)}"
    if any(size != 1 for size in (*problem.kernel_size, *problem.stride, problem.groups)):
        return "products without a copy need filters of one tap, stride 1 and one group"
    if any(problem.padding):
        return "products without a copy need images without padding"
    if 0 in (*problem.input_size, problem.batch):
        return "there is nothing to compute"
    return None


@dataclasses.dataclass(frozen=True)
class PointwiseAlgorithm:
    """One matrix product a sample, or one for all of them."""

    name: str = "gemm"

    def refusal(self, problem: ConvProblem) -> str | None:
        """Return why the problem cannot be computed this way, or None if it can."""
        return refusal_of_products(problem)

    def workspace_bytes(self, problem: ConvProblem) -> int:  # noqa: ARG002  # the same for all
        """Return 0: the products read and write the operands."""
        return 0

    def slice_kernel(self, problem: ConvProblem, buffer: Tensor) -> SliceKernel:  # noqa: ARG002  # none is needed
        """Return a kernel for fprop or dgrad of this micro-batch."""
        is_dgrad = problem.op is ConvOp.DGRAD
        channels = (problem.out_channels, problem.in_channels)
        read, written = channels if is_dgrad else reversed(channels)
        pixels = math.prod(problem.input_size)
        return _PointwiseSlices(has_rows(problem), is_dgrad, problem.batch, read, written, pixels)

    def sum_kernel(self, problem: ConvProblem, buffer: Tensor) -> SumKernel:  # noqa: ARG002  # none is needed
        """Return a kernel for wgrad of this micro-batch."""
        return _PointwiseSum(has_rows(problem))


def has_rows(problem: ConvProblem) -> bool:
    """Whether all pixels are rows of one matrix; images of one pixel are so in either layout."""
    return problem.layout is Layout.CHANNELS_LAST or math.prod(problem.input_size) == 1


def rows_of(images: Tensor) -> Tensor:
    """View channels-last images (n, channels, *size) as (n · pixels, channels)."""
    return images.movedim(1, -1).view(-1, images.shape[1])


def matrices_of(images: Tensor) -> Tensor:
    """View contiguous images (n, channels, *size) as (n, channels, pixels)."""
    return images.view(*images.shape[:2], -1)


def _filter_matrix(weight: Tensor) -> Tensor:
    """View a filter (k, c, 1, ...) of any strides as (k, c)."""
    return weight.view(weight.shape[:2])


@dataclasses.dataclass(frozen=True)
class _PointwiseSlices:
    """Y = W X, or dX = W' dY.

    Attributes:
        has_rows: whether all pixels are rows of one matrix.
        is_dgrad: whether it is dX.
        batch: samples.
        read: channels of what is read.
        written: channels of the result.
        pixels: of an image.
    """

    has_rows: bool
    is_dgrad: bool
    batch: int
    read: int
    written: int
    pixels: int

    def prepare(self, weight: Tensor) -> None:
        """Nothing is to be prepared."""

    def run(self, image: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> bool:
        """Write the part's result into `out`; return that it is sound."""
        n, c, k, pixels = self.batch, self.read, self.written, self.pixels
        left = weight.view(c, k).t() if self.is_dgrad else weight.view(k, c)
        if self.has_rows:
            torch.mm(rows_of(image), left.t(), out=rows_of(out))
        elif n == 1:
            torch.mm(left, image.view(c, pixels), out=out.view(k, pixels))
        else:  # one batched product takes 2 to 11 % less time than one after the other
            torch.bmm(left.expand(n, k, c), image.view(n, c, pixels), out=out.view(n, k, pixels))
        if bias is not None:
            out.add_(bias.view(-1, *[1] * (out.dim() - 2)))
        return True


@dataclasses.dataclass(frozen=True)
class _PointwiseSum:
    """dW = dY X', summed where it is wanted.

    Attributes:
        has_rows: whether all pixels are rows of one matrix.
    """

    has_rows: bool

    def add(self, image: Tensor, gradient: Tensor, into: GradientSum, first: bool) -> None:
        """Add the part's dw to the total, or write it there if it is the `first` and nothing else counts."""
        total = _filter_matrix(into.total)
        kept = 0 if first and not into.accumulate else 1
        if self.has_rows:
            total.addmm_(rows_of(gradient).t(), rows_of(image), beta=kept)
        else:
            total.addbmm_(matrices_of(gradient), matrices_of(image).transpose(1, 2), beta=kept)

    def finish(self, into: GradientSum) -> bool:  # noqa: ARG002  # the total has been added to
        """Return that the sum is sound."""
        return True
