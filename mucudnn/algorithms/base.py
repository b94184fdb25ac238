"""What an algorithm that is not a library's must offer, and how it lays out its workspace.

An algorithm is described by an `Algorithm`: which problems it computes, how much workspace it needs, and
a kernel bound to a buffer. A kernel runs one micro-batch after another:

* `SliceKernel` (fprop, dgrad): `prepare(weight)` once per mini-batch, then `run(image, weight, out, bias)`
  for each part; `out` is the part's slice of the result.
* `SumKernel` (wgrad): `add(x, dy, into, first)` for each part, then `finish(into)` once. Afterwards
  `into.total` holds what the parts summed up to, whatever it held before, NaN included; with
  `into.accumulate` that is added to what it held. The sum is held in float32 or wider: in the workspace, or
  in `into.total` from the first part on.

Images, results and their gradients are slices of batches that are dense in the problem's layout, wherever in
memory these begin; a filter may lie in any strides. Nobody writes to an operand.

All kernels of one (algorithm, problem apart from its batch) may be bound to one buffer: what outlives a
part (the transformed filter, the running sum) lies at its start, in the same place for every batch size.

Both `run` and `finish` return whether the result is sound: false if it may hold a NaN or an infinity where a
convolution has none. Algorithms that mix neighbouring values spread them further than a convolution does,
and may overflow where it does not; whoever calls them computes the whole batch with PyTorch's own
convolution. A result that is finite throughout is sound.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from mucudnn.errors import BackendError
from mucudnn.problem import ConvProblem, Layout

ALIGNMENT_BYTES = 64
"""Every region of a workspace starts at a multiple of this: one cache line."""


_MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def checked(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor whose values lie in memory, for what believes an address while it is held.

    What autograd's hooks have made of a saved tensor may be of another type or shape. Negative views are
    copied, and zeros of which none are stored, such as gradients.

    Raises:
        BackendError: it is of another shape, type or device, or has no memory.
    """
    if tensor.is_neg() or tensor._is_zerotensor():
        tensor = tensor.clone()
    if tensor.shape != shape or tensor.dtype is not dtype or tensor.device != device:
        raise BackendError(
            f"A tensor of {dtype} on {device}, of shape {tuple(shape)}, is needed, "
            f"but got one of {tensor.dtype} on {tensor.device}, of shape {tuple(tensor.shape)}."
        )
    if tensor.data_ptr() == 0:
        raise BackendError(f"A tensor of shape {tuple(shape)} has no memory.")
    return tensor


def memory_format(layout: Layout, dimensions: int) -> torch.memory_format:
    """Return torch's memory format for tensors of so many dimensions in `layout`."""
    if layout is Layout.CHANNELS_LAST:
        return _MEMORY_FORMATS[dimensions]
    return torch.contiguous_format


class SliceKernel(Protocol):
    """Computes y or dx, part by part."""

    def prepare(self, weight: Tensor) -> None:
        """Transform the filter; once per mini-batch, before the first part."""

    def run(self, image: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> bool:
        """Write the part's result into `out`; return whether it is sound.

        The weight is that which was prepared.
        """


@dataclasses.dataclass(frozen=True)
class GradientSum:
    """Where a weight gradient is wanted.

    Attributes:
        total: where the parts add up; float32 for 16-bit gradients of more than one part.
        accumulate: whether what `total` holds before the first part counts.
        scratch: of the gradient's own type and layout, free to be overwritten; None where `total` has that
            type.
    """

    total: Tensor
    accumulate: bool = False
    scratch: Tensor | None = None

    def take(self, dw: Tensor) -> None:
        """Write `dw` to the total, or add it, as `accumulate` says."""
        if self.accumulate:
            self.total.add_(dw)
        else:
            self.total.copy_(dw)


class SumKernel(Protocol):
    """Computes dw, summed over its parts."""

    def add(self, image: Tensor, gradient: Tensor, into: GradientSum, first: bool) -> None:
        """Add the part's dw to the running sum, or start the sum with it if it is the `first`."""

    def finish(self, into: GradientSum) -> bool:
        """Have the sum in `into`; return whether it is sound (if not, `into` may hold anything)."""


class Algorithm(Protocol):
    """One way to compute convolutions: of torch operations, or in C."""

    @property
    def name(self) -> str:
        """Id without the backend's prefix."""

    def refusal(self, problem: ConvProblem) -> str | None:
        """Return why the problem cannot be computed this way, or None if it can."""

    def workspace_bytes(self, problem: ConvProblem) -> int:
        """Return the bytes of buffer that a kernel for this micro-batch needs."""

    def slice_kernel(self, problem: ConvProblem, buffer: Tensor) -> SliceKernel:
        """Return a kernel for fprop or dgrad of this micro-batch that works in `buffer`."""

    def sum_kernel(self, problem: ConvProblem, buffer: Tensor) -> SumKernel:
        """Return a kernel for wgrad of this micro-batch that works in `buffer`."""


@dataclasses.dataclass(frozen=True)
class Region:
    """A named tensor in a workspace: shape and torch's name of its type."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def n_bytes(self) -> int:
        """Bytes that it takes, up to the next aligned start."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        return -(-math.prod(self.shape) * itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def total_bytes(regions: tuple[Region, ...]) -> int:
    """Return the bytes of a buffer that holds all `regions` one behind the other."""
    return sum(region.n_bytes for region in regions)


def carve(buffer: Tensor, regions: tuple[Region, ...]) -> Mapping[str, Tensor]:
    """Return the tensors of `regions`, cut one behind the other out of `buffer`.

    Args:
        buffer: bytes, shape (n,), dtype uint8, starting at an aligned address.
        regions: what to cut out of it.

    Raises:
        ValueError: the buffer is too small.
    """
    needed = total_bytes(regions)
    if buffer.numel() < needed:
        raise ValueError(f"The workspace must have at least {needed} bytes, but got {buffer.numel()}.")
    tensors = {}
    start = 0
    for region in regions:
        dtype = getattr(torch, region.dtype)
        length = math.prod(region.shape) * dtype.itemsize
        tensors[region.name] = buffer[start : start + length].view(dtype).view(region.shape)
        start += region.n_bytes
    return tensors
