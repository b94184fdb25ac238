"""The forms give the correlation, with as many multiplications as they claim."""

import itertools
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mucudnn.algorithms.forms import (
    POINTS,
    BilinearForm,
    cook_toom,
    fourier,
    identity,
    strided,
    transposed,
)

COOK_TOOM_SIZES = [
    (m, r) for m, r in itertools.product(range(1, 9), repeat=2) if 2 <= m + r - 1 <= len(POINTS) + 1
]
FOURIER_SIZES = [(2, 1), (2, 2), (4, 3), (16, 1), (16, 5), (16, 15), (16, 16), (32, 9), (32, 31)]

LARGEST_DENOMINATOR = 10**6
"""Of the entries of a Cook-Toom form: products of at most six differences of points, so far below it."""

FOURIER_TOLERANCE = 1e-13
"""Of values around 1: some 50 additions, each of which rounds by 1.1e-16, three transforms in a row."""


def exact(matrix: npt.NDArray[np.float64]) -> list[list[Fraction]]:
    """The fractions that were rounded to `matrix`; two with such small denominators are far further apart."""
    return [
        [Fraction(entry).limit_denominator(LARGEST_DENOMINATOR) for entry in row] for row in matrix.tolist()
    ]


def response(form: BilinearForm) -> npt.NDArray[np.float64]:
    """The coefficient of x_i w_k in y_j, shape (m, t, r)."""
    A, G, B = form.output_transform, form.filter_transform, form.input_transform
    return np.einsum("jp,pi,pk->jik", A, B, G)


def correlation(outputs: int, taps: int) -> npt.NDArray[np.float64]:
    """The same of the correlation itself: 1 where i = j + k, else 0."""
    places = np.indices((outputs, outputs + taps - 1, taps))
    return (places[1] == places[0] + places[2]).astype(float)


@pytest.mark.parametrize(("outputs", "taps"), COOK_TOOM_SIZES)
def test_a_cook_toom_form_is_the_correlation_exactly(outputs: int, taps: int) -> None:
    form = cook_toom(outputs, taps)
    A, G, B = (
        exact(matrix) for matrix in (form.output_transform, form.filter_transform, form.input_transform)
    )

    for j, i, k in itertools.product(range(outputs), range(form.inputs), range(taps)):
        coefficient = sum(A[j][p] * B[p][i] * G[p][k] for p in range(form.rank))
        assert coefficient == (i == j + k)


@pytest.mark.parametrize(("outputs", "taps"), COOK_TOOM_SIZES)
def test_a_cook_toom_form_has_the_least_rank(outputs: int, taps: int) -> None:
    form = cook_toom(outputs, taps)

    assert form.rank == outputs + taps - 1


@pytest.mark.parametrize(("outputs", "taps"), COOK_TOOM_SIZES)
def test_a_cook_toom_form_says_its_sizes(outputs: int, taps: int) -> None:
    form = cook_toom(outputs, taps)

    assert (form.outputs, form.taps, form.inputs) == (outputs, taps, outputs + taps - 1)


@pytest.mark.parametrize(("inputs", "taps"), FOURIER_SIZES)
def test_a_fourier_form_is_the_correlation(inputs: int, taps: int) -> None:
    form = fourier(inputs, taps)

    expected = correlation(inputs - taps + 1, taps)
    np.testing.assert_allclose(response(form), expected, rtol=0, atol=FOURIER_TOLERANCE)


@pytest.mark.parametrize(("inputs", "taps"), FOURIER_SIZES)
def test_a_fourier_form_takes_three_products_for_each_complex_one(inputs: int, taps: int) -> None:
    form = fourier(inputs, taps)

    real_frequencies, complex_pairs = 2, inputs // 2 - 1
    assert form.rank == real_frequencies + 3 * complex_pairs


@pytest.mark.parametrize(("inputs", "taps"), FOURIER_SIZES)
def test_a_fourier_form_says_its_sizes(inputs: int, taps: int) -> None:
    form = fourier(inputs, taps)

    assert (form.inputs, form.taps, form.outputs) == (inputs, taps, inputs - taps + 1)


@pytest.mark.parametrize(("inputs", "taps"), FOURIER_SIZES)
def test_a_fourier_form_has_small_entries_however_long_the_filter(inputs: int, taps: int) -> None:
    form = fourier(inputs, taps)

    for matrix in (form.output_transform, form.filter_transform, form.input_transform):
        assert np.abs(matrix).max() <= 2


