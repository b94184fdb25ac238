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

from mucudnn.algorithms import Algorithm, GradientSum, SliceKernel, SumKernel, named, tile_geometry
from mucudnn.algorithms.tile_geometry import TileGeometry
from mucudnn.algorithms.tiles import TileAlgorithm
from mucudnn.algorithms.workers import run_on_workers
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
"""F(4), F(5) and F(6) lose a digit: their matrices have entries from 1/90 to 8 and more."""

ALLOCATION_BOUND = 64
"""Bytes that a thread may take from PyTorch's allocator: the scalars of the checks whether all is finite."""

FAMILIES = ("im2col", "winograd2", "winograd4", "winograd5", "winograd6", "fft16", "fft32")

VARIANTS = (
    *("winograd4_rows1", "winograd4_rows2", "winograd6_rows1", "fft16_rows1"),
    *("winograd4_images1", "winograd4_images2"),
    *("winograd4_slices1", "winograd4_slices2"),
    *("winograd4_k1", "winograd4_k2", "winograd5_k2", "fft16_k2"),
    *("winograd4_mt2", "winograd4_rows1_mt2", "winograd4_images1_mt2"),
)
"""In blocks, by channels, and on workers: of each kind of family one or more."""

KINDS = (
    *("winograd4_rows1", "winograd4_images1", "winograd4_slices1", "winograd4_k2"),
    *("winograd4_mt2", "winograd4_rows1_mt2"),
)
"""One variant of each kind."""

EVERY = (*FAMILIES, *VARIANTS)

SAME_LAYOUTS = tuple((layout, layout) for layout in Layout)
MIXED_LAYOUTS = tuple(itertools.permutations(Layout))
"""Of images and filters."""

SQUARE = a_convolution(dtype="float64")


def a_double(**changes: object) -> ConvProblem:
    """In as many dimensions as its kernel has."""
    taps = changes.get("kernel_size", SQUARE.kernel_size)
    ones = (1,) * len(taps)
    return a_convolution(**{"dtype": "float64", "stride": ones, "dilation": ones, **changes})


def for_blocks(**changes: object) -> ConvProblem:
    """One that can be cut into blocks: of 4 images, 3 tile rows of F(4), and even numbers of channels."""
    even = {"batch": 4, "in_channels": 4, "out_channels": 6, "input_size": (12, 9)}
    return a_double(**{**even, **changes})


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
    "9x9, large filter": a_double(kernel_size=(9, 9), padding=(4, 4), in_channels=24, out_channels=40),
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
    "1-D, stride 2": a_double(input_size=(9,), kernel_size=(3,), stride=(2,), padding=(1,)),
    "1-D, 3 taps": a_double(input_size=(11,), kernel_size=(3,), padding=(1,), bias=True),
    "1-D, 9 taps": a_double(input_size=(50,), kernel_size=(9,), padding=(4,)),
    "3-D, stride 2": a_double(
        input_size=(4, 5, 6), kernel_size=(3, 2, 1), stride=(1, 2, 1), padding=(1, 0, 0), dilation=(1, 1, 2)
    ),
    "3x3x3": a_double(input_size=(5, 9, 8), kernel_size=(3, 3, 3), padding=(1, 1, 1), bias=True),
    "3x3x3, no padding": a_double(input_size=(4, 5, 6), kernel_size=(3, 3, 3), padding=(0, 0, 0)),
    "3x3x3, depth padding 2": a_double(input_size=(3, 7, 5), kernel_size=(3, 3, 3), padding=(2, 1, 1)),
    "3x3x3, depth padding 4": a_double(input_size=(2, 7, 5), kernel_size=(3, 3, 3), padding=(4, 1, 1)),
    "3x3x3, one slice": a_double(input_size=(1, 6, 5), kernel_size=(3, 3, 3), padding=(1, 1, 1)),
    "1x3x3": a_double(input_size=(3, 5, 6), kernel_size=(1, 3, 3), padding=(0, 1, 1)),
    "3x1x3": a_double(input_size=(4, 5, 6), kernel_size=(3, 1, 3), padding=(1, 0, 2)),
    "2x5x9": a_double(input_size=(3, 7, 25), kernel_size=(2, 5, 9), padding=(0, 2, 4)),
}

