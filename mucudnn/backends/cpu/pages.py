"""Memory of a process, page by page."""

import ctypes
import functools
import mmap
import sys

from torch import Tensor

_MADV_DONTNEED = 4
"""Linux's number for pages that may go; read again they hold zeros."""


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def release_pages(tensor: Tensor) -> None:
    """Give the whole pages within a contiguous tensor back to the system; do nothing where it is not Linux.

    Raises:
        OSError: the kernel refuses, for example because the pages are locked in memory.
    """
    if not sys.platform.startswith("linux"):
        return
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if stop <= start:
        return
    if _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_DONTNEED):
        code = ctypes.get_errno()
        raise OSError(code, f"The buffer's pages could not be given back: errno {code}.")
