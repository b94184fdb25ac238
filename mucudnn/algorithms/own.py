"""PyTorch's own convolution: one op of a problem exactly as autograd runs it."""

import functools
import math

import torch
from torch import Tensor

from mucudnn.problem import ConvOp, ConvProblem, Layout

_PROCESSOR = torch.device("cpu")
_FORWARD = {
    1: torch.ops.aten.conv1d.default,
    2: torch.ops.aten.conv2d.default,
    3: torch.ops.aten.conv3d.default,
}
"""What `torch.conv2d` and its kin call, past those who watch for such calls."""


def own_convolution(
    problem: ConvProblem,
    first: Tensor,
    second: Tensor,
    bias: Tensor | None = None,
    unread: Tensor | None = None,
) -> Tensor:
    """Return what PyTorch itself computes for `problem`, in a new tensor, and nothing more.

    Value, type and strides are those that autograd gives. The two backward ops go through one call of
    ATen that takes x, w and dy together, though dgrad needs of x, and wgrad of w, only type, shape and
    layout; autograd passes the real ones. An expanded scalar in their place would be copied to full size
    before it is ignored, so it would cost the memory of a whole x (measured: 6.12 MiB of 6.12).

    Of a transposed convolution that PyTorch computes otherwise, dgrad is the forward pass, and fprop the
    gradient of its image dy, which that call takes and never reads.

    Args:
        problem: what to compute.
        first: x for fprop and wgrad, dy for dgrad.
        second: w for fprop and dgrad, dy for wgrad.
        bias: of shape (k,), for fprop only.
        unread: what `unread_operand` tells: any tensor of its shape and layout, whatever it holds. None
            allocates one and touches no page of it: on the processor that costs addresses, and memory only
            where PyTorch is told to fill what is new; on a card it costs a block of the allocator meanwhile.
    """
    is_apart, op = problem.is_apart, problem.op
    if is_apart and op is ConvOp.DGRAD:
        with torch.no_grad():
            return recorded_convolution(problem, first, second, None)
    if op is ConvOp.FPROP and not is_apart:
        result: Tensor = _FORWARD[len(problem.input_size)](
            first, second, bias, problem.stride, problem.padding, problem.dilation, problem.groups
        )
        return result
    if unread is None:
        unread = unread_operand(problem, first.device)
    image: Tensor | None
    weight: Tensor | None
    if op is not ConvOp.WGRAD:
        gradient, image, weight = first, unread, second
    elif is_apart:
        gradient, image, weight = first, second, unread
    else:
        gradient, image, weight = second, first, unread
    of_image, of_weight, _ = torch.ops.aten.convolution_backward(
        gradient,
        image,
        weight,
        None,  # sizes of a bias, whose gradient is not asked for
        problem.stride,
        problem.padding,
        problem.dilation,
        is_apart,
        problem.output_padding if is_apart else (0,) * len(problem.stride),
        problem.groups,
        (op is not ConvOp.WGRAD, op is ConvOp.WGRAD, False),
    )
    return of_weight if op is ConvOp.WGRAD else of_image  # type: ignore[no-any-return]  # torch.ops has no types


def recorded_convolution(problem: ConvProblem, image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return PyTorch's own convolution of a forward pass, which autograd records as it does in a model.

    Args:
        problem: fprop, or dgrad of a transposed convolution.
        image: x for fprop, shape (n, c, *size); dy for dgrad, shape (n, k, *size).
        weight: (k, c / groups, *taps).
        bias: of shape (k,) for fprop, (c,) for dgrad.
    """
    is_transposed = problem.op is ConvOp.DGRAD
    more = problem.output_padding if is_transposed else (0,) * len(problem.stride)
    return torch.convolution(
        image, weight, bias, problem.stride, problem.padding, problem.dilation, is_transposed, more,
        problem.groups,
    )  # fmt: skip


def find_extremes(weight: Tensor, into: Tensor) -> None:
    """Write the largest and the smallest value to `into`, of two; a NaN is either. Nothing is allocated.

    A sum of 16-bit values in 32 bits would be: PyTorch converts all of them first.
    """
    axes = tuple(range(weight.dim()))
    torch.amax(weight, axes, out=into[0])
    torch.amin(weight, axes, out=into[1])


def are_finite(extremes: Tensor) -> bool:
    """Return whether values are finite of which `find_extremes` has found these."""
    return all(map(math.isfinite, extremes.tolist()))


def operands(
    problem: ConvProblem, generator: torch.Generator | None, device: torch.device = _PROCESSOR
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return buffers of standard normal values for `own_convolution`: first, second and bias or None.

    The same state of the generator, which must be the device's, gives the same values; without one nothing
    is filled, for those whom values do not concern. Channels-last tensors have the strides of PyTorch's
    memory formats; those of one spatial dimension follow the same rule.
    """
    make = functools.partial(_allocate, problem, device, generator)
    image, gradient = (problem.input_shape, problem.layout), (problem.output_shape, problem.layout)
    weight = (problem.filter_shape, problem.filter_layout)
    if problem.op is ConvOp.DGRAD:
        return make(*gradient), make(*weight), None
    if problem.op is ConvOp.WGRAD:
        return make(*image), make(*gradient), None
    bias = make((problem.out_channels,), Layout.CONTIGUOUS) if problem.bias else None
    return make(*image), make(*weight), bias


def unread_operand(problem: ConvProblem, device: torch.device = _PROCESSOR) -> Tensor | None:
    """Return the tensor that PyTorch's own takes and never reads, in its layout; None where it reads all.

    It is x for dgrad, w for wgrad, and dy for fprop of a transposed convolution that PyTorch computes
    otherwise. It reads all in the forward pass, which dgrad is of such a one.
    """
    if problem.op is ConvOp.WGRAD:
        return _allocate(problem, device, None, problem.filter_shape, problem.filter_layout)
    if problem.op is (ConvOp.DGRAD if problem.is_apart else ConvOp.FPROP):
        return None
    shape = problem.input_shape if problem.op is ConvOp.DGRAD else problem.output_shape
    return _allocate(problem, device, None, shape, problem.layout)


def result_bytes(problem: ConvProblem) -> int:
    """Return the bytes of what the op computes: y, dx or dw."""
    sizes = {
        ConvOp.FPROP: problem.output_bytes,
        ConvOp.DGRAD: problem.input_bytes,
        ConvOp.WGRAD: problem.filter_bytes,
    }
    return sizes[problem.op]


def _allocate(
    problem: ConvProblem,
    device: torch.device,
    generator: torch.Generator | None,
    shape: tuple[int, ...],
    layout: Layout,
) -> Tensor:
    dtype: torch.dtype = getattr(torch, problem.dtype)
    is_channels_last = layout is Layout.CHANNELS_LAST
    lengths = (shape[0], *shape[2:], shape[1]) if is_channels_last else shape
    in_memory = torch.empty(lengths, dtype=dtype, device=device)
    if generator is not None:
        in_memory.normal_(generator=generator)
    return in_memory.movedim(-1, 1) if is_channels_last else in_memory
