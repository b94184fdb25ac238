"""A filter that stays is transformed once, and one that has changed in any way is transformed anew."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mucudnn.algorithms.tile_kernels import TileSliceKernel
from mucudnn.backends import backend_of
from mucudnn.backends.cpu.backend import CpuBackend
from mucudnn.division import Division
from mucudnn.execution import kept
from mucudnn.execution.kept import KeptFilter
from mucudnn.execution.runner import Runner
from mucudnn.execution.workspace import Owner, Workspace
from mucudnn.functional import DividedConvolution
from mucudnn.problem import ConvOp, ConvProblem, Layout
from mucudnn.profile import Candidate
from tests.operands import a_convolution, operands_of, own_result, relative_error

pytestmark = pytest.mark.usefixtures("one_thread")

BACKEND = backend_of("cpu:")
CPU = torch.device("cpu")
BOUND = 1e-5

PROBLEM = a_convolution(batch=4, kernel_size=(11, 11), padding=(5, 5), in_channels=6, out_channels=8)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The filters that were transformed."""
    seen: list[Tensor] = []
    prepare = TileSliceKernel.prepare

    def counting(self: TileSliceKernel, weight: Tensor) -> None:
        seen.append(weight)
        prepare(self, weight)

    monkeypatch.setattr(TileSliceKernel, "prepare", counting)
    return seen


def a_runner(problem: ConvProblem = PROBLEM, *parts: tuple[str, int]) -> Runner:
    parts = parts or (("cpu:fft32", 3), ("cpu:fft32", 1))
    candidates = tuple(Candidate(name, batch, 0.0, 2**24, setup_s=1e-6) for name, batch in parts)
    return Runner(BACKEND, problem, Division(candidates))


def a_call(
    problem: ConvProblem = PROBLEM, *parts: tuple[str, int]
) -> tuple[Runner, Workspace, Tensor, Tensor]:
    """A runner, a workspace, a filter and an image: what `results_of` takes."""
    image, weight, _ = operands_of(problem)
    return a_runner(problem, *parts), Workspace(CPU), weight, image


def results_of(runner: Runner, workspace: Workspace, weight: Tensor, image: Tensor) -> Tensor:
    """One call's result, which must be right."""
    result = runner(workspace, image, weight, keeps_filter=True)
    assert relative_error(result, own_result(runner.problem, image, weight)) < BOUND
    return result


@pytest.mark.parametrize("op", [ConvOp.FPROP, ConvOp.DGRAD])
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_filter_that_stays_is_transformed_twice_at_most(
    op: ConvOp, layout: Layout, dtype: str, prepared: list[Tensor]
) -> None:
    """Whether it stays is asked only where the last call had it, since training would ask in vain."""
    problem = dataclasses.replace(PROBLEM, op=op, layout=layout, filter_layout=layout, dtype=dtype)
    runner, workspace, weight, image = a_call(problem)

    results = [results_of(runner, workspace, weight, image) for _ in range(5)]

    assert len(prepared) == 2
    assert torch.equal(results[0], results[4])


UNKNOWN_CHANGES: dict[str, Callable[[Tensor], object]] = {
    "one element": lambda weight: weight.view(-1)[5].mul_(1.0001),
    "rows exchanged": lambda weight: weight.copy_(weight.flip(0)),
    "columns exchanged": lambda weight: weight.copy_(weight.flip(1)),
    "the sign of all": lambda weight: weight.neg_(),
    "the sign of one row": lambda weight: weight[3].neg_(),
    "the sign of two elements": lambda weight: weight.view(-1)[5:7].neg_(),
    "all times 16": lambda weight: weight.mul_(16),
    "zero": lambda weight: weight.zero_(),
    "not a number": lambda weight: weight.fill_(torch.nan),
}


@pytest.mark.parametrize("change", UNKNOWN_CHANGES.values(), ids=UNKNOWN_CHANGES.keys())
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_change_that_pytorch_does_not_know_of_is_seen(
    change: Callable[[Tensor], object], dtype: str, prepared: list[Tensor]
) -> None:
    problem = dataclasses.replace(PROBLEM, dtype=dtype)
    runner, workspace, weight, image = a_call(problem)
    for _ in range(3):
        results_of(runner, workspace, weight, image)
    assert len(prepared) == 2
    version = weight._version

    change(weight.data)
    assert weight._version == version
    result = runner(workspace, image, weight, keeps_filter=True)

    assert len(prepared) == 3
    assert torch.allclose(
        result, own_result(problem, image, weight), rtol=BOUND, atol=100 * BOUND, equal_nan=True
    )


