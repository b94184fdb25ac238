"""Convolution by a matrix unit: that it is right to its bits, in what memory, and when it is tried.

The unit is imitated, so that every machine runs these tests; one that has the unit runs them by it as well.
"""

import dataclasses
import functools
import itertools
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mucudnn.algorithms import GradientSum, SliceKernel, SumKernel, named
from mucudnn.algorithms.compiled import compiler as compilers
from mucudnn.algorithms.compiled.calling import Function
from mucudnn.algorithms.matrix import MatrixAlgorithm, unit
from mucudnn.algorithms.matrix.geometry import Geometry
from mucudnn.algorithms.matrix.kernels import MatrixSliceKernel, MatrixSumKernel, functions, functions_in
from mucudnn.algorithms.matrix.offers import likely
from mucudnn.algorithms.matrix.source import source_of
from mucudnn.backends import backend_of
from mucudnn.errors import BackendError
from mucudnn.problem import ConvOp, ConvProblem, Layout
from tests.algorithms.kernels import MIXED_LAYOUTS, GuardedBuffer, compute, parts_of, slice_kernels, sum_parts
from tests.algorithms.strict_c import assert_is_c_without_a_warning
from tests.algorithms.tried import a_layer
from tests.breadth import in_turn
from tests.operands import (
    a_convolution,
    normal,
    operands_of,
    poisoned_result,
    reference,
    relative_error,
    small_integers,
)

pytestmark = pytest.mark.usefixtures("one_thread")

HAS_UNIT = unit.refusal_of_processor() is None

SHARES = {1: 1e-6, 2: 4.7e-5, 3: 1e-6}
"""Of the sum of a result's products without their signs: what it may be off by, by the number of addends.

A bfloat16 has 8 bits, so that two are off by 2^-16 of a number at most, and 2^-16 of a product is left out:
4.6e-5 together. With three that is 2^-24 of each, and the rest is float32's own rounding, as with one.
"""

ROUNDING = {1: 2.0**-8, 2: 0.0, 3: 0.0}
"""Of a result itself: half of the last of bfloat16's 8 bits."""


IMITATION = Path(__file__).with_name("imitated_unit.c").read_text(encoding="utf-8")


def imitated_source(dtype: str) -> str:
    """With functions that are not written out wherever they are called: compiled in 1.4 s instead of 9.6."""
    return f"#define INLINE static inline\n{source_of(dtype, IMITATION)}"


@functools.cache
def imitated_functions(dtype: str) -> dict[str, Function]:
    return functions_in(imitated_source(dtype))


@dataclasses.dataclass(frozen=True)
class Imitated(MatrixAlgorithm):
    """The same on a processor that has no such unit."""

    def refusal(self, problem: ConvProblem) -> str | None:
        return None

    def slice_kernel(self, problem: ConvProblem, buffer: Tensor) -> SliceKernel:
        return MatrixSliceKernel(self.shares(problem), buffer, imitated_functions(problem.dtype))

    def sum_kernel(self, problem: ConvProblem, buffer: Tensor) -> SumKernel:
        return MatrixSumKernel(self.shares(problem), buffer, imitated_functions(problem.dtype))


KINDS = [Imitated, *([MatrixAlgorithm] if HAS_UNIT else [])]

VARIANTS = (
    {"addends": 1},
    {"addends": 1, "slices": 2, "rows": 3, "images": 4, "workers": 2},
    {"addends": 2},
    {"addends": 3},
    {"addends": 2, "rows": 2, "workers": 2},
    {"addends": 2, "images": 2},
    {"addends": 3, "slices": 2, "rows": 3, "images": 4},
)

ALGORITHMS = [kind(**variant) for kind, variant in itertools.product(KINDS, VARIANTS)]


def id_of(value: object) -> str | None:
    if isinstance(value, MatrixAlgorithm):
        return f"{type(value).__name__}-{value.name}"
    return "-".join(value) if isinstance(value, tuple) else None


def every_algorithm(*some: MatrixAlgorithm) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("algorithm", some or ALGORITHMS, ids=id_of)


