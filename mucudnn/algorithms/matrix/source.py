"""The C source of convolutions by a matrix unit, for one type of elements: the files beside this one."""

from pathlib import Path

from mucudnn.algorithms.compiled.source import FIELDS as FIELDS_OF_TILES
from mucudnn.algorithms.compiled.source import transposition, with_fields

FIELDS = {
    "image": FIELDS_OF_TILES["image"],
    "set": dict.fromkeys(
        (
            *(f"{name}_{axis}" for name in ("start", "step", "count") for axis in "dhw"),
            *("first_group", "groups", "taps", "u"),
        ),
        "number",
    ),
    "group": dict.fromkeys(("shift", "d", "h", "w"), "number"),
    "call": {
        "filter": "address",
        **dict.fromkeys(("filter_x", "filter_y", "filter_d", "filter_h", "filter_w"), "number"),
        "bias": "address",
        **dict.fromkeys(("bias_step", "adds", "addends", "step_d", "step_h", "step_w"), "number"),
        **dict.fromkeys(("phases_d", "phases_h", "first_d", "first_h", "first_w"), "number"),
        **dict.fromkeys(("rows_d", "rows_h", "pitch", "band_d", "band_h", "bands_d", "bands_h"), "number"),
        **dict.fromkeys(("at_once", "unit_length", "panel", "panel_length"), "number"),
        **dict.fromkeys(("turned", "next_tap", "sets"), "number"),
        "set": "sets",
        "group": "groups",
    },
    "share": {
        **dict.fromkeys(("first", "last", "channel", "last_channel"), "number"),
        **dict.fromkeys(("u", "x", "pairs", "turned"), "address"),
        "sums": "floats",
        **dict.fromkeys(("totals", "next_total"), "number"),
    },
}
"""What the loops are told, all of 64 bits, in order.

image: as in Winograd's convolution in C.

set: outputs along d, h and w: the first, from one to the next, how many; the first of its groups of taps, how
many, and the taps of each; elements of the packed filter before its own.

group: pixels from an output's own place in a unit to what it reads; its first tap.

call: of all threads. The filter or its gradient, with its steps from one channel of x, of y, from one tap to
the next; whether to add to what is there; how many bfloat16 make a number; steps of x from one output to the
next, its phases along d and h, and where those of a unit begin; rows of each phase in a unit, outputs of a
row with those between rows, outputs of a unit, units of an image, units at once, elements of one, channels
and elements of a panel, places of a row of dy, and taps from one to the next of a group.

share: of one thread. Units from `first` to `last`, channels of y from `channel` to `last_channel`; places for
the packed filter, for x, its pairs, dy and sums of a gradient; how many threads have sums, and how far apart.
"""

_IN_C = {
    "number": "int64_t",
    "address": "element *",
    "floats": "float *",
    "sets": "const set_t *",
    "groups": "const group_t *",
}

_HERE = Path(__file__).parent


def source_of(dtype: str, unit: str | None = None) -> str:
    """Return the source of a library.

    Args:
        dtype: of the elements, float32 or bfloat16.
        unit: the source of what stands for the matrix unit; None for the processor's own.
    """
    text = with_fields(_text("products"), FIELDS, _IN_C)
    text = text.replace("TRANSPOSITION", transposition(16))
    text = text.replace("TILES\n", _text("unit") if unit is None else unit, 1)
    return text.replace("ELEMENTS\n", _text(dtype), 1)


def _text(name: str) -> str:
    return (_HERE / f"{name}.c").read_text(encoding="utf-8")
