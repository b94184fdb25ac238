"""Training as people do it, with a patched model beside its twin: the same gradients, step by step."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mucudnn.patching.applying import apply
from tests.models import a_batch, a_chain
from tests.plans import a_plan_for

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-9

Twins = tuple[nn.Module, nn.Module]


@pytest.fixture
def twins() -> Twins:
    """A patched chain in float64, and its twin."""
    torch.manual_seed(0)
    twin = a_chain().double()
    model = copy.deepcopy(twin)
    return apply(model, a_plan_for(copy.deepcopy(model), images().requires_grad_())), twin


def images(seed: int = 1) -> Tensor:
    return a_batch(dtype=torch.float64) * seed


def assert_same_gradients(one: nn.Module, other: nn.Module) -> None:
    for result, expected in zip(one.parameters(), other.parameters(), strict=True):
        assert result.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(result.grad, expected.grad, rtol=0, atol=TOLERANCE)
        assert result.grad.stride() == expected.grad.stride()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activations_may_be_computed_again(twins: Twins, use_reentrant: bool) -> None:
    for each in twins:
        given = images().requires_grad_()
        checkpoint(each, given, use_reentrant=use_reentrant).square().mean().backward()

    assert_same_gradients(*twins)


@pytest.mark.parametrize("padding_mode", ["zeros", "circular", "reflect", "replicate"])
def test_activations_may_be_computed_again_from_the_first_call_on_whatever_pads(padding_mode: str) -> None:
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1, padding_mode=padding_mode), nn.Tanh()).double()
    model = apply(copy.deepcopy(twin), a_plan_for(copy.deepcopy(twin), images()))

    for each in (twin, model):
        checkpoint(each, images().requires_grad_(), use_reentrant=False).square().mean().backward()

    assert_same_gradients(twin, model)


def test_gradients_are_exact_though_backward_is_called_under_autocast() -> None:
    torch.manual_seed(0)
    twin = nn.Sequential(nn.ConvTranspose2d(6, 4, 4, stride=2, padding=1), nn.Conv2d(4, 5, 3))
    images = a_batch(channels=6).requires_grad_()
    model = apply(copy.deepcopy(twin), a_plan_for(copy.deepcopy(twin), images))
    found = []
    for each in (model, twin.double()):
        given = images.detach().to(next(each.parameters()).dtype).requires_grad_()
        result = each(given)
        with torch.autocast("cpu", torch.bfloat16):
            result.square().mean().backward()
        found.append([given.grad, *(parameter.grad for parameter in each.parameters())])

    for ours, exact in zip(*found, strict=True):
        assert ours is not None
        assert exact is not None
        assert (ours - exact).norm() / exact.norm() < 1e-5  # bfloat16 rounds to 4e-3


def test_gradients_accumulate_over_several_batches(twins: Twins) -> None:
    for each in twins:
        for seed in (1, 2, 3):
            (each(images(seed)).square().mean() / 3).backward()

    assert_same_gradients(*twins)


def test_a_backward_pass_may_be_taken_twice(twins: Twins) -> None:
    for each in twins:
        loss = each(images()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()

    assert_same_gradients(*twins)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomalies_are_looked_for(twins: Twins) -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        for each in twins:
            each(images()).square().mean().backward()

    assert_same_gradients(*twins)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Only deterministic algorithms are allowed."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=before)


def test_deterministic_algorithms_suffice_and_give_the_same_twice(deterministic: None, twins: Twins) -> None:
    again = copy.deepcopy(twins[0])
    for each in (*twins, again):
        each(images()).square().mean().backward()

    assert_same_gradients(*twins)
    for one, other in zip(twins[0].parameters(), again.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_a_scaler_scales_gradients_of_16_bits() -> None:
    torch.manual_seed(0)
    twin = a_chain()
    given = a_batch()
    model = copy.deepcopy(twin)
    with torch.autocast("cpu", torch.bfloat16):
        apply(model, a_plan_for(copy.deepcopy(model), given))
    for each in (model, twin):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(given).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    for result, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert result.dtype is torch.float32
        torch.testing.assert_close(result, expected, rtol=5e-2, atol=5e-3)


# PyTorch itself calls what it deprecates when a first forward derivative is taken.
@pytest.mark.filterwarnings("ignore:.torch.jit.")
def test_forward_mode_derivatives_are_pytorchs(twins: Twins) -> None:
    tangent = images(2)
    model, twin = (each.eval() for each in twins)

    (_, result), (_, expected) = (torch.func.jvp(each, (images(),), (tangent,)) for each in (model, twin))

    torch.testing.assert_close(result, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "change",
    [
        lambda conv: conv.weight.data.mul_(2),
        lambda conv: setattr(conv, "bias", None),
        lambda conv: setattr(conv, "padding", (2, 2)),
        lambda conv: setattr(conv, "weight", nn.Parameter(conv.weight.detach() * 3)),
    ],
    ids=["weight in place", "no bias", "padding", "another parameter"],
)
@pytest.mark.filterwarnings("ignore:.*it runs PyTorch's own convolution")  # another padding was not tuned
def test_modules_that_change_between_steps_compute_what_they_say(
    twins: Twins, change: Callable[[Any], None]
) -> None:
    model, twin = twins
    for each in twins:
        each(images()).sum().backward()
        change(each.get_submodule("0"))
        each.zero_grad()
        each(images()).square().mean().backward()

    assert_same_gradients(model, twin)
