"""Convolution by tiles: the arithmetic, all of it in matrix products that write into a given workspace.

Inside, channels are innermost. The transforms take the whole tensor as the long side of two skinny matrix
products, one for each axis. Every plane of tiles is `plane` elements long, of which the last few are a gap
that the products carry along.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mucudnn.algorithms.base import GradientSum, carve, channels_last_view
from mucudnn.problem import ConvOp

if TYPE_CHECKING:
    from mucudnn.algorithms.tiles import TileGeometry

LARGE_IMAGE = 8192
"""Pixels from which an image goes to NCHW by itself: torch blocks a transposing copy only in 2-D."""

TRANSPOSING_ELEMENTS = 60 * 60
"""What such a copy takes from torch's allocator while it runs: one block."""


class TileSliceKernel:
    """fprop or dgrad of one micro-batch."""

    def __init__(self, geometry: "TileGeometry", buffer: Tensor) -> None:
        h, w = geometry.forms
        space = carve(buffer, geometry.regions)
        front, back = space["front"], space["back"]
        planes, p = geometry.planes, geometry.total_tiles
        x_plane, y_plane = geometry.x_plane, geometry.y_plane
        like = front.new_tensor

        self._filter = _FilterTransform(geometry, space)
        self._image = _PaddedImage(geometry, space["padded"])
        self._x_tiles = _tile_view(front, (h.inputs, w.inputs), geometry, geometry.x_channels, x_plane)
        self._to_products = _Transform(
            like(h.input_transform), like(w.input_transform), front, back, front, x_plane
        )
        self._v = _matrices(front, planes, p, geometry.x_channels, x_plane)
        u = space["filter"]
        self._u = u if geometry.problem.op is ConvOp.DGRAD else u.transpose(1, 2)
        self._m = _matrices(back, planes, p, geometry.y_channels, y_plane)
        self._to_outputs = _Transform(
            like(h.output_transform), like(w.output_transform), back, front, back, y_plane
        )
        self._y = _matrices(back, h.outputs * w.outputs, p, geometry.y_channels, y_plane)
        self._y_tiles = _tile_view(back, (h.outputs, w.outputs), geometry, geometry.y_channels, y_plane)
        self._blocks = (h.outputs, w.outputs)
        self._staged = space["staged"] if geometry.is_staged else None

    def prepare(self, weight: Tensor) -> None:
        """Transform the filter; once per mini-batch, before the first part."""
        self._filter.apply(weight)

    def run(self, image: Tensor, out: Tensor, bias: Tensor | None) -> bool:
        """Write the part's result into `out`; return whether it is finite."""
        self._x_tiles.copy_(self._image.tiles_of(image))
        self._to_products.apply()
        torch.bmm(self._v, self._u, out=self._m)
        self._to_outputs.apply()
        if bias is not None:
            self._y.add_(bias)
        target = channels_last_view(out) if self._staged is None else self._staged
        for tiles, pixels in _pairs(self._y_tiles, target, self._blocks):
            pixels.copy_(tiles)
        if self._staged is not None:
            _leave(self._staged, out)
        return is_finite(self._y)


