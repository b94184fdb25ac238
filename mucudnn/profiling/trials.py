"""Trials of finished divisions, and what a record says: whether it answers, and is accurate enough."""

from mucudnn.division import Division, undivided
from mucudnn.problem import ConvProblem
from mucudnn.profile import Record, Refusal, RefusalKind, Trial, is_own


def division_trial(problem: ConvProblem, division: Division) -> Trial:
    """Return the trial under which the refusal of a finished division is stored: too large, or broken."""
    return Trial(problem, division.key, whole=True)


def packed_trial(problem: ConvProblem, own: str) -> Trial:
    """Return the trial under which the workspace of PyTorch's own with a packed filter is stored."""
    return Trial(problem, f"{undivided(own, problem.batch).key} packed", whole=True)


def is_settled(record: Record | None, limit_bytes: int) -> bool:
    """Return whether a record answers under the limit; a refusal for size answers up to its own limit."""
    if record is None:
        return False
    if record.refusal is None or record.is_broken:
        return True
    return record.limit_bytes is not None and record.limit_bytes >= limit_bytes


def judged(record: Record, max_error: float | None) -> Record:
    """Return the record or, if its error is larger than the user wants, a refusal in its place.

    PyTorch's own convolution is never refused for its error.

    Args:
        record: of any trial.
        max_error: the largest that the user wants; None for no bound beside the backend's.
    """
    trial, error = record.trial, record.error
    if max_error is None or error is None or error <= max_error or is_own(trial.algorithm):
        return record
    reason = f"its error is {error:.1e}, and {max_error:.1e} are allowed"
    refusal = Refusal(trial.algorithm, trial.problem.batch, RefusalKind.WRONG, reason)
    return Record(trial, record.workspace_bytes, error=error, refusal=refusal)
