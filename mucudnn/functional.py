"""The divided convolution: what a convolution computes, in micro-batches, with its gradients."""

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mucudnn.algorithms.base import memory_format
from mucudnn.backends import Backend, backend_for, backend_named_by
from mucudnn.convolutions.calls import (
    CONVOLUTIONS,
    ConvArguments,
    Numbers,
    explicit_padding,
    obstacle,
    own_call,
    own_gradients,
    problem_of,
)
from mucudnn.convolutions.strides import in_order, strided_as
from mucudnn.convolutions.surroundings import as_autocast, autocast_dtype, is_traced, without_autocast
from mucudnn.division import Division, undivided
from mucudnn.errors import OptionError, ProblemError
from mucudnn.execution.runner import Runner
from mucudnn.execution.workspace import Owner, workspace_of
from mucudnn.problem import ConvOp, ConvProblem, op_of, problems_of


class DividedConvolution:
    """One convolution of given shapes, with a division for each of its ops; differentiable.

    An op without a division runs PyTorch's own convolution, undivided.

    Attributes:
        problem: of the forward pass.
        buffer_bytes: of the workspace that each op needs.
        is_own: whether all that runs is PyTorch's own convolution, undivided.
        order: memory format in which images and gradients are wanted.
        arguments: of PyTorch's call that this stands for.
    """

    def __init__(
        self,
        backend: Backend,
        problem: ConvProblem,
        divisions: Mapping[ConvOp, Division],
        owners: Mapping[ConvOp, Owner] | None = None,
        limits: Mapping[ConvOp, int] | None = None,
        capacity_bytes: int = 0,
        untuned: Mapping[ConvOp, Callable[[], None]] | None = None,
    ) -> None:
        """Prepare the three ops.

        Args:
            backend: that runs all of them.
            problem: of the forward pass: fprop, or dgrad of a transposed convolution.
            divisions: of the same batch, by the problems' ops.
            owners: of the workspaces, in sharing mode; without them all sites share one.
            limits: bytes that the buffer and what PyTorch's own takes beside it may take together.
            capacity_bytes: what the buffer may grow to at once, since other convolutions need it.
            untuned: who is told when a gradient is computed that was not tuned: the input's as dgrad, the
                weight's as wgrad.
        """
        self._backend = backend
        self.problem = problem
        self._owners = owners or {}
        self._untuned = untuned or {}
        own = undivided(backend.own, problem.batch)
        self._runners = {
            op: Runner(backend, part, divisions.get(op, own), (limits or {}).get(op), capacity_bytes)
            for op, part in problems_of(problem).items()
        }
        self.buffer_bytes = {op: runner.buffer_bytes for op, runner in self._runners.items()}
        self.is_own = not limits and all(runner.is_own for runner in self._runners.values())
        self.order = memory_format(problem.layout, len(problem.input_shape))
        self.arguments = ConvArguments.of_problem(problem)
        image_shape = problem.output_shape if self.arguments.is_transposed else problem.input_shape
        self._shapes = (image_shape, problem.filter_shape)
        self._forward, self._input_gradient = (
            op_of(role, is_transposed=self.arguments.is_transposed) for role in (ConvOp.FPROP, ConvOp.DGRAD)
        )
        free = {op for op, runner in self._runners.items() if runner.is_own and op not in (limits or {})}
        self._is_forward_own = self._forward in free
        self._are_gradients_own = {self._input_gradient, ConvOp.WGRAD} <= free

    def __call__(self, image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return y, shape (n, k, *size), in the problem's layout."""
        if self.is_own:
            return own_call(image, weight, bias, self.arguments)
        if torch.is_grad_enabled() and (
            image.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
        ):
            result: Tensor = _Convolution.apply(image, weight, bias, self)  # type: ignore[no-untyped-call]
            return result
        return self.forward(image, weight, bias, keeps_filter=True)  # nobody trains

    def run(
        self,
        op: ConvOp,
        first: Tensor,
        second: Tensor,
        bias: Tensor | None = None,
        unread: Tensor | None = None,
        *,
        keeps_filter: bool = False,
    ) -> Tensor:
        """Return the result of one op, outside of autograd; see `Runner`."""
        workspace = workspace_of(self._backend, self._owners.get(op))
        return self._runners[op](workspace, first, second, bias, unread, keeps_filter=keeps_filter)

    def forward(
        self, image: Tensor, weight: Tensor, bias: Tensor | None, *, keeps_filter: bool = False
    ) -> Tensor:
        """Return y, shape (n, k, *size), outside of autograd; see `Runner`."""
        image = image.contiguous(memory_format=self.order)
        if self._is_forward_own:
            return own_call(image, weight, bias, self.arguments)
        if self._forward is ConvOp.FPROP:
            return self.run(ConvOp.FPROP, image, weight, bias, keeps_filter=keeps_filter)
        result = self.run(self._forward, image, weight, keeps_filter=keeps_filter)
        return result if bias is None else result.add_(bias.view(-1, *(1,) * (result.dim() - 2)))

    def gradients(
        self, gradient: Tensor, image: Tensor, weight: Tensor, needed: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return dx, dw and the bias's gradient, each None unless it is `needed`."""
        if self._untuned:
            self._tell_untuned(needed)
        gradient = in_order(gradient, self.order)
        if self._are_gradients_own and not (needed[2] and _is_copied_to_sum(gradient)):
            return own_gradients(gradient, image, weight, self.arguments, needed)
        if needed[1] or self.problem.is_apart:  # what is kept is the caller's, such as a slice
            image = image.contiguous(memory_format=self.order)
        x, dy = (gradient, image) if self.arguments.is_transposed else (image, gradient)
        unread = image if image.is_contiguous(memory_format=self.order) else None
        dx = self.run(self._input_gradient, gradient, weight, unread=unread) if needed[0] else None
        dw = strided_as(weight, self.run(ConvOp.WGRAD, x, dy, unread=weight)) if needed[1] else None
        return dx, dw, _bias_gradient(gradient) if needed[2] else None

    def computes(self, image: Tensor, weight: Tensor, gradient: Tensor) -> bool:
        """Return whether this convolution's gradients can be computed of these tensors.

        Hooks of saved tensors may return anything, and `data` of an image or a weight may be set.
        """
        return (
            (image.shape, weight.shape) == self._shapes
            and image.dtype == weight.dtype == gradient.dtype
            and image.device == weight.device == gradient.device
        )

    def _tell_untuned(self, needed: tuple[bool, bool, bool]) -> None:
        for role, is_needed in zip((ConvOp.DGRAD, ConvOp.WGRAD), needed, strict=False):
            if is_needed and role in self._untuned:
                self._untuned[role]()


_SUMMED_BYTES = 2**20
"""Of dy in 32 bits, to be summed at once: no more than libraries may take beside a workspace."""


def _is_copied_to_sum(gradient: Tensor) -> bool:
    """Return whether PyTorch's sum over images and pixels copies all of dy to 32 bits, and that is much.

    On processors it does so of 16 bits where channels lie between images, each of several pixels.
    """
    if gradient.dtype.itemsize != 2 or not gradient.is_cpu or 4 * gradient.numel() <= _SUMMED_BYTES:
        return False
    images, channels, *size = gradient.shape
    return gradient.is_contiguous() and min(images, channels, math.prod(size)) > 1


def _bias_gradient(gradient: Tensor) -> Tensor:
    """Return the sum of dy, shape (n, k, *size), over images and pixels, shape (k,).

    What PyTorch would copy is summed in blocks: of some channels, else of some images of a channel, else of
    some pixels of an image; in 32 bits as there, and rounded once.
    """
    if not _is_copied_to_sum(gradient):
        return gradient.sum((0, *range(2, gradient.dim())))
    flat, most = gradient.flatten(2), max(1, _SUMMED_BYTES // 4)
    pixels = min(flat.shape[2], most)
    images = min(flat.shape[0], most // pixels)
    channels = most // (pixels * images)
    total = gradient.new_zeros(flat.shape[1], dtype=torch.float32)
    for into, block in zip(total.split(channels), flat.split(channels, 1), strict=True):
        for some in block.split(images):
            for few in some.split(pixels, 2):
                into += few.sum((0, 2), dtype=total.dtype)
    return total.to(gradient.dtype)


class _Convolution(torch.autograd.Function):
    """Forward and backward of a `DividedConvolution`."""

    @staticmethod
    def forward(
        ctx: Any, image: Tensor, weight: Tensor, bias: Tensor | None, convolution: DividedConvolution
    ) -> Tensor:
        """Return y, shape (n, k, *size), and keep x and w for the gradients."""
        ctx.save_for_backward(image, weight)
        ctx.set_materialize_grads(False)
        ctx.convolution = convolution
        return convolution.forward(image, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return dx, dw and the bias's gradient, in the shapes of x, w and (k,); None where nobody asks.

        `gradients` is dy alone, shape (n, k, *size), or None where there is none, as of what is detached
        behind. The last None stands for the convolution itself.
        """
        (gradient,) = gradients
        if gradient is None:
            return (None,) * 4
        image, weight = ctx.saved_tensors
        # Gradients that are differentiated again, or batched, only PyTorch's own can compute; hooks of saved
        # tensors may have made others of them.
        again = torch.is_grad_enabled() or is_traced(gradient, image, weight)
        convolution: DividedConvolution = ctx.convolution
        needed = _wanted(ctx)
        with without_autocast(autocast_dtype(image.device)):  # of who calls backward in it
            if again or not convolution.computes(image, weight, gradient):
                return (*own_gradients(gradient, image, weight, convolution.arguments, needed), None)
            return (*convolution.gradients(gradient, image, weight, needed), None)


def _wanted(ctx: Any) -> tuple[bool, bool, bool]:
    """Return of which of x, w and the bias this backward pass uses the gradients.

    `needs_input_grad` tells who may have one. `torch.autograd.grad` of the input alone uses no weight's, and
    PyTorch's own would compute none.
    """
    nodes = [*(node for node, _ in ctx.next_functions), None]  # without a bias there are two
    x, w, bias = (
        needs and _is_reached(node) for needs, node in zip(ctx.needs_input_grad, nodes[:3], strict=False)
    )
    return x, w, bias


def _is_reached(node: Any) -> bool:
    """Return whether the backward pass that runs goes on to a node."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # no pass runs, or it ends there and returns the gradient
        return True


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
        OptionError: a division is of another batch; they belong to different backends, to none, or to one for
            another device; the padding has no such name.
        BackendError: an algorithm in a division does not compute this.
    """
    rank = weight.dim() - 2
    if rank not in CONVOLUTIONS or input.dim() not in (rank + 1, rank + 2):
        raise ProblemError(
            f"The weight must have 3 to 5 dimensions, and the input as many or one less, "
            f"but got {weight.dim()} and {input.dim()}."
        )
    arguments = ConvArguments.of(rank, stride, padding, dilation, groups)
    dtype = autocast_dtype(input.device)
    if dtype is not None and not is_traced(input, weight, bias):
        input, weight, bias = as_autocast(input, weight, bias, dtype)  # noqa: A001  # PyTorch's name
    has_no_values = input.device.type == "meta"
    if has_no_values or is_traced(input, weight, bias) or obstacle(input, weight, bias) is not None:
        return own_call(input, weight, bias, arguments)
    given = {ConvOp.FPROP: fprop, ConvOp.DGRAD: dgrad, ConvOp.WGRAD: wgrad}
    divisions = tuple((op, division) for op, division in given.items() if division is not None)
    with without_autocast(dtype):
        if input.dim() == rank + 1:
            return _divided_conv(input.unsqueeze(0), weight, bias, arguments, divisions).squeeze(0)
        return _divided_conv(input, weight, bias, arguments, divisions)


def _divided_conv(
    batch: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    arguments: ConvArguments,
    divisions: tuple[tuple[ConvOp, Division], ...],
) -> Tensor:
    """Return the convolution of a batch, outside of autocast."""
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ProblemError(
            f"The bias must have shape {tuple(weight.shape[:1])}, but got {tuple(bias.shape)}."
        )
    image, arguments = explicit_padding(batch, weight.shape[2:], arguments)
    problem = problem_of(image, weight, bias is not None, arguments)
    backend = _backend_of([division for _, division in divisions], image.device)
    if backend.device.type != image.device.type:
        raise OptionError(
            f"Divisions of the backend '{backend.name}' must run on {backend.device.type}, but the image "
            f"lies on {image.device}."
        )
    return _prepared(image.device, backend.flags(), problem, divisions)(image, weight, bias)


@functools.lru_cache(256)
def _prepared(
    device: torch.device,
    flags: Hashable,  # noqa: ARG001  # what may run depends on these
    problem: ConvProblem,
    divisions: tuple[tuple[ConvOp, Division], ...],
) -> DividedConvolution:
    """Return what runs these divisions; it is prepared once, since that takes longer than many a run."""
    backend = _backend_of([division for _, division in divisions], device)
    return DividedConvolution(backend, problem, dict(divisions))


def _backend_of(divisions: Sequence[Division], device: torch.device) -> Backend:
    names = {backend_named_by(part.algorithm) for division in divisions for part in division.parts}
    if len(names) > 1:
        raise OptionError(f"All divisions must belong to one backend, but got {', '.join(sorted(names))}.")
    return backend_for(names.pop() if names else "auto", device)