def a_case(**changes: object) -> ConvProblem:
    """In as many dimensions as its kernel has, of more channels than a vector has."""
    taps = changes.get("kernel_size", (3, 3))
    assert isinstance(taps, tuple)
    ones = (1,) * len(taps)
    shape = {"in_channels": 20, "out_channels": 36, "stride": ones, "dilation": ones, "kernel_size": taps}
    return a_convolution(**{**shape, **changes})


CASES = {
    "3x3": a_case(),
    "whole vectors": a_case(in_channels=32, out_channels=64),
    "three channels in, 7x7, stride 2": a_case(
        in_channels=3, kernel_size=(7, 7), stride=(2, 2), padding=(3, 3), input_size=(18, 15)
    ),
    "one channel out": a_case(out_channels=1),
    "1x1": a_case(kernel_size=(1, 1), padding=(0, 0)),
    "1x1, stride 2": a_case(kernel_size=(1, 1), stride=(2, 2), padding=(0, 0)),
    "stride longer than the filter": a_case(kernel_size=(2, 2), stride=(3, 3), padding=(0, 0)),
    "stride 2": a_case(stride=(2, 2)),
    "stride 2, few columns": a_case(stride=(2, 2), input_size=(3, 3)),
    "stride 2, 7x7, few columns": a_case(
        kernel_size=(7, 7), stride=(2, 2), padding=(3, 3), input_size=(9, 6)
    ),
    "stride 2x1, few columns": a_case(stride=(2, 1), input_size=(7, 2)),
    "stride 2x3, rest": a_case(stride=(2, 3), input_size=(10, 10)),
    "dilation": a_case(dilation=(2, 3), padding=(2, 3)),
    "dilation and stride": a_case(dilation=(2, 3), stride=(3, 2), padding=(3, 1)),
    "dilation divides the stride": a_case(dilation=(2, 2), stride=(4, 4), padding=(2, 2)),
    "padding beyond the filter": a_case(padding=(4, 3)),
    "nothing but padding": a_case(kernel_size=(1, 1), stride=(9, 11), padding=(3, 3), input_size=(2, 2)),
    "1-D": a_case(kernel_size=(5,), padding=(2,), input_size=(50,)),
    "1-D, stride 2": a_case(kernel_size=(5,), stride=(2,), padding=(2,), input_size=(50,)),
    "3-D": a_case(kernel_size=(3, 3, 3), padding=(1, 1, 1), input_size=(5, 6, 7)),
    "3-D, stride 2": a_case(kernel_size=(3, 2, 3), stride=(2, 1, 2), padding=(1, 0, 1), input_size=(5, 6, 7)),
}


def of_its_type(algorithm: MatrixAlgorithm, problem: ConvProblem) -> ConvProblem:
    """The problem in the type that an algorithm computes."""
    return dataclasses.replace(problem, dtype=algorithm.dtype)


def is_near(
    result: Tensor,
    algorithm: MatrixAlgorithm,
    problem: ConvProblem,
    first: Tensor,
    second: Tensor,
    bias: Tensor | None = None,
) -> bool:
    """Whether every number of a result is as near to float64's as its bits allow."""
    exact = reference(problem, first, second, bias)
    magnitudes = reference(problem, first.abs(), second.abs(), None if bias is None else bias.abs())
    allowed = SHARES[algorithm.addends] * magnitudes + ROUNDING[algorithm.addends] * exact.abs()
    return bool(((result - exact).abs() <= allowed).all())


@in_turn("layout", Layout, algorithm=ALGORITHMS, op=ConvOp, key=CASES, ids=id_of)
def test_each_number_is_as_near_as_its_bits_allow(
    algorithm: MatrixAlgorithm, layout: Layout, op: ConvOp, key: str
) -> None:
    assert_near(algorithm, CASES[key], op, layout, layout)


@in_turn(
    "layouts", MIXED_LAYOUTS, algorithm=[kind(addends=2) for kind in KINDS], op=ConvOp, key=CASES, ids=id_of
)
def test_so_it_is_where_filters_lie_otherwise_than_images(
    algorithm: MatrixAlgorithm, layouts: tuple[Layout, Layout], op: ConvOp, key: str
) -> None:
    assert_near(algorithm, CASES[key], op, *layouts)


