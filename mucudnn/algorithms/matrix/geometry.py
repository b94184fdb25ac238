"""Where a convolution by a matrix unit finds what it multiplies: sets of outputs, groups of taps, units.

x is what is read, y what is computed: for fprop the images of those names, for dgrad dy and dx; for wgrad x
and dy, which is read as well. Outputs form sets, each a grid whose points read x the same way: one, or in
dgrad one for each phase of the stride. Along the rows of x the taps of a group are neighbours, so that
their channels of a panel lie next to each other; along the other axes every tap is of a group of its own.
"""

import dataclasses
import itertools
import math
from typing import NamedTuple

from mucudnn.algorithms.sides import sides_of
from mucudnn.locks import cached_property
from mucudnn.problem import ConvOp, ConvProblem

SIDE = 32
"""Elements, outputs and channels of y that are multiplied at once: two tiles each."""


class Tap(NamedTuple):
    """A tap of one axis, as an output reads it.

    Attributes:
        number: of the filter.
        phase: of x, which the stride cuts.
        offset: rows of that phase from the output's own one.
    """

    number: int
    phase: int
    offset: int


class Outputs(NamedTuple):
    """The outputs of a set along one axis.

    Attributes:
        start: the first of them.
        step: from one to the next.
        length: how many.
        taps: what each reads.
    """

    start: int
    step: int
    length: int
    taps: tuple[Tap, ...]


class Run(NamedTuple):
    """Taps of a row that are neighbours in x.

    Attributes:
        first: of x, in columns from the output's own one.
        tap: that reads there.
        taps: how many.
    """

    first: int
    tap: int
    taps: int


class Group(NamedTuple):
    """Where the taps of a group lie.

    Attributes:
        shift: pixels from an output's own place in a unit to what it reads.
        tap: of the filter (d, h, w), the first of them.
    """

    shift: int
    tap: tuple[int, int, int]


