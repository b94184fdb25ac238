"""The C source of one form's convolution: the files beside this one, put together.

What is the same for x, y and the filter, and for vectors of channels and single ones, stands once in a file
and is made for each by the preprocessor. The transforms are written out from the matrices of the form.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mucudnn.algorithms.compiled.axes import Axis, Transform
from mucudnn.algorithms.compiled.compiler import WIDE_BYTES
from mucudnn.algorithms.forms import Matrix
from mucudnn.algorithms.linear import product_in_c

FIELDS = {
    "image": {
        "start": "address",
        **dict.fromkeys(
            ("step_n", "step_c", "step_d", "step_h", "step_w", "depth", "height", "width", "channels"),
            "number",
        ),
    },
    "call": {
        "filter": "address",
        **dict.fromkeys(("filter_x", "filter_y", "filter_d", "filter_h", "filter_w"), "number"),
        "bias": "address",
        **dict.fromkeys(("bias_step", "adds"), "number"),
        **dict.fromkeys(("tiles_d", "tiles_h", "tiles_w", "margin_d", "margin_h", "margin_w"), "number"),
        "gemm": "function",
    },
    "share": {
        **dict.fromkeys(("first", "last", "lines", "channel", "last_channel", "group"), "number"),
        **dict.fromkeys(("u", "x", "y", "stage", "sums"), "address"),
        **dict.fromkeys(("u_plane", "x_plane", "y_plane", "sums_plane", "addends", "addend"), "number"),
    },
}
"""What the loops are told, all of 64 bits, in order.

image: where its elements are: steps are elements from one sample, channel, slice, row,
column to the next.

call: of all threads. The filter or its gradient, with its steps from one channel of x, of y, from one tap to
the next; whether to add to what is there; tiles of an image; pixels of the first window that lie before x;
BLAS's product of matrices, or nothing, where that of `products.c` takes its place.

