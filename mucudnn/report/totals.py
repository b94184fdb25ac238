"""What the sites and the calls of a plan add up to. Times are sums of medians in seconds."""

import dataclasses
import math
from collections.abc import Sequence

from mucudnn.division import is_of_one_part
from mucudnn.intervals import Estimate
from mucudnn.plan import Assignment, Plan
from mucudnn.report.sites import UNCHANGED, interval_at
from mucudnn.standing import may_stay, partly_called


@dataclasses.dataclass(frozen=True)
class Totals:
    """What the sites of a plan add up to.

    Attributes:
        sites: number of sites.
        divided: number of those whose batch runs in several parts.
        exchanged: number of those that run undivided by another algorithm than PyTorch's own.
        kept: number of those left as before.
        untimed: number of those that run undivided and were not timed.
        paired: number of those whose times before and now are both known.
        before_s: what ran before, over the paired sites.
        now_s: what runs now, over the paired sites.
        ends: the speedup of the paired sites if each was at the lower end of its own interval, and if each
            was at the upper; no confidence is claimed for that. None if some changed site has no interval, or
            none was changed.
        without_base: number of those whose time now is known, but not that before.
        without_base_s: what runs now, over the sites without a base.
        predicted: number of paired sites whose times were predicted, not measured.
    """

    sites: int
    divided: int
    exchanged: int
    kept: int
    untimed: int
    paired: int
    before_s: float
    now_s: float
    ends: tuple[float, float] | None
    without_base: int
    without_base_s: float
    predicted: int

    @classmethod
    def of(cls, plan: Plan) -> "Totals":
        """Return the totals of the sites of `plan`."""
        undivided = [assigned for assigned in plan.assignments if assigned.division.is_undivided]
        kept = sum(assigned.is_kept for assigned in undivided)
        untimed = sum(assigned.seen.chosen is None for assigned in undivided)
        evidence = [assigned.seen for assigned in plan.assignments]
        paired = [
            (assigned, seen.reference.median, seen.chosen.median)
            for assigned, seen in zip(plan.assignments, evidence, strict=True)
            if seen.reference and seen.chosen
        ]
        pairs = [(before, now) for _, before, now in paired]
        speedups = [interval_at(assigned) for assigned, _, _ in paired]
        alone = [seen.chosen.median for seen in evidence if seen.chosen and not seen.reference]
        return cls(
            sites=len(plan.assignments),
            divided=len(plan.assignments) - len(undivided),
            exchanged=len(undivided) - kept - untimed,
            kept=kept,
            untimed=untimed,
            paired=len(pairs),
            before_s=math.fsum(before for before, _ in pairs),
            now_s=math.fsum(now for _, now in pairs),
            ends=_ends(pairs, speedups),
            without_base=len(alone),
            without_base_s=math.fsum(alone),
            predicted=sum(seen.is_predicted and bool(seen.reference and seen.chosen) for seen in evidence),
        )

    @property
    def speedup(self) -> float | None:
        """Total time before by total time now, of the paired sites; None if there are none."""
        return self.before_s / self.now_s if self.now_s > 0 else None


@dataclasses.dataclass(frozen=True)
class CallTotals:
    """What the convolutions of a plan add up to that were timed as whole calls, with their gradients.

    Attributes:
        timed: number of those all of whose ops PyTorch's own may run.
        undone: number of these that were not faster and stay PyTorch's own.
        over: number of others that were timed so, though it may not run some op: before is no base.
        untimed: number of convolutions that were not timed so, though it might have been of use to them.
        before_s: what the `timed` took before.
        now_s: what they take now, which of those undone is what they took before.
        ends: their speedup if each was at the lower end of its own interval, and if each was at the upper;
            None if none was changed.
    """

    timed: int
    undone: int
    over: int
    untimed: int
    before_s: float
    now_s: float
    ends: tuple[float, float] | None

    @classmethod
    def of(cls, plan: Plan) -> "CallTotals":
        """Return the totals of the whole calls of `plan`."""
        over = partly_called(plan)
        calls = [call for call in plan.calls if (call.path, call.variant) not in over]
        pairs = [
            (call.reference.median, (call.divided if call.is_faster else call.reference).median)
            for call in calls
        ]
        return cls(
            timed=len(calls),
            undone=sum(not call.is_faster for call in calls),
            over=len(plan.calls) - len(calls),
            untimed=len(_untimed(plan)),
            before_s=math.fsum(before for before, _ in pairs),
            now_s=math.fsum(now for _, now in pairs),
            ends=_ends(pairs, [call.speedup if call.is_faster else UNCHANGED for call in calls]),
        )

    @property
    def speedup(self) -> float | None:
        """Total time before by total time now, of the timed calls; None if there are none."""
        return self.before_s / self.now_s if self.now_s > 0 else None


def _untimed(plan: Plan) -> set[tuple[str, int]]:
    """Return which convolutions were not timed as whole calls, which might have had something else run."""
    open_to_calls = {
        (assigned.site.path, assigned.site.variant)
        for assigned in plan.assignments
        if (may_stay(assigned, plan) and not assigned.is_kept) or _has_undivided_rival(assigned)
    }
    return open_to_calls - {(call.path, call.variant) for call in plan.calls}


def _has_undivided_rival(assigned: Assignment) -> bool:
    """Return whether a site runs in parts, and something undivided, other than PyTorch's own, might have."""
    rivals = (key for key, _ in assigned.seen.rejected)
    return not assigned.division.is_undivided and any(map(is_of_one_part, rivals))


def _ends(
    times: Sequence[tuple[float, float]], speedups: Sequence[Estimate | None]
) -> tuple[float, float] | None:
    """Return how many times as fast all is, with each at the lower end of its interval, and at the upper.

    The quotient of the sums of medians may lie outside: medians of quotients are no quotients of medians.

    Args:
        times: seconds before and now, of each.
        speedups: of each; what is unchanged cannot move.
    """
    known = [each for each in speedups if each is not None and each.low > 0 and math.isfinite(each.high)]
    before_s = math.fsum(before for before, _ in times)
    if len(known) < len(times) or all(each is UNCHANGED for each in known) or before_s <= 0:
        return None
    slowest_s = math.fsum(before / each.low for (before, _), each in zip(times, known, strict=True))
    fastest_s = math.fsum(before / each.high for (before, _), each in zip(times, known, strict=True))
    return before_s / slowest_s, before_s / fastest_s
