"""The layers that `make bench-cpu` measures, and the bounds of the algorithms that run."""

from fractions import Fraction

import pytest

from bench.cpu import bounds
from bench.cpu.layers import ALL, CHOSEN, Layer
from bench.cpu.targets import dense
from bench.deepbench_list import LAYERS as DEEPBENCH
from mucudnn.problem import ConvOp, ConvProblem, Layout

GIB = 2**30
CORE = [layer for layer in ALL if layer.is_core]


def forward(layer: Layer) -> ConvProblem:
    return layer.problem(ConvOp.FPROP, Layout.CONTIGUOUS)


def a_problem(op: ConvOp = ConvOp.FPROP, **changes: object) -> ConvProblem:
    fields = {
        "batch": 8,
        "in_channels": 64,
        "out_channels": 64,
        "input_size": (56, 56),
        "kernel_size": (3, 3),
        "stride": (1, 1),
        "padding": (1, 1),
        "dilation": (1, 1),
    }
    return ConvProblem(op=op, **{**fields, **changes})


def a_volume(**changes: object) -> ConvProblem:
    threes, ones = (3, 3, 3), (1, 1, 1)
    shape = {"input_size": (16, 32, 32), "kernel_size": threes, "padding": ones}
    return a_problem(**{**shape, "stride": ones, "dilation": ones, **changes})


def test_there_are_at_least_40_core_layers_with_names_of_their_own() -> None:
    assert len(CORE) >= 40
    assert len({layer.name for layer in ALL}) == len(ALL)
    assert all(layer.source for layer in ALL)


def test_no_two_layers_compute_the_same() -> None:
    assert len({forward(layer) for layer in ALL}) == len(ALL)


def test_the_core_has_layers_of_every_network_asked_for() -> None:
    networks = {layer.name.partition("/")[0] for layer in CORE}
    assert networks >= {
        "vgg16",
        "resnet18",
        "cifar-resnet18",
        "resnet50",
        "alexnet",
        "googlenet",
        "unet",
        "unet3d",
        "convnext",
        "deepbench",
    }


@pytest.mark.parametrize(
    ("n", "c", "k", "side"),
    [
        (8, 64, 64, 112),
        (8, 128, 128, 56),
        (8, 256, 256, 28),
        (4, 512, 512, 28),
        (16, 512, 512, 14),
        (16, 64, 64, 56),
        (16, 128, 128, 28),
        (32, 256, 256, 14),
        (32, 512, 512, 7),
        (2, 64, 64, 256),
        (64, 64, 64, 32),
        (64, 128, 128, 16),
        (64, 256, 256, 8),
        (64, 512, 512, 4),
    ],
)
def test_the_3x3_layers_that_the_design_measured_are_there_at_its_batches(
    n: int, c: int, k: int, side: int
) -> None:
    wanted = a_problem(batch=n, in_channels=c, out_channels=k, input_size=(side, side))
    assert wanted in {forward(layer) for layer in CORE}


def test_the_core_has_every_kind_of_layer() -> None:
    problems = [forward(layer) for layer in CORE]
    sides = {max(problem.kernel_size) for problem in problems}
    assert {1, 3, 5, 7, 9, 11, 13, 15, 31} <= sides
    assert {len(problem.input_size) for problem in problems} == {1, 2, 3}
    assert any(1 < problem.groups < problem.in_channels for problem in problems)
    assert any(problem.groups == problem.in_channels == 96 for problem in problems)
    assert any(problem.stride == (2, 2) for problem in problems)
    assert all(any(dense(taps)(problem) for problem in problems) for taps in (3, 5, 11, 15))


def test_operands_and_result_of_every_layer_fit_4_gib() -> None:
    sizes = [forward(layer) for layer in ALL]
    assert max(each.input_bytes + each.filter_bytes + each.output_bytes for each in sizes) <= 4 * GIB


def test_core_layers_take_from_a_millisecond_to_a_quarter_of_a_second_at_100_gflops() -> None:
    seconds = {layer.name: forward(layer).flops / 1e11 for layer in CORE}
    assert min(seconds.values()) > 1e-3
    assert max(seconds.values()) < 0.25


def test_deepbench_is_whole_but_for_what_it_names_twice_and_what_stands_under_another_name() -> None:
    known = {forward(layer) for layer in ALL}
    assert len(DEEPBENCH) == 90
    for _, batch, c, size, k, taps, padding, stride in DEEPBENCH:
        problem = ConvProblem(ConvOp.FPROP, batch, c, k, size, taps, stride, padding, (1, 1))
        assert problem in known
    assert {layer.name.removeprefix("deepbench/") for layer in CORE} >= CHOSEN


def test_the_first_layer_of_a_network_has_no_dgrad() -> None:
    first = next(layer for layer in ALL if layer.name == "vgg16/conv1_1")
    assert first.ops == (ConvOp.FPROP, ConvOp.WGRAD)
    second = next(layer for layer in ALL if layer.name == "vgg16/conv1_2")
    assert second.ops == (ConvOp.FPROP, ConvOp.DGRAD, ConvOp.WGRAD)


