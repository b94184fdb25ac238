"""Parts of a division, all bound to one buffer."""

import pytest
import torch

from mucudnn.algorithms import Algorithm, GradientSum
from mucudnn.problem import ConvOp, ConvProblem
from tests.algorithms.kernels import (
    DIVIDED,
    DIVIDED_BLOCKS,
    EVERY,
    FLOAT64_BOUND,
    MIXED_LAYOUTS,
    SAME_LAYOUTS,
    GuardedBuffer,
    accepted,
    parts_of,
    slice_kernels,
    sum_parts,
)
from tests.operands import normal, operands_of, poisoned_result, reference, relative_error, small_integers

pytestmark = pytest.mark.usefixtures("one_thread")


@accepted(DIVIDED, ConvOp.FPROP, ConvOp.DGRAD, blocked=DIVIDED_BLOCKS)
def test_kernels_of_all_sizes_share_the_filter_that_one_prepared(
    algorithm: Algorithm, problem: ConvProblem
) -> None:
    image, weight, bias = operands_of(problem)
    parts, out = parts_of(algorithm, problem), poisoned_result(problem)
    kernels = slice_kernels(algorithm, problem, parts)

    kernels[parts[0][0]].prepare(weight)
    answers = [kernels[size].run(image[here], weight, out[here], bias) for size, here in parts]

    assert all(answers)
    assert relative_error(out, reference(problem, image, weight, bias)) <= FLOAT64_BOUND


@accepted(DIVIDED, ConvOp.WGRAD, blocked=DIVIDED_BLOCKS, names=EVERY)
def test_the_parts_of_a_weight_gradient_add_up(algorithm: Algorithm, problem: ConvProblem) -> None:
    image, gradient, _ = operands_of(problem)
    total = poisoned_result(problem)

    is_good = sum_parts(algorithm, problem, image, gradient, GradientSum(total))

    assert is_good
    assert relative_error(total, reference(problem, image, gradient)) <= FLOAT64_BOUND


@accepted(DIVIDED, ConvOp.WGRAD, blocked=DIVIDED_BLOCKS, layouts=SAME_LAYOUTS + MIXED_LAYOUTS)
def test_a_weight_gradient_is_added_to_what_is_there(algorithm: Algorithm, problem: ConvProblem) -> None:
    image, gradient, _ = operands_of(problem)
    total = normal(problem.filter_shape, torch.Generator().manual_seed(1))
    expected = reference(problem, image, gradient) + total

    sum_parts(algorithm, problem, image, gradient, GradientSum(total, accumulate=True))

    assert relative_error(total, expected) <= FLOAT64_BOUND


@accepted(DIVIDED, ConvOp.WGRAD, blocked=DIVIDED_BLOCKS)
def test_a_first_part_starts_the_sum_anew(algorithm: Algorithm, problem: ConvProblem) -> None:
    image, gradient, _ = operands_of(problem)
    total = poisoned_result(problem)
    kernel = algorithm.sum_kernel(problem, GuardedBuffer(algorithm.workspace_bytes(problem)).inside)

    into = GradientSum(total)

    kernel.add(image, gradient, into, first=True)
    kernel.add(image, gradient, into, first=True)
    kernel.finish(into)

    assert relative_error(total, reference(problem, image, gradient)) <= FLOAT64_BOUND


@accepted(DIVIDED, ConvOp.WGRAD, dtype="float32", names=("im2col",))
def test_the_parts_of_a_weight_gradient_of_integers_add_up_bit_by_bit(
    algorithm: Algorithm, problem: ConvProblem
) -> None:
    image, gradient, _ = operands_of(problem, small_integers)
    total = poisoned_result(problem)

    sum_parts(algorithm, problem, image, gradient, GradientSum(total))

    assert torch.equal(total, reference(problem, image, gradient).float())
