"""Derivatives beyond a first backward pass of what torch.compile has compiled are PyTorch's own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from tests.convolutions.kinds import a_module, divided, images_for
from tests.graphs import DYNAMOS
from tests.patching.twins import assert_close

pytestmark = [pytest.mark.usefixtures("one_thread", "compiled_anew"), DYNAMOS]

KINDS = pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])


def test_derivatives_within_a_graph_are_pytorchs() -> None:
    twin, images = a_module(nn.Conv2d), images_for(nn.Conv2d).detach()
    module = divided(twin, images)

    def tangent(model: nn.Module) -> Any:
        return lambda x: torch.func.jvp(model, (x,), (x,))[1]

    def gradient(model: nn.Module) -> Any:
        return torch.func.grad(lambda x: model(x).square().sum())

    for of in (tangent, gradient):
        result = torch.compile(of(module), backend="aot_eager")(images)
        assert_close(result, of(twin)(images))


@KINDS
def test_second_and_third_derivatives_of_a_graph_are_pytorchs(kind: type[Any]) -> None:
    twin, images = a_module(kind), images_for(kind, samples=3)
    module = divided(twin, images)
    compiled = torch.compile(module, backend="eager", fullgraph=True)

    def derivatives(model: Any, *parameters: nn.Parameter) -> list[Tensor]:
        leaves = [images, *parameters]
        result, found = model(images).pow(4).sum() / 1e4, []
        for _ in range(3):
            gradients = torch.autograd.grad(result, leaves, create_graph=True)
            result = sum((each.square().sum() for each in gradients), torch.zeros(()))
            found += gradients
        return found

    expected = derivatives(twin, *twin.parameters())
    for one, other in zip(derivatives(compiled, *module.parameters()), expected, strict=True):
        assert_close(one, other)


@KINDS
@pytest.mark.parametrize("records", [True, False])
def test_forward_mode_derivatives_of_a_graph_that_was_there_before_are_pytorchs(
    kind: type[Any], records: bool
) -> None:
    twin, images = a_module(kind), images_for(kind).detach()
    module = divided(twin, images)
    compiled = torch.compile(module, backend="eager", fullgraph=True)

    def tangent(model: Any) -> Tensor:
        model(images)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(images, images.flip(0))
            return forward_ad.unpack_dual(model(dual)).tangent

    with torch.set_grad_enabled(records):
        assert_close(tangent(compiled), tangent(twin))


@KINDS
def test_forward_mode_derivatives_of_a_graphs_gradients_are_pytorchs(kind: type[Any]) -> None:
    twin, images = a_module(kind), images_for(kind)
    compiled = torch.compile(divided(twin, images), backend="eager", fullgraph=True)

    def tangent(model: Any) -> Tensor:
        result = model(images)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(torch.ones_like(result), result.detach())
            return forward_ad.unpack_dual(*torch.autograd.grad(result, images, dual)).tangent

    assert_close(tangent(compiled), tangent(twin))