BLOCKED = {
    "3x3": for_blocks(bias=True),
    "whole tiles": for_blocks(input_size=(12, 8)),
    "5 tile rows": for_blocks(input_size=(17, 10), padding=(0, 2)),
    "padding r": for_blocks(padding=(3, 3)),
    "padding longer than a block": for_blocks(padding=(7, 1)),
    "2x3": for_blocks(kernel_size=(2, 3), padding=(0, 1)),
    "7x7, large filter": for_blocks(in_channels=24, out_channels=40, kernel_size=(7, 7), padding=(3, 3)),
    "7x7": for_blocks(input_size=(21, 22), kernel_size=(7, 7), padding=(3, 3), bias=True),
    "1-D, 3 taps": for_blocks(input_size=(11,), kernel_size=(3,), padding=(1,), bias=True),
    "1-D, 7 taps": for_blocks(input_size=(25,), kernel_size=(7,), padding=(2,)),
    "3x3x3": for_blocks(input_size=(5, 9, 8), kernel_size=(3, 3, 3), padding=(1, 1, 1), bias=True),
    "3x3x3, depth padding 2": for_blocks(input_size=(3, 9, 7), kernel_size=(3, 3, 3), padding=(2, 1, 1)),
    "chunks of some images": for_blocks(batch=12, in_channels=16, out_channels=16, input_size=(20, 20)),
    "chunks of some rows": for_blocks(batch=2, in_channels=16, out_channels=16, input_size=(64, 64)),
    "3x3x3, one sample": for_blocks(batch=1, input_size=(3, 9, 7), kernel_size=(3, 3, 3), padding=(0, 1, 0)),
    "1x3x3": for_blocks(input_size=(3, 9, 8), kernel_size=(1, 3, 3), padding=(0, 1, 1)),
    "1x3x3, depth padding 2": for_blocks(input_size=(2, 9, 8), kernel_size=(1, 3, 3), padding=(2, 1, 1)),
    "3x1x3": for_blocks(input_size=(6, 5, 7), kernel_size=(3, 1, 3), padding=(1, 0, 1), bias=True),
}
"""For variants, of which each accepts some."""

VARIED = {
    name: PROBLEMS[name]
    for name in (
        *("3x3", "whole tiles", "5x3", "9x9", "1x1", "large image", "stride 2", "groups", "3-D, stride 2"),
        *("1-D, 3 taps", "3x3x3", "1x3x3"),
    )
}
"""One of each kind: for what does not depend on every detail of the shape."""

BLOCKED_VARIED = {name: BLOCKED[name] for name in ("3x3", "5 tile rows", "7x7", "1-D, 3 taps", "3x3x3")}


def accepted(
    problems: dict[str, ConvProblem],
    *ops: ConvOp,
    blocked: dict[str, ConvProblem] = BLOCKED_VARIED,
    dtype: str = "float64",
    names: tuple[str, ...] = (*FAMILIES, *KINDS),
    layouts: tuple[tuple[Layout, Layout], ...] = SAME_LAYOUTS,
) -> pytest.MarkDecorator:
    """What algorithms accept of `problems`, or variants of `blocked`, in all ops and layouts."""
    cases = [
        pytest.param(algorithm, problem, id=f"{name}-{problem.op}-{_layouts(problem)}-{key}")
        for name in names
        for algorithm in [algorithm_of(name)]
        for key, base in (blocked if name in VARIANTS else problems).items()
        for problem in _forms_of(base, ops or tuple(ConvOp), dtype, layouts)
        if algorithm.refusal(problem) is None
    ]
    return pytest.mark.parametrize(("algorithm", "problem"), cases)


