"""PyTorch's own convolution in a plan: where it stands, where it might, and how it is put back."""

import dataclasses
from collections.abc import Collection

from mucudnn.choices import Mode
from mucudnn.division import Division
from mucudnn.evidence import Evidence
from mucudnn.intervals import Verdict
from mucudnn.plan import Assignment, Plan


def is_kept(assigned: Assignment) -> bool:
    """Return whether a site runs as before: undivided, in the very times of PyTorch's own convolution."""
    seen = seen_at(assigned)
    return assigned.division.is_undivided and seen.chosen is not None and seen.chosen == seen.reference


def may_stay(assigned: Assignment, mode: Mode) -> bool:
    """Return whether PyTorch's own might have run at a site, as far as its plan tells.

    That is within the limit and, in sharing mode, within what the site has of it in the end.
    """
    seen = seen_at(assigned)
    if seen.reference is None:
        return False
    base_bytes = seen.reference_workspace_bytes
    is_within = base_bytes is None or base_bytes <= assigned.division.workspace_bytes
    return mode is not Mode.SHARING or is_kept(assigned) or is_within


def seen_at(assigned: Assignment) -> Evidence:
    """Return what was seen at a site; all of it None if it was not timed."""
    return assigned.evidence or Evidence()


def taken_back(plan: Plan, paths: Collection[str], own: str) -> Plan:
    """Return a plan with PyTorch's own at all sites of these modules at which it may run.

    What whole calls of them were found to take no longer tells anything, and is left out.

    Args:
        plan: it stays as it is, and is what is returned if nothing changes.
        paths: of modules.
        own: id of PyTorch's own convolution.
    """
    assignments = tuple(
        _as_before(each, own) if each.site.path in paths and may_stay(each, plan.mode) else each
        for each in plan.assignments
    )
    if assignments == plan.assignments:
        return plan
    return dataclasses.replace(
        plan,
        assignments=assignments,
        calls=tuple(each for each in plan.calls if each.path not in paths),
        frozen=tuple(
            dataclasses.replace(each, times=None) if each.path in paths else each for each in plan.frozen
        ),
    )


def _as_before(assigned: Assignment, own: str) -> Assignment:
    """Return a site with PyTorch's own, in the times in which it was the base; as it is, if it has that.

    So is one whose profile does not tell what PyTorch's own takes of the limit.
    """
    batch, seen = assigned.problem.batch, seen_at(assigned)
    whole = next((each for each in assigned.candidates if (each.algorithm, each.batch) == (own, batch)), None)
    if whole is None or is_kept(assigned):
        return assigned
    rejected = dict(seen.rejected)
    if seen.chosen is not None:
        rejected[assigned.division.key] = seen.chosen
    evidence = dataclasses.replace(
        seen,
        chosen=seen.reference,
        verdict=Verdict.SAME,
        workspace_bytes=seen.reference_workspace_bytes,
        error=None,  # that of another algorithm
        rejected=tuple((key, rejected[key]) for key in sorted(rejected)),
    )
    return dataclasses.replace(assigned, division=Division((whole,)), evidence=evidence)
