"""As which trials the finished is kept, what a record answers under a bound, and what fits as it was seen."""

from mucudnn.division import Division, undivided
from mucudnn.problem import ConvProblem
from mucudnn.profile import Record, Refusal, RefusalKind, Trial, is_own

_WEIGHING_NOISE_BYTES = 32 * 2**10
"""How much more than it takes a finished division may be seen to take: eight pages of small objects, as the
heap grows by pages (five seen, in a process that had weighed much before)."""


def division_trial(problem: ConvProblem, division: Division) -> Trial:
    """Return the trial under which a finished division that is too large, or breaks, is stored."""
    return Trial(problem, division.key, whole=True)


def packed_trial(problem: ConvProblem, own: str) -> Trial:
    """Return the trial under which the workspace of PyTorch's own with a packed filter is stored."""
    return Trial(problem, f"{undivided(own, problem.batch).key} packed", whole=True)


def is_settled(record: Record | None, limit_bytes: int) -> bool:
    """Return whether a record answers under the limit: a refusal for size does up to its own limit."""
    if record is None:
        return False
    if record.refusal is None or record.is_broken:
        return True
    return record.limit_bytes is not None and record.limit_bytes >= limit_bytes


def judged(record: Record, max_error: float | None) -> Record:
    """Return the record, or one that is refused if its error is larger than the user wants.

    That of PyTorch's own convolution is what there is.

    Args:
        record: of any trial.
        max_error: that is wanted; None for no bound beside the backend's.
    """
    trial, error = record.trial, record.error
    if max_error is None or error is None or error <= max_error or is_own(trial.algorithm):
        return record
    reason = f"its error is {error:.1e}, and {max_error:.1e} are allowed"
    refusal = Refusal(trial.algorithm, trial.problem.batch, RefusalKind.WRONG, reason)
    return Record(trial, record.workspace_bytes, error=error, refusal=refusal)


def fits_as_seen(seen_bytes: int | None, limit_bytes: int) -> bool:
    """Return whether what a finished division was seen to take is within the limit; None is not."""
    return seen_bytes is not None and seen_bytes <= limit_bytes + _WEIGHING_NOISE_BYTES
