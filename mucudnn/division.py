"""How a mini-batch is cut: candidates, one after the other."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping

from mucudnn.locks import cached_property
from mucudnn.problem import ConvOp, ConvProblem, problems_of
from mucudnn.profile import Candidate


@dataclasses.dataclass(frozen=True)
class Division:
    """Candidates whose batch sizes add up to the mini-batch, in the order in which they run.

    On a card those run last after which others would be less aligned (`grouping`).

    Attributes:
        parts: the candidates; those of one algorithm stand next to each other, because its set-up is
            paid once.

    Raises:
        ValueError: the parts of one algorithm are torn apart, or state different set-up times.
    """

    parts: tuple[Candidate, ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in itertools.groupby(self.parts, key=lambda part: part.algorithm)]
        if len(names) != len(set(names)):
            raise ValueError(f"Parts of one algorithm must stand next to each other, but got {names}.")
        set_ups = {(part.algorithm, part.setup_s) for part in self.parts}
        if len(set_ups) != len(names):
            raise ValueError(f"An algorithm must have one set-up time, but got {sorted(set_ups)}.")

    @classmethod
    def of(cls, parts: Iterable[Candidate]) -> "Division":
        """Return the division of `parts` in its standard order.

        Larger parts run first, so that every later slice starts as well aligned as it can; algorithms
        follow one another by their largest part, then by id.
        """
        groups: dict[str, list[Candidate]] = {}
        for part in parts:
            groups.setdefault(part.algorithm, []).append(part)
        for group in groups.values():
            group.sort(key=lambda part: (-part.batch, part.workspace_bytes, part.time_s))
        ordered = sorted(groups.items(), key=lambda named: (-named[1][0].batch, named[0]))
        return cls(tuple(itertools.chain.from_iterable(group for _, group in ordered)))

    @cached_property
    def batch(self) -> int:
        """Samples in all parts together."""
        return sum(part.batch for part in self.parts)

    @cached_property
    def time_s(self) -> float:
        """Seconds of all parts plus the set-up of each distinct algorithm."""
        set_ups = {part.algorithm: part.setup_s for part in self.parts}
        return math.fsum(itertools.chain((part.time_s for part in self.parts), set_ups.values()))

    @cached_property
    def workspace_bytes(self) -> int:
        """Bytes of the largest part's workspace; 0 for no parts."""
        return max((part.workspace_bytes for part in self.parts), default=0)

    @property
    def is_undivided(self) -> bool:
        """Whether the mini-batch runs in one part."""
        return len(self.parts) <= 1

    @property
    def is_own(self) -> bool:
        """Whether the mini-batch runs in one part, and by PyTorch's own convolution."""
        return self.is_undivided and all(part.is_own for part in self.parts)

    @property
    def is_deterministic(self) -> bool:
        """Whether equal operands give equal bits in every run, as far as the libraries of all parts say."""
        return all(part.is_deterministic for part in self.parts)

    @cached_property
    def key(self) -> str:
        """What runs, without times: "cpu:winograd4@16*4" is four parts of sixteen samples."""
        runs = itertools.groupby(self.parts, key=lambda part: (part.algorithm, part.batch))
        return "+".join(f"{name}@{batch}*{len(list(run))}" for (name, batch), run in runs)


def is_of_one_part(key: str) -> bool:
    """Return whether the division of that key runs its mini-batch at once."""
    return "+" not in key and key.endswith("*1")


def running_sum_bytes(problem: ConvProblem, division: Division) -> int:
    """Return the bytes of the sum in which 16-bit weight gradients add up; a single part needs none."""
    if division.is_undivided:
        return 0
    return problem.running_sum_bytes


def buffer_bytes(division: Division, sum_bytes: int = 0) -> int:
    """Return what a division takes of a buffer: PyTorch's own takes its workspace elsewhere.

    Args:
        division: that runs in it.
        sum_bytes: of the sum in which its parts add up, which lies in the buffer whoever computes them.
    """
    return max([sum_bytes, *(part.workspace_bytes for part in division.parts if not part.is_own)])


def own_bytes(division: Division) -> int:
    """Return what the parts of PyTorch's own take at most, each for itself; 0 without any."""
    return max((part.workspace_bytes for part in division.parts if part.is_own), default=0)


def common_buffer_bytes(divisions: Iterable[tuple[ConvProblem, Division]]) -> int:
    """Return what the buffer comes to that divisions of these problems have in common."""
    return max(
        (buffer_bytes(division, running_sum_bytes(problem, division)) for problem, division in divisions),
        default=0,
    )


def block_bytes(divisions: Iterable[tuple[ConvProblem, Division]], limit_bytes: int) -> int:
    """Return the size of one block that holds the common buffer, or in its place what PyTorch's own takes.

    Where both do not fit the limit at once, the buffer is given back before PyTorch's own runs. So the block
    is as large as the larger of the buffer and of all workspaces that do not fit beside it. A workspace that
    fits beside the buffer, but not beside such a block, is smaller than the block, and fits into it.

    Args:
        divisions: that run, with their problems.
        limit_bytes: for the workspace, inclusive.
    """
    sites = list(divisions)
    common_bytes = common_buffer_bytes(sites)
    taken = [own_bytes(division) for _, division in sites]
    return max([common_bytes, *(each for each in taken if each + common_bytes > limit_bytes)])


def undivided(algorithm: str, batch: int) -> Division:
    """Return the division that runs the whole batch at once, with nothing known of its time."""
    return Division((Candidate(algorithm, batch, 0.0, 0),))


@dataclasses.dataclass(frozen=True)
class Room:
    """What memory a plan's sites have.

    Attributes:
        limit_bytes: of the plan.
        common_bytes: what the buffer may come to that all sites have in common; None in sharing mode, where
            each has its own workspace.
    """

    limit_bytes: int
    common_bytes: int | None

    def suffices(self, n_bytes: int, division: Division) -> bool:
        """Return whether a site of that division may take so much beside the buffer."""
        if self.common_bytes is None:
            return n_bytes + buffer_bytes(division) <= division.workspace_bytes
        return n_bytes + self.common_bytes <= self.limit_bytes

    def bound(self, division: Division, sum_bytes: int = 0) -> int | None:
        """Return what its buffer and a part beside it may take together; None if they always fit.

        In sharing mode that is the division's own workspace, wherever it has a buffer of its own; else the
        limit, for it and the buffer that all have in common. A part counts as if it took all of its workspace
        beside the buffer; how much it does, who runs it knows.

        Args:
            division: that is to run.
            sum_bytes: of the sum in which its parts add up.
        """
        taken_bytes = division.workspace_bytes
        if self.common_bytes is None:
            return taken_bytes if buffer_bytes(division, sum_bytes) else None
        return self.limit_bytes if taken_bytes + self.common_bytes > self.limit_bytes else None

    def bounds(self, problem: ConvProblem, divisions: Mapping[ConvOp, Division]) -> dict[ConvOp, int]:
        """Return the same for what the ops of a convolution run, but for those that always fit.

        Args:
            problem: of the forward pass.
            divisions: what some of the ops run.
        """
        problems = problems_of(problem)
        found = {
            op: self.bound(division, running_sum_bytes(problems[op], division))
            for op, division in divisions.items()
        }
        return {op: n_bytes for op, n_bytes in found.items() if n_bytes is not None}

    def is_unpatched(self, division: Division) -> bool:
        """Return whether a division is PyTorch's own as it comes, beside which memory always suffices."""
        return division.is_own and self.bound(division) is None
