"""Which parts of a division run next to each other, in which order, and on which samples."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from mucudnn.backends import Backend
from mucudnn.division import Division
from mucudnn.errors import BackendError
from mucudnn.locks import cached_property
from mucudnn.problem import ConvProblem
from mucudnn.profile import Candidate

Kernel = TypeVar("Kernel")


@dataclasses.dataclass(frozen=True)
class Step:
    """What a part computes; equal parts have equal steps, and one kernel."""

    problem: ConvProblem
    algorithm: str


class Part(NamedTuple):
    """What one part runs, and on which samples.

    Attributes:
        step: what it computes.
        here: the samples.
        elsewhere_bytes: what it takes beside its buffer and the running sum.
    """

    step: Step
    here: slice
    elsewhere_bytes: int


@dataclasses.dataclass(frozen=True)
class Group:
    """The parts of one algorithm that run next to each other."""

    parts: list[Part]
    is_own: bool

    @property
    def elsewhere_bytes(self) -> int:
        """The most that one of the parts takes elsewhere."""
        return max(part.elsewhere_bytes for part in self.parts)

    @cached_property
    def here(self) -> slice:
        """The samples of all parts."""
        return slice(self.parts[0].here.start, self.parts[-1].here.stop)

    def bound(self, kernel_of: Callable[[Step], Kernel]) -> list[tuple[Kernel, Part]]:
        """Return the parts with their kernels, one for each distinct step; of PyTorch's own, none."""
        if self.is_own:
            return []
        kernels = {step: kernel_of(step) for step in dict.fromkeys(part.step for part in self.parts)}
        return [(kernels[part.step], part) for part in self.parts]


def groups_of(backend: Backend, problem: ConvProblem, division: Division, sum_bytes: int) -> list[Group]:
    """Return the parts of each algorithm, each with the slice of the batch that it covers.

    Args:
        backend: that runs them.
        problem: of the whole mini-batch.
        division: of the same batch.
        sum_bytes: of the running sum, which each part's measured workspace includes.

    Raises:
        BackendError: an algorithm does not compute the problem.
    """
    groups = []
    start = 0
    candidates = _aligned_first(backend, problem, division)
    for algorithm, alike in itertools.groupby(candidates, key=lambda part: part.algorithm):
        parts = []
        for each in alike:
            step, here = Step(problem.part(each.batch), algorithm), slice(start, start + each.batch)
            _check_computed(backend, step)
            parts.append(Part(step, here, _elsewhere_bytes(backend, problem, each, sum_bytes)))
            start += each.batch
        groups.append(Group(parts, algorithm == backend.own))
    return groups


def _check_computed(backend: Backend, step: Step) -> None:
    if not backend.computes(step.problem, step.algorithm):
        able = ", ".join(backend.algorithms(step.problem))
        raise BackendError(
            f"For {step.problem} the algorithm must be one of {able} or another that computes it, "
            f"but got {step.algorithm!r}."
        )


def _aligned_first(backend: Backend, problem: ConvProblem, division: Division) -> Sequence[Candidate]:
    """The parts in an order in which each starts as well aligned as its problem says: odd sizes go last.

    That may separate parts of one algorithm, which then pays its set-up twice; the measured time of the whole
    division includes that.
    """
    if backend.alignment_bytes == 1:
        return division.parts
    return sorted(division.parts, key=lambda part: -problem.part(part.batch).alignment_bytes)


def _elsewhere_bytes(backend: Backend, problem: ConvProblem, part: Candidate, sum_bytes: int) -> int:
    """What a part takes beside its buffer and the running sum."""
    if backend.declares(part.algorithm):
        return 0  # whatever its workspace was measured to be
    inside = backend.buffer_bytes(problem.part(part.batch), part.algorithm) + sum_bytes
    return max(0, part.workspace_bytes - inside)
