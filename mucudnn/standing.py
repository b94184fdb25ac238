"""Where PyTorch's own convolution stands in a plan, and where it might."""

from mucudnn.choices import Mode
from mucudnn.plan import Assignment, Plan


def may_stay(assigned: Assignment, mode: Mode) -> bool:
    """Return whether PyTorch's own might have run at a site, as far as its plan tells.

    That is within the limit and, in sharing mode, within what the site has of it in the end.
    """
    seen = assigned.seen
    if seen.reference is None:
        return False
    base_bytes = seen.reference_workspace_bytes
    is_within = base_bytes is None or base_bytes <= assigned.division.workspace_bytes
    return mode is not Mode.SHARING or assigned.is_kept or is_within


def partly_called(plan: Plan) -> set[tuple[str, int]]:
    """Return path and variant of what has an op that PyTorch's own may not run; what was not timed has none.

    A whole call of such a convolution runs that op the same before and now.
    """
    return {
        (assigned.site.path, assigned.site.variant)
        for assigned in plan.assignments
        if assigned.evidence is not None and not may_stay(assigned, plan.mode)
    }
