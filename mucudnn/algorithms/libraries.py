"""The library that PyTorch computes with on the processor, for functions that it has and PyTorch hides."""

import ctypes
import functools
from pathlib import Path

import torch

from mucudnn.algorithms.processor import processor_facts
from mucudnn.interruptions import pass_on_interruption

_PRODUCTS = {"float32": "sgemm_", "float64": "dgemm_"}

_WHOLE_VECTORS = 26
"""AMD's family of processors from which on vectors of 64 bytes are computed in one piece: Zen 5."""

_PATH = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"


@functools.cache
def library_of_torch() -> ctypes.CDLL | None:
    """Return it, or None where it has another name; its names are also those of all that it depends on."""
    try:
        return ctypes.CDLL(str(_PATH))
    except OSError as error:
        pass_on_interruption(error)
        return None


@functools.cache
def has_narrow_products() -> bool:
    """Return whether BLAS multiplies at half of this processor's rate: MKL on AMD's with whole vectors.

    MKL (2024.2) uses vectors of 64 bytes on Intel's processors alone. AMD's compute with them in one piece
    from family 26 on, and in halves before, where nothing is lost. On one core of an EPYC of family 26 MKL's
    products of 64 to 512 rows, columns and terms ran at 60 to 115 GFLOP/s, those in C at 105 to 265.
    """
    if not torch.backends.mkl.is_available():
        return False
    facts = processor_facts()
    family = facts.get("cpu family", "")
    return facts.get("vendor_id") == "AuthenticAMD" and family.isdecimal() and int(family) >= _WHOLE_VECTORS


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
