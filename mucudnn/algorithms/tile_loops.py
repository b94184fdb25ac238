"""The loops of tiled convolutions: block after block, in a workspace whose views are made beforehand.

Everything here runs in TorchScript's interpreter (`scripts`), hence the plain loops and the named tuples of
views. To make a view takes a microsecond, as long as some of the copies, so only the views of the user's
tensors are made here. A block is some images, or some tile rows of one image; where V is kept for several
groups of channels, it is made a chunk at a time; where products are summed over groups of x's channels, a
group at a time. Images are seen as (n, d, h, w, c), whatever their strides;
with fewer spatial dimensions d, or d and h, are 1.
"""

import torch
from torch import Tensor

from mucudnn.algorithms.scripts import Script
from mucudnn.algorithms.tile_filters import lay, undo_filter
from mucudnn.algorithms.tile_views import Cut, Edge, Piece, Product, Side, SliceSpace, SumSpace
from mucudnn.algorithms.turning import turn


def _apply(product: Product) -> None:
    torch.mm(product.left, product.source, out=product.middle)
    torch.bmm(product.right, product.middle_planes, out=product.target)


def _apply_to_part(product: Product, number: int) -> None:
    """Write to one of several targets."""
    torch.mm(product.left, product.source, out=product.middle)
    rows = product.left.size(0)
    for i in range(rows):
        target = product.targets[number * rows + i]
        torch.mm(product.right[i], product.middle_planes[i][:, : target.size(1)], out=target)


def _box(image: Tensor, shape: list[int], n: int, d: int, row: int, channel: int) -> Tensor:
    """The box of that shape in `image` (n, d, h, w, c), from that image, slice, row and channel on."""
    strides = [image.stride(0), image.stride(1), image.stride(2), image.stride(3), image.stride(4)]
    start = n * strides[0] + d * strides[1] + row * strides[2] + channel * strides[4]
    return image.as_strided(shape, strides, image.storage_offset() + start)


def _tiles_in(piece: Piece, image: Tensor) -> Tensor:
    """The pixels of a block `image` (images, slices, rows, columns, c) that a piece holds, tile by tile."""
    down, right = image.stride(2), image.stride(3)
    strides = [
        image.stride(0), image.stride(1), piece.step_h * down, down, piece.step_w * right, right,
        image.stride(4),
    ]  # fmt: skip
    start = piece.top * down + piece.left * right
    return image.as_strided(piece.tiles.shape, strides, image.storage_offset() + start)


def _transform(cut: Cut, image: Tensor, blocks: list[int], start: int, channel: int) -> None:
    """Transform the tiles of the block whose numbers start there, from that channel of x on."""
    for chunk in range(cut.chunks):
        at = start + 4 + 4 * chunk
        _gather(cut, cut.edges[blocks[at + 3]], image, blocks[at], blocks[at + 1], blocks[at + 2], channel)
        if len(cut.to_products.targets) == 0:
            _apply(cut.to_products)
        else:
            _apply_to_part(cut.to_products, chunk)


def _gather(cut: Cut, edge: Edge, image: Tensor, n: int, d: int, row: int, channel: int) -> None:
    """Copy a chunk of x into its padding, and the overlapping tiles out of it."""
    inside = edge.inside
    if inside.numel() > 0:
        source = _box(image, list(inside.shape), n, d, row, channel)
        turning = cut.turning
        if turning is not None and _has_even_pixels(source):
            turn(turning, _pixels(source).transpose(2, 3), edge.pixels)
        else:
            inside.copy_(source)
    for border in edge.borders:
        border.zero_()
    cut.tiles.copy_(cut.overlapping)
    for columns in cut.outside:
        columns.zero_()


def _scatter(side: Side, image: Tensor) -> None:
    """Copy the outputs of a block to its pixels `image` of y."""
    turning = side.turning
    if turning is None:
        for piece in side.pieces:
            _tiles_in(piece, image).copy_(piece.tiles)
        return
    for piece in side.pieces:
        _tiles_in(piece, side.staged).copy_(piece.tiles)
    if _has_even_pixels(image):
        turn(turning, side.pixels, _pixels(image).transpose(2, 3))
    else:
        image.copy_(side.staged)


def _has_even_pixels(box: Tensor) -> bool:
    """Whether the pixels of each slice of (images, slices, rows, columns, c) lie evenly apart."""
    return box.stride(2) == box.size(3) * box.stride(3) or box.size(2) == 1


def _pixels(box: Tensor) -> Tensor:
    """View such a box as (images, slices, pixels, c)."""
    shape = [box.size(0), box.size(1), box.size(2) * box.size(3), box.size(4)]
    strides = [box.stride(0), box.stride(1), box.stride(3), box.stride(4)]
    return box.as_strided(shape, strides, box.storage_offset())


