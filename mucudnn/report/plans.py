"""Plans as text: what every convolution ran before and runs now; measures nothing."""

import itertools
import math
from collections.abc import Sequence

from mucudnn.choices import Mode
from mucudnn.division import Division
from mucudnn.evidence import CallEvidence, FrozenEvidence
from mucudnn.intervals import CONFIDENCE, TOLERANCE, Estimate, median
from mucudnn.plan import Assignment, Plan
from mucudnn.profile import Environment
from mucudnn.report.table import Row, table
from mucudnn.report.totals import (
    Totals,
    comparisons_at,
    is_base_over_share,
    is_kept,
    seen_at,
    speedup_at,
    workspace_at,
)
from mucudnn.report.words import DEFAULT_WIDTH, describe_environment, describe_shape, render_notes
from mucudnn.sizes import format_bytes

_PERCENT = f"{CONFIDENCE * 100:g} %"
_TITLE = f"Before: PyTorch's own convolutions. Times: median and {_PERCENT} interval in ms."
_HEADINGS = ("", "before, ms", "workspace", "now runs", "now, ms", "workspace", "speedup", "verdict")
_ALIGNMENT = "<>><>>><"

_TIMES = (
    "Medians of {} rounds, each of which ran all rivals once in an order drawn anew{}, on the same operands, "
    "warm as the caches keep them; intervals come from ranks, no distribution is assumed."
)
_VERDICTS = (
    "own: PyTorch's own stays, as nothing was FASTER, alone and in the whole call. Else the speedup is the "
    "median of before / now over the rounds (--json has its interval): FASTER or SLOWER if the "
    f"{_PERCENT} interval of now / before lies wholly more than {TOLERANCE * 100:g} % from 1, SAME if wholly "
    "within, else AMBIGUOUS; limit: there is no base{}. Comparisons made: {}."
)
_FROZEN = (
    "Graphs that torch.compile freezes for inference hold PyTorch's own with its filters packed beforehand. "
    "Against that {} of {} convolutions are faster; the others are PyTorch's own there: {} before, {} now."
)

_CALLS = (
    "What is faster alone must be so in the whole call too: forward pass and gradients as the model runs "
    "them, with what Python costs, against PyTorch's own wherever the limit lets it run. A row `call` shows "
    "that; unless it is FASTER, all sites of that call that may stay PyTorch's own do (undone). What was "
    "FASTER was timed once more, after all others, and the row shows these rounds. Calls compared: {}."
)
_RUNS = (
    "An algorithm and its micro-batches, number × samples: winograd4 2×32 is two of 32 samples; aten is "
    "PyTorch's own convolution."
)
_NO_GAIN = " Within this limit nothing is faster than PyTorch's own."
_OVER_SHARE = "; share: the base takes more than the site's share and was run to compare only"
_PREDICTED = (
    "Sites whose rivals a recording never had in the same rounds: {}. Their times, before and now, add up "
    "what it says of the parts, and so do the ends of their intervals (n: so few samples have none); nothing "
    "was run. The speedup is before / now: FASTER or SLOWER if now / before is more than "
    f"{TOLERANCE * 100:g} % from 1 wherever in their intervals both times lie, SAME if nowhere, else "
    "AMBIGUOUS; own: PyTorch's own stays{}; limit: there is no base."
)
_VARYING = (
    "{} of {} sites run an algorithm of which cuDNN says that equal operands may give other last bits in "
    "another run; with torch.backends.cudnn.deterministic = True, set before tuning, none does."
)
_WAITING_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Whoever has set one of them has decided how idle threads wait."""

_WAITING = (
    "After an operation OpenMP's idle threads spin and take the cores of worker threads meanwhile. Setting "
    "GOMP_SPINCOUNT in the environment shortens that; mucudnn info measures what it costs here."
)
_MEASURED_ONCE = (
    "Measurements: {}, sites: {}; those with the same problem and the same division were measured once and "
    "show the same numbers."
)


def render_plan(plan: Plan, width: int = DEFAULT_WIDTH) -> str:
    """Return a plan for people to read: a row for each op of each convolution, and what they add up to.

    Plain text, without a line break at its end. Nothing is cut off: notes have lines of at most `width`
    columns, rows of the table are as long as they must be, mostly some 120 columns.
    """
    return "\n".join([*_table(plan), "", *_notes(plan, width)])


def waits_by_default(environment: Environment) -> bool:
    """Return whether idle threads of the processor wait as OpenMP sees fit: nobody has said how."""
    policy = environment.policy
    has_idle_threads = environment.backend == "cpu" and policy.get("threads", "1") != "1"
    return has_idle_threads and not any(name in policy for name in _WAITING_VARIABLES)


def _spins_beside_workers(environment: Environment) -> bool:
    """Return whether idle threads take the cores of workers, which a team's do not: they are its workers."""
    return environment.policy.get("workers", "pool") == "pool" and waits_by_default(environment)


