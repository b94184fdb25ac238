"""What is known of one site of a plan."""

from mucudnn.choices import Mode
from mucudnn.intervals import Estimate, Verdict
from mucudnn.plan import Assignment

UNCHANGED = Estimate(1.0, 1.0, 1.0, 0)
"""How many times as fast as before runs what ran before."""


def interval_at(assigned: Assignment) -> Estimate | None:
    """Return how many times as fast as before a site runs, by the quotients of the rounds."""
    if assigned.is_kept:
        return UNCHANGED
    return dict(assigned.seen.speedups).get(assigned.division.key)


def is_base_over_share(assigned: Assignment, mode: Mode) -> bool:
    """Return whether PyTorch's own gave way to nothing faster, as it takes more than the site's share."""
    seen = assigned.seen
    base_bytes = seen.reference_workspace_bytes
    if mode is not Mode.SHARING or base_bytes is None or assigned.is_kept:
        return False
    return seen.verdict is not Verdict.FASTER and base_bytes > assigned.division.workspace_bytes


def workspace_at(assigned: Assignment) -> int:
    """Return the bytes that a site takes, as seen; where it was seen to take none, as declared.

    What is small is seen as nothing.
    """
    return assigned.seen.workspace_bytes or assigned.division.workspace_bytes


def workspace_before_at(assigned: Assignment) -> int | None:
    """Return the bytes that PyTorch's own takes at a site; None if they are not known.

    Where that stays they are those that the site takes now.
    """
    return workspace_at(assigned) if assigned.is_kept else assigned.seen.reference_workspace_bytes


def speedup_at(assigned: Assignment) -> float | None:
    """Return how many times as fast as before a site runs, if that is known.

    It is the median of the rounds' quotients; without rounds, as in a prediction, the quotient of both times.
    """
    seen = assigned.seen
    of_rounds = interval_at(assigned)
    if of_rounds is not None:
        return of_rounds.median
    if seen.reference is None or seen.chosen is None or seen.chosen.median <= 0:
        return None
    return seen.reference.median / seen.chosen.median


def comparisons_at(assigned: Assignment) -> int:
    """Return how many verdicts against PyTorch's own were reached at a site."""
    seen = assigned.seen
    return len(seen.speedups) or (
        0 if seen.reference is None else len(seen.rejected) + (not assigned.is_kept)
    )
