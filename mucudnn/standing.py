"""Where PyTorch's own convolution stands in a plan, and where it might; and what speaks against a plan."""

from mucudnn.choices import Mode
from mucudnn.evidence import WRONG_ERROR, Evidence, fits_as_seen
from mucudnn.plan import Assignment, Plan

MEASURED_ANEW = "Tune with again=True (mucudnn tune --again) while the machine is idle."
"""What to do about times that others may have moved, in a sentence."""


def is_base_over_limit(seen: Evidence, limit_bytes: int) -> bool:
    """Return whether PyTorch's own was timed to compare, though it takes more than the limit."""
    base_bytes = seen.reference_workspace_bytes
    if seen.reference is None or base_bytes is None:
        return False
    return not fits_as_seen(base_bytes, limit_bytes)


def may_stay(assigned: Assignment, plan: Plan) -> bool:
    """Return whether PyTorch's own might have run at a site, as far as its plan tells.

    That is within the limit and, in sharing mode, within what the site has of it in the end.
    """
    seen = assigned.seen
    if seen.reference is None or is_base_over_limit(seen, plan.limit_bytes):
        return False
    base_bytes = seen.reference_workspace_bytes
    is_within = base_bytes is None or base_bytes <= assigned.division.workspace_bytes
    return plan.mode is not Mode.SHARING or assigned.is_kept or is_within


def partly_called(plan: Plan) -> set[tuple[str, int]]:
    """Return path and variant of what has an op that PyTorch's own may not run; what was not timed has none.

    A whole call of such a convolution runs that op the same before and now.
    """
    return {
        (assigned.site.path, assigned.site.variant)
        for assigned in plan.assignments
        if assigned.evidence is not None and not may_stay(assigned, plan)
    }


def inaccuracy(plan: Plan) -> str | None:
    """Return where PyTorch's own runs though it is wrong, in a sentence; None if nowhere."""
    wrong = [assigned.site for assigned in plan.assignments if assigned.seen.is_wrong]
    if not wrong:
        return None
    return (
        f"At {len(wrong)} of {len(plan.assignments)} sites, the first of them {wrong[0]}, PyTorch's own "
        "convolution runs as before though it is wrong there: its results differ from those in float64 by "
        f"more than {WRONG_ERROR:.0%}, and may depend on what lay in memory before. It may be right in "
        "another type or layout."
    )


def disturbance(plan: Plan) -> str | None:
    """Return which of its times others may have moved, perhaps another day, in a sentence; None if none."""
    disturbed = [each for each in plan.others if each]
    if not disturbed:
        return None
    return (
        f"While {len(disturbed)} of the plan's {len(plan.others)} times were measured, others took up to "
        f"{max(disturbed):.1f} processors, so these times and their verdicts may be off."
    )
