"""Networks with their mini-batches, and the types and layouts in which a card runs them."""

import dataclasses
import fnmatch
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from bench import deepbench_list, networks
from bench.deepbench import conv_of
from mucudnn.algorithms.base import memory_format
from mucudnn.problem import Layout

Named = TypeVar("Named", "Workload", "Setting")


@dataclasses.dataclass(frozen=True)
class Workload:
    """A network and the mini-batch with which it is trained.

    Attributes:
        name: of both.
        build: returns the network, with weights from torch's global generator.
        shape: of the images, the mini-batch first.
        wants_gradient: whether that of the images is computed as well, as if there were a layer before.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    wants_gradient: bool = False


@dataclasses.dataclass(frozen=True)
class Setting:
    """Type and layout of images and filters, and whether float32 may be multiplied in TF32.

    That is PyTorch's default, and part of the environment whatever the type; strict float32 is another one.
    """

    name: str
    dtype: torch.dtype
    layout: Layout
    allow_tf32: bool = True


NETWORKS: tuple[Workload, ...] = (
    Workload("resnet18", networks.resnet18_224, (128, 3, 224, 224)),
    Workload("unet3d", networks.unet3d, (2, 3, 64, 64, 64)),
    Workload("alexnet", networks.alexnet, (256, 3, 224, 224)),
    Workload("vgg16", networks.vgg16, (64, 3, 224, 224)),
    Workload("resnet50", networks.resnet50, (64, 3, 224, 224)),
    Workload("densenet40", networks.densenet40, (256, 3, 32, 32)),
)


def _layer(row: deepbench_list.Row) -> Workload:
    name, batch, c, size, *_ = row
    return Workload(f"deepbench/{name}", partial(conv_of, row), (batch, c, *size), wants_gradient=True)


LAYERS: tuple[Workload, ...] = tuple(map(_layer, deepbench_list.LAYERS))
"""DeepBench's, each a network of its own."""

SETTINGS: tuple[Setting, ...] = (
    Setting("float32-nchw", torch.float32, Layout.CONTIGUOUS, allow_tf32=False),
    Setting("bfloat16-nchw", torch.bfloat16, Layout.CONTIGUOUS),
    Setting("tf32-nhwc", torch.float32, Layout.CHANNELS_LAST),
    Setting("bfloat16-nhwc", torch.bfloat16, Layout.CHANNELS_LAST),
    Setting("tf32-nchw", torch.float32, Layout.CONTIGUOUS),
    Setting("float32-nhwc", torch.float32, Layout.CHANNELS_LAST, allow_tf32=False),
)
"""In the order in which they are measured: strict float32, the first of a recording, has fewest engines; next
comes that in which workspace matters most, as cuDNN transposes what is contiguous. The first three have all
precisions and both layouts."""

FIRST_SETTINGS = 3


def in_order(
    workloads: Sequence[Workload], settings: Sequence[Setting]
) -> Iterator[tuple[Workload, Setting]]:
    """Yield each workload in each setting: one workload after the other in the first ones, then in the rest.

    Whose time is up soon has the first workloads in all precisions and both layouts, and not all in one.
    """
    for some in (settings[:FIRST_SETTINGS], settings[FIRST_SETTINGS:]):
        yield from itertools.product(workloads, some)


def operands(workload: Workload, setting: Setting, device: torch.device) -> tuple[nn.Module, Tensor]:
    """Return a network in training mode, and normal random images; the same ones every time."""
    torch.manual_seed(0)
    dense = memory_format(setting.layout, len(workload.shape))
    model = workload.build().to(device, setting.dtype)
    model.to(memory_format=dense)  # type: ignore[call-overload]  # torch's hints lack it
    sample = torch.randn(workload.shape, device=device, dtype=setting.dtype)
    sample = sample.contiguous(memory_format=dense)
    return model, sample.requires_grad_(workload.wants_gradient)


def chosen(patterns: Sequence[str], named: Iterable[Named]) -> list[Named]:
    """Return those whose names match some pattern, as in a shell, in their order."""
    return [each for each in named if any(fnmatch.fnmatchcase(each.name, pattern) for pattern in patterns)]
