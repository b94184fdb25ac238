"""The divisions of a problem that no other beats in both time and workspace: the paper's desirable set."""

from collections.abc import Iterable, Sequence

from mucudnn.division import Division
from mucudnn.errors import InfeasibleError
from mucudnn.profile import Candidate
from mucudnn.solvers.dynamic import Grid, least_workspace_bytes


def division_front(
    candidates: Sequence[Candidate], batch: int, limit_bytes: int | None = None
) -> tuple[Division, ...]:
    """Return the front of `batch` samples: workspace rises, time strictly falls, nothing beats any of it.

    It holds, for every limit up to `limit_bytes`, the division that `solve_reuse` finds. The limit falls
    from `limit_bytes` to just below the workspace of the last division found, until no division is left;
    so there is one search for each point of the front. Source: the epsilon-constraint method (Haimes,
    Lasdon, Wismer 1971), which is exact here because a smaller workspace is a lower limit.

    Args:
        candidates: in any order.
        batch: the mini-batch.
        limit_bytes: for each part, inclusive; None is no limit.

    Raises:
        InfeasibleError: no division fits; the error holds the least limit for which one does.
        ValueError: `batch` or `limit_bytes` is negative, an algorithm has two set-up times, or times add up
            to infinity.
    """
    grid = Grid(candidates, batch, limit_bytes)
    if batch == 0:
        return (Division(()),)
    found = []
    level = grid.highest_level
    while (best := grid.best(level)[batch]) is not None:
        found.append(grid.division(batch, best))
        level = best.level - 1
    if not found:
        highest = max((candidate.workspace_bytes for candidate in candidates), default=0)
        raise InfeasibleError(
            highest if limit_bytes is None else limit_bytes, least_workspace_bytes(candidates, batch)
        )
    return pareto(found)


def pareto(divisions: Iterable[Division]) -> tuple[Division, ...]:
    """Return the divisions that no other beats in both: workspace rises, time strictly falls.

    Of divisions that are equal in both, the first is kept.
    """
    front: list[Division] = []
    for division in sorted(divisions, key=lambda each: (each.workspace_bytes, each.time_s)):
        if not front or division.time_s < front[-1].time_s:
            front.append(division)
    return tuple(front)
