"""Which layers are compared on a card, and in which order."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn

from bench.gpu import layer_cases
from bench.gpu.layer_cases import Layer, LayerCase, cases, cliffs, largest, layers_of
from bench.workloads import NETWORKS, SETTINGS, Workload
from mucudnn.problem import ConvOp, Layout

BACKWARD = [ConvOp.DGRAD, ConvOp.WGRAD]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
    )


SMALL = Workload("small", network, (2, 3, 8, 8))


@pytest.fixture(scope="module")
def everything() -> list[LayerCase]:
    return list(cases(layer_cases.layers(), layer_cases.settings()))


def of_setting(everything: list[LayerCase], name: str) -> list[LayerCase]:
    return [each for each in everything if each.setting.name == name]


def test_settings_come_one_after_the_other_by_value(everything: list[LayerCase]) -> None:
    assert list(dict.fromkeys(each.case.setting for each in everything)) == [
        "bfloat16-nchw", "float32-nchw", "bfloat16-nhwc", "tf32-nchw", "tf32-nhwc", "float32-nhwc",
    ]  # fmt: skip
    assert {each.name for each in layer_cases.settings()} == {each.name for each in SETTINGS}


def test_within_a_setting_cliffs_come_first_and_the_largest_network_and_cliff_last(
    everything: list[LayerCase],
) -> None:
    names = [each.case.layer.partition("/")[0] for each in of_setting(everything, "tf32-nhwc")]
    assert [name for name, _ in itertools.groupby(names)] == [
        "cliffs", "alexnet", "deepbench", "vgg16", "resnet18", "unet3d", "resnet50", "vgg16_b512",
        "resnet18_b512", "cliffs",
    ]  # fmt: skip
    assert [each.case.layer for each in of_setting(everything, "tf32-nhwc")][-2:] == [
        each.name for each in largest()
    ]


def test_deepbench_is_whole_with_all_three_ops(everything: list[LayerCase]) -> None:
    found = [
        each for each in of_setting(everything, "bfloat16-nchw") if each.case.layer.startswith("deepbench/")
    ]
    assert len({each.case.layer for each in found}) == 90
    assert len(found) == 3 * 90


def test_no_case_and_no_problem_of_a_setting_is_measured_twice_but_cliffs(
    everything: list[LayerCase],
) -> None:
    assert len({each.case for each in everything}) == len(everything)
    in_setting = of_setting(everything, "bfloat16-nchw")
    found = [each for each in in_setting if not each.case.layer.startswith("cliffs/")]
    assert len({each.problem for each in found}) == len(found)


def test_a_layer_of_a_network_keeps_its_name_where_a_cliff_is_equal() -> None:
    strict = [each for each in SETTINGS if each.name == "float32-nchw"]
    problems = {ConvOp.FPROP: next(iter(cliffs())).problems[ConvOp.FPROP]}
    some = [Layer("cliffs/a", problems), Layer("unet3d/b", problems), Layer("unet3d/c", problems)]
    assert [each.case.layer for each in cases(some, strict)] == ["cliffs/a", "unet3d/b"]


def test_problems_are_of_the_type_and_layout_of_their_setting(everything: list[LayerCase]) -> None:
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    for each in everything:
        assert dtypes[each.problem.dtype] is each.setting.dtype
        assert each.problem.layout is each.case.layout is each.setting.layout
        assert each.problem.has_one_filter_order or each.problem.filter_layout is each.setting.layout
        assert each.problem.op is each.case.op


def test_the_first_layer_of_a_network_has_no_dgrad(everything: list[LayerCase]) -> None:
    ops = [
        each.case.op for each in of_setting(everything, "float32-nchw") if each.case.layer == "vgg16/conv1_1"
    ]
    assert ops == [ConvOp.FPROP, ConvOp.WGRAD]


def test_equal_convolutions_of_a_network_stand_once_under_the_first_name() -> None:
    first, second = layers_of(SMALL)
    assert (first.name, second.name) == ("small/0", "small/1")
    assert list(first.problems) == [ConvOp.FPROP, ConvOp.WGRAD]
    assert list(second.problems) == list(ConvOp)
    assert second.problems[ConvOp.FPROP].batch == 2


def test_every_convolution_of_a_network_is_there(everything: list[LayerCase]) -> None:
    resnet = next(each for each in NETWORKS if each.name == "resnet18")
    with torch.device("meta"):
        shapes = {
            tuple(each.weight.shape) for each in resnet.build().modules() if isinstance(each, nn.Conv2d)
        }
    found = {each.problem.filter_shape for each in everything if each.case.layer.startswith("resnet18/")}
    assert found | {(64, 3, 7, 7)} == shapes


def test_the_cliff_of_many_elements_is_there_with_one_sample_less() -> None:
    large, fewer = largest()
    assert [list(large.problems), list(fewer.problems)] == [[ConvOp.FPROP]] * 2
    one, other = large.problems[ConvOp.FPROP], fewer.problems[ConvOp.FPROP]
    assert dataclasses.replace(other, batch=64) == one
    assert one.input_bytes // 4 > 2**31 > other.input_bytes // 4
    assert [each.name for each in cliffs()] == [
        f"cliffs/{name}" for name in ("dw7x7", "unet3d", "conv3d", "rn50_c1", "grp32")
    ]


def test_layers_are_chosen_by_patterns_as_in_a_shell() -> None:
    problem = next(iter(cliffs())).problems[ConvOp.FPROP]
    some = [
        Layer(name, {ConvOp.FPROP: dataclasses.replace(problem, batch=n)})
        for n, name in enumerate(("a/1", "b/1", "b/2"), 1)
    ]
    strict = [each for each in SETTINGS if each.name == "float32-nchw"]

    assert [each.case.layer for each in cases(some, strict, ["b/*"])] == ["b/1", "b/2"]
    (one,) = cases(some, strict, ["a/*"])
    assert (one.case.setting, one.case.layout) == ("float32-nchw", Layout.CONTIGUOUS)
