"""PyTorch's own convolution as a job to be weighed, and a bound of its workspace where nothing can be."""

import dataclasses
import math
from collections.abc import Mapping

from torch import Tensor

from mucudnn.algorithms.own import operands, own_convolution, result_bytes, unread_operand
from mucudnn.backends.base import Job
from mucudnn.problem import ConvOp, ConvProblem

_CHANNEL_BLOCK = 16
"""Channels of one block in oneDNN's widest layout (nChw16c); fewer channels are padded to it."""


@dataclasses.dataclass(frozen=True)
class OwnConvolution:
    """One op of PyTorch's own convolution with its operands in place.

    Attributes:
        problem: what runs.
        first: see `own_convolution`.
        second: see `own_convolution`.
        bias: see `own_convolution`.
        unread: see `own_convolution`; it counts as an operand, since autograd holds a real one.
    """

    problem: ConvProblem
    first: Tensor
    second: Tensor
    bias: Tensor | None
    unread: Tensor | None

    @property
    def result_bytes(self) -> int:
        """Bytes of the tensor that `run` returns."""
        return result_bytes(self.problem)

    def run(self) -> Tensor:
        """Compute the op into a new tensor."""
        return own_convolution(self.problem, self.first, self.second, self.bias, self.unread)


def own_job(problem: ConvProblem) -> Job:
    """Return the job of which `FootprintMeter.measure` tells the workspace of PyTorch's own convolution."""
    return Job(f"{__name__}:prepare", problem.to_json())


def prepare(fields: Mapping[str, object]) -> OwnConvolution:
    """Return the problem of which `fields` are the JSON values, ready to run on operands nobody filled.

    How much memory a convolution takes does not depend on the values, and normal ones for a large batch
    take longer than the convolution.
    """
    problem = ConvProblem.from_json(fields)
    first, second, bias = operands(problem, None)
    unread = None if problem.op is ConvOp.FPROP else unread_operand(problem)
    return OwnConvolution(problem, first, second, bias, unread)


def workspace_bound(problem: ConvProblem, threads: int) -> int:
    """Return bytes that the workspace of PyTorch's own convolution stays below; for where nothing measures.

    The sum of what its paths take, of which one call takes some: a copy of x, w and y each, with the
    channels of each group padded to blocks (oneDNN), one gradient of the filter in float32 for each of
    `threads` threads (oneDNN, wgrad), and the unfolded image, n·c·taps·p·q values (im2col), 16-bit ones in
    float32 besides. It is often ten times what is taken, and was never exceeded where that was measured,
    with oneDNN and without.
    """
    unfolded_itemsize = problem.itemsize + (4 if problem.itemsize == 2 else 0)
    unfolded = problem.batch * problem.in_channels * math.prod(problem.kernel_size + problem.output_size)
    groups, k, c = problem.groups, problem.out_channels, problem.in_channels
    image = problem.batch * _padded(c, groups) * math.prod(problem.input_size)
    output = problem.batch * _padded(k, groups) * math.prod(problem.output_size)
    taps = _padded(k, groups) * _padded(c // groups, 1) * math.prod(problem.kernel_size)
    copies = (image + output + taps) * problem.itemsize
    return copies + unfolded * unfolded_itemsize + threads * taps * 4


def _padded(channels: int, groups: int) -> int:
    """Return the number of channels after those of each group are padded to whole blocks."""
    return groups * math.ceil(channels / groups / _CHANNEL_BLOCK) * _CHANNEL_BLOCK
