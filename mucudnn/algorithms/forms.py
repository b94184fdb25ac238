"""Bilinear forms: one-dimensional correlation with few multiplications.

A form computes m outputs of a correlation with r taps, y_j = sum over i of x_{j+i} w_i, from t = m + r - 1
inputs as

    y = A [(G w) * (B x)]        A: (m, rank)    G: (rank, r)    B: (rank, t)

with an elementwise product. Forms of two axes nest: the Kronecker products of their matrices are a form
of the two-dimensional correlation with rank_h · rank_w multiplications for m_h · m_w outputs.

A correlation of stride s is the sum of s correlations of stride 1, one of each phase q: of every s-th input
with the taps q, q + s, ... (its polyphase decomposition). Its transpose in x and y, the gradient of the
input, is as many correlations, each of which writes every s-th output. Both are forms again.

Sources: Winograd, "Arithmetic Complexity of Computations", 1980; Lavin and Gray, arXiv 1509.09308;
Blahut, "Fast Algorithms for Signal Processing", chapter 5 (Cook-Toom) and 2010.
"""

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]

POINTS = (
    Fraction(0),
    Fraction(1),
    Fraction(-1),
    Fraction(1, 2),
    Fraction(-2),
    Fraction(2),
    Fraction(-1, 2),
)
"""Interpolation points in the order in which they are taken; infinity is always the last one.

Of six in all, 0, 1, -1, 1/2, -2 and infinity lose fewer digits than the textbook's 0, ±1, ±2 and infinity.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class BilinearForm:
    """The three matrices of a form.

    Attributes:
        output_transform: A, shape (m, rank).
        filter_transform: G, shape (rank, r).
        input_transform: B, shape (rank, t).
    """

    output_transform: Matrix
    filter_transform: Matrix
    input_transform: Matrix

    @property
    def outputs(self) -> int:
        """m: outputs of one tile."""
        return int(self.output_transform.shape[0])

    @property
    def taps(self) -> int:
        """r: taps of the filter."""
        return int(self.filter_transform.shape[1])

    @property
    def inputs(self) -> int:
        """t = m + r - 1: inputs of one tile."""
        return int(self.input_transform.shape[1])

    @property
    def rank(self) -> int:
        """Multiplications of one tile."""
        return int(self.input_transform.shape[0])


def identity() -> BilinearForm:
    """Return the form of one output and one tap: an axis along which the filter does not reach."""
    one = np.ones((1, 1))
    return BilinearForm(one, one, one)


def cook_toom(outputs: int, taps: int) -> BilinearForm:
    """Return F(m, r), of rank m + r - 1: the least that a real form can have.

    The product of polynomials is evaluated at points p_0 … p_{t-2} and infinity, and interpolated; the
    transpose of that algorithm is the correlation. With N_i = prod over j ≠ i of (z - p_j) and
    f_i = N_i(p_i): A_{ji} = p_i^j, G_{ij} = p_i^j / f_i, and row i of B holds the coefficients of N_i. At
    infinity only the highest coefficients remain.

    Raises:
        ValueError: the form needs more points than there are.
    """
    finite = outputs + taps - 2
    if not 1 <= finite <= len(POINTS):
        raise ValueError(f"m + r - 1 must be 2 to {len(POINTS) + 1}, but got m={outputs}, r={taps}.")
    points = POINTS[:finite]
    numerators = [_product_of_roots(points[:i] + points[i + 1 :]) for i in range(finite)]
    scales = [_value(numerator, point) for numerator, point in zip(numerators, points, strict=True)]
    input_rows = [[*numerator, Fraction(0)] for numerator in numerators] + [_product_of_roots(points)]
    filter_rows = [
        [point**j / scale for j in range(taps)] for point, scale in zip(points, scales, strict=True)
    ]
    output_rows = [[point**j for point in points] + [Fraction(j == outputs - 1)] for j in range(outputs)]
    return BilinearForm(
        _matrix(output_rows),
        _matrix([*filter_rows, [Fraction(j == taps - 1) for j in range(taps)]]),
        _matrix(input_rows),
    )


def strided(outputs: int, taps: int, stride: int) -> BilinearForm:
    """Return the form of y_j = sum over i of x_{sj+i} w_i for m outputs, from t = s (m - 1) + r inputs.

    Its rank is the sum of those of F(m, r_q), where r_q taps are of phase q: 2m + 1 for three taps and stride
    2, which take 3m multiplications directly.

    Raises:
        ValueError: the form of a phase needs more points than there are.
    """
    phases = _phases(outputs, taps, stride)
    places = [_Place(slice(None), slice(q, None, stride), slice(q, None, stride)) for q in range(len(phases))]
    return _assembled(phases, places, (outputs, taps, stride * (outputs - 1) + taps))


class Transposed(NamedTuple):
    """The form of a strided correlation's transpose, of s · m outputs.

    Attributes:
        form: that takes the filter turned round, as w_{r-1-i}.
        margin: inputs of the first tile's window that lie before y_0.
    """

    form: BilinearForm
    margin: int


def transposed(outputs: int, taps: int, stride: int, padding: int) -> Transposed:
    """Return the form of x_u, the sum of y_j w_i over sj + i = u + p, for u from 0 to s · m - 1.

    It is the transpose of y_j = sum over i of x_{sj+i-p} w_i. The x_u of which u + p is of phase q are a
    correlation of y with the taps of that phase, turned round; one window of y serves all phases.

    Args:
        outputs: m, of each phase.
        taps: r.
        stride: s.
        padding: p.

    Raises:
        ValueError: the form of a phase needs more points than there are.
    """
    phases = _phases(outputs, taps, stride)
    before, offset = divmod(padding, stride)
    # The j whose tap q reaches the first output of its phase, and the first j that does with any tap.
    firsts = [int(q < offset) for q in range(len(phases))]
    starts = [first - phase.taps + 1 for first, phase in zip(firsts, phases, strict=True)]
    lead = -min(starts)
    inputs = lead + max(start + phase.inputs for start, phase in zip(starts, phases, strict=True))
    places = [
        _Place(
            slice(stride * first + q - offset, None, stride),
            slice((taps - 1 - q) % stride, None, stride),
            slice(lead + start, lead + start + phase.inputs),
        )
        for q, (phase, first, start) in enumerate(zip(phases, firsts, starts, strict=True))
    ]
    return Transposed(_assembled(phases, places, (stride * outputs, taps, inputs)), lead - before)


class _Place(NamedTuple):
    """Which outputs, taps and inputs of a form a phase has."""

    outputs: slice
    taps: slice
    inputs: slice


def _assembled(
    phases: Sequence[BilinearForm], places: Sequence[_Place], sizes: tuple[int, int, int]
) -> BilinearForm:
    """Return the form of so many outputs, taps and inputs that has the products of all phases."""
    outputs, taps, inputs = sizes
    rank = sum(phase.rank for phase in phases)
    A, G, B = np.zeros((outputs, rank)), np.zeros((rank, taps)), np.zeros((rank, inputs))
    row = 0
    for phase, place in zip(phases, places, strict=True):
        here = slice(row, row + phase.rank)
        A[place.outputs, here] = phase.output_transform
        G[here, place.taps] = phase.filter_transform
        B[here, place.inputs] = phase.input_transform
        row += phase.rank
    return BilinearForm(A, G, B)


def _phases(outputs: int, taps: int, stride: int) -> list[BilinearForm]:
    """Return the form of each phase that has taps."""
    return [_of_taps(outputs, -(-(taps - q) // stride)) for q in range(min(stride, taps))]


def _of_taps(outputs: int, taps: int) -> BilinearForm:
    """Return F(m, r), also of one tap."""
    if taps > 1:
        return cook_toom(outputs, taps)
    return BilinearForm(np.eye(outputs), np.ones((outputs, 1)), np.eye(outputs))


def fourier(inputs: int, taps: int) -> BilinearForm:
    """Return the form that multiplies discrete Fourier transforms of length t = `inputs`, of rank 3t/2 - 1.

    A circular correlation of length t holds m = t - r + 1 outputs of the linear one. Frequencies 0 and
    t/2 are real; every other pair f, t - f is one complex product (a + ib)(c - id), computed with three
    real ones from a, b, a + b: Re = ac + bd, Im = (a + b)(c - d) - ac + bd. All matrices have entries of
    at most 2 in magnitude, so no digits are lost however long the filter.

    Raises:
        ValueError: t is odd, or shorter than the filter.
    """
    if inputs % 2 or inputs < max(taps, 2):
        raise ValueError(f"t must be even and at least r, but got t={inputs}, r={taps}.")
    place = np.arange(inputs)
    angles = 2 * np.pi * (np.outer(np.arange(1, inputs // 2), place) % inputs) / inputs
    real, imaginary = np.cos(angles), -np.sin(angles)
    alternating = np.where(place % 2, -1.0, 1.0)
    ends = np.stack([np.ones(inputs), alternating])
    outputs = inputs - taps + 1
    back_real, back_imaginary = 2 * np.cos(angles.T[:outputs]), -2 * np.sin(angles.T[:outputs])
    return BilinearForm(
        np.concatenate(
            [ends.T[:outputs], back_real - back_imaginary, back_real + back_imaginary, back_imaginary], axis=1
        )
        / inputs,
        np.concatenate([ends, real, imaginary, real - imaginary])[:, :taps],
        np.concatenate([ends, real, imaginary, real + imaginary]),
    )


def _product_of_roots(roots: Sequence[Fraction]) -> list[Fraction]:
    """Coefficients of prod (z - root), lowest first."""
    coefficients = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *coefficients]
        scaled = [root * coefficient for coefficient in coefficients] + [Fraction(0)]
        coefficients = [high - low for high, low in zip(shifted, scaled, strict=True)]
    return coefficients


def _value(coefficients: Sequence[Fraction], point: Fraction) -> Fraction:
    return sum((c * point**power for power, c in enumerate(coefficients)), Fraction(0))


def _matrix(rows: Sequence[Sequence[Fraction]]) -> Matrix:
    return np.array([[float(entry) for entry in row] for row in rows])
