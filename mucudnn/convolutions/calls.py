"""What a call of one of PyTorch's convolutions asks for: from tensors and arguments to problems."""

import dataclasses
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F  # noqa: N812  # the name that PyTorch's users know it by

from mucudnn.convolutions.strides import is_channels_last
from mucudnn.errors import OptionError, ProblemError
from mucudnn.problem import ConvOp, ConvProblem, Layout

Numbers = int | Sequence[int]

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
"""PyTorch's functions by the number of spatial dimensions."""

FUNCTIONS = frozenset({*CONVOLUTIONS.values(), *TRANSPOSED.values()})
"""PyTorch's functions, under which all its modules and `torch.nn.functional` call convolutions."""


class ConvArguments(NamedTuple):
    """The arguments of a convolution beside its tensors, as PyTorch takes them; one number per dimension.

    Attributes:
        stride: step of the filter.
        padding: zeros on each side, or "same" or "valid".
        dilation: step between the taps.
        groups: number of groups.
        output_padding: of a transposed convolution: rows and columns added to its output on one side. None
            for one that is not transposed.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int
    output_padding: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls, rank: int, stride: Numbers, padding: Numbers | str, dilation: Numbers, groups: int
    ) -> "ConvArguments":
        """Return the arguments for `rank` spatial dimensions; one number stands for all of them."""
        pads = padding if isinstance(padding, str) else numbers(padding, rank)
        return cls(numbers(stride, rank), pads, numbers(dilation, rank), groups)

    @classmethod
    def of_problem(cls, problem: ConvProblem) -> "ConvArguments":
        """Return the arguments of the call whose forward pass is `problem`: fprop, or dgrad if transposed."""
        output_padding = None if problem.op is ConvOp.FPROP else problem.output_padding
        return cls(problem.stride, problem.padding, problem.dilation, problem.groups, output_padding)

    @property
    def is_transposed(self) -> bool:
        """Whether the convolution is the gradient of another one with respect to its input."""
        return self.output_padding is not None


def rank_of(weight: Tensor) -> int:
    """Return the number of spatial dimensions of a filter."""
    if type(weight) is Tensor or type(weight) is Parameter:
        return weight.dim() - 2
    with torch._C.DisableTorchFunctionSubclass():  # a class of its own may refuse to be asked
        return weight.dim() - 2


def own_call(image: Tensor, weight: Tensor, bias: Tensor | None, arguments: ConvArguments) -> Tensor:
    """Return what PyTorch's function of that rank and kind returns."""
    rank = rank_of(weight)
    stride, padding, dilation, groups = (
        arguments.stride, arguments.padding, arguments.dilation, arguments.groups
    )  # fmt: skip
    if arguments.output_padding is None:
        return CONVOLUTIONS[rank](image, weight, bias, stride, padding, dilation, groups)
    transposed: Callable[..., Tensor] = TRANSPOSED[rank]
    return transposed(image, weight, bias, stride, padding, arguments.output_padding, groups, dilation)


