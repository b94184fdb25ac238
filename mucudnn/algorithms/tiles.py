"""Convolution by tiles: which problems, in which sizes, with how much workspace.

An image is cut into overlapping tiles of t_h x t_w inputs, one for each m_h x m_w block of outputs. With the
forms (A, G, B) of both axes (`forms.py`), for every tile p, channel c and filter k:

    V = B_h x_{p,c} B_w'        U = G_h w_{k,c} G_w'        y_{p,k} = A_h [ sum over c of U * V ] A_w'

so that the middle step is one matrix product (P, C) x (C, K) for each of the rank_h · rank_w planes. dgrad
is the same with the filter turned round and the padding r - 1 - p. wgrad is the transpose:

    D = A_h' dy_{p,k} A_w       dw_{k,c} = G_h' [ sum over p of D * V ] G_w

whose sum over p runs over the parts of a division for free, in the transformed domain.
"""

import dataclasses
import math
from functools import cached_property

from torch import Tensor

from mucudnn.algorithms.base import Region, SliceKernel, SumKernel, total_bytes
from mucudnn.algorithms.forms import BilinearForm, cook_toom, fourier, identity
from mucudnn.algorithms.tile_kernels import (
    LARGE_IMAGE,
    TRANSPOSING_ELEMENTS,
    TileSliceKernel,
    TileSumKernel,
)
from mucudnn.problem import ConvOp, ConvProblem, Layout

_DTYPES = ("float32", "float64")


@dataclasses.dataclass(frozen=True)
class TileAlgorithm:
    """Convolution by tiles, with a form for each number of taps.

    Attributes:
        name: id without the backend's prefix.
        outputs: m of Winograd's forms; 0 for Fourier's.
        inputs: t of Fourier's forms; 0 for Winograd's.
        least_taps: taps that at least one axis of the filter must have.
        most_taps: taps that no axis of the filter may exceed.
    """

    name: str
    outputs: int = 0
    inputs: int = 0
    least_taps: int = 3
    most_taps: int = 3

    def refusal(self, problem: ConvProblem) -> str | None:
        """Return why the problem cannot be computed this way, or None if it can."""
        taps = problem.kernel_size
        if len(taps) != 2:
            return "tiles are two-dimensional"
        if problem.dtype not in _DTYPES:
            return f"{problem.dtype} would lose too many digits in tiles"
        if any(step != 1 for step in (*problem.stride, *problem.dilation)) or problem.groups != 1:
            return "tiles need stride 1, dilation 1 and one group"
        if not self.least_taps <= max(taps) <= self.most_taps:
            return f"{self.name} is for filters of {self.least_taps} to {self.most_taps} taps"
        if problem.op is ConvOp.DGRAD and any(p >= r for p, r in zip(problem.padding, taps, strict=True)):
            return "dgrad by tiles needs a padding smaller than the filter"
        if 0 in (*problem.output_size, *problem.input_size, problem.batch):
            return "there is nothing to compute"
        return None

    def workspace_bytes(self, problem: ConvProblem) -> int:
        """Return the bytes of buffer that a kernel for this micro-batch needs."""
        return total_bytes(TileGeometry(self, problem).regions)

    def slice_kernel(self, problem: ConvProblem, buffer: Tensor) -> SliceKernel:
        """Return a kernel for fprop or dgrad of this micro-batch that works in `buffer`."""
        return TileSliceKernel(TileGeometry(self, problem), buffer)

    def sum_kernel(self, problem: ConvProblem, buffer: Tensor) -> SumKernel:
        """Return a kernel for wgrad of this micro-batch that works in `buffer`."""
        return TileSumKernel(TileGeometry(self, problem), buffer)

    def form(self, taps: int) -> BilinearForm:
        """Return the form for an axis along which the filter has `taps` taps."""
        if taps == 1:
            return identity()
        return fourier(self.inputs, taps) if self.inputs else cook_toom(self.outputs, taps)