@Script
def slice_loop(
    space: SliceSpace,
    image: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None,
    blocks: list[int],
    is_dgrad: bool,
) -> float:
    """Compute blocks of y, or of dx where x stands for dy and y for dx; return the sum of what was computed.

    Args:
        space: the workspace.
        image: x, (n, d, h, w, c).
        weight: (k, c, taps_d, r, s); read only where the filter is not prepared.
        out: y, (n, d, h, w, k).
        bias: (k,).
        blocks: for each block, of y the first image, slice and row and the number of its side, and for each
            chunk of x the same with the number of its edge.
        is_dgrad: whether it is dgrad.
    """
    total = 0.0
    for i in range(0, len(blocks), 4 + 4 * space.cut.chunks):
        side = space.blocks.sides[blocks[i + 3]]
        if space.is_summed:
            _sum_up(space, image, weight, blocks, i, is_dgrad)
        else:
            _transform(space.cut, image, blocks, i, 0)
        for channel in range(0, out.size(4), space.group):
            if not (space.is_prepared or space.is_summed):
                lay(weight.narrow(1 if is_dgrad else 0, channel, space.group), space.taps)
            if not space.is_summed:
                _multiply(space, first=True)
            _apply(space.to_outputs)
            if bias is not None:
                space.blocks.flat.add_(bias[channel : channel + space.group])
            pixels = _box(out, side.shape, blocks[i], blocks[i + 1], blocks[i + 2], channel)
            _scatter(side, pixels)
            total += float(space.blocks.flat.sum())
    return total


def _multiply(space: SliceSpace, first: bool) -> None:
    """Multiply V with U, or add their product to those before."""
    if first:
        torch.bmm(space.v[0], space.u[0], out=space.m)
    else:
        space.m.baddbmm_(space.v[0], space.u[0])
    for q in range(1, len(space.v)):
        space.m.baddbmm_(space.v[q], space.u[q])


def _sum_up(
    space: SliceSpace, image: Tensor, weight: Tensor, blocks: list[int], start: int, is_dgrad: bool
) -> None:
    """Sum the products of a block over x's channels, some at a time, with their part of the filter."""
    some = space.v[0].size(2)
    for channel in range(0, image.size(4), some):
        lay(weight.narrow(0 if is_dgrad else 1, channel, some), space.taps)
        _transform(space.cut, image, blocks, start, channel)
        _multiply(space, first=channel == 0)


@Script
def sum_loop(space: SumSpace, image: Tensor, gradient: Tensor, blocks: list[int], first: bool) -> None:
    """Add the products of blocks to the running sum, or start it with them if they are the `first`.

    Args:
        space: the workspace; its group is all channels.
        image: x, (n, d, h, w, c).
        gradient: dy, (n, d, h, w, k).
        blocks: numbers of the blocks, as for `slice_loop`.
        first: whether the sum starts here.
    """
    if first and len(blocks) == 0:
        for q in range(len(space.sums)):
            space.sums[q].zero_()
    for i in range(0, len(blocks), 4 + 4 * space.cut.chunks):
        side = space.blocks.sides[blocks[i + 3]]
        _transform(space.cut, image, blocks, i, 0)
        pixels = _box(gradient, side.shape, blocks[i], blocks[i + 1], blocks[i + 2], 0)
        _add_block(space, side, pixels, first and i == 0)


def _add_block(space: SumSpace, side: Side, pixels: Tensor, first: bool) -> None:
    """Add the products of a block of dy, whose x is transformed, to the sum."""
    if not side.is_whole:
        space.blocks.flat.zero_()
    turning = side.turning
    if turning is not None:
        if _has_even_pixels(pixels):
            turn(turning, _pixels(pixels).transpose(2, 3), side.pixels)
        else:
            side.staged.copy_(pixels)
        pixels = side.staged
    for piece in side.pieces:
        piece.tiles.copy_(_tiles_in(piece, pixels))
    _apply(space.y_to_products)
    for q in range(len(space.v)):
        if first:
            torch.bmm(space.d, space.v[q], out=space.sums[q])
        else:
            space.sums[q].baddbmm_(space.d, space.v[q])


@Script
def grouped_sum_loop(
    space: SumSpace, image: Tensor, gradient: Tensor, into: Tensor, blocks: list[int], adds: bool
) -> float:
    """Write dw of a part to `into` (k, c, taps_d, r, s), or add it, some channels at a time.

    x is transformed once for each block. Returns the sum of what was computed.
    """
    total = 0.0
    for i in range(0, len(blocks), 4 + 4 * space.cut.chunks):
        side = space.blocks.sides[blocks[i + 3]]
        _transform(space.cut, image, blocks, i, 0)
        for channel in range(0, gradient.size(4), space.group):
            pixels = _box(gradient, side.shape, blocks[i], blocks[i + 1], blocks[i + 2], channel)
            _add_block(space, side, pixels, first=True)
            total += undo_filter(space.taps, into[channel : channel + space.group], adds or i > 0)
    return total
