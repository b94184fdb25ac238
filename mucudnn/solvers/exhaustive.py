"""All divisions and all selections, tried one by one: what the other solvers are judged by.

Slow on purpose, and by the definitions alone: nothing here knows a recurrence or a bound.
"""

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

from mucudnn.division import Division
from mucudnn.profile import Candidate

Key = TypeVar("Key", bound=Hashable)


def every_division(candidates: Sequence[Candidate], batch: int) -> Iterator[Division]:
    """Yield every division of `batch` samples once; their number grows exponentially with `batch`."""
    for parts in _every_group(sorted(set(candidates)), batch):
        yield Division.of(parts)


def fastest_division(candidates: Sequence[Candidate], batch: int, limit_bytes: int) -> Division | None:
    """Return what `solve_reuse` must find; None where it must raise an InfeasibleError.

    Least in turn: time, workspace, whether it is not deterministic, number of parts, the sorted parts.
    """
    return min(
        (each for each in every_division(candidates, batch) if each.workspace_bytes <= limit_bytes),
        key=_order,
        default=None,
    )


def _order(division: Division) -> tuple[float, int, bool, int, list[Candidate]]:
    parts = sorted(division.parts)
    return division.time_s, division.workspace_bytes, not division.is_deterministic, len(parts), parts


def every_front_point(candidates: Sequence[Candidate], batch: int) -> list[tuple[int, float]]:
    """Return (workspace, time) of the divisions that no other beats in both, workspaces rising.

    { c : there is no c' != c with M(c') <= M(c) and T(c') <= T(c) }, the desirable set of Oyama et al. 2018.
    """
    points = {(each.workspace_bytes, each.time_s) for each in every_division(candidates, batch)}
    return sorted(
        (workspace, time)
        for workspace, time in points
        if not any(
            other != (workspace, time) and other[0] <= workspace and other[1] <= time for other in points
        )
    )


def fastest_selection(
    fronts: Mapping[Key, Sequence[Division]], limit_bytes: int
) -> dict[Key, Division] | None:
    """Return what `solve_sharing` must find; None where it must raise an InfeasibleError.

    Least in turn: total time, total workspace, the workspaces in the order of the sites.
    """
    selections = itertools.product(*fronts.values())
    best = min(
        (each for each in selections if sum(part.workspace_bytes for part in each) <= limit_bytes),
        key=_rank,
        default=None,
    )
    return None if best is None else dict(zip(fronts, best, strict=True))


def _rank(selection: Sequence[Division]) -> tuple[float, int, list[int]]:
    workspaces = [division.workspace_bytes for division in selection]
    return math.fsum(division.time_s for division in selection), sum(workspaces), workspaces


def _every_group(candidates: Sequence[Candidate], batch: int) -> Iterator[tuple[Candidate, ...]]:
    """Yield every group of candidates, repetitions allowed, whose sizes add up to `batch`."""
    if batch == 0:
        yield ()
    for place, first in enumerate(candidates):
        if first.batch <= batch:
            for others in _every_group(candidates[place:], batch - first.batch):
                yield (first, *others)
