"""Plans as text: what every convolution ran before and runs now; measures nothing."""

import itertools
from collections.abc import Callable, Sequence

from mucudnn.division import Division
from mucudnn.evidence import CallEvidence
from mucudnn.plan import Assignment, Plan
from mucudnn.profile import is_own
from mucudnn.report.plan_notes import (
    AS_BEFORE,
    KEPT,
    OVER_LIMIT,
    OVER_SHARE,
    PARTLY,
    PREDICTED,
    TRIED,
    plan_notes,
)
from mucudnn.report.sites import (
    is_base_over_share,
    speedup_at,
    workspace_at,
    workspace_before_at,
)
from mucudnn.report.table import Row, table
from mucudnn.report.words import (
    DEFAULT_WIDTH,
    PERCENT,
    PLAN_SOURCE,
    check_told,
    describe_ms,
    describe_shape,
)
from mucudnn.sizes import format_bytes
from mucudnn.standing import is_base_over_limit, partly_called

_TITLE = (
    f"Before: PyTorch's own convolution. Times: median and {PERCENT} interval in ms. "
    "Speedup: median of the rounds."
)
_HEADINGS = ("", "before, ms", "workspace", "now runs", "now, ms", "workspace", "speedup", "verdict")
_ALIGNMENT = "<>><>>><"


def render_plan(plan: Plan, width: int = DEFAULT_WIDTH, *, brief: bool = False) -> str:
    """Return a plan for people to read: a row for each op of each convolution, and what they add up to.

    Plain text, without a line break at its end. Nothing is cut off: notes have lines of at most `width`
    columns, rows of the table are as long as they must be, mostly some 120 columns. A convolution whose rows
    would be those of another one names that one instead. In brief, what words mean and how and where it was
    measured is left out.

    Raises:
        OptionError: it is no plan.
    """
    check_told(plan, Plan, PLAN_SOURCE)
    return "\n".join([*_table(plan), "", *plan_notes(plan, width, brief=brief)])


def describe_runs(division: Division) -> list[str]:
    """Return what a division runs, such as ["winograd4 4×16"]: four parts of sixteen samples."""
    runs = itertools.groupby(division.parts, key=lambda part: (part.algorithm, part.batch))
    return [f"{name.partition(':')[2] or name} {len(list(parts))}×{batch}" for (name, batch), parts in runs]


def _table(plan: Plan) -> list[str]:
    """A line of headings; then for each convolution a line with its name and shape, and a row for each op.

    A last row is that of the whole call, if it was timed.
    """
    calls = {(call.path, call.variant): call for call in plan.calls}
    partly = partly_called(plan)
    first_places: dict[tuple[str, tuple[Row, ...]], str] = {}
    groups: list[tuple[str, Sequence[Row]]] = []
    for (place, shape), assignments in itertools.groupby(plan.assignments, key=_place_and_shape(plan)):
        sites = [*assignments]
        rows = [_cells(assigned, plan) for assigned in sites]
        call = calls.get((sites[0].site.path, sites[0].site.variant))
        if call is not None:
            runs_own = any(is_own(part.algorithm) for each in sites for part in each.division.parts)
            is_partly = (call.path, call.variant) in partly
            rows.append(_call_cells(call, is_partly=is_partly, undone=KEPT if runs_own else AS_BEFORE))
        first = first_places.setdefault((shape, tuple(rows)), place)
        groups.append((f"{place}  {shape}", rows) if first == place else (f"{place}  as {first}", ()))
    return [_TITLE, "", *table(_HEADINGS, _ALIGNMENT, groups)]


def _place_and_shape(plan: Plan) -> Callable[[Assignment], tuple[str, str]]:
    """Return what tells where an assignment is and what its convolution is like."""

    def tell(assigned: Assignment) -> tuple[str, str]:
        is_transposed = assigned.site.path in plan.transposed
        return assigned.site.place, describe_shape(assigned.problem, is_transposed)

    return tell


def _cells(assigned: Assignment, plan: Plan) -> Row:
    """Return the texts of a row, in the order of the headings."""
    seen, speedup, before_bytes = assigned.seen, speedup_at(assigned), workspace_before_at(assigned)
    return (
        f"  {assigned.site.op}",
        _why_no_base(assigned) if seen.reference is None else describe_ms(seen.reference),
        "-" if before_bytes is None else format_bytes(before_bytes),
        "\n+ ".join(describe_runs(assigned.division)),
        "not timed" if seen.chosen is None else describe_ms(seen.chosen),
        format_bytes(workspace_at(assigned)),
        "-" if speedup is None else f"{speedup:.2f}",
        _verdict(assigned, plan),
    )


def _call_cells(call: CallEvidence, *, is_partly: bool, undone: str) -> Row:
    """Return the texts of the row of a whole call, in the order of the headings.

    Args:
        call: that was timed.
        is_partly: whether PyTorch's own may not run one of its ops.
        undone: verdict if it is not faster.
    """
    name, before, mark = "  call", describe_ms(call.reference), f", {PARTLY}" * is_partly
    if not call.is_faster:
        return name, before, "", f"{TRIED}: {describe_ms(call.divided)}", before, "", "1.00", undone + mark
    speedup = f"{call.speedup.median:.2f}"
    return name, before, "", "", describe_ms(call.divided), "", speedup, f"{call.verdict}{mark}"


def _verdict(assigned: Assignment, plan: Plan) -> str:
    if assigned.evidence is None:
        return "-"
    seen, predicted = assigned.evidence, [PREDICTED] if assigned.evidence.is_predicted else []
    if assigned.is_kept:
        return ", ".join([KEPT, *predicted])
    verdict = OVER_LIMIT if seen.reference is None else str(seen.verdict or "-")
    share = [OVER_SHARE] if is_base_over_share(assigned, plan.mode) else []
    limit = [OVER_LIMIT] if is_base_over_limit(seen, plan.limit_bytes) else []
    return ", ".join([verdict, *share, *limit, *predicted])


def _why_no_base(assigned: Assignment) -> str:
    return "not timed" if assigned.evidence is None else "not run"
