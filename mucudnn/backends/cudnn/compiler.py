"""Kernels that cuDNN does not have: compiled by CuPy when they are first needed, put on PyTorch's streams."""

import ctypes
import functools
import importlib.metadata
import importlib.util
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from mucudnn.errors import BackendError
from mucudnn.interruptions import pass_on_interruption

_PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
"""Names under which CuPy is installed; it is imported as cupy by all of them."""

NOTHING = 'extern "C" __global__ void nothing() {}'
"""The source of a kernel that does nothing, for whoever wants to know whether there is a compiler."""


class KernelLaunch(Protocol):
    """Puts one kernel on a stream."""

    def __call__(self, stream: int, blocks: int, threads: int, arguments: Sequence[int]) -> None:
        """Launch it.

        Args:
            stream: its address.
            blocks: of threads.
            threads: of a block.
            arguments: addresses and numbers, all of 64 bits, in the kernel's order.

        Raises:
            BackendError: it cannot be launched.
        """


class _Stream(NamedTuple):
    """All that CuPy asks of a stream on which it puts a kernel."""

    ptr: int


@functools.cache
def version() -> str | None:
    """Return CuPy's version; None where it is not installed. Nothing is imported."""
    if importlib.util.find_spec("cupy") is None:
        return None
    for name in _PACKAGES:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def compiled(source: str, kernel: str) -> KernelLaunch:
    """Return what launches the kernel of that name in `source`, on the card that is the current one.

    It is compiled now, in a fraction of a second, or read from CuPy's cache.

    Raises:
        BackendError: CuPy cannot compile it, or cannot be used at all.
    """
    try:
        import cupy  # not before it is needed: this takes a second

        function = cupy.RawModule(code=source).get_function(kernel).kernel
    except Exception as error:
        pass_on_interruption(error)
        raise BackendError(f"CuPy {version()} could not compile a kernel: {_first_line(error)}") from error
    return _Compiled(function)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


class _Arguments(threading.local):
    """What a thread tells the driver of one kernel: an array of 64-bit values, and one of their addresses."""

    def __init__(self) -> None:
        self.count = -1

    def make(self, count: int) -> None:
        """Make the arrays for so many arguments."""
        self.count, self.values = count, (ctypes.c_int64 * count)()
        start, step = ctypes.addressof(self.values), ctypes.sizeof(ctypes.c_int64)
        self._addresses = (ctypes.c_void_p * count)(*(start + step * each for each in range(count)))
        self.address = ctypes.addressof(self._addresses)


class _Compiled:
    """A compiled kernel.

    CuPy's own call asks each argument for its type, which takes as long for twenty as several launches do. So
    it is made for a thread's first launch of the kernel only, for which CuPy makes the card's context a
    current one. The driver is called directly thereafter, where this CuPy has its function in its place.

    Args:
        function: CuPy's.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._put = _driver() if hasattr(function, "ptr") else None
        self._arguments = _Arguments()

    def __call__(self, stream: int, blocks: int, threads: int, arguments: Sequence[int]) -> None:
        known = self._arguments
        try:
            if self._put is None or known.count != len(arguments):
                numbers = tuple(map(np.int64, arguments))
                self._function((blocks,), (threads,), numbers, stream=_Stream(stream))
                known.make(len(arguments))
            else:
                known.values[:] = list(arguments)
                self._put(self._function.ptr, blocks, 1, 1, threads, 1, 1, 0, stream, known.address, 0)
        except Exception as error:
            pass_on_interruption(error)
            raise BackendError(f"A kernel could not be launched: {_first_line(error)}") from error


@functools.cache
def _driver() -> Callable[..., None] | None:
    """Return CuPy's function that launches a kernel through the driver; None if it is not where it was."""
    try:
        from cupy_backends.cuda.api.driver import launchKernel
    except ImportError:
        return None
    return cast(Callable[..., None], launchKernel)