class TileSumKernel:
    """wgrad of one micro-batch, summed in the transformed domain."""

    def __init__(self, geometry: "TileGeometry", buffer: Tensor) -> None:
        h, w = geometry.forms
        space = carve(buffer, geometry.regions)
        front, back, y_front = space["front"], space["back"], space["y_front"]
        planes, p = geometry.planes, geometry.total_tiles
        x_plane, y_plane = geometry.x_plane, geometry.y_plane
        like = front.new_tensor

        self._filter = _FilterTransform(geometry, space)
        self._image = _PaddedImage(geometry, space["padded"])
        self._x_tiles = _tile_view(front, (h.inputs, w.inputs), geometry, geometry.x_channels, x_plane)
        self._x_to_products = _Transform(
            like(h.input_transform), like(w.input_transform), front, back, front, x_plane
        )
        self._y_tiles = _tile_view(y_front, (h.outputs, w.outputs), geometry, geometry.y_channels, y_plane)
        self._y_to_products = _Transform(
            like(h.output_transform.T), like(w.output_transform.T), y_front, back, y_front, y_plane
        )
        self._v = _matrices(front, planes, p, geometry.x_channels, x_plane)
        self._d = _matrices(y_front, planes, p, geometry.y_channels, y_plane).transpose(1, 2)
        self._sum = space["filter"]
        self._blocks = (h.outputs, w.outputs)
        self._is_cropped = any(size % m for size, m in zip(geometry.y_size, self._blocks, strict=True))
        self._staged = space["staged"] if geometry.is_staged else None

    def add(self, image: Tensor, gradient: Tensor, into: GradientSum, first: bool) -> None:  # noqa: ARG002  # summed apart
        """Add the part's products to the running sum, or start the sum with them if it is the `first`."""
        self._x_tiles.copy_(self._image.tiles_of(image))
        self._x_to_products.apply()
        source = channels_last_view(gradient)
        if self._staged is not None:
            source = self._staged.copy_(source)
        if self._is_cropped:
            self._y_tiles.zero_()
        for tiles, pixels in _pairs(self._y_tiles, source, self._blocks):
            tiles.copy_(pixels)
        self._y_to_products.apply()
        if first:
            torch.bmm(self._d, self._v, out=self._sum)
        else:
            self._sum.baddbmm_(self._d, self._v)

    def finish(self, into: GradientSum) -> bool:
        """Write the sum to `into`, or add it; return whether it is finite (if not, `into` is untouched)."""
        taps = self._filter.undo()
        if not is_finite(taps):
            return False
        into.take(taps)
        return True


class _Transform:
    """target = left · source · right' for every element of a plane, through `middle`."""

    def __init__(
        self, left: Tensor, right: Tensor, source: Tensor, middle: Tensor, target: Tensor, plane: int
    ) -> None:
        (rows, rows_in), (columns, columns_in) = left.shape, right.shape
        self._left, self._right = left, right.expand(rows, columns, columns_in)
        self._source = source[: rows_in * columns_in * plane].view(rows_in, columns_in * plane)
        middle = middle[: rows * columns_in * plane]
        self._middle = middle.view(rows, columns_in * plane)
        self._middle_planes = middle.view(rows, columns_in, plane)
        self._target = target[: rows * columns * plane].view(rows, columns, plane)

    def apply(self) -> None:
        torch.mm(self._left, self._source, out=self._middle)
        torch.bmm(self._right, self._middle_planes, out=self._target)


class _FilterTransform:
    """Between a filter (k, c, r, s) and its planes (rank_h · rank_w, k, c)."""

    def __init__(self, geometry: "TileGeometry", space: Mapping[str, Tensor]) -> None:
        problem = geometry.problem
        k, c = problem.out_channels, problem.in_channels
        r, s = problem.kernel_size
        h, w = (form.filter_transform for form in geometry.forms)
        if problem.op is ConvOp.DGRAD:
            h, w = h[:, ::-1], w[:, ::-1]
        taps = space["front"][: r * s * k * c]
        both = torch.kron(torch.tensor(h.copy()), torch.tensor(w.copy()))
        self._both = both.to(taps)
        self._rows = taps.view(r * s, k * c)
        self._taps = taps.view(r, s, k, c).permute(2, 3, 0, 1)
        self._planes = space["filter"].view(geometry.planes, k * c)

    def apply(self, weight: Tensor) -> None:
        self._taps.copy_(weight)
        torch.mm(self._both, self._rows, out=self._planes)

    def undo(self) -> Tensor:
        """Return the taps (k, c, r, s) to which the planes add up: the transpose of `apply`."""
        torch.mm(self._both.T, self._planes, out=self._rows)
        return self._taps