def algorithm_of(name: str) -> Algorithm:
    algorithm = named(name)
    assert algorithm is not None
    return algorithm


def _forms_of(
    base: ConvProblem, ops: tuple[ConvOp, ...], dtype: str, layouts: tuple[tuple[Layout, Layout], ...]
) -> Iterator[ConvProblem]:
    for op, (layout, filter_layout) in itertools.product(ops, layouts):
        bias = base.bias and op is ConvOp.FPROP
        yield dataclasses.replace(
            base, op=op, dtype=dtype, layout=layout, filter_layout=filter_layout, bias=bias
        )


def _layouts(problem: ConvProblem) -> str:
    is_mixed = problem.layout is not problem.filter_layout
    return f"{problem.layout}, filter {problem.filter_layout}" if is_mixed else problem.layout


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
    out: Tensor | None = None,
) -> tuple[Tensor, bool]:
    """Run the whole batch in one part; return the result, poisoned before, and what the kernel says of it."""
    if buffer is None:
        buffer = GuardedBuffer(algorithm.workspace_bytes(problem)).inside
    out = poisoned_result(problem) if out is None else out
    if problem.op is ConvOp.WGRAD:
        sums = algorithm.sum_kernel(problem, buffer)
        into = GradientSum(out)
        sums.add(first, second, into, first=True)
        return out, sums.finish(into)
    slices = algorithm.slice_kernel(problem, buffer)
    slices.prepare(second)
    return out, slices.run(first, second, out, bias)


@accepted(PROBLEMS, blocked=BLOCKED, names=EVERY)
def test_the_result_is_that_of_pytorch(algorithm: Algorithm, problem: ConvProblem) -> None:
    operands = operands_of(problem)

    result, is_good = compute(algorithm, problem, *operands)

    assert is_good
    assert relative_error(result, reference(problem, *operands)) <= FLOAT64_BOUND


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
def test_every_algorithm_computes_all_three_ops(name: str, op: ConvOp) -> None:
    algorithm, problems = algorithm_of(name), BLOCKED_VARIED if name in VARIANTS else PROBLEMS

    assert any(algorithm.refusal(problem.with_op(op)) is None for problem in problems.values())


@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("problem", ["1-D, 3 taps", "3x3x3", "1x3x3", "3x1x3"])
def test_tiles_are_for_one_and_three_dimensions_too(problem: str, op: ConvOp) -> None:
    for name in ("winograd2", "winograd4", "winograd5", "winograd6"):
        assert algorithm_of(name).refusal(BLOCKED[problem].with_op(op)) is None


TILES = tuple(name for name in (*FAMILIES, *KINDS) if name != "im2col")


def in_a_frame(tensor: Tensor) -> Tensor:
    """The same values as every second element, but for the frame, of a larger tensor full of NaN."""
    sizes = [2 * size + 2 for size in tensor.shape]
    inside = torch.full(sizes, float("nan"), dtype=tensor.dtype)[(slice(1, -1, 2),) * tensor.dim()]
    return inside.copy_(tensor)


@accepted(VARIED, names=TILES)
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
    loses_a_digit = algorithm.name.startswith(("winograd4", "winograd5", "winograd6"))
    return WINOGRAD4_BOUND if loses_a_digit else FLOAT32_BOUND


