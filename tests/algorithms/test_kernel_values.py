"""Numbers that are none: kernels report them, or have them where PyTorch has them."""

import pytest
import torch

from mucudnn.algorithms import Algorithm, GradientSum, tile_kernels
from mucudnn.algorithms.turning import Turning, ways_of
from mucudnn.problem import ConvOp, ConvProblem
from tests.algorithms.kernels import (
    BLOCKED,
    DIVIDED,
    DIVIDED_BLOCKS,
    EVERY,
    GROUPED,
    PROBLEMS,
    SAME_LAYOUTS,
    SQUARE,
    TILES,
    WINOGRAD4_BOUND,
    GuardedBuffer,
    accepted,
    add_up,
    compute,
    for_blocks,
    parts_of,
    slice_kernels,
    sum_kernels,
    sum_parts,
)
from tests.operands import (
    finite_mask,
    operands_of,
    own_result,
    poisoned_result,
    reference,
    relative_error,
)

pytestmark = pytest.mark.usefixtures("one_thread", "products_transpose")

STRANGE_NAMES = ("3x3", "5x3", "9x9", "stride 2", "groups", "dilation", "3x3x3", "channels apart")
STRANGE = {name: PROBLEMS[name] for name in STRANGE_NAMES}
STRANGE_BLOCKS = {name: BLOCKED[name] for name in ("3x3", "7x7", "3x3x3", "channels apart")}
FEW = {"3x3": SQUARE, "9x9": PROBLEMS["9x9"]}
PLACES = ("first", "second")
VALUES = (float("nan"), float("inf"), float("-inf"))


