"""Amounts of memory: "64MiB" to bytes and back."""

import math
import re
import reprlib
from fractions import Fraction
from numbers import Integral

from mucudnn.errors import SizeError
from mucudnn.units import UNITS, format_bytes, format_exactly

__all__ = ["LARGEST", "format_bytes", "format_exactly", "parse_bytes"]

LARGEST = 2**63 - 1
"""The largest amount that is read, in bytes: what a file's offset and SQLite's integers hold."""

_FACTORS = {unit.lower(): factor for unit, factor in UNITS.items()}
_PATTERN = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(size: int | str) -> int:
    """Return `size` as a whole number of bytes, rounded down.

    Args:
        size: an int of bytes, or a number with a unit ("64MiB", "1.5 GiB", "512KB"); the case of the
            unit does not matter.

    Raises:
        SizeError: negative, more than `LARGEST`, no number, a string without a unit, or an unknown unit.
    """
    if isinstance(size, bool) or not isinstance(size, Integral | str):
        got = reprlib.repr(size)  # a sample, in the limit's place, may be large
        raise SizeError(f"A size must be an int of bytes or a string such as '64MiB', but got {got}.")
    n_bytes = _parse_text(size) if isinstance(size, str) else int(size)
    if n_bytes < 0:
        raise SizeError(f"A size must not be negative, but got {size!r}.")
    if n_bytes > LARGEST:
        raise SizeError(f"A size must be at most {LARGEST} bytes, but got more.")
    return n_bytes


def _parse_text(text: str) -> int:
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise SizeError(f"A size must be a number with a unit, such as '64MiB', but got {text!r}.")
    number, unit = match.groups()
    if not unit and float(number) == 0:
        return 0
    if not unit and number.startswith("-"):
        raise SizeError(f"A size must not be negative, but got {text!r}.")
    if not unit:
        raise SizeError(
            f"A size in a string must name its unit ({', '.join(UNITS)}), but got {text!r}; "
            f"did you mean '{number.lstrip('+')}MiB'?"
        )
    factor = _FACTORS.get(unit.lower())
    if factor is None:
        is_half = f"{unit}ib".lower() in _FACTORS
        hint = f"; did you mean '{number.lstrip('+')}{unit.upper()}iB'?" if is_half else "."
        raise SizeError(f"A unit must be one of {', '.join(UNITS)}, but got {unit!r} in {text!r}{hint}")
    try:
        return math.floor(Fraction(number) * factor)
    except ValueError:  # Python reads no integer of more than some thousand digits
        return LARGEST + 1
