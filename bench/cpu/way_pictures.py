"""Networks in all ways, as a picture: for each layout and form the time unpatched and patched."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bench.cpu.looks import PATCHED, UNPATCHED
from bench.cpu.markdown import spread
from bench.cpu.way_cases import Way, ways_of
from bench.cpu.way_lines import WayMeasured
from bench.cpu.way_tables import title
from mucudnn.intervals import estimate, ratio, verdict_of
from mucudnn.report import drawing
from mucudnn.report.drawing import Change, Look, Span
from mucudnn.report.words import PERCENT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _LINE_HEIGHT, _TITLE_HEIGHT = 10.0, 0.2, 0.7
"""Inches."""

_MS = 1e-3


def ways_figure(lines: Sequence[WayMeasured]) -> "Figure":
    """Return the times of all ways by the choosing rounds, the axes of each network below the other's."""
    from matplotlib.figure import Figure

    heights = [_TITLE_HEIGHT + _LINE_HEIGHT * len(_unpatched(line)) for line in lines]
    figure = Figure(figsize=(_WIDTH, 0.8 + sum(heights)), layout="constrained")
    every = figure.subplots(len(lines), 1, squeeze=False, height_ratios=heights)[:, 0]
    looks = [look for axes, line in zip(every, lines, strict=True) for look in _draw(axes, line)]
    figure.suptitle(
        f"Milliseconds in all ways: median and {PERCENT} interval of the choosing rounds; on the "
        "right unpatched / patched"
    )
    drawing.add_legend(figure, [UNPATCHED, *looks])
    return figure


def _draw(axes: "Axes", line: WayMeasured) -> list[Look]:
    """Draw the ways of one network, a line for each that is unpatched; return the looks of patched ones."""
    ways = _unpatched(line)
    changes, notes, looks = [], [], []
    for way in ways:
        own, patched = str(way), str(dataclasses.replace(way, is_divided=True))
        before = Span.of(estimate(line.choosing.samples_s(own)), _MS)
        if patched not in line.choosing.spans_ns:
            changes.append(Change(before, None, UNPATCHED))
            notes.append("")
            continue
        samples = line.choosing.samples_s(own), line.choosing.samples_s(patched)
        now_over_before = ratio(*samples)
        look = PATCHED[verdict_of(now_over_before.low, now_over_before.high)]
        changes.append(Change(before, Span.of(estimate(samples[1]), _MS), look))
        notes.append(spread(ratio(*samples[::-1])))
        looks.append(look)
    drawing.draw_changes(axes, changes, UNPATCHED)
    drawing.name_lines(axes, [str(way) for way in ways], notes)
    axes.set_xlim(left=0)
    axes.grid()
    axes.set_title(title(line.case, line.shape), loc="left")
    return looks


def _unpatched(line: WayMeasured) -> list[Way]:
    """Return the ways that are PyTorch's own and could be run."""
    return [
        way for way in ways_of(line.case.use) if not way.is_divided and str(way) in line.choosing.spans_ns
    ]
