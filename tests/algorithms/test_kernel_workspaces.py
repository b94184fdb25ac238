"""Kernels keep to the workspace that they declare."""

import dataclasses

import pytest
import torch

from mucudnn.algorithms import Algorithm, GradientSum, tile_geometry
from mucudnn.algorithms.tile_geometry import TileGeometry
from mucudnn.algorithms.tiles import TileAlgorithm
from mucudnn.problem import ConvOp, ConvProblem
from tests.algorithms.kernels import (
    COMPILED,
    EVERY,
    FLOAT64_BOUND,
    GROUPED,
    IN_BLOCKS,
    OF_TORCH,
    POISON,
    PROBLEMS,
    SAME_LAYOUTS,
    SQUARE,
    SUMMED,
    VARIANTS,
    VARIED,
    GuardedBuffer,
    accepted,
    algorithm_of,
    compute,
)
from tests.operands import a_convolution, operands_of, poisoned_result, reference, relative_error

pytestmark = pytest.mark.usefixtures("one_thread")


@accepted(VARIED)
def test_nothing_is_written_beyond_the_declared_workspace(algorithm: Algorithm, problem: ConvProblem) -> None:
    buffer = GuardedBuffer(algorithm.workspace_bytes(problem))

    compute(algorithm, problem, *operands_of(problem), buffer=buffer.inside)

    assert buffer.is_intact


VOLUMES = {
    "3-D, whole vectors": a_convolution(
        batch=2, in_channels=32, out_channels=16, input_size=(9, 6, 10), kernel_size=(3, 3, 3),
        stride=(1, 1, 1), padding=(1, 1, 1), dilation=(1, 1, 1),
    ),
}  # fmt: skip


@accepted(VOLUMES, blocked=VOLUMES, dtype="float32", names=COMPILED)
def test_images_are_turned_round_in_the_declared_workspace(
    algorithm: Algorithm, problem: ConvProblem
) -> None:
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


@accepted(VARIED, names=tuple(name for name in EVERY if name not in GROUPED), layouts=SAME_LAYOUTS[:1])
def test_a_larger_batch_never_needs_less_workspace(algorithm: Algorithm, problem: ConvProblem) -> None:
    declared = declared_by_batch(algorithm, problem)

    assert len(declared) >= 5
    assert declared == sorted(declared)


@accepted({}, names=IN_BLOCKS)
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


@accepted({}, names=tuple(name for name in (*GROUPED, *SUMMED) if name in OF_TORCH))
def test_fewer_channels_at_once_need_a_smaller_part_of_the_filter(
    algorithm: Algorithm, problem: ConvProblem
) -> None:
    assert isinstance(algorithm, TileAlgorithm)
    many = dataclasses.replace(problem, in_channels=64, out_channels=64)
    whole = TileGeometry(dataclasses.replace(algorithm, channels=0, summed=0), many)
    part = TileGeometry(algorithm, many)

    share = (algorithm.channels or algorithm.summed) / 64
    assert filter_elements(part) <= filter_elements(whole) * share + 2 * 16 * part.planes * part.taps[0]


def filter_elements(geometry: TileGeometry) -> int:
    """Elements that the transformed filter takes, gaps between its planes included."""
    (elements,) = geometry.regions[0].shape
    return elements


@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("side", [4, 16, 32, 56, 64])
def test_planes_never_lie_whole_pages_apart(side: int, op: ConvOp) -> None:
    problem = a_convolution(op=op, in_channels=64, out_channels=64, input_size=(side, side))
    geometry = TileGeometry(TileAlgorithm(outputs=4), problem)

    for plane in (geometry.x_plane, geometry.y_plane if op is ConvOp.WGRAD else geometry.filter_plane):
        assert plane % 16 == 0
        assert plane % 32 != 0
