"""PyTorch's own convolution of some rows at a time."""

import dataclasses

import pytest
import torch
from torch import Tensor

from mucudnn.algorithms import named, offered
from mucudnn.algorithms.bands import BandAlgorithm
from mucudnn.backends import backend_of
from mucudnn.backends.cpu.footprint_child import NOISE_BYTES
from mucudnn.division import Division
from mucudnn.execution.weighing import division_job
from mucudnn.problem import ConvOp, ConvProblem, Layout
from mucudnn.profile import Candidate, Trial
from tests.algorithms.kernels import PROBLEMS, GuardedBuffer, compute, parts_of, slice_kernels
from tests.operands import a_convolution, operands_of, poisoned_result, reference, relative_error

pytestmark = pytest.mark.usefixtures("one_thread")

BOUNDS = {"float64": 1e-12, "float32": 4e-6, "float16": 4e-3, "bfloat16": 3e-2}

ROWS = (1, 3)

CASES = [
    pytest.param(
        algorithm,
        dataclasses.replace(base, layout=layout, filter_layout=filter_layout),
        id=f"{algorithm.name}-{layout}-{filter_layout}-{name}",
    )
    for name, base in PROBLEMS.items()
    for algorithm in map(BandAlgorithm, ROWS)
    if algorithm.refusal(base) is None
    for layout in Layout
    for filter_layout in Layout
]

STRIDED = a_convolution(
    batch=7, input_size=(17, 9), kernel_size=(5, 3), stride=(2, 2), padding=(2, 1), bias=True
)
"""Of which y has 9 rows."""


@pytest.mark.parametrize(("algorithm", "problem"), CASES)
def test_the_result_is_that_of_pytorch(algorithm: BandAlgorithm, problem: ConvProblem) -> None:
    operands = operands_of(problem)

    result, is_good = compute(algorithm, problem, *operands)

    assert is_good
    assert relative_error(result, reference(problem, *operands)) <= BOUNDS["float64"]


@pytest.mark.parametrize("dtype", BOUNDS)
def test_every_type_is_computed(dtype: str) -> None:
    problem = dataclasses.replace(STRIDED, dtype=dtype)
    operands = operands_of(problem)

    result, is_good = compute(BandAlgorithm(4), problem, *operands)

    assert is_good
    assert relative_error(result, reference(problem, *operands)) <= BOUNDS[dtype]


@pytest.mark.parametrize("layout", Layout)
def test_nothing_is_written_beyond_the_declared_workspace(layout: Layout) -> None:
    algorithm, problem = BandAlgorithm(2), dataclasses.replace(STRIDED, layout=layout)
    buffer = GuardedBuffer(algorithm.workspace_bytes(problem))

    compute(algorithm, problem, *operands_of(problem), buffer=buffer.inside)

    assert buffer.is_intact


def test_parts_of_any_size_share_a_workspace() -> None:
    algorithm, problem = BandAlgorithm(2), STRIDED.with_batch(14)
    image, weight, bias = operands_of(problem)
    parts, out = parts_of(algorithm, problem), poisoned_result(problem)
    kernels = slice_kernels(algorithm, problem, parts)
    kernels[parts[0][0]].prepare(weight)

    assert all(kernels[size].run(image[here], weight, out[here], bias) for size, here in parts)
    assert relative_error(out, reference(problem, image, weight, bias)) <= BOUNDS["float32"]


def test_bands_are_as_equal_as_they_can_be() -> None:
    rows = {
        most: [each.output_size[0] for each in BandAlgorithm(most).own_problems(STRIDED)]
        for most in (1, 2, 3, 8)
    }

    assert rows == {1: [1], 2: [2, 1], 3: [3], 8: [5, 4]}  # of 9
    assert BandAlgorithm(2).own_problems(STRIDED)[0].input_size == (2 + 5, 9)
    assert BandAlgorithm(2).own_problems(STRIDED)[0].padding == (0, 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"op": ConvOp.WGRAD, "bias": False}, "bands of rows are for fprop"),
        ({"op": ConvOp.DGRAD, "bias": False}, "bands of rows are for fprop"),
        ({"dtype": "complex64"}, "bands of rows are for float16"),
        ({"batch": 0}, "there is nothing to compute"),
        ({"input_size": (9, 9)}, "there are no more rows than that"),
    ],
)
def test_what_has_no_bands_is_refused(changes: dict[str, object], reason: str) -> None:
    assert BandAlgorithm(5).refusal(STRIDED) is None
    assert BandAlgorithm(5).refusal(dataclasses.replace(STRIDED, **changes)).startswith(reason)


