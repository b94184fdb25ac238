"""How times and amounts of memory are drawn: by matplotlib, loaded for those alone who ask for a picture."""

import dataclasses
import html
import io
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mucudnn.errors import OptionError
from mucudnn.files import write_whole
from mucudnn.intervals import Estimate
from mucudnn.sizes import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

_LEAST_VERSION = (3, 9)
"""Of matplotlib, as pyproject.toml has it: tried were 3.9.4 and the one that constraints.txt has."""

_DATELESS: Mapping[str, dict[str, None]] = {
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
    ".png": {},
}
"""What keeps the day out of a file: one version of matplotlib draws equal pictures in equal bytes."""

_PAGE = ".html"

KINDS = (*_DATELESS, _PAGE)
"""How the name of a file that something is drawn into may end."""

GREY, BLUE, ORANGE, RED, BLACK = "#7f7f7f", "#0072b2", "#e69f00", "#d55e00", "#000000"
"""Colours that people who see few of them tell apart (Okabe and Ito, "Color Universal Design", 2008)."""

_LIMIT: Mapping[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 0.8}
"""How the line of a limit is drawn."""

_LEGEND_COLUMNS = 5

_TICKS = 5
"""How many amounts, beside nothing, an axis of bytes names at most."""

_GRAIN_BYTES = 64 * 2**10
"""Below that an axis of bytes is linear, down to nothing: finer is no weighing."""


@dataclasses.dataclass(frozen=True)
class Look:
    """How a value is drawn.

    Attributes:
        text: what it is, for the legend.
        colour: of its mark, and of its interval.
        is_hollow: whether the mark is an outline.
    """

    text: str
    colour: str
    is_hollow: bool = False

    @property
    def mark(self) -> Mapping[str, Any]:
        """The same in matplotlib's words."""
        face = "white" if self.is_hollow else self.colour
        return {"marker": "o", "color": self.colour, "markerfacecolor": face}


@dataclasses.dataclass(frozen=True)
class Span:
    """A value with the ends of its interval, in the unit of an axis."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, estimate: Estimate, unit: float) -> "Span":
        """Return an estimate in units of `unit`; where its interval has no ends, the median alone.

        An interval that does not hold its median, as none that was measured, is widened until it does.
        """
        is_known = math.isfinite(estimate.low) and math.isfinite(estimate.high)
        low, high = (estimate.low, estimate.high) if is_known else (estimate.median, estimate.median)
        middle = estimate.median
        return cls(middle / unit, min(low, middle) / unit, max(high, middle) / unit)

    @classmethod
    def exact(cls, value: float) -> "Span":
        """Return a value without an interval."""
        return cls(value, value, value)


def checked_kind(path: str | os.PathLike[str]) -> str:
    """Return of what kind a file is that something is to be drawn into: how its name ends, in small letters.

    Raises:
        OptionError: that is none of `KINDS`, or matplotlib cannot be used.
    """
    kind = Path(path).suffix.lower()
    if kind not in KINDS:
        raise OptionError(f"The name of a picture must end in {', '.join(KINDS)}, but got '{path}'.")
    check_matplotlib()
    return kind


def check_matplotlib() -> None:
    """Verify that matplotlib can be used.

    Raises:
        OptionError: it is not installed, or does not work, or is too old.
    """
    try:
        import matplotlib.figure
    except ImportError as error:
        raise OptionError(
            f"matplotlib must be installed to draw ({error}); pip install matplotlib adds it."
        ) from error
    if matplotlib.__version_info__[:2] < _LEAST_VERSION:
        least = ".".join(map(str, _LEAST_VERSION))
        raise OptionError(f"matplotlib must be {least} or later to draw, but is {matplotlib.__version__}.")


def save(
    draw: Callable[[], "Figure"], path: str | os.PathLike[str], title: str, text: Callable[[], str]
) -> None:
    """Draw into a file, whole or not at all: a picture, or a page with a text that needs no other file.

    Args:
        draw: makes the figure.
        path: of the file; its ending says of what kind.
        title: of the page.
        text: makes that of the page.

    Raises:
        OptionError: the name ends with none of `KINDS`, or matplotlib cannot be used.
        OSError: the file cannot be written.
    """
    kind = checked_kind(path)
    if kind != _PAGE:
        write_whole(path, image(draw, kind))
        return
    picture = image(draw, ".svg").decode()
    picture, told = picture[picture.index("<svg") :], html.escape(text())
    write_whole(path, _HTML.format(title=html.escape(title), picture=picture, text=told).encode())


def image(draw: Callable[[], "Figure"], kind: str) -> bytes:
    """Return a picture, drawn as matplotlib does untouched by a user's settings.

    Args:
        draw: makes the figure.
        kind: of the file: .svg, .pdf, .png.
    """
    import matplotlib

    file = io.BytesIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rc("font", size=8)
        matplotlib.rc("axes", titlesize=8, axisbelow=True)
        matplotlib.rc("axes.spines", top=False, right=False)
        matplotlib.rc("grid", color="#e5e5e5", linewidth=0.6)
        matplotlib.rc("figure", titlesize=9)
        matplotlib.rc("text", parse_math=False)  # a name is a name, whatever its dollars
        matplotlib.rc("savefig", dpi=150)
        matplotlib.rc("svg", hashsalt="mucudnn")
        draw().savefig(file, format=kind.removeprefix("."), metadata=_DATELESS[kind])
    return file.getvalue()


_HTML = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
.mucudnn {{ font-family: sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; }}
.mucudnn svg {{ height: auto; max-width: 100%; }}
.mucudnn pre {{ overflow-x: auto; }}
</style>
</head>
<body>
<div class="mucudnn">
<h1>{title}</h1>
{picture}
<pre>{text}</pre>
</div>
</body>
</html>
"""


