"""Memory that nobody has written to, soiled: whoever reads it is found out, whatever lay there by chance.

PyTorch's own does so in bfloat16 (oneDNN 3.12, torch 2.13), and is right as long as the memory that it gets
holds zeros. On an AMD EPYC (AVX-512, no AMX) the gradient of a filter is wrong where an image is small beside
it: 16 channels of 2x2x2 pixels and a filter of 3x3x3, or 16 of one pixel and stride 2. On an Intel Xeon with
AMX forward passes are, too: 37 channels of 11x5 pixels and 16 filters of 1x4 with stride 2.
"""

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator

import torch

from mucudnn.locks import unforked_lock

_M_PERTURB = -6
"""glibc's number for the byte that fills memory as it is given back; its complement, what is handed out."""

_PERTURB = 0x80
"""Memory is handed out full of 0x7f: 3e38 in float32 and bfloat16, no number in float16."""

_LOCK = unforked_lock()
_depth = 0


@contextlib.contextmanager
def soiled_memory(device: torch.device) -> Iterator[None]:
    """Have memory of more than a kilobyte handed out full of large numbers for a while, by glibc's malloc.

    Nothing is done for what is computed on another device than the processor: its memory is not glibc's, and
    its drivers' own is theirs.

    That is so in the whole process until the last of those leaves who have entered. What is given back
    meanwhile holds 0x80, next to nothing as a number. Another malloc, such as a preloaded one, is left as it
    is.
    """
    if device.type != "cpu":
        yield
        return
    _enter(1)
    entered = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == entered:  # a child that was forked within has entered nothing
            _enter(-1)


def _enter(more: int) -> None:
    """Count who wants it soiled, and have it so as long as anybody does."""
    global _depth  # as glibc's own state is
    with _LOCK:
        _depth += more
        _mallopt()(_M_PERTURB, _PERTURB if _depth else _as_it_was())


def _begin_anew() -> None:
    """In a child have memory handed out as it was before: who wanted it soiled is not there any more."""
    global _depth
    if _depth:
        _depth = 0
        _mallopt()(_M_PERTURB, _as_it_was())


if hasattr(os, "register_at_fork"):  # where processes fork
    os.register_at_fork(after_in_child=_begin_anew)


@functools.cache  # so that a child has to look for nothing
def _mallopt() -> Callable[[int, int], int]:
    """Return the C library's function, or one that does nothing where it has none."""
    found: Callable[[int, int], int] = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    return found


def _as_it_was() -> int:
    """Return what the environment asks for, of glibc's new name and the old one: 0, nothing, by default."""
    tunables = (each.partition("=") for each in os.environ.get("GLIBC_TUNABLES", "").split(":"))
    said = {name: value for name, _, value in tunables}.get("glibc.malloc.perturb")
    try:
        return int(said or os.environ.get("MALLOC_PERTURB_", "0"), 0)
    except ValueError:
        return 0
