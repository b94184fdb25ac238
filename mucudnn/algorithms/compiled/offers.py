"""Which of Winograd's convolutions in C are worth trying on a problem."""

import dataclasses
from collections.abc import Iterator

from mucudnn.algorithms.compiled.shares import MOST_LANES
from mucudnn.algorithms.compiled.tiles import CompiledTiles, is_deep
from mucudnn.algorithms.likely import likely_forms, some_channels
from mucudnn.problem import ConvProblem

_BLOCKS = ((2**20, 24), (2**22, 48))
"""Bytes of a block in C, x and y transformed, and its least tiles: of a ResNet-18's layers 4 to 48 lines.

3x3x3 of 128 to 128 channels ran 2.4 times as fast as PyTorch's own in blocks of 24 tiles, 2.7 in those of 48.
"""

_FILTER_BYTES = (2**23, 2**22, 2**21)
"""Of a larger filter, transformed: as many channels of y are computed at once."""

_LEAST_OUTPUTS = 2
"""m of the form whose filter is smallest: in three dimensions 8/27 of F(4)'s, where that is large."""

_FORMS = tuple(CompiledTiles(m) for m in (4, 5, 6, 2))


def likely_families(problem: ConvProblem, exhaustive: bool) -> list[CompiledTiles]:
    """Winograd's forms in C that compute the problem, if channels fill vectors: all, or the likely ones.

    F(2) is added where F(4)'s filter of three dimensions is large, for limits that it does not fit.
    """
    if min(problem.in_channels, problem.out_channels) < MOST_LANES:
        return []
    able = [each for each in _FORMS if each.refusal(problem) is None]
    if exhaustive:
        return able
    likely = likely_forms(able, lambda each: each.shares(problem).multiplications)
    most = max((each.shares(problem).filter_bytes for each in likely), default=0)
    is_filter_large = is_deep(problem) and most > min(_FILTER_BYTES)
    with_small_filter = [each for each in able if is_filter_large and each.outputs == _LEAST_OUTPUTS]
    return list(dict.fromkeys([*likely, *with_small_filter]))


def variants(
    family: CompiledTiles, problem: ConvProblem, threads: int, in_blocks: bool
) -> Iterator[CompiledTiles]:
    """A family in C, in blocks that fit a cache, and by channels of y where the filter is large."""
    whole = dataclasses.replace(family, workers=threads)
    shares = whole.shares(problem)
    channels = shares.x_channels + shares.y_channels
    line_bytes = shares.planes * shares.tiles[-1] * channels * problem.itemsize
    share = -(-shares.total_lines // threads)
    blocks = [
        max(round(some_bytes / line_bytes), -(-tiles // shares.tiles[-1])) for some_bytes, tiles in _BLOCKS
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