class OutputSet(NamedTuple):
    """A grid of outputs that read x the same way.

    Attributes:
        axes: d, h and w.
        groups: of taps.
        taps: of each group.
    """

    axes: tuple[Outputs, Outputs, Outputs]
    groups: tuple[Group, ...]
    taps: int


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of a problem.

    Attributes:
        taps, stride, dilation, padding: of the convolution.
        size: of y.
        is_transposed: whether x is dy and y is dx.
    """

    taps: int
    stride: int
    dilation: int
    padding: int
    size: int
    is_transposed: bool

    @property
    def step(self) -> int:
        """Of x from one output to the next."""
        return 1 if self.is_transposed else self.stride

    @cached_property
    def outputs(self) -> tuple[Outputs, ...]:
        """All outputs, with what they read."""
        return tuple(self._phases()) if self.is_transposed else (self._whole(),)

    def _whole(self) -> Outputs:
        """y[t] reads x[s t + k d - p]."""
        reads = [k * self.dilation - self.padding for k in range(self.taps)]
        taps = tuple(Tap(k, at % self.stride, at // self.stride) for k, at in enumerate(reads))
        return Outputs(0, 1, self.size, taps)

    def _phases(self) -> list[Outputs]:
        """dx[s t + a - p] reads dy[t - (k d - a) / s] for every k where that is whole."""
        found = []
        for a in range(self.stride):
            first = -((a - self.padding) // self.stride)  # the least t whose output is not before the image
            start = self.stride * first + a - self.padding
            count = max(-((start - self.size) // self.stride), 0)
            taps = [k for k in range(self.taps) if (k * self.dilation - a) % self.stride == 0]
            reads = [first - (k * self.dilation - a) // self.stride for k in taps]
            found.append(Outputs(start, self.stride, count, tuple(map(Tap, taps, [0] * len(taps), reads))))
        return found

    @property
    def all_taps(self) -> tuple[Tap, ...]:
        """Of all outputs."""
        return tuple(tap for outputs in self.outputs for tap in outputs.taps)

    @property
    def phases(self) -> int:
        """Phases of x, up to the last one that is read."""
        return max((tap.phase for tap in self.all_taps), default=0) + 1

    @property
    def first(self) -> int:
        """The least offset."""
        return min((tap.offset for tap in self.all_taps), default=0)

    @property
    def span(self) -> int:
        """From the least offset to the largest."""
        return max((tap.offset for tap in self.all_taps), default=0) - self.first

    @property
    def count(self) -> int:
        """Outputs of the largest set."""
        return max(outputs.length for outputs in self.outputs)

    def columns_of(self, tap: Tap) -> int:
        """Return the column of x that a tap reads, from the output's own one."""
        return tap.offset * self.step + tap.phase

    def runs_of(self, outputs: Outputs) -> list[Run]:
        """Return the taps as neighbours, if all are, else one by one."""
        columns = sorted((self.columns_of(tap), tap.number) for tap in outputs.taps)
        if all(b[0] - a[0] == 1 for a, b in itertools.pairwise(columns)):
            return [Run(*columns[0], len(columns))] if columns else []
        return [Run(column, number, 1) for column, number in columns]

    @property
    def next_tap(self) -> int:
        """Taps from one to the next of a run."""
        return -(self.stride // math.gcd(self.stride, self.dilation)) if self.is_transposed else 1


def axes_of(problem: ConvProblem) -> tuple[Axis, Axis, Axis]:
    """Return d, h and w; the only axis of one dimension is h, of which images can be cut."""
    is_transposed = problem.op is ConvOp.DGRAD
    y_size = sides_of(problem).y_size[-len(problem.kernel_size) :]
    given = (problem.kernel_size, problem.stride, problem.dilation, problem.padding, y_size)
    by_axis = zip(*map(spread, given, (1, 1, 1, 0, 1)), strict=True)
    d, h, w = (
        Axis(taps, stride, dilation, padding, size, is_transposed)
        for taps, stride, dilation, padding, size in by_axis
    )
    return d, h, w


def spread(values: tuple[int, ...], missing: int) -> tuple[int, int, int]:
    """Return what there is of d, h and w: of one axis it is h."""
    if len(values) == 1:
        return missing, values[0], missing
    d, h, w = (*(missing,) * (3 - len(values)), *values)
    return d, h, w


class Geometry:
    """One problem's sets, and units of one size.

    Args:
        problem: of the micro-batch.
        slices: of y in a unit; 0 for all.
        rows: of y in a unit; 0 for all.

    Attributes:
        axes: d, h and w.
        x_channels, y_channels: of x and y.
        band_d, band_h: slices and rows of a unit.
        bands_d, bands_h: units of an image along both.
    """

    def __init__(self, problem: ConvProblem, slices: int, rows: int) -> None:
        self.problem = problem
        self.axes = axes_of(problem)
        sides = sides_of(problem)
        self.x_channels, self.y_channels = sides.x_channels, sides.y_channels
        depth, height, self._width = self.axes
        self.band_d = max(min(slices or depth.count, depth.count), 1)
        self.band_h = max(min(rows or height.count, height.count), 1)
        self.bands_d, self.bands_h = -(-depth.count // self.band_d), -(-height.count // self.band_h)

    @property
    def units(self) -> int:
        """Of the micro-batch."""
        return self.problem.batch * self.bands_d * self.bands_h

    @property
    def first_column(self) -> int:
        """Of x, where a unit's rows begin; negative for zeros before it."""
        return min((self._width.columns_of(tap) for tap in self._width.all_taps), default=0)

    @cached_property
    def pitch(self) -> int:
        """Outputs of a row of a unit, with those between rows."""
        columns = [self._width.columns_of(tap) for tap in self._width.all_taps]
        window = max(columns, default=0) - self.first_column + 1
        return self._width.count - 1 + -(-window // self._width.step)

    @property
    def panel(self) -> int:
        """Channels of x that lie next to each other: as many as are multiplied at once, or all."""
        return self.x_channels if self.x_channels % SIDE else SIDE

    @property
    def rows_d(self) -> int:
        """Slices of each phase of x in a unit."""
        return self.band_d + self.axes[0].span

    @property
    def rows_h(self) -> int:
        """Rows of each phase of x in a unit."""
        return self.band_h + self.axes[1].span

    @property
    def _row_pixels(self) -> int:
        return self.pitch * self._width.step

    @property
    def _slice_pixels(self) -> int:
        return self.axes[1].phases * self.rows_h * self._row_pixels

    @cached_property
    def sets(self) -> tuple[OutputSet, ...]:
        """All outputs; a set without taps is zero."""
        found = []
        for d, h, w in itertools.product(*(axis.outputs for axis in self.axes)):
            runs = self._width.runs_of(w)
            groups = tuple(
                Group(self._shift(of_d, of_h, run.first), (of_d.number, of_h.number, run.tap))
                for of_d, of_h, run in itertools.product(d.taps, h.taps, runs)
            )
            found.append(OutputSet((d, h, w), groups, runs[0].taps if groups else 0))
        return tuple(found)

    def _shift(self, d: Tap, h: Tap, column: int) -> int:
        depth, height, _ = self.axes
        slices = d.phase * self.rows_d + d.offset - depth.first
        rows = h.phase * self.rows_h + h.offset - height.first
        return slices * self._slice_pixels + rows * self._row_pixels + column - self.first_column

    @cached_property
    def panel_length(self) -> int:
        """Elements of a panel of a unit of x: its rows, and as far as tiles read beyond them."""
        rows = self.axes[0].phases * self.rows_d * self._slice_pixels
        outputs = -(-((self.band_h - 1) * self.pitch + self._width.count) // SIDE) * SIDE
        last = (self.band_d - 1) * self._slice_pixels + (outputs - 1) * self._width.step
        reach = max(
            ((last + group.shift) * self.panel + self.length(each) * self.panel // self.x_channels
             for each in self.sets for group in each.groups), default=0
        )  # fmt: skip
        return -(-max(rows * self.panel, reach) // SIDE) * SIDE

    @property
    def unit_length(self) -> int:
        """Elements of a unit of x."""
        return self.panel_length * (self.x_channels // self.panel)

    def length(self, of: OutputSet) -> int:
        """Return the elements that an output of a set reads in a group, rounded up to whole tiles."""
        return -(-of.taps * self.x_channels // SIDE) * SIDE

    @cached_property
    def turned(self) -> int:
        """Places of a row of dy, turned: an odd number of cache lines, so that rows fall apart in a cache."""
        lines = -(-(self.band_h * self.pitch + SIDE) // SIDE)
        return (lines + 1 - lines % 2) * SIDE

    def packed(self, of: OutputSet) -> int:
        """Return the elements of the filter of a set, packed, of one addend."""
        return self.padded_channels * len(of.groups) * self.length(of)

    @property
    def padded_channels(self) -> int:
        """Channels of y, rounded up to whole tiles."""
        return -(-self.y_channels // SIDE) * SIDE

    @property
    def multiplications(self) -> int:
        """Of one image, with all that is computed for nothing."""
        total = 0
        for each in self.sets:
            depth, height, width = (axis.length for axis in each.axes)
            rows = min(self.band_h, height)
            outputs = -(-((rows - 1) * self.pitch + width) // SIDE) * SIDE
            total += depth * -(-height // rows) * outputs * self.packed(each) if rows else 0
        return total

    @property
    def direct(self) -> int:
        """Multiplications of one image by the direct algorithm, without zeros around it."""
        return (
            sum(
                math.prod(axis.length for axis in each.axes) * len(each.groups) * each.taps
                for each in self.sets
            )
            * self.x_channels
            * self.y_channels
        )
