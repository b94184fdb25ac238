"""Convolutions are timed with their gradients as a model calls them, and PyTorch's own as PyTorch does."""

import dataclasses
import gc
import re
from collections.abc import Callable, Mapping
from typing import NoReturn

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mucudnn.algorithms.own import operands, recorded_convolution
from mucudnn.backends import Backend, backend_of
from mucudnn.backends.cpu.backend import CpuBackend
from mucudnn.choices import Policy
from mucudnn.division import Division, undivided
from mucudnn.errors import BackendError, DeviceLostError, UnmeasuredError
from mucudnn.execution.workspace import Owner, _workspaces, release_workspaces, workspace_of
from mucudnn.live.measurer import LiveMeasurer
from mucudnn.live.rehearsal import Operands, rehearsed
from mucudnn.problem import ConvOp, ConvProblem, Layout
from mucudnn.profile import Comparison, Record, RefusalKind
from mucudnn.profiling.measurer import ModelCall
from mucudnn.profiling.profiler import Profiler
from mucudnn.store.memory import MemoryStore
from tests.divisions import a_division
from tests.doubles import MS, BreakableBackend, Recipe, ScriptedBackend, rate
from tests.operands import a_convolution

pytestmark = pytest.mark.usefixtures("one_thread", "few_to_collect")

CPU = backend_of("cpu:")
FORWARD = a_convolution(batch=8, stride=(2, 2), bias=True)
TRANSPOSED = a_convolution(batch=8, op=ConvOp.DGRAD, stride=(2, 2))
EVERY_OP = tuple(ConvOp)

FIRST_LAYER = {FORWARD: (ConvOp.FPROP, ConvOp.WGRAD), TRANSPOSED: (ConvOp.DGRAD, ConvOp.WGRAD)}

both = pytest.mark.parametrize("problem", [FORWARD, TRANSPOSED], ids=["plain", "transposed"])


def tensors(problem: ConvProblem) -> Operands:
    image, weight, bias = operands(problem, torch.Generator().manual_seed(0))
    with torch.no_grad():
        return Operands(image, weight, bias, recorded_convolution(problem, image, weight, bias))


def own_of(backend: Backend, *ops: ConvOp) -> dict[ConvOp, Division]:
    return {op: undivided(backend.own, 8) for op in ops or EVERY_OP}


def everything(problem: ConvProblem, *, is_sharing: bool = False, limit_bytes: int = 2**40) -> ModelCall:
    return ModelCall(problem, is_sharing, limit_bytes)


def called(
    backend: Backend,
    problem: ConvProblem,
    divisions: Mapping[ConvOp, Division],
    limit_bytes: int = 2**40,
    is_sharing: bool = False,
) -> Callable[[], None]:
    call = ModelCall(problem, is_sharing, limit_bytes)
    common = Owner()
    owners = {op: Owner() if is_sharing else common for op in ConvOp}
    return rehearsed(backend, call, divisions, tensors(problem), owners)


def events_of(call: Callable[[], None]) -> set[str]:
    call()  # kernels are bound by the first
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recording:
        call()
    return {event.name for event in recording.events()}


def computed(backend: ScriptedBackend) -> list[str]:
    return [each for each in backend.world.ran if not each.endswith("set-up")]


@both
def test_all_parts_of_all_ops_run_and_nothing_else_does(problem: ConvProblem) -> None:
    backend = ScriptedBackend({name: Recipe(rate(MS)) for name in ("a", "b", "c")})
    divisions = dict(zip(EVERY_OP, (a_division(f"scripted:{name}", 6, 2) for name in "abc"), strict=True))

    called(backend, problem, divisions)()

    assert sorted(computed(backend)) == sorted(f"scripted:{name}@{size}" for name in "abc" for size in (6, 2))


@both
def test_inference_runs_the_forward_pass_alone(problem: ConvProblem) -> None:
    backend = ScriptedBackend({"fast": Recipe(rate(MS))})

    called(backend, problem, {problem.op: a_division("scripted:fast", 4, 4)})()
    called(backend, problem, own_of(backend, problem.op))()

    assert computed(backend) == ["scripted:fast@4", "scripted:fast@4", "scripted:aten@8"]


