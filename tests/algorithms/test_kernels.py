"""Every algorithm computes every op that it accepts, and allocates nothing on the way."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mucudnn.algorithms import Algorithm, GradientSum, SliceKernel, SumKernel, tile_geometry
from mucudnn.algorithms.tile_filters import multiply_in_parts
from mucudnn.algorithms.tile_geometry import TileGeometry
from mucudnn.algorithms.tiles import FOURIER_INPUTS, TileAlgorithm
from mucudnn.problem import ConvOp, ConvProblem
from tests.algorithms.allocations import ALLOCATION_BOUND, allocated_bytes_of_threads
from tests.algorithms.kernels import (
    BLOCKED,
    BLOCKED_VARIED,
    EVERY,
    FLOAT64_BOUND,
    MIXED_LAYOUTS,
    PROBLEMS,
    SUMMED,
    TILES,
    VARIANTS,
    VARIED,
    WINOGRAD4_BOUND,
    GuardedBuffer,
    a_double,
    accepted,
    algorithm_of,
    compute,
    for_blocks,
)
from tests.operands import operands_of, poisoned_result, reference, relative_error, small_integers

pytestmark = pytest.mark.usefixtures("one_thread")

FLOAT32_BOUND = 1e-6
"""Some ten roundings of 6e-8: what PyTorch's own loses is 2e-7."""


@accepted(PROBLEMS, blocked=BLOCKED, names=EVERY)
def test_the_result_is_that_of_pytorch(algorithm: Algorithm, problem: ConvProblem) -> None:
    operands = operands_of(problem)

    result, is_good = compute(algorithm, problem, *operands)

    assert is_good
    assert relative_error(result, reference(problem, *operands)) <= FLOAT64_BOUND


def test_every_two_of_algorithm_problem_op_and_layouts_are_tried_even_if_not_thoroughly() -> None:
    tried: set[tuple[object, ...]] = set()
    known: set[tuple[object, ...]] = set()
    (mark,) = test_the_result_is_that_of_pytorch.pytestmark  # type: ignore[attr-defined]  # a function has it
    for case in mark.args[1]:
        algorithm, forms = case.values
        key = case.id.removesuffix("-rest").removeprefix(f"{algorithm.name}-")
        for form in forms:
            layouts = form.layout, form.filter_layout
            triples = {(algorithm, key, form.op), (algorithm, form.op, layouts), (key, form.op, layouts)}
            known |= triples
            tried |= set() if case.marks else triples

    assert tried == known


@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("name", ["chunks of some images", "chunks of some rows"])
def test_these_problems_are_read_in_several_chunks(name: str, op: ConvOp) -> None:
    geometry = TileGeometry(TileAlgorithm(outputs=4, channels=2), BLOCKED[name].with_op(op))

    assert [len(block.chunks) > 1 for block in geometry.blocks] == [True]


@accepted(VARIED, layouts=MIXED_LAYOUTS)
def test_the_result_is_that_of_pytorch_where_filters_lie_otherwise_than_images(
    algorithm: Algorithm, problem: ConvProblem
) -> None:
    operands = operands_of(problem)

    result, is_good = compute(algorithm, problem, *operands)

    assert is_good
    assert relative_error(result, reference(problem, *operands)) <= FLOAT64_BOUND


@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("name", EVERY)
def test_every_algorithm_computes_all_three_ops_but_sums_over_channels_which_wgrad_has_not(
    name: str, op: ConvOp
) -> None:
    algorithm, problems = algorithm_of(name), BLOCKED_VARIED if name in VARIANTS else PROBLEMS
    computed = any(algorithm.refusal(problem.with_op(op)) is None for problem in problems.values())

    assert computed is not (name in SUMMED and op is ConvOp.WGRAD)


@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("problem", ["1-D, 3 taps", "3x3x3", "1x3x3", "3x1x3"])
def test_tiles_are_for_one_and_three_dimensions_too(problem: str, op: ConvOp) -> None:
    for name in ("winograd2", "winograd4", "winograd5", "winograd6"):
        assert algorithm_of(name).refusal(BLOCKED[problem].with_op(op)) is None


