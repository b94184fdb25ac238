"""Plans as pictures: times before and now, workspaces against the limit, and what less workspace would cost.

Nothing is measured, and equal plans give equal pictures.
"""

import dataclasses
import itertools
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mucudnn.choices import Mode
from mucudnn.intervals import Verdict
from mucudnn.locks import cached_property
from mucudnn.plan import Assignment, Plan
from mucudnn.problem import ConvProblem
from mucudnn.report import drawing
from mucudnn.report.drawing import BLACK, BLUE, GREY, ORANGE, RED, Change, Look, Span
from mucudnn.report.plans import describe_runs, render_plan
from mucudnn.report.sites import speedup_at, workspace_at, workspace_before_at
from mucudnn.report.words import PERCENT, PLAN_SOURCE, and_more, check_told, describe_environment, elided
from mucudnn.sizes import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_WIDTH, _HEAD_HEIGHT, _ROW_HEIGHT, _FRONT_HEIGHT = 11.0, 1.4, 0.17, 1.7
"""Inches."""

_FRONT_COLUMNS = 3

_FRONTS = 8
"""How many convolutions are drawn with their fronts: those that take most time, all equal ones together."""

_HEADROOM = 1.08
"""How far a front's panel reaches beyond its longest time, so that no mark is cut off."""

_LONGEST = 48
"""Characters of a name, and of what runs; the table has the rest."""

_TITLE_LONGEST = 44
"""Characters of a title above one of several fronts."""

_DEVICE_LONGEST = 150

_MS = 1e-3

_BEFORE = Look("before: PyTorch's own", GREY, is_hollow=True)
_KEPT = Look("PyTorch's own stays", GREY)
_FASTER = Look("now, FASTER", BLUE)
_FORCED = Look("now; the limit forbids PyTorch's own", ORANGE)
_OTHER = Look("now, not FASTER: PyTorch's own does not fit", RED)
_UNTIMED = Look("now, not timed", BLACK, is_hollow=True)
_ALL = Look("the plan", BLACK)


@dataclasses.dataclass(frozen=True)
class _Row:
    """Sites with one problem and one division.

    Attributes:
        shown: one of them.
        sites: how many there are.
    """

    shown: Assignment
    sites: int

    @property
    def name(self) -> str:
        """Where that is."""
        where = and_more(elided(str(self.shown.site), _LONGEST), self.sites - 1)
        return f"{where}{', predicted' * self.shown.seen.is_predicted}"

    @property
    def gain(self) -> str:
        """The speedup, where something else ran before."""
        speedup = speedup_at(self.shown)
        return "" if speedup is None or self.shown.is_kept else f"{speedup:.2f}"

    @property
    def runs(self) -> str:
        """What runs."""
        return elided(" + ".join(describe_runs(self.shown.division)), _LONGEST)

    @property
    def look(self) -> Look:
        """How what runs now is drawn."""
        seen = self.shown.seen
        if seen.chosen is None:
            return _UNTIMED
        if self.shown.is_kept:
            return _KEPT
        if seen.reference is None:
            return _FORCED
        return _FASTER if seen.verdict is Verdict.FASTER else _OTHER

    @property
    def total_s(self) -> float:
        """Seconds of all the sites before; where that is not known, now; where nothing is, as predicted."""
        known = self.shown.seen.reference or self.shown.seen.chosen
        return self.sites * (self.shown.division.time_s if known is None else known.median)

    @cached_property
    def front(self) -> "_Front":
        """The least time within each workspace; empty where nothing is known of that."""
        from mucudnn.solvers import division_front, least_workspace_bytes  # with numpy, which is slow to load

        candidates, batch = self.shown.candidates, self.shown.problem.batch
        if least_workspace_bytes(candidates, batch) is None:
            return ()
        return tuple((each.workspace_bytes, each.time_s) for each in division_front(candidates, batch))


_Front = tuple[tuple[int, float], ...]
"""Workspaces in bytes, rising, and the seconds that the profiles predict within each, falling."""


