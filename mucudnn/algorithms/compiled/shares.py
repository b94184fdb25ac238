"""Who computes what of a convolution by tiles in C, and where: lines and channels of each thread, workspace.

A line is a row of tiles of one image, or of a slice of tiles of a volume. Without groups of channels every
thread takes some lines and computes them block by block, with all channels; the filter's transform is common
to all, the sums of a gradient are each thread's own. With groups the threads transform all of x together
first; then each takes some channels of y, a group at a time, with their part of the filter.
"""

import math

from mucudnn.algorithms.base import Region
from mucudnn.algorithms.compiled.axes import axes_of
from mucudnn.algorithms.parts import part_of
from mucudnn.algorithms.sides import sides_of
from mucudnn.algorithms.tile_geometry import plane_length
from mucudnn.locks import cached_property
from mucudnn.problem import ConvOp, ConvProblem

MOST_LANES = 16
"""Channels that a vector has at most: for so many there is room where images are turned round."""


class Shares:
    """The shares of one micro-batch.

    Args:
        problem: of the micro-batch.
        outputs: m of Winograd's form.
        lines: of a block; 0 for all that a thread has.
        channels: of y in a group; 0 if there are no groups.
        workers: threads.

    Attributes:
        problem, workers: the same.
        axes: d, h and w.
        tiles: of an image (d, h, w).
        x_channels, y_channels: of x, which is cut into windows, and y; dgrad's x is dy, and its y is dx.
        total_lines: of all images.
        is_grouped: whether there are groups.
        group: channels of y that are computed at once.
        block: lines that are computed at once.
    """

    def __init__(self, problem: ConvProblem, outputs: int, lines: int, channels: int, workers: int) -> None:
        self.problem, self.workers = problem, workers
        self._x_size, self._y_size, self.x_channels, self.y_channels = sides_of(problem)
        self.axes = axes_of(problem, outputs)
        self.tiles = tuple(
            -(-size // axis.form.outputs) for size, axis in zip(self._y_size, self.axes, strict=True)
        )
        self.total_lines = problem.batch * self.tiles[0] * self.tiles[1]
        self.is_grouped = channels > 0
        self.group = min(channels or self.y_channels, self.y_channels)
        most = -(-self.total_lines // (1 if self.is_grouped else workers))
        self.block = min(lines or most, most)

    @cached_property
    def planes(self) -> int:
        """Multiplications of one tile, and planes of the filter, transformed."""
        return math.prod(axis.form.rank for axis in self.axes)

    @cached_property
    def x_planes(self) -> int:
        """Planes of x, transformed: with a stride, fewer than products."""
        return math.prod(axis.of_x.values for axis in self.axes)

    @cached_property
    def y_planes(self) -> int:
        """Planes from which y is transformed: with a stride, fewer than products."""
        return math.prod(axis.of_y.values for axis in self.axes)

    @property
    def multiplications(self) -> float:
        """For each value of y and channel of x, edges and all."""
        return self.planes * math.prod(self.tiles) / math.prod(self._y_size)

    @property
    def line_bytes(self) -> int:
        """Of a line of x and y, transformed."""
        values = self.x_planes * self.x_channels + self.y_planes * self.y_channels
        return self.tiles[2] * values * self.problem.itemsize

    @property
    def filter_bytes(self) -> int:
        """Of a whole filter, transformed."""
        return self.planes * self.x_channels * self.y_channels * self.problem.itemsize

    def lines_of(self, worker: int) -> tuple[int, int]:
        """Return a thread's first line, and the first that is no more its own; it may have none."""
        return part_of(self.total_lines, worker, self.workers)

    def channels_of(self, worker: int) -> tuple[int, int]:
        """Return a thread's first channel of y, and the first that is no more its own; it may have none.

        They are whole groups, or without groups whole vectors, but for the last.
        """
        step = self.group if self.is_grouped else MOST_LANES
        first, last = part_of(-(-self.y_channels // step), worker, self.workers)
        return min(first * step, self.y_channels), min(last * step, self.y_channels)

    @property
    def u_plane(self) -> int:
        """Elements from one plane of the filter to the next: (channels of x, channels of y at once)."""
        return plane_length(self.x_channels * self.group)

    @property
    def x_plane(self) -> int:
        """Elements from one plane of x to the next: (tiles of a block, channels)."""
        return plane_length(self.block * self.tiles[2] * self.x_channels)

    @property
    def y_plane(self) -> int:
        """Elements from one plane of y to the next: (tiles of a block, channels at once)."""
        return plane_length(self.block * self.tiles[2] * self.group)

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """The workspace: what outlives a part lies first, in the same place for every batch."""
        u = self.planes * self.u_plane
        x, y = self.x_planes * self.x_plane, self.y_planes * self.y_plane
        is_sum, own = self.problem.op is ConvOp.WGRAD, range(self.workers)
        of_filter = [(f"{'sums' if is_sum else 'u'}{each}", u) for each in own]
        sizes = [("found", self.workers)] if is_sum else []
        if self.is_grouped:
            sizes += [("x", x), *of_filter]
        else:
            sizes += [*(of_filter if is_sum else [("u", u)]), *((f"x{each}", x) for each in own)]
        sizes += [(f"y{each}", y) for each in own]
        sizes += [(f"stage{each}", self._stage) for each in own]
        return tuple(Region(name, (size,), self._dtype_of(name)) for name, size in sizes)

    def _dtype_of(self, region: str) -> str:
        return "float64" if region == "found" else self.problem.dtype

    @property
    def _stage(self) -> int:
        """Elements of a vector of channels in all rows that a line reads of x, or computes of y."""
        d, h = (axis.form for axis in self.axes[:2])
        return MOST_LANES * max(
            d.inputs * h.inputs * self._x_size[2], d.outputs * h.outputs * self._y_size[2]
        )
