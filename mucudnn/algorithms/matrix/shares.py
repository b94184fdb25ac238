"""Who computes what of a convolution by a matrix unit, and where: each thread's part, and the workspace."""

from mucudnn.algorithms.base import Region
from mucudnn.algorithms.matrix.geometry import SIDE, Geometry
from mucudnn.algorithms.parts import part_of
from mucudnn.locks import cached_property
from mucudnn.problem import ConvOp, ConvProblem

_HALF_BYTES = 2
"""Of a bfloat16."""

_MOST_SHARED_BYTES = 2**20
"""Of a packed filter that every thread reads whole; of a larger one each takes some channels."""


class Shares:
    """The shares of one micro-batch.

    Args:
        problem: of the micro-batch.
        addends: bfloat16 that make a number.
        slices, rows: of y in a unit; 0 for all.
        at_once: units that are computed at once.
        workers: threads.

    Attributes:
        problem, addends, at_once, workers: the same.
        geometry: of the units.
    """

    def __init__(
        self, problem: ConvProblem, addends: int, slices: int, rows: int, at_once: int, workers: int
    ) -> None:
        self.problem, self.addends, self.workers = problem, addends, workers
        self.geometry = Geometry(problem, slices, rows)
        self.at_once = at_once

    @cached_property
    def is_by_channels(self) -> bool:
        """Whether each thread computes some channels of y of all units; the same for every batch."""
        tiles = self.geometry.padded_channels // SIDE
        return self.workers > 1 and tiles >= self.workers and self.filter_bytes > _MOST_SHARED_BYTES

    @property
    def filter_bytes(self) -> int:
        """Of the packed filter, or of a thread's sums of its gradient."""
        values = sum(self.geometry.packed(each) for each in self.geometry.sets)
        return values * (4 if self.problem.op is ConvOp.WGRAD else self.addends * _HALF_BYTES)

    def units_of(self, worker: int) -> tuple[int, int]:
        """Return a thread's first unit, and the first that is no more its own; it may have none."""
        units = self.geometry.units
        return (0, units) if self.is_by_channels else part_of(units, worker, self.workers)

    def channels_of(self, worker: int) -> tuple[int, int]:
        """Return a thread's first channel of y, and the first that is no more its own, when it computes."""
        return self.part_of_channels(worker) if self.is_by_channels else (0, self.geometry.padded_channels)

    def part_of_channels(self, worker: int) -> tuple[int, int]:
        """Return the channels of the filter that a thread packs, or whose gradient it writes."""
        first, last = part_of(self.geometry.padded_channels // SIDE, worker, self.workers)
        return first * SIDE, last * SIDE

    @property
    def x_bytes(self) -> int:
        """Of what a thread holds of units at once: x, split; for a filter's gradient its pairs, and dy."""
        return sum(region.n_bytes for region in self._regions_of(0))

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """The workspace: what outlives a part lies first, in the same place for every batch."""
        own = range(self.workers)
        if self.problem.op is not ConvOp.WGRAD:
            sizes = [("found", 8 * self.workers), ("u", self.filter_bytes)]
        else:
            names = ["sums"] if self.is_by_channels else [f"sums{worker}" for worker in own]
            sizes = [(name, self.filter_bytes) for name in names]
        lasting = (Region(name, (size,), "uint8") for name, size in sizes)
        return (*lasting, *(region for worker in own for region in self._regions_of(worker)))

    def _regions_of(self, worker: int) -> tuple[Region, ...]:
        """Return where a thread puts its units."""
        unit = self.geometry.unit_length * self.addends * _HALF_BYTES
        sizes = {"x": self.at_once * unit}
        if self.problem.op is ConvOp.WGRAD:
            first, last = self.channels_of(worker)
            rows = self.geometry.band_d * (last - first) * self.addends
            sizes = {
                "x": unit,
                "pairs": 2 * self.at_once * unit,
                "turned": self.at_once * rows * self.geometry.turned * _HALF_BYTES,
            }
        return tuple(Region(f"{name}{worker}", (size,), "uint8") for name, size in sizes.items())