@pytest.mark.parametrize("large", [1.0, 1e30, float("inf"), float("nan")])
@pytest.mark.parametrize("places", [[5, 6], [2, 100], [*range(20, 60)]], ids=["next", "far", "many"])
def test_signs_that_change_are_seen_beside_any_value(large: float, places: list[int]) -> None:
    workspace, keeper = Workspace(CPU), KeptFilter()
    weight = torch.randn(8, 6, 3, 3, generator=torch.Generator().manual_seed(0))
    weight[0, 0, 0, 0] = large
    for was_there in (False, False, True):
        is_there, workspace.holder = keeper.look(workspace, weight)
        assert is_there == was_there

    weight.data.view(-1)[places] *= -1
    is_there, _ = keeper.look(workspace, weight)

    assert not is_there


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "written to": lambda weight: weight.mul_(2),
    "a copy": lambda weight: weight.clone(),
    "the same memory, transposed": lambda weight: weight.transpose(2, 3),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_another_filter_is_transformed(other: Callable[[Tensor], Tensor], prepared: list[Tensor]) -> None:
    runner, workspace, weight, image = a_call()
    for _ in range(3):
        results_of(runner, workspace, weight, image)

    results_of(runner, workspace, other(weight), image)

    assert len(prepared) == 3


def test_filters_that_are_computed_anew_each_time_are_told_apart(prepared: list[Tensor]) -> None:
    """Their memory and their version may be those of the last one."""
    runner, workspace, weight, image = a_call()

    for factor in (1.0, 1.0, 1.0, -1.0, 16.0, 1.0):
        results_of(runner, workspace, weight * factor, image)

    assert len(prepared) >= 4


def test_every_workspace_has_a_filter_of_its_own(prepared: list[Tensor]) -> None:
    image, weight, _ = operands_of(PROBLEM)
    runner, here, there = a_runner(), Workspace(CPU), Workspace(CPU)
    for _ in range(3):
        results_of(runner, here, weight, image)
    weight.data.mul_(3)
    for _ in range(3):
        results_of(runner, there, weight, image)

    results_of(runner, here, weight, image)

    assert len(prepared) == 5


def test_filters_of_inference_mode_are_kept_too(prepared: list[Tensor]) -> None:
    runner, workspace, weight, image = a_call()

    with torch.inference_mode():
        of_inference = weight.clone()
        for _ in range(3):
            results_of(runner, workspace, of_inference, image)
        of_inference.neg_()
        results_of(runner, workspace, of_inference, image)
    assert len(prepared) == 3

    for _ in range(3):  # and whatever was made there serves other modes
        results_of(runner, workspace, weight, image)
    assert len(prepared) == 5


def another_site_runs(workspace: Workspace) -> None:
    problem = dataclasses.replace(PROBLEM, out_channels=5)
    image, weight, _ = operands_of(problem, seed=1)
    a_runner(problem)(workspace, image, weight, keeps_filter=True)


def a_gradient_is_computed(workspace: Workspace) -> None:
    problem = dataclasses.replace(PROBLEM, op=ConvOp.WGRAD)
    image, gradient, _ = operands_of(problem)
    a_runner(problem)(workspace, image, gradient)


def the_workspace_grows(workspace: Workspace) -> None:
    workspace.reserve(2 * workspace.n_bytes)


def memory_is_given_back(workspace: Workspace) -> None:
    workspace.make_room(workspace.n_bytes, workspace.n_bytes, BACKEND)


@pytest.mark.parametrize(
    "event", [another_site_runs, a_gradient_is_computed, the_workspace_grows, memory_is_given_back]
)
def test_a_filter_is_transformed_anew_once_others_have_written_there(
    event: Callable[[Workspace], None], prepared: list[Tensor]
) -> None:
    runner, workspace, weight, image = a_call()
    for _ in range(3):
        results_of(runner, workspace, weight, image)
    event(workspace)
    del prepared[:]

    results_of(runner, workspace, weight, image)

    assert len(prepared) == 1


def interrupted_call(runner: Runner, workspace: Workspace, weight: Tensor, image: Tensor) -> None:
    """A call that ends once the filter is transformed, before anything is computed with it."""

    def interrupted(*_: Any) -> bool:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TileSliceKernel, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner(workspace, image, weight, keeps_filter=True)


@pytest.mark.parametrize("calls", [0, 1], ids=["at first", "once it would be kept"])
def test_a_filter_whose_transform_was_interrupted_is_not_kept(calls: int, prepared: list[Tensor]) -> None:
    runner, workspace, weight, image = a_call()
    for _ in range(calls):
        results_of(runner, workspace, weight, image)

    interrupted_call(runner, workspace, weight, image)
    results_of(runner, workspace, weight, image)

    assert len(prepared) == calls + 2


