"""The C source of depthwise convolution for one type: the files beside this one, put together."""

from pathlib import Path

from mucudnn.algorithms.compiled.source import transposition, with_fields

FIELDS = {
    "image": {
        "start": "elements",
        **dict.fromkeys(("step_n", "step_c", "step_d", "step_h", "step_w"), "number"),
        **dict.fromkeys(("depth", "height", "width"), "number"),
    },
    "tap": dict.fromkeys(("tap", "shift"), "number"),
    "phase": dict.fromkeys(("first", "taps"), "number"),
    "axis": {
        **dict.fromkeys(("outputs", "period", "step", "first", "taps"), "number"),
        "phase": "phases",
        "tap": "taps",
    },
    "call": {
        "filter": "elements",
        **dict.fromkeys(("filter_c", "filter_d", "filter_h", "filter_w", "is_dense"), "number"),
        "bias": "elements",
        **dict.fromkeys(
            ("bias_step", "adds", "channels", "blocks", "band", "bands", "strip", "strips"), "number"
        ),
        **dict.fromkeys(("pitch", "rows", "dilation_h", "dilation_w"), "number"),
    },
    "share": {
        **dict.fromkeys(("first", "last"), "number"),
        **dict.fromkeys(("u", "x", "y", "sums"), "reals"),
        **dict.fromkeys(("totals", "next_total"), "number"),
    },
}
"""What the loops are told, all of 64 bits, in order.

image: where its elements are: steps are elements from one sample, channel, slice, row, column to the next.

tap, phase, axis: as in `axes.py`. A phase has so many taps from its `first` one; `first` of an axis is its
least shift, and `taps` those of the filter.

call: of all threads. The filter or its gradient, with its steps from one channel and tap to the next, and
whether all taps of a channel follow upon one another; whether to add to what is there; channels, and vectors
of them; rows of a unit, and bands of a slice; columns of a unit, and strips of a band; columns and rows of a
slice in a stage; how far apart the filter's taps are.

share: of one thread. Units from `first` to `last`; places for the filter, for rows of x and y, and for the
sums of a gradient; how many threads have sums, and how far apart.
"""

ELEMENTS = ("float32", "float64", "bfloat16")
"""Types that are computed; the last one in float32."""

_IN_C = {
    "number": "int64_t",
    "elements": "element *",
    "reals": "real *",
    "phases": "const phase_t *",
    "taps": "const tap_t *",
}

_REALS = {"float32": ("float", "int32_t"), "float64": ("double", "int64_t"), "bfloat16": ("float", "int32_t")}

_HERE = Path(__file__).parent


def source_of(dtype: str, vector_bytes: int) -> str:
    """Return the source of a library.

    Args:
        dtype: of the operands, one of `ELEMENTS`.
        vector_bytes: of a register.
    """
    text = with_fields(_text("depthwise"), FIELDS, _IN_C)
    real, place = _REALS[dtype]
    lanes = vector_bytes // (8 if real == "double" else 4)
    text = text.replace("COPYING\n", _text("copying"), 1)
    text = text.replace("TRANSPOSITION\n", transposition(lanes), 1)
    text = text.replace("ELEMENTS\n", _text("halves" if dtype == "bfloat16" else "reals"), 1)
    for name, value in {"LANES_": lanes, "BYTES_": vector_bytes, "REAL_": real, "PLACE_": place}.items():
        text = text.replace(name, str(value))
    return text


def _text(name: str) -> str:
    return (_HERE / f"{name}.c").read_text(encoding="utf-8")