def in_a_frame(tensor: Tensor) -> Tensor:
    """The same values as every second element, but for the frame, of a larger tensor full of NaN."""
    sizes = [2 * size + 2 for size in tensor.shape]
    inside = torch.full(sizes, float("nan"), dtype=tensor.dtype)[(slice(1, -1, 2),) * tensor.dim()]
    return inside.copy_(tensor)


LARGE_FILTERS = {
    "many channels": a_double(
        batch=1, in_channels=260, out_channels=253, input_size=(4, 4), kernel_size=(3, 3), padding=(1, 1)
    ),
    "long": a_double(
        batch=1, in_channels=44, out_channels=26, input_size=(10, 11), kernel_size=(7, 5), padding=(3, 2)
    ),
}
"""Of 65780 pairs of channels that are one product of forms, and of 1144 that are transformed axis by axis;
neither number is a multiple of a part."""


LARGE_TILES = {
    "9x9": a_double(batch=1, input_size=(130, 61), kernel_size=(9, 9), padding=(4, 4)),
    "15x3": a_double(input_size=(45, 40), kernel_size=(15, 3), padding=(7, 1)),
    "33x17": a_double(batch=1, input_size=(70, 20), kernel_size=(33, 17), padding=(16, 8)),
    "1-D, 63 taps": a_double(input_size=(150,), kernel_size=(63,), padding=(31,)),
    "3-D": a_double(input_size=(3, 9, 40), kernel_size=(2, 1, 9), padding=(0, 0, 4)),
}


@accepted(LARGE_TILES, blocked=LARGE_TILES, names=("fft20", "fft64", "fft20_rows2", "fft64_k2"))
def test_fourier_tiles_come_in_many_sizes(algorithm: Algorithm, problem: ConvProblem) -> None:
    operands = operands_of(problem)

    result, is_good = compute(algorithm, problem, *operands)

    assert is_good
    assert relative_error(result, reference(problem, *operands)) <= FLOAT64_BOUND


@accepted(LARGE_FILTERS, names=("winograd4", "fft16"))
def test_large_filters_are_transformed_in_parts(algorithm: Algorithm, problem: ConvProblem) -> None:
    operands = operands_of(problem)

    result, is_good = compute(algorithm, problem, *operands)

    assert is_good
    assert relative_error(result, reference(problem, *operands)) <= FLOAT64_BOUND


@pytest.mark.parametrize("columns", [7, 8, 9, 11, 12])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_products_of_many_columns_are_computed_in_parts(columns: int, is_transposed: bool) -> None:
    matrix, source = torch.rand(6, 3), torch.rand(3, columns)
    target = torch.full((6, columns + 2), 7.0)
    laid = source.t().contiguous().t() if is_transposed else source

    multiply_in_parts(matrix, laid, target[:, 1:-1], at_once=4, many=8)

    torch.testing.assert_close(target[:, 1:-1], matrix @ source)
    assert bool((target[:, [0, -1]] == 7.0).all())


@accepted({"2x5x9": PROBLEMS["2x5x9"]}, blocked={"7x7": BLOCKED["7x7"]}, names=EVERY)
def test_axes_of_filters_are_transformed_in_parts(
    algorithm: Algorithm, problem: ConvProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_geometry, "_MIDDLE_ELEMENTS", 5)
    operands = operands_of(problem)

    result, is_good = compute(algorithm, problem, *operands)

    assert is_good
    assert relative_error(result, reference(problem, *operands)) <= FLOAT64_BOUND


STRIDED = (*TILES, "fft16_k2", "fft16_c2", "fft16_rows1")


@accepted(VARIED, blocked=BLOCKED_VARIED, names=STRIDED)
def test_tiles_are_read_from_operands_of_any_strides(algorithm: Algorithm, problem: ConvProblem) -> None:
    first, second, bias = operands_of(problem)

    result, is_good = compute(algorithm, problem, in_a_frame(first), in_a_frame(second), bias)

    assert is_good
    assert relative_error(result, reference(problem, first, second, bias)) <= FLOAT64_BOUND


@accepted(VARIED, names=TILES)
def test_tiles_are_written_to_results_of_any_strides(algorithm: Algorithm, problem: ConvProblem) -> None:
    operands = operands_of(problem)
    whole = torch.full([size + 2 for size in poisoned_result(problem).shape], 7.0, dtype=torch.float64)
    inside = whole[(slice(1, -1),) * whole.dim()]

    compute(algorithm, problem, *operands, out=inside)

    assert relative_error(inside, reference(problem, *operands)) <= FLOAT64_BOUND
    inside.fill_(7.0)
    assert bool((whole == 7.0).all())


