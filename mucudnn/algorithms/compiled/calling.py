"""Calling C on tensors: structures, places in a workspace, one call for each thread.

What does not change from call to call is put in its place when a kernel is bound to a workspace; a call puts
addresses and steps of its images there. C believes what it is told, so every tensor is checked before.
"""

import abc
import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mucudnn.algorithms.base import checked
from mucudnn.algorithms.workers import run_on_workers
from mucudnn.problem import ConvOp, ConvProblem

_PROCESSOR = torch.device("cpu")

Function = Callable[[Any, Any], Any]
"""Takes a call and a share, by reference."""


def structure(kinds: Mapping[str, str], **parts: type[ctypes.Structure]) -> type[ctypes.Structure]:
    """Return a structure of fields by their kinds, behind some that are structures themselves.

    Whatever is no number is an address.
    """
    fields = [(name, ctypes.c_int64 if kind == "number" else ctypes.c_void_p) for name, kind in kinds.items()]
    return type("Told", (ctypes.Structure,), {"_fields_": [*parts.items(), *fields]})


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


def elements_between(places: Sequence[int], element_bytes: int) -> int:
    """Return the elements from one place to the next, of places that lie evenly apart; 0 for a single one."""
    return (places[1] - places[0]) // element_bytes if len(places) > 1 else 0


def run_shares(function: Function, call: ctypes.Structure, shares: Sequence[ctypes.Structure]) -> list[Any]:
    """Call a function for every thread's share; return what it returns for each."""
    calls = [functools.partial(function, call, share) for share in shares]
    return run_on_workers(calls) if len(calls) > 1 else [each() for each in calls]


class CompiledKernel(abc.ABC):
    """A micro-batch's kernel in C, bound to a workspace.

    A subclass sets `_call`, a structure with the images x and y, the bias and whether sums are added to, and
    `_shares`.

    Args:
        problem: of the micro-batch.
        space: the regions of the workspace by their names.
        functions: the library's, by their names.
    """

    _call: Any
    _shares: Sequence[ctypes.Structure]

    def __init__(
        self, problem: ConvProblem, space: Mapping[str, Tensor], functions: Mapping[str, Function]
    ) -> None:
        self._space, self._functions = space, functions
        self._is_dgrad = problem.op is ConvOp.DGRAD
        self._dtype: torch.dtype = getattr(torch, problem.dtype)
        self._image_shape = problem.output_shape if self._is_dgrad else problem.input_shape
        self._gradient_shape = problem.output_shape
        self._filter_shape = problem.filter_shape

    @abc.abstractmethod
    def _put_image(self, into: Any, image: Tensor) -> None:
        """Tell where an image lies, and how."""

    @abc.abstractmethod
    def _put_filter(self, tensor: Tensor) -> None:
        """Tell where the filter lies, or its gradient, and how."""

    def _run(self, *names: str) -> list[Any]:
        """Call functions one after another for every thread's share; return what the last one returns."""
        for name in names:
            results = run_shares(self._functions[name], self._call, self._shares)
        return results

    def _checked(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of that shape whose values lie in memory, or raise a BackendError."""
        return checked(tensor, shape, self._dtype, _PROCESSOR)

    def _run_slice(self, image: Tensor, out: Tensor, bias: Tensor | None, *names: str) -> list[float]:
        """Have functions write a part's result into `out`, of an image that is x; the bias is added."""
        image = self._checked(image, self._image_shape)
        self._put_image(self._call.x, image)
        self._put_image(self._call.y, out)
        if bias is None:
            self._call.bias = None
        else:
            bias = self._checked(bias, (self._filter_shape[0],))
            self._call.bias, self._call.bias_step = bias.data_ptr(), bias.stride(0)
        return self._run(*names)

    def _run_add(self, image: Tensor, gradient: Tensor, adds: bool, *names: str) -> list[float]:
        """Have functions multiply a part's images; these add to what is there, or write over it."""
        image = self._checked(image, self._image_shape)
        gradient = self._checked(gradient, self._gradient_shape)
        self._put_image(self._call.x, image)
        self._put_image(self._call.y, gradient)
        self._call.adds = adds
        return self._run(*names)
