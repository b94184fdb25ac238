"""Ten training steps, patched and unpatched from one seed, and a way to divide that is not the same."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from bench.networks import resnet18
from mucudnn.patching.applying import apply, plan_of
from tests.plans import MIXED, a_plan_for, algorithms_of
from tests.threads import threads

STEPS = 10

SAMPLES = 8

LOSS_TOLERANCE = 1e-8
"""Relative. Ten steps enlarge a rounding of float64, 1e-16, and a Winograd error, 1e-13, by far less."""

STATISTICS_TOLERANCE = 1e-10
"""Of means and variances, which are near 1: a micro-batch's own would differ from the batch's by tenths."""

pytestmark = pytest.mark.usefixtures("one_thread")


def _network() -> nn.Module:
    torch.manual_seed(0)
    return resnet18(width=8).double()


def _batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(SAMPLES, 3, 32, 32, generator=generator, dtype=torch.float64),
            torch.randint(10, (SAMPLES,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def _train(model: nn.Module, pieces: int = 1) -> list[float]:
    """Train in place; with several pieces, gradients accumulate over micro-batches of the whole model."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for images, labels in _batches():
        optimiser.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for some_images, some_labels in zip(images.chunk(pieces), labels.chunk(pieces), strict=True):
            part = nn.functional.cross_entropy(model(some_images), some_labels) / pieces
            part.backward()
            loss += part.detach()
        optimiser.step()
        losses.append(loss.item())
    return losses


def _statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if "running" in name}


def _largest_difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(_statistics(one).values(), _statistics(other).values(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.fixture(scope="module")
def unpatched() -> tuple[nn.Module, list[float]]:
    """A network after ten steps, and its losses."""
    model = _network()
    with threads(1):
        return model, _train(model)


@pytest.fixture(scope="module")
def patched() -> tuple[nn.Module, list[float]]:
    """Its twin after the same ten steps in uneven parts by mixed algorithms."""
    model = _network()
    with threads(1):
        apply(model, a_plan_for(model, _batches()[0][0]))
        return model, _train(model)


def test_every_convolution_is_divided_into_uneven_parts_by_mixed_algorithms(
    patched: tuple[nn.Module, list[float]],
) -> None:
    plan = plan_of(patched[0])

    assert len(plan.sites) == 59  # of 20 convolutions three ops each, but no gradient of the images
    assert all(len({part.batch for part in division.parts}) > 1 for division in plan.sites.values())
    assert algorithms_of(plan) == MIXED


def test_losses_agree_over_ten_steps(
    patched: tuple[nn.Module, list[float]], unpatched: tuple[nn.Module, list[float]]
) -> None:
    assert patched[1] == pytest.approx(unpatched[1], rel=LOSS_TOLERANCE, abs=0)


def test_the_losses_change_at_every_step(unpatched: tuple[nn.Module, list[float]]) -> None:
    # Ten steps of nothing would agree as well.
    assert all(a != b for a, b in itertools.pairwise(unpatched[1]))


def test_running_statistics_agree_after_ten_steps(
    patched: tuple[nn.Module, list[float]], unpatched: tuple[nn.Module, list[float]]
) -> None:
    assert _largest_difference(patched[0], unpatched[0]) <= STATISTICS_TOLERANCE


def test_gradient_accumulation_does_not_keep_the_statistics(
    unpatched: tuple[nn.Module, list[float]],
) -> None:
    accumulated = _network()

    _train(accumulated, pieces=2)

    assert _largest_difference(accumulated, unpatched[0]) > 1e6 * STATISTICS_TOLERANCE


def test_a_copy_of_a_patched_network_goes_on_training(patched: tuple[nn.Module, list[float]]) -> None:
    one, other = copy.deepcopy(patched[0]), copy.deepcopy(patched[0])

    assert _train(one) == _train(other)
