"""The divided convolution: what a convolution computes, in micro-batches, with its gradients."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # the name that PyTorch's users know it by

from mucudnn.algorithms.base import memory_format
from mucudnn.backends import Backend, backend_for
from mucudnn.errors import OptionError, ProblemError
from mucudnn.execution import Runner
from mucudnn.plan import Division
from mucudnn.problem import ConvOp, ConvProblem, Layout
from mucudnn.profile import Candidate
from mucudnn.workspace import Owner, workspace_of

Numbers = int | Sequence[int]

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CHANNELS_LAST_DIMENSIONS = (4, 5)


@dataclasses.dataclass(frozen=True)
class ConvArguments:
    """The arguments of a convolution beside its tensors, as PyTorch takes them; one number per dimension.

    Attributes:
        stride: step of the filter.
        padding: zeros on each side, or "same" or "valid".
        dilation: step between the taps.
        groups: number of groups.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def of(
        cls, rank: int, stride: Numbers, padding: Numbers | str, dilation: Numbers, groups: int
    ) -> "ConvArguments":
        """Return the arguments for `rank` spatial dimensions; one number stands for all of them."""
        pads = padding if isinstance(padding, str) else _each(padding, rank)
        return cls(_each(stride, rank), pads, _each(dilation, rank), groups)