@pytest.fixture
def products_transpose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contiguous images are transposed in the one way that spreads such numbers, however quick it is here."""

    def by_products(scratch: tuple[torch.Tensor, torch.Tensor], workers: int) -> Turning:  # for all
        return ways_of(scratch[0].dtype)["products"]

    monkeypatch.setattr(tile_kernels, "quickest", by_products)


@pytest.mark.parametrize("place", PLACES)
@accepted(STRANGE, blocked=STRANGE_BLOCKS, dtype="float32")
def test_a_result_that_passes_has_its_strange_numbers_where_pytorch_has_them(
    algorithm: Algorithm, problem: ConvProblem, place: str
) -> None:
    first, second, bias = operands_of(problem)
    spoilt = {"first": first, "second": second}[place]
    spoilt[0, 0, 0, 0], spoilt[1, 0, 1, 1], spoilt[1, -1, 2, 0] = VALUES

    result, is_good = compute(algorithm, problem, first, second, bias)

    expected = own_result(problem, first, second, bias)
    assert not is_good or torch.equal(finite_mask(result), finite_mask(expected))


@pytest.mark.parametrize(("value", "corner"), [(VALUES[0], 0), (VALUES[1], -1), (VALUES[2], -1)])
@pytest.mark.parametrize("place", PLACES)
@accepted(FEW, blocked=STRANGE_BLOCKS, dtype="float32", names=EVERY, layouts=SAME_LAYOUTS[:1])
def test_what_would_spread_strange_numbers_reports_them(
    algorithm: Algorithm, problem: ConvProblem, place: str, value: float, corner: int
) -> None:
    first, second, bias = operands_of(problem)
    spoilt = {"first": first, "second": second}[place]
    spoilt[(corner,) * spoilt.dim()] = value

    _, is_good = compute(algorithm, problem, first, second, bias)

    stays_in_place = (
        algorithm.name.startswith("im2col") and problem.op is not ConvOp.WGRAD and place == "first"
    )
    assert is_good is stays_in_place


@accepted({"3x3": for_blocks()}, blocked={"3x3": for_blocks()}, dtype="float32", names=TILES)
def test_values_whose_sums_overflow_in_either_direction_are_reported_or_right(
    algorithm: Algorithm, problem: ConvProblem
) -> None:
    first, second, bias = operands_of(problem)
    first, second = 1e36 * torch.ones_like(first), torch.ones_like(second)
    first[0] *= -1

    result, is_good = compute(algorithm, problem, first, second, bias)

    expected = reference(problem, first, second, bias)
    assert not is_good or relative_error(result, expected) <= WINOGRAD4_BOUND


@pytest.mark.parametrize("value", VALUES[:2])
@accepted(DIVIDED, ConvOp.FPROP, ConvOp.DGRAD, blocked=DIVIDED_BLOCKS, dtype="float32")
def test_kernels_of_all_sizes_report_a_strange_filter_that_one_prepared(
    algorithm: Algorithm, problem: ConvProblem, value: float
) -> None:
    image, weight, bias = operands_of(problem)
    weight[0, 0, 0] = value
    parts, out = parts_of(algorithm, problem), poisoned_result(problem)
    kernels = slice_kernels(algorithm, problem, parts)

    kernels[parts[0][0]].prepare(weight)
    answers = [kernels[size].run(image[here], weight, out[here], bias) for size, here in parts]

    assert not any(answers)


SUMMING_APART = tuple(name for name in EVERY if name not in GROUPED and not name.startswith("cc_"))
"""In C the total is written while it is found whether the sum is finite."""


@accepted(DIVIDED, ConvOp.WGRAD, blocked=DIVIDED_BLOCKS, dtype="float32", names=SUMMING_APART)
def test_a_sum_that_is_not_finite_leaves_the_total_alone(algorithm: Algorithm, problem: ConvProblem) -> None:
    image, gradient, _ = operands_of(problem)
    image[4, 0] = float("nan")
    total = torch.ones(problem.filter_shape)

    is_good = sum_parts(algorithm, problem, image, gradient, GradientSum(total, accumulate=True))

    assert not is_good
    assert torch.equal(total, torch.ones(problem.filter_shape))


@pytest.mark.parametrize("spoilt", [0, 6, 13])
@accepted(DIVIDED, ConvOp.WGRAD, blocked=DIVIDED_BLOCKS, dtype="float32")
def test_a_strange_sample_of_any_part_is_reported(
    algorithm: Algorithm, problem: ConvProblem, spoilt: int
) -> None:
    image, gradient, _ = operands_of(problem)
    gradient[spoilt, -1] = float("nan")

    assert not sum_parts(algorithm, problem, image, gradient, GradientSum(poisoned_result(problem)))


@pytest.mark.parametrize("spoilt", [0, 6, 13])
@accepted(FEW, ConvOp.WGRAD, blocked=DIVIDED_BLOCKS, dtype="float32")
def test_a_sum_that_was_strange_once_is_forgotten(
    algorithm: Algorithm, problem: ConvProblem, spoilt: int
) -> None:
    problem = problem.with_batch(14)
    image, gradient, _ = operands_of(problem)
    parts, total = parts_of(algorithm, problem), poisoned_result(problem)
    kernels = sum_kernels(algorithm, problem, parts)
    strange = gradient.clone()
    strange[spoilt] = float("nan")
    add_up(kernels, parts, image, strange, GradientSum(poisoned_result(problem)))

    is_good = add_up(kernels, parts, image, gradient, GradientSum(total))

    assert is_good
    assert relative_error(total, reference(problem, image, gradient)) <= WINOGRAD4_BOUND


@accepted(FEW, ConvOp.FPROP, blocked=STRANGE_BLOCKS)
def test_a_strange_bias_makes_strange_numbers_in_its_channel_only(
    algorithm: Algorithm, problem: ConvProblem
) -> None:
    image, weight, _ = operands_of(problem)
    bias = torch.zeros(problem.out_channels, dtype=image.dtype)
    bias[2] = float("inf")

    result, is_good = compute(algorithm, problem, image, weight, bias)

    expected = own_result(problem, image, weight, bias)
    assert not is_good or torch.equal(finite_mask(result), finite_mask(expected))


@accepted(FEW, ConvOp.FPROP, ConvOp.DGRAD, blocked=STRANGE_BLOCKS, dtype="float32")
def test_a_filter_that_was_strange_once_is_forgotten(algorithm: Algorithm, problem: ConvProblem) -> None:
    image, weight, bias = operands_of(problem)
    kernel = algorithm.slice_kernel(problem, GuardedBuffer(algorithm.workspace_bytes(problem)).inside)
    kernel.prepare(torch.full_like(weight, float("nan")))
    kernel.run(image, torch.full_like(weight, float("nan")), poisoned_result(problem), bias)
    out = poisoned_result(problem)

    kernel.prepare(weight)
    is_good = kernel.run(image, weight, out, bias)

    assert is_good
    assert torch.equal(out, compute(algorithm, problem, image, weight, bias)[0])
