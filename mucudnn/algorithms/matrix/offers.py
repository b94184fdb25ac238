"""Which convolutions by a matrix unit are worth trying on a problem."""

import dataclasses
from collections.abc import Iterator

from mucudnn.algorithms.matrix.algorithm import MatrixAlgorithm
from mucudnn.algorithms.matrix.geometry import Geometry
from mucudnn.algorithms.matrix.shares import Shares
from mucudnn.problem import ConvOp, ConvProblem

_PRODUCTS = {1: 1, 2: 3, 3: 6}
"""Of tiles, by how many bfloat16 make a number."""

_WORTH = 12
"""Products of tiles, for each multiplication of the direct algorithm, above which none can win.

A unit multiplies sixteen times as fast as vectors of float32, at best; splitting comes on top. In bfloat16
PyTorch's own may use the same unit, or may not: with three channels, 7x7, it took five times as long.
"""

_BYTES = {
    ConvOp.FPROP: (2**19, 2**20),
    ConvOp.DGRAD: (2**19, 2**20),
    ConvOp.WGRAD: (2**20, 3 * 2**19),
}
"""Of the units that a thread computes at once: a second-level cache of 2 MiB has room for more than these."""

_BYTES_OF_SUMS = (3 * 2**19, 5 * 2**19)
"""For a filter's gradient of bfloat16, which is multiplied so fast that its sums must be read seldom."""

_OTHER_BYTES = (2**18, 2**21)

_MOST_IMAGES = 8


def likely(
    problem: ConvProblem, threads: int, exhaustive: bool, may_round: bool
) -> Iterator[MatrixAlgorithm]:
    """Yield what computes the problem in units that fit a cache.

    Args:
        problem: of the micro-batch.
        threads: that compute.
        exhaustive: whether to try units of other sizes as well.
        may_round: whether two bfloat16 may make a number, too.
    """
    for addends in _addends(problem, may_round):
        whole = MatrixAlgorithm(addends, workers=threads)
        if whole.refusal(problem) is not None:
            continue
        usual = _BYTES_OF_SUMS if addends == 1 and problem.op is ConvOp.WGRAD else _BYTES[problem.op]
        sizes = (*usual, *(_OTHER_BYTES if exhaustive else ()))
        found = dict.fromkeys(_fitting(whole, problem, some_bytes) for some_bytes in sizes)
        yield from (each for each in found if _is_worth(each.shares(problem).geometry, _PRODUCTS[addends]))


def _addends(problem: ConvProblem, may_round: bool) -> tuple[int, ...]:
    if problem.dtype == "bfloat16":
        return (1,)
    return (2, 3) if may_round else (3,)


def _is_worth(geometry: Geometry, products: int) -> bool:
    return geometry.multiplications * products <= _WORTH * geometry.direct


def _fitting(whole: MatrixAlgorithm, problem: ConvProblem, some_bytes: int) -> MatrixAlgorithm:
    """Return units of so many bytes at most, if there are any: some images, or most slices or rows of one."""
    images = dataclasses.replace(whole, images=_MOST_IMAGES)
    while images.images > 1 and images.shares(problem).x_bytes > some_bytes:
        images = dataclasses.replace(images, images=images.images // 2)
    if _fits(images.shares(problem), some_bytes):
        return images
    geometry, cut = images.shares(problem).geometry, images
    for name, most in (("slices", geometry.band_d), ("rows", geometry.band_h)):
        sizes = (0 if size == most else size for size in _sizes(most))
        tried = [dataclasses.replace(cut, **{name: size}) for size in sizes]
        fitting = (each for each in tried if _fits(each.shares(problem), some_bytes))
        cut = next(fitting, min(tried, key=lambda each: _excess(each.shares(problem))))
    return cut


def _sizes(most: int) -> list[int]:
    """Return parts of `most`: the whole, a half, a third, a quarter, then each smaller by about a fifth."""
    pieces = [1]
    while pieces[-1] < most:
        pieces.append(min(max(pieces[-1] + 1, pieces[-1] * 5 // 4), most))
    return list(dict.fromkeys(-(-most // each) for each in pieces))


def _fits(shares: Shares, some_bytes: int) -> bool:
    """Whether units take no more, and there is one for every thread."""
    return _excess(shares) <= (False, some_bytes)


def _excess(shares: Shares) -> tuple[bool, int]:
    """Return whether a thread has no unit, and the bytes of what it has at once: the less the better."""
    return not shares.is_by_channels and shares.geometry.units < shares.workers, shares.x_bytes
