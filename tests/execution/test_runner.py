"""Divisions compute what is undivided, in one workspace that serves whatever comes."""

import dataclasses
import functools
import gc
import itertools
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from mucudnn.algorithms import own
from mucudnn.backends import PartKernel, PartSumKernel, backend_of
from mucudnn.backends.cpu.backend import CpuBackend
from mucudnn.division import Division
from mucudnn.errors import BackendError
from mucudnn.execution.runner import Runner
from mucudnn.execution.weighing import division_job
from mucudnn.execution.workspace import Owner, Workspace, release_workspaces, workspace_of
from mucudnn.problem import ConvOp, ConvProblem, Layout
from tests.divisions import a_division, of_parts
from tests.operands import (
    a_convolution,
    finite_mask,
    operands_of,
    own_result,
    reference,
    relative_error,
    small_integers,
)

pytestmark = pytest.mark.usefixtures("one_thread", "few_to_collect")

CPU = torch.device("cpu")
BACKEND = backend_of("cpu:")
OWN = BACKEND.own

FLOAT64_BOUND = 1e-12
"""A lost, doubled or misplaced sample is off by far more; the worst form loses three of 16 digits."""

FLOAT32_BOUND = 1e-5
"""What Winograd's larger forms lose."""

WIDE = a_convolution(batch=9, kernel_size=(5, 5), padding=(2, 2), dtype="float64", bias=True)
"""A problem that all algorithms but the largest Fourier tiles compute."""

IN_C = ("cpu:cc_winograd4", "cpu:cc_winograd4_rows3", "cpu:cc_winograd4_k2")
"""Which are offered where channels fill a vector."""

ALGORITHMS = (
    *(name for name in BACKEND.algorithms(dataclasses.replace(WIDE, dtype="float32")) if name != OWN),
    *IN_C,
)


@pytest.fixture(autouse=True)
def no_workspaces() -> Iterator[None]:
    """No test finds a workspace that another one left."""
    release_workspaces()
    yield
    release_workspaces()


def for_op(problem: ConvProblem, op: ConvOp) -> ConvProblem:
    return dataclasses.replace(problem, op=op, bias=problem.bias and op is ConvOp.FPROP)


def in_layout(problem: ConvProblem, layout: Layout) -> ConvProblem:
    return dataclasses.replace(problem, layout=layout, filter_layout=layout)


IN_LAYOUTS = pytest.mark.parametrize(
    ("algorithm", "layout"),
    [
        (name, layout)
        for layout in Layout
        for name in (
            *BACKEND.algorithms(in_layout(dataclasses.replace(WIDE, dtype="float32"), layout)),
            *IN_C,
        )
    ],
)


# Operands.


class Aligned(CpuBackend):
    """The processor, as if operands had to be aligned; it notes in which form they are asked for."""

    alignment_bytes = 16

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[tuple[int, ...], torch.dtype, Layout]] = []

    def operand(self, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, layout: Layout) -> Tensor:
        self.asked.append((shape, dtype, layout))
        return tensor


@pytest.mark.parametrize("op", ConvOp)
def test_operands_are_asked_for_in_their_forms_where_they_must_be_aligned(op: ConvOp) -> None:
    problem = dataclasses.replace(WIDE, op=op, bias=False, layout=Layout.CHANNELS_LAST)
    backend, division = Aligned(), a_division("cpu:im2col", 9)

    first, second, bias = operands_of(problem)

    Runner(backend, problem, division)(Workspace(CPU), first, second, bias)

    layout = Layout.CHANNELS_LAST if op is ConvOp.WGRAD else Layout.CONTIGUOUS
    assert backend.asked == [
        (first.shape, first.dtype, Layout.CHANNELS_LAST),
        (second.shape, second.dtype, layout),
    ]


def test_operands_that_may_lie_anywhere_are_read_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(CpuBackend, "operand")

    Runner(BACKEND, WIDE, a_division("cpu:im2col", 9))(Workspace(CPU), *operands_of(WIDE))


# Workspaces.


def test_a_workspace_starts_empty() -> None:
    assert Workspace(CPU).n_bytes == 0


