"""A convolution with its gradients as a model calls it: PyTorch's own, or divided.

What serves a convolution is found for each call, and autograd calls what is written in Python, while
PyTorch's own is found and differentiated in C++, both gradients at once. For small images that decides.
"""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from mucudnn.backends import Backend, backend_name
from mucudnn.calls import op_of
from mucudnn.division import Division
from mucudnn.errors import BackendError
from mucudnn.functional import DividedConvolution, arguments_of
from mucudnn.modules import Call
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.routing import Router
from mucudnn.workspace import Owner

_Serve = Callable[[Tensor, Tensor, Tensor | None], Tensor | None]


class Operands(NamedTuple):
    """Tensors of one convolution.

    Attributes:
        image: what the forward pass reads.
        weight: (k, c / groups, *taps).
        bias: (k,), or None.
        gradient: of the result, in its shape.
    """

    image: Tensor
    weight: Tensor
    bias: Tensor | None
    gradient: Tensor


def rehearsed(
    backend: Backend,
    problem: ConvProblem,
    ops: Collection[ConvOp],
    divisions: Mapping[ConvOp, Division] | None,
    operands: Operands,
) -> Callable[[], None]:
    """Return a call that computes what a model does, in workspaces of its own.

    Args:
        backend: that computes.
        problem: of the forward pass: fprop, or dgrad of a transposed convolution.
        ops: what the model computes, by the problem's names: the forward pass alone in inference.
        divisions: what runs; None for PyTorch's own convolution.
        operands: are only read.

    Raises:
        BackendError: an algorithm does not compute the problem, or no call of it would be divided.
    """
    image, weight, bias, gradient = operands
    serve = _own(backend, problem) if divisions is None else _divided(backend, problem, divisions, operands)
    is_transposed = problem.op is ConvOp.DGRAD
    image = image.detach().requires_grad_(op_of(ConvOp.DGRAD, is_transposed=is_transposed) in ops)
    weight = weight.detach().requires_grad_(ConvOp.WGRAD in ops)
    bias = None if bias is None else bias.detach().requires_grad_(weight.requires_grad)
    wanted = [each for each in (image, weight, bias) if each is not None and each.requires_grad]

    def call() -> None:
        with torch.set_grad_enabled(bool(wanted)):
            result = serve(image, weight, bias)
            if wanted and result is not None:
                torch.autograd.grad(result, wanted, gradient)

    return call


def _own(backend: Backend, problem: ConvProblem) -> _Serve:
    def serve(image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return backend.recorded_convolution(problem, image, weight, bias)

    return serve


def _divided(
    backend: Backend, problem: ConvProblem, divisions: Mapping[ConvOp, Division], operands: Operands
) -> _Serve:
    convolution = DividedConvolution(backend, problem, divisions, {op: Owner() for op in divisions})
    router = Router((str(backend_name(backend.device)),), None)
    arguments = arguments_of(problem)

    def serve(image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        return router.served(Call.of(image, weight, bias, arguments), lambda *_: convolution)

    call = Call.of(operands.image, operands.weight, operands.bias, arguments)
    if router.found(call, lambda *_: convolution) is None:
        raise BackendError(f"{problem} is PyTorch's own in a model, and cannot be divided.")
    return serve
