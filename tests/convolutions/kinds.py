"""Every kind of convolution module, images for it, and how it is divided by a plan made by hand."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mucudnn.patching.applying import apply
from tests.plans import a_plan_for

CONVOLUTIONS: dict[str, type[Any]] = {"conv1d": nn.Conv1d, "conv2d": nn.Conv2d, "conv3d": nn.Conv3d}
TRANSPOSED: dict[str, type[Any]] = {
    "conv_transpose1d": nn.ConvTranspose1d,
    "conv_transpose2d": nn.ConvTranspose2d,
    "conv_transpose3d": nn.ConvTranspose3d,
}

SIZES = {1: (11,), 2: (7, 8), 3: (5, 6, 7)}
BATCH = 8

every_kind = pytest.mark.parametrize("kind", [*CONVOLUTIONS.values(), *TRANSPOSED.values()])


def rank_of(kind: type[Any]) -> int:
    return int(kind.__name__[-2])


def a_module(kind: type[Any], **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    module: nn.Module = kind(4, 4, **{"kernel_size": 3, **settings}, dtype=torch.float64)
    return module


def images_for(kind: type[Any], samples: int = BATCH) -> Tensor:
    generator = torch.Generator().manual_seed(samples)
    shape = (samples, 4, *SIZES[rank_of(kind)])
    return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)


def divided(module: nn.Module, sample: Tensor) -> nn.Module:
    return apply(copy.deepcopy(module), a_plan_for(copy.deepcopy(module), sample))