@both
def test_the_gradient_of_an_image_is_left_out_where_no_model_needs_it(problem: ConvProblem) -> None:
    backend, ops = ScriptedBackend({"fast": Recipe(rate(MS))}), FIRST_LAYER[problem]

    called(backend, problem, {op: a_division("scripted:fast", 8) for op in ops})()

    assert computed(backend) == ["scripted:fast@8", "scripted:fast@8"]


@both
def test_a_division_goes_autograds_way_through_python_and_pytorchs_own_does_not(problem: ConvProblem) -> None:
    divided = events_of(called(CPU, problem, {op: a_division("cpu:im2col", 4, 4) for op in ConvOp}))
    own = events_of(called(CPU, problem, own_of(CPU)))

    assert {"_Convolution", "_ConvolutionBackward"} <= divided
    assert not any(name.startswith("_Convolution") for name in own)
    assert {"aten::convolution", "aten::convolution_backward"} <= own


@pytest.mark.parametrize("layout", Layout)
def test_neither_grad_nor_inference_mode_of_the_caller_matters(layout: Layout) -> None:
    problem = a_convolution(batch=8, layout=layout, filter_layout=layout)
    backend = ScriptedBackend({"fast": Recipe(rate(MS))})
    divisions, own = {op: a_division("scripted:fast", 4, 4) for op in ConvOp}, own_of(backend)

    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            seen = LiveMeasurer(backend).compare_calls(everything(problem), own, divisions)
        assert isinstance(seen, Comparison)
        call = everything(problem)
        assert [*seen.times] == [call.key(own), call.key(divisions)]


@pytest.mark.parametrize(("is_sharing", "workspaces"), [(False, 1), (True, 3)])
@both
def test_the_workspaces_go_with_the_call(problem: ConvProblem, is_sharing: bool, workspaces: int) -> None:
    release_workspaces()
    divisions = {op: a_division("cpu:im2col", 4, 4) for op in ConvOp}
    call = called(CPU, problem, divisions, is_sharing=is_sharing)
    call()
    held = len(_workspaces[CPU.queue()].owned)

    del call
    gc.collect()

    assert (held, len(_workspaces[CPU.queue()].owned)) == (workspaces, 0)
    assert workspace_of(CPU).n_bytes == 0


class Elsewhere(CpuBackend):
    """The processor; it notes what its buffers are to give back before PyTorch's own takes its workspace."""

    def __init__(self) -> None:
        super().__init__()
        self.released: list[int] = []

    def release(self, tail: Tensor) -> None:
        self.released.append(tail.numel())


@both
def test_buffer_and_pytorchs_own_stay_within_the_limit_together(problem: ConvProblem) -> None:
    backend = Elsewhere()
    buffer_bytes = backend.buffer_bytes(problem.part(8), "cpu:im2col")
    own = a_division("cpu:aten", 8, n_bytes=1000)
    kernels = a_division("cpu:im2col", 8, n_bytes=buffer_bytes)
    divisions = {problem.op: kernels, ConvOp.WGRAD: own}
    with_room = called(backend, problem, divisions, buffer_bytes + 1000)
    without = called(backend, problem, divisions, buffer_bytes + 999)

    with_room()
    assert backend.released == []
    without()
    assert backend.released == [1]


def test_in_reuse_mode_a_filter_is_transformed_at_each_call() -> None:
    problem, divisions = a_convolution(batch=8), {ConvOp.FPROP: a_division("scripted:fast", 8)}
    backend = ScriptedBackend({"fast": Recipe(rate(MS))})
    divisions = {ConvOp.FPROP: a_division("scripted:fast", 8, time_s=1.0, setup_s=0.5)}

    set_ups = []
    for is_sharing in (False, True):
        call = called(backend, problem, divisions, is_sharing=is_sharing)
        for _ in range(6):
            call()
        set_ups.append(sum(each.endswith("set-up") for each in backend.world.ran))
        backend.world.ran.clear()

    assert set_ups[0] == 6
    assert set_ups[1] < 6  # where a site owns its workspace, the filter stays