@dataclasses.dataclass(frozen=True)
class Change:
    """What was and what is, each where it is known.

    Attributes:
        before: what was.
        now: what is.
        look: of what is.
    """

    before: Span | None
    now: Span | None
    look: Look


def draw_changes(axes: "Axes", changes: Sequence[Change], before: Look) -> None:
    """Draw what was and what is, a line for each of `changes`, joined where both are known.

    Args:
        axes: where the lines are 0, 1, 2 and so on.
        changes: in the order of the lines.
        before: the look of what was.
    """
    joined = [
        (line, each.before.middle, each.now.middle)
        for line, each in enumerate(changes)
        if each.before is not None and each.now is not None
    ]
    if joined:
        axes.hlines(*zip(*joined, strict=True), color="#c0c0c0", linewidth=2, zorder=1)
    known: dict[Look, list[tuple[int, Span]]] = {}
    for line, each in enumerate(changes):
        for span, look in ((each.before, before), (each.now, each.look)):
            if span is not None:
                known.setdefault(look, []).append((line, span))
    for look, found in known.items():
        lines, spans = zip(*found, strict=True)
        ends = (
            [span.middle - span.low for span in spans],
            [span.high - span.middle for span in spans],
        )
        axes.errorbar(
            [span.middle for span in spans], lines, xerr=ends, linestyle="", markersize=4, capsize=2,
            elinewidth=0.8, zorder=2, **look.mark,
        )  # fmt: skip


def name_lines(axes: "Axes", names: Sequence[str], notes: Sequence[str]) -> None:
    """Name the lines of axes on the left, the first on top, and have a note on the right of each."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    behind = axes.secondary_yaxis("right")
    behind.set_yticks(range(len(notes)), notes)
    behind.spines["right"].set_visible(False)
    for each in (axes, behind):
        each.tick_params(axis="y", length=0)


def scale_bytes(axes: "Axes", amounts: Iterable[float]) -> None:
    """Have a horizontal axis of bytes, in powers of two, from nothing to above all `amounts`."""
    top = max([_GRAIN_BYTES, *amounts])
    octaves = math.ceil(math.log2(top / _GRAIN_BYTES))
    step = 3 * math.ceil((octaves + 1) / (3 * _TICKS))
    ticks = [0, *(_GRAIN_BYTES * 2**octave for octave in range(0, octaves + 1, step))]
    axes.set_xscale("symlog", base=2, linthresh=_GRAIN_BYTES)
    axes.set_xlim(-_GRAIN_BYTES / 4, 2.0 * top)
    axes.set_xticks([float(tick) for tick in ticks], [format_bytes(tick) for tick in ticks])
    axes.minorticks_off()


def draw_limit(axes: "Axes", limit_bytes: int) -> None:
    """Draw a limit on a horizontal axis of bytes."""
    axes.axvline(limit_bytes, **_LIMIT)


def add_legend(figure: "FigureBase", looks: Iterable[Look], limit: str | None = None) -> None:
    """Say below a figure what its marks are, each once, and what the line of the limit is."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], linestyle="", markersize=4, label=look.text, **look.mark)
        for look in dict.fromkeys(looks)
    ]
    if limit is not None:
        handles.append(Line2D([], [], label=limit, **_LIMIT))
    columns = min(_LEGEND_COLUMNS, len(handles))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
