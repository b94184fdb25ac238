"""Kernels that cuDNN does not have: compiled by CuPy when they are first needed, put on PyTorch's streams."""

import functools
import importlib.metadata
import importlib.util
from typing import Any, Protocol

import numpy as np

_PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
"""Names under which CuPy is installed; it is imported as cupy by all of them."""


class Launch(Protocol):
    """Puts one kernel on a stream."""

    def __call__(self, stream: int, blocks: int, threads: int, *arguments: int) -> None:
        """Launch it.

        Args:
            stream: its address.
            blocks: of threads.
            threads: of a block.
            arguments: addresses and 64-bit numbers, in the kernel's order.
        """


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
    """
    import cupy  # not before it is needed: this takes a second

    function = cupy.RawModule(code=source).get_function(kernel)
    function.kernel  # noqa: B018  # compiles and loads it

    def launch(stream: int, blocks: int, threads: int, *arguments: int) -> None:
        with _stream(stream):
            function((blocks,), (threads,), tuple(map(np.int64, arguments)))

    return launch


class _Address:
    """A stream of somebody else, by the protocol that CUDA's Python libraries share."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


@functools.lru_cache(64)
def _stream(address: int) -> Any:
    """Return CuPy's object for a stream of PyTorch."""
    import cupy

    return cupy.cuda.Stream.from_external(_Address(address))
