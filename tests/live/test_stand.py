"""The stand finds out every algorithm that is wrong, by algorithms each of which is wrong in one way."""

import dataclasses
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from mucudnn.algorithms import GradientSum
from mucudnn.algorithms.own import own_convolution
from mucudnn.backends import PartKernel, PartSumKernel, backend_of
from mucudnn.backends.base import OnSlices, SumOnSlices
from mucudnn.backends.cpu.backend import CpuBackend
from mucudnn.choices import Search
from mucudnn.division import Division
from mucudnn.execution.runner import Runner
from mucudnn.execution.workspace import Workspace
from mucudnn.live.reference import relative_error
from mucudnn.live.stand import Stand
from mucudnn.problem import ConvOp, ConvProblem, Layout
from mucudnn.profile import Candidate, Trial
from tests.doubles import MS, Recipe, ScriptedBackend, rate
from tests.operands import a_convolution

pytestmark = pytest.mark.usefixtures("one_thread")

BACKEND = backend_of("cpu:")
PROBLEM = a_convolution(batch=6, in_channels=8, out_channels=8)
SLICES = (ConvOp.FPROP, ConvOp.DGRAD)
SIZES = (1, 2, 4, 6)

BOUND = BACKEND.error_bound(PROBLEM, "cpu:winograd4")
"""Above it, whoever asked for the error refuses the algorithm."""

GRAIN_SIZE = 2**15
"""Elements of which PyTorch gives each thread at least so many, in a simple operation."""

DOUBLE = "cpu:double"
FREE_FLOATS = 4096
BUFFER_BYTES = 64