ACCURACY = {
    name: a_double(in_channels=24, out_channels=16, input_size=(14, 13), kernel_size=kernel, padding=padding)
    for name, kernel, padding in [
        ("3x3", (3, 3), (1, 1)),
        ("2x3", (2, 3), (1, 1)),
        ("1x3", (1, 3), (0, 1)),
        ("5x3", (5, 3), (2, 1)),
        ("5x5", (5, 5), (2, 2)),
        ("1x7", (1, 7), (0, 3)),
        ("9x9", (9, 9), (4, 4)),
        ("15x15", (15, 15), (7, 7)),
    ]
}


def float32_bound(algorithm: Algorithm) -> float:
    loses_a_digit = algorithm.name.removeprefix("cc_").startswith(("winograd4", "winograd5", "winograd6"))
    return WINOGRAD4_BOUND if loses_a_digit else FLOAT32_BOUND


DEEP_ACCURACY = {
    "1-D": a_double(in_channels=24, input_size=(41,), kernel_size=(3,), padding=(1,)),
    "3-D": a_double(in_channels=24, input_size=(5, 9, 9), kernel_size=(3, 3, 3), padding=(1, 1, 1)),
    "3-D, many channels": a_double(
        batch=1,
        in_channels=256,
        out_channels=128,
        input_size=(4, 5, 9),
        kernel_size=(3, 3, 3),
        padding=(1, 1, 1),
    ),
}
ACCURACY_OF_BLOCKS = {
    "3x3": for_blocks(in_channels=24, out_channels=16, input_size=(14, 13)),
    "7x7": for_blocks(
        in_channels=24, out_channels=16, input_size=(24, 13), kernel_size=(7, 7), padding=(3, 3)
    ),
    "3x3x3": for_blocks(in_channels=24, input_size=(5, 9, 9), kernel_size=(3, 3, 3), padding=(1, 1, 1)),
}


@accepted(ACCURACY | DEEP_ACCURACY, blocked=ACCURACY_OF_BLOCKS, dtype="float32", names=EVERY)
def test_float32_loses_no_more_digits_than_the_algorithm_must(
    algorithm: Algorithm, problem: ConvProblem
) -> None:
    operands = operands_of(problem)

    result, _ = compute(algorithm, problem, *operands)

    assert relative_error(result, reference(problem, *operands)) <= float32_bound(algorithm)


@accepted({"9x9": ACCURACY["9x9"]}, dtype="float32", names=tuple(f"fft{t}" for t in FOURIER_INPUTS))
def test_fourier_tiles_lose_no_digits_however_large(algorithm: Algorithm, problem: ConvProblem) -> None:
    operands = operands_of(problem)

    result, _ = compute(algorithm, problem, *operands)

    assert relative_error(result, reference(problem, *operands)) <= FLOAT32_BOUND


@accepted(PROBLEMS, dtype="float32", names=("im2col", "im2col_rows2"), blocked=BLOCKED)
def test_columns_of_integers_are_computed_bit_by_bit(algorithm: Algorithm, problem: ConvProblem) -> None:
    operands = operands_of(problem, small_integers)

    result, _ = compute(algorithm, problem, *operands)

    assert torch.equal(result, reference(problem, *operands).float())


# The hot path.

