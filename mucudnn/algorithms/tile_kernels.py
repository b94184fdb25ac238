"""Convolution by tiles: the views in a workspace that the loops use, bound once.

Inside, channels are innermost. The transforms take the whole tensor as the long side of two skinny matrix
products, one for each axis. Every plane of x's tiles is `plane` elements long, of which the last few are a
gap that the products carry along.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from mucudnn.algorithms.base import GradientSum, carve
from mucudnn.algorithms.forms import Matrix
from mucudnn.algorithms.tile_filters import filter_loop, finish_loop
from mucudnn.algorithms.tile_geometry import TileGeometry
from mucudnn.algorithms.tile_loops import grouped_sum_loop, slice_loop, sum_loop
from mucudnn.algorithms.tile_views import (
    Blocks,
    Cut,
    Edge,
    Piece,
    Product,
    Side,
    SliceSpace,
    SumSpace,
    Taps,
)
from mucudnn.algorithms.turning import Turning, quickest
from mucudnn.algorithms.workers import run_on_workers
from mucudnn.problem import ConvOp

Result = TypeVar("Result")


class TileSliceKernel:
    """fprop or dgrad of one micro-batch."""

    def __init__(self, geometry: TileGeometry, buffer: Tensor) -> None:
        space = carve(buffer, geometry.regions)
        self._is_dgrad = geometry.problem.op is ConvOp.DGRAD
        self._is_prepared = geometry.is_prepared
        self._spaces = [
            (_slice_space(geometry, _Arena(space, worker)), _numbers(geometry, worker))
            for worker in range(geometry.workers)
        ]

    def prepare(self, weight: Tensor) -> None:
        """Transform the filter, unless it is transformed some channels at a time; once per mini-batch."""
        if self._is_prepared:
            call = functools.partial(filter_loop, _filter_view(weight), self._spaces[0][0].taps)
            _run([call], len(self._spaces))

    def run(self, image: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> bool:
        """Write the part's result into `out`; return whether it is finite."""
        x, w, y = _image_view(image), _filter_view(weight), _image_view(out)
        calls = [
            functools.partial(slice_loop, space, x, w, y, bias, blocks, self._is_dgrad)
            for space, blocks in self._spaces
            if blocks
        ]
        totals: list[float] = _run(calls, len(calls))
        return all(map(math.isfinite, totals))


class TileSumKernel:
    """wgrad of one micro-batch, summed in the transformed domain."""

    def __init__(self, geometry: TileGeometry, buffer: Tensor) -> None:
        space = carve(buffer, geometry.regions)
        self._spaces = [
            (_sum_space(geometry, _Arena(space, worker)), _numbers(geometry, worker))
            for worker in range(geometry.workers)
        ]

    def add(self, image: Tensor, gradient: Tensor, into: GradientSum, first: bool) -> None:  # noqa: ARG002  # summed apart
        """Add the part's products to the running sum, or start the sum with them if it is the `first`."""
        x, dy = _image_view(image), _image_view(gradient)
        calls = [functools.partial(sum_loop, space, x, dy, blocks, first) for space, blocks in self._spaces]
        _run(calls, len(calls))

    def finish(self, into: GradientSum) -> bool:
        """Write the sum to `into`, or add it; return whether it is finite (if not, `into` is untouched)."""
        taps, *others = [space.taps for space, _ in self._spaces]
        for other in others:
            taps.planes.add_(other.planes)
        return math.isfinite(finish_loop(taps, _filter_view(into.total), into.accumulate))


class GroupedTileSumKernel:
    """wgrad of one micro-batch, some channels of dy at a time, summed where the gradient is wanted."""

    def __init__(self, geometry: TileGeometry, buffer: Tensor) -> None:
        space = carve(buffer, geometry.regions)
        self._space = _sum_space(geometry, _Arena(space, 0))
        self._blocks = _numbers(geometry, 0)
        self._found = space["found"]  # by all parts, whatever their sizes

    def add(self, image: Tensor, gradient: Tensor, into: GradientSum, first: bool) -> None:
        """Add the part's dw to `into`, or write it there if it is the `first` and nothing is to be kept."""
        adds = into.accumulate or not first
        dw = _filter_view(into.total)
        x, dy = _image_view(image), _image_view(gradient)
        found = grouped_sum_loop(self._space, x, dy, dw, self._blocks, adds)
        if first:
            self._found.fill_(found)
        else:
            self._found.add_(found)

    def finish(self, into: GradientSum) -> bool:  # noqa: ARG002  # it holds the sum
        """Return whether the sum is finite; if not, `into` holds a part of it."""
        return math.isfinite(self._found.item())


