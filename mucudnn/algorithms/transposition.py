"""Transposed copies of matrices, as which all copies between the two layouts of images can be seen.

A transposed copy walks one of its operands with long steps, and each step touches a line of the cache that
is needed again for the next elements. There are three ways round that:

* MKL, which PyTorch's builds for x86 contain, transposes in registers (`mkl_?omatcopy`, oneMKL's developer
  reference, "BLAS-like extensions") on Intel's processors, and element by element on others.
* A product with the identity is a transposed copy as well, since a product packs its operands as it needs
  them: 16 or 32 operations an element, in the library's kernels and on all threads. Only 1 · x + 0 · y + ...
  is x: a NaN or an infinity spreads over its block, and -0 becomes 0.
* torch's own copies: where steps are a multiple of so many lines that the first-level cache can hold few of
  them, of as few rows at once. (Of two dimensions that are dense torch makes blocks itself, in a buffer that
  it allocates.)

Microseconds for p x q float32 on one thread of an Intel Xeon (family 6, model 207) and of an AMD EPYC
(family 25, model 1), each with a step of p or q between its rows:

| p x q     | Intel: torch | MKL | AMD: torch | MKL  | products |
|-----------|--------------|-----|------------|------|----------|
| 64 x 3136 | 294          | 80  | 373        | 852  | 262      |
| 3136 x 64 | 316          | 69  | 383        | 909  | 196      |
| 128 x 784 | 150          | 28  | 191        | 512  | 170      |
| 784 x 128 |              |     | 193        | 495  | 120      |
| 256 x 196 | 79           | 20  | 103        | 280  |          |
| 196 x 256 |              |     | 102        | 259  | 69       |
| 4096 x 64 |              |     | 525        | 1134 | 316      |
"""

import ctypes
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from mucudnn.algorithms.libraries import library_of_torch
from mucudnn.algorithms.scripts import called_from_scripts

_NAMES: Mapping[torch.dtype, tuple[str, "_Number"]] = {
    torch.float32: ("MKL_Somatcopy", ctypes.c_float),
    torch.float64: ("MKL_Domatcopy", ctypes.c_double),
}

_SHORT = 2**14
"""Elements that are copied in less time than it may take to get the GIL back, so that it is kept."""

_FEW_STREAMS = 32
"""Rows of a target that are written at once where lines are written in two pieces: of 729 x 192 (to rows of
729) 154 microseconds become 80, of 3025 x 128 388 become 217."""

_SHORT_ROW = 256
"""Elements of a row below which that is no matter."""

_LINE_BYTES = 64
"""What a cache fetches at once."""

_PERIOD_BYTES = 4096
"""Addresses so far apart share a set of the first-level cache, which has 64 sets of one line each."""

_WAYS = 8
"""Lines that a set holds at least: 8 or 12 in the processors of today."""

_FEW_SETS = 2
"""Sets of the first-level cache up to which copying few of its lines at once gains more than it costs."""

_LEAST_TRIED = 32
"""Rows and columns of a matrix with which the ways are compared."""

_TRIES = 7
"""Of each way."""

Copy = Callable[..., None]

_Number: TypeAlias = "type[ctypes.c_float] | type[ctypes.c_double]"


@called_from_scripts
def transpose(source: Tensor, target: Tensor) -> None:
    """Copy matrices (b, p, q) to (b, q, p); nothing is allocated.

    Any strides are right, and every bit comes over. It is fast where the elements of a row lie next to each
    other in both. The first large copy of a process is made in both ways, some times, to know the quicker.
    """
    copies = _copies_of_mkl().get(source.dtype) if _are_rows_dense(source, target) else None
    if copies is not None and _is_library_quicker(copies, source, target):
        _copy_by_library(copies, source, target)
    else:
        copy_by_torch(source, target)


def _copy_by_library(copies: "tuple[Copy, Copy]", source: Tensor, target: Tensor) -> None:
    number, rows, columns = source.shape
    copy = copies[rows * columns >= _SHORT]
    some = columns if _has_even_lines(target) else _FEW_STREAMS
    itemsize = source.element_size()
    here, there = source.data_ptr(), target.data_ptr()
    step_here, step_there = source.stride(0) * itemsize, target.stride(0) * itemsize
    row_here, row_there = max(source.stride(1), columns), max(target.stride(1), rows)
    for _ in range(number):
        for first in range(0, columns, some):
            part = min(some, columns - first)
            to = there + first * row_there * itemsize
            copy(b"R", b"T", rows, part, 1.0, here + first * itemsize, row_here, to, row_there)
        here += step_here
        there += step_there


