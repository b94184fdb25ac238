import math

import pytest
import torch
from torch import nn

from bench.networks import BasicBlock, resnet18


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