def assert_near(
    algorithm: MatrixAlgorithm, case: ConvProblem, op: ConvOp, layout: Layout, filter_layout: Layout
) -> None:
    problem = dataclasses.replace(
        case, op=op, layout=layout, filter_layout=filter_layout, bias=op is ConvOp.FPROP
    )
    problem = of_its_type(algorithm, problem)
    first, second, bias = operands_of(problem)
    buffer = GuardedBuffer(algorithm.workspace_bytes(problem))

    result, is_good = compute(algorithm, problem, first, second, bias, buffer=buffer.inside)

    assert is_good
    assert buffer.is_intact
    assert is_near(result, algorithm, problem, first, second, bias)


@pytest.mark.parametrize("seed", range(40))
@every_algorithm(*(kind(addends=2) for kind in KINDS))
def test_whatever_the_shape(algorithm: MatrixAlgorithm, seed: int) -> None:
    draw = random.Random(seed)
    drawn = _drawn(draw)
    variant = dataclasses.replace(
        algorithm,
        addends=draw.choice([1, 2, 3]),
        slices=draw.choice([0, 1, 2]),
        rows=draw.choice([0, 1, 2, 5]),
        images=draw.choice([1, 2, 4]),
        workers=draw.choice([1, 2, 3]),
    )
    problem = of_its_type(variant, drawn)
    first, second, bias = operands_of(problem)
    buffer = GuardedBuffer(variant.workspace_bytes(problem))

    result, is_good = compute(variant, problem, first, second, bias, buffer=buffer.inside)

    assert is_good
    assert buffer.is_intact
    assert is_near(result, variant, problem, first, second, bias)


def _drawn(draw: random.Random) -> ConvProblem:
    """A problem whose filter fits its image, padded."""
    axes = draw.choice([1, 2, 2, 3])
    taps = tuple(draw.choice([1, 2, 3, 5]) for _ in range(axes))
    dilation = tuple(draw.choice([1, 1, 2, 3]) for _ in range(axes))
    padding = tuple(draw.randint(0, 3) for _ in range(axes))
    least = (d * (k - 1) + 1 - 2 * p for k, d, p in zip(taps, dilation, padding, strict=True))
    layouts = list(Layout) if axes > 1 else [Layout.CONTIGUOUS]
    return a_convolution(
        op=draw.choice(list(ConvOp)),
        batch=draw.choice([1, 2, 5]),
        in_channels=draw.choice([1, 3, 16, 33, 64]),
        out_channels=draw.choice([1, 4, 31, 40, 70]),
        input_size=tuple(max(size, 1) + draw.randint(0, 9) for size in least),
        kernel_size=taps,
        stride=tuple(draw.choice([1, 1, 2, 3]) for _ in range(axes)),
        padding=padding,
        dilation=dilation,
        layout=draw.choice(layouts),
        filter_layout=draw.choice(layouts),
    )


@pytest.mark.parametrize("op", ConvOp)
@every_algorithm()
def test_small_integers_are_computed_exactly(algorithm: MatrixAlgorithm, op: ConvOp) -> None:
    problem = of_its_type(algorithm, a_case(op=op, batch=5, stride=(2, 1)))
    first, second, _ = operands_of(problem, small_integers)

    result, _ = compute(algorithm, problem, first, second)

    exact = reference(problem, first, second)
    assert torch.equal(result.double(), exact.to(result.dtype).double())


@pytest.mark.parametrize("op", ConvOp)
@every_algorithm(*(kind(addends=addends, rows=2) for kind in KINDS for addends in (1, 3)))
def test_operands_and_results_may_lie_anyhow(algorithm: MatrixAlgorithm, op: ConvOp) -> None:
    problem = of_its_type(algorithm, a_case(op=op, bias=op is ConvOp.FPROP))
    first, second, bias = operands_of(problem)
    wide = (*first.shape[:-1], 2 * first.shape[-1])
    apart = torch.full(wide, float("nan"), dtype=first.dtype)[..., ::2].copy_(first)
    turned = second.transpose(0, -1).contiguous().transpose(0, -1)
    gapped = None if bias is None else bias.repeat_interleave(3)[::3]
    around = torch.full_like(poisoned_result(problem).repeat_interleave(2, dim=-1), 7.0)

    result, is_good = compute(algorithm, problem, apart, turned, gapped, out=around[..., ::2])

    assert is_good
    assert (around[..., 1::2] == 7).all()
    assert is_near(result, algorithm, problem, first, second, bias)


