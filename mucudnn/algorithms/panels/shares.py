"""Who computes what of products by panels, and where: each thread's part, and the workspace."""

import math
from typing import NamedTuple

from mucudnn.algorithms.base import Region
from mucudnn.algorithms.compiled.source import most_vectors
from mucudnn.algorithms.parts import part_of
from mucudnn.algorithms.pointwise import has_rows
from mucudnn.locks import cached_property
from mucudnn.problem import ConvOp, ConvProblem

Span = tuple[int, int]
"""From the first to the one behind the last."""


class Share(NamedTuple):
    """A thread's part: of the units, and of the channels."""

    units: Span
    channels: Span


class Shares:
    """The shares of one micro-batch.

    Args:
        problem: of the micro-batch.
        vector_bytes: of a register.
        workers: threads.

    Attributes:
        problem, workers: the same.
        has_rows: whether all pixels are rows of one matrix.
        x_channels, y_channels: of what is read and what is written; in wgrad of x and dy.
        images, pixels: matrices, and the pixels of each: one of all where these are rows.
        width: columns of a panel.
    """

    def __init__(self, problem: ConvProblem, vector_bytes: int, workers: int) -> None:
        self.problem, self.workers = problem, workers
        pixels = math.prod(problem.input_size)
        self.has_rows = has_rows(problem)
        self.images, self.pixels = (1, problem.batch * pixels) if self.has_rows else (problem.batch, pixels)
        channels = problem.in_channels, problem.out_channels
        self.x_channels, self.y_channels = reversed(channels) if problem.op is ConvOp.DGRAD else channels
        self.width = most_vectors(vector_bytes) * vector_bytes // problem.itemsize

    @cached_property
    def all(self) -> tuple[Share, ...]:
        """Each thread's part."""
        panels_of_x, panels_of_y = (-(-each // self.width) for each in (self.x_channels, self.y_channels))
        if self.problem.op is not ConvOp.WGRAD:
            units = self.pixels if self.has_rows else -(-self.images * self.pixels // self.width)
            return tuple(map(Share, self._cut(units), self._cut(panels_of_y)))
        if panels_of_x % self.workers:  # they do not go round evenly, so each packs all of x
            return tuple(Share((0, panels_of_x), span) for span in self._cut(self.y_channels))
        return tuple(Share(span, (0, self.y_channels)) for span in self._cut(panels_of_x))

    def _cut(self, count: int) -> list[Span]:
        """Return a part of `count` for each thread, all about as large."""
        return [part_of(count, worker, self.workers) for worker in range(self.workers)]

    @property
    def regions(self) -> tuple[Region, ...]:
        """The workspace: the packed filter, where pixels are rows."""
        if self.problem.op is ConvOp.WGRAD or not self.has_rows:
            return ()
        columns = -(-self.y_channels // self.width) * self.width
        return (Region("u", (self.x_channels * columns,), self.problem.dtype),)
