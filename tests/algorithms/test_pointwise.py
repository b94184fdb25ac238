"""Filters of one tap: matrix products of the operands, by BLAS and in C."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mucudnn.algorithms.base import Algorithm, GradientSum
from mucudnn.algorithms.panels import PanelAlgorithm
from mucudnn.algorithms.pointwise import PointwiseAlgorithm
from mucudnn.problem import ConvOp, ConvProblem, Layout
from tests.algorithms.allocations import allocated_bytes
from tests.algorithms.kernels import compute
from tests.algorithms.tried import pointwise
from tests.operands import (
    finite_mask,
    normal,
    operands_of,
    own_result,
    poisoned_result,
    reference,
    relative_error,
    small_integers,
)

pytestmark = pytest.mark.usefixtures("one_thread")

GEMM = PointwiseAlgorithm()

EVERY = (GEMM, PanelAlgorithm(), PanelAlgorithm(2), PanelAlgorithm(3))

every_algorithm = pytest.mark.parametrize("algorithm", EVERY, ids=lambda each: each.name)

FLOAT64_BOUND = 1e-12
"""Any wrong pixel or channel is off by far more."""

NO_BUFFER = torch.empty(0, dtype=torch.uint8)

COPYING = {"aten::copy_", "aten::clone", "aten::contiguous", "aten::empty", "aten::empty_strided"}

PROBLEMS = {
    "two dimensions": pointwise(9, 11),
    "one dimension": pointwise(13),
    "three dimensions": pointwise(3, 4, 5),
    "one pixel": pointwise(1, 1),
    "one row": pointwise(1, 9),
    "one sample": pointwise(9, 11, batch=1),
    "one channel in": pointwise(9, 11, in_channels=1),
    "one channel out": pointwise(9, 11, out_channels=1),
    "many channels": pointwise(8, 8, in_channels=40, out_channels=24),
    "more channels than a panel has": pointwise(5, 7, in_channels=131, out_channels=70),
    "panels of several images": pointwise(3, 4, batch=9, in_channels=16, out_channels=48),
    "whole panels": pointwise(16, 8, in_channels=64, out_channels=128, batch=2),
    "more pixels than are rows at once": pointwise(25, 16, in_channels=20, out_channels=33),
    "dilation, which a single tap has not": pointwise(9, 11, dilation=(2, 3)),
}

each_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
each_op = pytest.mark.parametrize("op", ConvOp)
each_layout = pytest.mark.parametrize("layout", Layout)
each_filter_layout = pytest.mark.parametrize("filter_layout", Layout)


@every_algorithm
@each_filter_layout
@each_layout
@each_op
@each_problem
def test_the_result_is_that_of_pytorch(
    algorithm: Algorithm, problem: ConvProblem, op: ConvOp, layout: Layout, filter_layout: Layout
) -> None:
    problem = dataclasses.replace(
        problem, op=op, layout=layout, filter_layout=filter_layout, bias=op is ConvOp.FPROP
    )
    operands = operands_of(problem)

    result, is_sound = compute(algorithm, problem, *operands)

    assert is_sound
    assert relative_error(result, reference(problem, *operands)) <= FLOAT64_BOUND


@every_algorithm
@each_layout
@each_op
@each_problem
def test_products_of_integers_are_computed_bit_by_bit(
    algorithm: Algorithm, problem: ConvProblem, op: ConvOp, layout: Layout
) -> None:
    problem = dataclasses.replace(problem, op=op, layout=layout, dtype="float32")
    operands = operands_of(problem, small_integers)

    result, _ = compute(algorithm, problem, *operands)

    assert torch.equal(result, reference(problem, *operands).float())


@every_algorithm
def test_a_filter_of_any_strides_is_read_where_it_lies(algorithm: Algorithm) -> None:
    problem = pointwise(9, 11)
    image, weight, _ = operands_of(problem)
    turned = weight.transpose(0, 1).contiguous().transpose(0, 1)

    result, _ = compute(algorithm, problem, image, turned)

    assert relative_error(result, reference(problem, image, weight)) <= FLOAT64_BOUND


@every_algorithm
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float16"}, "products without a copy are for float32 and float64"),
        ({"kernel_size": (1, 3)}, "products without a copy need filters of one tap, stride 1 and one group"),
        ({"stride": (2, 1)}, "products without a copy need filters of one tap, stride 1 and one group"),
        (
            {"groups": 2, "in_channels": 4, "out_channels": 4},
            "products without a copy need filters of one tap, stride 1 and one group",
        ),
        ({"padding": (0, 1)}, "products without a copy need images without padding"),
        ({"batch": 0}, "there is nothing to compute"),
    ],
)
def test_what_is_no_product_of_the_operands_is_refused(
    algorithm: Algorithm, changes: dict[str, object], reason: str
) -> None:
    assert algorithm.refusal(pointwise(9, 11, **changes)) == reason


@each_problem
@each_op
def test_what_is_computed_is_not_refused_and_takes_no_workspace(problem: ConvProblem, op: ConvOp) -> None:
    assert GEMM.refusal(problem.with_op(op)) is None
    assert GEMM.workspace_bytes(problem.with_op(op)) == 0


LARGE = pointwise(24, 25, in_channels=64, out_channels=48, dtype="float32", bias=True)


@each_filter_layout
@each_layout
@each_op
def test_nothing_is_allocated_and_nothing_is_copied(
    op: ConvOp, layout: Layout, filter_layout: Layout
) -> None:
    problem = dataclasses.replace(
        LARGE, op=op, layout=layout, filter_layout=filter_layout, bias=op is ConvOp.FPROP
    )
    first, second, bias = operands_of(problem)
    out = poisoned_result(problem)
    sums, slices = GEMM.sum_kernel(problem, NO_BUFFER), GEMM.slice_kernel(problem, NO_BUFFER)

    def call() -> None:
        if op is ConvOp.WGRAD:
            sums.add(first, second, GradientSum(out), first=True)
            sums.add(first, second, GradientSum(out), first=False)
        else:
            slices.run(first, second, out, bias)

    assert allocated_bytes(call) == 0
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recording:
        call()
    names = {event.name for event in recording.events()}
    assert names & {"aten::mm", "aten::bmm", "aten::addmm_", "aten::addbmm_"}
    assert not names & COPYING


def parts(problem: ConvProblem) -> list[tuple[ConvProblem, slice]]:
    """Parts of 3, 1 and 3 samples."""
    places = [slice(0, 3), slice(3, 4), slice(4, 7)]
    return [(problem.with_batch(here.stop - here.start), here) for here in places]


def add_parts(
    algorithm: Algorithm, problem: ConvProblem, image: Tensor, gradient: Tensor, into: GradientSum
) -> None:
    for number, (part, here) in enumerate(parts(problem)):
        algorithm.sum_kernel(part, NO_BUFFER).add(image[here], gradient[here], into, first=number == 0)


@every_algorithm
@each_layout
@pytest.mark.parametrize("op", [ConvOp.FPROP, ConvOp.DGRAD])
def test_each_part_is_written_to_its_own_slice(algorithm: Algorithm, op: ConvOp, layout: Layout) -> None:
    problem = dataclasses.replace(PROBLEMS["two dimensions"], op=op, layout=layout, batch=7)
    image, weight, _ = operands_of(problem)
    out = poisoned_result(problem)

    for part, here in parts(problem)[:2]:
        compute(algorithm, part, image[here], weight, out=out[here])

    assert relative_error(out[:4], reference(problem, image, weight)[:4]) <= FLOAT64_BOUND
    assert out[4:].isnan().all()


@every_algorithm
@each_filter_layout
@each_layout
@each_problem
def test_the_parts_of_a_weight_gradient_add_up(
    algorithm: Algorithm, problem: ConvProblem, layout: Layout, filter_layout: Layout
) -> None:
    problem = dataclasses.replace(
        problem, op=ConvOp.WGRAD, batch=7, layout=layout, filter_layout=filter_layout
    )
    image, gradient, _ = operands_of(problem)
    total = poisoned_result(problem)

    add_parts(algorithm, problem, image, gradient, GradientSum(total))

    assert relative_error(total, reference(problem, image, gradient)) <= FLOAT64_BOUND


@every_algorithm
@each_layout
def test_a_weight_gradient_is_added_to_what_is_there(algorithm: Algorithm, layout: Layout) -> None:
    problem = dataclasses.replace(PROBLEMS["two dimensions"], op=ConvOp.WGRAD, batch=7, layout=layout)
    image, gradient, _ = operands_of(problem)
    total = normal(problem.filter_shape, torch.Generator().manual_seed(1))
    expected = reference(problem, image, gradient) + total

    add_parts(algorithm, problem, image, gradient, GradientSum(total, accumulate=True))

    assert relative_error(total, expected) <= FLOAT64_BOUND


@every_algorithm
@each_layout
@each_op
@pytest.mark.parametrize("place", ["first", "second"])
def test_a_result_is_sound_since_its_strange_numbers_are_where_pytorch_has_them(
    algorithm: Algorithm, place: str, op: ConvOp, layout: Layout
) -> None:
    problem = dataclasses.replace(PROBLEMS["two dimensions"], op=op, layout=layout, dtype="float32")
    first, second, _ = operands_of(problem)
    spoilt = {"first": first, "second": second}[place]
    spoilt[0, 0, 0, 0], spoilt[1, 1, -1, -1], spoilt[2, 2, 0, 0] = float("nan"), float("inf"), -float("inf")

    result, is_sound = compute(algorithm, problem, first, second)

    assert is_sound
    assert not result.isfinite().all()
    assert torch.equal(finite_mask(result), finite_mask(own_result(problem, first, second)))