class _Arena:
    """The regions of one worker, by their names without its number."""

    def __init__(self, space: Mapping[str, Tensor], worker: int) -> None:
        self._space = space
        self._worker = worker

    @property
    def is_first(self) -> bool:
        """Whether it is the one that transforms filters and their gradients, alone or for all."""
        return self._worker == 0

    def __getitem__(self, name: str) -> Tensor:
        return self._space[f"{name}{self._worker}"]

    @property
    def v(self) -> Tensor:
        """The transformed tiles of a block: what is kept, or else what is in front."""
        return self["kept"] if self["kept"].numel() else self["front"]

    @property
    def planes(self) -> Tensor:
        """The transformed filter, or this worker's sum of the gradient's."""
        return self._space.get(f"filter{self._worker}", self._space["filter"])


def _run(calls: Sequence[functools.partial[Result]], workers: int) -> list[Result]:
    """Run calls in this thread, or on workers if there are several."""
    return run_on_workers(calls) if workers > 1 else [call() for call in calls]


def _image_view(tensor: Tensor) -> Tensor:
    """View an image (n, c, *size) as (n, d, h, w, c)."""
    while tensor.dim() < 5:
        tensor = tensor.unsqueeze(2)
    return tensor.permute(0, 2, 3, 4, 1)


def _filter_view(tensor: Tensor) -> Tensor:
    """View a filter (k, c, *taps) as (k, c, taps_d, r, s)."""
    while tensor.dim() < 5:
        tensor = tensor.unsqueeze(2)
    return tensor


def _slice_space(geometry: TileGeometry, arena: _Arena) -> SliceSpace:
    h, w = geometry.forms
    front, back, turning = arena["front"], arena["back"], _turning(geometry, arena)
    planes, y_plane = geometry.planes, geometry.y_plane
    products = arena["sum"] if geometry.is_summed else back
    if geometry.is_filter_turned or geometry.problem.op is ConvOp.DGRAD:
        u = _filter_planes(geometry, arena).unflatten(2, (geometry.x_group, geometry.group))
    else:
        u = _filter_planes(geometry, arena).unflatten(2, (geometry.group, geometry.x_group)).transpose(2, 3)
    return SliceSpace(
        cut=_cut(geometry, arena, turning),
        v=_shifted(geometry, arena),
        u=list(u)[:: -1 if geometry.problem.op is ConvOp.DGRAD else 1],
        m=_matrices(products, planes, math.prod(geometry.y_tiles), geometry.group, y_plane),
        to_outputs=_product(h.output_transform, w.output_transform, products, front, back, y_plane),
        blocks=_blocks(geometry, back, front, turning),
        taps=_taps(geometry, arena),
        group=geometry.group,
        is_prepared=geometry.is_prepared,
        is_summed=geometry.is_summed,
    )


def _sum_space(geometry: TileGeometry, arena: _Arena) -> SumSpace:
    h, w = geometry.forms
    back, y_front, turning = arena["back"], arena["y_front"], _turning(geometry, arena)
    planes, deep, y_plane = geometry.planes, geometry.taps[0], geometry.y_plane
    y_rows = math.prod(geometry.y_tiles)
    return SumSpace(
        cut=_cut(geometry, arena, turning),
        v=_shifted(geometry, arena),
        blocks=_blocks(geometry, y_front, back, turning),
        y_to_products=_product(h.output_transform.T, w.output_transform.T, y_front, back, y_front, y_plane),
        d=_matrices(y_front, planes, y_rows, geometry.group, y_plane).transpose(1, 2),
        sums=list(arena.planes.view(deep, planes, geometry.group, geometry.x_group)),
        taps=_taps(geometry, arena),
        group=geometry.group,
    )


def _numbers(geometry: TileGeometry, worker: int) -> list[int]:
    """The numbers of a worker's blocks, as `slice_loop` takes them."""
    edges, sides = _kinds(geometry)
    numbers = []
    for y, chunks in geometry.blocks_of(worker):
        numbers += [y.image, y.slice, y.row, sides.index(y.size)]
        for x in chunks:
            numbers += [x.image, x.slice, x.row, edges.index((x.size, x.before))]
    return numbers


