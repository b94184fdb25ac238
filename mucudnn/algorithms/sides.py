"""The two images of a convolution by tiles: one is cut into windows, the other one is made of tiles."""

from collections.abc import Sequence
from typing import NamedTuple

from mucudnn.problem import ConvOp, ConvProblem


class Sides(NamedTuple):
    """The two images of a problem: x, which is cut into windows, and y, which is made of tiles.

    Attributes:
        x_size, y_size: pixels (d, h, w).
        x_channels, y_channels: channels.
    """

    x_size: tuple[int, ...]
    y_size: tuple[int, ...]
    x_channels: int
    y_channels: int


def sides_of(problem: ConvProblem) -> Sides:
    """Return x and y, which are the problem's own but for dgrad, where x is its dy and y its dx."""
    x_size, y_size = three(problem.input_size, 1), three(problem.output_size, 1)
    if problem.op is ConvOp.DGRAD:
        return Sides(y_size, x_size, problem.out_channels, problem.in_channels)
    return Sides(x_size, y_size, problem.in_channels, problem.out_channels)


def three(sizes: Sequence[int], missing: int) -> tuple[int, ...]:
    """Return sizes, or whatever there is, of d, h and w, of which the first may be missing."""
    return (*(missing,) * (3 - len(sizes)), *sizes)