def test_one_dimension_has_no_channels_last() -> None:
    assert next(layer for layer in ALL if layer.name == "waveform/conv").layouts == (Layout.CONTIGUOUS,)


@pytest.mark.parametrize(
    ("problem", "algorithm", "saving"),
    [
        (a_problem(), "cpu:winograd4", Fraction(4)),
        (a_problem(), "cpu:winograd2", Fraction(9, 4)),
        (a_problem(input_size=(14, 14)), "cpu:winograd4", Fraction(9 * 14 * 14, 4 * 4 * 36)),
        (a_problem(), "cpu:winograd4_rows4_k128_mt2", Fraction(4)),
        (a_problem(), "cpu:winograd4_slices2", Fraction(4)),
        (a_problem(), "cpu:winograd4_c64", Fraction(4)),
        (a_problem(), "cpu:cc_winograd4_rows8_mt2", Fraction(4)),
        (a_problem(), "cpu:cc_winograd4_fma_rows8_mt2", Fraction(4)),
        (a_problem(kernel_size=(5, 5), padding=(2, 2)), "cpu:winograd4", Fraction(25 * 16, 64)),
        (a_problem(kernel_size=(1, 3), padding=(0, 1)), "cpu:winograd4", Fraction(2)),
        (a_problem(stride=(2, 2)), "cpu:cc_winograd2_rows8", Fraction(9 * 4, 25)),
        (a_problem(ConvOp.DGRAD, stride=(2, 2)), "cpu:cc_winograd4", Fraction(9 * 16, 81)),
        (a_problem(ConvOp.DGRAD, stride=(2, 2), input_size=(7, 7)), "cpu:cc_winograd2", Fraction(9 * 4, 25)),
        (a_problem(stride=(2, 1)), "cpu:cc_winograd2_k32", Fraction(3 * 2 * 3 * 2, 5 * 4)),
        (a_problem(kernel_size=(3, 1), padding=(1, 0), stride=(2, 2)), "cpu:cc_winograd2", Fraction(6, 5)),
        (a_volume(), "cpu:winograd4", Fraction(4)),
        (a_volume(), "cpu:cc_winograd4_rows4_mt2", Fraction(8)),
        (a_volume(), "cpu:cc_winograd2_k32", Fraction(27, 8)),
        (a_volume(kernel_size=(3, 1, 1), padding=(1, 0, 0)), "cpu:cc_winograd4", Fraction(2)),
        (
            a_problem(kernel_size=(11, 11), padding=(5, 5)),
            "cpu:fft32",
            Fraction((56 * 11) ** 2, 3 * 32 * 17 * 3 * 3),
        ),
        (a_problem(), "cpu:im2col", Fraction(1)),
        (a_problem(), "cpu:gemm", Fraction(1)),
        (a_problem(), "cpu:aten", Fraction(1)),
    ],
)
def test_the_saving_is_the_quotient_of_multiplications(
    problem: ConvProblem, algorithm: str, saving: Fraction
) -> None:
    assert bounds.algorithm_saving(problem, algorithm) == saving


def test_tiles_of_dgrad_cover_the_pixels_of_dx() -> None:
    sizes = {"input_size": (12, 12), "padding": (0, 0)}
    forward_saving = bounds.algorithm_saving(a_problem(**sizes), "cpu:winograd4")
    backward_saving = bounds.algorithm_saving(a_problem(ConvOp.DGRAD, **sizes), "cpu:winograd4")
    assert forward_saving == Fraction(9 * 100, 9 * 36)  # 10 x 10 outputs, 3 x 3 tiles
    assert backward_saving == Fraction(9 * 100, 9 * 36)  # as many products, and 12 x 12 pixels in 3 x 3 tiles


@pytest.mark.parametrize(
    "algorithm",
    [
        "cpu:strassen",
        "cpu:winograd",
        "cpu:im2col7",
        "cpu:winograd4_nested3",
        "cpu:onednn_nhwc",
        "cpu:onednn_nchw",
        "cudnn:eng0",
    ],
)
def test_an_unknown_algorithm_and_one_that_onednn_chooses_have_no_bound(algorithm: str) -> None:
    assert bounds.algorithm_saving(a_problem(), algorithm) is None
    assert bounds.saving(a_problem(), f"{algorithm}@8*1") is None


def test_a_filter_longer_than_the_tile_has_no_bound() -> None:
    long = a_problem(kernel_size=(31, 31), padding=(15, 15))
    assert bounds.algorithm_saving(long, "cpu:fft16") is None


def test_a_division_saves_as_much_as_its_parts_together() -> None:
    assert bounds.saving(a_problem(), "cpu:winograd4@2*4") == 4
    # Half of the samples at a quarter of the multiplications: 1/8 + 1/2 of them are left.
    assert bounds.saving(a_problem(), "cpu:winograd4@4*1+cpu:aten@2*2") == Fraction(8, 5)
    assert bounds.saving(a_problem(), "no key") is None