@pytest.mark.parametrize("key", ["3x3", "stride 2", "1-D", "3-D", "whole vectors"])
@pytest.mark.parametrize("op", [ConvOp.FPROP, ConvOp.DGRAD])
@every_algorithm(*(kind(addends=addends) for kind in KINDS for addends in (1, 2)))
def test_nothing_is_written_beside_a_result_that_is_part_of_a_larger_one(
    algorithm: MatrixAlgorithm, op: ConvOp, key: str
) -> None:
    problem = of_its_type(algorithm, dataclasses.replace(CASES[key], op=op))
    first, second, _ = operands_of(problem)
    *shape, width = poisoned_result(problem).shape
    for margin in (1, 2, 3):
        around = torch.full((*shape, width + margin), 7.0, dtype=first.dtype)

        result, is_good = compute(algorithm, problem, first, second, out=around[..., :width])

        assert is_good
        assert (around[..., width:] == 7).all()
        assert is_near(result, algorithm, problem, first, second)


@pytest.mark.parametrize("op", [ConvOp.FPROP, ConvOp.WGRAD])
@every_algorithm(*(kind(addends=addends) for kind in KINDS for addends in (1, 2)))
def test_frames_may_overlap(algorithm: MatrixAlgorithm, op: ConvOp) -> None:
    problem = of_its_type(algorithm, a_case(op=op, in_channels=64))
    signal = operands_of(problem)[0].flatten()
    steps = (0, 1, 32 * problem.input_size[1], 32)
    image = signal.as_strided(problem.input_shape, steps)
    second = operands_of(problem)[1]

    result, is_good = compute(algorithm, problem, image, second)

    assert is_good
    assert is_near(result, algorithm, problem, image, second)


@every_algorithm(*(kind(addends=addends) for kind in KINDS for addends in (1, 2)))
def test_rows_may_overlap(algorithm: MatrixAlgorithm) -> None:
    problem = a_case(op=ConvOp.DGRAD, kernel_size=(1, 1), input_size=(6, 7), in_channels=32, out_channels=32)
    problem = of_its_type(algorithm, problem)
    width = problem.output_size[1]
    steps = (32 * 100, 100, width - 2, 1)
    gradient = normal((2 * 32 * 100,), torch.Generator().manual_seed(0)).to(getattr(torch, problem.dtype))
    overlapping = gradient.as_strided(problem.output_shape, steps)
    weight = operands_of(problem)[1]

    result, is_good = compute(algorithm, problem, overlapping, weight)

    assert is_good
    assert is_near(result, algorithm, problem, overlapping, weight)


@every_algorithm(*(kind(addends=addends) for kind in KINDS for addends in (1, 2)))
def test_one_number_may_stand_for_all_samples(algorithm: MatrixAlgorithm) -> None:
    problem = of_its_type(algorithm, a_case(op=ConvOp.DGRAD))
    _, weight, _ = operands_of(problem)
    gradient = torch.ones((), dtype=weight.dtype).expand(problem.output_shape)

    result, _ = compute(algorithm, problem, gradient, weight)

    assert is_near(result, algorithm, problem, gradient, weight)


LARGE_FILTER = a_case(in_channels=64, out_channels=1024, batch=14, input_size=(4, 5))
"""Larger than threads read whole, in 16 bits too: each takes some channels."""

DIVIDED = {"3x3": a_case(batch=14), "large filter": LARGE_FILTER}

OF_TWO = tuple(kind(addends=addends, images=2, workers=2) for kind in KINDS for addends in (1, 2))

NEAR = {1: 3e-3, 2: 2e-5}
"""In the 2-norm of a whole result, by the number of addends."""


