"""Calls of PyTorch's functions of convolutions, seen on their way, after the classes of their tensors.

A class of tensors may have functions mean something else, or give results that are of the class again, by its
`__torch_function__`. So it has its say first; what it then asks of PyTorch is seen here as of plain tensors.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_overloaded_args

from mucudnn.convolutions.calls import CONVOLUTIONS, TRANSPOSED, ConvArguments, Numbers, numbers, rank_of
from mucudnn.convolutions.modules import Call
from mucudnn.convolutions.surroundings import as_plain, is_of_a_class, overriding_mode


def _plain(
    rank: int,
    input: Tensor,  # noqa: A002  # PyTorch's name
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers | str = 0,
    dilation: Numbers = 1,
    groups: int = 1,
) -> Call:
    _check(rank, input, weight)
    return Call(input, weight, bias, ConvArguments.of(rank, stride, padding, dilation, groups))


def _transposed(
    rank: int,
    input: Tensor,  # noqa: A002  # PyTorch's name
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers = 0,
    output_padding: Numbers = 0,
    groups: int = 1,
    dilation: Numbers = 1,
) -> Call:
    _check(rank, input, weight)
    plain = ConvArguments.of(rank, stride, padding, dilation, groups)
    more = numbers(output_padding, rank)
    return Call(input, weight, bias, plain._replace(output_padding=more))


def _check(rank: int, image: object, weight: object) -> None:
    """Verify that a function of so many spatial dimensions may be called with these.

    Raises:
        TypeError: these are no tensors, but stand for some where a graph is traced, and note questions; or
            the filter has other dimensions.
    """
    if not isinstance(image, Tensor) or not isinstance(weight, Tensor):
        raise TypeError("The image and the weight must be tensors.")
    if rank_of(weight) != rank:
        raise TypeError(f"The weight must have {rank} spatial dimensions.")


_READERS: dict[object, Callable[..., Call]] = {
    function: functools.partial(read, rank)
    for read, functions in ((_plain, CONVOLUTIONS), (_transposed, TRANSPOSED))
    for rank, function in functions.items()
}
"""What reads a call of each of PyTorch's functions."""


class ConvolutionMode(TorchFunctionMode):
    """While it is entered, a subclass computes convolutions; what it leaves, PyTorch's own does.

    Attributes:
        _within: is entered for all that is computed.
    """

    _within: AbstractContextManager[object] = contextlib.nullcontext()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute `func`, in the subclass's way if it is a convolution."""
        given = kwargs or {}
        read = _READERS.get(func)
        if read is None or self._passes_by():
            return func(*args, **given)
        try:
            call = read(*args, **given)
        except (TypeError, AttributeError):
            return func(*args, **given)  # it says what is wrong
        if torch.compiler.is_compiling():
            result = self._compiled(call)
            return func(*args, **given) if result is None else result
        if overriding_mode() is None:  # which would see what is asked here
            if types:
                with self:
                    result = _asked(call, func, types, args, given)
                return func(*args, **given) if result is NotImplemented else result  # which says so
            if is_of_a_class(call.image, call.weight, call.bias):
                call = _plain_call(call)
        with self._within:
            result = self._computed(call)
            return func(*args, **given) if result is None else result

    def _passes_by(self) -> bool:
        """Return whether PyTorch's own computes whatever is called now."""
        return False

    def _compiled(self, call: Call) -> Tensor | None:  # noqa: ARG002  # a subclass may have one
        """Return the operator that runs a call being compiled, or None where PyTorch's own is to."""
        return None

    def _computed(self, call: Call) -> Tensor | None:  # noqa: ARG002  # a subclass has one
        """Return the convolution, or None where PyTorch's own serves the call."""
        return None


class Serving(ConvolutionMode):
    """A mode in which a function computes convolutions; where it returns None, PyTorch's own does."""

    def __init__(self, serve: Callable[[Call], Tensor | None]) -> None:
        super().__init__()
        self._serve = serve

    def _computed(self, call: Call) -> Tensor | None:
        return self._serve(call)


def _plain_call(call: Call) -> Call:
    """Return the call with plain tensors, where their classes have been asked, or are not to be."""
    bias = None if call.bias is None else as_plain(call.bias)
    return call._replace(image=as_plain(call.image), weight=as_plain(call.weight), bias=bias)


def _asked(
    call: Call,
    func: Callable[..., Any],
    types: Iterable[type],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Return what the first class of a call's tensors that knows `func` makes of it, in PyTorch's order.

    NotImplemented if none of them knows it.
    """
    for each in _get_overloaded_args((call.image, call.weight, call.bias)):
        result = each.__torch_function__(func, types, args, kwargs)
        if result is not NotImplemented:
            return result
    return NotImplemented