def test_what_no_model_would_divide_is_not_timed() -> None:
    class Nowhere(ScriptedBackend):
        device = torch.device("meta")

    backend = Nowhere({"fast": Recipe(rate(MS))})

    with pytest.raises(BackendError, match="is PyTorch's own in a model, and cannot be divided"):
        called(backend, FORWARD, {ConvOp.FPROP: a_division("scripted:fast", 8)})()


def a_breakable(*, is_fatal: bool) -> BreakableBackend:
    bad = Recipe(rate(MS), damage=lambda *_: backend.fail("no engine", is_fatal=is_fatal))
    backend = BreakableBackend({"bad": bad})
    return backend


def test_what_decides_a_call_s_time_is_in_its_name() -> None:
    own = a_division("scripted:aten", 8, n_bytes=60)
    divisions = {ConvOp.FPROP: a_division("scripted:a", 8, n_bytes=50), ConvOp.WGRAD: own}

    names = [
        everything(FORWARD, is_sharing=is_sharing, limit_bytes=limit_bytes).key(divisions)
        for is_sharing, limit_bytes in ((False, 110), (False, 109), (True, 110))
    ]

    assert names == [
        "fprop=scripted:a@8*1 wgrad=scripted:aten@8*1",
        "fprop=scripted:a@8*1 wgrad=scripted:aten@8*1 wgrad<=109",
        "fprop=scripted:a@8*1 wgrad=scripted:aten@8*1 sharing fprop<=50",
    ]


def test_hooks_of_the_caller_see_nothing_of_a_rehearsal() -> None:
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    call = called(CPU, FORWARD, {op: a_division("cpu:im2col", 4, 4) for op in ConvOp})
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()

    assert packed == []


BAD = {op: a_division("scripted:bad", 8) for op in ConvOp}
CALL = everything(FORWARD)


def profiler(backend: ScriptedBackend, store: MemoryStore) -> Profiler:
    return Profiler(LiveMeasurer(backend), store, 2**40, Policy.ALL)


def test_divisions_that_break_together_are_refused_and_not_tried_again() -> None:
    store, backend = MemoryStore(), a_breakable(is_fatal=False)

    first, second = (profiler(backend, store).compare_calls(CALL, own_of(backend), BAD) for _ in range(2))
    record = store.records(backend.environment(), [CALL.trial(BAD)])[CALL.trial(BAD)]

    assert first == second == record
    assert record.refusal is not None
    assert (record.refusal.kind, record.refusal.reason) == (RefusalKind.FAILED, "no engine")
    assert sum(each == "scripted:bad@8" for each in backend.world.ran) == 1


def test_divisions_that_break_the_device_together_are_told_of_once() -> None:
    store, backend, another = MemoryStore(), a_breakable(is_fatal=True), a_breakable(is_fatal=True)

    with pytest.raises(DeviceLostError, match=r"fprop=scripted:bad.* no engine"):
        profiler(backend, store).compare_calls(CALL, own_of(backend), BAD)

    known = profiler(another, store).compare_calls(CALL, own_of(another), BAD)
    assert isinstance(known, Record)
    assert known.trial == CALL.trial(BAD)
    assert another.world.ran == []


FINE = {op: a_division("scripted:fine", 8) for op in ConvOp}


@pytest.mark.parametrize("base", [BAD, own_of(ScriptedBackend({}))], ids=["an algorithm", "own"])
def test_a_base_that_breaks_the_device_is_told_of_once_and_its_rivals_are_not_blamed(
    base: dict[ConvOp, Division],
) -> None:
    def a_backend() -> BreakableBackend:
        def broken(*_: object) -> NoReturn:
            backend.fail("no engine", is_fatal=True)

        others = {"bad": Recipe(rate(MS), damage=broken), "fine": Recipe(rate(MS))}
        backend = BreakableBackend(others, own=Recipe(broken))
        return backend

    store, backend, another = MemoryStore(), a_backend(), a_backend()

    with pytest.raises(DeviceLostError, match=re.escape(f"fprop={base[ConvOp.FPROP].key} ")):
        profiler(backend, store).compare_calls(CALL, base, FINE)

    trials = [CALL.trial(each) for each in (base, FINE)]
    assert [*store.records(backend.environment(), trials)] == trials[:1]
    known = profiler(another, store).compare_calls(CALL, base, FINE)
    assert isinstance(known, Record)
    assert known.trial == trials[0]
    assert another.world.ran == []


