"""DeepBench's layers as models that the command line finds."""

import pytest
import torch

from bench import layers
from bench.cpu.deepbench import LAYERS
from mucudnn.examining.extraction import extract
from mucudnn.problem import ConvOp, Layout


def test_a_layer_is_a_model_with_all_three_ops_and_the_size_that_the_list_gives() -> None:
    found = extract(layers.speaker4_b16(), torch.zeros(16)).problems

    assert {site.op for site in found} == {*ConvOp}
    assert {site.path for site in found} == {"layers.speaker4_b16"}
    row = next(row for row in LAYERS if row[0] == "speaker4_b16")
    for problem in found.values():
        sizes = problem.batch, problem.in_channels, problem.input_size, problem.out_channels
        assert sizes == row[1:5]
        assert (problem.kernel_size, problem.padding, problem.stride) == row[5:]


@pytest.mark.parametrize("name", ["ocr2_b16", "resnet1_b16"])
def test_images_lie_as_the_model_does_even_before_filters_of_one_pixel(name: str) -> None:
    model = getattr(layers, name)().to(memory_format=torch.channels_last)
    assert {each.layout for each in extract(model, torch.zeros(16)).problems.values()} == {
        Layout.CHANNELS_LAST
    }


def test_all_layers_of_a_batch_are_one_model() -> None:
    batches = {4: 2, 8: 36, 16: 50, 32: 2}
    for batch, count in batches.items():
        assert len(getattr(layers, f"deepbench_b{batch}")().layers) == count
    assert sum(batches.values()) == len(LAYERS)


def test_it_computes_the_sum_of_the_means() -> None:
    torch.manual_seed(0)
    model, x = layers.ocr4_b16(), torch.arange(16.0)
    conv = model.layers.ocr4_b16
    images = x.view(16, 1, 1, 1).expand(16, 64, 6, 60)

    torch.testing.assert_close(model(x), conv(images).mean())


def test_an_unknown_layer_is_told_with_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"such as speaker2_b16, or all of one batch, .* 'ocr5_b16'"):
        getattr(layers, "ocr5_b16")  # noqa: B009  # a name that there is not
