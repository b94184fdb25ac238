"""Every algorithm computes every op that it accepts, in no more memory than it declares."""

import dataclasses
import itertools
import json
import operator
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mucudnn.algorithms import ALGORITHMS, Algorithm, GradientSum
from mucudnn.algorithms.tiles import TileAlgorithm, TileGeometry
from mucudnn.problem import ConvOp, ConvProblem, Layout
from tests.convolutions import (
    a_convolution,
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

POISON = 0xFF
"""Bytes that make every float NaN."""

GUARD_BYTES = 256
GUARD = 0xA5

FLOAT64_BOUND = 1e-12
"""Any wrong tap, pixel or channel is off by far more, and the worst form loses three of 16 digits."""

FLOAT32_BOUND = 1e-6
"""Some ten roundings of 6e-8: what PyTorch's own loses is 2e-7."""

WINOGRAD4_BOUND = 1e-5
"""Winograd's forms of tiles of six and more inputs lose a digit: they have entries from 1/90 to 8."""

ALLOCATION_BOUND = 64
"""Bytes that a call may take from PyTorch's allocator: the scalars of the checks whether all is finite."""

TRANSPOSING_BLOCK = 60 * 60
"""Elements that PyTorch's copy of one large image takes; they are part of the declared workspace."""

SQUARE = a_convolution(dtype="float64")


def a_double(**changes: object) -> ConvProblem:
    return a_convolution(dtype="float64", **changes)


PROBLEMS = {
    "3x3": SQUARE,
    "whole tiles": a_double(input_size=(8, 12)),
    "no padding": a_double(padding=(0, 0)),
    "padding r-1": a_double(padding=(2, 2)),
    "padding r": a_double(padding=(3, 3)),
    "padding beyond the filter": a_double(padding=(4, 3)),
    "1x1": a_double(kernel_size=(1, 1), padding=(0, 0)),
    "padded 1x1": a_double(kernel_size=(1, 1)),
    "1x3": a_double(kernel_size=(1, 3), padding=(0, 1)),
    "5x3": a_double(kernel_size=(5, 3), padding=(2, 1)),
    "1x7": a_double(kernel_size=(1, 7), padding=(0, 3)),
    "5x5, padding 4": a_double(kernel_size=(5, 5), padding=(4, 4)),
    "9x9": a_double(kernel_size=(9, 9), padding=(4, 4), input_size=(20, 9)),
    "15x2": a_double(kernel_size=(15, 2), padding=(7, 0)),
    "31x31": a_double(kernel_size=(31, 31), padding=(15, 15), in_channels=2, out_channels=1),
    "filter as large as the image": a_double(kernel_size=(9, 11), padding=(0, 0)),
    "one pixel": a_double(input_size=(1, 1)),
    "one pixel, 9x9": a_double(input_size=(1, 1), kernel_size=(9, 9), padding=(4, 4)),
    "one row": a_double(input_size=(1, 9)),
    "one channel": a_double(in_channels=1, out_channels=1),
    "one channel in": a_double(in_channels=1),
    "one channel out": a_double(out_channels=1),
    "one sample": a_double(batch=1),
    "bias": a_double(bias=True),
    "large image": a_double(batch=1, in_channels=1, out_channels=2, input_size=(97, 101)),
    "planes a multiple of 4 KiB": a_double(batch=1, in_channels=4, out_channels=4, input_size=(16, 32)),
    "stride 2": a_double(stride=(2, 2), bias=True),
    "stride 2, rest": a_double(stride=(2, 3), input_size=(10, 10)),
    "dilation": a_double(dilation=(2, 3), padding=(2, 3)),
    "groups": a_double(in_channels=4, out_channels=6, groups=2, bias=True),
    "depthwise": a_double(in_channels=3, out_channels=6, groups=3, padding=(0, 0)),
    "1-D": a_double(input_size=(9,), kernel_size=(3,), stride=(2,), padding=(1,), dilation=(1,)),
    "3-D": a_double(
        input_size=(4, 5, 6), kernel_size=(3, 2, 1), stride=(1, 2, 1), padding=(1, 0, 0), dilation=(1, 1, 2)
    ),
}

VARIED = {
    name: PROBLEMS[name]
    for name in ("3x3", "whole tiles", "5x3", "9x9", "1x1", "large image", "stride 2", "groups", "3-D")
}
"""One of each kind: for what does not depend on every detail of the shape."""


def accepted(
    problems: dict[str, ConvProblem], *ops: ConvOp, dtype: str = "float64", algorithm: str | None = None
) -> pytest.MarkDecorator:
    """All problems in both layouts, for all ops and algorithms that accept them."""
    cases = [
        pytest.param(each, problem, id=f"{each.name}-{op}-{layout}-{name}")
        for each in ALGORITHMS
        if algorithm in (None, each.name)
        for op in ops or ConvOp
        for layout in Layout
        for name, base in problems.items()
        for problem in [
            dataclasses.replace(
                base,
                op=op,
                dtype=dtype,
                layout=layout,
                filter_layout=layout,
                bias=base.bias and op is ConvOp.FPROP,
            )
        ]
        if each.refusal(problem) is None
    ]
    return pytest.mark.parametrize(("algorithm", "problem"), cases)


class GuardedBuffer:
    """A workspace of exactly the declared bytes, full of poison, with guards before and behind."""

    def __init__(self, n_bytes: int, filling: int = POISON) -> None:
        self._all = torch.full((n_bytes + 2 * GUARD_BYTES,), GUARD, dtype=torch.uint8)
        self.inside = self._all[GUARD_BYTES : GUARD_BYTES + n_bytes].fill_(filling)

    @property
    def is_intact(self) -> bool:
        guards = torch.cat([self._all[:GUARD_BYTES], self._all[GUARD_BYTES + self.inside.numel() :]])
        return bool((guards == GUARD).all())


def compute(
    algorithm: Algorithm,
    problem: ConvProblem,
    first: Tensor,
    second: Tensor,
    bias: Tensor | None = None,
    *,
    buffer: Tensor | None = None,
) -> tuple[Tensor, bool]:
    """Run the whole batch in one part; return the result, poisoned before, and what the kernel says of it."""
    if buffer is None:
        buffer = GuardedBuffer(algorithm.workspace_bytes(problem)).inside
    out = poisoned_result(problem)
    if problem.op is ConvOp.WGRAD:
        sums = algorithm.sum_kernel(problem, buffer)
        into = GradientSum(out)
        sums.add(first, second, into, first=True)
        return out, sums.finish(into)
    slices = algorithm.slice_kernel(problem, buffer)
    slices.prepare(second)
    return out, slices.run(first, out, bias)


@accepted(PROBLEMS)
def test_the_result_is_that_of_pytorch(algorithm: Algorithm, problem: ConvProblem) -> None:
    operands = operands_of(problem)

    result, is_good = compute(algorithm, problem, *operands)

    assert is_good
    assert relative_error(result, reference(problem, *operands)) <= FLOAT64_BOUND


def test_every_algorithm_computes_all_three_ops() -> None:
    for algorithm in ALGORITHMS:
        for op in ConvOp:
            assert any(algorithm.refusal(problem.with_op(op)) is None for problem in PROBLEMS.values())


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
    return WINOGRAD4_BOUND if algorithm.name == "winograd4" else FLOAT32_BOUND


@accepted(ACCURACY, dtype="float32")
def test_float32_loses_no_more_digits_than_the_algorithm_must(
    algorithm: Algorithm, problem: ConvProblem
) -> None:
    operands = operands_of(problem)

    result, _ = compute(algorithm, problem, *operands)

    assert relative_error(result, reference(problem, *operands)) <= float32_bound(algorithm)


@accepted(PROBLEMS, dtype="float32", algorithm="im2col")
def test_columns_of_integers_are_computed_bit_by_bit(algorithm: Algorithm, problem: ConvProblem) -> None:
    operands = operands_of(problem, small_integers)

    result, _ = compute(algorithm, problem, *operands)

    assert torch.equal(result, reference(problem, *operands).float())


@accepted(VARIED)
def test_nothing_is_written_beyond_the_declared_workspace(algorithm: Algorithm, problem: ConvProblem) -> None:
    buffer = GuardedBuffer(algorithm.workspace_bytes(problem))

    compute(algorithm, problem, *operands_of(problem), buffer=buffer.inside)

    assert buffer.is_intact


@accepted(VARIED)
def test_what_the_workspace_held_before_makes_no_difference(
    algorithm: Algorithm, problem: ConvProblem
) -> None:
    operands, n_bytes = operands_of(problem), algorithm.workspace_bytes(problem)

    poisoned, zeroed = (
        compute(algorithm, problem, *operands, buffer=GuardedBuffer(n_bytes, filling).inside)[0]
        for filling in (POISON, 0)
    )

    assert torch.equal(poisoned, zeroed)


@accepted({"3x3": SQUARE, "9x9": PROBLEMS["9x9"], "1x1": PROBLEMS["1x1"]})
def test_a_workspace_that_is_too_small_is_refused(algorithm: Algorithm, problem: ConvProblem) -> None:
    n_bytes = algorithm.workspace_bytes(problem)
    make = algorithm.sum_kernel if problem.op is ConvOp.WGRAD else algorithm.slice_kernel

    with pytest.raises(
        ValueError, match=rf"The workspace must have at least {n_bytes} bytes, but got {n_bytes - 1}\."
    ):
        make(problem, GuardedBuffer(n_bytes - 1).inside)


@accepted(VARIED)
def test_a_larger_batch_never_needs_less_workspace(algorithm: Algorithm, problem: ConvProblem) -> None:
    declared = [algorithm.workspace_bytes(problem.with_batch(batch)) for batch in range(1, 10)]

    assert declared == sorted(declared)


@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("side", [4, 16, 32, 56, 64])
def test_planes_of_tiles_never_lie_whole_pages_apart(side: int, op: ConvOp) -> None:
    problem = a_convolution(op=op, in_channels=64, out_channels=64, input_size=(side, side))
    geometry = TileGeometry(TileAlgorithm("winograd4", outputs=4), problem)

    for plane in (geometry.x_plane, geometry.y_plane):
        assert plane % 16 == 0
        assert plane % 32 != 0


# Parts of a division: sizes 3, 1 and 3 again, all bound to one buffer.

PART_SIZES = (3, 1, 3)
DIVIDED = {
    name: PROBLEMS[name].with_batch(sum(PART_SIZES))
    for name in ("3x3", "5x3", "9x9", "bias", "stride 2", "groups", "3-D", "1x1")
}


def parts(problem: ConvProblem) -> Iterator[tuple[ConvProblem, slice]]:
    start = 0
    for size in PART_SIZES:
        yield problem.with_batch(size), slice(start, start + size)
        start += size


def shared_buffer(algorithm: Algorithm, problem: ConvProblem) -> Tensor:
    needed = max(algorithm.workspace_bytes(problem.with_batch(size)) for size in PART_SIZES)
    return GuardedBuffer(needed).inside


@accepted(DIVIDED, ConvOp.FPROP, ConvOp.DGRAD)
def test_kernels_of_all_sizes_share_the_filter_that_one_prepared(
    algorithm: Algorithm, problem: ConvProblem
) -> None:
    image, weight, bias = operands_of(problem)
    buffer, out = shared_buffer(algorithm, problem), poisoned_result(problem)
    kernels = {size: algorithm.slice_kernel(problem.with_batch(size), buffer) for size in PART_SIZES}

    kernels[PART_SIZES[0]].prepare(weight)
    answers = [kernels[part.batch].run(image[here], out[here], bias) for part, here in parts(problem)]

    assert all(answers)
    assert relative_error(out, reference(problem, image, weight, bias)) <= FLOAT64_BOUND


def sum_parts(
    algorithm: Algorithm, problem: ConvProblem, image: Tensor, gradient: Tensor, into: GradientSum
) -> bool:
    """Sum the parts in one poisoned buffer, the running sum too; return whether `into` has a sound sum."""
    buffer = shared_buffer(algorithm, problem)
    kernels = {size: algorithm.sum_kernel(problem.with_batch(size), buffer) for size in PART_SIZES}
    for number, (part, here) in enumerate(parts(problem)):
        kernels[part.batch].add(image[here], gradient[here], into, first=number == 0)
    return kernels[PART_SIZES[-1]].finish(into)


@accepted(DIVIDED, ConvOp.WGRAD)
def test_the_parts_of_a_weight_gradient_add_up(algorithm: Algorithm, problem: ConvProblem) -> None:
    image, gradient, _ = operands_of(problem)
    total = poisoned_result(problem)

    sum_parts(algorithm, problem, image, gradient, GradientSum(total))

    assert relative_error(total, reference(problem, image, gradient)) <= FLOAT64_BOUND


@accepted(DIVIDED, ConvOp.WGRAD)
def test_a_weight_gradient_is_added_to_what_is_there(algorithm: Algorithm, problem: ConvProblem) -> None:
    image, gradient, _ = operands_of(problem)
    total = normal(problem.filter_shape, torch.Generator().manual_seed(1))
    expected = reference(problem, image, gradient) + total

    sum_parts(algorithm, problem, image, gradient, GradientSum(total, accumulate=True))

    assert relative_error(total, expected) <= FLOAT64_BOUND


@accepted(DIVIDED, ConvOp.WGRAD)
def test_a_first_part_starts_the_sum_anew(algorithm: Algorithm, problem: ConvProblem) -> None:
    image, gradient, _ = operands_of(problem)
    total = poisoned_result(problem)
    kernel = algorithm.sum_kernel(problem, GuardedBuffer(algorithm.workspace_bytes(problem)).inside)

    into = GradientSum(total)

    kernel.add(image, gradient, into, first=True)
    kernel.add(image, gradient, into, first=True)
    kernel.finish(into)

    assert relative_error(total, reference(problem, image, gradient)) <= FLOAT64_BOUND


@accepted(DIVIDED, ConvOp.WGRAD, dtype="float32", algorithm="im2col")
def test_the_parts_of_a_weight_gradient_of_integers_add_up_bit_by_bit(
    algorithm: Algorithm, problem: ConvProblem
) -> None:
    image, gradient, _ = operands_of(problem, small_integers)
    total = poisoned_result(problem)

    sum_parts(algorithm, problem, image, gradient, GradientSum(total))

    assert torch.equal(total, reference(problem, image, gradient).float())


# Numbers that are none.

STRANGE = {name: PROBLEMS[name] for name in ("3x3", "5x3", "9x9", "stride 2", "groups", "dilation")}
PLACES = ("first", "second")
VALUES = (float("nan"), float("inf"), float("-inf"))


@pytest.mark.parametrize("place", PLACES)
@accepted(STRANGE, dtype="float32")
def test_a_result_that_passes_has_its_strange_numbers_where_pytorch_has_them(
    algorithm: Algorithm, problem: ConvProblem, place: str
) -> None:
    first, second, bias = operands_of(problem)
    spoilt = {"first": first, "second": second}[place]
    spoilt[0, 0, 0, 0], spoilt[1, 0, 1, 1], spoilt[1, 1, 2, 0] = VALUES

    result, is_good = compute(algorithm, problem, first, second, bias)

    expected = own_result(problem, first, second, bias)
    assert not is_good or torch.equal(finite_mask(result), finite_mask(expected))


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("place", PLACES)
@accepted({"3x3": SQUARE, "9x9": PROBLEMS["9x9"]}, dtype="float32")
def test_what_would_spread_strange_numbers_reports_them(
    algorithm: Algorithm, problem: ConvProblem, place: str, value: float
) -> None:
    first, second, bias = operands_of(problem)
    {"first": first, "second": second}[place][1, 1, 0, 0] = value

    _, is_good = compute(algorithm, problem, first, second, bias)

    stays_in_place = algorithm.name == "im2col" and problem.op is not ConvOp.WGRAD and place == "first"
    assert is_good is stays_in_place


@pytest.mark.parametrize("value", VALUES)
@accepted(DIVIDED, ConvOp.FPROP, ConvOp.DGRAD, dtype="float32")
def test_kernels_of_all_sizes_report_a_strange_filter_that_one_prepared(
    algorithm: Algorithm, problem: ConvProblem, value: float
) -> None:
    image, weight, bias = operands_of(problem)
    weight[0, 0, 0] = value
    buffer, out = shared_buffer(algorithm, problem), poisoned_result(problem)
    kernels = {size: algorithm.slice_kernel(problem.with_batch(size), buffer) for size in PART_SIZES}

    kernels[PART_SIZES[0]].prepare(weight)
    answers = [kernels[part.batch].run(image[here], out[here], bias) for part, here in parts(problem)]

    assert not any(answers)


@accepted(DIVIDED, ConvOp.WGRAD, dtype="float32")
def test_a_sum_that_is_not_finite_leaves_the_total_alone(algorithm: Algorithm, problem: ConvProblem) -> None:
    image, gradient, _ = operands_of(problem)
    image[4, 0] = float("nan")
    total = torch.ones(problem.filter_shape)

    is_good = sum_parts(algorithm, problem, image, gradient, GradientSum(total, accumulate=True))

    assert not is_good
    assert torch.equal(total, torch.ones(problem.filter_shape))


@accepted({"3x3": SQUARE, "9x9": PROBLEMS["9x9"]}, ConvOp.FPROP)
def test_a_strange_bias_makes_strange_numbers_in_its_channel_only(
    algorithm: Algorithm, problem: ConvProblem
) -> None:
    image, weight, _ = operands_of(problem)
    bias = torch.zeros(problem.out_channels, dtype=image.dtype)
    bias[2] = float("inf")

    result, is_good = compute(algorithm, problem, image, weight, bias)

    expected = own_result(problem, image, weight, bias)
    assert not is_good or torch.equal(finite_mask(result), finite_mask(expected))


@accepted({"3x3": SQUARE, "9x9": PROBLEMS["9x9"]}, ConvOp.FPROP, ConvOp.DGRAD, dtype="float32")
def test_a_filter_that_was_strange_once_is_forgotten(algorithm: Algorithm, problem: ConvProblem) -> None:
    image, weight, bias = operands_of(problem)
    kernel = algorithm.slice_kernel(problem, GuardedBuffer(algorithm.workspace_bytes(problem)).inside)
    kernel.prepare(torch.full_like(weight, float("nan")))
    kernel.run(image, poisoned_result(problem), bias)
    out = poisoned_result(problem)

    kernel.prepare(weight)
    is_good = kernel.run(image, out, bias)

    assert is_good
    assert torch.equal(out, compute(algorithm, problem, image, weight, bias)[0])


# The hot path.

HOT = {
    name: a_double(in_channels=8, out_channels=12, bias=True, **{"input_size": (18, 21), **changes})
    for name, changes in {
        "3x3": {},
        "whole tiles": {"input_size": (16, 16)},
        "9x9": {"kernel_size": (9, 9)},
        "1x1": {"kernel_size": (1, 1), "padding": (0, 0)},
        "stride 2": {"stride": (2, 2)},
        "groups": {"groups": 4},
    }.items()
}
LARGE = {"large image": a_double(in_channels=3, out_channels=3, input_size=(91, 97))}


def allocated_bytes(call: Callable[[], object], folder: Path) -> int:
    """The most bytes that a call holds at once of what it takes from PyTorch's allocator."""
    call()  # what is made once only
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        call()
    trace = folder / "trace.json"
    recording.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    amounts = [event["args"]["Bytes"] for event in sorted(events, key=operator.itemgetter("ts"))]
    return max(itertools.accumulate(amounts, initial=0))


def slice_call(algorithm: Algorithm, problem: ConvProblem) -> Callable[[], None]:
    image, weight, bias = operands_of(problem)
    out = poisoned_result(problem)
    kernel = algorithm.slice_kernel(problem, GuardedBuffer(algorithm.workspace_bytes(problem)).inside)

    def call() -> None:
        kernel.prepare(weight)
        kernel.run(image, out, bias)

    return call


def sum_call(algorithm: Algorithm, problem: ConvProblem) -> Callable[[], None]:
    image, gradient, _ = operands_of(problem)
    total = poisoned_result(problem)
    kernel = algorithm.sum_kernel(problem, GuardedBuffer(algorithm.workspace_bytes(problem)).inside)

    def call() -> None:
        kernel.add(image, gradient, GradientSum(total), first=True)
        kernel.add(image, gradient, GradientSum(total), first=False)
        kernel.finish(GradientSum(total))
        kernel.finish(GradientSum(total, accumulate=True))

    return call


def test_an_allocation_that_is_given_back_at_once_is_seen(tmp_path: Path) -> None:
    image = torch.ones(1000)

    assert allocated_bytes(lambda: (image + image).sum(), tmp_path) >= image.nbytes


@accepted(HOT, ConvOp.FPROP, ConvOp.DGRAD, dtype="float32")
def test_a_slice_allocates_nothing(algorithm: Algorithm, problem: ConvProblem, tmp_path: Path) -> None:
    assert allocated_bytes(slice_call(algorithm, problem), tmp_path) <= ALLOCATION_BOUND


@accepted(HOT, ConvOp.WGRAD, dtype="float32")
def test_a_sum_allocates_nothing(algorithm: Algorithm, problem: ConvProblem, tmp_path: Path) -> None:
    assert allocated_bytes(sum_call(algorithm, problem), tmp_path) <= ALLOCATION_BOUND


@accepted(LARGE, ConvOp.FPROP, ConvOp.DGRAD, dtype="float32")
def test_a_slice_of_large_images_allocates_the_block_that_is_declared(
    algorithm: Algorithm, problem: ConvProblem, tmp_path: Path
) -> None:
    bound = ALLOCATION_BOUND + TRANSPOSING_BLOCK * problem.itemsize

    assert allocated_bytes(slice_call(algorithm, problem), tmp_path) <= bound
