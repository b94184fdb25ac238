"""The library that PyTorch computes with on the processor, for functions that it has and PyTorch hides."""

import ctypes
import functools
from pathlib import Path

import torch

_PRODUCTS = {"float32": "sgemm_", "float64": "dgemm_"}

_PATH = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"


@functools.cache
def library_of_torch() -> ctypes.CDLL | None:
    """Return it, or None where it has another name; its names are also those of all that it depends on."""
    try:
        return ctypes.CDLL(str(_PATH))
    except OSError:
        return None


@functools.cache
def product_of_matrices(dtype: str) -> int | None:
    """Return the address of BLAS's product of matrices (sgemm or dgemm, by Fortran's rules); None if hidden.

    Args:
        dtype: of the elements, float32 or float64.
    """
    library = library_of_torch()
    try:
        function = getattr(library, _PRODUCTS[dtype])
    except AttributeError:  # of no library, too
        return None
    return ctypes.cast(function, ctypes.c_void_p).value