def _kinds(
    geometry: TileGeometry,
) -> tuple[list[tuple[tuple[int, ...], tuple[int, int]]], list[tuple[int, ...]]]:
    """The kinds of chunks by their edges in x, and of blocks by their sides in y."""
    edges = dict.fromkeys((x.size, x.before) for block in geometry.blocks for x in block.chunks)
    return list(edges), list(dict.fromkeys(block.y.size for block in geometry.blocks))


def _shifted(geometry: TileGeometry, arena: _Arena) -> list[Tensor]:
    """V for each tap along the depth: rows that lie a slice further each time."""
    rows, per_slice = math.prod(geometry.x_tiles), geometry.rows * geometry.tiles[1]
    v = _matrices(arena.v, geometry.planes, rows, geometry.x_group, geometry.x_plane)
    count = math.prod(geometry.y_tiles)
    return [v[:, q * per_slice : q * per_slice + count] for q in range(geometry.taps[0])]


def _turning(geometry: TileGeometry, arena: _Arena) -> Turning | None:
    """How images are transposed; None if they are not."""
    return quickest((arena["front"], arena["back"]), geometry.workers) if geometry.is_turned else None


def _cut(geometry: TileGeometry, arena: _Arena, turning: Turning | None) -> Cut:
    h, w = geometry.forms
    shape, front, back = geometry.chunk_shape, arena["front"], arena["back"]
    before, _ = geometry.margins
    block = back[before : before + math.prod(shape)].view(shape)
    per_image, per_slice, per_row, per_pixel, per_channel = block.stride()
    overlapping = back.as_strided(
        (h.inputs, w.inputs, *geometry.chunk_tiles, shape[-1]),
        (per_row, per_pixel, per_image, per_slice, h.outputs * per_row, w.outputs * per_pixel, per_channel),
    )
    plane = geometry.chunk_plane
    tiles = _tile_view(front, (h.inputs, w.inputs), geometry.chunk_tiles, shape[-1], plane)
    targets = _targets(geometry, arena.v) if geometry.is_grouped else []
    product = _product(h.input_transform, w.input_transform, front, back, front, plane, targets)
    outside = [tiles[:, start:stop, :, :, :, tile] for tile, start, stop in geometry.columns_outside]
    edges = [_edge(block, *kind) for kind in _kinds(geometry)[0]]
    chunks = len(geometry.blocks[0].chunks)
    return Cut(edges, overlapping, tiles, outside, turning, product, chunks)


def _targets(geometry: TileGeometry, v: Tensor) -> list[Tensor]:
    """Where the transforms of a block's chunks go in V: (columns, elements) for each chunk and row."""
    h, w = geometry.forms
    planes = v[: geometry.planes * geometry.x_plane].view(h.rank, w.rank, geometry.x_plane)
    length = math.prod(geometry.chunk_tiles) * geometry.x_group
    starts = range(0, math.prod(geometry.x_tiles) * geometry.x_group, length)
    return [planes[i, :, start : start + length] for start in starts for i in range(h.rank)]


def _edge(block: Tensor, size: tuple[int, ...], before: tuple[int, int]) -> Edge:
    """Split a padded chunk into what x fills, of so many slices and rows, and what lies around it."""
    if not math.prod(size):
        return Edge(block[:0], block[:0], [block])
    inside, borders = block, []
    for axis, (first, length) in enumerate(zip(before, size, strict=True), 1):
        behind = inside.size(axis) - first - length
        borders += [inside.narrow(axis, 0, first), inside.narrow(axis, first + length, behind)]
        inside = inside.narrow(axis, first, length)
    return Edge(inside, _pixels(inside), [border for border in borders if border.numel()])


def _pixels(box: Tensor) -> Tensor:
    """View (images, slices, rows, columns, channels), with rows that are dense, as (…, pixels, channels)."""
    return box.flatten(2, 3)


def _blocks(geometry: TileGeometry, outputs: Tensor, staged: Tensor, turning: Turning | None) -> Blocks:
    h, w = geometry.forms
    sides = (h.outputs, w.outputs)
    tiles = _tile_view(outputs, sides, geometry.y_tiles, geometry.group, geometry.y_plane)
    tiles = tiles.permute(2, 3, 4, 0, 5, 1, 6)
    columns = geometry.y_plane if geometry.problem.op is ConvOp.WGRAD else geometry.group
    return Blocks(
        [_side(geometry, tiles, staged, size, turning) for size in _kinds(geometry)[1]],
        outputs[: math.prod(sides) * geometry.y_plane].view(-1, columns),
    )


