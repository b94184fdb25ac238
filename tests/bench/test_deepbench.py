"""DeepBench's layers as models that the command line finds."""

import subprocess
import sys

import pytest
import torch

from bench import deepbench
from bench.deepbench_list import LAYERS
from mucudnn.examining.extraction import extract
from mucudnn.problem import ConvOp, Layout


def test_a_layer_is_a_model_with_all_three_ops_and_the_size_that_the_list_gives() -> None:
    found = extract(deepbench.speaker4_b16(), torch.zeros(16)).problems

    assert {site.op for site in found} == {*ConvOp}
    assert {site.path for site in found} == {"layers.speaker4_b16"}
    row = next(row for row in LAYERS if row[0] == "speaker4_b16")
    for problem in found.values():
        sizes = problem.batch, problem.in_channels, problem.input_size, problem.out_channels
        assert sizes == row[1:5]
        assert (problem.kernel_size, problem.padding, problem.stride) == row[5:]


@pytest.mark.parametrize("name", ["ocr2_b16", "resnet1_b16"])
def test_images_lie_as_the_model_does_even_before_filters_of_one_pixel(name: str) -> None:
    model = getattr(deepbench, name)().to(memory_format=torch.channels_last)
    assert {each.layout for each in extract(model, torch.zeros(16)).problems.values()} == {
        Layout.CHANNELS_LAST
    }


def test_all_layers_of_a_batch_are_one_model() -> None:
    batches = {4: 2, 8: 36, 16: 50, 32: 2}
    for batch, count in batches.items():
        assert len(getattr(deepbench, f"b{batch}")().layers) == count
    assert sum(batches.values()) == len(LAYERS)


def test_it_computes_the_sum_of_the_means_and_the_gradient_of_the_images() -> None:
    torch.manual_seed(0)
    x = torch.arange(16.0)
    model = deepbench.Layers([row for row in LAYERS if row[0] in ("ocr4_b16", "face13_b16")])
    sizes = {"ocr4_b16": (64, 6, 60), "face13_b16": (512, 7, 7)}
    assert model.layers.keys() == sizes.keys()

    y = model(x)
    y.backward()

    means = [model.layers[name](x.view(16, 1, 1, 1).expand(16, *size)).mean() for name, size in sizes.items()]
    torch.testing.assert_close(y, means[0] + means[1])
    torch.testing.assert_close(model.scale.grad, y.detach())  # y is linear in the scale, which is 1


@pytest.mark.parametrize("shape", [(), (16, 3, 224, 224)])
def test_a_sample_that_is_no_list_of_numbers_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must have shape \(n,\), one number a sample, but got \(.*\)\."):
        deepbench.ocr4_b16()(torch.zeros(shape))


@pytest.mark.parametrize("name", ["ocr5_b16", "speaker2", "b64"])
def test_an_unknown_layer_is_told_with_what_there_is(name: str) -> None:
    told = f"b4, b8, b16 or b32, or a layer .* ends with its batch, such as speaker2_b16, but got '{name}'"
    with pytest.raises(AttributeError, match=told):
        getattr(deepbench, name)


def test_the_list_needs_no_torch() -> None:
    code = "import sys, bench.deepbench_list; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
