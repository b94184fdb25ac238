"""Which algorithms there are, by name, and which of them are worth trying on a problem."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from mucudnn.algorithms.bands import BandAlgorithm
from mucudnn.algorithms.base import Algorithm
from mucudnn.algorithms.columns import ColumnAlgorithm
from mucudnn.algorithms.compiled import CompiledTiles, offers
from mucudnn.algorithms.depthwise import DepthwiseAlgorithm
from mucudnn.algorithms.depthwise.offers import likely as likely_depthwise
from mucudnn.algorithms.likely import likely_forms, some_channels
from mucudnn.algorithms.matrix import MatrixAlgorithm
from mucudnn.algorithms.matrix.offers import likely as likely_by_matrix_unit
from mucudnn.algorithms.other_layout import OtherLayoutAlgorithm
from mucudnn.algorithms.panels import PanelAlgorithm
from mucudnn.algorithms.panels.offers import likely as likely_by_panels
from mucudnn.algorithms.pointwise import PointwiseAlgorithm
from mucudnn.algorithms.tile_geometry import TileGeometry
from mucudnn.algorithms.tiles import FOURIER_INPUTS, TileAlgorithm
from mucudnn.problem import ConvProblem, Layout

_COLUMN_BYTES = 2**22
"""Columns of about so many bytes are made at once, where those of an image take more than twice as many.

So the input gradient of 2x2x2 of stride 2, of 128 channels and 32x48x48, takes 9.5 MiB instead of 72.5.
"""

_LEAST_BANDED_BYTES = 2**20
"""Bands of rows are tried where an image and its result take more: halves, and bands of about so much."""

_BLOCK_BYTES = (2**19, 2**21)
"""Blocks are cut so that x, transformed, takes about so many bytes: two such and U fit a second-level cache.

Half a MiB serves caches of 1 MiB and up and few channels, 2 MiB more channels (measured with 2 MiB).
"""

_LEAST_TILES = 24
"""Matrix products of blocks with fewer tiles are slow."""

_LEAST_TRIED_TAPS = 7
"""With fewer taps Fourier's tiles do not win: for 5 x 5 they took twice as long as PyTorch's own."""

_FOURIER_RANGES = ((24, 1), (64, 1), (36, 8))
"""Pairs of the largest t and a number of images: for each, the form that multiplies least is tried.

The filter's transform counts once for all images. Small tiles make a small transformed filter, for which
tight limits may have room; with the largest tiles, reading it takes longer than they save. Four images of 64
channels and 56x56 pixels took, with 15x15, 92 ms with t = 28, 118 with 24, 114 with 34 and 133 with 32;
with 11x11 78 with 24, 99 with 38, 105 with 32 and 125 with 16.
"""

_FILTER_BYTES = (2**24, 2**23, 2**22)
"""Where a transformed filter is larger, so many channels of y at once are tried as have this much of it."""

_FEW_FILTER_BYTES = 2**21
"""The same for blocks of rows; each transforms the filter anew, which pays only where memory is short."""

_WINOGRAD = tuple(TileAlgorithm(outputs=m) for m in (4, 5, 6, 2))

_FOURIER = tuple(TileAlgorithm(inputs=t) for t in FOURIER_INPUTS)

_POINTWISE = PointwiseAlgorithm()

_OTHERS: tuple[Algorithm, ...] = (
    _POINTWISE,
    ColumnAlgorithm(),
    OtherLayoutAlgorithm(Layout.CHANNELS_LAST),
    OtherLayoutAlgorithm(Layout.CONTIGUOUS),
)

_FAMILIES = (
    BandAlgorithm,
    ColumnAlgorithm,
    CompiledTiles,
    DepthwiseAlgorithm,
    MatrixAlgorithm,
    PanelAlgorithm,
    TileAlgorithm,
)
"""Families whose names tell which form of them is meant."""


def named(name: str) -> Algorithm | None:
    """Return the algorithm of that name, without the backend's prefix; None if there is none."""
    for each in _OTHERS:
        if each.name == name:
            return each
    for family in _FAMILIES:
        if (fields := family.names.fields(name)) is not None:
            found = family(**fields)
            return found if found.name == name else None
    return None


