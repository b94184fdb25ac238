"""The sizes of a convolution by tiles: tiles, blocks, and the workspace that they take.

An image is cut into overlapping tiles of t_h x t_w inputs, one for each m_h x m_w block of outputs. With the
forms (A, G, B) of both axes (`forms.py`), for every tile p, channel c and filter k:

    V = B_h x_{p,c} B_w'        U = G_h w_{k,c} G_w'        y_{p,k} = A_h [ sum over c of U * V ] A_w'

so that the middle step is one matrix product (P, C) x (C, K) for each of the rank_h · rank_w planes. dgrad
is the same with the filter turned round and the padding r - 1 - p. wgrad is the transpose:

    D = A_h' dy_{p,k} A_w       dw_{k,c} = G_h' [ sum over p of D * V ] G_w

whose sum over p runs over the parts of a division for free, in the transformed domain. In three dimensions
the tiles of torch's operations are slices; the taps along the depth add up in the transformed domain as
well, from rows of V that lie whole slices apart. In one dimension the tiles have a single row.

What pays is that V, the products and U stay in the cache from one step to the next. So a micro-batch runs
in blocks, of some images or some tile rows of one image, and large filters run some channels of y at a time,
with V kept and only their part of U in the workspace; or some channels of x at a time, with the products
kept, where V is the larger of the two.
"""

import math
from typing import NamedTuple

from mucudnn.algorithms.base import Region
from mucudnn.algorithms.parts import part_of
from mucudnn.algorithms.sides import sides_of, three
from mucudnn.algorithms.tiling import Tiling
from mucudnn.locks import cached_property
from mucudnn.problem import ConvOp, ConvProblem, Layout

_CHUNK_BYTES = 2**20
"""Of V that is kept: what is transformed at once, so that it and its transform fit a cache."""

_WORTH_OF_ONE_PRODUCT = 4
"""How many times the operations one product may take instead of two, with memory to wait for in between.

5x5 under F(4) takes 3.1 times as many: of 832 to 128 channels that took 15 ms instead of 23. 5x5 under FFT
takes 4.1 times as many: of 128 to 128 channels 15 instead of 14.
"""

_MIDDLE_ELEMENTS = 1024
"""Of a plane, between the transforms of both axes of a filter.

15x15 of 64 to 64 channels under FFT took 26 ms with 256 at a time, 19 with 512, 15 with 1024, 17 with 2048.
"""


class Box(NamedTuple):
    """Slices and rows of an image that a block reads or computes.

    Attributes:
        image, slice, row: the first.
        size: how many slices and rows.
        before: slices and rows of padding before them.
    """

    image: int
    slice: int
    row: int
    size: tuple[int, ...]
    before: tuple[int, int] = (0, 0)


class Block(NamedTuple):
    """What a block computes, and what it reads, chunk by chunk."""

    y: Box
    chunks: list[Box]


