import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

from bench.depthwise_networks import convnext_tiny, efficientnet_b0, mobilenetv2
from bench.networks import (
    BasicBlock,
    Bottleneck,
    alexnet,
    densenet40,
    resnet18,
    resnet18_224,
    resnet50,
    unet2d,
    unet3d,
    vgg11,
    vgg16,
)
from mucudnn.examining.tracing import trace


def weights_of_conv_norm(c: int, k: int, size: int) -> int:
    return c * k * size * size + 2 * k


def weights_of_stage(c: int, k: int) -> int:
    """A stage that changes the shape: four 3 x 3 convolutions and the projection."""
    return weights_of_conv_norm(c, k, 3) + 3 * weights_of_conv_norm(k, k, 3) + weights_of_conv_norm(c, k, 1)


def convolutions(network: nn.Module) -> list[nn.Conv2d]:
    return [layer for layer in network.modules() if isinstance(layer, nn.Conv2d)]


def test_resnet18_has_as_many_weights_as_its_layers_add_up_to() -> None:
    stem = weights_of_conv_norm(3, 64, 3)
    first_stage = 4 * weights_of_conv_norm(64, 64, 3)
    later_stages = sum(weights_of_stage(k // 2, k) for k in (128, 256, 512))
    by_hand = stem + first_stage + later_stages + 512 * 10 + 10
    assert by_hand == 11_173_962
    assert sum(weight.numel() for weight in resnet18().parameters()) == by_hand


def test_resnet18_has_17_convolutions_of_3x3_and_3_projections() -> None:
    sizes = [conv.kernel_size for conv in convolutions(resnet18(width=8))]
    assert len(sizes) == 20
    assert sizes.count((3, 3)) == 17
    assert sizes.count((1, 1)) == 3


def test_only_the_first_block_of_stages_2_to_4_projects() -> None:
    network = resnet18(width=8)
    blocks = [block for block in network.modules() if isinstance(block, BasicBlock)]
    projects = [not isinstance(block.shortcut, nn.Identity) for block in blocks]
    assert projects == [False, False, True, False, True, False, True, False]


@pytest.mark.parametrize(
    ("stage", "shape"),
    [
        ("stem", (2, 8, 32, 32)),
        ("stage1", (2, 8, 32, 32)),
        ("stage2", (2, 16, 16, 16)),
        ("stage3", (2, 32, 8, 8)),
        ("stage4", (2, 64, 4, 4)),
        ("scores", (2, 7)),
    ],
)
def test_each_stage_after_the_first_doubles_the_channels_and_halves_the_image(
    stage: str, shape: tuple[int, ...]
) -> None:
    network = resnet18(classes=7, width=8)
    seen: list[tuple[int, ...]] = []
    network.get_submodule(stage).register_forward_hook(lambda _, __, y: seen.append(tuple(y.shape)))
    network(torch.zeros(2, 3, 32, 32))
    assert seen == [shape]


def test_every_convolution_but_the_first_reads_rectified_values() -> None:
    network = resnet18(width=8)
    least: list[float] = []
    for conv in convolutions(network)[1:]:
        conv.register_forward_pre_hook(lambda _, inputs: least.append(inputs[0].min().item()))
    network(torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    assert least == [0.0] * 19


def test_a_block_whose_residual_is_zero_returns_its_rectified_input() -> None:
    block = BasicBlock(4, 4, stride=1).eval()
    nn.init.zeros_(block.second.norm.weight)
    x = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(block(x), x.clamp(min=0))


def test_initial_weights_have_variance_2_over_the_inputs_of_an_output() -> None:
    torch.manual_seed(0)
    weight = convolutions(resnet18(width=16))[-1].weight  # 128 x 128 x 3 x 3: 0.2 % standard error
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (128 * 9)), rel=0.01)


def test_the_same_random_state_builds_the_same_network() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(5)
        states.append(resnet18(width=8).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def weights(network: nn.Module) -> int:
    return sum(weight.numel() for weight in network.parameters())


def shapes_in_order(network: nn.Module, *sample: int) -> dict[str, tuple[int, ...]]:
    """The output shape of each of the network's children, without arithmetic."""
    seen: dict[str, tuple[int, ...]] = {}
    for name, child in network.named_children():
        child.register_forward_hook(lambda _, __, y, name=name: seen.update({name: tuple(y.shape)}))
    trace(network, torch.empty(sample, device="meta"))
    return seen


@pytest.mark.parametrize(
    ("build", "number"),
    [
        (resnet50, 25_557_032),
        (vgg16, 138_357_544),
        (alexnet, 61_100_840),
        (resnet18_224, 11_689_512),
        (mobilenetv2, 3_504_872),
        (efficientnet_b0, 5_288_548),
        (convnext_tiny, 28_589_128),
        (partial(densenet40, growth=12), 1_019_722),  # 1.0 million in table 2 of the paper
        (partial(unet2d, channels=3, classes=1), 31_037_633),  # github.com/milesial/Pytorch-UNet
    ],
)
def test_a_public_network_has_as_many_weights_as_is_published(
    build: Callable[[], nn.Module], number: int
) -> None:
    with torch.device("meta"):
        assert weights(build()) == number


@pytest.mark.parametrize(
    ("build", "depthwise"),
    [
        (mobilenetv2, {(3, 3): 17}),
        (efficientnet_b0, {(3, 3): 7, (5, 5): 9}),
        (convnext_tiny, {(7, 7): 18}),
    ],
)
def test_networks_of_depthwise_convolutions_have_those_of_their_tables(
    build: Callable[[], nn.Module], depthwise: dict[tuple[int, int], int]
) -> None:
    with torch.device("meta"):
        network = build()
        found = [conv.kernel_size for conv in convolutions(network) if conv.groups > 1]

        assert network(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
    assert {size: found.count(size) for size in found} == depthwise


def test_the_3d_unet_has_as_many_weights_as_its_paper_counts_without_normalisation() -> None:
    with torch.device("meta"):
        network = unet3d()

    scales = sum(weights(layer) for layer in network.modules() if isinstance(layer, nn.BatchNorm3d))
    assert weights(network) - scales == 19_069_955


def test_resnet50_has_the_sizes_of_its_table() -> None:
    with torch.device("meta"):
        network = resnet50()

    assert shapes_in_order(network, 2, 3, 224, 224) == {
        "stem": (2, 64, 112, 112),
        "relu": (2, 64, 112, 112),
        "shrink": (2, 64, 56, 56),
        "stage1": (2, 256, 56, 56),
        "stage2": (2, 512, 28, 28),
        "stage3": (2, 1024, 14, 14),
        "stage4": (2, 2048, 7, 7),
        "pool": (2, 2048, 1, 1),
        "flatten": (2, 2048),
        "scores": (2, 1000),
    }


def test_resnet50_takes_its_strides_in_the_3x3_convolutions() -> None:
    with torch.device("meta"):
        blocks = [block for block in resnet50().modules() if isinstance(block, Bottleneck)]

    assert len(blocks) == 16
    assert [number for number, block in enumerate(blocks) if block.convolve.conv.stride == (2, 2)] == [
        3,
        7,
        13,
    ]
    assert all(block.narrow.conv.stride == block.widen.conv.stride == (1, 1) for block in blocks)


def test_the_second_convolution_of_vgg_takes_64_to_64_channels_at_full_size() -> None:
    with torch.device("meta"):
        network = vgg16()

    problems = {
        each.site.path: each.problem for each in trace(network, torch.empty(2, 3, 224, 224, device="meta"))
    }

    assert list(problems) == [
        "conv1_1", "conv1_2", "conv2_1", "conv2_2", "conv3_1", "conv3_2", "conv3_3", "conv4_1", "conv4_2",
        "conv4_3", "conv5_1", "conv5_2", "conv5_3",
    ]  # fmt: skip
    assert problems["conv1_2"].input_shape == problems["conv1_2"].output_shape == (2, 64, 224, 224)
    assert problems["conv5_3"].output_shape == (2, 512, 14, 14)


def test_the_3d_unet_scores_every_voxel() -> None:
    network = unet3d(channels=1, classes=2, width=2)

    scores = network(torch.zeros(1, 1, 8, 16, 24))

    assert scores.shape == (1, 2, 8, 16, 24)


def test_the_3d_unet_has_the_channels_of_its_figure() -> None:
    with torch.device("meta"):
        network = unet3d()

    found = trace(network, torch.empty(1, 3, 32, 32, 32, device="meta"))

    ends = {each.site.path: (each.problem.in_channels, each.problem.out_channels) for each in found}
    assert ends == {
        "down.0.conv1": (3, 32), "down.0.conv2": (32, 64),
        "down.1.conv1": (64, 64), "down.1.conv2": (64, 128),
        "down.2.conv1": (128, 128), "down.2.conv2": (128, 256),
        "down.3.conv1": (256, 256), "down.3.conv2": (256, 512),
        "enlarge.0": (512, 512), "up.0.conv1": (768, 256), "up.0.conv2": (256, 256),
        "enlarge.1": (256, 256), "up.1.conv1": (384, 128), "up.1.conv2": (128, 128),
        "enlarge.2": (128, 128), "up.2.conv1": (192, 64), "up.2.conv2": (64, 64),
        "scores": (64, 3),
    }  # fmt: skip
    assert {each.site.path for each in found if each.is_transposed} == {"enlarge.0", "enlarge.1", "enlarge.2"}


def test_vgg11_has_as_many_weights_as_its_layers_add_up_to() -> None:
    widths = [3, 64, 128, 256, 256, 512, 512, 512, 512]
    by_hand = sum(weights_of_conv_norm(c, k, 3) for c, k in pairwise(widths)) + 512 * 10 + 10
    assert by_hand == 9_228_362
    with torch.device("meta"):
        assert weights(vgg11()) == by_hand


def test_vgg11_leaves_one_pixel_of_32x32_after_five_poolings() -> None:
    with torch.device("meta"):
        network = vgg11(classes=7, width=8)

    shapes = shapes_in_order(network, 2, 3, 32, 32)

    assert [shapes[f"pool{stage}"] for stage in range(1, 6)] == [
        (2, 8, 16, 16), (2, 16, 8, 8), (2, 32, 4, 4), (2, 64, 2, 2), (2, 64, 1, 1),
    ]  # fmt: skip
    assert shapes["scores"] == (2, 7)


def test_every_convolution_of_vgg11_is_normalised_and_rectified() -> None:
    kinds = [type(layer) for layer in vgg11(width=2).modules() if not isinstance(layer, nn.Sequential)]
    features = [kind for kind in kinds if kind is not nn.MaxPool2d][:-2]
    assert features == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU] * 8


def test_the_2d_unet_scores_every_pixel() -> None:
    network = unet2d(channels=1, classes=3, width=2)

    assert network(torch.zeros(2, 1, 32, 48)).shape == (2, 3, 32, 48)


def test_the_2d_unet_has_the_channels_of_its_figure() -> None:
    with torch.device("meta"):
        found = trace(unet2d(), torch.empty(1, 1, 128, 128, device="meta"))

    ends = {each.site.path: (each.problem.in_channels, each.problem.out_channels) for each in found}
    assert ends == {
        "down.0.first.conv": (1, 64), "down.0.second.conv": (64, 64),
        "down.1.first.conv": (64, 128), "down.1.second.conv": (128, 128),
        "down.2.first.conv": (128, 256), "down.2.second.conv": (256, 256),
        "down.3.first.conv": (256, 512), "down.3.second.conv": (512, 512),
        "down.4.first.conv": (512, 1024), "down.4.second.conv": (1024, 1024),
        "enlarge.0": (512, 1024), "up.0.first.conv": (1024, 512), "up.0.second.conv": (512, 512),
        "enlarge.1": (256, 512), "up.1.first.conv": (512, 256), "up.1.second.conv": (256, 256),
        "enlarge.2": (128, 256), "up.2.first.conv": (256, 128), "up.2.second.conv": (128, 128),
        "enlarge.3": (64, 128), "up.3.first.conv": (128, 64), "up.3.second.conv": (64, 64),
        "scores": (64, 2),
    }  # fmt: skip


def test_what_was_seen_at_full_size_reaches_the_scores_past_all_that_is_below() -> None:
    network = unet2d(width=2).eval()
    for weight in network.enlarge[-1].parameters():
        nn.init.zeros_(weight)
    one, other = torch.randn(2, 1, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(network(one), network(other))
