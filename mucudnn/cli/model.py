"""The user's model and its inputs, as the options want them."""

import contextlib
import importlib
import inspect
import sys
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from mucudnn.cli.options import Shape, Target
from mucudnn.cli.output import Failure, failing_as
from mucudnn.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor, nn

Shapes = tuple[Shape, ...]


def load_model(target: Target) -> "nn.Module":
    """Return the model that the user's module holds or makes.

    Raises:
        Failure: there is none; the message says what went wrong.
    """
    from torch import nn

    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    with failing_as(f"{target.module} cannot be imported"):
        module = importlib.import_module(target.module)
    with failing_as(f"{target} cannot be found"):
        made = attrgetter(target.name)(module)
    if callable(made) and not isinstance(made, nn.Module):
        _check_needs_nothing(made, target)
        with failing_as(f"{target} fails"):
            made = made()
    if not isinstance(made, nn.Module):
        got = type(made).__name__
        raise Failure(f"{target} must give a torch.nn.Module, but got a value of type {got}.")
    return made


def _check_needs_nothing(function: "Callable[..., object]", target: Target) -> None:
    """Verify that a function can be called without arguments, as far as its signature is known."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)  # a wrapper may have the arguments
    except (TypeError, ValueError):  # in C, or made strange
        return
    try:
        signature.bind()
    except TypeError as error:
        raise Failure(f"{target} is called without arguments, but is {error}.") from error


def refuse_lazy(model: "nn.Module", target: Target) -> None:
    """Refuse a model that makes parameters in its first call.

    Raises:
        Failure: it does.
    """
    from torch.nn.parameter import is_lazy

    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise Failure(f"{target} must call the model once before: its lazy modules have no parameters yet.")


def ready_on_inputs(
    model: "nn.Module",
    shapes: Shapes,
    device: "torch.device | None",
    *,
    is_eval: bool,
    dtype: str | None,
    autocast: str | None,
    channels_last: bool,
) -> "tuple[Tensor, ...]":
    """Get a model, lazy modules included, ready to run as the options ask; return random inputs for it.

    Raises:
        Failure: an input cannot be made, or the model cannot be run on the inputs.
    """
    prepare(model, is_eval=is_eval, dtype=dtype, channels_last=channels_last)
    if device is not None:
        model.to(device)
    inputs = _random_inputs(model, shapes, channels_last=channels_last)
    with autocasting(model, autocast):
        _make_lazy(model, inputs, channels_last=channels_last)
    return inputs


def prepare(model: "nn.Module", *, is_eval: bool, dtype: str | None, channels_last: bool) -> None:
    """Bring the model into the mode, type and layout that are asked for, but for lazy modules."""
    import torch

    model.train(not is_eval)
    if dtype is not None:
        model.to(dtype=getattr(torch, dtype))
    if channels_last:
        _lay_out(model)


def autocasting(model: "nn.Module", dtype: str | None) -> contextlib.AbstractContextManager[object]:
    """Return a context in which a model runs in autocast to a type; None changes nothing."""
    import torch

    from mucudnn.convolutions.modules import tuned_device

    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(tuned_device(model).type, getattr(torch, dtype))


def _make_lazy(model: "nn.Module", inputs: "tuple[Tensor, ...]", *, channels_last: bool) -> None:
    """Have lazy modules, if there are any, make their parameters, in the layout that is asked for."""
    from mucudnn.examining.arguments import CallArguments
    from mucudnn.examining.passes import make_parameters

    with failing_as("The model cannot be run"):
        make_parameters(model, CallArguments(inputs, {}))
    if channels_last:
        _lay_out(model)


def _lay_out(model: "nn.Module") -> None:
    from torch.nn.parameter import is_lazy

    for tensor in (*model.parameters(), *model.buffers()):
        if not is_lazy(tensor):
            tensor.data = laid_out_channels_last(tensor.data)


def laid_out_channels_last(tensor: "Tensor") -> "Tensor":
    """Return a tensor of 4 or 5 dimensions with the channels innermost, any other as it is."""
    import torch

    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    known = formats.get(tensor.dim())
    return tensor if known is None else tensor.contiguous(memory_format=known)


def device_of_backend(backend: str) -> "torch.device | None":
    """Return where a model must lie that `backend` tunes, or None where it may stay.

    Raises:
        BackendError: the backend needs a GPU, and torch can use none.
    """
    import torch

    if backend != "cudnn":
        return None
    if not torch.cuda.is_available():
        raise BackendError(
            "The backend 'cudnn' must have a GPU that torch can use, but torch.cuda.is_available() is False."
        )
    return torch.device("cuda")


def _random_inputs(model: "nn.Module", shapes: Shapes, *, channels_last: bool) -> "tuple[Tensor, ...]":
    """Return random inputs of the given shapes, on the model's device and of its type or their own."""
    import torch

    pattern = _pattern(model)
    generator = torch.Generator().manual_seed(0)

    def make(shape: Shape) -> "Tensor":
        dtype = _dtype_of(shape, pattern)
        if dtype.is_floating_point:
            return torch.randn(shape.sizes, generator=generator).to(pattern.device, dtype)
        return torch.randint(0, 2, shape.sizes, generator=generator).to(pattern.device, dtype)

    return _made(make, shapes, channels_last)


def shapeless_inputs(model: "nn.Module", shapes: Shapes, *, channels_last: bool) -> "tuple[Tensor, ...]":
    """Return inputs of the given shapes and of the model's type that have no values and take no memory.

    Raises:
        Failure: one of them has more elements than can be counted.
    """
    import torch

    pattern = _pattern(model)

    def make(shape: Shape) -> "Tensor":
        return torch.empty(shape.sizes, dtype=_dtype_of(shape, pattern), device="meta")

    return _made(make, shapes, channels_last)


def _made(make: "Callable[[Shape], Tensor]", shapes: Shapes, channels_last: bool) -> "tuple[Tensor, ...]":
    inputs = []
    for shape in shapes:
        with failing_as(f"An input of the shape {shape} cannot be made"):
            made = make(shape)
            inputs.append(laid_out_channels_last(made) if channels_last else made)
    return tuple(inputs)


def _dtype_of(shape: Shape, pattern: "Tensor") -> "torch.dtype":
    import torch

    return pattern.dtype if shape.dtype is None else getattr(torch, shape.dtype)


def _pattern(model: "nn.Module") -> "Tensor":
    import torch

    return next((each for each in model.parameters() if each.dtype.is_floating_point), torch.empty(0))
