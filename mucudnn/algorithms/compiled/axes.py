"""One axis of a convolution by tiles in C: its form, and where the windows of its tiles lie."""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from mucudnn.algorithms.forms import BilinearForm, Matrix, Transposed, strided, transposed
from mucudnn.algorithms.sides import three
from mucudnn.locks import cached_property
from mucudnn.problem import ConvOp, ConvProblem


class Transform(NamedTuple):
    """What is computed of a window, or makes a tile, once for all products that share it.

    Attributes:
        matrix: (values, inputs of a window), or (outputs of a tile, values).
        of_products: which value each product of the form reads, or is added to.
    """

    matrix: Matrix
    of_products: tuple[int, ...]

    @property
    def values(self) -> int:
        """How many there are."""
        return max(self.of_products) + 1


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis along which one image, x, is cut into windows, and the other one, y, is made of tiles.

    Attributes:
        outputs: m of Winograd's form; 1 where every tap is of a phase of its own, as nothing is saved there.
        taps: r of the filter.
        stride: s of the convolution.
        padding: of the convolution.
        is_transposed: whether x is dy and y is dx.
    """

    outputs: int
    taps: int
    stride: int
    padding: int
    is_transposed: bool

    @cached_property
    def form(self) -> BilinearForm:
        """That of dgrad has s · m outputs, and takes the filter turned round."""
        if self.is_transposed:
            return self._transposed.form
        return strided(self.outputs, self.taps, self.stride)

    @cached_property
    def _transposed(self) -> Transposed:
        return transposed(self.outputs, self.taps, self.stride, self.padding)

    @cached_property
    def of_x(self) -> Transform:
        """B, of equal rows one: products of two phases may share them."""
        return _distinct(self.form.input_transform)

    @cached_property
    def of_y(self) -> Transform:
        """A, of equal columns one: products that share one are summed before they are transformed.

        So a tile of 2x2 outputs of 3x3 taps and stride 2, of 25 products, has 9 sums.
        """
        columns = _distinct(self.form.output_transform.T)
        return Transform(columns.matrix.T, columns.of_products)

    @property
    def step(self) -> int:
        """Inputs from the window of one tile to that of the next."""
        return self.outputs if self.is_transposed else self.outputs * self.stride

    @property
    def margin(self) -> int:
        """Inputs of the first window that lie before x."""
        return self._transposed.margin if self.is_transposed else self.padding


_axis = functools.cache(Axis)


def axes_of(problem: ConvProblem, outputs: int) -> tuple[Axis, ...]:
    """Return the axes d, h and w of a problem for Winograd's forms F(m, r), where m is `outputs`."""
    is_transposed = problem.op is ConvOp.DGRAD
    sizes = (three(problem.kernel_size, 1), three(problem.stride, 1), three(problem.padding, 0))
    return tuple(
        _axis(outputs if taps > stride else 1, taps, stride, padding, is_transposed)
        for taps, stride, padding in zip(*sizes, strict=True)
    )


def _distinct(rows: Matrix) -> Transform:
    """Return the rows, of equal ones the first, and the place of each."""
    places: dict[tuple[float, ...], int] = {}
    of_products = tuple(places.setdefault(tuple(row), len(places)) for row in rows.tolist())
    return Transform(np.array(list(places)), of_products)
