"""Operands for a problem, and what PyTorch's own convolution makes of them in float64."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # the name that PyTorch's users know it by

from mucudnn.problem import ConvOp, ConvProblem, Layout

_SQUARE = ConvProblem(
    op=ConvOp.FPROP,
    batch=2,
    in_channels=3,
    out_channels=5,
    input_size=(9, 11),
    kernel_size=(3, 3),
    stride=(1, 1),
    padding=(1, 1),
    dilation=(1, 1),
)

CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}

Values = Callable[[tuple[int, ...], torch.Generator], Tensor]
Operands = tuple[Tensor, Tensor, Tensor | None]


def a_convolution(**changes: Any) -> ConvProblem:
    """One of 3x3 taps on 9x11 pixels, so that no tile of 2 and more fits a whole number of times."""
    return dataclasses.replace(_SQUARE, **changes)


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def small_integers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Numbers of -2 to 2: as long as sums stay below 2**24, float32 computes with them exactly."""
    return torch.randint(-2, 3, shape, generator=generator).double()


def operands_of(problem: ConvProblem, values: Values = normal, seed: int = 0) -> Operands:
    """The first and second operand of the problem's op and the bias, in the problem's type and layouts."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, problem.dtype)
    x, y = (
        laid_out(values(shape, generator).to(dtype), problem.layout)
        for shape in (problem.input_shape, problem.output_shape)
    )
    w = laid_out(values(problem.filter_shape, generator).to(dtype), problem.filter_layout)
    bias = values((problem.out_channels,), generator).to(dtype) if problem.bias else None
    return {ConvOp.FPROP: (x, w, bias), ConvOp.DGRAD: (y, w, None), ConvOp.WGRAD: (x, y, None)}[problem.op]


def laid_out(tensor: Tensor, layout: Layout) -> Tensor:
    """The same values in `layout`; three-dimensional tensors follow the rule of the others."""
    if layout is Layout.CONTIGUOUS:
        return tensor.contiguous()
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


def poisoned_result(problem: ConvProblem) -> Tensor:
    """A tensor for the result of the problem's op, full of NaN."""
    shape, layout = {
        ConvOp.FPROP: (problem.output_shape, problem.layout),
        ConvOp.DGRAD: (problem.input_shape, problem.layout),
        ConvOp.WGRAD: (problem.filter_shape, problem.filter_layout),
    }[problem.op]
    return laid_out(torch.full(shape, float("nan"), dtype=getattr(torch, problem.dtype)), layout)


def reference(problem: ConvProblem, first: Tensor, second: Tensor, bias: Tensor | None = None) -> Tensor:
    """The result of the problem's op, by PyTorch's convolution and its derivatives, in float64."""
    return own_result(problem, first.double(), second.double(), None if bias is None else bias.double())


def own_result(problem: ConvProblem, first: Tensor, second: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same in the type of the operands."""

    def forward(x: Tensor, w: Tensor) -> Tensor:
        convolution = CONVOLUTIONS[len(problem.input_size)]
        return convolution(x, w, bias, problem.stride, problem.padding, problem.dilation, problem.groups)

    if problem.op is ConvOp.FPROP:
        return forward(first, second)
    unread = torch.zeros(
        problem.input_shape if problem.op is ConvOp.DGRAD else problem.filter_shape,
        dtype=first.dtype,
        requires_grad=True,
    )
    with torch.enable_grad():
        if problem.op is ConvOp.DGRAD:
            y, gradient = forward(unread, second), first
        else:
            y, gradient = forward(first, unread), second
    return torch.autograd.grad(y, unread, gradient)[0]


def relative_error(result: Tensor, expected: Tensor) -> float:
    """The 2-norm of the difference over that of `expected`; no number if either holds one that is none."""
    return (torch.linalg.vector_norm(result.double() - expected) / torch.linalg.vector_norm(expected)).item()


def finite_mask(tensor: Tensor) -> Tensor:
    """0 where a number is finite, 1 and -1 at the infinities, 2 where it is no number."""
    return torch.where(tensor.isnan(), 2.0, torch.where(tensor.isinf(), tensor.sign(), 0.0))
