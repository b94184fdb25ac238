"""Bands of an image: some rows of a result, and the rows of the image that they are made of.

In three dimensions the bands are of slices, in one of pixels: they are cut along the first axis.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from mucudnn.algorithms.parts import part_of
from mucudnn.problem import ConvProblem


class Band(NamedTuple):
    """Rows of y that are computed at once.

    Attributes:
        problem: their convolution, of one image, which is not padded along the first axis.
        before: rows of zeros of its x that lie above the image.
        x_rows: of the image, which follow upon them; what is missing then are zeros again.
        y_rows: of the result, which it gives.
    """

    problem: ConvProblem
    before: int
    x_rows: slice
    y_rows: slice


def bands_of(problem: ConvProblem, most: int) -> Iterator[Band]:
    """Yield the bands of an image, one below the other: the fewest of `most` rows of y, and equal ones."""
    size = problem.input_size[0]
    y_row = 0
    for rows in _rows_of_bands(problem, most):
        band = _band_problem(problem, rows)
        first = y_row * problem.stride[0] - problem.padding[0]
        start, stop = (min(max(row, 0), size) for row in (first, first + band.input_size[0]))
        before = min(max(-first, 0), band.input_size[0])
        yield Band(band, before, slice(start, stop), slice(y_row, y_row + rows))
        y_row += rows


def band_problems(problem: ConvProblem, most: int) -> tuple[ConvProblem, ...]:
    """Return the convolutions of the bands: of one size or two, the larger first."""
    sizes = sorted(set(_rows_of_bands(problem, most)), reverse=True)
    return tuple(_band_problem(problem, rows) for rows in sizes)


def _rows_of_bands(problem: ConvProblem, most: int) -> list[int]:
    total = problem.output_size[0]
    count = -(-total // most)
    return [end - start for start, end in (part_of(total, each, count) for each in range(count))]


def _band_problem(problem: ConvProblem, rows: int) -> ConvProblem:
    """Return the convolution that gives so many rows of y of one image."""
    reach = (problem.kernel_size[0] - 1) * problem.dilation[0] + 1
    size = ((rows - 1) * problem.stride[0] + reach, *problem.input_size[1:])
    return dataclasses.replace(
        problem, batch=1, input_size=size, padding=(0, *problem.padding[1:]), is_apart=False
    )
