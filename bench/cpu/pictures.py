"""What was measured, in pictures made of the lines alone: steps, networks in all ways, gains of layers."""

import dataclasses
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bench.cpu import tables
from bench.cpu.layers import Layer
from bench.cpu.lines import Measured, Recording
from bench.cpu.looks import PATCHED, UNPATCHED
from bench.cpu.markdown import spread
from bench.cpu.means import pair, total
from bench.cpu.settings import SETTINGS
from bench.cpu.step_lines import DIVIDED, OWN, StepMeasured
from bench.cpu.step_tables import known_steps
from bench.cpu.way_pictures import ways_figure
from bench.cpu.way_tables import known_ways
from mucudnn.intervals import Estimate
from mucudnn.report import drawing
from mucudnn.report.drawing import BLUE, GREY, RED, Change, Look, Span
from mucudnn.report.words import PERCENT
from mucudnn.sizes import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KIND = ".svg"
PICTURES = STEPS, WAYS, LAYERS = f"steps{KIND}", f"ways{KIND}", f"layers{KIND}"
"""Names of the files."""

_WIDTH = 10.0
_STEP_HEIGHT = 0.25
_GROUP_HEIGHT, _GROUP_COLUMNS = 2.1, 3
"""Inches; how many groups of layers stand side by side."""

_TITLE_WIDTH = 42
"""Characters."""

_LEAST, _MOST, _BEYOND = 0.5, 2.0, 1.4
"""The axis of speed-ups goes at least so far down and up, and beyond the medians by such a factor; what an
interval has beyond that is cut off."""

_STAYS = Look("PyTorch's own stays", GREY, is_hollow=True)
_FASTER = Look("faster", BLUE)
_UNDECIDED = Look("not told apart", GREY)
_SLOWER = Look("slower", RED)


def pictures(recording: Recording, layers: Sequence[Layer]) -> dict[str, bytes]:
    """Return the pictures of a recording, by the names of their files; what was not measured has none."""
    steps, ways = known_steps(recording), known_ways(recording)
    groups = list(tables.groups(recording, layers))
    drawn = {}
    if steps:
        drawn[STEPS] = drawing.image(lambda: steps_figure(steps), KIND)
    if ways:
        drawn[WAYS] = drawing.image(lambda: ways_figure(ways), KIND)
    if groups:
        drawn[LAYERS] = drawing.image(lambda: layers_figure(groups), KIND)
    return drawn


def steps_figure(steps: Sequence[StepMeasured]) -> "Figure":
    """Return the times of training steps, unpatched and patched, with a line each and its speed-up."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, 1.2 + _STEP_HEIGHT * len(steps)), layout="constrained")
    axes = figure.subplots()
    looks = [PATCHED[step.verdict] for step in steps]
    changes = [
        Change(Span.of(step.seconds_of(OWN), 1), Span.of(step.seconds_of(DIVIDED), 1), look)
        for step, look in zip(steps, looks, strict=True)
    ]
    drawing.draw_changes(axes, changes, UNPATCHED)
    drawing.name_lines(axes, [_where(step) for step in steps], [spread(step.speedup) for step in steps])
    axes.set_xlim(left=0)
    axes.grid()
    axes.set_title(
        f"A training step in seconds, median and {PERCENT} interval; right: unpatched / patched",
        loc="left",
    )
    drawing.add_legend(figure, [UNPATCHED, *looks])
    return figure


def _where(step: StepMeasured) -> str:
    """Return which step it is: the limit is the network's own, or told with the setting."""
    case, setting = step.case, SETTINGS[step.case.setting]
    limit = [format_bytes(step.limit_bytes)] if setting.limit_bytes is None else []
    return ", ".join([case.network, *limit, case.layout, setting.text])


def layers_figure(groups: Sequence[tuple[str, Sequence[Measured]]]) -> "Figure":
    """Return the speed-ups of layers, sorted, of each setting, layout and op for itself."""
    from matplotlib.figure import Figure

    lines = math.ceil(len(groups) / _GROUP_COLUMNS)
    figure = Figure(figsize=(_WIDTH, 0.8 + _GROUP_HEIGHT * lines), layout="constrained")
    every = [*figure.subplots(lines, _GROUP_COLUMNS, sharey=True, squeeze=False).flat]
    chosen = [_Group.of(title, measured) for title, measured in groups]
    for axes, group in zip(every, chosen, strict=False):
        _draw_group(axes, group)
    for axes in every[len(chosen) :]:
        axes.set_axis_off()
    medians = [speedup.median for group in chosen for speedup, _ in group.seen]
    every[0].set_ylim(min(_LEAST, *medians) / _BEYOND, max(_MOST, *medians) * _BEYOND)
    figure.suptitle(
        f"Times as fast as PyTorch's own convolution: every layer with its {PERCENT} interval, "
        "from the least to the most,\n"
        "as far as the axis goes; in the titles the quotients of the sums of times"
    )
    drawing.add_legend(figure, (_STAYS, _FASTER, _UNDECIDED, _SLOWER))
    return figure


@dataclasses.dataclass(frozen=True)
class _Group:
    """Layers of one setting, layout and op, under one limit.

    Attributes:
        title: which they are, how many, and what the sums of their times are worth.
        seen: how many times as fast as PyTorch's own each is, and what that says; the least first.
    """

    title: str
    seen: Sequence[tuple[Estimate, Look]]

    @classmethod
    def of(cls, name: str, measured: Sequence[Measured]) -> "_Group":
        limit_bytes = tables.detailed_limit(measured)
        chosen = [(line, choice.key) for line in measured if (choice := line.choice(limit_bytes)) is not None]
        seen = sorted((_seen(line, key) for line, key in chosen), key=lambda each: each[0].median)
        together = spread(total([pair(line, key) for line, key in chosen]))
        counted = f"{len(chosen)} layers, {format_bytes(limit_bytes)}: {together}"
        return cls(f"{textwrap.fill(name, _TITLE_WIDTH)}\n{counted}", seen)


def _draw_group(axes: "Axes", group: _Group) -> None:
    """Draw the layers of a group, from the one that gains least to the one that gains most."""
    for look in dict.fromkeys(look for _, look in group.seen):
        found = [(place, Span.of(seen, 1)) for place, (seen, of) in enumerate(group.seen) if of == look]
        _draw_upright(axes, dict(found), look)
    axes.axhline(1, color="black", linewidth=0.8, zorder=1)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks([])
    axes.grid(axis="y")
    axes.set_title(group.title, loc="left")


def _draw_upright(axes: "Axes", spans: Mapping[int, Span], look: Look) -> None:
    """Draw values at their places side by side, their intervals upright."""
    middles = [span.middle for span in spans.values()]
    ends = (
        [span.middle - span.low for span in spans.values()],
        [span.high - span.middle for span in spans.values()],
    )
    axes.errorbar([*spans], middles, yerr=ends, linestyle="", markersize=3, elinewidth=0.8, **look.mark)


def _seen(line: Measured, key: str) -> tuple[Estimate, Look]:
    """Return how many times as fast as PyTorch's own a layer is, and what that says."""
    if key == line.own:
        return Estimate(1.0, 1.0, 1.0, 0), _STAYS
    speedup = line.speedup(key)
    if speedup.low > 1:
        return speedup, _FASTER
    return speedup, _SLOWER if speedup.high < 1 else _UNDECIDED
