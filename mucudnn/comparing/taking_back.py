"""PyTorch's own convolution put back into a plan where a step has shown it to be faster."""

import collections
import dataclasses
from collections.abc import Sequence

from mucudnn.choices import Mode
from mucudnn.comparing.step_comparison import LayerComparison
from mucudnn.division import Division
from mucudnn.evidence import CallEvidence
from mucudnn.intervals import Verdict
from mucudnn.plan import Assignment, Plan
from mucudnn.profile import own_whole
from mucudnn.standing import may_stay


def taken_back(plan: Plan, slower: Sequence[LayerComparison]) -> Plan:
    """Return a plan with PyTorch's own at all sites of those modules at which that may run, all or none.

    What is told of their whole calls is then what a step has shown, in place of what the tuner had seen;
    nothing where there are calls of several shapes, of which a step shows the sum.

    Args:
        plan: it stays as it is, and is what is returned if nothing changes.
        slower: modules, and what they take within a step before and now.

    Raises:
        PlanError: the result would contradict itself.
    """
    times = {each.path: each.times for each in slower if _may_go_back(plan, each.path)}
    if not times:
        return plan
    sites = (each.site for each in plan.assignments if each.site.path in times)
    variants = dict.fromkeys((site.path, site.variant) for site in sites)
    shapes = collections.Counter(path for path, _ in variants)
    seen = (
        CallEvidence(each.before, each.now, each.speedup, each.verdict, path, variant)
        for path, variant in variants
        for each in [times[path]]
        if shapes[path] == 1
    )
    settled = dataclasses.replace(
        plan,
        assignments=tuple(_as_before(each) if each.site.path in times else each for each in plan.assignments),
        calls=(*(each for each in plan.calls if each.path not in times), *seen),
        frozen=tuple(
            dataclasses.replace(each, times=None) if each.path in times else each for each in plan.frozen
        ),
    )
    settled.check()
    return settled


def _may_go_back(plan: Plan, path: str) -> bool:
    """Return whether a module runs something else somewhere, and PyTorch's own may run wherever it does."""
    changed = [each for each in plan.assignments if each.site.path == path and not each.is_kept]
    return bool(changed) and all(may_stay(each, plan) and _fits(each, plan.mode) for each in changed)


def _fits(assigned: Assignment, mode: Mode) -> bool:
    """Return whether PyTorch's own is known, and takes no more than a site may: in sharing mode its share."""
    whole = own_whole(assigned.candidates, assigned.problem.batch)
    if whole is None:
        return False
    return mode is not Mode.SHARING or whole.workspace_bytes <= assigned.division.workspace_bytes


def _as_before(assigned: Assignment) -> Assignment:
    """Return a site with PyTorch's own, in the times in which it was the base; as it is, if it has that."""
    whole, seen = own_whole(assigned.candidates, assigned.problem.batch), assigned.seen
    if whole is None or assigned.is_kept:
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