def _together(rows: Sequence[_Row]) -> _Front:
    """Return the seconds of all sites over what each of them may take; empty where some have no front."""
    fronts = [dict(row.front) for row in rows]
    if not fronts or not all(fronts):
        return ()
    least_bytes = max(min(front) for front in fronts)
    levels = sorted({n_bytes for front in fronts for n_bytes in front if n_bytes >= least_bytes})
    return tuple(
        (
            level,
            math.fsum(
                row.sites * min(time_s for n_bytes, time_s in row.front if n_bytes <= level) for row in rows
            ),
        )
        for level in levels
    )


def draw_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Draw a plan into a file: a picture, or a page (.html) of the picture and the text of `render_plan`.

    Args:
        plan: what is drawn.
        path: of the file; its ending says of what kind: .svg, .pdf, .png, .html.

    Raises:
        OptionError: it is no plan, the name ends otherwise, or matplotlib cannot be used.
        OSError: the file cannot be written.
    """
    check_told(plan, Plan, PLAN_SOURCE)
    title = f"mucudnn: convolutions within {format_bytes(plan.limit_bytes)}"
    drawing.save(lambda: plan_figure(plan), path, title, lambda: render_plan(plan))


def plan_figure(plan: Plan) -> "Figure":
    """Return a plan as a figure of matplotlib: a line for each op of each convolution, then some fronts."""
    from matplotlib.figure import Figure

    rows = _rows(plan)
    fronts = _curves(rows, plan)
    heights = [_HEAD_HEIGHT + _ROW_HEIGHT * len(rows)]
    if fronts:
        heights.append(0.5 + _FRONT_HEIGHT * math.ceil(len(fronts) / _FRONT_COLUMNS))
    figure = Figure(figsize=(_WIDTH, math.fsum(heights)), layout="constrained")
    above, *below = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_rows(above, rows, plan)
    for part in below:
        _draw_fronts(part, fronts, plan)
    return figure


def _rows(plan: Plan) -> list[_Row]:
    """Return what was measured, each once, in the order in which the model meets it."""
    alike: dict[tuple[ConvProblem, str], list[Assignment]] = {}
    for assigned in plan.assignments:
        alike.setdefault((assigned.problem, assigned.division.key), []).append(assigned)
    return [_Row(sites[0], len(sites)) for sites in alike.values()]


def _draw_rows(part: "SubFigure", rows: Sequence[_Row], plan: Plan) -> None:
    """Draw times and workspaces, before and now."""
    times, workspaces = part.subplots(1, 2, width_ratios=(3, 2))
    takes = [Change(*_workspaces(row.shown), row.look) for row in rows]
    drawing.draw_changes(times, [Change(*_times(row.shown), row.look) for row in rows], _BEFORE)
    drawing.draw_changes(workspaces, takes, _BEFORE)
    drawing.name_lines(times, [row.name for row in rows], [row.gain for row in rows])
    drawing.name_lines(workspaces, [""] * len(rows), [row.runs for row in rows])
    times.set_title(f"Time of one in ms, median and {PERCENT} interval; speedup", loc="left")
    times.set_xlim(left=0)
    workspaces.set_title("Workspace; what runs now", loc="left")
    known = [span.middle for each in takes for span in (each.before, each.now) if span is not None]
    drawing.scale_bytes(workspaces, [plan.limit_bytes, *known])
    drawing.draw_limit(workspaces, plan.limit_bytes)
    for axes in (times, workspaces):
        axes.grid()
    part.suptitle(_title(plan))
    whose = " of all together" if plan.mode is Mode.SHARING else ""
    limit = f"limit{whose}, {format_bytes(plan.limit_bytes)}"
    has_changed = any(row.look is not _KEPT and row.shown.seen.reference is not None for row in rows)
    before = [_BEFORE] if has_changed else []  # of what stays it is hidden by what is
    drawing.add_legend(part, [*before, *(row.look for row in rows)], limit)


def _title(plan: Plan) -> str:
    whose = "all together" if plan.mode is Mode.SHARING else "each"
    device = describe_environment(plan.environment)["device"]
    return f"Convolutions within {format_bytes(plan.limit_bytes)} {whose}\n{elided(device, _DEVICE_LONGEST)}"


def _times(assigned: Assignment) -> tuple[Span | None, Span | None]:
    """Return milliseconds before and now."""
    seen = assigned.seen
    before, now = (None if each is None else Span.of(each, _MS) for each in (seen.reference, seen.chosen))
    return before, now


def _workspaces(assigned: Assignment) -> tuple[Span | None, Span | None]:
    """Return bytes of workspace before and now."""
    before = workspace_before_at(assigned)
    return None if before is None else Span.exact(before), Span.exact(workspace_at(assigned))


@dataclasses.dataclass(frozen=True)
class _Curve:
    """A front as it is drawn.

    Attributes:
        title: of what.
        front: at least two points.
        room_bytes: up to which it is known.
        now: bytes and seconds, by the profiles, of what runs.
        look: of that.
    """

    title: str
    front: _Front
    room_bytes: int
    now: tuple[int, float]
    look: Look


def _curves(rows: Sequence[_Row], plan: Plan) -> list[_Curve]:
    """Return what less workspace would cost: of all sites together, and of those that take most time."""
    is_sharing = plan.mode is Mode.SHARING
    ranked = sorted(rows, key=lambda row: row.total_s, reverse=True)
    longest = [*itertools.islice((row for row in ranked if len(row.front) > 1), _FRONTS)]
    curves = [
        _Curve(
            elided(str(row.shown.site), _TITLE_LONGEST),
            row.front,
            division.workspace_bytes if is_sharing else plan.limit_bytes,  # its share: no more is known
            (division.workspace_bytes, division.time_s),
            row.look,
        )
        for row in rows
        if row in longest
        for division in [row.shown.division]
    ]
    together = () if is_sharing else _together(rows)  # what shares are worth, an integer programme tells
    if len(together) < 2:
        return curves
    now = (plan.workspace_bytes, plan.time_s)
    return [_Curve("all convolutions (black: the plan)", together, plan.limit_bytes, now, _ALL), *curves]


def _draw_fronts(part: "SubFigure", curves: Sequence[_Curve], plan: Plan) -> None:
    """Draw some fronts, each for itself."""
    what = "smaller share" if plan.mode is Mode.SHARING else "lower limit for each"
    part.suptitle(
        f"What a {what} would cost, where most time goes and there is a choice: predicted ms over workspace"
    )
    lines = math.ceil(len(curves) / _FRONT_COLUMNS)
    every = [*part.subplots(lines, _FRONT_COLUMNS, squeeze=False).flat]
    for axes, curve in zip(every, curves, strict=False):
        _draw_front(axes, curve, plan)
    for axes in every[len(curves) :]:
        axes.set_axis_off()


def _draw_front(axes: "Axes", curve: _Curve, plan: Plan) -> None:
    """Draw the least time within each workspace: steps, as nothing lies between two divisions."""
    n_bytes, ms = [each for each, _ in curve.front], [seconds / _MS for _, seconds in curve.front]
    ends = [*n_bytes, max(curve.room_bytes, n_bytes[-1])]
    axes.step(ends, [*ms, ms[-1]], where="post", color=GREY, linewidth=1)
    axes.plot(n_bytes, ms, ".", markersize=4, color=GREY)
    axes.plot(curve.now[0], curve.now[1] / _MS, markersize=5, **curve.look.mark)
    drawing.scale_bytes(axes, [plan.limit_bytes])
    if plan.mode is Mode.REUSE:  # in sharing mode it is the limit of a sum
        drawing.draw_limit(axes, plan.limit_bytes)
    axes.set_ylim(0, _HEADROOM * max(*ms, curve.now[1] / _MS))
    axes.set_title(curve.title, loc="left")
