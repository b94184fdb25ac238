"""CUDA C of the transforms between images and planes, written out from the matrices of bilinear forms.

A gather reads windows of an image, one for each tile and channel, and writes left · window · right' to as
many planes as that has elements. A scatter reads such elements, one of each plane, and writes left · them ·
right' to the pixels of a tile. A filter is an image of its own, whose (k, c) are images and channels of one
tile. So these two are all that a convolution by tiles needs beside its matrix products: of x, dy and w into
planes, of the products into y, dx and dw (`mucudnn.algorithms.tile_geometry` has the equations).

A thread computes one window or tile of one channel, in registers. Neighbouring threads have neighbouring
tiles, or neighbouring channels, whichever lie next to each other in the image; in the planes they always do.
Fourier's windows are too large for that: there a thread computes one line of a window or tile, along w, and
a kernel of its own goes along h, from the lines to the planes or back.

A plane may hold its tiles in groups, one behind the other, of `tiles` tiles with all their channels. What is
scattered may be the sum of as many planes as `addends` says, which lie one behind the other. `padding` is how
far before the image the first tile begins: less than nothing, where a block of tile rows begins within it.

The source is C as well as CUDA C, but for what `CUDA` stands for.
"""

import dataclasses
from enum import StrEnum

import numpy as np

from mucudnn.algorithms.forms import Matrix
from mucudnn.algorithms.linear import product_in_c

REVISION = 3
"""Raised whenever kernels change in a way that makes their recorded times or errors worthless."""

THREADS = 128
"""Of a block. A thread takes 32 to 213 registers (NVRTC 13.0 for sm_90, nothing spilled), of 65536 in all."""

_MOST_VALUES = 64
"""Of a window or a tile that a thread holds: of 8x8 at most."""

INT_LIMIT = 2**31 - THREADS
"""Threads of a kernel up to which they are counted in 32 bits, whose divisions are quicker."""

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
    const count_t thread = NUMBER;
    if (thread >= (count_t)plane * {lines}) return;
    const count_t line = {lines} == 1 ? 0 : thread / (count_t)plane, number = thread - line * (count_t)plane;
    count_t tile, channel;
    if (has_channels_last) {{
        tile = number / (count_t)channels, channel = number % (count_t)channels;
    }} else {{
        const count_t rest = number / (count_t)tiles;
        tile = number % (count_t)tiles + rest / (count_t)channels * (count_t)tiles;
        channel = rest % (count_t)channels;
    }}
    const count_t row = tile / (count_t)tiles_w;
    const offset_t top = (offset_t)(row % (count_t)tiles_h) * {outputs_h} + (offset_t)line - padding_h;
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
    for (int i = 0; i < {rows} * {columns}; ++i)
        planes[((offset_t)line * {rows} * {columns} + i) * plane + number] = sums[i];
}}
"""

_SCATTER = """\
CUDA void scatter(const real *planes, const real *bias, real *image,
    const offset_t bias_step, const offset_t adds, const offset_t addends,
{arguments})
{{
{place}
    real window[{rows_in} * {columns_in}], middle[{rows} * {columns_in}], sums[{rows} * {columns}];
    const real *first = planes + (offset_t)line * {rows_in} * {columns_in} * addends * plane + number;
    #pragma unroll
    for (int i = 0; i < {rows_in} * {columns_in}; ++i) window[i] = first[i * addends * plane];
    for (offset_t other = 1; other < addends; ++other)
        #pragma unroll
        for (int i = 0; i < {rows_in} * {columns_in}; ++i) window[i] += first[(i * addends + other) * plane];
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


_MIX = """\
CUDA void mix(const real *from, real *to, const offset_t length)
{{
    const count_t number = NUMBER;
    if (number >= (count_t)length) return;
    real window[{rows_in}], sums[{rows}];
    #pragma unroll
    for (int i = 0; i < {rows_in}; ++i) window[i] = from[i * length + number];
    apply_left(window, 1, sums, 1);
    #pragma unroll
    for (int i = 0; i < {rows}; ++i) to[i * length + number] = sums[i];
}}
"""

MIX = "mix"
"""Name of the kernel that goes along h alone."""

_NOTHING = np.ones((1, 1))
"""The matrix along h of a thread that computes a single line."""


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

    @property
    def is_split(self) -> bool:
        """Whether there is a kernel for each axis."""
        (rows, rows_in), (columns, columns_in) = _shape(self.left), _shape(self.right)
        return max(rows, rows_in) > 1 and max(rows * columns, rows_in * columns_in) > _MOST_VALUES

    @property
    def lines(self) -> int:
        """Threads for a window or tile of the kernel that meets the image."""
        rows, rows_in = _shape(self.left)
        if not self.is_split:
            return 1
        return rows_in if self.kind is Kind.GATHER else rows

    @property
    def line_values(self) -> int:
        """Values of a line between the kernels of both axes."""
        columns, columns_in = _shape(self.right)
        return columns if self.kind is Kind.GATHER else columns_in

    @property
    def middle_values(self) -> int:
        """Values of all lines of a window or tile between the kernels of both axes; 0 if there is one."""
        return self.lines * self.line_values if self.is_split else 0

    def source(self, is_long: bool) -> str:
        """Return the source of the kernel that bears the name of its kind.

        Args:
            is_long: whether it has more than `INT_LIMIT` threads.
        """
        left = _NOTHING if self.is_split else self.left
        (rows, rows_in), (columns, columns_in) = _shape(left), _shape(self.right)
        sizes = {"rows": rows, "rows_in": rows_in, "columns": columns, "columns_in": columns_in}
        place = _PLACE.format(outputs_h=self.outputs[0], outputs_w=self.outputs[1], lines=self.lines)
        kernel = _GATHER if self.kind is Kind.GATHER else _SCATTER
        transform = _TRANSFORM.format(**sizes)
        return "\n".join(
            [
                self._head(is_long),
                product_in_c("apply_left", left),
                product_in_c("apply_right", self.right),
                kernel.format(arguments=_ARGUMENTS, place=place, transform=transform, **sizes),
            ]
        )

    def mix_source(self, is_long: bool) -> str:
        """Return the source of the kernel `MIX`, along h, of a transform whose axes are apart.

        Args:
            is_long: whether it has more than `INT_LIMIT` threads.
        """
        rows, rows_in = _shape(self.left)
        product = product_in_c("apply_left", self.left)
        return "\n".join([self._head(is_long), product, _MIX.format(rows=rows, rows_in=rows_in)])

    def _head(self, is_long: bool) -> str:
        return _HEAD.format(real=_TYPES[self.dtype], count="unsigned long long" if is_long else "unsigned")


def _shape(matrix: Matrix) -> tuple[int, int]:
    rows, columns = matrix.shape
    return int(rows), int(columns)