@pytest.mark.parametrize("problem", DIVIDED.values(), ids=DIVIDED)
@pytest.mark.parametrize("op", [ConvOp.FPROP, ConvOp.DGRAD])
@every_algorithm(*OF_TWO)
def test_parts_of_all_sizes_use_the_filter_that_one_packed(
    algorithm: MatrixAlgorithm, op: ConvOp, problem: ConvProblem
) -> None:
    problem = of_its_type(algorithm, dataclasses.replace(problem, op=op))
    image, weight, _ = operands_of(problem)
    parts, out = parts_of(algorithm, problem), poisoned_result(problem)
    kernels = slice_kernels(algorithm, problem, parts)

    kernels[parts[0][0]].prepare(weight)
    answers = [kernels[size].run(image[here], weight, out[here], None) for size, here in parts]

    assert all(answers)
    assert relative_error(out, reference(problem, image, weight)) <= NEAR[algorithm.addends]


@pytest.mark.parametrize("problem", DIVIDED.values(), ids=DIVIDED)
@every_algorithm(*OF_TWO)
def test_parts_of_a_weight_gradient_are_added_to_what_is_there_in_float32(
    algorithm: MatrixAlgorithm, problem: ConvProblem
) -> None:
    problem = of_its_type(algorithm, dataclasses.replace(problem, op=ConvOp.WGRAD))
    image, gradient, _ = operands_of(problem)
    total = normal(problem.filter_shape, torch.Generator().manual_seed(1)).float()
    expected = reference(problem, image, gradient) + total

    is_good = sum_parts(algorithm, problem, image, gradient, GradientSum(total, accumulate=True))

    assert is_good
    assert relative_error(total, expected) <= 2e-5


@pytest.mark.parametrize("layout", Layout)
@every_algorithm(*(kind(addends=1, workers=2) for kind in KINDS))
def test_a_whole_gradient_in_16_bits_is_rounded_once(algorithm: MatrixAlgorithm, layout: Layout) -> None:
    problem = dataclasses.replace(DIVIDED["3x3"], op=ConvOp.WGRAD, filter_layout=layout)
    problem = of_its_type(algorithm, problem)
    image, gradient, _ = operands_of(problem)
    total = poisoned_result(problem).fill_(1.0)

    is_good = sum_parts(algorithm, problem, image, gradient, GradientSum(total, accumulate=True))

    assert is_good
    exact = reference(problem, image, gradient) + 1
    magnitudes = reference(problem, image.abs(), gradient.abs()) + 1
    allowed = SHARES[1] * magnitudes + ROUNDING[1] * exact.abs()
    assert ((total - exact).abs() <= allowed).all()


def test_threads_share_a_large_filter_by_its_channels_whatever_the_batch() -> None:
    for addends in (1, 2):
        shares = [
            MatrixAlgorithm(addends, workers=2).shares(problem.with_batch(size))
            for problem in DIVIDED.values()
            for size in (1, 14)
        ]
        assert [each.is_by_channels for each in shares] == [False, False, True, True]
        assert [shares[-1].channels_of(worker) for worker in (0, 1)] == [(0, 512), (512, 1024)]


@pytest.mark.parametrize("op", ConvOp)
@every_algorithm(*(kind(addends=addends, workers=3) for kind in KINDS for addends in (1, 2)))
def test_channels_need_not_be_shared_evenly(algorithm: MatrixAlgorithm, op: ConvOp) -> None:
    problem = dataclasses.replace(LARGE_FILTER, op=op, batch=2, in_channels=640, out_channels=640)
    problem = dataclasses.replace(problem, kernel_size=(1, 2), padding=(0, 0))
    problem = of_its_type(algorithm, problem)
    first, second, _ = operands_of(problem)
    assert algorithm.shares(problem).is_by_channels

    result, is_good = compute(algorithm, problem, first, second)

    assert is_good
    assert relative_error(result, reference(problem, first, second)) <= NEAR[algorithm.addends]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("place", ["first", "second"])
@every_algorithm(*(kind(addends=addends) for kind in KINDS for addends in (1, 2)))
def test_numbers_that_may_overflow_are_reported(
    algorithm: MatrixAlgorithm, place: str, op: ConvOp, value: float
) -> None:
    problem = of_its_type(algorithm, a_case(op=op))
    first, second, _ = operands_of(problem)
    spoilt = {"first": first, "second": second}[place]
    spoilt[(-1,) * spoilt.dim()] = value

    _, is_good = compute(algorithm, problem, first, second)

    assert not is_good


LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize("value", [LARGEST, 1e-33])
@pytest.mark.parametrize("op", [ConvOp.FPROP, ConvOp.DGRAD])
@pytest.mark.parametrize("place", ["first", "second"])
@every_algorithm(*(kind(addends=addends) for kind in KINDS for addends in (2, 3)))
def test_numbers_that_have_no_addends_are_reported(
    algorithm: MatrixAlgorithm, place: str, op: ConvOp, value: float
) -> None:
    problem = a_case(op=op)
    first, second, _ = operands_of(problem)
    spoilt, other = (first, second) if place == "first" else (second, first)
    spoilt.zero_()[(-1,) * spoilt.dim()] = value
    other.mul_(1e-3)

    _, is_good = compute(algorithm, problem, first, second)

    assert not is_good


@pytest.mark.parametrize("op", ConvOp)
@every_algorithm(*(kind(addends=1) for kind in KINDS))
def test_small_numbers_of_16_bits_are_computed_as_they_are(algorithm: MatrixAlgorithm, op: ConvOp) -> None:
    problem = of_its_type(algorithm, a_case(op=op))
    first, second, _ = operands_of(problem)
    small = first * 2.0**-100

    result, is_good = compute(algorithm, problem, small, second)

    assert is_good
    assert is_near(result, algorithm, problem, small, second)


@pytest.mark.parametrize("factor", [1e20, 1e-18])
@pytest.mark.parametrize("op", [ConvOp.FPROP, ConvOp.DGRAD])
@every_algorithm(*(kind(addends=3) for kind in KINDS))
def test_products_that_may_overflow_or_vanish_are_reported(
    algorithm: MatrixAlgorithm, op: ConvOp, factor: float
) -> None:
    problem = a_case(op=op)
    first, second, _ = operands_of(problem)

    _, is_good = compute(algorithm, problem, first * factor, second * factor)

    assert not is_good


@pytest.mark.parametrize("op", ConvOp)
@every_algorithm(*(kind(addends=addends) for kind in KINDS for addends in (1, 2)))
def test_zeros_are_numbers_like_any_other(algorithm: MatrixAlgorithm, op: ConvOp) -> None:
    problem = of_its_type(algorithm, a_case(op=op))
    first, second, _ = operands_of(problem)

    result, is_good = compute(algorithm, problem, torch.zeros_like(first), second)

    assert is_good
    assert torch.equal(result, torch.zeros_like(result))


