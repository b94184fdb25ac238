"""PyTorch's own convolution in the layout that the tensors do not have.

The micro-batch is copied into the workspace in the other layout, PyTorch convolves it there, and the result
is copied back. That saves what PyTorch takes for blocked copies of contiguous tensors, and some shapes are
many times faster in one layout than in the other. On one thread of an Intel Xeon (family 6, model 207), in
float32, copies included: a depthwise filter of 15x15 taps on 2 images of 64x56x56 took 3.4 ms in place of
68 ms in contiguous tensors; dw of 32 to 32 channels with 15x15 taps on 2 images of 28x28 took 18 ms in place
of 1936 ms in channels-last ones.

A NaN or an infinity in x or dy comes out where PyTorch's own has it, but in bfloat16: there oneDNN multiplies
some pixels beside a window by zero, which ones depends on the layout. One in the filter may not: padding that
one layout leaves out may be zeros in the other, and the product of zero and infinity is no number.
"""

import dataclasses
import math

import torch
from torch import Tensor

from mucudnn.algorithms.base import GradientSum, Region, SliceKernel, SumKernel, carve, total_bytes
from mucudnn.algorithms.layouts import laid_out, to_channels_last, to_contiguous
from mucudnn.algorithms.matrix.unit import refusal_of_processor
from mucudnn.algorithms.own import are_finite, find_extremes, own_convolution
from mucudnn.problem import ConvOp, ConvProblem, Layout

_NAMES = {Layout.CHANNELS_LAST: "onednn_nhwc", Layout.CONTIGUOUS: "onednn_nchw"}

_LONGEST_VECTOR = 16
"""Values of float32 that the longest registers hold, those of AVX-512."""

_DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class OtherLayoutAlgorithm:
    """PyTorch's own convolution between two copies.

    Attributes:
        layout: in which PyTorch computes.
    """

    layout: Layout

    @property
    def name(self) -> str:
        """Id without the backend's prefix."""
        return _NAMES[self.layout]

    def refusal(self, problem: ConvProblem) -> str | None:
        """Return why the problem cannot be computed this way, or None if it can."""
        if problem.layout is self.layout:
            return f"the tensors are {self.layout} as they are"
        if problem.dtype not in _DTYPES:
            return f"copies between layouts are for {', '.join(_DTYPES)}"
        if 0 in (*problem.input_size, problem.batch):
            return "there is nothing to compute"
        return _may_break_memory(problem, self.layout)

    def own_problems(self, problem: ConvProblem) -> tuple[ConvProblem, ...]:
        """Return all that PyTorch computes."""
        return (self.own_problem(problem),)

    def own_problem(self, problem: ConvProblem) -> ConvProblem:
        """Return what PyTorch computes: the same in the other layout.

        PyTorch knows no channels-last tensors of one spatial dimension: they get a second one of length 1.
        """
        other = dataclasses.replace(problem, layout=self.layout, filter_layout=self.layout, is_apart=False)
        return _as_rows(other) if self._adds_dimension(problem) else other

    def workspace_bytes(self, problem: ConvProblem) -> int:
        """Return the bytes of buffer that a kernel for this micro-batch needs; PyTorch takes more."""
        return total_bytes(_regions(problem))

    def slice_kernel(self, problem: ConvProblem, buffer: Tensor) -> SliceKernel:
        """Return a kernel for fprop or dgrad of this micro-batch that works in `buffer`."""
        return _OtherLayoutSlices(self._space(problem, buffer))

    def sum_kernel(self, problem: ConvProblem, buffer: Tensor) -> SumKernel:
        """Return a kernel for wgrad of this micro-batch that works in `buffer`."""
        return _OtherLayoutSum(self._space(problem, buffer))

    def _adds_dimension(self, problem: ConvProblem) -> bool:
        return self.layout is Layout.CHANNELS_LAST and len(problem.input_size) == 1

    def _space(self, problem: ConvProblem, buffer: Tensor) -> "_Space":
        return _Space(problem, self.own_problem(problem), buffer)


def _may_break_memory(problem: ConvProblem, layout: Layout) -> str | None:
    """Return why oneDNN may end the process in that layout, which no check survives; None if it may not.

    A model meets its own layout alone. Found with oneDNN 3.12, each as a broken heap or a fault:

    * on an AMD EPYC with AVX-512, without AMX, 15 of 1,400 gradients of filters of volumes in bfloat16, in
      either layout: 8 to 8 channels of 3x3x3 and stride 2 on 8x1x8 among them;
    * on one with AVX2, in channels_last and float32, gradients of strided 1x1 filters of one to seven
      channels where strides leave no rest of images, of which there are several: 3 to 16 channels and stride
      2 on 4 images of 12x12 among them. Eight fill a vector there, and none was found; the longest hold 16.
    """
    if problem.op is not ConvOp.WGRAD:
        return None
    if problem.dtype == "bfloat16" and len(problem.input_size) == 3 and refusal_of_processor() is not None:
        return "PyTorch's own writes beyond its memory for some such gradients on processors without AMX"
    is_strided_pixel = set(problem.kernel_size) == {1} and max(problem.stride) > 1
    if layout is Layout.CHANNELS_LAST and is_strided_pixel and problem.in_channels < _LONGEST_VECTOR:
        return (
            "oneDNN may write beyond its memory for gradients of strided 1x1 filters of fewer than "
            f"{_LONGEST_VECTOR} channels in channels_last"
        )
    return None