class Slices:
    """A right kernel of fprop and dgrad, to be spoilt."""

    def __init__(self, problem: ConvProblem, buffer: Tensor) -> None:
        self.problem = problem
        self.buffer = buffer

    def prepare(self, weight: Tensor) -> None:
        self.weight = weight

    def run(self, image: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> bool:
        out.copy_(own_convolution(self.problem, image, self.weight, bias))
        return True


@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("size", [2, 6])
def test_what_was_made_ready_is_right_whatever_others_left_in_the_workspace(op: ConvOp, size: int) -> None:
    problem = dataclasses.replace(PROBLEM, op=op)
    part, here = problem.part(size), slice(0, size)
    names = [name for name in BACKEND.algorithms(part, Search.EXHAUSTIVE) if name != BACKEND.own]
    wrong = set()
    for name in names:
        n_bytes = BACKEND.buffer_bytes(part, name)
        stand = Stand(BACKEND, problem, n_bytes)
        run = stand.run(Trial(part, name, whole=size == problem.batch))
        run.setup()
        stand.out.zero_()  # where some add at once
        stand.buffer.first(n_bytes).fill_(0x41)  # twelves, in float32
        run.ready_for_parts()
        run.part()
        if op is ConvOp.WGRAD:
            run.setup()
        out = stand.out if op is ConvOp.WGRAD else stand.out[here]
        if not relative_error(out, stand.reference.of(here)) <= BACKEND.error_bound(part, name):
            wrong.add(name)

    assert len(names) > 5
    assert wrong == set()


def test_sums_to_which_parts_add_and_which_are_finished_are_cleared_and_those_of_the_whole_are_not() -> None:
    problem = dataclasses.replace(PROBLEM, op=ConvOp.WGRAD)
    n_bytes = BACKEND.buffer_bytes(problem, "cpu:winograd4")
    whole, parts = (Trial(problem.part(size), "cpu:winograd4", whole=size == 6) for size in (6, 2))

    def left_by(ready: Callable[[Stand], None]) -> int:
        stand = Stand(BACKEND, problem, n_bytes)
        stand.buffer.first(n_bytes).fill_(0x41)
        ready(stand)
        return int(stand.buffer.first(8)[0])

    assert left_by(lambda stand: stand.run(parts).ready_for_parts()) == 0
    assert left_by(lambda stand: stand.run(whole).ready_for_parts()) == 0x41
    assert left_by(lambda stand: stand.run(whole).ready_for_setup()) == 0


class Sums:
    """A right kernel of wgrad, to be spoilt. It keeps its sum beside its workspace."""

    def __init__(self, problem: ConvProblem, buffer: Tensor) -> None:
        self.problem = problem
        self.buffer = buffer
        self.sum = torch.zeros(problem.filter_shape)

    def add(self, image: Tensor, gradient: Tensor, into: GradientSum, first: bool) -> None:
        dw = own_convolution(self.problem, image, gradient)
        self.sum = dw if first else self.sum + dw

    def finish(self, into: GradientSum) -> bool:
        into.take(self.sum)
        return True


class OnAnotherDevice(CpuBackend):
    """The processor under the name of a card."""

    device = torch.device("cuda")


class BackendWith(CpuBackend):
    """The processor, with one more algorithm."""

    def __init__(self, kernel: Callable[[ConvProblem, Tensor], object]) -> None:
        super().__init__()
        self._kernel = kernel

    def algorithms(
        self,
        problem: ConvProblem,
        search: Search = Search.HEURISTIC,
        whole: bool = True,  # in both roles the same
    ) -> tuple[str, ...]:
        return (*super().algorithms(problem), DOUBLE)

    def buffer_bytes(self, problem: ConvProblem, algorithm: str) -> int:
        return BUFFER_BYTES if algorithm == DOUBLE else super().buffer_bytes(problem, algorithm)

    def slice_kernel(self, problem: ConvProblem, algorithm: str, buffer: Tensor) -> PartKernel:
        return OnSlices(self._kernel(problem, buffer))  # type: ignore[arg-type]  # the test chose the op

    def sum_kernel(self, problem: ConvProblem, algorithm: str, buffer: Tensor) -> PartSumKernel:
        return SumOnSlices(self._kernel(problem, buffer))  # type: ignore[arg-type]  # the test chose the op


def error_of(kernel: Callable[[ConvProblem, Tensor], object], problem: ConvProblem, size: int = 6) -> float:
    """The error that a stand finds in an algorithm at one size."""
    stand = Stand(BackendWith(kernel), problem, buffer_bytes=BUFFER_BYTES)
    return stand.run(Trial(problem.with_batch(size), DOUBLE, whole=size == problem.batch)).error()


def for_op(problem: ConvProblem, op: ConvOp) -> ConvProblem:
    return dataclasses.replace(problem, op=op, bias=problem.bias and op is ConvOp.FPROP)


# What is right.


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("op", ConvOp)
def test_what_is_right_is_found_right(op: ConvOp, layout: Layout, size: int) -> None:
    problem = dataclasses.replace(for_op(PROBLEM, op), layout=layout, filter_layout=layout)
    part = problem.with_batch(size)
    algorithms = BACKEND.algorithms(part)
    stand = Stand(BACKEND, problem, max(BACKEND.buffer_bytes(part, name) for name in algorithms))

    for name in algorithms:
        error = stand.run(Trial(part, name, whole=size == problem.batch)).error()

        assert error <= BOUND


@pytest.mark.parametrize("name", ["cpu:aten", "cpu:im2col", "cpu:winograd4", "cpu:cc_winograd4"])
def test_a_bias_is_added(name: str) -> None:
    problem = dataclasses.replace(PROBLEM, bias=True)
    stand = Stand(BACKEND, problem, BACKEND.buffer_bytes(problem, name))

    assert stand.run(Trial(problem, name, whole=True)).error() <= BOUND


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("op", ConvOp)
def test_every_type_has_a_bound_that_pytorchs_own_keeps(op: ConvOp, dtype: str) -> None:
    problem = dataclasses.replace(for_op(PROBLEM, op), dtype=dtype)
    stand = Stand(BACKEND, problem, buffer_bytes=0)

    for size in SIZES:
        error = stand.run(Trial(problem.with_batch(size), BACKEND.own, whole=size == 6)).error()

        assert error <= BACKEND.error_bound(problem, BACKEND.own)


def test_the_doubles_of_these_tests_are_right_as_long_as_nobody_spoils_them() -> None:
    assert error_of(Slices, PROBLEM) <= BOUND
    assert error_of(Sums, for_op(PROBLEM, ConvOp.WGRAD)) <= BOUND


@pytest.mark.parametrize("op", ConvOp)
def test_trials_that_ran_before_make_no_difference_to_an_error(op: ConvOp) -> None:
    problem = for_op(PROBLEM, op)
    trials = [
        Trial(problem.with_batch(size), name, whole=size == 6)
        for size in SIZES
        for name in BACKEND.algorithms(problem)
    ]
    n_bytes = max(BACKEND.buffer_bytes(trial.problem, trial.algorithm) for trial in trials)
    fresh = [Stand(BACKEND, problem, n_bytes).run(trial).error() for trial in trials]
    stand = Stand(BACKEND, problem, n_bytes)
    runs = [stand.run(trial) for trial in trials]
    for run in runs:
        run.setup()
        run.part()

    # The reference, in float64, may be added up in another order.
    assert [run.error() for run in runs] == pytest.approx(fresh, rel=1e-6)


def test_the_same_seed_makes_the_same_operands() -> None:
    first, second, other = (Stand(BACKEND, PROBLEM, buffer_bytes=0, seed=seed) for seed in (1, 1, 2))

    assert torch.equal(first.first, second.first)
    assert not torch.equal(first.first, other.first)


@pytest.mark.parametrize("op", ConvOp)
def test_a_finished_division_runs_as_in_a_model(op: ConvOp) -> None:
    """Every part by its algorithm, on its samples of the operands, and with the bias."""
    results: list[Tensor] = []
    recipe = Recipe(rate(MS), damage=lambda _problem, result, _behind: results.append(result))
    backend = ScriptedBackend({"one": recipe, "other": recipe})
    stand = Stand(backend, for_op(dataclasses.replace(PROBLEM, bias=True), op), buffer_bytes=0)
    parts = (Candidate("scripted:one", 4, 0.0, 0), Candidate("scripted:other", 2, 0.0, 0))

    stand.division(Division(parts))()

    ran = [entry for entry in backend.world.ran if not entry.endswith("set-up")]
    assert ran == ["scripted:one@4", "scripted:other@2"]
    whole = torch.stack(results).sum(0) if op is ConvOp.WGRAD else torch.cat(results)
    assert relative_error(whole, stand.reference.of(slice(0, 6))) <= BOUND


@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("size", [3, 6], ids=["a part", "the whole"])
def test_pytorchs_own_is_not_timed_with_an_operand_that_autograd_has_at_hand(op: ConvOp, size: int) -> None:
    stand, own = Stand(BACKEND, for_op(PROBLEM, op), buffer_bytes=0), BACKEND.own
    division = Division((Candidate(own, size, 0.0, 0),) * (6 // size))
    runs = stand.run(Trial(stand.problem.part(size), own, whole=size == 6)).part, stand.division(division)
    for run in runs:
        run()

    with profile(activities=[ProfilerActivity.CPU], acc_events=True, record_shapes=True) as recording:
        for run in runs:
            run()

    convolution = "aten::conv2d" if op is ConvOp.FPROP else "aten::convolution_backward"
    made = [event for event in recording.events() if event.name.startswith("aten::empty")]
    within = [event for event in made if convolution in _around(event)]
    # A result in parts is made beforehand, as autograd's caller would make it; nothing else is.
    assert len(made) - len(within) == (size < 6)


def _around(event: FunctionEvent) -> set[str]:
    """The names of what an event happened in."""
    parent = event.cpu_parent
    return set() if parent is None else {parent.name} | _around(parent)


def test_an_ordinary_operation_of_the_processor_is_of_all_threads() -> None:
    operation = Stand(BACKEND, PROBLEM, buffer_bytes=0).ordinary_operation

    with profile(activities=[ProfilerActivity.CPU], acc_events=True, record_shapes=True) as recording:
        operation()

    (multiplication,) = [event for event in recording.events() if event.name == "aten::mul_"]
    assert multiplication.input_shapes[0] == [GRAIN_SIZE * torch.get_num_threads()]


def test_an_ordinary_operation_is_nothing_on_another_device() -> None:
    stand = Stand(BACKEND, PROBLEM, buffer_bytes=0)
    stand.backend = OnAnotherDevice()

    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recording:
        stand.ordinary_operation()

    assert not recording.events()


@pytest.mark.parametrize("op", ConvOp)
def test_operands_that_somebody_wrote_to_are_what_they_were_again_and_the_reference_too(op: ConvOp) -> None:
    stand, untouched = (Stand(BACKEND, for_op(PROBLEM, op), buffer_bytes=0) for _ in range(2))
    assert not stand.mend()
    for operand in (stand.first, stand.second):
        operand.mul_(2 if operand is stand.first else -1)
        stand.reference.of(slice(0, 1))

        assert stand.mend()
        assert not stand.mend()
        assert torch.equal(stand.first, untouched.first)
        assert torch.equal(stand.second, untouched.second)
        assert torch.equal(stand.reference.of(slice(0, 1)), untouched.reference.of(slice(0, 1)))


# What is wrong.


class SlightlyWrongSlices(Slices):
    def run(self, image: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> bool:
        super().run(image, weight, out, bias)
        out.mul_(1.0001)
        return True


class SlicesWithoutTheLastSample(Slices):
    def run(self, image: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> bool:
        super().run(image, weight, out, bias)
        out[-1] = float("nan")
        return True


class SlicesThatWriteNothing(Slices):
    def run(self, image: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> bool:
        return True


class SlicesWithOneWrongSize(Slices):
    def run(self, image: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> bool:
        super().run(image, weight, out, bias)
        if self.problem.batch == 2:
            out[0].zero_()
        return True


class SlicesWithoutBias(Slices):
    def run(self, image: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> bool:
        return super().run(image, weight, out, None)


class SlicesThatAddToTheResult(Slices):
    def run(self, image: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> bool:
        out.add_(own_convolution(self.problem, image, self.weight, bias))
        return True


def write_beyond(buffer: Tensor) -> None:
    """Change the byte right behind the buffer."""
    buffer.as_strided((1,), (1,), buffer.storage_offset() + buffer.numel()).add_(1)


class SlicesThatWriteBeyond(Slices):
    def run(self, image: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> bool:
        write_beyond(self.buffer)
        return super().run(image, weight, out, bias)


class SlicesThatReadWhatNobodyWrote(Slices):
    def run(self, image: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> bool:
        super().run(image, weight, out, bias)
        out.add_(self.buffer.view(torch.float32)[0])
        return True


def whatever_lay_there() -> Tensor:
    """A number that nobody wrote: mostly 0, as what was given back just before was."""
    torch.zeros(FREE_FLOATS)
    return torch.empty(FREE_FLOATS)[FREE_FLOATS // 2]


class SlicesThatReadFreeMemory(Slices):
    def run(self, image: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> bool:
        super().run(image, weight, out, bias)
        out.add_(whatever_lay_there())
        return True


@pytest.mark.parametrize("op", SLICES)
@pytest.mark.parametrize(
    "kernel",
    [
        SlightlyWrongSlices,
        SlicesWithoutTheLastSample,
        SlicesThatWriteNothing,
        SlicesThatAddToTheResult,
        SlicesThatWriteBeyond,
        SlicesThatReadWhatNobodyWrote,
        SlicesThatReadFreeMemory,
    ],
)
def test_slices_that_are_wrong_are_found_out(kernel: type[Slices], op: ConvOp) -> None:
    assert not error_of(kernel, for_op(PROBLEM, op)) <= BOUND


def test_slices_without_their_bias_are_found_out() -> None:
    assert not error_of(SlicesWithoutBias, dataclasses.replace(PROBLEM, bias=True)) <= BOUND


@pytest.mark.parametrize("op", SLICES)
def test_slices_that_are_wrong_at_one_size_are_wrong_at_that_size_only(op: ConvOp) -> None:
    problem = for_op(PROBLEM, op)

    wrong = [size for size in SIZES if not error_of(SlicesWithOneWrongSize, problem, size) <= BOUND]

    assert wrong == [2]


class SlightlyWrongSums(Sums):
    def finish(self, into: GradientSum) -> bool:
        self.sum = self.sum * 1.0001
        return super().finish(into)


class SumsThatNeverAccumulate(Sums):
    def finish(self, into: GradientSum) -> bool:
        return super().finish(GradientSum(into.total))


class SumsThatAlwaysAccumulate(Sums):
    def finish(self, into: GradientSum) -> bool:
        return super().finish(GradientSum(into.total, accumulate=True))


class SumsOfTheLastPart(Sums):
    """The classic mistake: each part overwrites the sum."""

    def add(self, image: Tensor, gradient: Tensor, into: GradientSum, first: bool) -> None:
        super().add(image, gradient, into, first=True)


class SumsThatNeverStartAnew(Sums):
    """Whatever the workspace held is part of the sum."""

    def add(self, image: Tensor, gradient: Tensor, into: GradientSum, first: bool) -> None:
        self.sum = self.sum + self.buffer.view(torch.float32)[0]
        super().add(image, gradient, into, first=False)


class SumsThatBreakWhenTheyAccumulate(Sums):
    def finish(self, into: GradientSum) -> bool:
        super().finish(into)
        if into.accumulate:
            into.total[0] = float("nan")
        return True


class SumsWithOneWrongSize(Sums):
    def add(self, image: Tensor, gradient: Tensor, into: GradientSum, first: bool) -> None:
        super().add(image, gradient, into, first)
        if self.problem.batch == 2:
            self.sum = 2 * self.sum


class SumsThatWriteBeyond(Sums):
    def add(self, image: Tensor, gradient: Tensor, into: GradientSum, first: bool) -> None:
        write_beyond(self.buffer)
        super().add(image, gradient, into, first)


class SumsThatReadFreeMemory(Sums):
    def add(self, image: Tensor, gradient: Tensor, into: GradientSum, first: bool) -> None:
        super().add(image, gradient, into, first)
        self.sum = self.sum + whatever_lay_there()


class SumsThatWriteBeyondInTheEnd(Sums):
    def finish(self, into: GradientSum) -> bool:
        write_beyond(self.buffer)
        return super().finish(into)


@pytest.mark.parametrize(
    "kernel",
    [
        SlightlyWrongSums,
        SumsThatNeverAccumulate,
        SumsThatAlwaysAccumulate,
        SumsOfTheLastPart,
        SumsThatNeverStartAnew,
        SumsThatBreakWhenTheyAccumulate,
        SumsThatWriteBeyond,
        SumsThatWriteBeyondInTheEnd,
        SumsThatReadFreeMemory,
    ],
)
@pytest.mark.parametrize("size", [2, 4, 6])
def test_sums_that_are_wrong_are_found_out(kernel: type[Sums], size: int) -> None:
    assert not error_of(kernel, for_op(PROBLEM, ConvOp.WGRAD), size) <= BOUND


def test_sums_that_are_wrong_at_one_size_are_wrong_at_that_size_only() -> None:
    problem = for_op(PROBLEM, ConvOp.WGRAD)

    wrong = [size for size in SIZES if not error_of(SumsWithOneWrongSize, problem, size) <= BOUND]

    assert wrong == [2]


@pytest.mark.parametrize("op", ConvOp)
def test_pytorchs_own_is_found_out_too_when_it_reads_free_memory(
    op: ConvOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Careless(CpuBackend):
        def own_convolution(self, *operands: Any) -> Tensor:
            return super().own_convolution(*operands) + whatever_lay_there()

    problem = for_op(PROBLEM, op)
    run = Stand(Careless(), problem, buffer_bytes=0).run(Trial(problem, BACKEND.own, whole=True))

    assert not run.error() <= BOUND


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize(
    ("channels", "input_size", "kernel_size", "stride"),
    [(8, (1, 1), (3, 3), 2), (16, (1, 1), (5, 5), 2), (16, (2, 2, 2), (3, 3, 3), 1)],
)
def test_what_passes_for_16_bits_is_right_on_other_memory_too(
    channels: int, input_size: tuple[int, ...], kernel_size: tuple[int, ...], stride: int, layout: Layout
) -> None:
    """PyTorch's own dw leaves some of these to what lay in memory, on processors with AVX-512 alone."""
    problem = a_convolution(
        batch=6, in_channels=channels, out_channels=channels, input_size=input_size, kernel_size=kernel_size,
        stride=(stride,) * len(input_size), padding=tuple(taps // 2 for taps in kernel_size),
        dilation=(1,) * len(input_size), dtype="bfloat16", layout=layout, filter_layout=layout,
        op=ConvOp.WGRAD,
    )  # fmt: skip
    for name in BACKEND.algorithms(problem, Search.EXHAUSTIVE):
        stand = Stand(BACKEND, problem, BACKEND.buffer_bytes(problem, name))
        bound = BACKEND.error_bound(problem, name)
        if stand.run(Trial(problem, name, whole=True)).error() <= bound:
            runner = Runner(BACKEND, problem, Division((Candidate(name, problem.batch, 0.0, 0),)))
            workspace = Workspace(BACKEND.device)
            for junk in (1e20, -1.0):
                [torch.full((size,), junk) for size in (256, 1024, FREE_FLOATS, 16384) for _ in range(8)]
                dw = runner(workspace, stand.first, stand.second, None, stand.unread)
                assert relative_error(dw, stand.reference.of(slice(0, problem.batch))) <= bound


@pytest.mark.parametrize("kernel", [SlicesThatWriteBeyond, SumsThatWriteBeyond])
def test_whoever_writes_beyond_its_workspace_has_an_infinite_error(kernel: type[Slices | Sums]) -> None:
    op = ConvOp.FPROP if issubclass(kernel, Slices) else ConvOp.WGRAD

    assert error_of(kernel, for_op(PROBLEM, op)) == math.inf


class SlicesThatNeedAlignment(Slices):
    def run(self, image: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> bool:
        super().run(image, weight, out, bias)
        if image.data_ptr() % 16:
            out.zero_()
        return True


class SumsThatNeedAlignment(Sums):
    def add(self, image: Tensor, gradient: Tensor, into: GradientSum, first: bool) -> None:
        super().add(image, gradient, into, first)
        if image.data_ptr() % 16:
            self.sum.zero_()


@pytest.mark.parametrize("op", ConvOp)
def test_parts_that_are_wrong_off_alignment_are_found_out(op: ConvOp) -> None:
    """The first part starts at a multiple of 16 bytes; with these shapes the second may not."""
    kernel = SumsThatNeedAlignment if op is ConvOp.WGRAD else SlicesThatNeedAlignment
    problem = for_op(dataclasses.replace(PROBLEM, in_channels=3, out_channels=5), op)

    wrong = [size for size in range(1, 7) if not error_of(kernel, problem, size) <= BOUND]

    assert wrong == [1, 2, 3]  # of 4 samples and more there is no second part


class SlicesThatCannotRun(Slices):
    def run(self, image: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> bool:
        raise RuntimeError("could not create a primitive")


def test_what_breaks_breaks_with_its_own_words() -> None:
    with pytest.raises(RuntimeError, match="could not create a primitive"):
        error_of(SlicesThatCannotRun, PROBLEM)


# The measure.


def test_a_stand_and_its_operands_go_with_their_last_user() -> None:
    stand = Stand(BACKEND, PROBLEM, buffer_bytes=BUFFER_BYTES)
    stand.run(Trial(PROBLEM, BACKEND.own, whole=True)).error()
    operand = weakref.ref(stand.first)

    gc.disable()
    try:
        del stand
        gone = operand() is None
    finally:
        gc.enable()

    assert gone