def describe_runs(division: Division) -> list[str]:
    """Return what a division runs, such as ["winograd4 4×16"]: four parts of sixteen samples."""
    runs = itertools.groupby(division.parts, key=lambda part: (part.algorithm, part.batch))
    return [f"{name.partition(':')[2] or name} {len(list(parts))}×{batch}" for (name, batch), parts in runs]


def _measurements(plan: Plan) -> list[Assignment]:
    """One site of each problem and division that was timed: the others have its numbers."""
    evidence = ((assigned, seen_at(assigned)) for assigned in plan.assignments)
    timed = [assigned for assigned, seen in evidence if seen.chosen is not None and not seen.is_predicted]
    return list({(assigned.problem, assigned.division.key): assigned for assigned in timed}.values())


# The table


def _table(plan: Plan) -> list[str]:
    """A line of headings; then for each convolution a line with its name and shape, and a row for each op.

    A last row is that of the whole call, if it was timed.
    """
    calls = {(call.path, call.variant): _call_cells(call) for call in plan.calls}
    convolutions = []
    for heading, assignments in itertools.groupby(plan.assignments, key=_heading):
        sites = [*assignments]
        whole = calls.get((sites[0].site.path, sites[0].site.variant))
        rows = [_cells(assigned, plan.mode) for assigned in sites]
        convolutions.append((heading, rows if whole is None else [*rows, whole]))
    return [_TITLE, "", *table(_HEADINGS, _ALIGNMENT, convolutions)]


def _heading(assigned: Assignment) -> str:
    return f"{assigned.site.place}  {describe_shape(assigned.problem)}"


def _cells(assigned: Assignment, mode: Mode) -> tuple[str, ...]:
    """Return the texts of a row, in the order of the headings."""
    seen, speedup = seen_at(assigned), speedup_at(assigned)
    return (
        f"  {assigned.site.op}",
        _why_no_base(assigned) if seen.reference is None else _time(seen.reference),
        "-" if seen.reference_workspace_bytes is None else format_bytes(seen.reference_workspace_bytes),
        "\n+ ".join(describe_runs(assigned.division)),
        "not timed" if seen.chosen is None else _time(seen.chosen),
        format_bytes(workspace_at(assigned)),
        "-" if speedup is None else f"{speedup:.2f}",
        _verdict(assigned, mode),
    )


def _call_cells(call: CallEvidence) -> Row:
    """Return the texts of the row of a whole call, in the order of the headings."""
    return (
        "  call",
        _time(call.reference),
        "",
        "" if call.is_faster else "undone",
        _time(call.divided),
        "",
        f"{call.speedup.median:.2f}",
        str(call.verdict),
    )


def _verdict(assigned: Assignment, mode: Mode) -> str:
    if assigned.evidence is None:
        return "-"
    verdict = "limit" if assigned.evidence.reference is None else str(assigned.evidence.verdict or "-")
    if is_kept(assigned):
        verdict = "own"
    marks = [
        *(["share"] if is_base_over_share(assigned, mode) else []),
        *(["predicted"] if assigned.evidence.is_predicted else []),
    ]
    return ", ".join([verdict, *marks])