def test_a_convolution_of_one_dimension_has_no_rows() -> None:
    assert (
        BandAlgorithm(1).refusal(PROBLEMS["1-D, stride 2"])
        == "bands of rows are for images of two dimensions"
    )


def test_it_is_known_by_its_name() -> None:
    assert named("aten_rows28") == BandAlgorithm(28)
    assert named("aten_rows0") is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_strange_numbers_of_an_image_come_out_where_pytorch_has_them(value: float) -> None:
    image, weight, bias = operands_of(STRIDED)
    image[3, 1, 8, 4] = value

    result, is_good = compute(BandAlgorithm(2), STRIDED, image, weight, bias)

    assert is_good
    assert torch.equal(result.isfinite(), own(image, weight, bias).isfinite())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_strange_filter_is_reported(value: float) -> None:
    image, weight, bias = operands_of(STRIDED)
    weight[2, 1, 0, 0] = value

    _, is_good = compute(BandAlgorithm(2), STRIDED, image, weight, bias)

    assert not is_good


def test_without_rows_of_zeros_a_strange_filter_is_none_of_its_matters() -> None:
    problem = dataclasses.replace(STRIDED, padding=(0, 0))
    image, weight, bias = operands_of(problem)
    weight[2, 1, 0, 0] = float("inf")

    result, is_good = compute(BandAlgorithm(2), problem, image, weight, bias)

    assert is_good
    expected = torch.conv2d(image, weight, bias, problem.stride, problem.padding)
    assert torch.equal(result.isnan(), expected.isnan())


def own(image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.conv2d(image, weight, bias, STRIDED.stride, STRIDED.padding)


LARGE = a_convolution(
    batch=4, in_channels=3, out_channels=64, input_size=(112, 112), kernel_size=(7, 7), stride=(2, 2),
    padding=(3, 3), dilation=(1, 1),
)  # fmt: skip


def names_of(problem: ConvProblem) -> list[str]:
    return [each.name for each in offered(problem, 1) if isinstance(each, BandAlgorithm)]


def test_bands_are_tried_where_nothing_else_cuts_a_large_image() -> None:
    larger = dataclasses.replace(LARGE, input_size=(224, 224))  # with 3.7 MiB of x and y

    assert names_of(larger) == ["aten_rows56", "aten_rows28"]
    assert names_of(LARGE) == []
    assert names_of(dataclasses.replace(larger, stride=(1, 1), kernel_size=(3, 3))) == []
    assert names_of(larger.with_op(ConvOp.WGRAD)) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", Layout)
def test_a_division_takes_no_more_than_it_was_said_to(layout: Layout, dtype: str) -> None:
    backend = backend_of("cpu:")
    problem = dataclasses.replace(LARGE, layout=layout, filter_layout=layout, dtype=dtype, out_channels=96)

    said = backend.workspace_bytes(Trial(problem, "cpu:aten_rows19", whole=True), 2**40)

    division = Division((Candidate("cpu:aten_rows19", 4, 0.0, said),))
    seen = backend.footprint(division_job(problem, division, backend.device), 2**40)
    assert 0 < seen <= said + NOISE_BYTES


def test_many_filters_take_nothing_more_to_be_looked_at() -> None:
    backend = backend_of("cpu:")
    problem = a_convolution(
        batch=2, in_channels=256, out_channels=512, input_size=(24, 24), stride=(2, 2), dilation=(1, 1),
        layout=Layout.CHANNELS_LAST, filter_layout=Layout.CHANNELS_LAST, dtype="bfloat16",
    )  # fmt: skip

    said = backend.workspace_bytes(Trial(problem, "cpu:aten_rows4", whole=True), 2**40)

    division = Division((Candidate("cpu:aten_rows4", 2, 0.0, said),))
    seen = backend.footprint(division_job(problem, division, backend.device), 2**40)
    assert seen <= said + NOISE_BYTES


def test_contiguous_bands_take_less_than_an_image() -> None:
    backend = backend_of("cpu:")
    said = backend.workspace_bytes(Trial(LARGE, "cpu:aten_rows14", whole=True), 2**40)

    assert said < backend.workspace_bytes(Trial(LARGE.with_batch(1), "cpu:aten", whole=False), 2**40) / 2
    assert not backend.declares("cpu:aten_rows14")
