"""Kernels that cuDNN does not have: compiled by CuPy when they are first needed, put on PyTorch's streams."""

import functools
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from mucudnn.errors import BackendError

_PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
"""Names under which CuPy is installed; it is imported as cupy by all of them."""

NOTHING = 'extern "C" __global__ void nothing() {}'
"""The source of a kernel that does nothing, for whoever wants to know whether there is a compiler."""


class Launch(Protocol):
    """Puts one kernel on a stream."""

    def __call__(self, stream: int, blocks: int, threads: int, arguments: Sequence[np.int64]) -> None:
        """Launch it.

        Args:
            stream: its address.
            blocks: of threads.
            threads: of a block.
            arguments: addresses and numbers, all of 64 bits, in the kernel's order.
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


def compiled(source: str, kernel: str) -> Launch:
    """Return what launches the kernel of that name in `source`, on the card that is the current one.

    It is compiled now, in a fraction of a second, or read from CuPy's cache.

    Raises:
        BackendError: CuPy cannot compile it, or cannot be used at all.
    """
    try:
        import cupy  # not before it is needed: this takes a second

        function = cupy.RawModule(code=source).get_function(kernel).kernel
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise BackendError(f"CuPy {version()} could not compile a kernel: {reason}") from error

    def launch(stream: int, blocks: int, threads: int, arguments: Sequence[np.int64]) -> None:
        function((blocks,), (threads,), tuple(arguments), stream=_Stream(stream))

    return launch