def _as_rows(problem: ConvProblem) -> ConvProblem:
    """The same problem of one spatial dimension, as one of images of one row."""
    return dataclasses.replace(
        problem,
        input_size=(1, *problem.input_size),
        kernel_size=(1, *problem.kernel_size),
        stride=(1, *problem.stride),
        padding=(0, *problem.padding),
        dilation=(1, *problem.dilation),
    )


def _regions(problem: ConvProblem) -> tuple[Region, ...]:
    """The workspace; what outlives a part, the filter or the sum of its gradients, comes first."""
    x, w, y = map(math.prod, (problem.input_shape, problem.filter_shape, problem.output_shape))
    if problem.op is ConvOp.WGRAD:
        return (
            Region("sum", (w,), problem.sum_dtype),
            Region("image", (x,), problem.dtype),
            Region("gradient", (y,), problem.dtype),
        )
    # Of dgrad's x, which PyTorch takes and does not read, the strides count: it lies where dy does.
    image = x if problem.op is ConvOp.FPROP else max(x, y)
    return (
        Region("filter", (w,), problem.dtype),
        Region("extremes", (2,), problem.dtype),
        Region("image", (image,), problem.dtype),
    )


class _Space:
    """The tensors in the workspace, in the layout in which PyTorch computes, and copies from and to it."""

    def __init__(self, problem: ConvProblem, own_problem: ConvProblem, buffer: Tensor) -> None:
        self._regions = carve(buffer, _regions(problem))
        self._layout = problem.layout
        self._is_row = len(own_problem.input_size) > len(problem.input_size)
        self.own_problem = own_problem

    def __getitem__(self, name: str) -> Tensor:
        return self._regions[name]

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """View the start of a region as a tensor of this shape in the layout of the computation."""
        flat = self._regions[name].view(getattr(torch, self.own_problem.dtype))[: math.prod(shape)]
        return laid_out(flat, shape, self.own_problem.layout)

    def bring(self, source: Tensor, target: Tensor) -> None:
        """Copy a tensor of the caller's to one of these."""
        _copy(self._widened(source), target, self.own_problem.layout)

    def leave(self, source: Tensor, target: Tensor) -> None:
        """Copy what PyTorch has computed here to a tensor of the caller's."""
        _copy(source, self._widened(target), self._layout)

    def narrowed(self, tensor: Tensor) -> Tensor:
        """View a tensor of this place with as many dimensions as the caller's have."""
        return tensor.squeeze(2) if self._is_row else tensor

    def _widened(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(2) if self._is_row else tensor


def _copy(source: Tensor, target: Tensor, layout: Layout) -> None:
    """Copy a tensor (n, c, *size) to one in `layout`."""
    if layout is Layout.CHANNELS_LAST:
        to_channels_last(source, target.movedim(1, -1))
    else:
        to_contiguous(source.movedim(1, -1), target)


class _OtherLayoutSlices:
    """fprop or dgrad."""

    def __init__(self, space: _Space) -> None:
        problem = space.own_problem
        is_fprop = problem.op is ConvOp.FPROP
        self._space = space
        self._filter = space.tensor("filter", problem.filter_shape)
        self._image = space.tensor("image", problem.input_shape if is_fprop else problem.output_shape)
        self._unread = None if is_fprop else space.tensor("image", problem.input_shape)

    def prepare(self, weight: Tensor) -> None:
        """Copy the filter; once per mini-batch, before the first part."""
        self._space.bring(weight, self._filter)
        find_extremes(self._space["filter"], self._space["extremes"])

    def run(self, image: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> bool:  # noqa: ARG002  # prepared before
        """Write the part's result into `out`; return whether it is sound."""
        self._space.bring(image, self._image)
        result = own_convolution(self._space.own_problem, self._image, self._filter, bias, self._unread)
        self._space.leave(result, out)
        return are_finite(self._space["extremes"])


class _OtherLayoutSum:
    """wgrad, summed in the workspace."""

    def __init__(self, space: _Space) -> None:
        problem = space.own_problem
        self._space = space
        self._image = space.tensor("image", problem.input_shape)
        self._gradient = space.tensor("gradient", problem.output_shape)
        self._sum = laid_out(space["sum"], problem.filter_shape, problem.layout)
        self._unread = space.tensor("sum", problem.filter_shape)

    def add(self, image: Tensor, gradient: Tensor, into: GradientSum, first: bool) -> None:  # noqa: ARG002  # summed apart
        """Add the part's dw to the running sum, or start the sum with it if it is the `first`."""
        self._space.bring(image, self._image)
        self._space.bring(gradient, self._gradient)
        dw = own_convolution(self._space.own_problem, self._image, self._gradient, None, self._unread)
        if first:
            self._sum.copy_(dw)
        else:
            self._sum.add_(dw)

    def finish(self, into: GradientSum) -> bool:
        """Write the sum to `into`, or add it; return whether it is finite (if not, `into` is untouched)."""
        if not math.isfinite(self._space["sum"].sum().item()):
            return False
        into.take(self._space.narrowed(self._sum))
        return True
