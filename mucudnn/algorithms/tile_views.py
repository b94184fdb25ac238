"""The views in a workspace that the loops of tiled convolutions use.

They are named tuples of tensors, lists and numbers, which TorchScript knows.
"""

from typing import NamedTuple

from torch import Tensor

from mucudnn.algorithms.turning import Turning


class Product(NamedTuple):
    """target = left · source · right', for every element of a plane.

    Attributes:
        left: (rows, rows_in).
        right: (rows, columns, columns_in), the same matrix for every row.
        source: (rows_in, columns_in · plane).
        middle: (rows, columns_in · plane).
        middle_planes: the same memory as (rows, columns_in, plane).
        target: (rows, columns, plane); empty where there are several, one after the other.
        targets: (columns, elements) for each row of the first, then of the second, and so on.
    """

    left: Tensor
    right: Tensor
    source: Tensor
    middle: Tensor
    middle_planes: Tensor
    target: Tensor
    targets: list[Tensor]


class Edge(NamedTuple):
    """Where a chunk of x meets the edges of the image; chunks in the middle are all alike.

    Attributes:
        inside: (images, slices, rows, columns, channels), the part of the padded chunk that x fills.
        pixels: the same as (images, slices, pixels, channels).
        borders: the rest of it, in pieces.
    """

    inside: Tensor
    pixels: Tensor
    borders: list[Tensor]


class Cut(NamedTuple):
    """How x is padded and cut into overlapping tiles, a chunk of a block at a time.

    Attributes:
        edges: the kinds of chunks.
        overlapping: (t_h, t_w, images, slices, tiles_h, tiles_w, channels), the tiles in the padded chunk.
        tiles: the same shape, where the tiles are gathered.
        outside: those of their columns that lie beyond the image, in pieces.
        turning: how x, which is contiguous, is transposed; None if it is not.
        to_products: transforms the tiles.
        chunks: of a block.
    """

    edges: list[Edge]
    overlapping: Tensor
    tiles: Tensor
    outside: list[Tensor]
    turning: Turning | None
    to_products: Product
    chunks: int


class Piece(NamedTuple):
    """Outputs of a block that form whole tiles, or tiles that are cut alike.

    Attributes:
        tiles: (images, slices, tiles_h, m_h, tiles_w, m_w, channels).
        step_h, step_w: pixels from one tile to the next.
        top, left: the first pixel, in the block.
    """

    tiles: Tensor
    step_h: int
    step_w: int
    top: int
    left: int


class Side(NamedTuple):
    """What a block of y holds; blocks differ in it where the last tiles reach beyond the image.

    Attributes:
        pieces: all of it.
        shape: (images, slices, rows, columns, channels).
        staged: room of that shape with channels innermost; empty where y lies like that.
        pixels: the same as (images, slices, pixels, channels).
        turning: how they are transposed; None if they are not.
        is_whole: whether no tile reaches beyond the image.
    """

    pieces: list[Piece]
    shape: list[int]
    staged: Tensor
    pixels: Tensor
    turning: Turning | None
    is_whole: bool


class Blocks(NamedTuple):
    """How y is made of blocks of outputs.

    Attributes:
        sides: the kinds of blocks.
        flat: (pixels, channels), all outputs of a block; for dy (pixels of a tile, plane), gaps and all.
    """

    sides: list[Side]
    flat: Tensor


class Taps(NamedTuple):
    """How a filter becomes planes.

    Attributes:
        both: (planes, r · s), the Kronecker product of both axes' forms; empty where those are applied one
            after the other, which takes fewer operations for long filters.
        left, right: (rank_h, r) and (rank_w, s), the forms.
        middle: (r, rank_w, elements), room between them for some elements of a plane.
        rows: (taps_d · r · s, k · c), the taps of a gradient, or room for copies of some filters.
            Of several threads only the first has these and `middle`.
        planes: (taps_d, planes, k · c).
        is_turned: whether rows and planes are (…, c · k) instead.
    """

    both: Tensor
    left: Tensor
    right: Tensor
    middle: Tensor
    rows: Tensor
    planes: Tensor
    is_turned: bool


class SliceSpace(NamedTuple):
    """What fprop and dgrad of one block use.

    Attributes:
        cut: of x.
        v: (planes, rows, channels of x in a group) for each tap along the depth; rows are tiles of slices.
        u: (planes, channels of x in a group, channels of y in a group) for each of these.
        m: (planes, rows, channels of y in a group).
        to_outputs: transforms the products back.
        blocks: of y.
        taps: of the filter of one group of y's channels.
        group: channels of y that are computed at once.
        is_prepared: whether u holds the filter before the first block.
        is_summed: whether the products are summed over x's channels, some at a time, with their part of u.
    """

    cut: Cut
    v: list[Tensor]
    u: list[Tensor]
    m: Tensor
    to_outputs: Product
    blocks: Blocks
    taps: Taps
    group: int
    is_prepared: bool
    is_summed: bool


class SumSpace(NamedTuple):
    """What wgrad of one block uses.

    Attributes:
        cut: of x.
        v: (planes, rows, channels of x) for each tap along the depth.
        blocks: of dy, of the channels of one group.
        y_to_products: transforms dy's tiles.
        d: (planes, channels of dy in a group, rows).
        sums: (planes, channels of dy in a group, channels of x) for each tap along the depth.
        taps: of the filter's gradient, for one group of dy's channels.
        group: channels of dy that are summed at once.
    """

    cut: Cut
    v: list[Tensor]
    blocks: Blocks
    y_to_products: Product
    d: Tensor
    sums: list[Tensor]
    taps: Taps
    group: int