def _why_no_base(assigned: Assignment) -> str:
    return "not timed" if assigned.evidence is None else "not run: over the limit"


def _time(estimate: Estimate) -> str:
    """Return milliseconds in four digits, none of them below 0.1 µs, and the interval if there is one."""
    middle, low, high = (seconds * 1e3 for seconds in (estimate.median, estimate.low, estimate.high))
    digits = _decimals(middle)
    if not (math.isfinite(low) and math.isfinite(high)):
        return f"{middle:.{digits}f} (n = {estimate.samples})"
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _decimals(ms: float) -> int:
    return 4 if ms <= 0 else min(4, max(0, 3 - math.floor(math.log10(ms))))


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.{_decimals(seconds * 1e3)}f} ms"


# The notes below the table


def _notes(plan: Plan, width: int) -> list[str]:
    totals = Totals.of(plan)
    untimed = f", {totals.untimed} undivided and not timed" if totals.untimed else ""
    notes = [
        ("total", _total_note(totals)),
        (
            "sites",
            f"{totals.divided} divided, {totals.exchanged} undivided with another algorithm, "
            f"{totals.kept} left as before{untimed}.{_NO_GAIN * (totals.kept == totals.sites)}",
        ),
        ("now runs", _RUNS),
        ("workspace", _workspace_note(plan)),
        ("chosen in", _chosen_note(plan)),
        *describe_environment(plan.environment).items(),
        *_repeating_notes(plan),
        *([("idle threads", _WAITING)] if _spins_beside_workers(plan.environment) else []),
        *_untouched_notes(plan),
        *_predicted_notes(plan),
        *_evidence_notes(plan),
    ]
    return render_notes(notes, width)


def _total_note(totals: Totals) -> str:
    text = "No site has both a time before and a time now, so there is nothing to add up."
    if totals.speedup is not None:
        text = (
            f"{totals.paired} of {totals.sites} sites have both times: "
            f"{_milliseconds(totals.before_s)} before, {_milliseconds(totals.now_s)} now, "
            f"speedup {totals.speedup:.2f} (before / now, of these sums of medians"
            f"{_ends(totals.ends, 'site')})."
        )
        if totals.predicted:
            text += f" Of these, {totals.predicted} are predicted."
    if totals.without_base:
        text += (
            f" Sites without a time before: {totals.without_base}, "
            f"now {_milliseconds(totals.without_base_s)}; "
            "PyTorch's own needs more workspace than the limit, so it was not run, and may be faster."
        )
    if totals.calls_speedup is not None:
        text += (
            f" Timed as whole calls too: {totals.calls} convolution{'s' * (totals.calls != 1)}, "
            f"{_milliseconds(totals.calls_before_s)} before, {_milliseconds(totals.calls_now_s)} now, "
            f"speedup {totals.calls_speedup:.2f}{_ends(totals.calls_ends, 'call')}; "
            f"{totals.calls_undone} of them undone."
        )
    return text


def _ends(ends: tuple[float, float] | None, of: str) -> str:
    """Return, behind a speedup, what it is where all that it adds up lies at the ends of the intervals."""
    if ends is None:
        return ""
    return f"; {ends[0]:.2f} if each {of} is at the lower end of its interval, {ends[1]:.2f} if at the upper"


def _chosen_note(plan: Plan) -> str:
    bound = "" if plan.max_error is None else f"max_error {plan.max_error:g} (but for PyTorch's own), "
    return f"mode {plan.mode}, policy {plan.policy}, {bound}mucudnn {plan.version}"


def _workspace_note(plan: Plan) -> str:
    """Return what the plan allots, and what its rows show where that is more: how it was weighed differs."""
    is_sharing = plan.mode is Mode.SHARING
    shown = [workspace_at(assigned) for assigned in plan.assignments]
    seen_bytes = sum(shown) if is_sharing else max(shown, default=0)
    seen = f", and {format_bytes(seen_bytes)} were seen" if seen_bytes > plan.workspace_bytes else ""
    needed, limit = format_bytes(plan.workspace_bytes), format_bytes(plan.limit_bytes)
    if is_sharing:
        return f"All sites together are allotted {needed}{seen}; the limit for their sum is {limit}."
    return f"The largest site is allotted {needed}{seen}; the limit for each is {limit}."


