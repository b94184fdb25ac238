"""The matrix unit of this processor: Intel's AMX, which the kernel lends to a process that asks."""

import ctypes
import functools
import platform

from mucudnn.algorithms.compiled.compiler import compiler

_ARCH_PRCTL = 158
_REQUEST_PERMISSION = 0x1023
_TILE_DATA = 18
"""Linux' numbers on x86-64, of arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)."""


def refusal_of_processor() -> str | None:
    """Return why nothing can be computed by a matrix unit here, or None if it can."""
    found = compiler()
    if found is None:
        return "there is no C compiler"
    if not found.has_tiles:
        return "this processor has no tiles of bfloat16 (AMX), or the compiler does not know them"
    return None if _is_permitted() else "the system does not lend this processor's tiles (AMX)"


@functools.cache
def _is_permitted() -> bool:
    """Ask the kernel, which has to keep the tiles' state of every thread; it stays permitted."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    answer: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    return answer == 0
