"""A patched model trains on a card. The last of its tests by name, so that it costs no other its time."""

import copy

import pytest
import torch
from torch import nn

import mucudnn
from bench.precision import tf32

pytestmark = pytest.mark.gpu

BATCH = 16


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.Flatten(),
        nn.Linear(16 * 16 * 16, 10),
    ).cuda()


def train(model: nn.Module, steps: int) -> list[float]:
    """Return the losses of some steps on the same images."""
    generator = torch.Generator("cuda").manual_seed(1)
    images = torch.randn(BATCH, 3, 16, 16, device="cuda", generator=generator)
    labels = torch.arange(BATCH, device="cuda") % 10
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.timeout(110)  # it tunes three convolutions, some 200 trials
def test_a_patched_model_trains_as_its_twin_does() -> None:
    model = network()
    twin = copy.deepcopy(model)
    sample = torch.randn(BATCH, 3, 16, 16, device="cuda")
    with tf32(is_allowed=False):
        mucudnn.optimize(model, "16MiB", sample)

        losses, expected = train(model, 3), train(twin, 3)

    assert losses == pytest.approx(expected, rel=1e-4)
    for name, value in twin.state_dict().items():
        # After three steps of rate 0.01 roundings of 1e-6 are still far below this.
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-3, atol=1e-4)