def offered(
    problem: ConvProblem,
    threads: int,
    whole: bool = True,
    exhaustive: bool = False,
    compiles: bool = False,
    may_round: bool = False,
) -> Iterator[Algorithm]:
    """Yield the algorithms to try on a micro-batch.

    Most take as long for every image and as much workspace whatever the micro-batch, so they are tried on the
    whole mini-batch, and on single images of which any batch can be made. Only tiles of a micro-batch in one
    block, and groups of channels, which transform the filter once per micro-batch, are tried at all sizes.

    Args:
        problem: of the micro-batch.
        threads: that compute one operation together; workers are tried if there are several.
        whole: whether the micro-batch is the whole mini-batch.
        exhaustive: whether to yield all families that may win, at all sizes, and not only what is likely to.
        compiles: whether there is a C compiler. Winograd's convolution is faster in C wherever channels fill
            vectors; of torch's operations those stay then that need less workspace.
        may_round: whether float32 may be computed with fewer digits.
    """
    in_blocks = whole or problem.batch == 1 or exhaustive
    in_c = offers.likely_families(problem, exhaustive) if compiles else []
    for family in in_c:
        yield from offers.variants(family, problem, threads, in_blocks)
    if in_blocks:
        depthwise: list[Algorithm] = []
        if compiles:
            yield from likely_by_matrix_unit(problem, threads, exhaustive, may_round)
            yield from likely_by_panels(problem, threads, exhaustive)
            depthwise += likely_depthwise(problem, threads, exhaustive)
            yield from depthwise
        others = [*_OTHERS]
        is_small = bool(depthwise) and all(
            each.workspace_bytes(problem) <= _COLUMN_BYTES for each in depthwise
        )
        if exhaustive or not is_small:
            others += _column_bands(problem)
        if exhaustive or not (in_c or is_small):
            others += _bands(problem)
        yield from (each for each in others if each.refusal(problem) is None)
    yield from _tiles(problem, threads, in_blocks, exhaustive, is_winograd_in_c=bool(in_c))


def _tiles(
    problem: ConvProblem, threads: int, in_blocks: bool, exhaustive: bool, is_winograd_in_c: bool
) -> Iterator[TileAlgorithm]:
    """Tiles of torch's operations; where Winograd's are in C, of these only what needs less workspace."""
    variants = (
        variant
        for family in (_families if exhaustive else _likely_families)(problem)
        for variant in _variants(family, problem, threads, in_blocks)
        if exhaustive or not (is_winograd_in_c and family.outputs) or _is_for_small_limits(variant)
    )
    for each in dict.fromkeys(variants):
        if each.refusal(problem) is None and _has_its_blocks(each, problem):
            yield each


def _column_bands(problem: ConvProblem) -> Iterator[ColumnAlgorithm]:
    """Columns of some rows at a time, where those of an image are many."""
    size = problem.output_size
    taps = math.prod(problem.kernel_size)
    row_bytes = problem.in_channels * taps * math.prod(size[1:]) * problem.itemsize
    rows = max(round(_COLUMN_BYTES / row_bytes), 1) if row_bytes else 0
    if row_bytes * size[0] > 2 * _COLUMN_BYTES and rows < size[0]:
        yield ColumnAlgorithm(rows)


