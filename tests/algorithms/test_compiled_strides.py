"""Strided convolution by tiles in C: every op, and what is tried."""

import dataclasses
import math
import re

import pytest
import torch

from mucudnn.algorithms import Algorithm
from mucudnn.algorithms.compiled.shares import Shares
from mucudnn.algorithms.own import own_convolution
from mucudnn.backends.cpu.backend import CpuBackend
from mucudnn.problem import ConvOp, ConvProblem
from tests.algorithms.kernels import (
    FLOAT64_BOUND,
    GuardedBuffer,
    a_double,
    accepted,
    algorithm_of,
    compute,
    for_blocks,
)
from tests.algorithms.tried import a_layer, a_volume, names, winograd
from tests.operands import operands_of, reference, relative_error

pytestmark = pytest.mark.usefixtures("one_thread", "wide_products")

VECTORS = {"in_channels": 22, "out_channels": 38}
"""Of each a vector at least, and a rest, where four or more make a vector."""

PROBLEMS = {
    "3x3": for_blocks(**VECTORS, input_size=(17, 14), stride=(2, 2), bias=True),
    "3x3, no padding, rest": for_blocks(input_size=(12, 10), stride=(2, 2), padding=(0, 0)),
    "3x3, padding 2": for_blocks(stride=(2, 2), padding=(2, 2)),
    "3x3, one pixel": a_double(input_size=(1, 1), stride=(2, 2)),
    "5x4": for_blocks(**VECTORS, input_size=(19, 14), kernel_size=(5, 4), stride=(2, 2), padding=(2, 1)),
    "3x1": for_blocks(input_size=(9, 8), kernel_size=(3, 1), stride=(2, 2), padding=(1, 0)),
    "a stride beyond the taps": for_blocks(
        **VECTORS, input_size=(11, 13), kernel_size=(2, 3), stride=(3, 2), padding=(1, 2)
    ),
    "1-D": for_blocks(**VECTORS, input_size=(21,), kernel_size=(4,), stride=(2,), padding=(3,), bias=True),
    "3-D": for_blocks(
        **VECTORS, input_size=(7, 9, 6), kernel_size=(3, 3, 3), stride=(2, 2, 2), padding=(1, 1, 0)
    ),
    "3-D, slices next to each other": for_blocks(
        input_size=(5, 9, 8), kernel_size=(3, 3, 3), stride=(1, 2, 2), padding=(1, 1, 1), bias=True
    ),
}

NAMES = (
    *(
        "cc_winograd2",
        "cc_winograd2_rows1",
        "cc_winograd2_rows3_mt2",
        "cc_winograd2_k16",
        "cc_winograd2_k4_mt2",
    ),
    *("cc_winograd4", "cc_winograd4_rows2_mt2", "cc_winograd2_fma_rows3_mt2", "cc_winograd2_fma_k16"),
)


@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_the_smallest_tiles_compute_every_stride(problem: ConvProblem, op: ConvOp) -> None:
    assert algorithm_of("cc_winograd2").refusal(problem.with_op(op)) is None


@accepted(PROBLEMS, names=NAMES)
def test_the_result_is_that_of_pytorch_in_the_declared_workspace(
    algorithm: Algorithm, problem: ConvProblem
) -> None:
    operands = operands_of(problem)
    buffer = GuardedBuffer(algorithm.workspace_bytes(problem))

    result, is_good = compute(algorithm, problem, *operands, buffer=buffer.inside)

    assert is_good
    assert relative_error(result, reference(problem, *operands)) <= FLOAT64_BOUND
    assert buffer.is_intact


ACCURACY = {
    "5x4": dataclasses.replace(PROBLEMS["5x4"], in_channels=64),
    "7x7": for_blocks(in_channels=64, input_size=(21, 20), kernel_size=(7, 7), stride=(2, 2), padding=(3, 3)),
    "8x8": for_blocks(in_channels=64, input_size=(21, 20), kernel_size=(8, 8), stride=(2, 2), padding=(3, 3)),
    "3-D": dataclasses.replace(PROBLEMS["3-D"], in_channels=64),
}
BACKEND = CpuBackend()


@accepted(ACCURACY, dtype="float32", names=("cc_winograd2", "cc_winograd4"))
def test_float32_loses_no_more_digits_than_is_allowed(algorithm: Algorithm, problem: ConvProblem) -> None:
    operands = operands_of(problem)

    result, _ = compute(algorithm, problem, *operands)

    allowed = BACKEND.error_bound(problem, f"cpu:{algorithm.name}")
    assert relative_error(result, reference(problem, *operands)) <= allowed


@pytest.mark.parametrize(
    ("taps", "stride", "algorithm", "allowed"),
    [
        (3, 1, "cpu:cc_winograd2", 1e-6),
        (5, 2, "cpu:cc_winograd2_k16", 1e-6),
        (7, 2, "cpu:cc_winograd2", 3e-6),
        (8, 2, "cpu:cc_winograd2_rows1", 3e-6),
        (8, 3, "cpu:cc_winograd2", 1e-6),
        (5, 2, "cpu:cc_winograd4", 1e-5),
    ],
)
def test_four_taps_in_a_phase_may_lose_more_digits(
    taps: int, stride: int, algorithm: str, allowed: float
) -> None:
    problem = for_blocks(
        input_size=(21, 20), kernel_size=(taps, 1), stride=(stride, 1), padding=(0, 0), dtype="float32"
    )

    assert BACKEND.error_bound(problem, algorithm) == pytest.approx(allowed)


