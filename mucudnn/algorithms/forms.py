"""Bilinear forms: one-dimensional correlation with few multiplications.

A form computes m outputs of a correlation with r taps, y_j = sum over i of x_{j+i} w_i, from t = m + r - 1
inputs as

    y = A [(G w) * (B x)]        A: (m, rank)    G: (rank, r)    B: (rank, t)

with an elementwise product. Forms of two axes nest: the Kronecker products of their matrices are a form
of the two-dimensional correlation with rank_h · rank_w multiplications for m_h · m_w outputs.

Sources: Winograd, "Arithmetic Complexity of Computations", 1980; Lavin and Gray, arXiv 1509.09308;
Blahut, "Fast Algorithms for Signal Processing", chapter 5 (Cook-Toom) and 2010.
"""

import dataclasses
from collections.abc import Sequence
from fractions import Fraction

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
