"""Divided convolutions as operators of PyTorch's, which torch.compile puts into its graphs.

    mucudnn::convolution(image, weight, bias, stride, padding, dilation, output_padding, groups, server)
    mucudnn::inferred_convolution(the same)
    mucudnn::convolution_backward(gradient, image, weight, ... , server, needed, has_bias)
    mucudnn::traced_convolution(image, weight, bias, ... , server, is_constant)

What an operator runs is decided when it runs, by whom its last text names: so a graph that was compiled for
any batch is divided as the batch of each call asks for. `output_padding` is empty for what is not transposed.

The last is what Dynamo traces. When its graph is compiled it becomes the first, or where nothing is to be
differentiated the second, of which autograd knows nothing: that takes some 10 µs less, and 35 where others
have used the caches. If the graph is frozen for inference, the filter is a constant there, which Inductor
packs, and PyTorch's own convolution may be faster then.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from mucudnn.convolutions.calls import ConvArguments, own_call, own_gradients
from mucudnn.convolutions.strides import in_order, strided_as
from mucudnn.convolutions.surroundings import are_derivatives_taken
from mucudnn.patching.freezing import is_compiled_to_be_packed

_ONE_DIMENSION = 3
"""Dimensions of a batch of such images: samples, channels, places."""

_T = TypeVar("_T")

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
        has_bias: bool,
    ) -> _Gradients:
        """Return dx, dw and the bias's gradient, each None unless it is `needed`; the bias may be frozen."""

    def is_own_when_frozen(
        self, image: Tensor, weight: Tensor, bias: Tensor | None, arguments: ConvArguments
    ) -> bool:
        """Return whether a graph that is frozen for inference had better hold PyTorch's own convolution."""


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
    """Return the convolution by the operator that runs it; the padding is in numbers."""
    wanted = (each for each in (image, weight, bias) if each is not None and each.requires_grad)
    is_recorded = torch.is_grad_enabled() and next(wanted, None) is not None
    operator = _convolution if is_recorded else torch.ops.mucudnn.inferred_convolution.default
    result: Tensor = operator(image, weight, bias, *_flat(arguments), server)
    return result


def trace(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    arguments: ConvArguments,
    server: str,
    is_constant: bool,
) -> Tensor:
    """Return the convolution by the operator that Dynamo is to trace; the padding is in numbers.

    The filter `is_constant` if the graph, should it be frozen, holds it.
    """
    result: Tensor = torch.ops.mucudnn.traced_convolution.default(
        image, weight, bias, *_flat(arguments), server, is_constant
    )
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


_NOT_IN_TREES = (torch.Tag.cudagraph_unsafe,)
"""What torch.compile captures by itself (mode="reduce-overhead") lies before and after these operators: its
pool must hold nothing but results, and a buffer is none (pytorch#99985). torch.cuda.graph captures them."""


@torch.library.custom_op("mucudnn::convolution", mutates_args=(), tags=_NOT_IN_TREES)
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
    return _computed(image, weight, bias, stride, padding, dilation, output_padding, groups, server)


def _computed(image: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """Return the convolution, by whoever serves it."""
    *numbers, server = rest
    image = _plain(image)
    found = _servers.get(server)
    if found is None:  # the model was restored, or patched anew
        return own_call(image, weight, bias, _arguments(*numbers))
    return found.compute(image, weight, bias, _arguments(*numbers))


@_convolution.register_fake
def _shaped(image: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    *numbers, _ = rest  # the shape is the same, whoever computes
    return own_call(_plain(image), weight, bias, _arguments(*numbers))


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor of one dimension's images as PyTorch's convolutions would have it: contiguous.

    One of a single channel may be that and look channels_last to them, and so would the result.
    """
    return in_order(tensor, torch.contiguous_format) if tensor.dim() == _ONE_DIMENSION else tensor


_library = torch.library.Library("mucudnn", "FRAGMENT")
_library.define(
    "inferred_convolution(Tensor image, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation, SymInt[] output_padding, SymInt groups, str server) -> Tensor",
    tags=_NOT_IN_TREES,
)
for _kind in ("CPU", "CUDA"):
    _library.impl("inferred_convolution", _computed, _kind)
torch.library.register_fake("mucudnn::inferred_convolution", _shaped, lib=_library)
_library.define(
    "traced_convolution(Tensor image, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation, SymInt[] output_padding, SymInt groups, str server, bool is_constant) -> Tensor",
)


@torch.library.impl(_library, "traced_convolution", "CompositeImplicitAutograd")
def _traced_convolution(image: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    *numbers, server, is_constant = rest
    arguments = _arguments(*numbers)
    if are_derivatives_taken():  # since the graph was traced, where a compiler runs it as it is
        return own_call(image, weight, bias, arguments)
    found = _servers.get(server) if is_constant and is_compiled_to_be_packed() else None
    if found is not None and found.is_own_when_frozen(image, weight, bias, arguments):
        return own_call(image, weight, bias, arguments)
    return convolve(image, weight, bias, arguments, server)


@torch.library.custom_op("mucudnn::convolution_backward", mutates_args=(), tags=_NOT_IN_TREES)
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
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    arguments, wanted = _arguments(stride, padding, dilation, output_padding, groups), _three(needed)
    gradient, image = _plain(gradient), _plain(image)
    found = _servers.get(server)
    if found is None:
        dx, dw, db = own_gradients(gradient, image, weight, arguments, wanted)
    else:
        dx, dw, db = found.gradients(gradient, image, weight, arguments, wanted, has_bias)
    if dw is not None:
        dw = strided_as(weight, dw)
        dw = dw if dw.stride() == weight.stride() else torch.empty_like(weight).copy_(dw)
    return (
        gradient.new_empty(0) if dx is None else dx,
        gradient.new_empty(0) if dw is None else dw,
        gradient.new_empty(0) if db is None else db,
    )


@_convolution_backward.register_fake
def _(gradient: Tensor, image: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *numbers, _, needed, _ = rest  # the shapes are the same, whoever computes
    gradient, image = _plain(gradient), _plain(image)
    dx, _, _ = own_gradients(gradient, image, weight, _arguments(*numbers), (needed[0], False, False))
    return (
        gradient.new_empty(0) if dx is None else dx,
        torch.empty_like(weight) if needed[1] else gradient.new_empty(0),
        gradient.new_empty(gradient.shape[1]) if needed[2] else gradient.new_empty(0),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001  # PyTorch's interface
    image, weight, bias, *ctx.rest = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(image, weight)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients that are differentiated again are those of PyTorch's own, which has all derivatives."""
    image, weight = ctx.saved_tensors
    needed = _three(ctx.needs_input_grad)
    found: _Gradients
    if torch.is_grad_enabled() or are_derivatives_taken():
        *numbers, _ = ctx.rest
        found = own_gradients(gradient, image, weight, _arguments(*numbers), needed)
    else:
        given = _convolution_backward(gradient, image, weight, *ctx.rest, list(needed), ctx.has_bias)
        found = _three([each if is_needed else None for each, is_needed in zip(given, needed, strict=True)])
    return (*found, *(None for _ in ctx.rest))


def _three(each: Sequence[_T]) -> tuple[_T, _T, _T]:
    return each[0], each[1], each[2]


_convolution.register_autograd(_differentiate, setup_context=_save)