def _bands(problem: ConvProblem) -> Iterator[BandAlgorithm]:
    """Halves of an image, and bands that a cache holds, where nothing but PyTorch's own cuts images."""
    image_bytes = (problem.input_bytes + problem.output_bytes) // max(problem.batch, 1)
    others: tuple[Algorithm, ...] = (_POINTWISE, *_WINOGRAD, *_FOURIER)
    is_cut = any(each.refusal(problem) is None for each in others)
    if is_cut or image_bytes <= _LEAST_BANDED_BYTES:
        return
    counts = (2, -(-image_bytes // _LEAST_BANDED_BYTES))
    for rows in dict.fromkeys(-(-problem.output_size[0] // count) for count in counts):
        yield BandAlgorithm(rows)


def _is_for_small_limits(variant: TileAlgorithm) -> bool:
    return variant.summed > 0 or (variant.rows > 0 and variant.channels > 0)


def _has_its_blocks(algorithm: TileAlgorithm, problem: ConvProblem) -> bool:
    """Whether the batch has blocks of so many images, and one for every thread."""
    geometry = TileGeometry(algorithm, problem)
    has_images = geometry.images == algorithm.images < problem.batch if algorithm.images else True
    return has_images and len(geometry.blocks) >= algorithm.workers


def _families(problem: ConvProblem) -> list[TileAlgorithm]:
    """All forms that compute the problem; of Fourier's that make as many tiles, the smallest."""
    return smallest([each for each in (*_WINOGRAD, *_FOURIER) if each.refusal(problem) is None], problem)


def smallest(able: Sequence[TileAlgorithm], problem: ConvProblem) -> list[TileAlgorithm]:
    """Return `able` without those of Fourier's forms that make as many tiles as a smaller one.

    Args:
        able: to compute the problem; Fourier's in ascending order.
        problem: of any batch.
    """
    by_tiles = {TileGeometry(each, problem).tiles: each for each in reversed(able) if each.inputs}
    return [each for each in able if each.outputs or each in by_tiles.values()]


def _likely_families(problem: ConvProblem) -> list[TileAlgorithm]:
    """Winograd's forms, and FFT where it pays.

    Fourier's tiles are those that fit the image: with 15 taps t = 28 cuts 56 pixels into four, as t = 32 does
    with a third more products.
    """
    able = _families(problem)
    return [*likely_winograd(problem, able), *likely_fourier(problem, able, _FOURIER_RANGES)]


def likely_winograd(problem: ConvProblem, able: Sequence[TileAlgorithm]) -> list[TileAlgorithm]:
    """Return F(4), and a form with far fewer multiplications for an output, edges and all, if there is one.

    F(2) is left where there is no other.

    Args:
        problem: of any batch.
        able: to compute it.
    """
    return likely_forms([each for each in able if each.outputs], lambda each: _multiplications(each, problem))


def likely_fourier(
    problem: ConvProblem, able: Sequence[TileAlgorithm], ranges: Sequence[tuple[int, int]]
) -> list[TileAlgorithm]:
    """Return Fourier's forms that take the fewest multiplications, whatever the micro-batch.

    Args:
        problem: of any batch.
        able: to compute it; of these one for each range.
        ranges: most t, and images for which multiplications are counted.
    """
    able = [each for each in able if each.inputs]
    if max(problem.kernel_size[-2:]) < _LEAST_TRIED_TAPS:
        return []

    def best(some: Sequence[TileAlgorithm], images: int) -> TileAlgorithm:
        part = dataclasses.replace(problem, batch=images)
        return min(some, key=lambda each: TileGeometry(each, part).multiplications)

    tried: list[TileAlgorithm] = []
    for most, images in ranges:
        if some := [each for each in able if each.inputs <= most or each in tried]:
            tried.append(best(some, images))
    return list(dict.fromkeys(tried))


def _multiplications(algorithm: TileAlgorithm, problem: ConvProblem) -> float:
    geometry = TileGeometry(algorithm, problem)
    return geometry.planes * math.prod(geometry.tiles) / math.prod(geometry.y_size[1:])


def _variants(
    family: TileAlgorithm, problem: ConvProblem, threads: int, in_blocks: bool
) -> Iterator[TileAlgorithm]:
    """A family undivided, by channels of y or x, and in blocks of rows or images or slices, also on workers.

    Blocks of rows come by channels of y as well, for limits that leave room for nothing else.
    """
    geometry = TileGeometry(family, problem)
    blocks = [family, *(_in_blocks(family, geometry) if in_blocks else ())]
    for each in blocks:
        yield each
        if threads > 1 and in_blocks:
            yield dataclasses.replace(each, workers=threads)
    for some_bytes in _FILTER_BYTES:
        if channels := _channels_of(geometry, some_bytes):
            yield dataclasses.replace(family, channels=channels)
    if summed := _summed_of(geometry):
        yield dataclasses.replace(family, summed=summed)
    is_large = _channels_of(geometry, min(_FILTER_BYTES)) > 0
    rows = [each for each in blocks if each.rows]
    if rows and is_large and (few := _channels_of(geometry, _FEW_FILTER_BYTES)):
        yield dataclasses.replace(rows[-1], channels=few)


def _channels_of(geometry: TileGeometry, some_bytes: int) -> int:
    """Return of how many channels of y the transformed filter takes so many bytes; 0 if of none or of all."""
    channel_bytes = geometry.taps[0] * geometry.planes * geometry.x_channels * geometry.problem.itemsize
    return some_channels(geometry.y_channels, channel_bytes, some_bytes)


def _summed_of(geometry: TileGeometry) -> int:
    """Return of how many channels of x to sum the products at once; 0 where that would gain nothing.

    It does where the filter is large and x has more channels than y, so that V is larger than the products,
    and their number has a divisor near what the cache can hold.
    """
    x_channels, y_channels = geometry.x_channels, geometry.y_channels
    channel_bytes = geometry.taps[0] * geometry.planes * y_channels * geometry.problem.itemsize
    most = min(_FILTER_BYTES) // channel_bytes
    if x_channels <= y_channels or not 0 < most < x_channels:
        return 0
    able = (some for some in range(most, most // 2, -1) if x_channels % some == 0)
    return next(able, 0)


def _in_blocks(family: TileAlgorithm, geometry: TileGeometry) -> Iterator[TileAlgorithm]:
    """Blocks of about the sizes that fit a cache: of rows where an image is larger, else of images."""
    tiles_h, tiles_w = geometry.tiles
    deep = geometry.y_size[0] if geometry.taps[0] > 1 else 1
    row_bytes = geometry.planes * tiles_w * geometry.x_channels * geometry.problem.itemsize
    for block_bytes in _BLOCK_BYTES:
        least = -(-_LEAST_TILES // tiles_w)
        rows = max(round(block_bytes / row_bytes), least)
        if deep > 1:
            yield dataclasses.replace(family, slices=max(rows // tiles_h, 1))
        elif (rows := _without_rest(tiles_h, rows, least)) < tiles_h:
            yield dataclasses.replace(family, rows=rows)
        else:
            yield dataclasses.replace(family, images=2 ** round(math.log2(rows / tiles_h)))


def _without_rest(total: int, about: int, least: int) -> int:
    """Return a part of `total`, about so large, of which copies cover it with the least to spare.

    Blocks are all computed in one size: 14 rows in blocks of 4 would cost as much as 16.
    """
    able = range(max(about // 2, least), min(2 * about, total) + 1)
    return min(able, key=lambda part: (-(-total // part) * part, abs(math.log(part / about))), default=about)