def own_gradients(
    gradient: Tensor,
    image: Tensor,
    weight: Tensor,
    arguments: ConvArguments,
    needed: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return dx, dw and the bias's gradient by PyTorch's own convolution, which has derivatives of its own.

    Each is None unless it is `needed`.
    """
    gradients = torch.ops.aten.convolution_backward(
        gradient,
        image,
        weight,
        [gradient.shape[1]] if needed[2] else None,
        arguments.stride,
        arguments.padding,
        arguments.dilation,
        arguments.is_transposed,
        arguments.output_padding or (0,) * len(arguments.stride),
        arguments.groups,
        needed,
    )
    # oneDNN's function has the weight's along with the bias's, whether it is needed or not.
    dx, dw, db = (each if is_needed else None for each, is_needed in zip(gradients, needed, strict=True))
    return dx, dw, db


def numbers(given: Any, rank: int) -> tuple[int, ...]:
    """Return one number for each of `rank` dimensions; one stands for all of them.

    Args:
        given: a number or several, Python's, NumPy's or in tensors, as PyTorch takes them.
        rank: how many are wanted.
    """
    if _is_whole(given):
        return (int(given),) * rank
    each = tuple(map(_in_python, given))
    return each * rank if len(each) == 1 else each


def explicit_padding(
    image: Tensor, kernel_size: Sequence[int], arguments: ConvArguments
) -> tuple[Tensor, ConvArguments]:
    """Return the image and arguments of the same convolution with its padding in equal numbers on both sides.

    "same" pads d·(r - 1) zeros in all, of which an odd one lies behind the image, as in PyTorch; that one is
    added to the image.

    Raises:
        OptionError: the padding has another name, or is "same" with a stride.
    """
    if not isinstance(arguments.padding, str):
        return image, arguments
    if arguments.padding == "valid":
        return image, arguments._replace(padding=(0,) * len(kernel_size))
    if arguments.padding != "same":
        raise OptionError(f"padding must be numbers, 'same' or 'valid', but got {arguments.padding!r}.")
    if any(step != 1 for step in arguments.stride):
        raise OptionError(f"padding 'same' needs stride 1, but got {arguments.stride}.")
    totals = [d * (r - 1) for d, r in zip(arguments.dilation, kernel_size, strict=True)]
    if any(total % 2 for total in totals):
        behind = [pad for total in reversed(totals) for pad in (0, total % 2)]
        image = F.pad(image, behind)
    return image, arguments._replace(padding=tuple(total // 2 for total in totals))


def problem_of(image: Tensor, weight: Tensor, has_bias: bool, arguments: ConvArguments) -> ConvProblem:
    """Return the problem of a convolution's forward pass: fprop, or dgrad of a transposed one.

    A transposed convolution is the gradient of a convolution that leads from its output to its input: that
    one's input channels, and so on, are those of the problem. It adds its bias apart.

    Args:
        image: (n, c, *size).
        weight: (k, c / groups, *taps), or (c, k / groups, *taps) of a transposed one.
        has_bias: whether a bias is added.
        arguments: with explicit padding.

    Raises:
        ProblemError: the shapes fit no convolution, or no transposed one that is another's gradient.
        OptionError: the padding is a word.
    """
    arguments = ConvArguments(*map(_in_python, arguments))
    if isinstance(arguments.padding, str):
        raise OptionError(f"padding must be in numbers here, but got {arguments.padding!r}.")
    expected = weight.shape[0] if arguments.is_transposed else weight.shape[1] * arguments.groups
    if image.shape[1] != expected:
        raise ProblemError(
            f"The image must have the filter's {expected} channels, but got {image.shape[1]} "
            f"for a filter of shape {tuple(weight.shape)} in {arguments.groups} groups."
        )
    plain = ConvProblem(
        op=ConvOp.DGRAD if arguments.is_transposed else ConvOp.FPROP,
        batch=image.shape[0],
        in_channels=weight.shape[1] * arguments.groups,
        out_channels=weight.shape[0],
        input_size=_transposed_size(image, weight, arguments) or tuple(image.shape[2:]),
        kernel_size=tuple(weight.shape[2:]),
        stride=arguments.stride,
        padding=arguments.padding,
        dilation=arguments.dilation,
        groups=arguments.groups,
        dtype=str(image.dtype).removeprefix("torch."),
        filter_layout=Layout.CHANNELS_LAST if is_channels_last(weight) else Layout.CONTIGUOUS,
        bias=has_bias and not arguments.is_transposed,
    )
    if arguments.is_transposed and not all(plain.input_size):
        raise ProblemError("The result of a transposed convolution must have pixels, but got none.")
    if arguments.is_transposed and plain.output_size != tuple(image.shape[2:]):
        raise ProblemError(
            "The output padding of a transposed convolution must be smaller than its stride, "
            f"but got {arguments.output_padding} for {arguments.stride}."
        )
    taken, apart = _pytorchs_choice(image, weight, arguments), False
    if arguments.is_transposed:
        as_large = image.new_empty(1).expand(plain.input_shape)  # as nobody reads it
        apart = are_apart(
            taken.name, _pytorchs_choice(as_large, weight, arguments._replace(output_padding=None)).name
        )
    return dataclasses.replace(plain, layout=_layout_of_call(image, weight, taken), is_apart=apart)


def _in_python(value: Any) -> Any:
    """Return whole numbers of NumPy or of tensors, also in a tuple, as Python's; all else as it is."""
    if isinstance(value, tuple):
        return tuple(map(_in_python, value))
    return int(value) if _is_whole(value) else value


def _is_whole(value: object) -> bool:
    return isinstance(value, int | Integral) or (isinstance(value, Tensor) and value.dim() == 0)


def _pytorchs_choice(image: Tensor, weight: Tensor, arguments: ConvArguments) -> Any:
    """Return the implementation that PyTorch takes for a convolution that it can run, by asking it."""
    return torch._C._select_conv_backend(
        image,
        weight,
        None,
        arguments.stride,
        arguments.padding,
        arguments.dilation,
        arguments.is_transposed,
        arguments.output_padding or (0,) * len(arguments.stride),
        arguments.groups,
        None,
    )


def _layout_of_call(image: Tensor, weight: Tensor, backend: Any) -> Layout:
    """Return the layout in which PyTorch's implementation runs a convolution, and returns the result.

    PyTorch itself is asked, by functions that it hides: `layout_of` does not know which implementation it
    takes, and some have only one layout.
    """
    order = torch._C._conv_determine_backend_memory_format(image, weight, backend)
    return Layout.CONTIGUOUS if order is torch.contiguous_format else Layout.CHANNELS_LAST


def are_apart(transposed: str, plain: str) -> bool:
    """Return whether PyTorch computes a transposed convolution otherwise than as a plain one's gradient.

    oneDNN and cuDNN compute both alike, PyTorch's own kernels do not: in float64, in 16 bits where oneDNN
    does not take them (as with AVX2), of some single images, and on a card those of plain ones with a group
    for each channel. Source: PyTorch, aten/src/ATen/native/Convolution.cpp.

    Args:
        transposed: PyTorch's name of what it takes for the transposed one; in torch 2.13 oneDNN's has none.
        plain: and for the plain one.
    """
    return plain not in ("Mkldnn", "Cudnn") or transposed.startswith("SlowTranspose")


def _transposed_size(image: Tensor, weight: Tensor, arguments: ConvArguments) -> tuple[int, ...] | None:
    """Return the size of a transposed convolution's output; None for one that is not transposed."""
    if arguments.output_padding is None or isinstance(arguments.padding, str):
        return None
    rank = len(weight.shape[2:])
    sizes = (arguments.stride, arguments.padding, arguments.dilation, arguments.output_padding)
    if any(len(each) != rank for each in sizes) or image.dim() != weight.dim():
        raise ProblemError(f"There must be {rank} numbers for {rank} dimensions, but got {arguments}.")
    return tuple(
        (size - 1) * step - 2 * pad + dil * (taps - 1) + more + 1
        for size, taps, step, pad, dil, more in zip(
            image.shape[2:],
            weight.shape[2:],
            arguments.stride,
            arguments.padding,
            arguments.dilation,
            arguments.output_padding,
            strict=True,
        )
    )


def has_its_bias(problem: ConvProblem, bias: Tensor | None) -> bool:
    """Return whether a bias, if there is one, has a number for each channel of the forward pass's result."""
    channels = problem.out_channels if problem.op is ConvOp.FPROP else problem.in_channels
    return bias is None or tuple(bias.shape) == (channels,)


def obstacle(image: Tensor, weight: Tensor, bias: Tensor | None = None) -> str | None:
    """Return why this convolution must be left to PyTorch as it is, or None if it may be divided."""
    if bias is not None and (bias.dtype != weight.dtype or bias.device != weight.device):
        return "its weight and bias differ in type or device"
    if image.dtype != weight.dtype or image.device != weight.device:
        return "its input and weight differ in type or device"
    if image.layout is not torch.strided or weight.layout is not torch.strided:
        return "its tensors are not dense"
    if not image.dtype.is_floating_point:
        return f"{str(image.dtype).removeprefix('torch.')} has PyTorch's own convolution only"
    if not image.numel() or not weight.numel():
        return "its tensors are empty"
    return None
