"""CUDA C of the transforms between images and planes, written out from the matrices of bilinear forms.

A gather reads windows of an image, one for each tile and channel, and writes left · window · right' to as
many planes as that has elements. A scatter reads such elements, one of each plane, and writes left · them ·
right' to the pixels of a tile. A filter is an image of its own, whose (k, c) are images and channels of one
tile. So these two are all that Winograd's convolution needs beside its matrix products: of x, dy and w into
planes, of the products into y, dx and dw (`mucudnn.algorithms.tile_geometry` has the equations).

A thread computes one window or tile of one channel, in registers. Neighbouring threads have neighbouring
tiles, or neighbouring channels, whichever lie next to each other in the image; in the planes they always do.

The source is C as well as CUDA C, but for what `CUDA` stands for.
"""

import dataclasses
from enum import StrEnum

from mucudnn.algorithms.forms import Matrix

REVISION = 1
"""Raised whenever kernels change in a way that makes their recorded times or errors worthless."""

THREADS = 128
"""Of a block. A thread takes 32 to 166 registers (NVRTC 13.0 for sm_90, nothing spilled), of 65536 in all."""

INT_LIMIT = 2**31 - THREADS
"""Elements of a plane up to which they are counted in 32 bits, whose divisions are quicker."""

_TYPES = {"float32": "float", "float64": "double"}

_HEAD = """\
#ifdef __CUDACC__
#define CUDA extern "C" __global__
#define INLINE static __device__ __forceinline__
#define NUMBER ((count_t)blockIdx.x * blockDim.x + threadIdx.x)
#endif

typedef {real} real;
typedef {count} count_t;
typedef long long offset_t;
"""

_ARGUMENTS = """\
    const offset_t plane, const offset_t tiles, const offset_t channels, const offset_t has_channels_last,
    const offset_t tiles_h, const offset_t tiles_w, const offset_t height, const offset_t width,
    const offset_t step_n, const offset_t step_c, const offset_t step_h, const offset_t step_w,
    const offset_t padding_h, const offset_t padding_w"""

_PLACE = """\
    const count_t number = NUMBER;
    if (number >= (count_t)plane) return;
    const count_t tile = has_channels_last ? number / (count_t)channels : number % (count_t)tiles;
    const count_t channel = has_channels_last ? number % (count_t)channels : number / (count_t)tiles;
    const count_t row = tile / (count_t)tiles_w;
    const offset_t top = (offset_t)(row % (count_t)tiles_h) * {outputs_h} - padding_h;
    const offset_t left = (offset_t)(tile % (count_t)tiles_w) * {outputs_w} - padding_w;
    const offset_t start = (offset_t)(row / (count_t)tiles_h) * step_n + (offset_t)channel * step_c;"""

_GATHER = """\
CUDA void gather(const real *image, real *planes,
{arguments})
{{
{place}
    real window[{rows_in} * {columns_in}], middle[{rows} * {columns_in}], sums[{rows} * {columns}];
    #pragma unroll
    for (int i = 0; i < {rows_in}; ++i)
        #pragma unroll
        for (int j = 0; j < {columns_in}; ++j) {{
            const offset_t h = top + i, w = left + j;
            const int is_inside = 0 <= h && h < height && 0 <= w && w < width;
            window[i * {columns_in} + j] = is_inside ? image[start + h * step_h + w * step_w] : (real)0;
        }}
{transform}
    #pragma unroll
    for (int i = 0; i < {rows} * {columns}; ++i) planes[i * plane + number] = sums[i];
}}
"""

_SCATTER = """\
CUDA void scatter(const real *planes, const real *bias, real *image,
    const offset_t bias_step, const offset_t adds,
{arguments})
{{
{place}
    real window[{rows_in} * {columns_in}], middle[{rows} * {columns_in}], sums[{rows} * {columns}];
    #pragma unroll
    for (int i = 0; i < {rows_in} * {columns_in}; ++i) window[i] = planes[i * plane + number];
{transform}
    const real shift = bias ? bias[(offset_t)channel * bias_step] : (real)0;
    #pragma unroll
    for (int i = 0; i < {rows}; ++i)
        #pragma unroll
        for (int j = 0; j < {columns}; ++j) {{
            const offset_t h = top + i, w = left + j;
            if (0 <= h && h < height && 0 <= w && w < width) {{
                real *pixel = image + start + h * step_h + w * step_w;
                *pixel = sums[i * {columns} + j] + shift + (adds ? *pixel : (real)0);
            }}
        }}
}}
"""

_TRANSFORM = """\
    #pragma unroll
    for (int j = 0; j < {columns_in}; ++j) apply_left(window + j, {columns_in}, middle + j, {columns_in});
    #pragma unroll
    for (int i = 0; i < {rows}; ++i)
        apply_right(middle + i * {columns_in}, 1, sums + i * {columns}, 1);"""


class Kind(StrEnum):
    """What a transform reads and writes; also the name of its kernel."""

    GATHER = "gather"
    SCATTER = "scatter"


@dataclasses.dataclass(frozen=True, eq=False)
class Transform:
    """One transform, for images of any size.

    Attributes:
        kind: from an image to planes, or back.
        left: (rows, rows_in), applied along h.
        right: (columns, columns_in), applied along w.
        outputs: pixels (h, w) from one tile to the next.
        dtype: of all values, float32 or float64.
    """

    kind: Kind
    left: Matrix
    right: Matrix
    outputs: tuple[int, int]
    dtype: str

    def source(self, is_long: bool) -> str:
        """Return the source of the kernel that bears the name of its kind.

        Args:
            is_long: whether planes have more than `INT_LIMIT` elements.
        """
        (rows, rows_in), (columns, columns_in) = self.left.shape, self.right.shape
        sizes = {"rows": rows, "rows_in": rows_in, "columns": columns, "columns_in": columns_in}
        place = _PLACE.format(outputs_h=self.outputs[0], outputs_w=self.outputs[1])
        kernel = _GATHER if self.kind is Kind.GATHER else _SCATTER
        return "\n".join(
            [
                _HEAD.format(real=_TYPES[self.dtype], count="unsigned long long" if is_long else "unsigned"),
                _product("apply_left", self.left),
                _product("apply_right", self.right),
                kernel.format(
                    arguments=_ARGUMENTS, place=place, transform=_TRANSFORM.format(**sizes), **sizes
                ),
            ]
        )


def _product(name: str, matrix: Matrix) -> str:
    """Return a function that writes matrix · x to y, whose elements lie some steps apart."""
    rows = [f"    y[{i} * y_step] = {_sum(row)};" for i, row in enumerate(matrix.tolist())]
    head = f"INLINE void {name}(const real *x, const int x_step, real *y, const int y_step)"
    return "\n".join([head, "{", *rows, "}", ""])


def _sum(row: list[float]) -> str:
    """Return sum of row[j] · x_j, without the products that are 0 or x_j itself."""
    terms = []
    for j, factor in enumerate(row):
        x = f"x[{j} * x_step]"
        if factor:
            sign = "-" if factor < 0 else "+"
            terms.append(f"{sign} {x}" if abs(factor) == 1 else f"{sign} (real){abs(factor)!r} * {x}")
    return " ".join(terms) or "0"