DEEP_ACCURACY = {
    "1-D": a_double(in_channels=24, input_size=(41,), kernel_size=(3,), padding=(1,)),
    "3-D": a_double(in_channels=24, input_size=(5, 9, 9), kernel_size=(3, 3, 3), padding=(1, 1, 1)),
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


@accepted(PROBLEMS, dtype="float32", names=("im2col",))
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


def declared_by_batch(algorithm: Algorithm, problem: ConvProblem) -> list[int]:
    """Bytes of workspace for batches of 1 to 12 that divide into the algorithm's blocks."""
    step = 2 if algorithm.name in ("winograd4_images2", "winograd4_mt2") else 1
    return [algorithm.workspace_bytes(problem.with_batch(batch)) for batch in range(step, 13, step)]


GROUPED = tuple(name for name in VARIANTS if "_k" in name)
"""These cut a micro-batch into equal chunks, whose size is not a matter of its size alone."""


@accepted(VARIED, names=tuple(name for name in EVERY if name not in GROUPED), layouts=SAME_LAYOUTS[:1])
def test_a_larger_batch_never_needs_less_workspace(algorithm: Algorithm, problem: ConvProblem) -> None:
    declared = declared_by_batch(algorithm, problem)

    assert len(declared) >= 5
    assert declared == sorted(declared)


@accepted({}, names=tuple(name for name in VARIANTS if name not in (*GROUPED, "winograd4_mt2")))
def test_blocks_need_the_same_workspace_whatever_the_batch(
    algorithm: Algorithm, problem: ConvProblem
) -> None:
    assert len(set(declared_by_batch(algorithm, problem))) == 1


@accepted({}, names=VARIANTS, layouts=SAME_LAYOUTS[:1])
def test_parts_of_any_size_are_computed_the_smallest_first(
    algorithm: Algorithm, problem: ConvProblem
) -> None:
    whole = problem.with_batch(6)
    first, second, bias = operands_of(whole)
    buffer = GuardedBuffer(max(algorithm.workspace_bytes(whole.with_batch(n)) for n in (1, 5))).inside
    out, into = poisoned_result(whole), GradientSum(poisoned_result(whole))
    for size, here in ((1, slice(0, 1)), (5, slice(1, 6))):
        part = whole.with_batch(size)
        if problem.op is ConvOp.WGRAD:
            sums = algorithm.sum_kernel(part, buffer)
            sums.add(first[here], second[here], into, first=size == 1)
        else:
            slices = algorithm.slice_kernel(part, buffer)
            slices.prepare(second)
            assert slices.run(first[here], second, out[here], bias)

    result = out
    if problem.op is ConvOp.WGRAD:
        assert sums.finish(into)
        result = into.total
    assert relative_error(result, reference(whole, first, second, bias)) <= FLOAT64_BOUND


@pytest.mark.parametrize("op", ConvOp)
def test_chunks_of_volumes_lie_in_memory_as_their_outputs_do(
    op: ConvOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_geometry, "_CHUNK_BYTES", 1)
    problem = a_convolution(
        op=op, dtype="float64", batch=2, in_channels=4, out_channels=4, input_size=(3, 16, 9),
        kernel_size=(1, 3, 3), stride=(1, 1, 1), padding=(0, 1, 1), dilation=(1, 1, 1),
    )  # fmt: skip
    algorithm, operands = algorithm_of("winograd4_k2"), operands_of(problem)

    result, is_sound = compute(algorithm, problem, *operands)

    assert is_sound
    assert relative_error(result, reference(problem, *operands)) <= FLOAT64_BOUND


@accepted({}, names=GROUPED)
def test_fewer_channels_at_once_need_a_smaller_part_of_the_filter(
    algorithm: Algorithm, problem: ConvProblem
) -> None:
    assert isinstance(algorithm, TileAlgorithm)
    whole = TileGeometry(dataclasses.replace(algorithm, channels=0), problem)
    part = TileGeometry(algorithm, problem)

    channels = problem.in_channels if problem.op is ConvOp.DGRAD else problem.out_channels
    (of_whole,), (of_part,) = whole.regions[0].shape, part.regions[0].shape
    assert of_part * channels == of_whole * algorithm.channels


@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("side", [4, 16, 32, 56, 64])
def test_planes_of_tiles_never_lie_whole_pages_apart(side: int, op: ConvOp) -> None:
    problem = a_convolution(op=op, in_channels=64, out_channels=64, input_size=(side, side))
    geometry = TileGeometry(TileAlgorithm(outputs=4), problem)

    for plane in (geometry.x_plane, geometry.y_plane) if op is ConvOp.WGRAD else (geometry.x_plane,):
        assert plane % 16 == 0
        assert plane % 32 != 0


# Parts of a division, all bound to one buffer.

PART_SIZES = ((6, 1, 6, 1), (4, 6, 4))
"""Of blocks of several images, and of several workers, a single sample is too small a part."""

DIVIDED = {
    name: PROBLEMS[name].with_batch(14)
    for name in (
        "3x3",
        "5x3",
        "9x9",
        "bias",
        "stride 2",
        "groups",
        "3-D, stride 2",
        "1x1",
        "1-D, 3 taps",
        "3x3x3",
    )
}
DIVIDED_BLOCKS = {name: BLOCKED[name].with_batch(14) for name in ("3x3", "7x7", "1-D, 3 taps", "3x3x3")}

Part = tuple[int, slice]


def parts_of(algorithm: Algorithm, problem: ConvProblem) -> list[Part]:
    """The sizes of unequal parts that the algorithm accepts, and their samples."""
    sizes = next(
        sizes
        for sizes in PART_SIZES
        if all(algorithm.refusal(problem.with_batch(size)) is None for size in sizes)
    )
    ends = list(itertools.accumulate(sizes))
    return [(size, slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def shared_buffer(algorithm: Algorithm, problem: ConvProblem, parts: list[Part]) -> Tensor:
    needed = max(algorithm.workspace_bytes(problem.with_batch(size)) for size, _ in parts)
    return GuardedBuffer(needed).inside


def slice_kernels(algorithm: Algorithm, problem: ConvProblem, parts: list[Part]) -> dict[int, SliceKernel]:
    """Kernels for parts of each size, in one poisoned buffer."""
    buffer = shared_buffer(algorithm, problem, parts)
    return {size: algorithm.slice_kernel(problem.with_batch(size), buffer) for size, _ in parts}


def sum_kernels(algorithm: Algorithm, problem: ConvProblem, parts: list[Part]) -> dict[int, SumKernel]:
    buffer = shared_buffer(algorithm, problem, parts)
    return {size: algorithm.sum_kernel(problem.with_batch(size), buffer) for size, _ in parts}


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


def add_up(
    kernels: dict[int, SumKernel], parts: list[Part], image: Tensor, gradient: Tensor, into: GradientSum
) -> bool:
    """Sum the parts; return whether `into` has a sound sum."""
    for number, (size, here) in enumerate(parts):
        kernels[size].add(image[here], gradient[here], into, first=number == 0)
    return kernels[parts[-1][0]].finish(into)


def sum_parts(
    algorithm: Algorithm, problem: ConvProblem, image: Tensor, gradient: Tensor, into: GradientSum
) -> bool:
    """The same in one poisoned buffer, the running sum too."""
    parts = parts_of(algorithm, problem)
    return add_up(sum_kernels(algorithm, problem, parts), parts, image, gradient, into)


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


# Numbers that are none.

STRANGE = {name: PROBLEMS[name] for name in ("3x3", "5x3", "9x9", "stride 2", "groups", "dilation", "3x3x3")}
STRANGE_BLOCKS = {name: BLOCKED[name] for name in ("3x3", "7x7", "3x3x3")}
FEW = {"3x3": SQUARE, "9x9": PROBLEMS["9x9"]}
PLACES = ("first", "second")
VALUES = (float("nan"), float("inf"), float("-inf"))


@pytest.mark.parametrize("place", PLACES)
@accepted(STRANGE, blocked=STRANGE_BLOCKS, dtype="float32")
def test_a_result_that_passes_has_its_strange_numbers_where_pytorch_has_them(
    algorithm: Algorithm, problem: ConvProblem, place: str
) -> None:
    first, second, bias = operands_of(problem)
    spoilt = {"first": first, "second": second}[place]
    spoilt[0, 0, 0, 0], spoilt[1, 0, 1, 1], spoilt[1, 1, 2, 0] = VALUES

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

    stays_in_place = algorithm.name == "im2col" and problem.op is not ConvOp.WGRAD and place == "first"
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


SUMMING_APART = tuple(name for name in EVERY if name not in GROUPED)


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


def allocated_bytes(call: Callable[[], object], folder: Path) -> int:
    """The most bytes that a call holds at once of what this thread takes from PyTorch's allocator."""
    call()  # what is made once only
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        call()
    return _most_held(recording, folder)


def allocated_bytes_of_worker(worker: int, call: Callable[[], object], folder: Path) -> int:
    """The same of what a worker thread takes, which no other thread's recording sees."""
    call()
    recording = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    others: list[Callable[[], None]] = [lambda: None] * worker
    run_on_workers([*others, recording.start])
    call()
    run_on_workers([*others, recording.stop])
    return _most_held(recording, folder)


def _most_held(recording: profile, folder: Path) -> int:
    trace = folder / "trace.json"
    recording.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    amounts = [event["args"]["Bytes"] for event in sorted(events, key=operator.itemgetter("ts"))]
    return max(itertools.accumulate(amounts, initial=0))


def allocated_bytes_of_threads(
    algorithm: Algorithm, call: Callable[[], object], folder: Path
) -> Iterator[int]:
    """Of each thread that takes part: this one, and workers."""
    yield allocated_bytes(call, folder)
    workers = getattr(algorithm, "workers", 1)
    for worker in range(workers if workers > 1 else 0):
        yield allocated_bytes_of_worker(worker, call, folder)


def hot_call(algorithm: Algorithm, problem: ConvProblem) -> Callable[[], None]:
    """All that a division runs, again and again, on operands that are there."""
    buffer = GuardedBuffer(algorithm.workspace_bytes(problem)).inside
    if problem.op is ConvOp.WGRAD:
        return sum_call(algorithm.sum_kernel(problem, buffer), problem)
    return slice_call(algorithm.slice_kernel(problem, buffer), problem)


def slice_call(kernel: SliceKernel, problem: ConvProblem) -> Callable[[], None]:
    image, weight, bias = operands_of(problem)
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


def test_an_allocation_that_is_given_back_at_once_is_seen(tmp_path: Path) -> None:
    image = torch.ones(1000)

    assert allocated_bytes(lambda: (image + image).sum(), tmp_path) >= image.nbytes


@pytest.mark.parametrize("worker", [0, 1])
def test_an_allocation_by_a_worker_is_seen(worker: int, tmp_path: Path) -> None:
    images = [torch.ones(1000), torch.ones(3000)]

    def call() -> None:
        run_on_workers([lambda image=image: (image + image).sum().item() for image in images])

    taken = allocated_bytes_of_worker(worker, call, tmp_path)

    assert images[worker].nbytes <= taken <= images[worker].nbytes + ALLOCATION_BOUND


@accepted(HOT, blocked=HOT_BLOCKS, dtype="float32", names=EVERY)
def test_nothing_is_allocated(algorithm: Algorithm, problem: ConvProblem, tmp_path: Path) -> None:
    taken = [*allocated_bytes_of_threads(algorithm, hot_call(algorithm, problem), tmp_path)]

    assert max(taken) <= ALLOCATION_BOUND


@accepted(LARGE, blocked=LARGE_BLOCKS, dtype="float32")
def test_for_large_tensors_nothing_is_allocated_either(
    algorithm: Algorithm, problem: ConvProblem, tmp_path: Path
) -> None:
    taken = [*allocated_bytes_of_threads(algorithm, hot_call(algorithm, problem), tmp_path)]

    assert max(taken) <= ALLOCATION_BOUND