def _side(
    geometry: TileGeometry, tiles: Tensor, staged: Tensor, size: tuple[int, ...], turning: Turning | None
) -> Side:
    """Split the outputs of a block of so many slices and rows into whole tiles and cut ones."""
    high, wide = tiles.size(3), tiles.size(5)
    shape = [geometry.images, *size, geometry.y_size[2], geometry.group]
    pieces = [
        Piece(tiles[:, : size[0], i : i + rows, :m_h, j : j + columns, :m_w], high, wide, i * high, j * wide)
        for i, rows, m_h in _whole_and_rest(shape[2], high)
        for j, columns, m_w in _whole_and_rest(shape[3], wide)
    ]
    if turning is not None:
        place = staged[: math.prod(shape)].view(shape)
        lines = _pixels(place)
    else:
        place = lines = staged[:0]
    covered = math.prod(shape[1:4])
    is_whole = covered == math.prod(tiles.shape[1:6])
    return Side(pieces, shape, place, lines, turning, is_whole)


def _whole_and_rest(size: int, step: int) -> list[tuple[int, int, int]]:
    """(first tile, number of tiles, pixels of each) of the whole tiles in `size`, then of the cut one."""
    whole, rest = divmod(size, step)
    runs = [(0, whole, step), (whole, 1, rest)]
    return [(first, count, pixels) for first, count, pixels in runs if count and pixels]


def _taps(geometry: TileGeometry, arena: _Arena) -> Taps:
    problem = geometry.problem
    taps, between = (geometry.filter_taps, geometry.middle_taps) if arena.is_first else (0, 0)
    rows = arena["front"][:taps].view(math.prod(geometry.taps), -1)
    h, w = (form.filter_transform for form in geometry.forms)
    if problem.op is ConvOp.DGRAD:
        h, w = h[:, ::-1], w[:, ::-1]
    left, right = (torch.from_numpy(form.copy()).to(rows) for form in (h, w))
    both = torch.kron(left, right) if geometry.has_short_filter else left[:0]
    middle = arena["back"][:between].view(left.size(1), right.size(0), -1)
    planes = _filter_planes(geometry, arena)
    return Taps(both, left, right, middle, rows, planes, geometry.is_filter_turned)


def _filter_planes(geometry: TileGeometry, arena: _Arena) -> Tensor:
    """View (taps_d, planes, elements) of the transformed filter, or of a worker's sum."""
    planes = arena.planes.view(geometry.taps[0], geometry.planes, geometry.filter_plane)
    return planes[:, :, : geometry.x_group * geometry.group]


def _product(
    left: Matrix,
    right: Matrix,
    source: Tensor,
    middle: Tensor,
    target: Tensor,
    plane: int,
    targets: Sequence[Tensor] = (),
) -> Product:
    (rows, rows_in), (columns, columns_in) = left.shape, right.shape
    middle = middle[: rows * columns_in * plane]
    length = 0 if targets else rows * columns * plane
    return Product(
        left=torch.from_numpy(left.copy()).to(source),
        right=torch.from_numpy(right.copy()).to(source).expand(rows, columns, columns_in),
        source=source[: rows_in * columns_in * plane].view(rows_in, columns_in * plane),
        middle=middle.view(rows, columns_in * plane),
        middle_planes=middle.view(rows, columns_in, plane),
        target=target[:length].view(rows, columns, -1 if length else 0),
        targets=list(targets),
    )


def _tile_view(
    buffer: Tensor, sides: tuple[int, int], tiles: tuple[int, ...], channels: int, plane: int
) -> Tensor:
    """View (side_h, side_w, images, slices, tiles_h, tiles_w, channels) of the planes in `buffer`."""
    planes = buffer[: sides[0] * sides[1] * plane].view(*sides, plane)
    inside = planes[..., : math.prod(tiles) * channels]
    view: Tensor = inside.unflatten(2, (*tiles, channels))
    return view


def _matrices(buffer: Tensor, planes: int, rows: int, columns: int, plane: int) -> Tensor:
    """View (planes, rows, columns) of the planes at the start of `buffer`."""
    inside = buffer[: planes * plane].view(planes, plane)[:, : rows * columns]
    view: Tensor = inside.unflatten(1, (rows, columns))
    return view
