"""Whole models that run within a limit: what the buffer gives back before PyTorch's own takes memory."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from mucudnn.autotuning import autotune
from mucudnn.backends import backend_of
from mucudnn.backends.cpu.backend import CpuBackend
from mucudnn.choices import Mode
from mucudnn.division import Division
from mucudnn.execution.workspace import release_workspaces
from mucudnn.patching.applying import apply, patch
from mucudnn.plan import Assignment, ConvSite, Plan
from mucudnn.problem import ConvOp, ConvProblem, problems_of
from mucudnn.profile import Candidate
from tests.models import a_batch, a_chain
from tests.plans import a_plan_for

pytestmark = pytest.mark.usefixtures("one_thread")

OWN, OTHER = "cpu:aten", "cpu:im2col"

ELSEWHERE = 2**16
"""Bytes that PyTorch's own is said to take outside of the buffer."""


def buffer_bytes(problem: ConvProblem) -> int:
    return backend_of(OTHER).buffer_bytes(problem, OTHER)


def by_own(problem: ConvProblem) -> Division:
    return Division((Candidate(OWN, problem.batch, 1.0, ELSEWHERE),))


def by_other(problem: ConvProblem) -> Division:
    return Division((Candidate(OTHER, problem.batch, 1.0, buffer_bytes(problem)),))


def a_plan(model: nn.Module, mode: Mode = Mode.REUSE) -> Plan:
    """The first convolution works in the buffer, the second is PyTorch's own: both just fit at once."""
    plan = a_plan_for(model, a_batch(), mode)
    first, second = plan.assignments
    assignments = (
        dataclasses.replace(first, division=by_other(first.problem)),
        dataclasses.replace(second, division=by_own(second.problem)),
    )
    limit_bytes = buffer_bytes(first.problem) + ELSEWHERE
    return dataclasses.replace(plan, assignments=assignments, limit_bytes=limit_bytes)


def evaluate(model: nn.Module, images: Tensor | None = None) -> None:
    with torch.no_grad():
        model(a_batch() if images is None else images)


def is_patched(model: nn.Module, path: str) -> bool:
    return "_conv_forward" in model.get_submodule(path).__dict__


@pytest.fixture
def model() -> nn.Module:
    """Its convolutions are "0" and "3"."""
    return a_chain().eval()


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each end of a buffer that goes back to the system."""
    seen: list[int] = []
    monkeypatch.setattr(CpuBackend, "release", lambda _, tail: seen.append(tail.numel()))
    release_workspaces()
    return seen


@pytest.mark.parametrize(("missing", "gone"), [(0, []), (1, [1]), (1000, [1000])])
def test_as_much_of_the_buffer_goes_back_as_the_limit_lacks(
    missing: int, gone: list[int], model: nn.Module, released: list[int]
) -> None:
    plan = a_plan(model)
    apply(model, dataclasses.replace(plan, limit_bytes=plan.limit_bytes - missing))

    evaluate(model)

    assert released == gone
    assert is_patched(model, "3") == bool(gone)  # else nothing could make room for it


def test_a_buffer_that_has_grown_with_what_was_tuned_later_goes_back_to_what_the_limit_leaves(
    model: nn.Module, released: list[int]
) -> None:
    plan, larger = a_plan(model), a_batch(size=9)
    met: list[ConvProblem] = []

    def learn(
        device: torch.device, path: str, number: int, problem: ConvProblem, ops: tuple[ConvOp, ...]
    ) -> Plan:
        met.append(problem)
        sites = {ConvSite(path, op, number): problems_of(problem)[op] for op in ops}
        learnt = (Assignment(site, each, by_other(each)) for site, each in sites.items())
        return dataclasses.replace(plan, assignments=tuple(learnt))

    patch(model, plan, learn)
    evaluate(model)
    evaluate(model, larger)
    before = [*released]
    evaluate(model)

    grown = buffer_bytes(met[0]) - buffer_bytes(plan.assignments[0].problem)
    assert 0 < grown <= ELSEWHERE
    assert before == []
    assert released == [grown]


def test_in_sharing_mode_the_buffer_of_one_site_makes_no_room_for_another(
    model: nn.Module, released: list[int]
) -> None:
    apply(model, a_plan(model, Mode.SHARING))

    evaluate(model)

    assert released == []
    assert not is_patched(model, "3")


def test_in_sharing_mode_parts_of_a_site_have_its_share_between_them(
    model: nn.Module, released: list[int]
) -> None:
    plan, besides = a_plan(model, Mode.SHARING), 1000
    first, second = plan.assignments
    share = buffer_bytes(first.problem.part(4))
    mixed = Division((Candidate(OTHER, 4, 1.0, share), Candidate(OWN, 4, 1.0, besides)))
    assignments = (dataclasses.replace(first, division=mixed), second)
    apply(model, dataclasses.replace(plan, assignments=assignments, limit_bytes=share + ELSEWHERE))

    evaluate(model)

    assert released == [besides]


@pytest.mark.parametrize(("missing", "gone"), [(0, []), (1, [1]), (1000, [1000])])
def test_code_that_is_tuned_while_it_runs_stays_within_the_limit_too(
    missing: int, gone: list[int], model: nn.Module, released: list[int]
) -> None:
    plan = a_plan(model)
    tuned = autotune(plan.limit_bytes - missing, progress=False)
    by_hand = [dataclasses.replace(plan, assignments=(each,)) for each in plan.assignments]
    tuned._learn = lambda *given: by_hand[given[2]]  # the number of the convolution

    with tuned:
        evaluate(model)

    assert released == gone
