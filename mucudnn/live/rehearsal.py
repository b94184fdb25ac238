"""A convolution with its gradients as a model calls it: PyTorch's own, or divided.

Which route serves a convolution is looked up for each call, and autograd calls what is written in Python,
while PyTorch's own is found and differentiated in C++, both gradients at once. For small images that decides.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from mucudnn.algorithms.packed import image_order
from mucudnn.backends import Backend, backend_name
from mucudnn.convolutions.calls import ConvArguments
from mucudnn.convolutions.modules import Call
from mucudnn.errors import BackendError
from mucudnn.examining.passes import unhooked
from mucudnn.execution.workspace import Owner, workspace_of
from mucudnn.functional import DividedConvolution
from mucudnn.patching.compiling import GraphServer
from mucudnn.patching.operators import convolve
from mucudnn.patching.routing import Router
from mucudnn.problem import ConvOp, op_of
from mucudnn.profiling.measurer import Divisions, ModelCall

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
    call: ModelCall,
    divisions: Divisions,
    operands: Operands,
    owners: Mapping[ConvOp, Owner],
) -> Callable[[], None]:
    """Return a call that computes what a model does, within the limit.

    Args:
        backend: that computes.
        call: which convolution, and how its ops take memory.
        divisions: of what the model computes, by the problem's names: the forward pass alone in inference.
        operands: are only read.
        owners: of the ops' workspaces, all one in reuse mode.

    Raises:
        BackendError: an algorithm does not compute the problem; or, when it is called, nothing is divided.
    """
    if call.is_frozen:
        return _frozen(backend, call, divisions, operands, owners)
    problem = call.problem
    image, weight, bias, gradient = operands
    is_transposed = problem.op is ConvOp.DGRAD
    image = image.detach().requires_grad_(op_of(ConvOp.DGRAD, is_transposed=is_transposed) in divisions)
    weight = weight.detach().requires_grad_(ConvOp.WGRAD in divisions)
    bias = None if bias is None else bias.detach().requires_grad_(weight.requires_grad)
    wanted = [each for each in (image, weight, bias) if each is not None and each.requires_grad]
    serve = _served(backend, call, divisions, owners)

    def run() -> None:
        """Compute the forward pass, and the gradients that are wanted."""
        with torch.set_grad_enabled(bool(wanted)), unhooked():
            result = serve(image, weight, bias)
            if result is None:
                raise BackendError(f"{problem} is PyTorch's own in a model, and cannot be divided.")
            if wanted:
                torch.autograd.grad(result, wanted, gradient)

    return run


def _served(
    backend: Backend, call: ModelCall, divisions: Divisions, owners: Mapping[ConvOp, Owner]
) -> _Serve:
    """Return what serves the forward pass: PyTorch's own convolution if all divisions are."""
    problem = call.problem
    if _is_own(divisions):
        return functools.partial(backend.recorded_convolution, problem)
    convolution = DividedConvolution(backend, problem, divisions, owners, call.limits(divisions))
    router = Router((str(backend_name(backend.device)),), None)
    arguments = ConvArguments.of_problem(problem)

    is_short = call.lost_bytes(divisions) > 0

    def serve(image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        _leave_as_others_do(backend, call, owners, is_short=is_short)
        return router.served(Call(image, weight, bias, arguments), lambda *_: convolution)

    return serve


def _frozen(
    backend: Backend,
    call: ModelCall,
    divisions: Divisions,
    operands: Operands,
    owners: Mapping[ConvOp, Owner],
) -> Callable[[], None]:
    """Return a forward pass in a frozen graph: PyTorch's own packed there, or divided by its operator.

    Images lie channels last there; whoever wants them otherwise has them copied, and the result back. And
    what follows a convolution, such as batch norm and ReLU, is computed along with PyTorch's own, while the
    result of an operator is read and written once more for it.
    """
    _, weight, bias, _ = operands
    order = image_order(call.problem)
    image = operands.image.contiguous(memory_format=order)
    pack = backend.packing(call.problem) if _is_own(divisions) else None
    if pack is not None:
        return functools.partial(_ignoring, pack(weight, bias), image)
    convolution = DividedConvolution(backend, call.problem, divisions, owners, call.limits(divisions))
    router = Router((str(backend_name(backend.device)),), None)
    arguments = ConvArguments.of_problem(call.problem)
    server = GraphServer(router, lambda *_: convolution)
    is_short = call.lost_bytes(divisions) > 0

    def run() -> None:
        """Compute the forward pass."""
        _leave_as_others_do(backend, call, owners, is_short=is_short)
        with torch.no_grad(), unhooked():
            here = image.contiguous(memory_format=convolution.order)
            convolve(here, weight, bias, arguments, server.name).contiguous(memory_format=order).relu_()

    return run


def _ignoring(compute: Callable[[Tensor], Tensor], image: Tensor) -> None:
    """Compute a result that nobody wants."""
    compute(image)


def _is_own(divisions: Divisions) -> bool:
    return all(division.is_own for division in divisions.values())


def _leave_as_others_do(
    backend: Backend, call: ModelCall, owners: Mapping[ConvOp, Owner], *, is_short: bool
) -> None:
    """Leave the common buffer as other layers of a model leave it.

    No filter stays transformed in it, and where it `is_short` its end is given back, since PyTorch's own of
    other layers needs that room.
    """
    if call.is_sharing:
        return
    workspace = workspace_of(backend, owners[call.problem.op])
    workspace.holder = None
    if is_short:
        workspace.make_room(call.taken_bytes, call.limit_bytes, backend)
