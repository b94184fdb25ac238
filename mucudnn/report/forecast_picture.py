"""Forecasts as pictures: what every convolution would take, undivided and in micro-batches."""

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mucudnn.forecast import Forecast, Need, ProblemForecast
from mucudnn.plan import ConvSite
from mucudnn.report import drawing
from mucudnn.report.drawing import GREY, Change, Look, Span
from mucudnn.report.forecasts import render_forecast
from mucudnn.report.words import and_more, elided
from mucudnn.sizes import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEAD_HEIGHT, _ROW_HEIGHT = 10.0, 1.9, 0.17
"""Inches."""

_LONGEST = 60
"""Characters of a name."""

_UNDIVIDED = Look("undivided", GREY, is_hollow=True)


@dataclasses.dataclass(frozen=True)
class _Row:
    """Sites with one problem.

    Attributes:
        sites: where that is.
        forecast: its workspaces.
        is_transposed: whether they are of transposed convolutions.
    """

    sites: Sequence[ConvSite]
    forecast: ProblemForecast
    is_transposed: bool

    @property
    def name(self) -> str:
        """The first of the sites, and how many more there are."""
        transposed = " (transposed)" if self.is_transposed else ""
        return and_more(f"{elided(str(self.sites[0]), _LONGEST)}{transposed}", len(self.sites) - 1)

    @property
    def parts(self) -> list[Need]:
        """What micro-batches need."""
        return [need for need in self.forecast.needs if need.batch < self.forecast.problem.batch]

    @property
    def undivided(self) -> str:
        """What the whole mini-batch needs, in words."""
        n_bytes = self.forecast.undivided_bytes
        return "no plan" if n_bytes is None else format_bytes(n_bytes)


def draw_forecast(forecast: Forecast, path: str | os.PathLike[str], limit_bytes: int | None = None) -> None:
    """Draw a forecast into a file: a picture, or a page (.html) that has the text of `render_forecast`, too.

    Args:
        forecast: what is drawn.
        path: of the file; its ending says of what kind: .svg, .pdf, .png, .html.
        limit_bytes: a workspace limit for each site.

    Raises:
        OptionError: the name ends otherwise, or matplotlib cannot be used.
        OSError: the file cannot be written.
    """
    drawing.save(
        lambda: forecast_figure(forecast, limit_bytes),
        path,
        "mucudnn: workspaces of convolutions",
        lambda: render_forecast(forecast, limit_bytes),
    )


def forecast_figure(forecast: Forecast, limit_bytes: int | None = None) -> "Figure":
    """Return a forecast as a figure of matplotlib: a line for each op of each distinct convolution."""
    from matplotlib.figure import Figure

    rows = _rows(forecast)
    figure = Figure(figsize=(_WIDTH, _HEAD_HEIGHT + _ROW_HEIGHT * len(rows)), layout="constrained")
    axes = figure.subplots()
    undivided = [row.forecast.undivided_bytes for row in rows]
    changes = [Change(None if each is None else Span.exact(each), None, _UNDIVIDED) for each in undivided]
    drawing.draw_changes(axes, changes, _UNDIVIDED)
    _draw_parts(axes, rows)
    drawing.name_lines(axes, [row.name for row in rows], [row.undivided for row in rows])
    drawing.scale_bytes(axes, [limit_bytes or 0, *(each or 0 for each in undivided), *_part_bytes(rows)])
    if limit_bytes is not None:
        drawing.draw_limit(axes, limit_bytes)
    axes.grid()
    axes.set_title(
        "Workspace of the first-ranked plan (parts of 16-bit weight gradients with their float32 sum); "
        "on the right undivided",
        loc="left",
    )
    kinds = dict.fromkeys(f"{row.forecast.problem.dtype} {row.forecast.problem.layout}" for row in rows)
    figure.suptitle(f"{forecast.device}\n{', '.join([forecast.library, *kinds, *forecast.settings])}")
    limit = None if limit_bytes is None else f"limit for each, {format_bytes(limit_bytes)}"
    drawing.add_legend(figure, [_UNDIVIDED], limit)
    return figure


def _rows(forecast: Forecast) -> list[_Row]:
    """Return the distinct problems, in the order in which the model meets them."""
    alike: dict[tuple[ProblemForecast, bool], list[ConvSite]] = {}
    for site in forecast.sites:
        key = (site.forecast, site.occurrence.is_transposed)
        alike.setdefault(key, []).append(site.occurrence.site)
    return [_Row(sites, found, is_transposed) for (found, is_transposed), sites in alike.items()]


def _part_bytes(rows: Sequence[_Row]) -> list[int]:
    return [need.first_bytes for row in rows for need in row.parts]


def _draw_parts(axes: "Axes", rows: Sequence[_Row]) -> None:
    """Draw what micro-batches need, the size of each as a colour."""
    from matplotlib.colors import LogNorm

    sizes = [need.batch for row in rows for need in row.parts]
    if not sizes:
        return
    lines = [line for line, row in enumerate(rows) for _ in row.parts]
    marks = axes.scatter(
        _part_bytes(rows), lines, c=sizes, cmap="viridis_r", norm=LogNorm(1, max(2, *sizes)), s=12, zorder=2
    )
    bar = axes.figure.colorbar(
        marks, ax=axes, location="bottom", shrink=0.4, aspect=40, label="micro-batch size"
    )
    powers = [2**power for power in range(max(sizes).bit_length())]
    bar.set_ticks(powers, labels=[str(power) for power in powers], minor=False)
    bar.minorticks_off()
