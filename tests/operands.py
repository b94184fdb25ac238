"""Operands for a problem, and what PyTorch's own convolution makes of them in float64."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # the name that PyTorch's users know it by

from mucudnn.problem import ConvOp, ConvProblem, Layout
from tests.kept import KeptResults

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
    dtype = getattr(torch, problem.dtype)
    shapes = (problem.input_shape, problem.output_shape, problem.filter_shape, (problem.out_channels,))
    x, y, w, bias = (each.to(dtype, copy=True) for each in _drawn(values, seed, shapes))
    x, y = laid_out(x, problem.layout), laid_out(y, problem.layout)
    w = laid_out(w, problem.filter_layout)
    if not problem.bias:
        bias = None
    return {ConvOp.FPROP: (x, w, bias), ConvOp.DGRAD: (y, w, None), ConvOp.WGRAD: (x, y, None)}[problem.op]


@functools.lru_cache(maxsize=256)  # many algorithms compute with the same
def _drawn(values: Values, seed: int, shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [values(shape, generator) for shape in shapes]


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
    operands = [each.double() for each in (first, second, bias) if each is not None]
    if not first.is_cpu or first.numel() > _MANY:
        return own_result(problem, *operands)
    kind = (
        problem.op, problem.input_size, problem.kernel_size, problem.stride, problem.padding,
        problem.dilation, problem.groups, tuple(each.shape for each in operands),
    )  # fmt: skip
    return _REFERENCES.of(kind, operands, lambda: own_result(problem, *operands)).clone()


_MANY = 2**20
"""Elements that are not kept."""

_REFERENCES = KeptResults[Tensor](128, 4)
"""Many algorithms compute the same."""


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