def _each(numbers: Numbers, rank: int) -> tuple[int, ...]:
    if isinstance(numbers, int):
        return (numbers,) * rank
    return tuple(numbers) * rank if len(numbers) == 1 else tuple(numbers)


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
        return image, dataclasses.replace(arguments, padding=(0,) * len(kernel_size))
    if arguments.padding != "same":
        raise OptionError(f"padding must be numbers, 'same' or 'valid', but got {arguments.padding!r}.")
    if any(step != 1 for step in arguments.stride):
        raise OptionError(f"padding 'same' needs stride 1, but got {arguments.stride}.")
    totals = [d * (r - 1) for d, r in zip(arguments.dilation, kernel_size, strict=True)]
    if any(total % 2 for total in totals):
        behind = [pad for total in reversed(totals) for pad in (0, total % 2)]
        image = F.pad(image, behind)
    return image, dataclasses.replace(arguments, padding=tuple(total // 2 for total in totals))


def layout_of(image: Tensor, weight: Tensor) -> Layout:
    """Return the layout in which PyTorch runs this convolution: channels_last if either tensor is in it.

    On a GPU float64 runs contiguous in any case. Source: PyTorch, aten/src/ATen/native/ConvUtils.h.
    """
    if image.is_cuda and image.dtype is torch.float64:
        return Layout.CONTIGUOUS
    if _is_channels_last(image) or _is_channels_last(weight):
        return Layout.CHANNELS_LAST
    return Layout.CONTIGUOUS


def _is_channels_last(tensor: Tensor) -> bool:
    """Return whether PyTorch takes the tensor for channels_last: by its strides alone, dense or not.

    They must not fall in the order of channels, columns, rows, planes, samples; where lengths of 1 leave it
    open, the tensor is contiguous. Source: PyTorch, c10/core/MemoryFormat.h.
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


def problem_of(image: Tensor, weight: Tensor, has_bias: bool, arguments: ConvArguments) -> ConvProblem:
    """Return the fprop problem of a convolution.

    Args:
        image: (n, c, *size).
        weight: (k, c / groups, *taps).
        has_bias: whether a bias is added.
        arguments: with explicit padding.

    Raises:
        ProblemError: the shapes fit no convolution.
    """
    if isinstance(arguments.padding, str):
        raise OptionError(f"padding must be in numbers here, but got {arguments.padding!r}.")
    if image.shape[1] != weight.shape[1] * arguments.groups:
        raise ProblemError(
            f"The image must have the filter's c / groups channels for each of {arguments.groups} groups, "
            f"but got {image.shape[1]} for {weight.shape[1]}."
        )
    return ConvProblem(
        op=ConvOp.FPROP,
        batch=image.shape[0],
        in_channels=image.shape[1],
        out_channels=weight.shape[0],
        input_size=tuple(image.shape[2:]),
        kernel_size=tuple(weight.shape[2:]),
        stride=arguments.stride,
        padding=arguments.padding,
        dilation=arguments.dilation,
        groups=arguments.groups,
        dtype=str(image.dtype).removeprefix("torch."),
        layout=layout_of(image, weight),
        filter_layout=Layout.CHANNELS_LAST if _is_channels_last(weight) else Layout.CONTIGUOUS,
        bias=has_bias,
    )


def problems_of(problem: ConvProblem) -> dict[ConvOp, ConvProblem]:
    """Return the three problems of a training step, from that of fprop; gradients have no bias."""
    without = dataclasses.replace(problem, bias=False)
    return {
        ConvOp.FPROP: problem,
        ConvOp.DGRAD: without.with_op(ConvOp.DGRAD),
        ConvOp.WGRAD: without.with_op(ConvOp.WGRAD),
    }


def obstacle(image: Tensor, weight: Tensor, bias: Tensor | None = None) -> str | None:
    """Return why this convolution must be left to PyTorch as it is, or None if it may be divided."""
    device = image.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return "it runs under autocast"
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


def is_traced(*tensors: Tensor) -> bool:
    """Return whether a call with `tensors` is being compiled, traced or transformed rather than computed."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in tensors)
        or any(torch._C._functorch.is_legacy_batchedtensor(tensor) for tensor in tensors)
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def undivided(algorithm: str, batch: int) -> Division:
    """Return the division that runs the whole batch at once, with nothing known of its time."""
    return Division((Candidate(algorithm, batch, 0.0, 0),))


class DividedConvolution:
    """One convolution of given shapes, with a division for each of its ops; differentiable.

    An op without a division runs PyTorch's own convolution, undivided.

    Attributes:
        buffer_bytes: of the workspace that each op needs.
    """

    def __init__(
        self,
        backend: Backend,
        problem: ConvProblem,
        divisions: Mapping[ConvOp, Division],
        owners: Mapping[ConvOp, Owner] | None = None,
        limits: Mapping[ConvOp, int] | None = None,
        capacity_bytes: int = 0,
    ) -> None:
        """Prepare the three ops.

        Args:
            backend: that runs all of them.
            problem: of fprop.
            divisions: of the same batch.
            owners: of the workspaces, in sharing mode; without them all sites share one.
            limits: bytes that the buffer and what PyTorch's own takes beside it may take together.
            capacity_bytes: what the buffer may grow to at once, since other convolutions need it.
        """
        self._backend = backend
        self._problem = problem
        self._owners = owners or {}
        own = undivided(backend.own, problem.batch)
        self._runners = {
            op: Runner(backend, part, divisions.get(op, own), (limits or {}).get(op), capacity_bytes)
            for op, part in problems_of(problem).items()
        }
        self.buffer_bytes = {op: runner.buffer_bytes for op, runner in self._runners.items()}
        self._is_own = not limits and all(runner.is_own for runner in self._runners.values())
        self._format = memory_format(problem.layout, len(problem.input_shape))

    def __call__(self, image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return y, shape (n, k, *size), in the problem's layout."""
        if self._is_own:
            return self._backend.own_convolution(self._problem, image, weight, bias)
        image = image.contiguous(memory_format=self._format)
        if torch.is_grad_enabled() and (
            image.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
        ):
            result: Tensor = _Convolution.apply(image, weight, bias, self)  # type: ignore[no-untyped-call]
            return result
        return self.run(ConvOp.FPROP, image, weight, bias)

    def run(
        self,
        op: ConvOp,
        first: Tensor,
        second: Tensor,
        bias: Tensor | None = None,
        unread: Tensor | None = None,
    ) -> Tensor:
        """Return the result of one op, outside of autograd; see `Runner`."""
        workspace = workspace_of(self._backend, self._owners.get(op))
        return self._runners[op](workspace, first, second, bias, unread)

    def gradients(
        self, gradient: Tensor, image: Tensor, weight: Tensor, needed: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return dx, dw and the bias's gradient, each None unless it is `needed`."""
        gradient = gradient.contiguous(memory_format=self._format)
        dx = self.run(ConvOp.DGRAD, gradient, weight, unread=image) if needed[0] else None
        dw = self.run(ConvOp.WGRAD, image, gradient, unread=weight) if needed[1] else None
        db = gradient.sum([0, *range(2, gradient.dim())]) if needed[2] else None
        return dx, dw, db

    def differentiable_gradients(
        self, gradient: Tensor, image: Tensor, weight: Tensor, needed: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the same by PyTorch's own convolution, which has derivatives of its own."""
        problem = self._problem
        gradients: tuple[Tensor | None, Tensor | None, Tensor | None] = torch.ops.aten.convolution_backward(
            gradient,
            image,
            weight,
            [problem.out_channels] if problem.bias else None,
            problem.stride,
            problem.padding,
            problem.dilation,
            False,  # not transposed  # noqa: FBT003  # ATen's arguments have positions only
            (0,) * len(problem.stride),
            problem.groups,
            needed,
        )
        return gradients


class _Convolution(torch.autograd.Function):
    """Forward and backward of a `DividedConvolution`."""

    @staticmethod
    def forward(
        ctx: Any, image: Tensor, weight: Tensor, bias: Tensor | None, convolution: DividedConvolution
    ) -> Tensor:
        """Return y, shape (n, k, *size), and keep x and w for the gradients."""
        ctx.save_for_backward(image, weight)
        ctx.convolution = convolution
        return convolution.run(ConvOp.FPROP, image, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return dx, dw and the bias's gradient, in the shapes of x, w and (k,); None where nobody asks.

        `gradients` is dy alone, shape (n, k, *size). The last None stands for the convolution itself.
        """
        image, weight = ctx.saved_tensors
        # Gradients that are differentiated again, or batched, only PyTorch's own can compute.
        again = torch.is_grad_enabled() or is_traced(gradients[0])
        convolution: DividedConvolution = ctx.convolution
        compute = convolution.differentiable_gradients if again else convolution.gradients
        return (*compute(gradients[0], image, weight, ctx.needs_input_grad[:3]), None)


def divided_conv(
    input: Tensor,  # noqa: A002  # PyTorch's name
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers | str = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    *,
    fprop: Division | None = None,
    dgrad: Division | None = None,
    wgrad: Division | None = None,
) -> Tensor:
    """Return the convolution of `input` with `weight`, computed in micro-batches; differentiable.

    It is `torch.nn.functional.conv1d`, `conv2d` or `conv3d`, by the dimensions of `weight`, and gives what
    they give to rounding. An op without a division runs PyTorch's own convolution, undivided.

    Args:
        input: (n, c, *size), or (c, *size) for one sample.
        weight: (k, c / groups, *taps).
        bias: (k,), or None.
        stride: step of the filter; one number, or one a dimension.
        padding: zeros on each side, or "same" or "valid".
        dilation: step between the taps.
        groups: number of groups.
        fprop: division of the forward pass.
        dgrad: division of the input's gradient.
        wgrad: division of the weight's gradient.

    Raises:
        ProblemError: the shapes fit no convolution.
        OptionError: the divisions belong to different backends, or to none; the padding has no such name.
        BackendError: an algorithm in a division does not compute this.
        ValueError: a division is of another batch.
    """
    rank = weight.dim() - 2
    if rank not in _CONVOLUTIONS or input.dim() not in (rank + 1, rank + 2):
        raise ProblemError(
            f"The weight must have 3 to 5 dimensions, and the input as many or one less, "
            f"but got {weight.dim()} and {input.dim()}."
        )
    if is_traced(input, weight) or obstacle(input, weight, bias) is not None:
        return _CONVOLUTIONS[rank](input, weight, bias, stride, padding, dilation, groups)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ProblemError(
            f"The bias must have shape {tuple(weight.shape[:1])}, but got {tuple(bias.shape)}."
        )
    is_batched = input.dim() == rank + 2
    arguments = ConvArguments.of(rank, stride, padding, dilation, groups)
    batch = input if is_batched else input.unsqueeze(0)
    image, arguments = explicit_padding(batch, weight.shape[2:], arguments)
    given = {ConvOp.FPROP: fprop, ConvOp.DGRAD: dgrad, ConvOp.WGRAD: wgrad}
    divisions = {op: division for op, division in given.items() if division is not None}
    problem = problem_of(image, weight, bias is not None, arguments)
    result = _prepared(image.device, problem, tuple(divisions.items()))(image, weight, bias)
    return result if is_batched else result.squeeze(0)


@functools.lru_cache(256)
def _prepared(
    device: torch.device, problem: ConvProblem, divisions: tuple[tuple[ConvOp, Division], ...]
) -> DividedConvolution:
    """Return what runs these divisions; it is prepared once, since that takes longer than many a run."""
    backend = _backend_of([division for _, division in divisions], device)
    return DividedConvolution(backend, problem, dict(divisions))


def _backend_of(divisions: Sequence[Division], device: torch.device) -> Backend:
    names = {part.algorithm.partition(":")[0] for division in divisions for part in division.parts}
    if len(names) > 1:
        raise OptionError(f"All divisions must belong to one backend, but got {', '.join(sorted(names))}.")
    return backend_for(names.pop() if names else "auto", device)
