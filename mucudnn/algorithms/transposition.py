"""Transposed copies of matrices, as which all copies between the two layouts of images can be seen.

A transposed copy walks one of its operands with long steps, and each step touches a line of the cache that
is needed again for the next elements. MKL, which PyTorch's builds for x86 contain, does it in registers
(`mkl_?omatcopy`, oneMKL's developer reference, "BLAS-like extensions"). Where it is missing, blocks are
copied of as many steps as the first-level cache holds lines: steps that are a multiple of many lines fall
into few of its sets, and the lines throw one another out.

Microseconds for p x q float32 on an Intel Xeon (family 6, model 207), one thread: torch's blocked 2-D
transposition, a `permute().copy_`, and MKL:

| p x q     | torch | permute | MKL |
|-----------|-------|---------|-----|
| 64 x 3136 | 313   | 294     | 80  |
| 3136 x 64 | 316   |         | 69  |
| 128 x 784 | 150   | 151     | 28  |
| 256 x 196 | 79    | 96      | 20  |
| 512 x 49  | 36    | 36      | 12  |
| 3 x 50176 | 608   | 215     | 79  |
"""

import ctypes
import functools
import math
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

_LEAST_STEPS = 32
"""Steps of a loop below which starting it costs more than the first-level cache saves: 16 took longer."""

Copy = Callable[..., None]

_Number: TypeAlias = "type[ctypes.c_float] | type[ctypes.c_double]"


@called_from_scripts
def transpose(source: Tensor, target: Tensor) -> None:
    """Copy matrices (b, p, q) to (b, q, p); nothing is allocated.

    Any strides are right, and every bit comes over. It is fast where the elements of a row lie next to each
    other in both.
    """
    number, rows, columns = source.shape
    copies = _copies_of_mkl().get(source.dtype) if _are_rows_dense(source, target) else None
    if copies is None:
        _copy_in_blocks(source, target)
        return
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


def _copy_in_blocks(source: Tensor, target: Tensor) -> None:
    """Copy by torch: at once where one operand's steps are short, else some rows of `source` at a time."""
    turned = source.transpose(1, 2)
    is_one_line = source.size(2) * source.element_size() <= _LINE_BYTES  # the next row is in the cache
    if is_one_line or source.stride(2) != 1 or target.stride(2) != 1:
        target.copy_(turned)
        return
    rows = steps_in_cache(source.stride(1) * source.element_size())
    for some, there in zip(turned.split(rows, 2), target.split(rows, 2), strict=True):
        there.copy_(some)


def steps_in_cache(step_bytes: int) -> int:
    """Return how many lines that lie `step_bytes` apart the first-level cache holds at once."""
    sets = _PERIOD_BYTES // max(_LINE_BYTES, math.gcd(step_bytes, _PERIOD_BYTES))
    return max(_LEAST_STEPS, _WAYS * sets)