def test_a_workspace_grows_to_what_is_reserved_and_never_shrinks() -> None:
    workspace = Workspace(CPU)

    sizes = []
    for n_bytes in (1, 100, 50, 300, 0):
        workspace.reserve(n_bytes)
        sizes.append(workspace.n_bytes)

    assert sizes == [1, 100, 100, 300, 300]


@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_results_stay_right_when_the_workspace_grows(algorithm: str, op: ConvOp) -> None:
    workspace = Workspace(CPU)
    problem = for_op(WIDE, op)
    operands = operands_of(problem)
    small, large = (
        Runner(BACKEND, problem, a_division(algorithm, *batches)) for batches in [(1,) * 9, (8, 1)]
    )

    results = [runner(workspace, *operands) for runner in (small, large, small)]

    assert workspace.n_bytes == large.buffer_bytes
    for result in results:
        assert relative_error(result, reference(problem, *operands)) <= FLOAT64_BOUND


@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_runner_takes_the_buffer_that_it_declares(algorithm: str, op: ConvOp) -> None:
    problem = for_op(WIDE, op)
    workspace = Workspace(CPU)
    runner = Runner(BACKEND, problem, a_division(algorithm, 4, 4, 1))

    runner(workspace, *operands_of(problem))

    assert workspace.n_bytes == runner.buffer_bytes
    assert runner.buffer_bytes == BACKEND.buffer_bytes(problem.with_batch(4), algorithm)


