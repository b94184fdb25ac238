"""Convolutions inside of torch.compile: what its graphs hold, and who serves them when they run."""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from mucudnn.convolutions.calls import ConvArguments, own_call, own_gradients, problem_of
from mucudnn.convolutions.modules import Call, padded
from mucudnn.convolutions.surroundings import (
    are_derivatives_taken,
    as_autocast,
    autocast_dtype,
    overriding_mode,
    without_autocast,
)
from mucudnn.errors import OptionError, ProblemError
from mucudnn.patching.freezing import is_traced_to_be_frozen
from mucudnn.patching.operators import announce, trace
from mucudnn.patching.routing import Decide, Router
from mucudnn.problem import ConvProblem

_PLAIN = (Tensor, nn.Parameter)
_ANYWHERE = nullcontext()


_Function = TypeVar("_Function", bound=Callable[..., bool])


def constant(function: _Function) -> _Function:
    """Have Dynamo take what a function returns while it traces for a constant of the graph.

    `torch.compiler.assume_constant_result` does the same, but loads Dynamo for it: a second and 70 MB of
    those who compile nothing.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant
def _is_transformed() -> bool:
    """Return whether derivatives are taken within what is compiled.

    A graph that is traced under some is used only under the same. One from before may run in forward mode,
    which its operator sees as long as no compiler has rewritten it.
    """
    return are_derivatives_taken()


@constant
def _is_exported() -> bool:
    """Return whether the graph is exported; Dynamo of torch 2.11 takes that for true everywhere."""
    return torch.compiler.is_exporting()


@constant
def _has_autocast(kind: str) -> bool:
    """Return whether a kind of device has autocast; Dynamo of torch 2.11 does not look into that."""
    return torch.amp.is_autocast_available(kind)


@constant
def _holds_constants() -> bool:
    """Return whether parameters are constants of the graph being traced."""
    return is_traced_to_be_frozen()


def in_graph(call: Call, module: nn.Module | None, server: str) -> Tensor | None:
    """Return the operator that runs a call being compiled, or None where a graph is to hold PyTorch's own.

    Graphs that are exported leave this process, in which the operator finds what is divided.

    Args:
        call: being compiled.
        module: whose call it is; None for a function's.
        server: the name of who is to serve it.
    """
    if _is_exported() or _is_transformed() or overriding_mode() is not None:
        return None
    tensors = (call.image, call.weight) if call.bias is None else (call.image, call.weight, call.bias)
    if any(type(each) not in _PLAIN for each in tensors):  # for which there is no operator
        return None
    if call.image.dim() == call.weight.dim() - 1:
        batch = in_graph(call._replace(image=call.image.unsqueeze(0)), module, server)
        return None if batch is None else batch.squeeze(0)
    if call.image.dim() != call.weight.dim():
        return None
    # A filter that the model computes, or that is passed in, is none.
    is_constant = type(call.weight) is nn.Parameter and module is not None and call.weight is module.weight
    is_constant = is_constant and _holds_constants()
    image, arguments = padded(module, call)
    weight, bias, kind = call.weight, call.bias, image.device.type
    if _has_autocast(kind) and torch.is_autocast_enabled(kind):  # which knows nothing of the operator
        image, weight, bias = as_autocast(image, weight, bias, torch.get_autocast_dtype(kind))
    return trace(image, weight, bias, arguments, server, is_constant)


def _never(problem: ConvProblem) -> bool:  # noqa: ARG001  # nothing is known of any
    return False


class GraphServer:
    """Serves the calls that graphs hold, by a router; a `mucudnn.patching.operators.Server`.

    Attributes:
        name: by which graphs find it as long as somebody keeps it.
    """

    def __init__(
        self,
        router: Router,
        decide: Decide,
        needs: Hashable = None,
        *,
        recall: Decide | None = None,
        within: AbstractContextManager[object] = _ANYWHERE,
        is_own_when_frozen: Callable[[ConvProblem], bool] = _never,
    ) -> None:
        """Take what `Router.found` takes for each call.

        Args:
            router: finds what runs.
            decide: is asked for shapes that are not known.
            needs: what else its answer depends on.
            recall: is asked in the backward pass, if not the same.
            within: is entered for all that is computed.
            is_own_when_frozen: is asked for the problems of graphs that are frozen for inference.
        """
        self._router = router
        self._decide = decide
        self._needs = needs
        self._recall = recall or decide
        self._within = within
        self._is_own_when_frozen = is_own_when_frozen
        self.name = announce(self)

    def is_own_when_frozen(
        self, image: Tensor, weight: Tensor, bias: Tensor | None, arguments: ConvArguments
    ) -> bool:
        """Return whether a frozen graph had better hold PyTorch's own convolution, of tensors being traced.

        Of a graph for any batch Inductor packs no filters.
        """
        if not all(type(size) is int for size in (*image.shape, *weight.shape)):
            return False
        try:
            problem = problem_of(image, weight, bias is not None, arguments)
        except (OptionError, ProblemError):
            return False
        return self._is_own_when_frozen(problem)

    def compute(self, image: Tensor, weight: Tensor, bias: Tensor | None, arguments: ConvArguments) -> Tensor:
        """Return the convolution, outside of autograd."""
        with self._within:
            result = self._router.served(Call(image, weight, bias, arguments), self._decide, self._needs)
            return own_call(image, weight, bias, arguments) if result is None else result

    def gradients(
        self,
        gradient: Tensor,
        image: Tensor,
        weight: Tensor,
        arguments: ConvArguments,
        needed: tuple[bool, bool, bool],
        has_bias: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients, each None unless it is `needed`."""
        bias = gradient.new_empty(gradient.shape[1]) if has_bias else None
        plain = without_autocast(autocast_dtype(image.device))  # of who calls backward in it
        with self._within, plain:
            route = self._router.found(Call(image, weight, bias, arguments), self._recall, self._needs)
            if route is None:
                return own_gradients(gradient, image, weight, arguments, needed)
            return route.convolution.gradients(gradient, image, weight, needed)
