"""What strides say: which layout PyTorch takes tensors for, and tensors with the strides that it expects."""

import torch
from torch import Tensor

from mucudnn.problem import Layout

_CHANNELS_LAST_DIMENSIONS = (4, 5)


def layout_of(image: Tensor, weight: Tensor) -> Layout:
    """Return the layout that most of PyTorch's convolutions take: channels_last if either tensor is in it.

    Source: PyTorch, aten/src/ATen/native/ConvUtils.h.
    """
    if is_channels_last(image) or is_channels_last(weight):
        return Layout.CHANNELS_LAST
    return Layout.CONTIGUOUS


def in_order(tensor: Tensor, order: torch.memory_format) -> Tensor:
    """Return `tensor`, or a copy of it, dense in `order`, with the strides of a new tensor.

    Along a length of 1 any stride is dense: `contiguous` keeps it as it is, and PyTorch's convolutions may
    take it for that of the other order. That of a single sample does not mislead them, and may stay.
    """
    dense = tensor.contiguous(memory_format=order)
    if 1 not in dense.shape[1:]:
        return dense
    strides = torch.empty(dense.shape, device="meta", memory_format=order).stride()
    return dense if dense.stride() == strides else dense.as_strided(dense.shape, strides)


def is_channels_last(tensor: Tensor) -> bool:
    """Return whether PyTorch takes the tensor for channels_last: by its strides alone, dense or not.

    From channels to columns, rows, planes and samples they must not fall; where lengths of 1 leave it open,
    the tensor is contiguous. Source: PyTorch, c10/core/MemoryFormat.h.
    """
    if tensor.dim() not in _CHANNELS_LAST_DIMENSIONS or tensor.stride(1) == 0:
        return False
    least = 0
    for axis in (1, *range(tensor.dim() - 1, 1, -1), 0):
        stride = tensor.stride(axis)
        if stride < least or (axis == 0 and least == tensor.stride(1)):
            return False
        least = stride * tensor.shape[axis]
    return True


def strided_as(weight: Tensor, gradient: Tensor) -> Tensor:
    """Return `gradient`, with the strides of `weight` if only those of length 1 tell both apart in memory.

    Optimisers have fast ways for gradients whose strides are those of their parameters, which PyTorch's own
    convolution does not always give.
    """
    if gradient.stride() != weight.stride() and gradient.is_contiguous() and weight.is_contiguous():
        return gradient.as_strided_(weight.shape, weight.stride())
    return gradient