class _PaddedImage:
    """A copy of x with its padding and channels innermost, seen as overlapping tiles."""

    def __init__(self, geometry: "TileGeometry", padded: Tensor) -> None:
        (h, w), (top, left) = geometry.x_size, geometry.padding
        self._inside = padded[:, top : top + h, left : left + w]
        borders = (
            padded[:, :top],
            padded[:, top + h :],
            padded[:, top : top + h, :left],
            padded[:, top : top + h, left + w :],
        )
        self._borders = [border for border in borders if border.numel()]
        self._tiles = _overlapping(padded, geometry)

    def tiles_of(self, image: Tensor) -> Tensor:
        self._inside.copy_(channels_last_view(image))
        for border in self._borders:
            border.zero_()
        return self._tiles


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite, as far as their sum tells.

    The sum of finite values may overflow, at about 1e38 in float32; that is a false alarm, never a miss.
    """
    return math.isfinite(tensor.sum().item())


def _overlapping(padded: Tensor, geometry: "TileGeometry") -> Tensor:
    """View (t_h, t_w, n, tiles_h, tiles_w, c) of the padded image (n, height, width, c)."""
    h, w = geometry.forms
    per_image, per_row, per_pixel, per_channel = padded.stride()
    shape = (h.inputs, w.inputs, padded.shape[0], *geometry.tiles, padded.shape[3])
    strides = (per_row, per_pixel, per_image, h.outputs * per_row, w.outputs * per_pixel, per_channel)
    return padded.as_strided(shape, strides)


def _tile_view(
    buffer: Tensor, sides: tuple[int, int], geometry: "TileGeometry", channels: int, plane: int
) -> Tensor:
    """View (side_h, side_w, n, tiles_h, tiles_w, channels) of the planes at the start of `buffer`."""
    planes = buffer[: sides[0] * sides[1] * plane].view(*sides, plane)
    inside = planes[..., : geometry.total_tiles * channels]
    view: Tensor = inside.unflatten(2, (geometry.problem.batch, *geometry.tiles, channels))
    return view


def _matrices(buffer: Tensor, planes: int, rows: int, columns: int, plane: int) -> Tensor:
    """View (planes, rows, columns) of the planes at the start of `buffer`."""
    inside = buffer[: planes * plane].view(planes, plane)[:, : rows * columns]
    view: Tensor = inside.unflatten(1, (rows, columns))
    return view


def _pairs(tiles: Tensor, image: Tensor, blocks: tuple[int, int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of `tiles` and of `image` that hold the same pixels, up to four pairs that cover the image.

    Args:
        tiles: (m_h, m_w, n, tiles_h, tiles_w, channels).
        image: (n, h, w, channels), any strides; the last tiles may reach beyond it.
        blocks: (m_h, m_w).
    """
    runs = [_whole_and_rest(size, block) for size, block in zip(image.shape[1:3], blocks, strict=True)]
    for (i, count_i, rows), (j, count_j, columns) in itertools.product(*runs):
        part = tiles[:rows, :columns, :, i : i + count_i, j : j + count_j].permute(2, 3, 0, 4, 1, 5)
        top, left = i * blocks[0], j * blocks[1]
        pixels = image[:, top : top + count_i * rows, left : left + count_j * columns]
        yield part, pixels.unflatten(1, (count_i, rows)).unflatten(3, (count_j, columns))


def _whole_and_rest(size: int, block: int) -> list[tuple[int, int, int]]:
    """(first tile, number of tiles, pixels of each) of the whole tiles in `size`, then of the cut one."""
    whole, rest = divmod(size, block)
    runs = [(0, whole, block), (whole, 1, rest)]
    return [(first, count, pixels) for first, count, pixels in runs if count and pixels]


def _leave(image: Tensor, out: Tensor) -> None:
    """Copy an image (n, h, w, c) to `out` (n, c, h, w)."""
    n, h, w, c = image.shape
    if h * w < LARGE_IMAGE:
        out.copy_(image.permute(0, 3, 1, 2))
        return
    for source, target in zip(image.view(n, h * w, c), out.view(n, c, h * w), strict=True):
        target.copy_(source.t())
