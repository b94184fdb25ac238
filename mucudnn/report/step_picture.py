"""A step with a plan and without it as a picture: all its rounds, and each patched convolution within it.

Nothing is measured, and equal comparisons give equal pictures.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mucudnn.comparing.step_comparison import LayerComparison, PairedTimes, StepComparison
from mucudnn.intervals import Verdict
from mucudnn.report import drawing
from mucudnn.report.drawing import BLACK, BLUE, GREY, ORANGE, RED, Change, Look, Span
from mucudnn.report.steps import describe_factor, name_of, over_limit, render_comparison
from mucudnn.report.words import COMPARISON_SOURCE, PERCENT, check_told, describe_environment, elided
from mucudnn.sizes import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEAD_HEIGHT, _STEP_HEIGHT, _ROW_HEIGHT = 11.0, 1.5, 1.6, 0.17
"""Inches."""

_LONGEST = 48
"""Characters of a name."""

_DEVICE_LONGEST = 150

_MS = 1e-3

_SPREAD = 0.35
"""How far the dots of the first and the last round lie from their line, in lines."""

_BEFORE = Look("before: PyTorch's own, whatever it takes", GREY, is_hollow=True)
_FASTER = Look("now, FASTER", BLUE)
_SLOWER = Look("now, SLOWER", RED)
_ALIKE = Look("now, not told apart", GREY)
_UNPLANNED = Look("now, not as planned", BLACK, is_hollow=True)
_FORCED = Look("now, SLOWER; the limit forbids PyTorch's own", ORANGE)


def draw_comparison(found: StepComparison, path: str | os.PathLike[str]) -> None:
    """Draw what `mucudnn.compare` found into a file: a picture, or a page that has its table as well.

    Args:
        found: what is drawn.
        path: of the file; its ending says of what kind: .svg, .pdf, .png, .html.

    Raises:
        OptionError: it is no comparison, the name ends otherwise, or matplotlib cannot be used.
        OSError: the file cannot be written.
    """
    check_told(found, StepComparison, COMPARISON_SOURCE)
    title = f"mucudnn: a step with its plan of {format_bytes(found.plan.limit_bytes)}, and without"
    drawing.save(lambda: comparison_figure(found), path, title, lambda: render_comparison(found))


def comparison_figure(found: StepComparison) -> "Figure":
    """Return it as a figure of matplotlib: the rounds of the whole step, then a line for each convolution."""
    from matplotlib.figure import Figure

    heights = [_STEP_HEIGHT]
    if found.layers:
        heights.append(0.5 + _ROW_HEIGHT * len(found.layers))
    figure = Figure(figsize=(_WIDTH, _HEAD_HEIGHT + sum(heights)), layout="constrained")
    above, *below = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    looks = [_draw_step(above, found.step)]
    for axes in below:
        looks.extend(_draw_layers(axes, found))
    device = describe_environment(found.plan.environment)["device"]
    figure.suptitle(
        f"A step with the plan (within {format_bytes(found.plan.limit_bytes)}) and without it\n"
        f"{elided(device, _DEVICE_LONGEST)}"
    )
    drawing.add_legend(figure, [_BEFORE, *looks])
    return figure


def _draw_step(axes: "Axes", times: PairedTimes) -> Look:
    """Draw every round, and return the look of now."""
    look = _look(times, is_forbidden=False)
    before, now = Span.of(times.before, _MS), Span.of(times.now, _MS)
    for line, spans_ns in enumerate((times.before_ns, times.now_ns)):
        shade = GREY if line == 0 else look.colour
        axes.scatter(*_rounds(line, spans_ns), s=4, color=shade, alpha=0.35, linewidths=0)
    drawing.draw_changes(axes, [Change(before, None, look), Change(None, now, look)], _BEFORE)
    drawing.name_lines(axes, ["before", "now"], ["", describe_factor(times.speedup)])
    axes.set_title(
        f"The whole step in ms (not from 0 on): a dot for each of {len(times.now_ns)} rounds, the first on "
        f"top; median and {PERCENT} interval; speedup",
        loc="left",
    )
    axes.grid(axis="x")
    return look


def _rounds(line: int, spans_ns: Sequence[int]) -> tuple[list[float], list[float]]:
    """Return milliseconds, and places about the line, from top to bottom in the order of the rounds."""
    last = max(len(spans_ns) - 1, 1)
    places = [line + _SPREAD * (2 * number / last - 1) for number in range(len(spans_ns))]
    return [span * 1e-6 for span in spans_ns], places


def _draw_layers(axes: "Axes", found: StepComparison) -> list[Look]:
    """Draw each convolution within the step, and return the looks that they have."""
    forbidden = over_limit(found)
    looks = [
        _UNPLANNED
        if layer.path in found.unplanned
        else _look(layer.times, is_forbidden=layer.path in forbidden)
        for layer in found.layers
    ]
    changes = [_change(layer, look) for layer, look in zip(found.layers, looks, strict=True)]
    drawing.draw_changes(axes, changes, _BEFORE)
    names = [elided(name_of(layer.path), _LONGEST) for layer in found.layers]
    drawing.name_lines(axes, names, [f"{layer.times.speedup.median:.2f}" for layer in found.layers])
    axes.set_title(
        f"Its patched convolutions in ms, all calls of one in a step: median and {PERCENT} interval; speedup",
        loc="left",
    )
    axes.set_xlim(left=0)
    axes.grid()
    return looks


def _change(layer: LayerComparison, look: Look) -> Change:
    return Change(Span.of(layer.times.before, _MS), Span.of(layer.times.now, _MS), look)


def _look(times: PairedTimes, *, is_forbidden: bool) -> Look:
    """Return how what runs now is drawn."""
    if times.verdict is Verdict.FASTER:
        return _FASTER
    if times.verdict is not Verdict.SLOWER:
        return _ALIKE
    return _FORCED if is_forbidden else _SLOWER