def test_a_filter_is_not_kept_once_a_call_with_another_was_interrupted(prepared: list[Tensor]) -> None:
    """The other's transform lies where that of the first one was."""
    runner, workspace, weight, image = a_call()
    for _ in range(3):
        results_of(runner, workspace, weight, image)
    assert len(prepared) == 2

    interrupted_call(runner, workspace, weight.flip(0), image)
    results_of(runner, workspace, weight, image)

    assert len(prepared) == 4


def test_two_algorithms_have_their_filters_in_one_place_and_keep_neither(prepared: list[Tensor]) -> None:
    problem = dataclasses.replace(PROBLEM, kernel_size=(5, 5), padding=(2, 2))
    runner, workspace, weight, image = a_call(problem, ("cpu:fft16", 2), ("cpu:winograd4", 2))

    for _ in range(4):
        results_of(runner, workspace, weight, image)

    assert len(prepared) == 8


def test_who_comes_with_the_same_filter_does_not_find_what_another_has_made_of_it() -> None:
    first, workspace, weight, image = a_call(PROBLEM, ("cpu:fft32", 4))
    second = a_runner(PROBLEM, ("cpu:fft16", 4))

    for _ in range(3):
        results_of(first, workspace, weight, image)
        results_of(second, workspace, weight, image)


def test_training_transforms_every_time_and_never_reads_the_filter_for_it(
    prepared: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, workspace, weight, image = a_call()
    monkeypatch.setattr(kept, "_checksum", None)

    for _ in range(3):
        results_of(runner, workspace, weight, image)
        weight.mul_(0.9)  # as an optimizer would

    assert len(prepared) == 3


def test_inference_keeps_what_training_does_not(prepared: list[Tensor]) -> None:
    division = Division((Candidate("cpu:fft32", 4, 0.0, 2**24, setup_s=1e-6),))
    convolution = DividedConvolution(
        BACKEND, PROBLEM, {ConvOp.FPROP: division}, owners={ConvOp.FPROP: Owner()}
    )
    image, weight, _ = operands_of(PROBLEM)

    for _ in range(3):
        convolution(image, weight.requires_grad_(), None)
    assert len(prepared) == 3
    with torch.no_grad():
        for _ in range(5):
            convolution(image, weight, None)
    assert len(prepared) == 5


def test_odd_filters_are_never_kept() -> None:
    workspace, keeper = Workspace(CPU), KeptFilter()
    for weight in (
        torch.randn(1, 3, 3, 3).expand(4, 3, 3, 3),
        torch._neg_view(torch.randn(4, 3, 3, 3)),
        torch.randn(4, 3, 6, 3)[:, :, ::2],
        torch._efficientzerotensor(4, 3, 3, 3),
    ):
        for _ in range(4):
            is_there, workspace.holder = keeper.look(workspace, weight)
            assert not is_there


def test_a_filter_whose_transform_takes_no_time_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeptFilter, "look", None)
    image, weight, _ = operands_of(PROBLEM)
    by_channels = Candidate("cpu:fft32_k2", 4, 1e-3, 2**24, setup_s=1e-6)

    result = Runner(BACKEND, PROBLEM, Division((by_channels,)))(
        Workspace(CPU), image, weight, keeps_filter=True
    )

    assert relative_error(result, own_result(PROBLEM, image, weight)) < BOUND


def test_a_filter_whose_transform_takes_a_thirtieth_of_the_time_is_kept(prepared: list[Tensor]) -> None:
    image, weight, _ = operands_of(PROBLEM)
    division = Division((Candidate("cpu:fft32", 4, 30e-6, 2**24, setup_s=1e-6),))
    runner, workspace = Runner(BACKEND, PROBLEM, division), Workspace(CPU)

    for _ in range(4):
        results_of(runner, workspace, weight, image)

    assert len(prepared) == 2


class Device(CpuBackend):
    """The processor, as if its memory came in one piece, like a card's."""

    takes_memory_by_pages = False


def test_a_filter_on_a_device_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeptFilter, "look", None)
    image, weight, _ = operands_of(PROBLEM)
    division = Division((Candidate("cpu:fft32", 4, 0.0, 2**24, setup_s=1e-6),))

    result = Runner(Device(), PROBLEM, division)(Workspace(CPU), image, weight, keeps_filter=True)

    assert relative_error(result, own_result(PROBLEM, image, weight)) < BOUND


def test_a_default_device_is_no_matter(prepared: list[Tensor]) -> None:
    runner, workspace, weight, image = a_call()

    with torch.device("meta"):
        for _ in range(4):
            runner(workspace, image, weight, keeps_filter=True)

    assert len(prepared) == 2