class TileGeometry:
    """The sizes of one problem in tiles.

    x is the image that is cut into overlapping tiles, y the one that is made of blocks. They are the
    problem's own but for dgrad, where x is its dy and y its dx.

    Attributes:
        problem: of the micro-batch.
        forms: of the two axes.
        x_size, y_size: pixels (h, w) of the two images.
        x_channels, y_channels: their channels.
        padding: zeros around x.
        tiles: number of tiles along the two axes.
        padded_size: pixels of x with its padding, up to the end of the last tile.
    """

    def __init__(self, algorithm: TileAlgorithm, problem: ConvProblem) -> None:
        self.problem = problem
        taps = problem.kernel_size
        self.forms = (algorithm.form(taps[0]), algorithm.form(taps[1]))
        self.x_size, self.y_size = problem.input_size, problem.output_size
        self.x_channels, self.y_channels = problem.in_channels, problem.out_channels
        self.padding = problem.padding
        if problem.op is ConvOp.DGRAD:
            self.x_size, self.y_size = self.y_size, self.x_size
            self.x_channels, self.y_channels = self.y_channels, self.x_channels
            self.padding = tuple(r - 1 - p for p, r in zip(problem.padding, taps, strict=True))
        self.tiles = tuple(
            -(-size // form.outputs) for size, form in zip(self.y_size, self.forms, strict=True)
        )
        self.padded_size = tuple(
            count * form.outputs + form.taps - 1 for count, form in zip(self.tiles, self.forms, strict=True)
        )

    @property
    def is_staged(self) -> bool:
        """Whether y passes through an image with channels innermost: scattered NCHW copies are slow."""
        return self.problem.layout is Layout.CONTIGUOUS

    @property
    def planes(self) -> int:
        """rank_h · rank_w: multiplications of a tile, and matrix products of the middle step."""
        return self.forms[0].rank * self.forms[1].rank

    @cached_property
    def total_tiles(self) -> int:
        """P: tiles of the whole micro-batch."""
        return self.problem.batch * self.tiles[0] * self.tiles[1]

    @cached_property
    def x_plane(self) -> int:
        """Elements from one plane of x to the next."""
        return _plane_length(self.total_tiles * self.x_channels)

    @cached_property
    def y_plane(self) -> int:
        """Elements from one plane of y to the next."""
        return _plane_length(self.total_tiles * self.y_channels)

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """The workspace: "filter" outlives a part and lies first, in the same place for every batch.

        Transforms go to and fro between "front" and "back"; wgrad keeps y apart in "y_front", because
        both images' planes meet in the product. "front" also holds the filter's taps while the filter is
        transformed. Nothing is put into "transposing": it declares what a copy takes by itself.
        """
        problem, dtype = self.problem, self.problem.dtype
        filter_size = problem.out_channels * problem.in_channels
        h, w = self.forms
        x_tiles, y_tiles = h.inputs * w.inputs * self.x_plane, h.outputs * w.outputs * self.y_plane
        x_products, y_products = self.planes * self.x_plane, self.planes * self.y_plane
        x_between = h.rank * w.inputs * self.x_plane
        if problem.op is ConvOp.WGRAD:
            front, y_front = max(x_tiles, x_products), max(y_tiles, y_products)
            back = max(x_between, h.rank * w.outputs * self.y_plane)
        else:
            front, y_front = max(x_tiles, x_products, h.outputs * w.rank * self.y_plane), 0
            back = max(x_between, y_products, y_tiles)
        front = max(front, problem.kernel_size[0] * problem.kernel_size[1] * filter_size)
        staged = (problem.batch, *self.y_size, self.y_channels) if self.is_staged else (0,)
        is_transposed_alone = (
            self.is_staged and problem.op is not ConvOp.WGRAD and math.prod(self.y_size) >= LARGE_IMAGE
        )
        return (
            Region("filter", (self.planes, problem.out_channels, problem.in_channels), dtype),
            Region("padded", (problem.batch, *self.padded_size, self.x_channels), dtype),
            Region("front", (front,), dtype),
            Region("back", (back,), dtype),
            Region("y_front", (y_front,), dtype),
            Region("staged", staged, dtype),
            Region("transposing", (TRANSPOSING_ELEMENTS if is_transposed_alone else 0,), dtype),
        )


def _plane_length(elements: int) -> int:
    """Round up to an odd multiple of 16 elements, one cache line of float32.

    Planes a multiple of 4 KiB apart would put the same place of all planes into one set of the first cache.
    """
    return 16 * (-(-elements // 16) | 1)
