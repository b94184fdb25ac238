"""What an allocator keeps of a card's memory, by a double that keeps blocks as PyTorch's does."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mucudnn.algorithms.own import result_bytes
from mucudnn.choices import Mode, Policy
from mucudnn.division import Division
from mucudnn.execution.workspace import Workspace, release_workspaces
from mucudnn.patching.fitting import Memory, divided
from mucudnn.plan import Assignment, ConvSite, Plan
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.profile import Candidate
from tests.devices import Device
from tests.operands import a_convolution, operands_of

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH = 4
UNIT_BYTES = 2**16
"""More than im2col of the batch works in."""
LIMIT_BYTES = 10 * UNIT_BYTES


@dataclasses.dataclass
class Block:
    size: int
    is_free: bool


class Blocks:
    """Segments of blocks: a request takes the smallest free one that will do, and free neighbours are one.

    Source: PyTorch, c10/cuda/CUDACachingAllocator.
    """

    def __init__(self) -> None:
        self._segments: list[list[Block]] = []

    @property
    def reserved_bytes(self) -> int:
        return sum(block.size for segment in self._segments for block in segment)

    def take(self, n_bytes: int) -> Block:
        free = [block for segment in self._segments for block in segment if block.is_free]
        found = min((each for each in free if each.size >= n_bytes), key=lambda each: each.size, default=None)
        if found is None:
            found = Block(n_bytes, is_free=True)
            self._segments.append([found])
        if found.size > n_bytes:
            segment = next(each for each in self._segments if found in each)
            segment.insert(segment.index(found) + 1, Block(found.size - n_bytes, is_free=True))
            found.size = n_bytes
        found.is_free = False
        return found

    def give_back(self, block: Block) -> None:
        block.is_free = True
        for number, segment in enumerate(self._segments):
            merged: list[Block] = []
            for each in segment:
                if merged and merged[-1].is_free and each.is_free:
                    merged[-1].size += each.size
                else:
                    merged.append(each)
            self._segments[number] = merged

    def empty_cache(self) -> None:
        self._segments = [each for each in self._segments if any(not block.is_free for block in each)]


class Hold:
    """A block, for as long as this is there."""

    def __init__(self, blocks: Blocks, n_bytes: int) -> None:
        self._blocks, self._block = blocks, blocks.take(n_bytes)

    def __del__(self) -> None:
        self._blocks.give_back(self._block)


class Card(Device):
    """A card whose memory is kept in blocks: the buffer's, and what PyTorch's own takes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks()
        self.buffer: Hold | None = None
        self.held_bytes = 0
        self.taken_bytes: dict[tuple[int, str], int] = {}

    def declares(self, algorithm: str) -> bool:
        return algorithm != self.own

    def buffer_bytes(self, problem: ConvProblem, algorithm: str) -> int:
        return 0 if algorithm == self.own else self.taken_bytes[problem.out_channels, algorithm]

    def release(self, tail: Tensor) -> None:
        super().release(tail)
        self.buffer, self.held_bytes = None, 0

    def own_convolution(self, problem: ConvProblem, *operands: Tensor | None) -> Tensor:
        result = Hold(self.blocks, result_bytes(problem))
        workspace = Hold(self.blocks, self.taken_bytes[problem.out_channels, self.own])
        del workspace, result
        return super().own_convolution(problem, *operands)  # type: ignore[arg-type]


@contextlib.contextmanager
def a_card() -> Iterator[Card]:
    """A card of which whatever a workspace takes and gives back is noted."""
    made, take = Card(), Workspace._take

    def taken(workspace: Workspace, n_bytes: int, capacity_bytes: int) -> None:
        take(workspace, n_bytes, capacity_bytes)
        if workspace.held_bytes != made.held_bytes:
            made.buffer = None  # the old one goes first
            made.held_bytes = workspace.held_bytes
            made.buffer = Hold(made.blocks, made.held_bytes)

    release_workspaces()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "_take", taken)
        patch.setattr(Workspace, "_another_block", lambda _, n_bytes: Hold(made.blocks, n_bytes))
        yield made
    release_workspaces()


def _site(number: int, name: str, n_bytes: int) -> Assignment:
    """A site that is not divided: those in which both run are not helped."""
    problem = a_convolution(batch=BATCH, out_channels=number + 1)
    division = Division((Candidate(name, BATCH, 1.0, n_bytes),))
    return Assignment(ConvSite("conv", ConvOp.FPROP), problem, division)


def _runner_of(card: Card, sites: Sequence[Assignment]) -> Callable[[int], None]:
    """Return what runs a site, by its number, within the memory of a plan of all."""
    for site in sites:
        (part,) = site.division.parts
        card.taken_bytes[site.problem.out_channels, part.algorithm] = part.workspace_bytes
    plan = Plan(Mode.REUSE, Policy.POWER_OF_TWO, LIMIT_BYTES, card.environment(), tuple(sites), (), "0")
    memory = Memory.of(plan, is_growing=False, by_pages=False)
    convolutions = [divided(card, site.problem, {ConvOp.FPROP: site}, memory) for site in sites]

    def run(number: int) -> None:
        convolutions[number].run(ConvOp.FPROP, *operands_of(sites[number].problem)[:2])

    return run


def _most_reserved(card: Card, sites: Sequence[Assignment], order: Sequence[int]) -> int:
    """Return the most that one site has kept, less its result; the cache is emptied before each."""
    run, most = _runner_of(card, sites), 0
    for number in (each % len(sites) for each in order):
        card.blocks.empty_cache()
        run(number)
        made_bytes = result_bytes(sites[number].problem) if sites[number].division.is_own else 0
        most = max(most, card.blocks.reserved_bytes - made_bytes)
    return most


OWN, INSIDE = "cpu:aten", "cpu:im2col"


@settings(max_examples=300)
@example(
    [(OWN, 9), (INSIDE, 4), (OWN, 6)], [0, 1, 2]
)  # what fits beside the buffer, and not beside the block
@example([(OWN, 9), (INSIDE, 2)], [0, 1, 0])  # what takes less of the block comes in between
@given(
    st.lists(st.tuples(st.sampled_from([OWN, INSIDE]), st.integers(1, 10)), min_size=1, max_size=5),
    st.lists(st.integers(0, 4), min_size=1, max_size=8),
)
def test_no_op_has_more_kept_than_the_limit_if_nothing_was_left_over(
    tuned: list[tuple[str, int]], order: list[int]
) -> None:
    sites = [_site(number, name, units * UNIT_BYTES) for number, (name, units) in enumerate(tuned)]
    with a_card() as card:
        assert _most_reserved(card, sites, order) <= LIMIT_BYTES


def test_what_is_given_back_serves_pytorchs_own_from_the_first_call_on() -> None:
    """The allocator is not emptied between: one block, and one for each of their results."""
    sites = [_site(0, OWN, 7 * UNIT_BYTES), _site(1, INSIDE, 4 * UNIT_BYTES), _site(2, OWN, 9 * UNIT_BYTES)]
    with a_card() as card:
        run = _runner_of(card, sites)
        for number in (0, 1, 2, 1, 0):
            run(number)

        results = sum(result_bytes(sites[number].problem) for number in (0, 2))
        assert card.blocks.reserved_bytes == 9 * UNIT_BYTES + results
