"""Where a call of a convolution takes place: under autocast, watched by somebody, traced or transformed."""

import contextlib

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from mucudnn.convolutions.notices import Reason

_NOTHING = contextlib.nullcontext()

# What every call asks: each name on the way to a function is looked up where others have used the caches.
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_is_function_mode_enabled = torch._C._is_torch_function_mode_enabled
_tracing_state = torch._C._get_tracing_state
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_batched = torch._C._functorch.is_legacy_batchedtensor
_transform = torch._C._functorch.peek_interpreter_stack


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the type in which autocast has convolutions of this thread compute; None outside of it."""
    if not _is_any_autocast_enabled():
        return None
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def as_autocast(
    image: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the tensors as autocast passes them to a convolution: as `dtype`, but for float64 and integers.

    Source: PyTorch, aten/src/ATen/autocast_mode.h, cached_cast.
    """
    return _cast(image, dtype), _cast(weight, dtype), None if bias is None else _cast(bias, dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    given = tensor.dtype
    if given is dtype or given is torch.float64 or not given.is_floating_point:
        return tensor
    return tensor.to(dtype)


def without_autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    """Return a context for what is already cast to `dtype`; None says that there was nothing to cast.

    It takes 0.4 µs, where `torch.autocast` takes 2.4.
    """
    return _NOTHING if dtype is None else torch._C._DisableAutocast()


def is_of_a_class(*tensors: Tensor | None) -> bool:
    """Return whether a tensor has a class of its own that holds numbers as a plain one does."""
    return any(
        kind is not Tensor
        and kind is not Parameter
        and issubclass(kind, Tensor)
        and kind.__torch_dispatch__ is Tensor.__torch_dispatch__
        for kind in map(type, tensors)
    )


def as_plain(tensor: Tensor) -> Tensor:
    """Return such a tensor without its class, to be differentiated like it; any other as it is."""
    return tensor.as_subclass(Tensor) if is_of_a_class(tensor) else tensor


def watcher(*tensors: Tensor | None) -> tuple[Reason, str] | None:
    """Return why a call on `tensors` is left to PyTorch, and in words who watches it; None if nobody does.

    Who watches is a mode (FlopCounterMode, that of selective checkpoints, an `overriding_mode`) or the class
    of a tensor (DTensor). Where tensors hold no numbers, as in PyTorch's own ways to trace and to pretend,
    nothing is computed, and nobody watches.
    """
    present = [each for each in tensors if each is not None]
    with torch._C.DisableTorchFunctionSubclass():  # a class may refuse to be asked
        if any(not isinstance(each, Tensor) or each.is_meta for each in present):
            return None
    depth = torch._C._len_torch_dispatch_stack()
    if depth:
        mode = type(torch._C._get_dispatch_stack_at(depth - 1))
        return None if mode.is_infra_mode() else (Reason.WATCHED, f"in a {mode.__name__.lstrip('_')}")
    overriding = overriding_mode()
    if overriding is not None:
        return Reason.WATCHED, f"in a {overriding.__name__.lstrip('_')}"
    for kind in map(type, present):
        if kind not in (Tensor, torch.nn.Parameter) and not issubclass(kind, (FakeTensor, FunctionalTensor)):
            return Reason.OF_A_CLASS, f"with a {kind.__name__}"
    return None


def overriding_mode() -> type | None:
    """Return the class of a function mode in which PyTorch's functions may be others; None outside of it.

    PyTorch's own modes, such as that of `torch.set_default_device`, leave convolutions as they are, and the
    mode of `autotune` is ours.
    """
    if not _is_function_mode_enabled():
        return None
    for place in range(torch._C._len_torch_function_stack()):
        kind = type(torch._C._get_function_stack_at(place))
        if kind.__module__.partition(".")[0] not in ("torch", "mucudnn"):
            return kind
    return None


def is_traced(*tensors: Tensor | None) -> bool:
    """Return whether a call with `tensors` is being compiled, traced or transformed rather than computed."""
    return torch.compiler.is_compiling() or is_transformed(*tensors)


def is_transformed(*tensors: Tensor | None) -> bool:
    """Return whether a call is being traced or transformed; `is_traced` asks about compiling, too."""
    if _tracing_state() is not None or _dispatch_modes():
        return True
    for tensor in tensors:
        if tensor is None:
            continue
        if (type(tensor) is not Tensor and type(tensor) is not Parameter) or _is_batched(tensor):
            return True
    return are_derivatives_taken()


def are_derivatives_taken() -> bool:
    """Return whether what is computed is transformed by `torch.func`, or has derivatives in forward mode."""
    return _transform() is not None or forward_ad._current_level >= 0
