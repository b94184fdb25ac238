"""Which division runs at a site: who is timed against whom, in how much room, what the rounds decide."""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from mucudnn.division import Division
from mucudnn.evidence import Evidence, fits_as_seen
from mucudnn.intervals import TOLERANCE, Verdict
from mucudnn.problem import ConvOp
from mucudnn.profile import Candidate
from mucudnn.profiling.outcome import Outcome
from mucudnn.solvers import best_of
from mucudnn.tuning.solving import Solution


class Proven(NamedTuple):
    """A division that may run at a site, and what was seen of it."""

    division: Division
    evidence: Evidence

    @property
    def workspace_bytes(self) -> int:
        """What it declares, or was seen to take if that is more."""
        return max(self.division.workspace_bytes, self.evidence.workspace_bytes or 0)


class Confirmed(NamedTuple):
    """What runs at a site after all.

    Attributes:
        chosen: the fastest, by what was timed of this op alone.
        whole: undivided, which may take its place: PyTorch's own, or where that may not run what else may;
            None where nothing may.
    """

    chosen: Proven
    whole: Proven | None

    @property
    def heavier(self) -> Proven:
        """Of what may run here after all, what takes more."""
        return max(
            (each for each in (self.chosen, self.whole) if each is not None),
            key=lambda each: each.workspace_bytes,
        )


def in_turn(found: Mapping[ConvOp, Confirmed]) -> tuple[dict[ConvOp, Proven], ...]:
    """Return the undivided rivals of the chosen divisions: first other algorithms', then PyTorch's own.

    They are tried one after the other: together, a gain over one could hide a loss against the other.
    """
    wholes = {op: each.whole for op, each in found.items() if each.whole is not None}
    return tuple(
        {op: each for op, each in wholes.items() if each.division.is_own is is_own}
        for is_own in (False, True)
    )


class Pool:
    """What sharing mode has left of the limit when every site has what its division declares.

    Sites whose divisions are seen to take more than they declare draw on it. Weighing is noisy, so a little
    more counts as nothing.
    """

    def __init__(self, limit_bytes: int, divisions: Iterable[Division]) -> None:
        self._spare_bytes = limit_bytes - sum(division.workspace_bytes for division in divisions)

    def room(self, division: Division, sites: int) -> int:
        """Return what each of so many sites that are alike may be seen to take."""
        return division.workspace_bytes + max(self._spare_bytes, 0) // sites

    def settle(self, division: Division, found: Proven, sites: int) -> None:
        """Take what these sites take beyond what was allotted to them, or give back what they leave of it."""
        taken, seen = found.division.workspace_bytes, found.evidence.workspace_bytes
        if seen is not None and not fits_as_seen(seen, taken):
            taken = min(seen, self.room(division, sites))  # what is above is noise
        self._spare_bytes -= sites * (taken - division.workspace_bytes)


def rivals_of(solution: Solution) -> dict[str, Division]:
    """Return the best undivided candidate, the best division without PyTorch's own, and that chosen, by key.

    The second is there because profiles are quick and noisy: what was measured slow by chance gets a
    second chance.
    """
    division, fitting = solution
    wholes = [each for each in fitting if each.batch == division.batch]
    others = [each for each in fitting if not each.is_own]
    rivals = (best_of(wholes, division.batch), best_of(others, division.batch), division)
    return {rival.key: rival for rival in rivals if rival is not None}


def lesser(solution: Solution, fitting: Iterable[Candidate], tried: Collection[str]) -> Solution | None:
    """Return a replacement for divisions that do not fit, or that failed; None if there is none.

    It is made of candidates with less workspace, or else of algorithms that were not tried.

    Args:
        solution: of which the division does not fit, or failed.
        fitting: all candidates that may do, of which an earlier replacement may have left some out.
        tried: the algorithms of all divisions that did not fit, or failed.
    """
    failed_bytes = solution.division.workspace_bytes
    for less in (
        [each for each in solution.fitting if each.workspace_bytes < failed_bytes],
        [each for each in fitting if each.algorithm not in tried],
    ):
        found = best_of(less, solution.division.batch)
        if found is not None:
            return Solution(found, less)
    return None


def winner(rivals: Mapping[str, Division], outcome: Outcome, base: str) -> Division:
    """Return the first rival, unless a later one is FASTER than it, and than the best before.

    Medians of quotients are not transitive: B may be FASTER than A, and C than B, but C not FASTER than A.
    Predictions may come from too few samples for an interval. Where the base may not run, their medians
    decide: nothing else is known, and PyTorch's own, the safe choice, does not compete.

    Args:
        rivals: by key; the base, if it may run, is the first.
        outcome: of all of them.
        base: key of PyTorch's own, undivided, which stays in doubt.
    """
    if outcome.is_predicted and base not in rivals:
        return rivals[_shortest({key: outcome.estimates[key].median for key in rivals})]
    first = best = next(iter(rivals))
    for key in rivals:
        if all(outcome.verdict(each, key) is Verdict.FASTER for each in {first, best}):
            best = key
    return rivals[best]


def _shortest(times: Mapping[str, float]) -> str:
    """Return the key of the first time, unless a later one is shorter by more than the tolerance."""
    best = next(iter(times))
    for key, time in times.items():
        if time < (1 - TOLERANCE) * times[best]:
            best = key
    return best


def evidence_of(chosen: Division, outcome: Outcome, base: str, error: float | None) -> Evidence:
    """Return what an outcome shows for what was chosen.

    Args:
        chosen: one of its divisions.
        outcome: of the rounds, or a prediction.
        base: key of PyTorch's own, undivided.
        error: largest of the chosen algorithms' errors; None if one is not known.
    """
    estimates, workspaces = outcome.estimates, outcome.workspaces
    has_reference = base in estimates
    return Evidence(
        reference=estimates.get(base),
        chosen=estimates[chosen.key],
        verdict=outcome.verdict(base, chosen.key) if has_reference else None,
        reference_workspace_bytes=workspaces.get(base) if has_reference else None,
        workspace_bytes=workspaces.get(chosen.key),
        error=error,
        rejected=tuple((key, estimates[key]) for key in sorted(estimates) if key not in (base, chosen.key)),
        speedups=outcome.speedups(base),
        is_predicted=outcome.is_predicted,
        others=outcome.others,
    )
