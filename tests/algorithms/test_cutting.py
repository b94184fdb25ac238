"""Bands of an image: every row of a result once, and all that it is made of."""

import dataclasses

import pytest

from mucudnn.algorithms.cutting import band_problems, bands_of
from mucudnn.problem import ConvProblem
from tests.operands import a_convolution


def along_h(size: int, taps: int, stride: int = 1, padding: int = 0, dilation: int = 1) -> ConvProblem:
    """A convolution whose first axis is the one that is cut."""
    return a_convolution(
        batch=5,
        input_size=(size, 6),
        kernel_size=(taps, 3),
        stride=(stride, 2),
        padding=(padding, 1),
        dilation=(dilation, 1),
    )


CASES = {
    "plain": along_h(17, 3, padding=1),
    "bands wholly in the padding": along_h(4, 2, padding=6),
    "rows that nothing reads": along_h(23, 2, stride=5),
    "strided and dilated": along_h(20, 3, stride=2, padding=2, dilation=2),
    "1-D": a_convolution(input_size=(19,), kernel_size=(5,), stride=(1,), padding=(2,), dilation=(1,)),
    "3-D": a_convolution(
        input_size=(11, 3, 4), kernel_size=(3, 1, 2), stride=(2, 1, 1), padding=(1, 0, 0), dilation=(1, 1, 1)
    ),
}


@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.parametrize("problem", CASES.values(), ids=CASES)
def test_bands_give_every_row_once_from_the_rows_that_the_convolution_reads(
    problem: ConvProblem, most: int
) -> None:
    size, taps, stride, padding, dilation = (
        each[0]
        for each in (
            *(problem.input_size, problem.kernel_size, problem.stride, problem.padding, problem.dilation),
        )
    )
    rows = []
    for band, before, x_rows, y_rows in bands_of(problem, most):
        assert band.output_size == (y_rows.stop - y_rows.start, *problem.output_size[1:])
        for y_row in range(y_rows.start, y_rows.stop):
            for tap in range(taps):
                reads = y_row * stride - padding + tap * dilation
                place = (y_row - y_rows.start) * stride + tap * dilation - before
                is_inside = 0 <= reads < size
                assert is_inside is (0 <= place < x_rows.stop - x_rows.start)
                assert not is_inside or x_rows.start + place == reads
        rows += range(y_rows.start, y_rows.stop)
    assert rows == list(range(problem.output_size[0]))


@pytest.mark.parametrize("problem", CASES.values(), ids=CASES)
def test_bands_are_equal_but_for_a_row_and_the_larger_one_is_the_first_that_is_told(
    problem: ConvProblem,
) -> None:
    told = band_problems(problem, 4)
    heights = [each.output_size[0] for each in told]

    assert set(told) == {band.problem for band in bands_of(problem, 4)}
    assert heights == sorted(heights, reverse=True)
    assert 4 >= heights[0] <= heights[-1] + 1
    assert {(each.batch, each.padding[0]) for each in told} == {(1, 0)}
    assert dataclasses.replace(told[0], batch=problem.batch).filter_shape == problem.filter_shape
