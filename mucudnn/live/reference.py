"""What every algorithm is compared with, and how: results in float64, summed up of those of one sample.

Such a convolution is the definition, summed up tap by tap: each tap of the filter is one matrix product with
the values that it meets. PyTorch's own convolution in float64 gathers what all taps meet before it
multiplies: nine times a sample for a 3x3 filter, 222 to 247 MiB for 64 channels of 224x224, which no limit
would hold. Here it is what one tap meets, less than a sample.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from types import EllipsisType

import torch
from torch import Tensor

from mucudnn.backends import Backend
from mucudnn.locks import cached_property
from mucudnn.problem import ConvOp, ConvProblem

_SAMPLES_AT_ONCE = 16

_LOCAL_FACTOR = 16.0
"""See `relative_error`."""

_Window = tuple[EllipsisType | slice, ...]


class Reference:
    """The result of a problem in float64, of any stretch of its samples.

    Args:
        backend: which computes samples on a GPU.
        problem: of the whole mini-batch.
        operands: first, second and bias, as `convolve_sample` has them, of all samples and in any type.
        out: of the result's shape and layout.
    """

    def __init__(
        self,
        backend: Backend,
        problem: ConvProblem,
        operands: tuple[Tensor, Tensor, Tensor | None],
        out: Tensor,
    ) -> None:
        self._backend = backend
        self._problem = problem
        self._first, self._second, self._bias = operands
        self._out = out
        self._sums: dict[int, tuple[int, Tensor]] = {}

    def of(self, here: slice) -> Tensor:
        """Return the reference for the samples `here`, a weight gradient until another one is asked for."""
        if self._problem.op is ConvOp.WGRAD:
            return self._sum(here.start, here.stop)
        return self._result[here]

    @cached_property
    def _result(self) -> Tensor:
        result = torch.empty_like(self._out, dtype=torch.float64)
        for sample in range(self._problem.batch):
            result[sample : sample + 1] = self._compute(sample)
        return result

    def _sum(self, start: int, stop: int) -> Tensor:
        """Sum of the samples' dw. Two are kept, that from 0 and the last from elsewhere, and are added to.

        Sizes are asked for in their order, so each stretch from 0 is computed once.
        """
        end, total = self._sums.pop(start, (start, None))  # what fails midway leaves none
        if total is None or end > stop:
            end, total = start + 1, self._compute(start)
        for sample in range(end, stop):
            total.add_(self._compute(sample))
        self._sums = {each: kept for each, kept in self._sums.items() if each == 0} | {start: (stop, total)}
        return total

    def _compute(self, sample: int) -> Tensor:
        """Return the result of one sample, which takes least memory.

        On a GPU cuDNN computes it; PyTorch's own on the processor gathers more than any limit would hold.
        """
        here = slice(sample, sample + 1)
        problem = dataclasses.replace(self._problem, batch=1, dtype="float64")
        second = self._second[here] if problem.op is ConvOp.WGRAD else self._second
        bias = None if self._bias is None else self._bias.double()
        on_processor = self._out.device.type == "cpu"
        compute = convolve_sample if on_processor else self._backend.own_convolution
        return compute(problem, self._first[here].double(), second.double(), bias)


def relative_error(result: Tensor, reference: Tensor) -> float:
    """Return |result - reference| / |reference| in the 2-norm, in float64; not finite if either is not.

    Or the largest difference by 16 times the root mean square of what is not 0 in the reference, if that is
    more: where few values are wrong, such as a row of pixels, the 2-norm is small, and in 16 bits within what
    rounding does. That leaves errors of rounding alone, of which the largest is some 9 times the root mean
    square of all.

    Copies in float64 are made of some samples at a time.
    """
    if not reference.numel():
        return 0.0
    pairs = zip(result.split(_SAMPLES_AT_ONCE), reference.split(_SAMPLES_AT_ONCE), strict=True)
    found = [_compared(some.double() - right, right) for some, right in pairs]
    distances, largest, counts = (torch.stack(some) for some in zip(*found, strict=True))
    size: float = torch.linalg.vector_norm(reference).item()
    distance: float = torch.linalg.vector_norm(distances).item()
    if not size:
        return distance
    local = largest.max().item() * math.sqrt(counts.sum().item()) / _LOCAL_FACTOR
    return max(distance, local) / size


def _compared(difference: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the difference's 2-norm and largest absolute value, and how much of what is right is not 0."""
    norm = torch.linalg.vector_norm
    return norm(difference), norm(difference, math.inf), torch.count_nonzero(right)


