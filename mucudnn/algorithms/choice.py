"""Which algorithms there are, by name, and which of them are worth trying on a problem."""

import math
import re
from collections.abc import Iterator

from mucudnn.algorithms.base import Algorithm
from mucudnn.algorithms.columns import ColumnAlgorithm
from mucudnn.algorithms.other_layout import OtherLayoutAlgorithm
from mucudnn.algorithms.pointwise import PointwiseAlgorithm
from mucudnn.algorithms.tile_geometry import TileGeometry
from mucudnn.algorithms.tiles import TileAlgorithm
from mucudnn.problem import ConvOp, ConvProblem, Layout

_TILES = re.compile(
    r"(?P<family>winograd(?P<outputs>[2456])|fft(?P<inputs>16|32))"
    r"(_images(?P<images>[1-9]\d*))?(_slices(?P<slices>[1-9]\d*))?(_rows(?P<rows>[1-9]\d*))?"
    r"(_k(?P<channels>[1-9]\d*))?(_mt(?P<workers>[2-9]|[1-9]\d+))?",
    re.ASCII,
)

_BLOCK_BYTES = (2**19, 2**21)
"""Sizes of one transform of x to which blocks are cut: two of them and U fit a second-level cache.

Half a MiB serves caches of 1 MiB and up and few channels, 2 MiB more channels (measured with 2 MiB).
"""

_LEAST_TILES = 24
"""Tiles of a block below which its matrix products are slow."""

_LEAST_FOURIER_TAPS = {16: 7, 32: 9}
"""By t: taps from which its tiles may win; 5 x 5 took twice as long as PyTorch's own."""

_FILTER_BYTES = (2**24, 2**23, 2**22)
"""Of a transformed filter that is larger: as many channels of y are tried at once."""

_OTHERS: tuple[Algorithm, ...] = (
    PointwiseAlgorithm(),
    ColumnAlgorithm(),
    OtherLayoutAlgorithm(Layout.CHANNELS_LAST),
    OtherLayoutAlgorithm(Layout.CONTIGUOUS),
)


def named(name: str) -> Algorithm | None:
    """Return the algorithm of that name, without the backend's prefix; None if there is none."""
    for each in _OTHERS:
        if each.name == name:
            return each
    found = _TILES.fullmatch(name)
    if found is None:
        return None
    numbers = {key: int(value or 0) for key, value in found.groupdict().items() if key != "family"}
    return TileAlgorithm(**{**numbers, "workers": numbers["workers"] or 1})


def offered(problem: ConvProblem, threads: int, whole: bool = True) -> Iterator[Algorithm]:
    """Yield the algorithms to try on a micro-batch.

    Algorithms in blocks take as long for every image and as much workspace whatever the micro-batch, so
    they are tried on the whole mini-batch, and on single images of which any batch can be made.

    Args:
        problem: of the micro-batch.
        threads: that compute one operation together; workers are tried if there are several.
        whole: whether the micro-batch is the whole mini-batch.
    """
    in_blocks = whole or problem.batch == 1
    tiles = (
        variant for family in _families(problem) for variant in _variants(family, problem, threads, in_blocks)
    )
    for each in (*_OTHERS, *dict.fromkeys(tiles)):
        if each.refusal(problem) is None:
            yield each


def _families(problem: ConvProblem) -> list[TileAlgorithm]:
    """The two forms with fewest multiplications for an output, edges and all, F(2), and FFT where it pays."""
    every = [TileAlgorithm(outputs=m) for m in (4, 5, 6)]
    fitting = [each for each in every if each.refusal(problem) is None]
    best = sorted(fitting, key=lambda each: _multiplications(each, problem))[:2]
    taps = max(problem.kernel_size)
    fourier = [TileAlgorithm(inputs=t) for t, least in _LEAST_FOURIER_TAPS.items() if taps >= least]
    return [*best, TileAlgorithm(outputs=2), *fourier]


def _multiplications(algorithm: TileAlgorithm, problem: ConvProblem) -> float:
    geometry = TileGeometry(algorithm, problem)
    return geometry.planes * math.prod(geometry.tiles) / math.prod(geometry.y_size[1:])


def _variants(
    family: TileAlgorithm, problem: ConvProblem, threads: int, in_blocks: bool
) -> Iterator[TileAlgorithm]:
    """A family undivided, by channels, and in blocks of rows or images or slices, also on workers."""
    if family.refusal(problem) is not None:
        return
    geometry = TileGeometry(family, problem)
    is_worth_blocks = in_blocks and family.outputs != 2  # F(2) is for what has too little room for others
    blocks = [family, *(_in_blocks(family, geometry) if is_worth_blocks else ())]
    for each in blocks:
        yield each
        if threads > 1 and in_blocks:
            yield TileAlgorithm(each.outputs, each.inputs, each.images, each.slices, each.rows, 0, threads)
    channel_bytes = geometry.taps[0] * geometry.planes * geometry.x_channels * problem.itemsize
    for some_bytes in _FILTER_BYTES:
        if channel_bytes <= some_bytes < channel_bytes * geometry.y_channels:
            channels = 2 ** int(math.log2(some_bytes / channel_bytes))
            yield TileAlgorithm(family.outputs, family.inputs, channels=channels)


def _in_blocks(family: TileAlgorithm, geometry: TileGeometry) -> Iterator[TileAlgorithm]:
    """Blocks of about the sizes that fit a cache: of rows where an image is larger, else of images."""
    m, t = family.outputs, family.inputs
    tiles_h, tiles_w = geometry.tiles
    deep = geometry.y_size[0] if geometry.taps[0] > 1 else 1
    row_bytes = geometry.planes * tiles_w * geometry.x_channels * geometry.problem.itemsize
    for block_bytes in _BLOCK_BYTES:
        rows = max(round(block_bytes / row_bytes), -(-_LEAST_TILES // tiles_w))
        if deep > 1:
            yield TileAlgorithm(m, t, slices=max(rows // tiles_h, 1))
        elif rows < tiles_h:
            yield TileAlgorithm(m, t, rows=rows)
        elif geometry.problem.op is not ConvOp.WGRAD or geometry.batch > 1:
            yield TileAlgorithm(m, t, images=2 ** round(math.log2(rows / tiles_h)))