HOT = {
    name: a_double(**{"in_channels": 8, "out_channels": 12, "bias": True, "input_size": (18, 21), **changes})
    for name, changes in {
        "3x3": {},
        "whole tiles": {"input_size": (16, 16)},
        "9x9": {"kernel_size": (9, 9), "in_channels": 4, "out_channels": 6},
        "1x1": {"kernel_size": (1, 1), "padding": (0, 0)},
        "stride 2": {"stride": (2, 2)},
        "groups": {"groups": 4},
        "1-D": {"input_size": (70,), "kernel_size": (3,), "padding": (1,)},
        "3-D": {"input_size": (5, 9, 8), "kernel_size": (3, 3, 3), "padding": (1, 1, 1)},
    }.items()
}
HOT_BLOCKS = {
    "3x3": for_blocks(in_channels=8, out_channels=12, bias=True, input_size=(18, 21)),
    "7x7": for_blocks(input_size=(24, 21), kernel_size=(7, 7), padding=(3, 3)),
    "1-D": for_blocks(in_channels=8, input_size=(70,), kernel_size=(3,), padding=(1,)),
    "stride 2": for_blocks(in_channels=8, input_size=(18, 21), stride=(2, 2), bias=True),
    "groups": for_blocks(in_channels=8, out_channels=12, groups=4, input_size=(18, 21)),
    "3-D": for_blocks(in_channels=8, input_size=(5, 9, 8), kernel_size=(3, 3, 3), padding=(1, 1, 1)),
}
LARGE = {
    "large image": a_double(in_channels=3, out_channels=3, input_size=(91, 97)),
    "large filter": a_double(in_channels=24, out_channels=20),
    "large 3-D filter": a_double(
        in_channels=16, out_channels=16, input_size=(3, 5, 6), kernel_size=(3, 3, 3), padding=(1, 1, 1)
    ),
}
LARGE_BLOCKS = {
    "large image": for_blocks(input_size=(91, 97)),
    "large filter": for_blocks(in_channels=64, out_channels=20),
    "large 7x7 filter": for_blocks(in_channels=24, out_channels=40, kernel_size=(7, 7), padding=(3, 3)),
    "chunks of some rows": for_blocks(batch=2, in_channels=64, input_size=(96, 32)),
    "large 3-D filter": for_blocks(
        in_channels=16, out_channels=16, input_size=(3, 9, 9), kernel_size=(3, 3, 3), padding=(1, 1, 1)
    ),
}


def hot_call(algorithm: Algorithm, problem: ConvProblem) -> Callable[[], None]:
    """All that a division runs, again and again, on operands that are there."""
    buffer = GuardedBuffer(algorithm.workspace_bytes(problem)).inside
    if problem.op is ConvOp.WGRAD:
        return sum_call(algorithm.sum_kernel(problem, buffer), problem)
    return slice_call(algorithm.slice_kernel(problem, buffer), problem)


def slice_call(
    kernel: SliceKernel, problem: ConvProblem, filter_of: Callable[[Tensor], Tensor] = lambda weight: weight
) -> Callable[[], None]:
    image, weight, bias = operands_of(problem)
    weight = filter_of(weight)
    out = poisoned_result(problem)

    def call() -> None:
        kernel.prepare(weight)
        assert kernel.run(image, weight, out, bias)

    return call


def sum_call(kernel: SumKernel, problem: ConvProblem) -> Callable[[], None]:
    image, gradient, _ = operands_of(problem)
    total = torch.zeros_like(poisoned_result(problem))

    def call() -> None:
        for into in (GradientSum(total), GradientSum(total, accumulate=True)):
            kernel.add(image, gradient, into, first=True)
            kernel.add(image, gradient, into, first=False)
            assert kernel.finish(into)

    return call


@accepted(HOT, blocked=HOT_BLOCKS, dtype="float32", names=EVERY)
def test_nothing_is_allocated(algorithm: Algorithm, problem: ConvProblem) -> None:
    taken = [*allocated_bytes_of_threads(algorithm, hot_call(algorithm, problem))]

    assert max(taken) <= ALLOCATION_BOUND


@accepted(HOT, ConvOp.FPROP, ConvOp.DGRAD, blocked=HOT_BLOCKS, dtype="float32", names=STRIDED)
def test_nothing_is_allocated_for_filters_of_any_strides(algorithm: Algorithm, problem: ConvProblem) -> None:
    buffer = GuardedBuffer(algorithm.workspace_bytes(problem)).inside
    call = slice_call(algorithm.slice_kernel(problem, buffer), problem, in_a_frame)

    assert max(allocated_bytes_of_threads(algorithm, call)) <= ALLOCATION_BOUND


@accepted(LARGE | LARGE_FILTERS, blocked=LARGE_BLOCKS, dtype="float32")
def test_for_large_tensors_nothing_is_allocated_either(algorithm: Algorithm, problem: ConvProblem) -> None:
    taken = [*allocated_bytes_of_threads(algorithm, hot_call(algorithm, problem))]

    assert max(taken) <= ALLOCATION_BOUND