class WatchedBackend(CpuBackend):
    """The processor, which remembers the kernels that it made for as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: weakref.WeakSet[object] = weakref.WeakSet()

    def slice_kernel(self, problem: ConvProblem, algorithm: str, buffer: Tensor) -> PartKernel:
        kernel = super().slice_kernel(problem, algorithm, buffer)
        self.kernels.add(kernel)
        return kernel

    def sum_kernel(self, problem: ConvProblem, algorithm: str, buffer: Tensor) -> PartSumKernel:
        kernel = super().sum_kernel(problem, algorithm, buffer)
        self.kernels.add(kernel)
        return kernel


@pytest.mark.parametrize("op", ConvOp)
def test_kernels_are_made_once_for_each_size(op: ConvOp) -> None:
    backend, workspace, problem = WatchedBackend(), Workspace(CPU), for_op(WIDE, op)
    runner = Runner(backend, problem, a_division("cpu:winograd4", 4, 4, 1))
    operands = operands_of(problem)

    for _ in range(3):
        runner(workspace, *operands)

    assert len(backend.kernels) == 2


@pytest.mark.parametrize("op", ConvOp)
def test_kernels_go_with_the_runner_that_they_were_made_for(op: ConvOp) -> None:
    backend, workspace, problem = WatchedBackend(), Workspace(CPU), for_op(WIDE, op)
    runner = Runner(backend, problem, a_division("cpu:winograd4", 4, 4, 1))
    runner(workspace, *operands_of(problem))

    del runner
    gc.collect()

    assert not backend.kernels


@pytest.mark.parametrize("op", ConvOp)
def test_a_workspace_that_grows_lets_go_of_all_that_hold_the_old_buffer(op: ConvOp) -> None:
    backend, workspace, problem = WatchedBackend(), Workspace(CPU), for_op(WIDE, op)
    runner = Runner(backend, problem, a_division("cpu:winograd4", 4, 4, 1))
    runner(workspace, *operands_of(problem))

    workspace.reserve(workspace.n_bytes + 1)
    gc.collect()

    assert not backend.kernels


@pytest.mark.parametrize("op", ConvOp)
def test_a_workspace_that_grew_in_inference_mode_serves_afterwards(op: ConvOp) -> None:
    workspace, problem = Workspace(CPU), for_op(WIDE, op)
    runner = Runner(BACKEND, problem, a_division("cpu:winograd4", 4, 4, 1))
    operands = operands_of(problem)
    with torch.inference_mode():
        runner(workspace, *operands)

    result = runner(workspace, *operands)

    assert relative_error(result, reference(problem, *operands)) <= FLOAT64_BOUND


# Whose workspace it is.


def in_another_thread(call: Callable[[], Workspace]) -> Workspace:
    found: list[Workspace] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_all_who_have_no_workspace_of_their_own_share_one() -> None:
    assert workspace_of(BACKEND) is workspace_of(BACKEND)


def test_every_owner_has_a_workspace_of_its_own() -> None:
    first, second = Owner(), Owner()

    workspaces = [workspace_of(BACKEND), workspace_of(BACKEND, first), workspace_of(BACKEND, second)]

    assert len({id(workspace) for workspace in workspaces}) == 3
    assert workspace_of(BACKEND, first) is workspaces[1]


def test_every_thread_has_workspaces_of_its_own() -> None:
    owner = Owner()

    assert in_another_thread(lambda: workspace_of(BACKEND)) is not workspace_of(BACKEND)
    assert in_another_thread(lambda: workspace_of(BACKEND, owner)) is not workspace_of(BACKEND, owner)


def test_a_workspace_goes_with_its_owner() -> None:
    owner = Owner()
    workspace = weakref.ref(workspace_of(BACKEND, owner))

    del owner
    gc.collect()

    assert workspace() is None


def test_a_workspace_goes_with_its_thread() -> None:
    workspace = weakref.ref(in_another_thread(lambda: workspace_of(BACKEND)))

    gc.collect()

    assert workspace() is None


def test_released_workspaces_are_given_back() -> None:
    owner = Owner()
    workspaces = [weakref.ref(workspace_of(BACKEND)), weakref.ref(workspace_of(BACKEND, owner))]

    release_workspaces()
    gc.collect()

    assert [workspace() for workspace in workspaces] == [None, None]


def test_a_runner_that_has_run_runs_again_after_a_release() -> None:
    problem = for_op(WIDE, ConvOp.FPROP)
    operands = operands_of(problem)
    runner = Runner(BACKEND, problem, a_division("cpu:winograd4", 4, 4, 1))
    before = runner(workspace_of(BACKEND), *operands)

    release_workspaces()

    assert torch.equal(runner(workspace_of(BACKEND), *operands), before)


# Divisions.

MIXED = (
    ("cpu:cc_winograd4", 2),
    ("cpu:cc_winograd4", 1),
    (OWN, 1),
    (OWN, 2),
    ("cpu:fft16", 1),
    ("cpu:im2col", 1),
    ("cpu:winograd4", 1),
)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("op", ConvOp)
def test_a_division_into_uneven_parts_of_several_algorithms_is_right(op: ConvOp, layout: Layout) -> None:
    problem = in_layout(for_op(WIDE, op), layout)
    operands = operands_of(problem)

    result = Runner(BACKEND, problem, of_parts(*MIXED))(Workspace(CPU), *operands)

    assert relative_error(result, reference(problem, *operands)) <= FLOAT64_BOUND


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("op", ConvOp)
def test_the_order_of_the_algorithms_makes_no_difference(op: ConvOp, layout: Layout) -> None:
    problem = in_layout(for_op(WIDE.with_batch(6), op), layout)
    operands = operands_of(problem)
    expected = reference(problem, *operands)
    workspace = Workspace(CPU)
    for order in itertools.permutations([("cpu:winograd4", 2), (OWN, 3), ("cpu:im2col", 1)]):
        result = Runner(BACKEND, problem, of_parts(*order))(workspace, *operands)

        assert relative_error(result, expected) <= FLOAT64_BOUND


@IN_LAYOUTS
@pytest.mark.parametrize("op", ConvOp)
def test_the_result_lies_in_memory_as_pytorchs_own(algorithm: str, op: ConvOp, layout: Layout) -> None:
    problem = in_layout(for_op(WIDE, op), layout)
    operands = operands_of(problem)

    result = Runner(BACKEND, problem, a_division(algorithm, 5, 4))(Workspace(CPU), *operands)

    assert result.stride() == BACKEND.own_convolution(problem, *operands).stride()


@pytest.mark.parametrize("op", ConvOp)
def test_a_division_gives_the_same_again_and_again(op: ConvOp) -> None:
    problem = for_op(WIDE, op)
    operands = operands_of(problem)
    runner, workspace = Runner(BACKEND, problem, of_parts(*MIXED)), Workspace(CPU)

    results = [runner(workspace, *operands) for _ in range(3)]

    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("op", ConvOp)
def test_sites_that_share_a_workspace_do_not_disturb_one_another(op: ConvOp) -> None:
    first, second = for_op(WIDE, op), for_op(a_convolution(batch=9, dtype="float64"), op)
    cases = [(problem, operands_of(problem)) for problem in (first, second)]
    workspace = Workspace(CPU)
    runners = [Runner(BACKEND, problem, a_division("cpu:winograd4", 5, 4)) for problem, _ in cases]

    for _ in range(2):
        for runner, (problem, operands) in zip(runners, cases, strict=True):
            result = runner(workspace, *operands)

            assert relative_error(result, reference(problem, *operands)) <= FLOAT64_BOUND


@pytest.mark.parametrize("op", ConvOp)
def test_pytorchs_own_undivided_is_pytorchs_own_bit_by_bit(op: ConvOp) -> None:
    problem = for_op(WIDE, op)
    operands = operands_of(problem)
    runner, workspace = Runner(BACKEND, problem, a_division(OWN, 9)), Workspace(CPU)

    result = runner(workspace, *operands)

    assert runner.is_own
    assert torch.equal(result, BACKEND.own_convolution(problem, *operands))
    assert workspace.n_bytes == 0


@pytest.mark.parametrize("op", [ConvOp.DGRAD, ConvOp.WGRAD])
def test_parts_of_pytorchs_own_make_no_tensor_in_the_place_of_one_that_they_do_not_read(
    op: ConvOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Tensor | None] = []
    own = CpuBackend.own_convolution

    def noted(
        problem: ConvProblem,
        first: Tensor,
        second: Tensor,
        bias: Tensor | None = None,
        unread: Tensor | None = None,
    ) -> Tensor:
        given.append(unread)
        return own(problem, first, second, bias, unread)

    problem = for_op(WIDE, op)
    x, w, _ = operands_of(for_op(WIDE, ConvOp.FPROP))
    monkeypatch.setattr(CpuBackend, "own_convolution", staticmethod(noted))
    unread, expected = (x, [x[:5], x[5:]]) if op is ConvOp.DGRAD else (w, [w, w])

    Runner(BACKEND, problem, a_division(OWN, 5, 4))(Workspace(CPU), *operands_of(problem), unread)

    assert [each.data_ptr() for each in given if each is not None] == [each.data_ptr() for each in expected]


def test_parts_of_an_input_gradient_take_the_result_in_the_place_of_an_image_that_nobody_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = for_op(WIDE, ConvOp.DGRAD)
    operands = operands_of(problem)
    expected = reference(problem, *operands)
    monkeypatch.setattr(own, "unread_operand", None)

    result = Runner(BACKEND, problem, a_division(OWN, 5, 4))(Workspace(CPU), *operands)

    assert relative_error(result, expected) < FLOAT64_BOUND


@pytest.mark.parametrize("division", [a_division(OWN, 5, 4), a_division("cpu:im2col", 9)])
def test_a_division_that_is_not_pytorchs_own_undivided_says_so(division: Division) -> None:
    assert not Runner(BACKEND, WIDE, division).is_own


@pytest.mark.parametrize("op", ConvOp)
def test_integers_divided_by_exact_algorithms_are_the_same_bit_by_bit(op: ConvOp) -> None:
    problem = dataclasses.replace(for_op(WIDE, op), dtype="float32")
    operands = operands_of(problem, small_integers)
    division = of_parts(("cpu:im2col", 3), ("cpu:im2col", 2), (OWN, 1), (OWN, 3))

    result = Runner(BACKEND, problem, division)(Workspace(CPU), *operands)

    assert torch.equal(result, reference(problem, *operands).float())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", ConvOp)
def test_a_16_bit_division_is_as_exact_as_one_of_its_parts(op: ConvOp, dtype: str) -> None:
    problem = dataclasses.replace(for_op(WIDE, op), dtype=dtype)
    operands = operands_of(problem)
    expected = reference(problem, *operands)
    undivided = BACKEND.own_convolution(problem, *operands)

    result = Runner(BACKEND, problem, a_division(OWN, 4, 4, 1))(Workspace(CPU), *operands)

    assert result.dtype is undivided.dtype
    assert relative_error(result, expected) <= 1.5 * relative_error(undivided, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_gradients_of_many_parts_are_summed_in_32_bits(dtype: str) -> None:
    problem = dataclasses.replace(for_op(WIDE, ConvOp.WGRAD).with_batch(64), dtype=dtype)
    operands = operands_of(problem)
    expected = reference(problem, *operands)

    result = Runner(BACKEND, problem, a_division(OWN, *(1,) * 64))(Workspace(CPU), *operands)

    # Each part is rounded to 16 bits, 64 of them at random; sums that were too are four times as bad.
    part, (images, gradients, _) = problem.with_batch(1), operands
    parts = [
        BACKEND.own_convolution(part, image, gradient, None)
        for image, gradient in zip(images.split(1), gradients.split(1), strict=True)
    ]
    in_16_bits = functools.reduce(torch.add, parts)
    assert in_16_bits.dtype is result.dtype
    assert relative_error(result, expected) <= 0.5 * relative_error(in_16_bits, expected)


def test_a_batch_of_nothing_has_an_empty_result() -> None:
    problem = WIDE.with_batch(0)

    result = Runner(BACKEND, problem, Division(()))(Workspace(CPU), *operands_of(problem))

    assert result.shape == problem.output_shape


def test_a_batch_of_nothing_has_a_weight_gradient_of_zeros() -> None:
    problem = for_op(WIDE, ConvOp.WGRAD).with_batch(0)

    result = Runner(BACKEND, problem, Division(()))(Workspace(CPU), *operands_of(problem))

    assert torch.equal(result, torch.zeros(problem.filter_shape, dtype=torch.float64))


def test_a_division_of_another_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"The division must be of 9 samples, but got 8\."):
        Runner(BACKEND, WIDE, a_division(OWN, 4, 4))


@pytest.mark.parametrize(
    "algorithm", ["cpu:winograd4", "cpu:cc_winograd4", "cpu:fft16", "cpu:fft32", "cpu:unknown"]
)
def test_an_algorithm_that_does_not_compute_the_problem_is_refused(algorithm: str) -> None:
    problem = a_convolution(dilation=(2, 2))

    with pytest.raises(
        BackendError,
        match=f"dilation 2x2.* must be one of cpu:aten, .*, but got '{algorithm}'",
    ):
        Runner(BACKEND, problem, a_division(algorithm, 1, 1))


@pytest.mark.parametrize("op", ConvOp)
def test_two_threads_run_one_division_at_once(op: ConvOp) -> None:
    problem = for_op(WIDE, op)
    runner = Runner(BACKEND, problem, of_parts(*MIXED))
    cases = [operands_of(problem, seed=seed) for seed in range(2)]
    alone = [runner(Workspace(CPU), *operands) for operands in cases]
    both_are_there = threading.Barrier(2)

    def run(number: int) -> list[Tensor]:
        both_are_there.wait()
        return [runner(workspace_of(BACKEND), *cases[number]) for _ in range(10)]

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, range(2)))

    for expected, together in zip(alone, results, strict=True):
        assert all(torch.equal(result, expected) for result in together)


@pytest.mark.parametrize("op", ConvOp)
def test_a_division_that_is_weighed_computes_the_problem(op: ConvOp) -> None:
    problem = for_op(WIDE, op)
    job = division_job(problem, of_parts(*MIXED)).prepare()

    result = job.run()

    assert result.nbytes == job.result_bytes
    assert result.isfinite().all()


# Numbers that are none.

NAN, INFINITY = float("nan"), float("inf")


def spoil_samples(first: Tensor, second: Tensor) -> None:
    """Put a NaN into one sample and infinities into two others."""
    first[1, 0, 2, 3], first[4, 1, 0, 0], first[8, 2, 8, 10] = NAN, INFINITY, -INFINITY


def spoil_all(first: Tensor, second: Tensor) -> None:
    """Put an infinity into the weight, or into dy for wgrad."""
    second[2, 1, 1, 2] = INFINITY


@pytest.mark.parametrize("spoil", [spoil_samples, spoil_all])
@IN_LAYOUTS
@pytest.mark.parametrize("op", ConvOp)
def test_strange_numbers_come_out_where_pytorch_puts_them(
    algorithm: str, op: ConvOp, layout: Layout, spoil: Callable[[Tensor, Tensor], None]
) -> None:
    problem = in_layout(dataclasses.replace(for_op(WIDE, op), dtype="float32"), layout)
    first, second, bias = operands_of(problem)
    spoil(first, second)
    expected = own_result(problem, first, second, bias)

    result = Runner(BACKEND, problem, a_division(algorithm, 4, 4, 1))(Workspace(CPU), first, second, bias)

    assert_same_numbers(result, expected)


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("cpu:winograd4", {}),
        ("cpu:cc_winograd4", {}),
        ("cpu:im2col", {}),
        ("cpu:onednn_nhwc", {}),
        # Rows of an image are a small one, too.
        ("cpu:aten_rows2", {"kernel_size": (3, 3), "padding": (0, 1)}),
    ],
)
def test_an_infinite_weight_marks_no_more_though_pytorch_computes_small_images_otherwise(
    algorithm: str, changes: dict[str, Any]
) -> None:
    shape = {"batch": 8, "in_channels": 8, "out_channels": 8, "input_size": (12, 12), **changes}
    problem = dataclasses.replace(for_op(WIDE, ConvOp.FPROP), dtype="float32", groups=1, **shape)
    image, weight, bias = operands_of(problem)
    weight[0, 0, 0, 0] = INFINITY

    result = Runner(BACKEND, problem, a_division(algorithm, *8 * [1]))(Workspace(CPU), image, weight, bias)

    assert_same_numbers(result, own_result(problem, image, weight, bias))


@pytest.mark.parametrize("before", ["cpu:winograd6", OWN])
@pytest.mark.parametrize("algorithm", ["cpu:winograd4", "cpu:winograd4_k8", *IN_C, "cpu:im2col"])
def test_an_infinite_gradient_marks_no_more_though_pytorch_computes_small_images_otherwise(
    algorithm: str, before: str
) -> None:
    shape = {"in_channels": 3, "out_channels": 16, "input_size": (12, 6), "kernel_size": (3, 3), "groups": 1}
    problem = dataclasses.replace(
        for_op(WIDE, ConvOp.WGRAD), batch=3, padding=(1, 1), dtype="float32", **shape
    )
    image, gradient, _ = operands_of(problem)
    gradient[1, 0, 0, 0] = INFINITY
    division = of_parts((before, 1), (algorithm, 1), (algorithm, 1))

    result = Runner(BACKEND, problem, division)(Workspace(CPU), image, gradient)

    assert_same_numbers(result, own_result(problem, image, gradient))


@pytest.mark.parametrize("algorithm", ["cpu:winograd4", *IN_C, "cpu:fft16", "cpu:im2col", OWN])
def test_gradients_of_zeros_without_memory_are_zeros(algorithm: str) -> None:
    problem = dataclasses.replace(for_op(WIDE, ConvOp.DGRAD), dtype="float32")
    first, second, _ = operands_of(problem)
    zeros = torch._efficientzerotensor(first.shape)

    result = Runner(BACKEND, problem, a_division(algorithm, 4, 4, 1))(Workspace(CPU), zeros, second)

    assert torch.equal(result, torch.zeros_like(result))


@pytest.mark.parametrize("spoilt", [0, 3, 5])
@pytest.mark.parametrize("order", [*itertools.permutations(["cpu:cc_winograd4", OWN, "cpu:im2col"])])
def test_a_strange_sample_of_one_algorithm_leaves_the_sum_of_the_others_alone(
    order: tuple[str, ...], spoilt: int
) -> None:
    problem = dataclasses.replace(for_op(WIDE, ConvOp.WGRAD), batch=6, dtype="float32")
    image, gradient, _ = operands_of(problem)
    image[spoilt, 1, 4, 4] = NAN
    expected = own_result(problem, image, gradient)

    division = of_parts(*((algorithm, 2) for algorithm in order))
    result = Runner(BACKEND, problem, division)(Workspace(CPU), image, gradient)

    assert_same_numbers(result, expected)


SUMMING_IN_PLACE = ("cpu:winograd4_k1", "cpu:cc_winograd4_k2")
"""They add each part to the gradient itself, some channels at a time."""

SUMMING_APART = ("cpu:winograd4", "cpu:cc_winograd4")


@pytest.mark.parametrize("value", [NAN, INFINITY])
@pytest.mark.parametrize("spoilt", [0, 2, 5])
@pytest.mark.parametrize("algorithm", [*SUMMING_IN_PLACE, *SUMMING_APART])
@pytest.mark.parametrize("before", ["cpu:im2col", "cpu:fft16", OWN])
def test_a_strange_sample_of_a_later_algorithm_adds_up_as_in_pytorch(
    before: str, algorithm: str, spoilt: int, value: float
) -> None:
    problem = dataclasses.replace(for_op(WIDE, ConvOp.WGRAD), batch=8, dtype="float32")
    image, gradient, _ = operands_of(problem)
    gradient[2 + spoilt, 1, 4, 4] = value
    expected = own_result(problem, image, gradient)

    division = of_parts((before, 2), (algorithm, 2), (algorithm, 3), (algorithm, 1))
    result = Runner(BACKEND, problem, division)(Workspace(CPU), image, gradient)

    assert_same_numbers(result, expected)


@pytest.mark.parametrize("spoilt", range(8))
@pytest.mark.parametrize("algorithm", [*SUMMING_IN_PLACE, *SUMMING_APART])
def test_a_strange_sample_is_forgotten_by_the_next_run(algorithm: str, spoilt: int) -> None:
    backend, problem = AligningBackend(), dataclasses.replace(for_op(WIDE, ConvOp.WGRAD), batch=8)
    runner, workspace = Runner(backend, problem, a_division(algorithm, 4, 1, 3)), Workspace(CPU)
    image, gradient, _ = operands_of(problem)
    strange = gradient.clone()
    strange[spoilt] = NAN
    runner(workspace, image, strange)
    backend.ran.clear()

    result = runner(workspace, image, gradient)

    assert backend.ran == []  # PyTorch's own was not needed
    assert relative_error(result, reference(problem, image, gradient)) <= FLOAT64_BOUND


@pytest.mark.parametrize("algorithm", ["cpu:winograd4", *IN_C])
def test_values_whose_products_overflow_in_tiles_only_come_out_right(algorithm: str) -> None:
    problem = dataclasses.replace(for_op(WIDE, ConvOp.FPROP), dtype="float32", bias=False)
    image, weight, _ = operands_of(problem)
    image *= 1e37
    weight *= 0.1

    result = Runner(BACKEND, problem, a_division(algorithm, 4, 4, 1))(Workspace(CPU), image, weight)

    assert result.isfinite().all()
    assert relative_error(result, reference(problem, image, weight)) <= FLOAT32_BOUND


def assert_same_numbers(result: Tensor, expected: Tensor) -> None:
    """Check that the same values are finite, and that those agree."""
    assert torch.equal(finite_mask(result), finite_mask(expected))
    finite = expected.isfinite()
    assert finite.any()
    assert relative_error(result[finite], expected[finite].double()) <= FLOAT32_BOUND


def test_a_workspace_that_must_grow_grows_to_what_is_known_to_be_needed() -> None:
    workspace = Workspace(CPU)

    workspace.reserve(100, capacity_bytes=300)
    small = workspace.n_bytes
    workspace.reserve(400, capacity_bytes=300)

    assert [small, workspace.n_bytes] == [300, 400]


class Whole:
    """Binds the whole buffer."""

    def bind(self, buffer: Tensor) -> Tensor:
        return buffer


class Device(CpuBackend):
    """The processor, as if its memory came and went in one piece, like a card's."""

    takes_memory_by_pages = False

    def release(self, tail: Tensor) -> None:
        tail.untyped_storage().resize_(0)