STRIDED_SIZES = [
    (m, r, s) for m, r, s in itertools.product((1, 2, 4), range(1, 8), (1, 2, 3)) if -(-r // s) + m - 2 <= 7
]
"""Outputs, taps and stride."""


def entries(form: BilinearForm) -> Iterator[tuple[int, int, int, Fraction]]:
    """Every output, input and tap, and the coefficient of their product, exactly."""
    A, G, B = (
        exact(matrix) for matrix in (form.output_transform, form.filter_transform, form.input_transform)
    )
    for o, i, k in itertools.product(range(form.outputs), range(form.inputs), range(form.taps)):
        yield o, i, k, sum((A[o][p] * B[p][i] * G[p][k] for p in range(form.rank)), Fraction(0))


@pytest.mark.parametrize(("outputs", "taps", "stride"), STRIDED_SIZES)
def test_a_strided_form_is_the_strided_correlation_exactly(outputs: int, taps: int, stride: int) -> None:
    form = strided(outputs, taps, stride)

    assert (form.outputs, form.taps, form.inputs) == (outputs, taps, stride * (outputs - 1) + taps)
    assert all(value == (i == stride * o + k) for o, i, k, value in entries(form))


@pytest.mark.parametrize("padding", [0, 1, 2, 3])
@pytest.mark.parametrize(("outputs", "taps", "stride"), STRIDED_SIZES)
def test_a_transposed_form_is_the_transpose_of_a_strided_correlation_exactly(
    outputs: int, taps: int, stride: int, padding: int
) -> None:
    form, margin = transposed(outputs, taps, stride, padding)

    assert (form.outputs, form.taps) == (stride * outputs, taps)
    for u, i, turned, value in entries(form):
        assert value == (stride * (i - margin) + taps - 1 - turned == u + padding)


@pytest.mark.parametrize(
    ("taps", "stride", "rank"), [(3, 2, 9), (4, 2, 10), (5, 2, 11), (5, 3, 14), (2, 2, 8)]
)
def test_the_phases_of_a_stride_multiply_each_for_itself(taps: int, stride: int, rank: int) -> None:
    assert strided(4, taps, stride).rank == transposed(4, taps, stride, 1).form.rank == rank


def test_of_stride_1_both_are_the_cook_toom_form() -> None:
    for form in (strided(4, 3, 1), transposed(4, 3, 1, 0).form):
        np.testing.assert_array_equal(response(form), response(cook_toom(4, 3)))


@st.composite
def forms(draw: st.DrawFn) -> BilinearForm:
    if draw(st.booleans()):
        return cook_toom(*draw(st.sampled_from(COOK_TOOM_SIZES)))
    return fourier(*draw(st.sampled_from(FOURIER_SIZES)))


@given(form=forms(), data=st.data())
def test_a_form_computes_what_numpy_correlates(form: BilinearForm, data: st.DataObject) -> None:
    values = st.floats(-1, 1, width=32)
    x = data.draw(hnp.arrays(np.float64, form.inputs, elements=values))
    w = data.draw(hnp.arrays(np.float64, form.taps, elements=values))

    y = form.output_transform @ ((form.filter_transform @ w) * (form.input_transform @ x))

    np.testing.assert_allclose(y, np.correlate(x, w, "valid"), rtol=0, atol=1e-12)


def test_the_identity_multiplies_one_input_by_one_tap() -> None:
    form = identity()

    assert (form.outputs, form.taps, form.inputs, form.rank) == (1, 1, 1, 1)
    assert response(form).item() == 1


@pytest.mark.parametrize(("outputs", "taps"), [(1, 1), (5, 5), (2, 8)])
def test_a_cook_toom_form_needs_as_many_points_as_there_are(outputs: int, taps: int) -> None:
    with pytest.raises(ValueError, match=rf"m \+ r - 1 must be 2 to 8, but got m={outputs}, r={taps}\."):
        cook_toom(outputs, taps)


@pytest.mark.parametrize(("inputs", "taps"), [(15, 5), (4, 5), (0, 1)])
def test_a_fourier_form_needs_an_even_length_that_holds_the_filter(inputs: int, taps: int) -> None:
    with pytest.raises(ValueError, match=rf"t must be even and at least r, but got t={inputs}, r={taps}\."):
        fourier(inputs, taps)
