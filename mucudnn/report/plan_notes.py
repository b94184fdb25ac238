"""What stands below the table of a plan: what it adds up to, what its words mean, where it was measured."""

import math
from collections.abc import Sequence

from mucudnn.choices import Mode
from mucudnn.evidence import FrozenEvidence
from mucudnn.intervals import TOLERANCE, median
from mucudnn.plan import Assignment, ConvSite, Plan
from mucudnn.problem import ConvOp
from mucudnn.profile import is_own
from mucudnn.report.algorithm_words import meanings
from mucudnn.report.plan_advice import compiler_notes, host_notes, layout_notes, waiting_notes
from mucudnn.report.sites import comparisons_at, is_base_over_share, workspace_at
from mucudnn.report.totals import CallTotals, Totals
from mucudnn.report.words import BOUND, PERCENT, decimals_of_ms, describe_environment, render_notes
from mucudnn.sizes import format_bytes
from mucudnn.standing import MEASURED_ANEW, disturbance, inaccuracy, is_base_over_limit, partly_called

KEPT = "own"
"""Verdict on what stays PyTorch's own."""
OVER_LIMIT = "over limit"
"""Verdict where PyTorch's own may not run."""
OVER_SHARE = "share"
"""Mark of a verdict where PyTorch's own takes more than the site has in sharing mode."""
PARTLY = "partly"
"""Mark of a verdict on a call of which PyTorch's own may not run every op, so that its time is not known."""
PREDICTED = "predicted"
"""Mark of a verdict that no run stands behind."""
AS_BEFORE = "as before"
"""Verdict on such a call that is not faster, if none of its ops is PyTorch's own."""
TRIED = "tried"
"""What stands before the time of a call that was not kept."""

_NO_TOTAL = "No site has both a time before and a time now, so there is nothing to add up."
_TOTAL = "{} of {} sites have a time before and now: {} before, {} now, {:.2f} times as fast{}."
_WITHOUT_BASE = (
    "{} of {} sites, {} now. PyTorch's own needs more workspace there than the limit allows, so it was not "
    "timed: the speedup is unknown, and PyTorch's own may be faster."
)
_WHOLE_CALLS = (
    "{} convolution{} timed as the model calls {}, with the gradients it needs: {} before, {} now, {:.2f} "
    "times as fast{}{}."
)
_CALLS_OVER = (
    "{} convolution{} of which PyTorch's own may not run every op: timed as whole calls too, but no speedup "
    "is counted for them."
)
_UNCALLED = (
    "Not timed for {} convolution{}, whose sites are chosen by their own times alone, without the overhead "
    "of Python and autograd."
)
_ENDS = " ({:.2f} if each {} is at the lower end of its interval, {:.2f} if at the upper)"
_SLOWER = "These convolutions take {:.2f} times as long as before."
_SHARED = " In sharing mode each has only a share of the limit: a larger limit, or mode reuse, may be faster."
_NOT_COUNTED = "Everything but convolutions. mucudnn.compare(model, step) measures what a whole step gains."
_NO_GRADIENTS = "Gradients: the model was tuned for inference, or none were needed or asked for."
_NO_GAIN = " Within this limit nothing is faster than PyTorch's own."
_RUNS = (
    "An algorithm and its micro-batches, number × samples: winograd4 2×32 is two of 32 samples; aten is "
    "PyTorch's own. fprop is the forward pass, dgrad the gradient of the input (the other way round in a "
    "transposed convolution), wgrad that of the weights. Each of the three in one convolution is a site."
)
_TIMES = (
    "Medians of {} rounds{}. Each round timed the rivals in random order on the same operands, short calls "
    "several times in a row, with warm caches. Intervals come from ranks and assume no "
    "distribution. The speedup is the median over the rounds of before / now (--json has its interval), so "
    "it may differ from the quotient of the two medians."
)
_VERDICTS = (
    f"FASTER if the whole {PERCENT} interval of now / before is more than {BOUND} below 1, SLOWER if more "
    f"than {BOUND} above, SAME if within {BOUND}, else AMBIGUOUS. {KEPT}: PyTorch's own stays, because "
    f"nothing was FASTER{{}}. {OVER_LIMIT}: {{}}{{}}. Comparisons made: {{}}; with {PERCENT} intervals, one "
    "in twenty may be wrong by chance."
)
_FORBIDDEN = "PyTorch's own needs more than the limit, so it may not run"
_BEYOND = (
    "PyTorch's own needs more than the limit. If it has a time before, it was run for comparison only; what "
    "runs now is the fastest that fits, even if it is SLOWER"
)
_CALLS = (
    "A call is the forward pass and the gradients that the model needs, with Python's overhead. Before, "
    f"PyTorch's own runs every op.{{}} Unless the call is FASTER, it stays {AS_BEFORE} ({TRIED}: the time of "
    "what was not kept). A call that was FASTER was timed again after all others, and its row shows those "
    "rounds. Where compare has put PyTorch's own back, the row shows all calls of a step. Calls compared: {}."
)
_PARTLY = (
    f" {PARTLY}: the limit forbids PyTorch's own for some ops. Before, these run what they run now, or the "
    "best undivided algorithm if nothing else differs; PyTorch's own may be faster than both."
)
_FROZEN = (
    "In graphs that torch.compile freezes for inference, PyTorch's own has its filters packed beforehand. "
    "{} of {} convolutions are faster than that; the others run PyTorch's own there: {} before, {} now."
)
_SHARES = f"; {OVER_SHARE}: PyTorch's own needs more than the site's share, and was run for comparison only"
_PREDICTIONS = (
    "Sites whose rivals the recording never timed in the same rounds: {}. Nothing was run: their times, and "
    "the ends of the intervals, are sums over the recorded parts (n: too few samples for an interval). The "
    f"speedup is before / now: FASTER or SLOWER if now / before is more than {BOUND} from 1 wherever in "
    f"their intervals both times lie, SAME if nowhere, else AMBIGUOUS; {KEPT}: PyTorch's own stays{{}}; "
    f"{OVER_LIMIT}: it needs more than the limit."
)
_VARYING = (
    "{} of {} sites run an algorithm that cuDNN calls nondeterministic: the last bits of its results may "
    "differ from run to run. Setting torch.backends.cudnn.deterministic = True before tuning avoids that."
)
_ERROR = "At most {:.1e} relative to float64."
_OWN_ERROR = "At most {:.1e} relative to float64 where PyTorch's own runs ({}), for which there is no bound."
_MEASURED_ONCE = (
    "Measurements: {}, sites: {}; the same problem and division is measured once. A convolution `as` another "
    "one has the same rows."
)
_PREDICTION = "Whole divisions took {} to {} times (median {}) the sum of their parts' measured times."


