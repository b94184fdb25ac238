"""The library that PyTorch computes with on the processor, for functions that it has and PyTorch hides."""

import ctypes
import functools
from pathlib import Path

import torch

_PATH = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"


@functools.cache
def library_of_torch() -> ctypes.CDLL | None:
    """Return it, or None where it has another name; its names are also those of all that it depends on."""
    try:
        return ctypes.CDLL(str(_PATH))
    except OSError:
        return None
