"""What a call is to run within a plan's memory, and remembering it: for modules and for functions."""

import dataclasses
from typing import Any

from mucudnn.choices import Mode
from mucudnn.division import Division
from mucudnn.plan import Assignment, Plan
from mucudnn.profile import Candidate, Environment
from mucudnn.solvers import ReuseTable

_MOST_ROUTES = 256
"""Shapes of which a module remembers what runs them; of more, it works that out again and again."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """How a plan's sites take memory.

    Attributes:
        environment: for which the plan was made.
        own: id of PyTorch's own convolution, which takes its workspace outside of the buffer.
        is_sharing: whether each site owns a buffer, rather than all one in common.
        limit_bytes: of the plan.
        buffer_bytes: what the common buffer may come to.
        capacity_bytes: what it grows to at once.
    """

    environment: Environment
    own: str
    is_sharing: bool
    limit_bytes: int
    buffer_bytes: int
    capacity_bytes: int

    @classmethod
    def of(cls, plan: Plan, own: str, *, is_growing: bool) -> "Memory":
        """Return what `plan` says of memory; where more is tuned later, the buffer may grow to the limit."""
        buffers = (_buffer_bytes(assigned.division, own) for assigned in plan.assignments)
        known = max(buffers, default=0)
        is_sharing = plan.mode is Mode.SHARING
        return cls(
            environment=plan.environment,
            own=own,
            is_sharing=is_sharing,
            limit_bytes=plan.limit_bytes,
            buffer_bytes=plan.limit_bytes if is_growing else known,
            capacity_bytes=0 if is_sharing else known,
        )

    def bound(self, division: Division) -> int | None:
        """Return what buffer and PyTorch's own workspace may take together, or None if they always fit."""
        limit_bytes, buffer_bytes = self.limit_bytes, self.buffer_bytes
        if self.is_sharing:
            limit_bytes, buffer_bytes = division.workspace_bytes, _buffer_bytes(division, self.own)
        elsewhere = [part.workspace_bytes for part in division.parts]  # at most: how much, the runner knows
        return limit_bytes if max(elsewhere, default=0) + buffer_bytes > limit_bytes else None


def _buffer_bytes(division: Division, own: str) -> int:
    return max((part.workspace_bytes for part in division.parts if part.algorithm != own), default=0)


def is_own(division: Division, memory: Memory) -> bool:
    """Return whether a division is PyTorch's own convolution, as it would run anyway."""
    is_plain = division.is_undivided and all(part.algorithm == memory.own for part in division.parts)
    return is_plain and memory.bound(division) is None


def remember(routes: dict[Any, Any], key: object, route: object) -> None:
    """Put a route among the others, of which the oldest go when there are many; any thread may do so."""
    while len(routes) >= _MOST_ROUTES:
        oldest = next(iter([*routes]), None)
        routes.pop(oldest, None)
    routes[key] = route


def division_for(assigned: Assignment, batch: int, own: str) -> Division:
    """Return what a site runs for a mini-batch of at most the tuned size, without measuring.

    The tuned size runs its division. A smaller one gets the best division by the same profile, within the
    site's own workspace; where PyTorch's own convolution has won undivided it stays, since it was confirmed
    and takes less the smaller the batch. Where the profile's sizes do not add up to the batch, the tuned
    division is cut off at its end.
    """
    division = assigned.division
    if batch == division.batch:
        return division
    if division.is_undivided and division.parts[0].algorithm == own:
        return _cut(division, batch)
    limit_bytes = division.workspace_bytes
    fitting = [each for each in assigned.candidates if each.workspace_bytes <= limit_bytes]
    return ReuseTable(fitting, batch, limit_bytes).division(batch) or _cut(division, batch)


def _cut(division: Division, batch: int) -> Division:
    """Return the first `batch` samples of a division; its last part may become smaller."""
    parts: list[Candidate] = []
    left = batch
    for part in division.parts:
        if left:
            parts.append(dataclasses.replace(part, batch=min(part.batch, left)))
            left -= parts[-1].batch
    return Division(tuple(parts))
