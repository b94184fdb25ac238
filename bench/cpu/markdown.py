"""Tables in Markdown, and how numbers stand in them."""

from collections.abc import Iterator, Sequence

from mucudnn.intervals import Estimate

_MS = 1e3

_THOUSAND = 999.5
"""What three digits round to a thousand."""


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table; a cell's own lines become one."""
    yield _line(headings)
    yield _line(["---"] * len(headings))
    for row in rows:
        yield _line(row)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def milliseconds(seconds: Estimate) -> str:
    """Return a time with its interval: "31.2 [30.9, 31.5]"."""
    median, low, high = (_three_digits(each * _MS) for each in (seconds.median, seconds.low, seconds.high))
    return f"{median} [{low}, {high}]"


def _three_digits(number: float) -> str:
    """Return three digits, and all that stand before the point."""
    return f"{number:.3g}" if abs(number) < _THOUSAND else f"{number:.0f}"


def spread(seen: Estimate) -> str:
    """Return a speed-up with its interval: "1.52 [1.49, 1.55]"."""
    return f"{seen.median:.2f} [{seen.low:.2f}, {seen.high:.2f}]"
