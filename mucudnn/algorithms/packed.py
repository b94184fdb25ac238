"""PyTorch's own convolution as graphs compute it that torch.compile freezes: with a filter packed beforehand.

oneDNN computes with filters in an order of its own. Called as a function, PyTorch's own convolution puts its
filter into that order at each call. A graph that is frozen for inference (`torch._inductor.config.freezing`)
holds it in that order, which for few samples is much of the time, and lays its images out channels last.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from mucudnn.algorithms.base import memory_format
from mucudnn.problem import ConvOp, ConvProblem, Layout

_mkldnn = torch.ops.mkldnn
"""Operators of Inductor's: where PyTorch is built without oneDNN, none of them is asked for."""

Packed = Callable[[Tensor], Tensor]
"""Computes y of x, with its filter and bias, both channels last."""

Pack = Callable[[Tensor, Tensor | None], Packed]
"""Packs a filter, shape (k, c / groups, *taps), to be used with a bias, shape (k,), or None."""


def packing(problem: ConvProblem) -> Pack | None:
    """Return what packs the filter of a forward pass as frozen graphs do; None where they do not.

    Args:
        problem: fprop, or dgrad of a transposed convolution, by whose forward pass y is its dx.
    """
    is_on = torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()
    if not is_on or len(problem.input_size) < 2 or not _is_able(problem.dtype):
        return None
    if 0 in (*problem.input_shape, *problem.output_shape):
        return None
    if problem.op is ConvOp.FPROP:
        return functools.partial(_pack, problem)
    is_depthwise = 1 < problem.groups == problem.out_channels
    has_rest = any(more >= step for more, step in zip(problem.output_padding, problem.stride, strict=True))
    if problem.op is ConvOp.WGRAD or is_depthwise or has_rest:
        return None
    return functools.partial(_pack_transposed, problem)


def image_order(problem: ConvProblem) -> torch.memory_format:
    """Return the memory format of images in frozen graphs."""
    return memory_format(Layout.CHANNELS_LAST, len(problem.input_shape))


def _is_able(dtype: str) -> bool:
    """Whether graphs have oneDNN compute in a type on this processor."""
    if dtype == "bfloat16":
        return bool(_mkldnn._is_mkldnn_bf16_supported())
    if dtype == "float16":
        return bool(_mkldnn._is_mkldnn_fp16_supported())
    return dtype == "float32"


def _pack(problem: ConvProblem, weight: Tensor, bias: Tensor | None) -> Packed:
    numbers = (problem.padding, problem.stride, problem.dilation, problem.groups)
    packed = _mkldnn._reorder_convolution_weight(weight, *numbers, problem.input_shape)
    return functools.partial(_convolve, _mkldnn._convolution_pointwise.default, (packed, bias, *numbers))


def _pack_transposed(problem: ConvProblem, weight: Tensor, bias: Tensor | None) -> Packed:
    more = problem.output_padding
    numbers = (problem.padding, more, problem.stride, problem.dilation, problem.groups)
    packed = _mkldnn._reorder_convolution_transpose_weight(weight, *numbers, problem.output_shape)
    operator = _mkldnn._convolution_transpose_pointwise.default
    return functools.partial(_convolve, operator, (packed, bias, *numbers))


def _convolve(operator: Callable[..., Tensor], arguments: tuple[object, ...], image: Tensor) -> Tensor:
    """Return y, with no other function computed along with it."""
    return operator(image, *arguments, "none", [], "")