def test_memory_that_a_backend_takes_back_comes_again() -> None:
    workspace, whole = Workspace(CPU), Whole()
    workspace.reserve(1000)
    workspace.bound(whole)
    workspace.make_room(1000, 1000, Device())

    workspace.reserve(10)
    held_bytes = workspace.bound(whole).untyped_storage().nbytes()
    workspace.reserve(1000)

    assert held_bytes == 10  # no more than is needed: the rest may be in use elsewhere
    assert workspace.bound(whole).fill_(7).sum() == 7000


def test_what_is_bound_is_bound_once_and_anew_after_growth() -> None:
    workspace, whole = Workspace(CPU), Whole()
    workspace.reserve(10)
    first = workspace.bound(whole)

    workspace.reserve(5)
    second = workspace.bound(whole)
    workspace.reserve(20)

    assert second is first
    assert workspace.bound(whole).numel() == 20


class AligningBackend(CpuBackend):
    """The processor, as if its algorithms needed aligned operands; it notes the parts that it runs."""

    alignment_bytes = 16

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[int, int]] = []

    def own_convolution(self, problem: ConvProblem, first: Tensor, *others: Tensor | None) -> Tensor:  # type: ignore[override]  # as it is called here
        self.ran.append((problem.batch, first.storage_offset() * first.itemsize))
        return super().own_convolution(problem, first, *others)  # type: ignore[arg-type]  # the same


