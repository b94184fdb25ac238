"""Which of Winograd's convolutions in C are worth trying on a problem."""

import dataclasses
import math
from collections.abc import Iterator

from mucudnn.algorithms.compiled.axes import axes_of
from mucudnn.algorithms.compiled.compiler import WIDE_BYTES, compiler
from mucudnn.algorithms.compiled.shares import MOST_LANES
from mucudnn.algorithms.compiled.tiles import CompiledTiles, is_deep, is_strided
from mucudnn.algorithms.libraries import has_narrow_products, product_of_matrices
from mucudnn.algorithms.likely import USUAL, Usual, likely_forms, some_channels
from mucudnn.problem import ConvProblem

_BLOCKS = ((2**20, 24), (2**22, 48))
"""For each size of block, the bytes of x and y, transformed, and the least tiles: 4 to 48 lines in ResNet-18.

3x3x3 of 128 to 128 channels ran 2.4 times as fast as PyTorch's own in blocks of 24 tiles, 2.7 in those of 48.
"""

_FILTER_BYTES = (2**23, 2**22, 2**21)
"""Where a transformed filter is larger, so many channels of y at once are tried as have this much of it."""

_LEAST_OUTPUTS = 2
"""m of the form whose filter is smallest: in three dimensions 8/27 of F(4)'s, where that is large."""

_USUAL_IN_STRIDES = Usual(_LEAST_OUTPUTS, 0.75)
"""F(4), whose transforms take longer, is tried too where it has less than 0.75 of F(2)'s multiplications.

3x3 of stride 2, where it is 0.81, ran faster with F(2) in all of 30 cases; 4x4 and 5x5, where it is 0.69 and
0.62, with F(4) in 11 of 24.
"""

_MOST_OF_DIRECT = 0.8
"""Share of the direct algorithm's multiplications above which a form can hardly win."""

_FORMS = tuple(CompiledTiles(m) for m in (4, 5, 6, 2))


def likely_families(problem: ConvProblem, exhaustive: bool) -> list[CompiledTiles]:
    """Winograd's forms in C that compute the problem, if channels fill vectors: all, or the likely ones.

    Those are F(4), with a stride F(2), and whichever takes far fewer multiplications. F(2) is added where
    F(4)'s filter of three dimensions is large, for limits that it does not fit.
    """
    if min(problem.in_channels, problem.out_channels) < MOST_LANES:
        return []
    able = [each for each in _forms(exhaustive) if each.refusal(problem) is None and _saves(each, problem)]
    if exhaustive:
        return able
    usual = _USUAL_IN_STRIDES if is_strided(problem) else USUAL
    likely = likely_forms(able, lambda each: each.shares(problem).multiplications, usual)
    most = max((each.shares(problem).filter_bytes for each in likely), default=0)
    is_filter_large = is_deep(problem) and most > min(_FILTER_BYTES)
    with_small_filter = [each for each in able if is_filter_large and each.outputs == _LEAST_OUTPUTS]
    return list(dict.fromkeys([*likely, *with_small_filter]))


def _forms(exhaustive: bool) -> tuple[CompiledTiles, ...]:
    """Winograd's forms with BLAS's products, with those in C where BLAS lags or is hidden, or with both."""
    found = compiler()
    in_c = tuple(dataclasses.replace(each, fma=True) for each in _FORMS)
    is_wide = found is not None and found.vector_bytes >= WIDE_BYTES
    if product_of_matrices("float32") is None:
        return in_c
    if exhaustive and is_wide:
        return (*_FORMS, *in_c)
    return in_c if is_wide and has_narrow_products() else _FORMS


def _saves(family: CompiledTiles, problem: ConvProblem) -> bool:
    """Whether a form takes far fewer multiplications than the direct algorithm, edges aside."""
    axes = axes_of(problem, family.outputs)
    return math.prod(axis.form.rank / (axis.outputs * axis.taps) for axis in axes) <= _MOST_OF_DIRECT


def variants(
    family: CompiledTiles, problem: ConvProblem, threads: int, in_blocks: bool
) -> Iterator[CompiledTiles]:
    """A family in C, in blocks that fit a cache, and by channels of y where the filter is large."""
    whole = dataclasses.replace(family, workers=threads)
    shares = whole.shares(problem)
    share = -(-shares.total_lines // threads)
    blocks = [
        max(round(some_bytes / shares.line_bytes), -(-tiles // shares.tiles[-1]))
        for some_bytes, tiles in _BLOCKS
    ]
    sizes = dict.fromkeys(lines if lines < share else 0 for lines in blocks)
    channel_bytes = shares.planes * shares.x_channels * problem.itemsize
    least_bytes = channel_bytes * MOST_LANES
    groups = (
        some_channels(shares.y_channels, channel_bytes, max(some_bytes, least_bytes))
        for some_bytes in _FILTER_BYTES
    )
    few = [each for each in dict.fromkeys(groups) if each]
    able = [dataclasses.replace(whole, lines=lines) for lines in sizes] if in_blocks else []
    for each in (*able, *(dataclasses.replace(whole, channels=group) for group in few)):
        if each.refusal(problem) is None:
            yield each