def plan_notes(plan: Plan, width: int, *, brief: bool = False) -> list[str]:
    """Return the lines of the notes, each of at most `width` columns: all, or in brief those on this plan."""
    totals = Totals.of(plan)
    found = [
        *_total_notes(totals, plan.mode),
        *_call_total_notes(CallTotals.of(plan)),
        *_uncounted_notes(totals),
        *_doubt_notes(plan),
        ("sites", _sites_note(totals)),
        ("workspace", _workspace_note(plan)),
        *layout_notes(plan),
        *host_notes(plan),
        *compiler_notes(plan.environment),
        *_repeating_notes(plan),
        *_untouched_notes(plan),
    ]
    if brief:
        return render_notes(found, width)
    return render_notes(
        [
            *found,
            ("now runs", _RUNS),
            *_name_notes(plan),
            *_predicted_notes(plan),
            *_evidence_notes(plan),
            ("chosen in", _chosen_note(plan)),
            *describe_environment(plan.environment).items(),
            *waiting_notes(plan.environment),
        ],
        width,
    )


# What the rows add up to


def _total_notes(totals: Totals, mode: Mode) -> list[tuple[str, str]]:
    notes = [("total", _total_note(totals))]
    if totals.speedup is not None and 0 < totals.speedup < 1 - TOLERANCE:
        notes.append(("slower", _SLOWER.format(1 / totals.speedup) + _SHARED * (mode is Mode.SHARING)))
    if totals.without_base:
        now = _milliseconds(totals.without_base_s)
        notes.append((OVER_LIMIT, _WITHOUT_BASE.format(totals.without_base, totals.sites, now)))
    return notes


def _call_total_notes(totals: CallTotals) -> list[tuple[str, str]]:
    notes = []
    if totals.speedup is not None:
        notes.append(
            _WHOLE_CALLS.format(
                totals.timed,
                "s" * (totals.timed != 1),
                "it" if totals.timed == 1 else "them",
                _milliseconds(totals.before_s),
                _milliseconds(totals.now_s),
                totals.speedup,
                _ends(totals.ends, "call"),
                f"; {totals.undone} tried, but not kept" if totals.undone else "",
            )
        )
    if totals.over:
        notes.append(_CALLS_OVER.format(totals.over, "s" * (totals.over != 1)))
    if totals.untimed:
        notes.append(_UNCALLED.format(totals.untimed, "s" * (totals.untimed != 1)))
    return [("" if number else "whole calls", text) for number, text in enumerate(notes)]