def test_parts_of_odd_sizes_go_last_so_that_all_start_where_their_problem_says() -> None:
    backend, problem = AligningBackend(), a_convolution(batch=11, dtype="float32")
    sample_bytes = problem.with_batch(1).input_bytes
    assert sample_bytes % 8 == 4
    runner = Runner(backend, problem, a_division(backend.own, 1, 2, 4, 4))

    runner(Workspace(CPU), *operands_of(problem))

    assert backend.ran == [(size, start * sample_bytes) for size, start in [(4, 0), (4, 4), (2, 8), (1, 10)]]


def test_a_lock_keeps_a_second_runner_out_of_the_workspace_until_the_first_is_done() -> None:
    workspace, problem = Workspace(CPU), for_op(WIDE, ConvOp.WGRAD)
    runner, operands = Runner(BACKEND, problem, a_division("cpu:winograd4", 4, 4, 1)), operands_of(problem)
    expected = runner(Workspace(CPU), *operands)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: runner(workspace, *operands), range(40)))

    assert all(torch.equal(result, expected) for result in results)


class InterruptedKernel:
    """A part's kernel; a signal comes when its first part is done."""

    def __init__(self, kernel: Any) -> None:
        self.prepare = getattr(kernel, "prepare", None)
        self.finish = kernel.finish
        self.run = self._interrupted(getattr(kernel, "run", None))
        self.add = self._interrupted(getattr(kernel, "add", None))

    def _interrupted(self, call: Any) -> Any:
        def run(*args: Any) -> Any:
            result = call(*args)
            if InterruptedBackend.is_armed:
                InterruptedBackend.is_armed = False
                signal.raise_signal(signal.SIGUSR1)
            return result

        return run


