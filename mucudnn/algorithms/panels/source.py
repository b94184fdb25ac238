"""The C source of products by panels for one type: `panels.c`, and those of products in registers."""

from pathlib import Path

from mucudnn.algorithms.compiled.source import head, lanes_of, products, transposition, with_fields

FIELDS = {
    "image": {"start": "elements", **dict.fromkeys(("step_n", "step_c", "step_p"), "number")},
    "call": {
        "filter": "elements",
        **dict.fromkeys(("filter_x", "filter_y"), "number"),
        "bias": "elements",
        **dict.fromkeys(("bias_step", "adds", "images", "pixels", "x_channels", "y_channels"), "number"),
    },
    "share": {**dict.fromkeys(("first", "last", "channel", "last_channel"), "number"), "u": "elements"},
}
"""What the loops are told, all of 64 bits, in order.

image: where its elements are: steps are elements from one sample, channel, pixel to the next.

call: of all threads. The filter or its gradient, with its steps from one channel of x, of y to the next;
the bias, with its step; whether to add to what is there; images, pixels of each, and channels.

share: of one thread. From `first` to `last`: pixels as rows, panels of pixels as columns, panels of channels
of x in sums. From `channel` to `last_channel`: panels of channels of y that are packed, and channels of y in
sums. The place for the packed filter.
"""

MOST_TERMS = 128
"""Rows of a panel, which then has at most 32 KiB: a first-level cache holds it."""

_IN_C = {"number": "int64_t", "elements": "real *"}

_HERE = Path(__file__).parent


def source_of(dtype: str, vector_bytes: int) -> str:
    """Return the source of a library.

    Args:
        dtype: of all values, float32 or float64.
        vector_bytes: of a register.
    """
    text = with_fields((_HERE / "panels.c").read_text(encoding="utf-8"), FIELDS, _IN_C)
    begin = head(dtype, vector_bytes), transposition(lanes_of(dtype, vector_bytes))
    return "\n".join([*begin, products(vector_bytes, MOST_TERMS, text)])