def _uncounted_notes(totals: Totals) -> list[tuple[str, str]]:
    return [] if totals.speedup is None else [("not counted", _NOT_COUNTED)]


def _doubt_notes(plan: Plan) -> list[tuple[str, str]]:
    """Say how many of the times others may have moved, and where PyTorch's own is wrong; nothing if none."""
    disturbed, wrong = disturbance(plan), inaccuracy(plan)
    return [
        *([] if disturbed is None else [("disturbed", f"{disturbed} {MEASURED_ANEW}")]),
        *([] if wrong is None else [("wrong", wrong)]),
    ]


def _total_note(totals: Totals) -> str:
    if totals.speedup is None:
        return _NO_TOTAL
    before, now = _milliseconds(totals.before_s), _milliseconds(totals.now_s)
    ends = _ends(totals.ends, "site")
    text = _TOTAL.format(totals.paired, totals.sites, before, now, totals.speedup, ends)
    return f"{text} Of these, {totals.predicted} are predicted." if totals.predicted else text


def _ends(ends: tuple[float, float] | None, of: str) -> str:
    """Return, behind a speedup, what it is where all that it adds up lies at the ends of the intervals."""
    return "" if ends is None else _ENDS.format(ends[0], of, ends[1])


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.{decimals_of_ms(seconds * 1e3)}f} ms"


def _sites_note(totals: Totals) -> str:
    """Return how many sites run how."""
    counts = (
        f"{totals.divided} in micro-batches, {totals.exchanged} undivided with another algorithm, "
        f"PyTorch's own at {totals.kept}"
    )
    untimed = f", {totals.untimed} undivided and not timed" if totals.untimed else ""
    return f"{counts}{untimed}.{_NO_GAIN * (totals.kept == totals.sites)}"


def _workspace_note(plan: Plan) -> str:
    """Return what the plan allots, and what its rows show where that is more: how it was weighed differs."""
    is_sharing = plan.mode is Mode.SHARING
    shown = [workspace_at(assigned) for assigned in plan.assignments]
    seen_bytes = sum(shown) if is_sharing else max(shown, default=0)
    needed, taken, limit = map(format_bytes, (plan.workspace_bytes, seen_bytes, plan.limit_bytes))
    seen = f", and {taken} were seen" if seen_bytes > plan.workspace_bytes and taken != needed else ""
    if is_sharing:
        noise = " (Each is weighed to 64 KiB.)" if seen_bytes > plan.limit_bytes else ""
        return f"All sites together are allotted {needed}{seen}; the limit for their sum is {limit}.{noise}"
    return f"The largest site is allotted {needed}{seen}; the limit for each is {limit}."


def _repeating_notes(plan: Plan) -> list[tuple[str, str]]:
    """Say how many sites may give other bits in another run; nothing if none may."""
    varying = sum(not assigned.division.is_deterministic for assigned in plan.assignments)
    return [("repeating", _VARYING.format(varying, len(plan.assignments)))] if varying else []


def _untouched_notes(plan: Plan) -> list[tuple[str, str]]:
    texts = [f"{path or 'the model itself'}: {reason}." for path, reason in plan.untouched]
    forward = {True: ConvOp.DGRAD, False: ConvOp.FPROP}
    if all(each.site.op is forward[each.site.path in plan.transposed] for each in plan.assignments):
        texts.append(_NO_GRADIENTS)
    return [
        ("" if number else "not tuned", text)
        for number, text in enumerate(texts or ["Nothing: every convolution was tuned."])
    ]


# How it came about


def _name_notes(plan: Plan) -> list[tuple[str, str]]:
    ids = {part.algorithm for assigned in plan.assignments for part in assigned.division.parts}
    told = meanings(each.partition(":")[2] for each in ids)
    return [] if told is None else [("names", told)]


def _predicted_notes(plan: Plan) -> list[tuple[str, str]]:
    predicted = [assigned for assigned in plan.assignments if assigned.seen.is_predicted]
    if not predicted:
        return []
    return [(PREDICTED, _PREDICTIONS.format(len(predicted), _share_note(plan, predicted)))]