share: of one thread. Lines of tiles from `first` to `last`, so many in a block, or with groups of channels
all that there are; channels of y from `channel` to `last_channel`, `group` at a time; places for the
transformed filter, x, y, for images that are turned round, and for the sums of a gradient, with the elements
from one plane to the next; how many threads have sums, and how far apart.
"""

_MOST_ROWS = 6
"""Of a product in registers."""

_MOST_TERMS = 256
"""That are summed at once, of planes, which are small."""

TYPES = {"float32": "float", "float64": "double"}

_IN_C = {"number": "int64_t", "address": "real *", "function": "gemm_t *"}

_HERE = Path(__file__).parent

_HEAD = """\
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define APART static __attribute__((noinline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define UNROLL _Pragma("GCC unroll 64")
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (places){{__VA_ARGS__}})
#endif

#define LANES {lanes}
typedef {real} real;
typedef real lanes __attribute__((vector_size({n_bytes})));
typedef real loose __attribute__((vector_size({n_bytes}), aligned(sizeof(real)), may_alias));
typedef {place} places __attribute__((vector_size({n_bytes})));

INLINE int64_t least(const int64_t a, const int64_t b) {{ return a < b ? a : b; }}

INLINE real load_real(const real *from, const int64_t step) {{ (void)step; return *from; }}

INLINE void store_real(real *to, const int64_t step, const real value) {{ (void)step; *to = value; }}

INLINE lanes load_lanes(const real *from, const int64_t step)
{{
    lanes value;
    if (step == 1) return *(const loose *)from;
    for (int i = 0; i < LANES; ++i) value[i] = from[i * step];
    return value;
}}

INLINE void store_lanes(real *to, const int64_t step, const lanes value)
{{
    if (step == 1)
        *(loose *)to = value;
    else
        for (int i = 0; i < LANES; ++i) to[i * step] = value[i];
}}
"""


def source_of(axes: Sequence[Axis], dtype: str, vector_bytes: int) -> str:
    """Return the source of a library for one form of each axis.

    Args:
        axes: d, h and w.
        dtype: of all values, float32 or float64.
        vector_bytes: of a register, or of as many as are used as one.
    """
    forms = [axis.form for axis in axes]
    sizes = {
        **_by_axis("OUTPUTS", [form.outputs for form in forms]),
        **_by_axis("TAPS", [form.taps for form in forms]),
        "PLANES": math.prod(form.rank for form in forms),
    }
    inputs = [axis.of_x.matrix for axis in axes]
    outputs = [axis.of_y.matrix for axis in axes]
    filters = [form.filter_transform for form in forms]
    parts = [
        head(dtype, vector_bytes),
        transposition(lanes_of(dtype, vector_bytes)),
        with_fields(_text("operands"), FIELDS, _IN_C),
        *_transforms("gather", "x", inputs),
        *_transforms("scatter", "y", outputs),
        *_transforms("gather", "w", filters),
        _lines("x", inputs, [axis.step for axis in axes]),
    ]
    parts.append(products(vector_bytes, _MOST_TERMS))
    loops = [_text("loops")]
    if has_sums(axes):
        turned = [each.T for each in outputs]
        parts += _transforms("gather", "y", turned)
        parts += _transforms("scatter", "w", [each.T for each in filters])
        parts += [_lines("y", turned, [form.outputs for form in forms])]
        loops += [_text("sums")]
    return "\n".join([*parts, _with("\n".join(loops), **sizes, PRODUCTS=_products(axes))])


def with_fields(text: str, structures: Mapping[str, Mapping[str, str]], types: Mapping[str, str]) -> str:
    """Return a source with the fields of its structures declared, as `structure` lays them out.

    Args:
        text: with FIELDS_OF_CALL and the like in their places.
        structures: the kind of each field, by structure and field.
        types: in C, by kind.
    """
    for structure, kinds in structures.items():
        fields = " ".join(f"{types[kind]} {field};" for field, kind in kinds.items())
        text = text.replace(f"FIELDS_OF_{structure.upper()}", fields)
    return text


def head(dtype: str, vector_bytes: int) -> str:
    """Return what all loops begin with: values, vectors of them, how these are read and written."""
    lanes = lanes_of(dtype, vector_bytes)
    place = f"int{8 * vector_bytes // lanes}_t"
    return _HEAD.format(lanes=lanes, real=TYPES[dtype], n_bytes=vector_bytes, place=place)


def lanes_of(dtype: str, vector_bytes: int) -> int:
    """Return how many values a register holds."""
    return vector_bytes // (4 if dtype == "float32" else 8)


def most_vectors(vector_bytes: int) -> int:
    """Return how many vectors of columns a product in registers has at most: 32 wide ones hold 24 sums."""
    return 4 if vector_bytes >= WIDE_BYTES else 2


def products(vector_bytes: int, most_terms: int, users: str = "") -> str:
    """Return products of matrices in registers, and what uses them.

    Args:
        vector_bytes: of a register.
        most_terms: that are summed at once.
        users: more of the source, with the same constants.
    """
    sums = {"MOST_ROWS": _MOST_ROWS, "MOST_VECTORS": most_vectors(vector_bytes), "MOST_TERMS": most_terms}
    return _with("\n".join([_text("products"), users]), **sums)


def has_sums(axes: Sequence[Axis]) -> bool:
    """Return whether the library of these axes computes the filter's gradient: that of dgrad does not."""
    return not any(axis.is_transposed for axis in axes)


def _text(name: str) -> str:
    return (_HERE / f"{name}.c").read_text(encoding="utf-8")


def _with(text: str, **macros: object) -> str:
    """Return `text` between definitions that hold for it alone."""
    defined = [f"#define {name} {value}" for name, value in macros.items()]
    names = [name.partition("(")[0] for name in macros]
    return "\n".join([*defined, text, *(f"#undef {name}" for name in names), ""])


def _products(axes: Sequence[Axis]) -> str:
    """Return the products of a tile, those that are summed next to each other: planes of u, x and y.

    The last number is whether a product adds to what is there.
    """
    planes = zip(_planes([each.of_x for each in axes]), _planes([each.of_y for each in axes]), strict=True)
    products = sorted((y, x, u) for u, (x, y) in enumerate(planes))
    adds = [at > 0 and y == products[at - 1][0] for at, (y, _, _) in enumerate(products)]
    rows = (f"{{{u}, {x}, {y}, {int(more)}}}" for (y, x, u), more in zip(products, adds, strict=True))
    return f"{{{', '.join(rows)}}}"


def _planes(transforms: Sequence[Transform]) -> list[int]:
    """Return the plane of each product of all axes together."""
    counts = [each.values for each in transforms]
    places = itertools.product(*(each.of_products for each in transforms))
    return [(d * counts[1] + h) * counts[2] + w for d, h, w in places]


def _by_axis(name: str, numbers: Sequence[int]) -> dict[str, int]:
    return {f"{name}_{axis}": number for axis, number in zip("DHW", numbers, strict=True)}


def _lines(image: str, matrices: Sequence[Matrix], steps: Sequence[int]) -> str:
    """Return what transforms lines of windows of an image, so many elements apart along each axis."""
    names = {"NAME(name)": f"name##_{image}", "NAME_OF(name, value)": f"name##_{image}_##value"}
    return _with(_text("lines"), **names, **_sizes(matrices), **_by_axis("STEP", steps))


def _sizes(matrices: Sequence[Matrix]) -> dict[str, int]:
    names = ("SLICES", "ROWS", "COLUMNS")
    results = {name: each.shape[0] for name, each in zip(names, matrices, strict=True)}
    return results | {f"{name}_IN": each.shape[1] for name, each in zip(names, matrices, strict=True)}


def _transforms(kind: str, image: str, matrices: Sequence[Matrix]) -> Iterator[str]:
    """Yield a transform for vectors and for single values, from an image to planes or back."""
    for value in ("lanes", "real"):
        names = {f"ALONG_{axis}": f"{kind}_{image}_{value}_along_{axis.lower()}" for axis in "DHW"}
        for name, matrix in zip(names.values(), matrices, strict=True):
            yield product_in_c(name, matrix, value)
        yield _with(
            _text(kind),
            **{"NAME(name)": f"name##_{image}_{value}"},
            VALUE=value, LOAD=f"load_{value}", STORE=f"store_{value}",
            WIDTH="(int)(sizeof(VALUE) / sizeof(real))", IS_FLAT="(SLICES == 1 && SLICES_IN == 1)",
            EACH="UNROLL" if value == "lanes" else "", IS_NEAR=int(image != "w"),
            **names, **_sizes(matrices),
        )  # fmt: skip


def transposition(lanes: int) -> str:
    """Return a function that transposes a square of values in registers, in log2(lanes) steps.

    In the step of width b, rows that differ in the bit b exchange blocks of b columns.
    """
    lines = ["INLINE void transpose(lanes *row)", "{", "    lanes low, high;"]
    width = 1
    while width < lanes:
        low = [i if not i & width else i - width + lanes for i in range(lanes)]
        high = [i + width if not i & width else i + lanes for i in range(lanes)]
        for i, j in itertools.product(range(0, lanes, 2 * width), range(width)):
            a, b = f"row[{i + j}]", f"row[{i + j + width}]"
            lines += [
                f"    low = SHUFFLE({a}, {b}, {', '.join(map(str, low))});",
                f"    high = SHUFFLE({a}, {b}, {', '.join(map(str, high))});",
                f"    {a} = low, {b} = high;",
            ]
        width *= 2
    return "\n".join([*lines, "}", ""])
