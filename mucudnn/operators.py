"""Divided convolutions as operators of PyTorch's, which torch.compile puts into its graphs.

    mucudnn::convolution(image, weight, bias, stride, padding, dilation, output_padding, groups, server)
    mucudnn::convolution_backward(gradient, image, weight, ... , server, needed)

What an operator runs is decided when it runs, by whom its last text names: so a graph that was compiled for
any batch is divided as the batch of each call asks for. `output_padding` is empty for what is not transposed.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mucudnn.calls import ConvArguments, own_call, own_gradients

_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Server(Protocol):
    """Who knows what runs a convolution."""

    def compute(self, image: Tensor, weight: Tensor, bias: Tensor | None, arguments: ConvArguments) -> Tensor:
        """Return the convolution, outside of autograd."""

    def gradients(
        self,
        gradient: Tensor,
        image: Tensor,
        weight: Tensor,
        arguments: ConvArguments,
        needed: tuple[bool, bool, bool],
    ) -> _Gradients:
        """Return dx, dw and the bias's gradient, each None unless it is `needed`."""


_servers: "weakref.WeakValueDictionary[str, Server]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


def announce(server: Server) -> str:
    """Return a name by which operators find `server` as long as somebody keeps it."""
    name = str(next(_numbers))
    _servers[name] = server
    return name


def convolve(
    image: Tensor, weight: Tensor, bias: Tensor | None, arguments: ConvArguments, server: str
) -> Tensor:
    """Return the convolution by the operator; the padding is in numbers."""
    result: Tensor = _convolution(image, weight, bias, *_flat(arguments), server)
    return result


def _flat(arguments: ConvArguments) -> tuple[list[int], list[int], list[int], list[int], int]:
    return (
        list(arguments.stride),
        [int(pad) for pad in arguments.padding],
        list(arguments.dilation),
        list(arguments.output_padding or ()),
        arguments.groups,
    )


def _arguments(
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
) -> ConvArguments:
    more = tuple(output_padding) if output_padding else None
    return ConvArguments(tuple(stride), tuple(padding), tuple(dilation), groups, more)


@torch.library.custom_op("mucudnn::convolution", mutates_args=())
def _convolution(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    server: str,
) -> Tensor:
    arguments = _arguments(stride, padding, dilation, output_padding, groups)
    return _servers[server].compute(image, weight, bias, arguments)


@_convolution.register_fake
def _(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    server: str,  # noqa: ARG001  # the shape is the same, whoever computes
) -> Tensor:
    return own_call(image, weight, bias, _arguments(stride, padding, dilation, output_padding, groups))


@torch.library.custom_op("mucudnn::convolution_backward", mutates_args=())
def _convolution_backward(
    gradient: Tensor,
    image: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    server: str,
    needed: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    arguments = _arguments(stride, padding, dilation, output_padding, groups)
    dx, dw, db = _servers[server].gradients(
        gradient, image, weight, arguments, (needed[0], needed[1], needed[2])
    )
    if dw is not None and dw.stride() != weight.stride():
        dw = torch.empty_like(weight).copy_(dw)
    return (
        gradient.new_empty(0) if dx is None else dx,
        gradient.new_empty(0) if dw is None else dw,
        gradient.new_empty(0) if db is None else db,
    )


@_convolution_backward.register_fake
def _(
    gradient: Tensor,
    image: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    server: str,  # noqa: ARG001  # the shapes are the same, whoever computes
    needed: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    arguments = _arguments(stride, padding, dilation, output_padding, groups)
    dx, _, _ = own_gradients(gradient, image, weight, arguments, (needed[0], False, False))
    return (
        gradient.new_empty(0) if dx is None else dx,
        torch.empty_like(weight) if needed[1] else gradient.new_empty(0),
        gradient.new_empty(gradient.shape[1]) if needed[2] else gradient.new_empty(0),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001  # PyTorch's interface
    image, weight, _, *ctx.rest = inputs
    ctx.save_for_backward(image, weight)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    image, weight = ctx.saved_tensors
    needed = list(ctx.needs_input_grad[:3])
    gradients = _convolution_backward(gradient, image, weight, *ctx.rest, needed)
    found = [each if is_needed else None for each, is_needed in zip(gradients, needed, strict=True)]
    return (*found, *(None for _ in ctx.rest))


_convolution.register_autograd(_differentiate, setup_context=_save)
