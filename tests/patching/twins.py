"""Patched models and their unpatched twins, and whether these compute the same."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from mucudnn.choices import Mode
from mucudnn.patching.applying import apply
from tests.models import a_batch, a_chain
from tests.plans import a_plan_for

TOLERANCE = 1e-10
"""Of a largest difference, relative to the largest number: ten times an algorithm's bound in float64."""

Build = Callable[[], nn.Module]


def twins_of(build: Build, sample: Tensor, mode: Mode = Mode.REUSE) -> tuple[nn.Module, nn.Module]:
    """A patched model and an unpatched one, in float64."""
    torch.manual_seed(0)
    model = build().double()
    twin = copy.deepcopy(model)
    return apply(model, a_plan_for(model, sample, mode)), twin


def chain_twins(samples: int = 8) -> tuple[nn.Module, nn.Module]:
    return twins_of(a_chain, images_of(samples).requires_grad_())


def images_of(samples: int = 8, size: int = 6) -> Tensor:
    return a_batch(samples, size=size, dtype=torch.float64)


def assert_close(result: Tensor, expected: Tensor) -> None:
    scale = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(result, expected, rtol=0, atol=TOLERANCE * max(scale, 1.0))


def a_step(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Output, the gradient of the images, the gradients of the parameters, the buffers."""
    images = images.clone().requires_grad_()
    model.zero_grad()
    result = model(images)
    (result * torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view_as(result)).sum().backward()
    gradients = [each.grad for each in (images, *model.parameters())]
    return [result.detach(), *(each for each in gradients if each is not None), *model.buffers()]


def assert_same_step(model: nn.Module, twin: nn.Module, images: Tensor) -> None:
    results, expected = a_step(model, images), a_step(twin, images)
    assert len(results) == len(expected)
    for result, other in zip(results, expected, strict=True):
        assert_close(result, other)


def is_divided(model: nn.Module, images: Tensor) -> bool:
    """Whether all convolutions have our backward, and not PyTorch's own; the model is left as it was."""
    seen: list[str] = []
    was_training = model.training
    model.eval()
    hooks = [
        module.register_forward_hook(lambda *told: seen.append(type(told[-1].grad_fn).__name__))
        for module in model.modules()
        if isinstance(module, _ConvNd)
    ]
    try:
        model(images)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return bool(seen) and all(name == "_ConvolutionBackward" for name in seen)
