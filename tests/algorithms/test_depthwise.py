"""Depthwise convolution in C: types, vectors, layouts, and where it is tried."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

from mucudnn.algorithms.depthwise import DepthwiseAlgorithm, algorithm, kernels
from mucudnn.algorithms.depthwise.axes import axes_of
from mucudnn.algorithms.depthwise.shares import Shares
from mucudnn.algorithms.depthwise.source import ELEMENTS, source_of
from mucudnn.backends.cpu.backend import CpuBackend
from mucudnn.errors import BackendError
from mucudnn.problem import ConvOp, ConvProblem, Layout
from tests.algorithms.kernels import PROBLEMS, compute
from tests.algorithms.strict_c import assert_is_c_without_a_warning
from tests.algorithms.tried import names
from tests.algorithms.vectors import lengths_of_vectors
from tests.operands import a_convolution, laid_out, operands_of, poisoned_result, reference, relative_error

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = {key: each for key, each in PROBLEMS.items() if "apart" in key}

LENGTHS = range(1, 11)
"""Of rows: outputs are computed eight, four and one at a time."""


def a_layer(channels: int = 24, **changes: object) -> ConvProblem:
    shape = {"in_channels": channels, "out_channels": channels, "groups": channels, "batch": 3}
    return a_convolution(**{**shape, **changes})


def of(base: ConvProblem, op: ConvOp, layout: Layout, dtype: str) -> ConvProblem:
    bias = base.bias and op is ConvOp.FPROP
    return dataclasses.replace(base, op=op, layout=layout, filter_layout=layout, dtype=dtype, bias=bias)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("key", CASES)
def test_errors_are_those_of_rounding(key: str, op: ConvOp, layout: Layout, dtype: str) -> None:
    problem = of(CASES[key], op, layout, dtype)
    first, second, bias = operands_of(problem)

    result, is_good = compute(DepthwiseAlgorithm(), problem, first, second, bias)

    assert is_good
    bound = CpuBackend().error_bound(problem, "cpu:cc_depthwise")
    assert bound == (4e-3 if dtype == "bfloat16" else 1e-6)
    assert relative_error(result, reference(problem, first, second, bias)) <= bound


@pytest.mark.parametrize("layout", Layout)
def test_long_sums_of_a_gradient_do_not_pile_up_roundings(layout: Layout) -> None:
    problem = a_layer(
        16, op=ConvOp.WGRAD, batch=4, input_size=(160, 160), layout=layout, filter_layout=layout
    )
    image, gradient, _ = operands_of(problem)

    result, _ = compute(DepthwiseAlgorithm(2), problem, image, gradient)

    assert problem.terms > 10**5
    assert relative_error(result, reference(problem, image, gradient)) <= 1e-6  # though 2.5e-6 are allowed


def test_long_rows_of_a_gradient_do_not_pile_up_roundings_either() -> None:
    problem = a_layer(
        16, op=ConvOp.WGRAD, batch=2, input_size=(8000,), kernel_size=(9,), stride=(1,), padding=(4,),
        dilation=(1,),
    )  # fmt: skip
    image, gradient, _ = operands_of(problem)

    result, _ = compute(DepthwiseAlgorithm(), problem, image, gradient)

    assert relative_error(result, reference(problem, image, gradient)) <= 5e-7


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ConvOp)
def test_large_numbers_whose_sum_overflows_are_sound(op: ConvOp, dtype: str) -> None:
    problem = a_layer(16, op=op, input_size=(64, 64), dtype=dtype)
    first, second, _ = (None if each is None else torch.ones_like(each) for each in operands_of(problem))
    scale = 1e34 if op is ConvOp.WGRAD else 1e36

    result, is_good = compute(DepthwiseAlgorithm(), problem, first * scale, second)

    assert result.isfinite().all()
    assert result.abs().sum().isinf()
    assert is_good


@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("taps", LENGTHS)
def test_rows_and_filters_of_any_length(taps: int, op: ConvOp) -> None:
    for dilation, length in itertools.product((1, 2), LENGTHS):
        problem = a_layer(
            9, op=op, input_size=(length,), kernel_size=(taps,), stride=(1,), dilation=(dilation,),
            padding=((taps - 1) * dilation // 2 + 1,), dtype="float64",
        )  # fmt: skip
        operands = operands_of(problem)

        result, is_good = compute(DepthwiseAlgorithm(), problem, *operands)

        assert is_good
        assert relative_error(result, reference(problem, *operands)) <= 1e-12


vector_bytes = lengths_of_vectors(kernels, algorithm)


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("layout", Layout)
def test_vectors_of_any_length_compute_the_same(
    vector_bytes: int, op: ConvOp, layout: Layout, dtype: str
) -> None:
    problem = a_layer(19, op=op, layout=layout, dtype=dtype)
    operands = operands_of(problem)
    each = DepthwiseAlgorithm()

    result, is_good = compute(each, problem, *operands)

    assert each.shares(problem).lanes == vector_bytes // (8 if dtype == "float64" else 4)
    assert is_good
    bound = CpuBackend().error_bound(problem, "cpu:cc_depthwise")
    assert relative_error(result, reference(problem, *operands)) <= bound


@pytest.mark.parametrize("n_bytes", [16, 32, 64])
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_the_source_is_c_without_a_warning(dtype: str, n_bytes: int, tmp_path: Path) -> None:
    assert_is_c_without_a_warning(source_of(dtype, n_bytes), tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("layout", Layout)
def test_operands_and_results_may_lie_anyhow(op: ConvOp, layout: Layout, dtype: str) -> None:
    problem = of(a_layer(20, bias=True), op, layout, dtype)
    first, second, bias = operands_of(problem)
    wide = (*first.shape[:-1], 2 * first.shape[-1])
    apart = torch.full(wide, float("nan"), dtype=first.dtype)[..., ::2].copy_(first)
    turned = second.transpose(0, -1).contiguous().transpose(0, -1)
    gapped = None if bias is None else bias.repeat_interleave(3)[::3]
    around = torch.full_like(poisoned_result(problem).repeat_interleave(2, dim=-1), 7.0)

    result, is_good = compute(DepthwiseAlgorithm(), problem, apart, turned, gapped, out=around[..., ::2])

    assert is_good
    assert (around[..., 1::2] == 7).all()
    exact = reference(problem, first, second, bias)
    assert relative_error(result, exact) <= CpuBackend().error_bound(problem, "cpu:cc_depthwise")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("op", [ConvOp.FPROP, ConvOp.DGRAD])
@pytest.mark.parametrize("key", CASES)
def test_nothing_is_written_beside_a_result_that_is_part_of_a_larger_one(
    key: str, op: ConvOp, layout: Layout, dtype: str
) -> None:
    problem = of(CASES[key], op, layout, dtype)
    first, second, _ = operands_of(problem)
    n, c, *size = poisoned_result(problem).shape
    for dimension in range(1, len(size) + 2):
        shape = [n, c, *size]
        shape[dimension] += 3
        around = laid_out(torch.full(shape, 7.0, dtype=first.dtype), layout)
        inside = around.narrow(dimension, 1, shape[dimension] - 3)

        result, is_good = compute(DepthwiseAlgorithm(), problem, first, second, out=inside)

        assert is_good
        assert (around.narrow(dimension, 0, 1) == 7).all()
        assert (around.narrow(dimension, shape[dimension] - 2, 2) == 7).all()
        bound = CpuBackend().error_bound(problem, "cpu:cc_depthwise")
        assert relative_error(result, reference(problem, first, second)) <= bound


@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("layout", Layout)
def test_operands_at_any_address_are_read(op: ConvOp, layout: Layout) -> None:
    problem = of(a_layer(17), op, layout, "bfloat16")
    first, second, _ = operands_of(problem)
    shifted = [
        torch.empty(each.numel() + 1, dtype=each.dtype)[1:]
        .as_strided(each.shape, each.stride(), 1)
        .copy_(each)
        for each in (first, second)
    ]

    result, _ = compute(DepthwiseAlgorithm(), problem, *shifted)

    assert relative_error(result, reference(problem, first, second)) <= 4e-3


def test_one_number_may_stand_for_all_samples() -> None:
    problem = a_layer(16, op=ConvOp.DGRAD)
    _, weight, _ = operands_of(problem)
    gradient = torch.ones(()).expand(problem.output_shape)

    result, _ = compute(DepthwiseAlgorithm(), problem, gradient, weight)

    assert relative_error(result, reference(problem, gradient, weight)) <= 1e-6


@pytest.mark.parametrize("place", [0, 1])
def test_what_is_not_what_it_was_tuned_for_is_refused_before_c_reads_it(place: int) -> None:
    problem = a_layer()
    operands = list(operands_of(problem))
    operands[place] = operands[place][..., 1:]

    with pytest.raises(BackendError, match="is needed, but got"):
        compute(DepthwiseAlgorithm(), problem, *operands)


@pytest.mark.parametrize("op", [ConvOp.FPROP, ConvOp.DGRAD])
@pytest.mark.parametrize("key", CASES)
def test_outputs_read_what_the_definition_says(key: str, op: ConvOp) -> None:
    problem = dataclasses.replace(CASES[key], op=op)
    rest = (problem.kernel_size, problem.stride, problem.dilation, problem.padding)
    sizes = zip(problem.input_size, problem.output_size, *rest, strict=True)
    for axis, (inputs, outputs, taps, stride, dilation, padding) in zip(
        axes_of(problem)[-len(problem.kernel_size) :], sizes, strict=True
    ):
        defined = {
            (y, tap, x)
            for y in range(outputs)
            for tap in range(taps)
            if 0 <= (x := y * stride + tap * dilation - padding) < inputs
        }
        reads = outputs if op is ConvOp.DGRAD else inputs
        found = {
            (output, tap.tap, read)
            for output in range(axis.outputs)
            for tap in axis.phases[output % axis.period]
            if 0 <= (read := output // axis.period * axis.step + tap.shift) < reads
        }
        assert found == ({(x, tap, y) for y, tap, x in defined} if op is ConvOp.DGRAD else defined)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_unit_is_computed_by_one_thread(workers: int) -> None:
    shares = Shares(CASES["channels apart, large image"], 64, workers)

    assert shares.bands > 1
    units = [unit for each in range(workers) for unit in range(*shares.units_of(each))]
    assert units == list(range(shares.bands * shares.blocks))


@pytest.mark.parametrize("op", ConvOp)
def test_more_threads_than_units_compute_the_same(op: ConvOp) -> None:
    problem = a_layer(3, op=op, batch=3)  # an image's channels fill no vector, however short
    operands, many = operands_of(problem), DepthwiseAlgorithm(7)

    result, is_good = compute(many, problem, *operands)

    shares = many.shares(problem)
    assert shares.units == 3
    assert [shares.units_of(each) for each in range(7)] == [(0, 1), (1, 2), (2, 3), *[(3, 3)] * 4]
    assert is_good
    assert relative_error(result, reference(problem, *operands)) <= 1e-6


def test_many_threads_share_a_few_mib() -> None:
    wide = a_layer(96, batch=64, input_size=(224, 224), kernel_size=(7, 7), padding=(3, 3))

    assert DepthwiseAlgorithm(64).workspace_bytes(wide) < 12 * 2**20


@pytest.mark.parametrize("op", ConvOp)
def test_long_rows_are_cut_and_an_image_that_a_stage_holds_is_not(op: ConvOp) -> None:
    long, small = (
        Shares(CASES[key].with_op(op), 64, 1)
        for key in ("channels apart, long rows, stride 3", "channels apart")
    )

    assert long.strips > 1
    assert long.strip % long.axes[2].period == 0
    assert small.strips == small.bands == 1


def test_workspace_does_not_grow_with_batch_and_image_once_these_are_cut() -> None:
    def taken(batch: int, *size: int) -> int:
        return DepthwiseAlgorithm(2).workspace_bytes(a_layer(64, batch=batch, input_size=size))

    assert taken(1, 8, 8) < taken(1, 16, 16) < taken(1, 32, 32)  # whole, by vectors of any length
    for large in ((64, 1024, 64), (1, 8, 2**20), (1, 2**10, 2**13)):
        assert taken(*large) < 2**20


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float16"}, "it is for float32, float64, bfloat16"),
        ({"out_channels": 48}, "as many groups as channels"),
        ({"groups": 12}, "as many groups as channels"),
        ({"groups": 1, "in_channels": 1, "out_channels": 1}, "as many groups as channels"),
        ({"batch": 0}, "nothing to compute"),
    ],
)
def test_others_are_refused(changes: dict[str, object], reason: str) -> None:
    assert reason in (DepthwiseAlgorithm().refusal(a_layer(**changes)) or "")


def test_without_a_compiler_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithm, "compiler", lambda: None)

    assert DepthwiseAlgorithm().refusal(a_layer()) == "there is no C compiler"
    assert not any("depthwise" in name for name in names(a_layer(), compiles=True))


@pytest.mark.parametrize(("layout", "tried"), [(Layout.CONTIGUOUS, True), (Layout.CHANNELS_LAST, False)])
def test_it_is_tried_but_forward_where_channels_lie_next_to_each_other(layout: Layout, tried: bool) -> None:
    def is_tried(op: ConvOp, **more: bool) -> bool:
        return "cc_depthwise_mt2" in names(a_layer(op=op, layout=layout), 2, compiles=True, **more)

    assert is_tried(ConvOp.FPROP) is tried
    assert is_tried(ConvOp.FPROP, exhaustive=True)
    assert is_tried(ConvOp.DGRAD)
    assert is_tried(ConvOp.WGRAD)


def test_where_it_takes_much_rows_are_tried_too() -> None:
    large = a_layer(256, op=ConvOp.WGRAD, input_size=(128, 128), kernel_size=(31, 31), padding=(15, 15))

    assert DepthwiseAlgorithm(64).workspace_bytes(large) > 2**22
    assert any("rows" in name for name in names(large, 64, compiles=True))


def test_where_it_is_tried_no_rows_are() -> None:
    large = a_layer(64, input_size=(128, 128))

    assert any("rows" in name for name in names(large, compiles=False))
    assert not any("rows" in name for name in names(large, compiles=True))
    assert any("rows" in name for name in names(large, compiles=True, exhaustive=True))
