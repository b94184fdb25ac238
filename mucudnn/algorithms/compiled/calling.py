"""Calling C on tensors: structures, places in a workspace, one call for each thread.

C believes what it is told, so every tensor is looked at before: what autograd's hooks have made of a saved
one may be of another type or shape, and some have no memory.
"""

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mucudnn.algorithms.workers import run_on_workers
from mucudnn.errors import BackendError

Function = Callable[[Any, Any], Any]
"""Takes a call and a share, by reference."""

_TYPES = {"number": ctypes.c_int64, "address": ctypes.c_void_p}


def fields_of(kinds: Mapping[str, str]) -> list[tuple[str, Any]]:
    """Return the fields of a structure; whatever is no number is an address."""
    return [(name, _TYPES.get(kind, ctypes.c_void_p)) for name, kind in kinds.items()]


def functions_of(
    library: ctypes.CDLL,
    results: Mapping[str, Any],
    call: type[ctypes.Structure],
    share: type[ctypes.Structure],
) -> dict[str, Function]:
    """Return functions of a library by their names, with what each returns."""
    pointers = ctypes.POINTER(call), ctypes.POINTER(share)
    return {name: ctypes.CFUNCTYPE(type_, *pointers)((name, library)) for name, type_ in results.items()}


def place_of(space: Mapping[str, Tensor], name: str, worker: int) -> int | None:
    """Return where a thread's region lies, or the one that all share; None if there is none."""
    found = space.get(f"{name}{worker}", space.get(name))
    return None if found is None else found.data_ptr()


def run_shares(function: Function, call: ctypes.Structure, shares: Sequence[ctypes.Structure]) -> list[Any]:
    """Call a function for every thread's share; return what it returns for each."""
    calls = [functools.partial(function, call, share) for share in shares]
    return run_on_workers(calls) if len(calls) > 1 else [each() for each in calls]


def checked(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor whose values lie in memory, where C reads them while it is held.

    Negative views are copied, and zeros of which none are stored, such as gradients.

    Raises:
        BackendError: it is of another shape, type or device, or has no memory.
    """
    if tensor.is_neg() or tensor._is_zerotensor():
        tensor = tensor.clone()
    if tensor.shape != shape or tensor.dtype is not dtype or not tensor.is_cpu:
        raise BackendError(
            f"A tensor of {dtype} on the processor, of shape {tuple(shape)}, is needed, "
            f"but got one of {tensor.dtype} on {tensor.device}, of shape {tuple(tensor.shape)}."
        )
    if tensor.data_ptr() == 0:
        raise BackendError(f"A tensor of shape {tuple(shape)} has no memory.")
    return tensor