def _share_note(plan: Plan, assignments: Sequence[Assignment]) -> str:
    """Say what `share` means, if one of these sites is marked so."""
    is_over_share = any(is_base_over_share(assigned, plan.mode) for assigned in assignments)
    return _SHARES if is_over_share else ""


def _evidence_notes(plan: Plan) -> list[tuple[str, str]]:
    """Say how the times came about and what they are worth, as far as there are any."""
    measurements = _measurements(plan)
    return [
        *_verdict_notes(plan, measurements),
        *_call_notes(plan),
        *_frozen_notes(plan.frozen),
        *_time_notes(plan, measurements),
        *_error_notes(plan),
        *_measurement_notes(plan, measurements),
    ]


def _verdict_notes(plan: Plan, measurements: Sequence[Assignment]) -> list[tuple[str, str]]:
    if not measurements:
        return []
    alone = " both alone and in the whole call" if plan.calls else ""
    comparisons = sum(map(comparisons_at, measurements))
    is_beyond = any(is_base_over_limit(each.seen, plan.limit_bytes) for each in plan.assignments)
    over_limit = _BEYOND if is_beyond else _FORBIDDEN
    told = _VERDICTS.format(alone, over_limit, _share_note(plan, plan.assignments), comparisons)
    return [("verdicts", told)]


def _time_notes(plan: Plan, measurements: Sequence[Assignment]) -> list[tuple[str, str]]:
    if not measurements:
        return []
    rounds = sorted({seen.chosen.samples for each in measurements if (seen := each.seen).chosen})
    how_many = " to ".join(map(str, dict.fromkeys((rounds[0], rounds[-1]))))
    has_predicted = any(assigned.seen.is_predicted for assigned in plan.assignments)
    return [("times", _TIMES.format(how_many, " (predicted sites aside)" * has_predicted))]


def _measurement_notes(plan: Plan, measurements: Sequence[Assignment]) -> list[tuple[str, str]]:
    if not measurements:
        return []
    return [
        ("prediction", _prediction_note(measurements)),
        ("measured once", _MEASURED_ONCE.format(len(measurements), len(plan.assignments))),
    ]


def _error_notes(plan: Plan) -> list[tuple[str, str]]:
    """Tell the largest error of what was chosen, and apart where PyTorch's own runs, which has no bound.

    Sites where it is wrong are named elsewhere.

    Of sites with equal errors, such as those of equal problems, the first is named.
    """
    errors: dict[bool, list[tuple[float, ConvSite]]] = {True: [], False: []}
    for assigned in plan.assignments:
        seen = assigned.seen
        if seen.error is not None and not seen.is_wrong:
            runs_own = any(is_own(part.algorithm) for part in assigned.division.parts)
            errors[runs_own].append((seen.error, assigned.site))
    texts = [
        text.format(*max(found, key=lambda each: each[0]))
        for text, found in ((_ERROR, errors[False]), (_OWN_ERROR, errors[True]))
        if found
    ]
    return [("" if number else "error", text) for number, text in enumerate(texts)]


def _call_notes(plan: Plan) -> list[tuple[str, str]]:
    calls = {(call.reference, call.divided) for call in plan.calls}  # equal ones were timed once
    return [("calls", _CALLS.format(_PARTLY if partly_called(plan) else "", len(calls)))] if calls else []


def _measurements(plan: Plan) -> list[Assignment]:
    """One site of each problem and division that was timed: the others have its numbers."""
    evidence = ((assigned, assigned.seen) for assigned in plan.assignments)
    timed = [assigned for assigned, seen in evidence if seen.chosen is not None and not seen.is_predicted]
    return list({(assigned.problem, assigned.division.key): assigned for assigned in timed}.values())


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


def _prediction_note(measurements: Sequence[Assignment]) -> str:
    """Tell how far the sum of a division's parts, from the profiles, is from what the whole division took."""
    ratios = [
        chosen.median / assigned.division.time_s
        for assigned in measurements
        if (chosen := assigned.seen.chosen) and assigned.division.time_s > 0
    ]
    if not ratios:
        return "The profiles predict nothing."
    figures = (min(ratios), max(ratios), median(ratios))
    return _PREDICTION.format(*(f"{each:.2f}" if each >= 0.1 else f"{each:.1g}" for each in figures))


def _chosen_note(plan: Plan) -> str:
    bound = "" if plan.max_error is None else f"max_error {plan.max_error:g} (but for PyTorch's own), "
    return f"mode {plan.mode}, policy {plan.policy}, {bound}mucudnn {plan.version}"
