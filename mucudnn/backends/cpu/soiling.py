"""Memory that nobody has written to, soiled: whoever reads it is found out, whatever lay there by chance.

PyTorch's own gradient of a filter in bfloat16 does so on an AMD EPYC (AVX-512, no AMX; oneDNN 3.12, torch
2.13), where an image is small beside the filter: 16 channels of 2x2x2 pixels and a filter of 3x3x3, or 16 of
one pixel and stride 2. It is right as long as the memory that it gets holds zeros.
"""

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator

_M_PERTURB = -6
"""glibc's number for the byte that fills memory as it is given back; its complement, what is handed out."""

_PERTURB = 0x80
"""Memory is handed out full of 0x7f: 3e38 in float32 and bfloat16, no number in float16."""

_VARIABLE = "MALLOC_PERTURB_"


@contextlib.contextmanager
def soiled_memory() -> Iterator[None]:
    """Have memory of more than a kilobyte handed out full of large numbers for a while, by glibc's malloc.

    Another malloc, such as a preloaded one, is left as it is.
    """
    mallopt = _mallopt()
    mallopt(_M_PERTURB, _PERTURB)
    try:
        yield
    finally:
        mallopt(_M_PERTURB, _as_it_was())


def _mallopt() -> Callable[[int, int], int]:
    """Return the C library's function, or one that does nothing where it has none."""
    found: Callable[[int, int], int] = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    return found


def _as_it_was() -> int:
    """Return what the environment asks for: 0, nothing, by default."""
    try:
        return int(os.environ.get(_VARIABLE, "0"))
    except ValueError:
        return 0
