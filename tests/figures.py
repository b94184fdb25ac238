"""What is drawn in a figure of matplotlib."""

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import FigureBase

GREY, BLUE, ORANGE, RED = "#7f7f7f", "#0072b2", "#e69f00", "#d55e00"


class Dot(NamedTuple):
    """What is drawn on a line."""

    line: int
    value: float
    low: float
    high: float
    colour: str
    is_hollow: bool


def dots(axes: Axes) -> list[Dot]:
    """Return what is drawn, line by line, hollow ones first."""
    found = []
    for container in axes.containers:
        assert isinstance(container, ErrorbarContainer)
        marks, _, (bars,) = container.lines
        is_hollow = to_hex(marks.get_markerfacecolor()) == "#ffffff"
        colour = to_hex(marks.get_color())
        for value, line, bar in zip(marks.get_xdata(), marks.get_ydata(), bars.get_segments(), strict=True):
            (low, _), (high, _) = bar
            found.append(Dot(round(line), value, low, high, colour, is_hollow))
    return sorted(found, key=lambda dot: (dot.line, not dot.is_hollow))


def names(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def behind(axes: Axes) -> list[str]:
    (axis,) = axes.child_axes
    return [label.get_text() for label in axis.get_yticklabels()]


def legend(figure: FigureBase) -> list[str]:
    (found,) = figure.legends
    return [text.get_text() for text in found.get_texts()]


def titles(figure: FigureBase) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes if axes.axison]
