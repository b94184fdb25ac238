"""Tables in plain text, the same on a terminal and in a pipe."""

import itertools
from collections.abc import Iterator, Sequence

Row = tuple[str, ...]
"""The texts of a row; a text may have several lines."""

_GAP = 2


def table(headings: Row, alignment: str, groups: Sequence[tuple[str, Sequence[Row]]]) -> list[str]:
    """Return a line of headings, a rule, and for each group its title and its rows.

    Args:
        headings: of the columns.
        alignment: a character for each column: "<" or ">".
        groups: titles and rows; an empty title takes no line.
    """
    rows = [headings, *(row for _, rows in groups for row in rows)]
    widths = [
        max(len(line) for cell in column for line in cell.split("\n")) for column in zip(*rows, strict=True)
    ]
    lines = [*_laid_out(headings, alignment, widths), "-" * (sum(widths) + _GAP * (len(widths) - 1))]
    for title, rows_below in groups:
        lines += [title] if title else []
        lines += [line for row in rows_below for line in _laid_out(row, alignment, widths)]
    return lines


def _laid_out(cells: Row, alignment: str, widths: Sequence[int]) -> Iterator[str]:
    """Yield the lines of a row, as many as its highest cell has."""
    for texts in itertools.zip_longest(*(cell.split("\n") for cell in cells), fillvalue=""):
        columns = zip(texts, alignment, widths, strict=True)
        yield (" " * _GAP).join(f"{text:{side}{width}}" for text, side, width in columns).rstrip()
