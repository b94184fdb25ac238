"""Units of memory, and amounts for people to read; errors need them, so nothing is imported here."""

UNITS = {
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


_LEAST = 1023.5 / 1024
"""Of a unit: four digits of the smaller one would show 1024 of that."""

_MOST_IN_DIGITS = 9999.5
"""Above it four digits would need an exponent."""


def format_bytes(n_bytes: int) -> str:
    """Return `n_bytes` for people to read, in the largest binary unit that leaves 1 or nearly so."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        number = n_bytes / UNITS[unit]
        if abs(number) >= _LEAST:
            return f"{number:.0f} {unit}" if abs(number) >= _MOST_IN_DIGITS else f"{number:.4g} {unit}"
    return f"{n_bytes} B"


def format_exactly(n_bytes: int) -> str:
    """Return `n_bytes` to the byte and in MiB, so that a bare 64 that was meant as MiB shows itself."""
    mib = f"{n_bytes / UNITS['MiB']:.4f}".rstrip("0").rstrip(".")
    if n_bytes and mib == "0":
        mib = "< 0.0001"
    return f"{n_bytes} bytes ({mib} MiB)"
