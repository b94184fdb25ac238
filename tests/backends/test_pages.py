"""Memory that the buffer gives back, and the room that it makes for PyTorch's own workspace."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mucudnn.backends import backend_of
from mucudnn.backends.cpu.pages import release_pages
from mucudnn.division import Division
from mucudnn.execution.runner import Runner
from mucudnn.execution.workspace import Workspace
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.profile import Candidate

MIB = 2**20
SLACK = MIB  # what a process grows and shrinks by on its own account, in bytes

BACKEND = backend_of("cpu:")
PROBLEM = ConvProblem(ConvOp.FPROP, 8, 32, 32, (16, 16), (3, 3), (1, 1), (1, 1), (1, 1))


def resident_bytes() -> int:
    """What this process has, counted page by page: `status` may be off by some pages for each processor.

    The kernel sums it up: to read the list of all mappings takes a MiB of this very process's own.
    """
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    (resident,) = (int(line.split()[1]) * 2**10 for line in lines if line.startswith("Rss:"))
    return resident


@pytest.fixture
def operands() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (PROBLEM.input_shape, PROBLEM.filter_shape)
    x, w = (torch.randn(shape, generator=generator) for shape in shapes)
    return x, w


class Whole:
    """Binds the whole buffer."""

    def bind(self, buffer: Tensor) -> Tensor:
        return buffer


WHOLE = Whole()


def winograd(limit_bytes: int | None = None) -> Runner:
    return Runner(BACKEND, PROBLEM, Division((Candidate("cpu:winograd4", 8, 1.0, 2 * MIB),)), limit_bytes)


def own(elsewhere_bytes: int, limit_bytes: int | None) -> Runner:
    division = Division((Candidate(BACKEND.own, 8, 1.0, elsewhere_bytes),))
    return Runner(BACKEND, PROBLEM, division, limit_bytes)


def test_released_pages_go_back_to_the_system_and_read_as_zeros() -> None:
    tensor = torch.ones(64 * MIB, dtype=torch.uint8)
    before = resident_bytes()
    release_pages(tensor)
    assert before - resident_bytes() > 64 * MIB - SLACK
    assert int(tensor[MIB : 63 * MIB].sum()) == 0


def test_a_buffer_has_no_pages_before_something_is_written_to_them() -> None:
    workspace, before = Workspace(torch.device("cpu")), resident_bytes()

    workspace.reserve(MIB, 64 * MIB)

    assert workspace.n_bytes == 64 * MIB
    assert resident_bytes() - before < SLACK


def test_a_page_that_holds_other_data_too_stays() -> None:
    tensor = torch.ones(3 * 4096, dtype=torch.uint8)
    release_pages(tensor[100:200])
    assert bool((tensor == 1).all())


def test_the_buffer_gives_back_what_would_pass_the_limit(operands: tuple[Tensor, Tensor]) -> None:
    workspace = Workspace(torch.device("cpu"))
    winograd()(workspace, *operands)
    needed = winograd().buffer_bytes
    released: list[int] = []

    class Recording(type(BACKEND)):  # type: ignore[misc]  # the backend's class, with its ear to the ground
        def release(self, buffer: Tensor) -> None:
            released.append(buffer.numel())
            super().release(buffer)

    workspace.make_room(MIB, needed, Recording())
    assert released == [MIB]


def test_no_page_is_given_back_while_both_fit(operands: tuple[Tensor, Tensor]) -> None:
    workspace = Workspace(torch.device("cpu"))
    runner = winograd()
    runner(workspace, *operands)
    kept = workspace.bound(WHOLE)[:1024].clone()
    own(MIB, runner.buffer_bytes + MIB)(workspace, *operands)
    assert torch.equal(workspace.bound(WHOLE)[:1024], kept)


def test_results_are_the_same_before_and_after_the_buffer_made_room(operands: tuple[Tensor, Tensor]) -> None:
    workspace = Workspace(torch.device("cpu"))
    first = winograd()(workspace, *operands)
    own(MIB, MIB)(workspace, *operands)
    assert torch.equal(winograd()(workspace, *operands), first)
