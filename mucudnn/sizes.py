"""Amounts of memory: "64MiB" to bytes and back."""

import math
import re
from fractions import Fraction

from mucudnn.errors import SizeError

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_FACTORS = {unit.lower(): factor for unit, factor in _UNITS.items()}
_PATTERN = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(size: int | str) -> int:
    """Return `size` as a whole number of bytes, rounded down.

    Args:
        size: an int of bytes, or a number with a unit ("64MiB", "1.5 GiB", "512KB"); the case of the
            unit does not matter.

    Raises:
        SizeError: negative, no number, a string without a unit, or an unknown unit.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise SizeError(f"A size must be an int of bytes or a string such as '64MiB', but got {size!r}.")
    n_bytes = size if isinstance(size, int) else _parse_text(size)
    if n_bytes < 0:
        raise SizeError(f"A size must not be negative, but got {size!r}.")
    return n_bytes


def format_bytes(n_bytes: int) -> str:
    """Return `n_bytes` for people to read, in the largest binary unit that leaves a number of at least 1."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(n_bytes) >= _UNITS[unit]:
            return f"{n_bytes / _UNITS[unit]:.4g} {unit}"
    return f"{n_bytes} B"


def format_exactly(n_bytes: int) -> str:
    """Return `n_bytes` to the byte and in MiB, so that a bare 64 that was meant as MiB shows itself."""
    mib = f"{n_bytes / _UNITS['MiB']:.4f}".rstrip("0").rstrip(".")
    return f"{n_bytes} bytes ({mib} MiB)"


def _parse_text(text: str) -> int:
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise SizeError(f"A size must be a number with a unit, such as '64MiB', but got {text!r}.")
    number, unit = match.groups()
    if not unit:
        raise SizeError(
            f"A size in a string must name its unit ({', '.join(_UNITS)}), but got {text!r}; "
            f"did you mean '{number}MiB'?"
        )
    factor = _FACTORS.get(unit.lower())
    if factor is None:
        raise SizeError(f"A unit must be one of {', '.join(_UNITS)}, but got {unit!r} in {text!r}.")
    return math.floor(Fraction(number) * factor)