@every_algorithm(KINDS[-1](addends=2))  # the unit itself, where there is one
def test_pytorch_finds_the_tiles_as_it_has_set_them_up(algorithm: MatrixAlgorithm) -> None:
    image = torch.randn(2, 32, 9, 9, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.randn(48, 32, 3, 3, generator=torch.Generator().manual_seed(1)).bfloat16()
    problem = a_case()
    first, second, _ = operands_of(problem)
    before = torch.conv2d(image, weight)

    compute(algorithm, problem, first, second)

    assert torch.equal(torch.conv2d(image, weight), before)


@every_algorithm(*(kind(addends=addends) for kind in KINDS for addends in (1, 2)))
def test_a_strange_bias_makes_strange_numbers_in_its_channel_only(algorithm: MatrixAlgorithm) -> None:
    problem = of_its_type(algorithm, a_case(bias=True))
    first, second, bias = operands_of(problem)
    assert bias is not None
    bias[3] = float("nan")

    result, is_good = compute(algorithm, problem, first, second, bias)

    assert is_good
    assert result[:, 3].isnan().all()
    assert result[:, [0, 1, 2, *range(4, 36)]].isfinite().all()


@every_algorithm(*(kind(addends=2) for kind in KINDS))
def test_a_tensor_that_c_cannot_read_is_refused(algorithm: MatrixAlgorithm) -> None:
    problem = a_case()
    image, weight, _ = operands_of(problem)
    kernel = algorithm.slice_kernel(problem, GuardedBuffer(algorithm.workspace_bytes(problem)).inside)
    with pytest.raises(BackendError, match="of shape"):
        kernel.prepare(weight[:, :-1])
    with pytest.raises(BackendError, match="float64"):
        kernel.run(image.double(), weight, poisoned_result(problem), None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_source_is_c_without_a_warning(tmp_path: Path, dtype: str) -> None:
    found = compilers.needed_compiler()
    tiles = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"]
    sources = [(imitated_source(dtype), ["-O1"])]
    asked = [*found.command[:1], *tiles, "-E", "-x", "c", "-"]
    if subprocess.run(asked, input="", text=True, capture_output=True, check=False).returncode == 0:
        native = source_of(dtype), ["-O1", *tiles]
        sources = [(imitated_source(dtype), ["-O0"]), native]  # mostly the same
    for source, flags in sources:
        assert_is_c_without_a_warning(source, tmp_path, *flags)


def test_a_name_tells_what_runs() -> None:
    some = MatrixAlgorithm(3, slices=2, rows=8, images=4, workers=2)
    assert some.name == "bf16x3_slices2_rows8_images4_mt2"
    assert [MatrixAlgorithm(addends).name for addends in (1, 2)] == ["bf16x1", "bf16x2"]
    assert all(named(each.name) == each for each in (some, MatrixAlgorithm(1), MatrixAlgorithm(2)))
    assert named("bf16x4") is None
    assert named("bf16x2_images1") is None


# When it is tried


@pytest.fixture
def with_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with such a unit, as far as it is asked."""
    monkeypatch.setattr("mucudnn.algorithms.matrix.algorithm.refusal_of_processor", lambda: None)


@pytest.mark.usefixtures("with_unit")
@pytest.mark.parametrize("op", ConvOp)
def test_units_fit_a_cache_and_there_is_one_for_every_thread(op: ConvOp) -> None:
    large = a_layer(op=op, batch=1, input_size=(224, 224))
    tried = list(likely(large, 2, exhaustive=False, may_round=True))
    assert {each.addends for each in tried} == {2, 3}
    for each in tried:
        shares = each.shares(large)
        assert shares.x_bytes <= 3 * 2**19
        assert shares.geometry.units >= 2
    small = a_layer(op=op, batch=8, input_size=(8, 8))
    assert {each.addends for each in likely(small, 1, exhaustive=False, may_round=True)} == {2, 3}
    assert all(each.images > 1 for each in likely(small, 1, exhaustive=False, may_round=True))


@pytest.mark.usefixtures("with_unit")
def test_units_are_not_cut_for_nothing() -> None:
    problem = a_layer(op=ConvOp.WGRAD, in_channels=512, out_channels=2048, kernel_size=(1, 1), padding=(0, 0))
    by_rows = {rows: MatrixAlgorithm(3, rows=rows).shares(problem).x_bytes for rows in (1, 2)}
    assert by_rows[1] == by_rows[2]
    assert {each.rows for each in likely(problem, 1, exhaustive=False, may_round=False)} == {2}


@pytest.mark.usefixtures("with_unit")
def test_what_would_be_padding_for_the_most_part_is_not_tried() -> None:
    assert not list(likely(a_layer(in_channels=1, out_channels=1), 1, exhaustive=True, may_round=True))


@pytest.mark.usefixtures("with_unit")
def test_more_sizes_are_tried_if_all_is_to_be() -> None:
    few, all_ = (set(likely(a_layer(), 1, exhaustive=each, may_round=True)) for each in (False, True))
    assert few < all_


@pytest.mark.usefixtures("with_unit")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float64"}, "for float32"),
        ({"dtype": "bfloat16"}, "for float32"),
        ({"dtype": "float16"}, "for float32"),
        ({"groups": 2}, "one group"),
    ],
)
def test_other_types_and_groups_are_refused(changes: dict[str, object], reason: str) -> None:
    refused = MatrixAlgorithm(2).refusal(a_layer(**changes))
    assert refused is not None
    assert reason in refused


@pytest.fixture
def convolutions() -> Iterator[Any]:
    """Where PyTorch keeps how convolutions may round float32."""
    flag: Any = torch.backends.mkldnn.conv  # type: ignore[attr-defined]  # torch's stub forgets it
    before = flag.fp32_precision
    yield flag
    flag.fp32_precision = before


@pytest.mark.usefixtures("with_unit")
def test_sixteen_bits_must_do_before_they_are_tried(convolutions: Any) -> None:
    backend, problem = backend_of("cpu:"), a_layer()
    found = {}
    for precision in ("none", "ieee", "tf32", "bf16"):
        convolutions.fp32_precision = precision
        ids = backend.algorithms(problem)
        found[precision] = {addends for addends in (2, 3) if any(f"bf16x{addends}" in each for each in ids)}
        assert backend.error_bound(problem, "cpu:bf16x2") < 3e-5
    assert found == {"none": {3}, "ieee": {3}, "tf32": {2, 3}, "bf16": {2, 3}}


@pytest.mark.usefixtures("with_unit")
def test_what_has_16_bits_is_its_only_addend(convolutions: Any) -> None:
    convolutions.fp32_precision = "none"
    problem = a_layer(dtype="bfloat16")
    ids = backend_of("cpu:").algorithms(problem)
    assert {each[: len("cpu:bf16x1")] for each in ids if "bf16x" in each} == {"cpu:bf16x1"}
    assert MatrixAlgorithm(1).refusal(a_layer()) == "it is for bfloat16"
    assert MatrixAlgorithm(1).refusal(problem) is None


def test_without_a_compiler_or_a_unit_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit, "compiler", lambda: None)
    assert MatrixAlgorithm(2).refusal(a_layer()) == "there is no C compiler"
    found = compilers.needed_compiler()._replace(has_tiles=False)
    monkeypatch.setattr(unit, "compiler", lambda: found)
    assert "no tiles of bfloat16" in str(MatrixAlgorithm(2).refusal(a_layer()))
    monkeypatch.setattr(unit, "compiler", lambda: found._replace(has_tiles=True))
    monkeypatch.setattr(unit, "_is_permitted", lambda: False)
    assert "does not lend" in str(MatrixAlgorithm(2).refusal(a_layer()))
    functions.cache_clear()  # where there is a unit other tests have had them
    with pytest.raises(BackendError, match="does not lend"):
        backend_of("cpu:").get_ready(a_layer(input_size=(6, 6)), "cpu:bf16x2")


def test_bounds_are_those_of_the_bits_and_of_long_sums() -> None:
    backend, problem = backend_of("cpu:"), a_layer()
    bounds = [backend.error_bound(problem, name) for name in ("cpu:im2col", "cpu:bf16x2_mt2", "cpu:bf16x3")]
    assert bounds == pytest.approx([1e-6, 2e-5, 2e-6])
    halves = a_layer(dtype="bfloat16")
    assert backend.error_bound(halves, "cpu:bf16x1") == pytest.approx(4e-3)


# Where things lie


def test_neighbours_of_a_row_are_one_group() -> None:
    geometry = Geometry(a_layer(), 0, 0)
    assert geometry.pitch == 16 + 2
    assert [(group.shift, group.tap) for group in geometry.sets[0].groups] == [
        (row * 18, (0, row, 0)) for row in range(3)
    ]
    assert geometry.sets[0].taps == 3


def test_every_tap_is_a_group_where_they_lie_apart() -> None:
    (only,) = Geometry(a_layer(dilation=(1, 2), padding=(1, 2)), 0, 0).sets
    assert (len(only.groups), only.taps) == (9, 1)


def test_the_gradient_of_a_strided_image_has_a_set_for_each_phase() -> None:
    sets = Geometry(a_layer(op=ConvOp.DGRAD, stride=(2, 2)), 0, 0).sets
    assert [len(each.groups) * each.taps for each in sets] == [4, 2, 2, 1]
    assert sum(each.axes[1].length * each.axes[2].length for each in sets) == 16 * 16


def test_direct_multiplications_are_those_that_are_counted_without_edges() -> None:
    problem = a_layer(padding=(0, 0))
    assert Geometry(problem, 0, 0).direct * problem.batch * 2 == problem.flops