class InterruptedBackend(CpuBackend):
    """The processor, where a signal comes in the middle of a division, once it is armed."""

    is_armed = False

    def slice_kernel(self, problem: ConvProblem, algorithm: str, buffer: Tensor) -> PartKernel:
        return InterruptedKernel(super().slice_kernel(problem, algorithm, buffer))

    def sum_kernel(self, problem: ConvProblem, algorithm: str, buffer: Tensor) -> PartSumKernel:
        return InterruptedKernel(super().sum_kernel(problem, algorithm, buffer))


@pytest.mark.parametrize("op", ConvOp)
def test_a_signal_handler_may_compute_with_the_runner_that_it_interrupts(op: ConvOp) -> None:
    # The filter lies transformed at the start of the buffer, and the sum of a weight gradient in it.
    problem = for_op(WIDE, op)
    part = dataclasses.replace(a_division("cpu:winograd4", 4).parts[0], setup_s=1.0)
    rest = dataclasses.replace(part, batch=problem.batch - 8)
    runner = Runner(InterruptedBackend(), problem, Division((part, part, rest)))
    workspace, operands, others = Workspace(CPU), operands_of(problem), operands_of(problem, seed=7)
    expected, expected_inside = runner(Workspace(CPU), *operands), runner(Workspace(CPU), *others)
    inside: list[Tensor] = []
    before = signal.signal(
        signal.SIGUSR1, lambda *_: inside.append(runner(workspace, *others, keeps_filter=True))
    )
    try:
        results = []
        for _ in range(3):
            InterruptedBackend.is_armed = True
            results.append(runner(workspace, *operands, keeps_filter=True))
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert all(torch.equal(result, expected) for result in results)
    assert [torch.equal(each, expected_inside) for each in inside] == [True] * 3
