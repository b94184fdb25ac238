"""Reuse for a whole network, where one buffer stays resident while some algorithms take memory elsewhere.

The buffer that all sites reuse is as large as the largest part needs it. PyTorch's own convolution does not
work in it: it takes its workspace from the allocator, while the buffer lies idle. So that both together stay
within the limit W, the buffer gets A bytes and PyTorch's own what is left:

    minimise over A    sum over problems p of  count_p · T_p(A)

with T_p(A) the time of p's best division among candidates whose workspace is at most A (in the buffer) or at
most W - A (elsewhere). A runs over the multiples of W / 16, then shrinks to what is really used.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from mucudnn.errors import InfeasibleError
from mucudnn.plan import Division
from mucudnn.profile import Candidate
from mucudnn.solvers.dynamic import solve_reuse

Key = TypeVar("Key", bound=Hashable)
Solution = tuple[Division, tuple[Candidate, ...]]

_STEPS = 16


@dataclasses.dataclass(frozen=True)
class Demand:
    """A problem that occurs somewhere in a network.

    Attributes:
        candidates: of the problem.
        batch: the mini-batch.
        count: how many sites have it.
    """

    candidates: Sequence[Candidate]
    batch: int
    count: int = 1


def solve_network_reuse(
    demands: Mapping[Key, Demand], limit_bytes: int, is_elsewhere: Callable[[Candidate], bool]
) -> dict[Key, Solution]:
    """Return a division for every demand, and the candidates that fit beside the resident buffer.

    Where no buffer size lets buffer and elsewhere fit together, each problem gets its best division within
    the limit by itself, which is what reuse promises at the least.

    Args:
        demands: by any key.
        limit_bytes: W, inclusive.
        is_elsewhere: whether a candidate takes its workspace outside of the buffer.

    Raises:
        InfeasibleError: some problem has no division within the limit even by itself.
    """
    best: dict[Key, Solution] | None = None
    least = math.inf
    for buffer_bytes in dict.fromkeys(limit_bytes * step // _STEPS for step in range(_STEPS + 1)):
        solutions = _solve_beside(demands, buffer_bytes, limit_bytes - buffer_bytes, is_elsewhere)
        if solutions is not None and (time_s := _total_time_s(demands, solutions)) < least:
            best, least = solutions, time_s
    if best is None:
        return {key: _solve(demand, demand.candidates, limit_bytes) for key, demand in demands.items()}
    used_bytes = max((_buffer_bytes(division, is_elsewhere) for division, _ in best.values()), default=0)
    return _solve_beside(demands, used_bytes, limit_bytes - used_bytes, is_elsewhere) or best


def _solve_beside(
    demands: Mapping[Key, Demand],
    buffer_bytes: int,
    elsewhere_bytes: int,
    is_elsewhere: Callable[[Candidate], bool],
) -> dict[Key, Solution] | None:
    """Solve every demand with so many bytes in the buffer and elsewhere; None if one cannot be solved."""
    solutions = {}
    for key, demand in demands.items():
        fitting = [
            each
            for each in demand.candidates
            if each.workspace_bytes <= (elsewhere_bytes if is_elsewhere(each) else buffer_bytes)
        ]
        try:
            solutions[key] = _solve(demand, fitting, max(buffer_bytes, elsewhere_bytes))
        except InfeasibleError:
            return None
    return solutions


def _solve(demand: Demand, candidates: Sequence[Candidate], limit_bytes: int) -> Solution:
    fitting = tuple(each for each in candidates if each.workspace_bytes <= limit_bytes)
    return solve_reuse(fitting, demand.batch, limit_bytes), fitting


def _total_time_s(demands: Mapping[Key, Demand], solutions: Mapping[Key, Solution]) -> float:
    return math.fsum(demand.count * solutions[key][0].time_s for key, demand in demands.items())


def _buffer_bytes(division: Division, is_elsewhere: Callable[[Candidate], bool]) -> int:
    return max((part.workspace_bytes for part in division.parts if not is_elsewhere(part)), default=0)
