"""How blocks of images are transposed in the loops of tiled convolutions: the quickest of several ways.

Scripts hold no lock, and MKL is called through Python, which does: threads that run blocks of their own
would wait for one another. They copy by torch, or by products with the identity. Those spread a NaN or an
infinity over a block of the matrix, as tiles do, whose callers compute such parts again.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from mucudnn.algorithms.scripts import Script
from mucudnn.algorithms.transposition import copy_by_torch, quickest_of, transpose
from mucudnn.algorithms.workers import run_on_workers

_ROWS, _COLUMNS = 8, 16
"""Sides of the identities by which blocks of so many rows, or columns, of the result are made."""

_MOST_ROWS = 1024
"""Up to so many rows of the result, blocks of rows are quickest."""

_LEAST_ROWS = 384
"""From so many rows of the result on, blocks of columns are quicker than copies."""

_TRIED = (64, 256)
"""Channels and pixels of the image with which the ways are compared, both ways."""


class Turning(NamedTuple):
    """A way to transpose matrices.

    Attributes:
        by_library: whether `transpose` does it, with the GIL.
        rows: (8, 8), the identity; empty where there are no products.
        columns: (16, 16), the same.
    """

    by_library: bool
    rows: Tensor
    columns: Tensor


def turn(
    turning: Turning,
    source: Tensor,
    target: Tensor,
    most_rows: int = _MOST_ROWS,  # constants of a module are hidden from scripts
    least_rows: int = _LEAST_ROWS,
) -> None:
    """Copy matrices (images, slices, p, q) to (images, slices, q, p), as scripts do.

    Args:
        turning: the way.
        source: of any strides; what is not by torch's copies is for dense rows.
        target: of any strides as well.
        most_rows: of a result that is made in blocks of rows.
        least_rows: of a result that is made in blocks of columns.
    """
    if turning.by_library and source.size(1) == 1:
        transpose(source[:, 0], target[:, 0])
        return
    p, q = source.size(2), source.size(3)
    has_products = turning.rows.numel() > 0 and source.stride(3) == 1 and target.stride(3) == 1
    in_rows = has_products and q % turning.rows.size(0) == 0 and q <= most_rows
    in_columns = has_products and p % turning.columns.size(0) == 0 and q >= least_rows
    for i in range(source.size(0)):
        if turning.by_library:
            transpose(source[i], target[i])
        elif in_rows or in_columns:
            for d in range(source.size(1)):
                if in_rows:
                    _multiply_rows(turning.rows, source[i, d], target[i, d])
                else:
                    _multiply_columns(turning.columns, source[i, d], target[i, d])
        else:
            copy_by_torch(source[i], target[i])


def _multiply_rows(one: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy (p, q) to (q, p), some rows of the result in each product."""
    p, q, some = source.size(0), source.size(1), one.size(0)
    blocks = source.as_strided([q // some, some, p], [some, 1, source.stride(0)])
    results = target.as_strided([q // some, some, p], [some * target.stride(0), target.stride(0), 1])
    torch.bmm(one.expand(q // some, some, some), blocks, out=results)


def _multiply_columns(one: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy (p, q) to (q, p), some columns of the result in each product."""
    p, q, some = source.size(0), source.size(1), one.size(0)
    blocks = source.as_strided([p // some, q, some], [some * source.stride(0), 1, source.stride(0)])
    results = target.as_strided([p // some, q, some], [some, target.stride(0), 1])
    torch.bmm(blocks, one.expand(p // some, some, some), out=results)


def quickest(scratch: tuple[Tensor, Tensor], workers: int) -> Turning:
    """Return the way that is quickest on this processor, by trying all, once a process.

    Args:
        scratch: two pieces of memory of the matrices' type, which are overwritten if large enough to tell.
        workers: threads that each transpose blocks of their own; 1 if one does, whose operations are shared.
    """
    dtype, threads = scratch[0].dtype, 1 if workers > 1 else torch.get_num_threads()
    key = dtype, threads, workers > 1
    found = _quickest.get(key)
    if found is None:
        channels, pixels = _TRIED
        ways = ways_of(dtype)
        if min(each.numel() for each in scratch) < channels * pixels:
            return ways["copies"]
        if workers > 1:
            del ways["library"]
        image = scratch[0][: channels * pixels].zero_().view(1, 1, channels, pixels)
        turned = scratch[1][: channels * pixels].zero_().view(1, 1, pixels, channels)
        calls = [functools.partial(_to_and_fro, way, image, turned) for way in ways.values()]
        tried = functools.partial(quickest_of, *calls)
        seconds = run_on_workers([tried])[0] if workers > 1 else tried()
        found = _quickest[key] = list(ways.values())[seconds.index(min(seconds))]
    return found


_quickest: dict[tuple[torch.dtype, int, bool], Turning] = {}
"""By type, number of threads, and whether they are workers, once it was tried."""


def ways_of(dtype: torch.dtype) -> dict[str, Turning]:
    """Return all ways by their names."""
    none = torch.empty((0, 0), dtype=dtype, device="cpu")
    return {
        "copies": Turning(by_library=False, rows=none, columns=none),
        "products": Turning(
            by_library=False,
            rows=torch.eye(_ROWS, dtype=dtype, device="cpu"),
            columns=torch.eye(_COLUMNS, dtype=dtype, device="cpu"),
        ),
        "library": Turning(by_library=True, rows=none, columns=none),
    }


@Script
def _to_and_fro(turning: Turning, image: Tensor, turned: Tensor) -> None:
    turn(turning, image, turned)
    turn(turning, turned, image)
