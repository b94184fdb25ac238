"""Convolutions are timed with their gradients as a model calls them, and PyTorch's own as PyTorch does."""

import gc
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mucudnn.algorithms.own import operands, recorded_convolution
from mucudnn.backends import Backend, backend_of
from mucudnn.division import Division
from mucudnn.errors import BackendError, DeviceLostError, UnmeasuredError
from mucudnn.functional import undivided
from mucudnn.live import LiveMeasurer
from mucudnn.measuring import call_key
from mucudnn.problem import ConvOp, ConvProblem, Layout
from mucudnn.profile import Candidate
from mucudnn.rehearsal import Operands, rehearsed
from mucudnn.timing import Clock
from mucudnn.workspace import _workspaces, release_workspaces, workspace_of
from tests.convolutions import a_convolution
from tests.doubles import MS, Recipe, ScriptedBackend, rate

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = backend_of("cpu:")
FORWARD = a_convolution(batch=8, stride=(2, 2), bias=True)
TRANSPOSED = a_convolution(batch=8, op=ConvOp.DGRAD, stride=(2, 2))
EVERY_OP = tuple(ConvOp)

INFERENCE = {problem: (problem.op,) for problem in (FORWARD, TRANSPOSED)}
FIRST_LAYER = {FORWARD: (ConvOp.FPROP, ConvOp.WGRAD), TRANSPOSED: (ConvOp.DGRAD, ConvOp.WGRAD)}

both = pytest.mark.parametrize("problem", [FORWARD, TRANSPOSED], ids=["plain", "transposed"])


def tensors(problem: ConvProblem) -> Operands:
    image, weight, bias = operands(problem, torch.Generator().manual_seed(0))
    with torch.no_grad():
        return Operands(image, weight, bias, recorded_convolution(problem, image, weight, bias))


def parts(name: str, *sizes: int) -> Division:
    return Division(tuple(Candidate(name, size, 0.0, 0) for size in sizes))


def called(
    backend: Backend,
    problem: ConvProblem,
    divisions: Mapping[ConvOp, Division] | None,
    ops: tuple[ConvOp, ...] = EVERY_OP,
) -> Callable[[], None]:
    return rehearsed(backend, problem, ops, divisions, tensors(problem))


def events_of(call: Callable[[], None]) -> set[str]:
    call()  # kernels are bound by the first
    with profile(activities=[ProfilerActivity.CPU]) as recording:
        call()
    return {event.name for event in recording.events()}


def computed(backend: ScriptedBackend) -> list[str]:
    return [each for each in backend.world.ran if not each.endswith("set-up")]


@both
def test_all_parts_of_all_ops_run_and_nothing_else_does(problem: ConvProblem) -> None:
    backend = ScriptedBackend({name: Recipe(rate(MS)) for name in ("a", "b", "c")})
    divisions = dict(zip(EVERY_OP, (parts(f"scripted:{name}", 6, 2) for name in "abc"), strict=True))

    called(backend, problem, divisions)()

    assert sorted(computed(backend)) == sorted(f"scripted:{name}@{size}" for name in "abc" for size in (6, 2))


@both
def test_inference_runs_the_forward_pass_alone(problem: ConvProblem) -> None:
    backend, ops = ScriptedBackend({"fast": Recipe(rate(MS))}), INFERENCE[problem]

    called(backend, problem, {problem.op: parts("scripted:fast", 4, 4)}, ops)()
    called(backend, problem, None, ops)()

    assert computed(backend) == ["scripted:fast@4", "scripted:fast@4", "scripted:own@8"]


@both
def test_the_gradient_of_an_image_is_left_out_where_no_model_needs_it(problem: ConvProblem) -> None:
    backend, ops = ScriptedBackend({"fast": Recipe(rate(MS))}), FIRST_LAYER[problem]

    called(backend, problem, {op: parts("scripted:fast", 8) for op in ops}, ops)()

    assert computed(backend) == ["scripted:fast@8", "scripted:fast@8"]


@both
def test_a_division_goes_autograds_way_through_python_and_pytorchs_own_does_not(problem: ConvProblem) -> None:
    divided = events_of(called(CPU, problem, {op: parts("cpu:im2col", 4, 4) for op in ConvOp}))
    own = events_of(called(CPU, problem, None))

    assert {"_Convolution", "_ConvolutionBackward"} <= divided
    assert not any(name.startswith("_Convolution") for name in own)
    assert {"aten::convolution", "aten::convolution_backward"} <= own


@pytest.mark.parametrize("layout", Layout)
def test_neither_grad_nor_inference_mode_of_the_caller_matters(layout: Layout) -> None:
    problem = a_convolution(batch=8, layout=layout, filter_layout=layout)
    backend = ScriptedBackend({"fast": Recipe(rate(MS))})
    divisions = {op: parts("scripted:fast", 4, 4) for op in ConvOp}
    own = {op: undivided(backend.own, 8) for op in ConvOp}

    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            comparison = LiveMeasurer(backend).compare_calls(problem, EVERY_OP, divisions)
        assert [*comparison.times] == [call_key(own), call_key(divisions)]


@both
def test_the_workspaces_go_with_the_call(problem: ConvProblem) -> None:
    release_workspaces()
    call = called(CPU, problem, {op: parts("cpu:im2col", 4, 4) for op in ConvOp})
    call()
    held = len(_workspaces[CPU.queue()].owned)

    del call
    gc.collect()

    assert (held, len(_workspaces[CPU.queue()].owned)) == (3, 0)
    assert workspace_of(CPU).n_bytes == 0


def test_what_no_model_would_divide_is_not_timed() -> None:
    class Elsewhere(ScriptedBackend):
        device = torch.device("meta")

    backend = Elsewhere({"fast": Recipe(rate(MS))})

    with pytest.raises(BackendError, match="is PyTorch's own in a model, and cannot be divided"):
        called(backend, FORWARD, {ConvOp.FPROP: parts("scripted:fast", 8)})


@pytest.mark.parametrize(
    ("is_fatal", "error"), [(False, UnmeasuredError), (True, DeviceLostError)], ids=["a call", "the device"]
)
def test_what_breaks_is_told_of(is_fatal: bool, error: type[BackendError]) -> None:
    class Breakable(ScriptedBackend):
        is_broken = False

        @property
        def clock(self) -> Clock:
            def read() -> int:
                if self.is_broken:
                    raise RuntimeError("an illegal address")
                return self.world.clock()

            return read

    def fail(problem: ConvProblem, result: Tensor, behind: Tensor) -> None:
        backend.is_broken = is_fatal
        raise RuntimeError("no engine")

    backend = Breakable({"bad": Recipe(rate(MS), damage=fail)})
    divisions = {op: parts("scripted:bad", 8) for op in ConvOp}

    with pytest.raises(error, match="no engine"):
        LiveMeasurer(backend).compare_calls(FORWARD, EVERY_OP, divisions)