def convolve_sample(problem: ConvProblem, first: Tensor, second: Tensor, bias: Tensor | None) -> Tensor:
    """Return the result of `problem` for one sample, in float64, as cross-correlation with zeros around x.

    Args:
        problem: of any batch, type and layout, which do not matter.
        first: x of shape (1, c, *size) for fprop and wgrad, dy of shape (1, k, *size) for dgrad; in float64.
        second: w of shape (k, c / groups, *taps) for fprop and dgrad, dy for wgrad; in float64.
        bias: of shape (k,), for fprop only; in float64.
    """
    if problem.op is ConvOp.FPROP:
        result = _fprop(problem, first, second)
        return result if bias is None else result.add_(bias.view(-1, *(1 for _ in problem.input_size)))
    return _dgrad(problem, first, second) if problem.op is ConvOp.DGRAD else _wgrad(problem, first, second)


def _fprop(problem: ConvProblem, x: Tensor, w: Tensor) -> Tensor:
    padded, filters = _padded(problem, x), _by_taps(problem, w)
    y = x.new_zeros(problem.groups, filters.shape[2], math.prod(problem.output_size))
    for tap, window in enumerate(_windows(problem)):
        torch.baddbmm(y, filters[tap], padded[window].flatten(2), out=y)
    return y.view(1, problem.out_channels, *problem.output_size)


def _dgrad(problem: ConvProblem, dy: Tensor, w: Tensor) -> Tensor:
    filters = _by_taps(problem, w).mT
    met = dy.reshape(problem.groups, filters.shape[3], -1)
    padded = dy.new_zeros(problem.groups, filters.shape[2], *_padded_size(problem))
    for tap, window in enumerate(_windows(problem)):
        padded[window] += (filters[tap] @ met).unflatten(2, problem.output_size)
    sizes = zip(problem.padding, problem.input_size, strict=True)
    inner: _Window = (..., *(slice(p, p + size) for p, size in sizes))
    return padded[inner].reshape(1, problem.in_channels, *problem.input_size)


def _wgrad(problem: ConvProblem, x: Tensor, dy: Tensor) -> Tensor:
    padded, met = _padded(problem, x), dy.reshape(problem.groups, problem.out_channels // problem.groups, -1)
    taps = [met @ padded[window].flatten(2).mT for window in _windows(problem)]
    return torch.stack(taps, dim=-1).reshape(problem.filter_shape)


def _by_taps(problem: ConvProblem, w: Tensor) -> Tensor:
    """Return the filter as matrices: (taps, groups, k / groups, c / groups)."""
    shape = (problem.groups, problem.out_channels // problem.groups, w.shape[1], -1)
    return w.reshape(shape).permute(3, 0, 1, 2).contiguous()


def _padded_size(problem: ConvProblem) -> tuple[int, ...]:
    return tuple(size + 2 * p for size, p in zip(problem.input_size, problem.padding, strict=True))


def _padded(problem: ConvProblem, x: Tensor) -> Tensor:
    """Return x within its zeros, by groups: (groups, c / groups, *size)."""
    both_ends = [p for p in reversed(problem.padding) for _ in range(2)]
    channels = problem.in_channels // problem.groups
    return torch.nn.functional.pad(x, both_ends).reshape(problem.groups, channels, *_padded_size(problem))


def _windows(problem: ConvProblem) -> Iterator[_Window]:
    """Yield, for each tap of the filter, what it meets of padded x: one value for each of y."""
    dimensions = zip(problem.kernel_size, problem.stride, problem.dilation, problem.output_size, strict=True)
    slices = [
        [slice(tap * dilation, tap * dilation + (out - 1) * stride + 1, stride) for tap in range(taps)]
        for taps, stride, dilation, out in dimensions
    ]
    for window in itertools.product(*slices):
        yield (..., *window)