def test_where_pytorchs_own_fails_nothing_is_known_of_the_call() -> None:
    def broken(samples: int) -> float:
        raise RuntimeError("no engine")

    backend = ScriptedBackend({"fast": Recipe(rate(MS))}, own=Recipe(broken))
    divisions = {op: a_division("scripted:fast", 8) for op in ConvOp}

    with pytest.raises(UnmeasuredError, match="could not be measured: no engine"):
        LiveMeasurer(backend).compare_calls(CALL, own_of(backend), divisions)
    assert profiler(backend, MemoryStore()).compare_calls(CALL, own_of(backend), divisions) is None


@both
@pytest.mark.parametrize("layout", Layout)
def test_in_a_frozen_graph_pytorchs_own_is_packed_beforehand_and_images_lie_channels_last(
    layout: Layout, problem: ConvProblem
) -> None:
    problem = dataclasses.replace(problem, layout=layout)
    call = ModelCall(problem, is_sharing=False, limit_bytes=2**40, is_frozen=True)
    owners = dict.fromkeys(ConvOp, Owner())

    own, divided = (
        events_of(rehearsed(CPU, call, {problem.op: each}, tensors(problem), owners))
        for each in (undivided(CPU.own, 8), a_division("cpu:im2col", 4, 4))
    )

    kind = "_transpose" * (problem.op is ConvOp.DGRAD)
    assert [name for name in own if "mkldnn" in name] == [f"mkldnn::_convolution{kind}_pointwise"]
    assert "mucudnn::inferred_convolution" in divided
    assert not any("reorder" in name for name in own)
    # What follows a convolution is computed along with it, or in a pass of its own.
    assert ("aten::relu_" in divided, "aten::relu_" in own) == (True, False)
    assert ("aten::contiguous" in divided and "aten::clone" in divided) == (layout is Layout.CONTIGUOUS)


def test_in_a_frozen_graph_no_filter_stays_transformed_where_other_layers_use_the_workspace() -> None:
    backend = ScriptedBackend({"fast": Recipe(rate(MS))})
    for is_sharing, set_ups in ((False, 3), (True, 2)):  # seen a second time, it is compared
        call = ModelCall(FORWARD, is_sharing, limit_bytes=2**40, is_frozen=True)
        owners = {op: Owner() for op in ConvOp}
        backend.world.ran.clear()
        division = a_division("scripted:fast", 8, time_s=1e-3, setup_s=1e-3)
        run = rehearsed(backend, call, {ConvOp.FPROP: division}, tensors(FORWARD), owners)

        for _ in range(3):
            run()

        assert backend.world.ran.count("scripted:fast set-up") == set_ups


@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_others_take_of_the_buffer_before_each_call_is_given_back(
    monkeypatch: pytest.MonkeyPatch, is_frozen: bool
) -> None:
    needed = CPU.buffer_bytes(FORWARD, "cpu:im2col")
    divisions = {ConvOp.FPROP: a_division("cpu:im2col", 8, n_bytes=needed)}
    released: list[int] = []
    monkeypatch.setattr(CPU, "release", lambda tail: released.append(tail.numel()))
    call = ModelCall(FORWARD, is_sharing=False, limit_bytes=needed, is_frozen=is_frozen)
    for taken_bytes, expected in ((0, []), (needed // 2, [needed // 2] * 2)):
        asked = call._replace(taken_bytes=taken_bytes)
        run = rehearsed(CPU, asked, divisions, tensors(FORWARD), dict.fromkeys(ConvOp, Owner()))
        run()  # takes the buffer
        released.clear()

        run()
        run()

        assert released == expected