UNREAD = {"3x3, no padding, rest": (11, 9), "a stride beyond the taps": (1, 12)}
"""A pixel that no window has."""


@pytest.mark.parametrize("name", UNREAD)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_pixel_that_pytorch_does_not_read_spoils_nothing_silently(name: str, value: float) -> None:
    problem = PROBLEMS[name]
    image, weight, bias = operands_of(problem)
    image[(..., *UNREAD[name])] = value

    result, is_good = compute(algorithm_of("cc_winograd2"), problem, image, weight, bias)

    expected = own_convolution(problem, image, weight, bias)
    assert torch.isfinite(expected).all()
    assert not is_good or relative_error(result, expected) <= FLOAT64_BOUND


def a_strided_layer(taps: int, stride: int = 2, **changes: object) -> ConvProblem:
    return a_layer(**{"kernel_size": (taps, taps), "stride": (stride, stride), **changes})


def families(problem: ConvProblem) -> list[str]:
    found = (re.sub("_(rows|k).*", "", name) for name in winograd(names(problem, compiles=True)))
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("op", ConvOp)
def test_the_smallest_tiles_are_tried_and_larger_ones_where_they_save_more(op: ConvOp) -> None:
    layers = [a_strided_layer(taps, op=op, input_size=(32, 32)) for taps in (3, 4, 5)]

    assert [families(layer) for layer in layers] == [
        ["cc_winograd2"],
        ["cc_winograd2", "cc_winograd4"],
        ["cc_winograd2", "cc_winograd4"],
    ]
    assert families(a_volume(32, op=op, stride=(2, 2, 2))) == ["cc_winograd2"]


@pytest.mark.parametrize("op", ConvOp)
def test_what_saves_too_few_multiplications_is_not_tried(op: ConvOp) -> None:
    assert families(a_strided_layer(6, 5, op=op)) == []  # 11 instead of 12 along each axis
    assert families(a_strided_layer(3, kernel_size=(3, 1), padding=(1, 0), op=op)) == [
        "cc_winograd4"
    ]  # 9 of 12


@pytest.mark.parametrize("op", ConvOp)
def test_a_stride_along_an_axis_of_one_tap_changes_nothing(op: ConvOp) -> None:
    column = {"kernel_size": (3, 1), "padding": (1, 0), "op": op}

    assert families(a_layer(**column, stride=(1, 2))) == families(a_layer(**column))


@pytest.mark.parametrize(
    ("name", "problem", "refusal"),
    [
        ("cc_winograd6", a_strided_layer(3), "it is for stride 1"),
        ("cc_winograd2", a_strided_layer(2), "it is for filters of 2 to 4 taps in a phase"),
        ("cc_winograd2", a_strided_layer(9), "it is for filters of 2 to 4 taps in a phase"),
        ("cc_winograd4", a_strided_layer(7), "a tile would have more than 12 values along an axis"),
        (
            "cc_winograd2",
            a_volume(8, stride=(1, 20, 20), op=ConvOp.DGRAD),
            "more than 12 values along an axis",
        ),
        ("cc_winograd4", a_volume(32, stride=(2, 2, 2)), "a tile would take more than 343 products"),
        (
            "cc_winograd2",
            a_volume(8, kernel_size=(12, 6, 6), stride=(12, 2, 2), input_size=(24, 24, 24)),
            "a tile would take more than 343 products",
        ),
    ],
)
def test_a_stride_without_a_good_form_is_refused(name: str, problem: ConvProblem, refusal: str) -> None:
    assert refusal in str(algorithm_of(name).refusal(problem))


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"dilation": (2, 2)}, "tiles need dilation 1 and one group"),
        ({"groups": 2}, "tiles need dilation 1 and one group"),
        ({"op": ConvOp.DGRAD, "padding": (3, 3)}, "dgrad by tiles needs a padding smaller than the filter"),
    ],
)
def test_with_a_stride_the_same_is_refused_as_without(changes: dict[str, object], refusal: str) -> None:
    for layer in (a_strided_layer(3, **changes), a_layer(**changes)):
        assert algorithm_of("cc_winograd2").refusal(layer) == refusal


def planes(op: ConvOp, stride: int) -> tuple[int, int, int]:
    shares = Shares(a_strided_layer(3, stride, op=op), 2, lines=0, channels=0, workers=1)
    return shares.x_planes, shares.planes, shares.y_planes


def test_of_stride_1_every_product_has_planes_of_its_own() -> None:
    assert {planes(op, 1) for op in ConvOp} == {(16, 16, 16)}


def test_products_of_several_phases_are_summed_before_they_are_transformed() -> None:
    assert planes(ConvOp.FPROP, 2) == planes(ConvOp.WGRAD, 2) == (25, 25, 9)


def test_phases_of_a_gradient_share_what_they_read() -> None:
    assert planes(ConvOp.DGRAD, 2) == (16, 25, 25)