class TileGeometry:
    """The sizes of one problem in tiles and blocks, in three dimensions: d, h and w.

    x is the image that is cut into overlapping tiles, y the one that is made of blocks. They are the
    problem's own but for dgrad, where x is its dy and y its dx.

    Attributes:
        problem: of the micro-batch.
        workers: threads.
        batch: images of the micro-batch.
        taps: (taps_d, r, s) of the filter.
        forms: of h and w.
        x_size, y_size: pixels (d, h, w) of the two images.
        x_channels, y_channels: their channels.
        padding: zeros before x along d, h and w.
        tiles: number of tiles along h and w.
        images, slices, rows: images, slices of y and tile rows of a block.
        group: channels of y that are computed at once.
        x_group: channels of x that are transformed at once.
    """

    def __init__(self, tiling: Tiling, problem: ConvProblem) -> None:
        self.problem = problem
        self.workers = tiling.workers
        self.batch = problem.batch
        self.taps = three(problem.kernel_size, 1)
        self.forms = (tiling.form(self.taps[1]), tiling.form(self.taps[2]))
        self.x_size, self.y_size, self.x_channels, self.y_channels = sides_of(problem)
        self.padding = three(problem.padding, 0)
        if problem.op is ConvOp.DGRAD:
            self.padding = tuple(r - 1 - p for p, r in zip(self.padding, self.taps, strict=True))
        self.tiles = tuple(
            -(-size // form.outputs) for size, form in zip(self.y_size[1:], self.forms, strict=True)
        )
        self._block(tiling)

    def _block(self, tiling: Tiling) -> None:
        """Choose the blocks: those asked for, evened out."""
        is_part = bool(tiling.rows or tiling.slices) or self.taps[0] > 1
        share = max(self.batch // self.workers, 1)
        self.images = 1 if is_part else _divisor(self.batch, tiling.images or share)
        self.slices = _evened(self.y_size[0], tiling.slices or (1 if tiling.rows else 0))
        self.rows = _evened(self.tiles[0], tiling.rows)
        self.group = min(tiling.channels or self.y_channels, self.y_channels)
        self.x_group = min(tiling.summed or self.x_channels, self.x_channels)
        self.chunk = (self.images, self.rows)
        if self.is_grouped and self.taps[0] == 1:
            self.chunk = self._small_chunk()

    def _small_chunk(self) -> tuple[int, int]:
        """Return images and tile rows, equal parts of a block, whose transform fits a cache.

        Rows are parts of an image of one slice only: their tiles would not lie as those of whole slices do.
        """
        values = self.planes * self.tiles[1] * self.x_group * self.slices
        rows = max(_CHUNK_BYTES // (values * self.problem.itemsize), 1)
        if rows < self.rows and self.slices == 1:
            return 1, _divisor(self.rows, rows)
        return _divisor(self.images, max(rows // self.rows, 1)), self.rows

    @property
    def is_grouped(self) -> bool:
        """Whether some channels of y are computed at a time, with V kept."""
        return self.group < self.y_channels

    @property
    def is_prepared(self) -> bool:
        """Whether the whole filter is transformed before the first block, once per mini-batch."""
        return not self.is_grouped and not self.is_summed

    @property
    def is_summed(self) -> bool:
        """Whether products are summed over x's channels some at a time, with the sum kept."""
        return self.x_group < self.x_channels

    @cached_property
    def blocks(self) -> list[Block]:
        """The blocks of the micro-batch, in the order in which they lie in memory."""
        h = self.forms[0].outputs
        return [
            Block(self._box_of_y(n, d, row * h), self._chunks_of(n, d, row))
            for n in range(0, self.batch, self.images)
            for d in range(0, self.y_size[0], self.slices)
            for row in range(0, self.tiles[0], self.rows)
        ]

    def blocks_of(self, worker: int) -> list[Block]:
        """Return the part of `blocks` that a worker computes: neighbours, as many as the others have.

        Where there are fewer blocks than workers, some have none.
        """
        first, last = part_of(len(self.blocks), worker, self.workers)
        return self.blocks[first:last]

    def _chunks_of(self, n: int, d: int, row: int) -> list[Box]:
        """The chunks of x that the block starting at that image, slice and tile row reads."""
        images, rows = self.chunk
        return [
            self._box_of_x(n + i, d, (row + j) * self.forms[0].outputs)
            for i in range(0, self.images, images)
            for j in range(0, self.rows, rows)
        ]

    def _box_of_x(self, n: int, d: int, row: int) -> Box:
        """What the chunk whose outputs start there reads of x, and where it lies in the padded chunk."""
        starts, lengths = (d - self.padding[0], row - self.padding[1]), self.chunk_shape[1:3]
        cuts = [
            (max(start, 0), max(min(start + length, size), 0))
            for start, length, size in zip(starts, lengths, self.x_size, strict=False)
        ]
        sizes = tuple(max(last - first, 0) for first, last in cuts)
        (first_d, _), (first_h, _) = cuts
        return Box(n, first_d, first_h, sizes, (max(-starts[0], 0), max(-starts[1], 0)))

    def _box_of_y(self, n: int, d: int, row: int) -> Box:
        """What the block whose outputs start there computes of y."""
        high = self.rows * self.forms[0].outputs
        return Box(n, d, row, (min(self.slices, self.y_size[0] - d), min(high, self.y_size[1] - row)))

    @property
    def is_turned(self) -> bool:
        """Whether images are contiguous, and are transposed on their way in and out."""
        return self.problem.layout is Layout.CONTIGUOUS

    @property
    def planes(self) -> int:
        """rank_h · rank_w: multiplications of a tile, and matrix products of the middle step."""
        return self.forms[0].rank * self.forms[1].rank

    @property
    def multiplications(self) -> int:
        """Real ones of a micro-batch in fprop: of the transforms of images and filter, and of the planes."""
        h, w = self.forms
        slices, tiles = self.y_size[0], self.batch * math.prod(self.tiles)
        into = h.rank * w.inputs * (h.inputs + w.rank) * self.x_channels
        out_of = h.outputs * w.rank * (h.rank + w.outputs) * self.y_channels
        taps_h, taps_w = self.taps[1:]
        by_axes = taps_h * w.rank * (taps_w + h.rank)
        of_filter = self.planes * taps_h * taps_w if self.has_short_filter else by_axes
        pairs = self.taps[0] * self.x_channels * self.y_channels
        of_tiles = (slices + self.taps[0] - 1) * into + slices * (out_of + self.planes * pairs)
        return tiles * of_tiles + of_filter * pairs

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Shape (images, slices, h, w, channels) of a chunk of x, padded along all axes but w.

        Along w tiles reach beyond the row into its neighbours, and what they find there is overwritten by
        zeros: so a chunk's rows lie as those of the image do, and come over in one copy.
        """
        h, images, rows = self.forms[0], *self.chunk
        high = rows * h.outputs + h.taps - 1
        return (images, self.slices + self.taps[0] - 1, high, self.x_size[2], self.x_group)

    @property
    def margins(self) -> tuple[int, int]:
        """Elements before and behind a chunk of x into which tiles reach."""
        w, left = self.forms[1], self.padding[2]
        wide = self.tiles[1] * w.outputs + w.taps - 1
        return left * self.x_group, max(wide - left - self.x_size[2], 0) * self.x_group

    @property
    def columns_outside(self) -> list[tuple[int, int, int]]:
        """Tiles beyond the image along w, with the first of their columns there and the last + 1."""
        w, left, wide = self.forms[1], self.padding[2], self.x_size[2]
        runs = []
        for tile in range(self.tiles[1]):
            first = tile * w.outputs - left
            runs += [
                (tile, 0, min(-first, w.inputs)),
                (tile, max(wide - first, 0), w.inputs),
            ]
        return [(tile, start, stop) for tile, start, stop in runs if start < stop]

    @property
    def chunk_tiles(self) -> tuple[int, ...]:
        """Images, slices and tiles (h, w) of a chunk of x."""
        return (*self.chunk_shape[:2], self.chunk[1], self.tiles[1])

    @property
    def x_tiles(self) -> tuple[int, ...]:
        """Images, slices and tiles (h, w) of a block of x."""
        return (self.images, self.chunk_shape[1], self.rows, self.tiles[1])

    @property
    def y_tiles(self) -> tuple[int, ...]:
        """Images, slices and tiles (h, w) of a block of y."""
        return (self.images, self.slices, self.rows, self.tiles[1])

    @cached_property
    def x_plane(self) -> int:
        """Elements from one plane of x to the next."""
        return plane_length(math.prod(self.x_tiles) * self.x_group)

    @cached_property
    def chunk_plane(self) -> int:
        """Elements from one plane of a chunk to the next."""
        return plane_length(math.prod(self.chunk_tiles) * self.x_group)

    @cached_property
    def y_plane(self) -> int:
        """Elements from one plane of y to the next.

        The products' planes lie close together: torch computes them in one batch only then.
        """
        elements = math.prod(self.y_tiles) * self.group
        return plane_length(elements) if self.problem.op is ConvOp.WGRAD else elements

    @cached_property
    def filter_plane(self) -> int:
        """Elements from one plane of the filter to the next.

        A gradient's are sums of products, and lie close together for the reason that y's do.
        """
        elements = self.x_group * self.group
        return elements if self.problem.op is ConvOp.WGRAD else plane_length(elements)

    @property
    def has_short_filter(self) -> bool:
        """Whether the filter's transform is quicker as one product than as one for each axis."""
        (h, w), (_, r, s) = self.forms, self.taps
        apart = h.rank * r * s + h.rank * w.rank * s
        return h.rank * w.rank * r * s <= _WORTH_OF_ONE_PRODUCT * apart

    @cached_property
    def middle_taps(self) -> int:
        """Elements between the transforms of both axes of the filter, or 0 if it is one product."""
        if self.has_short_filter:
            return 0
        elements = min(self.x_group * self.group, _MIDDLE_ELEMENTS)
        return self.taps[1] * self.forms[1].rank * elements

    @property
    def is_filter_turned(self) -> bool:
        """Whether the planes of a filter (k, c) are (c, k), as fprop reads them."""
        return self.problem.op is ConvOp.FPROP and not self.has_short_filter

    @property
    def filter_channels(self) -> tuple[int, int]:
        """Filters k, and channels c of each, that are computed at once."""
        pair = (self.group, self.x_group)
        return pair[::-1] if self.problem.op is ConvOp.DGRAD else pair

    @property
    def filter_taps(self) -> int:
        """Elements of taps for which there is room: of a gradient, or of filters that are copied.

        Where the transform is one product, a contiguous filter is read as it lies. What is neither that nor
        channels_last counts as contiguous, and is copied one of the filters at a time.
        """
        filters, channels = self.filter_channels
        has_all_channels = channels == self.problem.in_channels
        is_contiguous = self.problem.filter_layout is Layout.CONTIGUOUS
        is_whole = self.has_short_filter and is_contiguous and has_all_channels
        if self.problem.op is not ConvOp.WGRAD and is_whole:
            filters = 1
        return math.prod(self.taps) * channels * filters

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """The workspace: "filter" outlives a part and lies first, in the same place for every batch.

        Every thread has an arena of its own, with its number behind the names. Transforms go to and fro
        between "front" and "back"; the padded image lies in "back" until its tiles are gathered, a staged
        result in "front" once the products are spent, as do copies of the filter before its transform, and
        its gradient's taps; the first thread alone transforms filters, if there are several. V is
        in "front", or where it is kept for several groups of channels in "kept". The products lie in "back",
        or where they are summed over several groups of x's channels in "sum". wgrad keeps y apart in
        "y_front", because both images' planes meet in the product, and has a sum
        for every thread, and the sum of the values that were found.
        """
        dtype = self.problem.dtype
        planes = (self.taps[0] * self.planes * self.filter_plane,)
        regions = [Region("filter", planes, dtype)]
        if self.problem.op is ConvOp.WGRAD:
            regions += [Region(f"filter{worker}", planes, dtype) for worker in range(1, self.workers)]
            regions.append(Region("found", (1,), dtype))
        for worker in range(self.workers):
            regions += [
                Region(f"{name}{worker}", (size,), dtype) for name, size in self._arena(worker).items()
            ]
        return tuple(regions)

    def _arena(self, worker: int) -> dict[str, int]:
        """Elements of each region of one thread."""
        taps, middle = (self.filter_taps, self.middle_taps) if worker == 0 else (0, 0)
        h, w = self.forms
        staged = math.prod(self.y_tiles) * h.outputs * w.outputs * self.group if self.is_turned else 0
        y_tiles = max(h.outputs * w.outputs, 0 if self.is_summed else self.planes) * self.y_plane
        front = [h.inputs * w.inputs * self.chunk_plane, taps]
        chunk = math.prod(self.chunk_shape) + sum(self.margins)
        back = [chunk, h.rank * w.inputs * self.chunk_plane, middle]
        kept = self.planes * self.x_plane
        if not self.is_grouped:
            front, kept = [*front, kept], 0
        if self.problem.op is ConvOp.WGRAD:
            back += [h.rank * w.outputs * self.y_plane, staged]
        else:
            front += [h.outputs * w.rank * self.y_plane, staged]
            back, y_tiles = [*back, y_tiles], 0
        products = self.planes * self.y_plane if self.is_summed else 0
        return {"front": max(front), "back": max(back), "y_front": y_tiles, "kept": kept, "sum": products}


def _evened(total: int, most: int) -> int:
    """Return the size of equal blocks of at most `most` in `total`; 0 for one block."""
    count = -(-total // most) if most else 1
    return -(-total // count)


def _divisor(total: int, most: int) -> int:
    """Return the largest divisor of `total` that is no more than `most`."""
    return next(each for each in range(min(total, most), 0, -1) if total % each == 0)


def plane_length(elements: int) -> int:
    """Round up to an odd multiple of 16 elements, one cache line of float32.

    Planes a multiple of 4 KiB apart would put the same place of all planes into one set of the first cache.
    """
    return 16 * (-(-elements // 16) | 1)