_library_is_quicker: dict[tuple[torch.dtype, int], bool] = {}
"""By type and number of threads, once it was tried."""


def _is_library_quicker(copies: "tuple[Copy, Copy]", source: Tensor, target: Tensor) -> bool:
    """Whether MKL copies quicker than torch here: on processors of other makes than Intel's it may not."""
    here = source.dtype, torch.get_num_threads()
    answer = _library_is_quicker.get(here)
    if answer is None:
        if min(source.shape[1:]) < _LEAST_TRIED or source.numel() < _SHORT:
            return True  # too small to tell
        library, torch_ = quickest_of(
            lambda: _copy_by_library(copies, source, target), lambda: copy_by_torch(source, target)
        )
        answer = _library_is_quicker[here] = library < torch_
    return answer


def _has_even_lines(target: Tensor) -> bool:
    """Whether rows begin with a line of the cache, or are so short that all lines stay there."""
    return target.stride(1) * target.element_size() % _LINE_BYTES == 0 or target.size(2) < _SHORT_ROW


def _are_rows_dense(source: Tensor, target: Tensor) -> bool:
    """Whether both are matrices as BLAS knows them: rows dense, and one behind the other."""
    _, rows, columns = source.shape
    return (
        source.stride(2) == 1
        and target.stride(2) == 1
        and (source.stride(1) >= columns > 0 or rows == 1)
        and (target.stride(1) >= rows > 0 or columns == 1)
        and source.dtype == target.dtype
        and not (source.is_neg() or target.is_neg())  # whose bits are not those of their values
        and not source._is_zerotensor()  # which has no memory
    )


@functools.cache
def _copies_of_mkl() -> Mapping[torch.dtype, tuple[Copy, Copy]]:
    """Return MKL's function for each type that it knows: that which keeps the GIL, and one that does not."""
    library = library_of_torch()
    try:
        return {dtype: _both(library, *name) for dtype, name in _NAMES.items()} if library else {}
    except AttributeError:
        return {}


def _both(library: ctypes.CDLL, name: str, number: _Number) -> tuple[Copy, Copy]:
    size, address = ctypes.c_size_t, ctypes.c_void_p
    arguments = (ctypes.c_char, ctypes.c_char, size, size, number, address, size, address, size)
    return (
        ctypes.PYFUNCTYPE(None, *arguments)((name, library)),
        ctypes.CFUNCTYPE(None, *arguments)((name, library)),
    )


def copy_by_torch(
    source: Tensor,
    target: Tensor,
    period: int = _PERIOD_BYTES,  # constants of a module are hidden from scripts
    line: int = _LINE_BYTES,
    ways: int = _WAYS,
    few: int = _FEW_SETS,
) -> None:
    """Copy matrices (b, p, q) to (b, q, p) by torch alone, as scripts may without the GIL.

    Args:
        source: of any strides.
        target: of any strides.
        period: bytes from one line of the cache to the next in the same set.
        line: bytes of a line.
        ways: lines of a set.
        few: sets up to which their lines are copied at once.
    """
    rows, step = source.size(1), source.stride(1) * source.element_size()
    sets = period // max(line, math.gcd(step, period))
    if sets > few or rows <= ways * sets or source.stride(2) != 1 or target.stride(2) != 1:
        target.copy_(source.transpose(1, 2))
        return
    for first in range(0, rows, ways * sets):
        last = min(first + ways * sets, rows)
        target[:, :, first:last].copy_(source[:, first:last].transpose(1, 2))


def quickest_of(*ways: Callable[[], None]) -> list[float]:
    """Return the least seconds that each way took, in turns."""
    seconds = [math.inf] * len(ways)
    for _ in range(_TRIES):
        for number, way in enumerate(ways):
            start = time.perf_counter()
            way()
            seconds[number] = min(seconds[number], time.perf_counter() - start)
    return seconds