def _repeating_notes(plan: Plan) -> list[tuple[str, str]]:
    """Say how many sites may give other bits in another run; nothing if none may."""
    varying = sum(not assigned.division.is_deterministic for assigned in plan.assignments)
    return [("repeating", _VARYING.format(varying, len(plan.assignments)))] if varying else []


def _untouched_notes(plan: Plan) -> list[tuple[str, str]]:
    texts = [f"{path or 'the model itself'}: {reason}." for path, reason in plan.untouched]
    return [("" if number else "untouched", text) for number, text in enumerate(texts or ["Nothing."])]


def _predicted_notes(plan: Plan) -> list[tuple[str, str]]:
    predicted = [assigned for assigned in plan.assignments if seen_at(assigned).is_predicted]
    return (
        [("predicted", _PREDICTED.format(len(predicted), _share_note(plan, predicted)))] if predicted else []
    )


def _share_note(plan: Plan, assignments: Sequence[Assignment]) -> str:
    """Say what `share` means, if one of these sites is marked so."""
    is_over_share = any(is_base_over_share(assigned, plan.mode) for assigned in assignments)
    return _OVER_SHARE if is_over_share else ""


def _frozen_notes(frozen: Sequence[FrozenEvidence]) -> list[tuple[str, str]]:
    """Say what graphs that are frozen run, and what that is worth; nothing if that was not timed."""
    times = [
        (seen.times.reference.median, (seen.times.reference if seen.is_own else seen.times.divided).median)
        for seen in frozen
        if seen.times is not None
    ]
    if not times:
        return []
    before, now = (_milliseconds(math.fsum(some)) for some in zip(*times, strict=True))
    faster = sum(not seen.is_own for seen in frozen)
    return [("frozen", _FROZEN.format(faster, len(times), before, now))]


def _evidence_notes(plan: Plan) -> list[tuple[str, str]]:
    """Say how the times came about and what they are worth; nothing if there are none."""
    measurements = _measurements(plan)
    if not measurements:
        return []
    evidence = [seen_at(assigned) for assigned in measurements]
    rounds = sorted({seen.chosen.samples for seen in evidence if seen.chosen})
    errors = [seen.error for seen in evidence if seen.error is not None]
    has_predicted = any(seen_at(assigned).is_predicted for assigned in plan.assignments)
    but_predicted = " (but for the sites that are predicted)" if has_predicted else ""
    how_many = " to ".join(map(str, dict.fromkeys((rounds[0], rounds[-1]))))
    calls = {(call.reference, call.divided) for call in plan.calls}  # equal ones were timed once
    return [
        ("times", _TIMES.format(how_many, but_predicted)),
        (
            "verdicts",
            _VERDICTS.format(_share_note(plan, plan.assignments), sum(map(comparisons_at, measurements))),
        ),
        *([("calls", _CALLS.format(len(calls)))] if calls else []),
        *_frozen_notes(plan.frozen),
        ("measured once", _MEASURED_ONCE.format(len(measurements), len(plan.assignments))),
        ("prediction", _prediction_note(measurements)),
        *(("error", f"At most {error:.1e} relative to float64.") for error in sorted(errors)[-1:]),
    ]


def _prediction_note(measurements: Sequence[Assignment]) -> str:
    """Tell how far the sum of a division's parts, from the profiles, is from what the whole division took."""
    ratios = [
        chosen.median / assigned.division.time_s
        for assigned in measurements
        if (chosen := seen_at(assigned).chosen) and assigned.division.time_s > 0
    ]
    if not ratios:
        return "The profiles predict nothing."
    return (
        f"Divisions take {min(ratios):.2f} to {max(ratios):.2f} times (median {median(ratios):.2f}) what the "
        "profiles of their parts add up to."
    )
