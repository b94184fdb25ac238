"""Plans as JSON values, for programs; measures nothing."""

import dataclasses
import math
from collections.abc import Set

from mucudnn.evidence import CallEvidence, CallTimes, FrozenEvidence
from mucudnn.intervals import Estimate
from mucudnn.plan import Assignment, Plan
from mucudnn.report.sites import is_base_over_share, speedup_at
from mucudnn.report.totals import CallTotals, Totals
from mucudnn.report.words import PLAN_SOURCE, check_told
from mucudnn.standing import partly_called


def plan_as_json(plan: Plan) -> dict[str, object]:
    """Return what `render_plan` tells, as JSON values: seconds and bytes, null where nothing is known.

    `totals` are those of `Totals`, and of `CallTotals` by names of their own; what the profiles predict,
    `predicted_s`, is of all sites, more than those whose times before and now are known. A site's verdict is
    null where PyTorch's own stays (`is_kept`) and where it was not timed, as beyond the limit (`before`).

    Raises:
        OptionError: it is no plan.
    """
    check_told(plan, Plan, PLAN_SOURCE)
    totals, partly = Totals.of(plan), partly_called(plan)
    return {
        "report": "plan",
        "version": plan.version,
        "mode": plan.mode,
        "policy": plan.policy,
        "max_error": plan.max_error,
        "limit_bytes": plan.limit_bytes,
        "workspace_bytes": plan.workspace_bytes,
        "environment": plan.environment.to_json(),
        "totals": {
            **dataclasses.asdict(totals),
            "speedup": totals.speedup,
            **_call_totals_as_json(CallTotals.of(plan)),
            "predicted_s": plan.time_s,
        },
        "sites": [_site_as_json(assigned, plan) for assigned in plan.assignments],
        "calls": [_call_as_json(call, partly) for call in plan.calls],
        "frozen": [_frozen_as_json(seen) for seen in plan.frozen],
        "untouched": [{"path": path, "reason": reason} for path, reason in plan.untouched],
    }


def _call_totals_as_json(totals: CallTotals) -> dict[str, object]:
    return {
        "calls": totals.timed,
        "calls_undone": totals.undone,
        "calls_over": totals.over,
        "uncalled": totals.untimed,
        "calls_before_s": totals.before_s,
        "calls_now_s": totals.now_s,
        "calls_ends": totals.ends,
        "calls_speedup": totals.speedup,
    }


def _site_as_json(assigned: Assignment, plan: Plan) -> dict[str, object]:
    site, seen, division = assigned.site, assigned.seen, assigned.division
    return {
        "path": site.path,
        "op": site.op,
        "variant": site.variant,
        "is_transposed": site.path in plan.transposed,
        "problem": assigned.problem.to_json(),
        "before": {"time": _as_json(seen.reference), "workspace_bytes": seen.reference_workspace_bytes},
        "now": {
            "division": division.key,
            "parts": [{"algorithm": part.algorithm, "batch": part.batch} for part in division.parts],
            "time": _as_json(seen.chosen),
            "predicted_s": division.time_s,
            "workspace_bytes": seen.workspace_bytes,
            "allotted_bytes": division.workspace_bytes,
            "is_deterministic": division.is_deterministic,
        },
        "speedup": speedup_at(assigned),
        "verdict": None if assigned.is_kept else seen.verdict,
        "is_base_over_share": is_base_over_share(assigned, plan.mode),
        "is_kept": assigned.is_kept,
        "error": seen.error,
        "is_wrong": seen.is_wrong,
        "is_predicted": seen.is_predicted,
        "others": seen.others,
        "rejected": [{"division": key, "time": _as_json(estimate)} for key, estimate in seen.rejected],
        "speedups": {key: interval_as_json(estimate) for key, estimate in seen.speedups},
    }


def _call_as_json(call: CallEvidence, partly: Set[tuple[str, int]]) -> dict[str, object]:
    place = {"path": call.path, "variant": call.variant}
    is_partly = (call.path, call.variant) in partly
    return {**place, **_times_as_json(call), "is_undone": not call.is_faster, "is_partly": is_partly}


def _frozen_as_json(seen: FrozenEvidence) -> dict[str, object]:
    return {
        "path": seen.path,
        "variant": seen.variant,
        "workspace_before_bytes": seen.workspace_bytes,
        "is_own": seen.is_own,
        **_times_as_json(seen.times),
    }


def _times_as_json(times: CallTimes | None) -> dict[str, object]:
    return {
        "before": None if times is None else _as_json(times.reference),
        "divided": None if times is None else _as_json(times.divided),
        "speedup": None if times is None else times.speedup.median,
        "speedup_interval": None if times is None else interval_as_json(times.speedup),
        "verdict": None if times is None else times.verdict,
        "others": None if times is None else times.others,
    }


def _as_json(time: Estimate | None) -> dict[str, object] | None:
    """Return a time in seconds."""
    return None if time is None else interval_as_json(time, "_s")


def interval_as_json(estimate: Estimate, unit: str = "") -> dict[str, object]:
    """Return median and ends, with a unit behind their names; ends that do not exist are null."""
    ends = {f"low{unit}": estimate.low, f"high{unit}": estimate.high}
    known = {name: end if math.isfinite(end) else None for name, end in ends.items()}
    return {f"median{unit}": estimate.median, **known, "rounds": estimate.samples}
