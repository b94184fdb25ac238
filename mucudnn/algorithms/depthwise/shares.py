"""Who computes what of a depthwise convolution, and where: each thread's part, and the workspace."""

import math

from mucudnn.algorithms.base import Region
from mucudnn.algorithms.depthwise.axes import Axis, axes_of
from mucudnn.algorithms.parts import part_of
from mucudnn.locks import cached_property
from mucudnn.problem import ConvOp, ConvProblem

_STAGE_BYTES = 2**18
"""Of the rows that a thread has in its stages at once, about: a second-level cache holds more."""

_LEAST_STAGE_BYTES = 2**16

_STAGES_BYTES = 2**22
"""Of the stages of all threads, where these are many."""


class Shares:
    """The shares of one micro-batch, in units: a band of rows of an image's slice, of a vector of channels.

    Args:
        problem: of the micro-batch.
        vector_bytes: of a register.
        workers: threads.

    Attributes:
        problem, workers: the same.
        axes: d, h and w.
        lanes: channels that are computed at once.
        channels, blocks: of an image, and vectors that cover them.
        taps: of a channel's filter.
        strip, strips: columns of a unit, and strips of a band: one, but where a row is too much for a stage.
        band, bands: rows of a unit, and bands of a slice.
        pitch: inputs of a row in a stage.
    """

    def __init__(self, problem: ConvProblem, vector_bytes: int, workers: int) -> None:
        self.problem, self.workers = problem, workers
        self.axes = axes_of(problem)
        self._itemsize = max(problem.itemsize, 4)  # bfloat16 is computed in float32
        self.lanes = vector_bytes // self._itemsize
        self.channels = problem.out_channels
        self.blocks = -(-self.channels // self.lanes)
        self.taps = math.prod(problem.kernel_size)
        _, height, width = self.axes
        most_bytes = max(min(_STAGE_BYTES, _STAGES_BYTES // workers), _LEAST_STAGE_BYTES)
        one = min(height.period, height.outputs)
        self.strip = _cut(width, self._stage_bytes(one, width.outputs), most_bytes)
        self.strips = -(-width.outputs // self.strip)
        self.band = _cut(height, self._stage_bytes(height.outputs, self.strip), most_bytes)
        self.bands = -(-height.outputs // self.band)

    @property
    def units(self) -> int:
        """Of the micro-batch."""
        return self.problem.batch * self.axes[0].outputs * self.bands * self.strips * self.blocks

    @property
    def pitch(self) -> int:
        """Inputs that a unit has in its stage along w."""
        return self.axes[2].reach(self.strip)

    @property
    def rows(self) -> int:
        """Inputs that a unit has in its stage along h."""
        return self.axes[1].reach(self.band)

    @property
    def busy(self) -> int:
        """Threads that have a unit: the first ones."""
        return min(self.workers, self.units)

    def units_of(self, worker: int) -> tuple[int, int]:
        """Return a thread's first unit, and the first that is no more its own; it may have none."""
        return part_of(self.units, worker, self.busy) if worker < self.busy else (self.units, self.units)

    def _stage_bytes(self, band: int, strip: int) -> int:
        return self._vectors(self._read(band, strip) + band * strip)

    def _read(self, band: int, strip: int) -> int:
        """Return how many inputs outputs of so many rows and columns read, of all slices."""
        depth, height, width = self.axes
        return depth.most_taps * height.reach(band) * width.reach(strip)

    def _vectors(self, count: int) -> int:
        return count * self.lanes * self._itemsize

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """The workspace: what outlives a part lies first, in the same place for every batch."""
        own = range(self.workers)
        names = [f"sums{each}" for each in own] if self.problem.op is ConvOp.WGRAD else ["u"]
        sizes = [(name, self._vectors(self.blocks * self.taps)) for name in names]
        for each in range(self.busy):
            sizes.append((f"x{each}", self._vectors(self._read(self.band, self.strip))))
            sizes.append((f"y{each}", self._vectors(self.band * self.strip)))
        return tuple(Region(name, (size,), "uint8") for name, size in sizes)


def _cut(axis: Axis, whole_bytes: int, most_bytes: int) -> int:
    """Return how many outputs to compute at once, in whole periods, if all of them take so many bytes."""
    periods = -(-axis.outputs // axis.period)
    pieces = min(-(-whole_bytes // most_bytes), periods)
    return -(-periods // pieces) * axis.period
