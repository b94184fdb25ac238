"""The models: from packages that need no download, with random weights and inputs as small as they allow."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

BATCH = 6
"""Uneven parts of it: 3 and 2 by one algorithm, 1 by another."""


class Entry(NamedTuple):
    """One model.

    Attributes:
        package: where it comes from.
        name: what it is called there.
        build: returns it; the random state decides its weights.
        shape: of one sample.
    """

    package: str
    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]

    @property
    def title(self) -> str:
        """Package and name."""
        return f"{self.package} {self.name}"


def entries() -> list[Entry]:
    """Return all models."""
    return [*_of_pytorchcv(), *_of_monai(), *_of_transformers()]


_IMAGE = (3, 224, 224)
_SMALL_IMAGE = (3, 32, 32)

_PYTORCHCV: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(
        (
            "resnet20_cifar10", "preresnet20_cifar10", "resnext20_32x2d_cifar10", "seresnet20_cifar10",
            "densenet40_k12_cifar10", "wrn16_10_cifar10", "xdensenet40_2_k24_bc_cifar10",
            "diaresnet20_cifar10", "nin_cifar10", "sepreresnet20_cifar10", "shakeshakeresnet20_2x16d_cifar10",
            "pyramidnet110_a48_cifar10",
        ),
        _SMALL_IMAGE,
    ),
    **dict.fromkeys(
        (
            "alexnet", "squeezenet_v1_1", "squeezeresnet_v1_1", "mobilenet_wd4", "fdmobilenet_wd4",
            "mobilenetv2_wd4", "mobilenetv3_small_w7d20", "shufflenet_g1_wd4", "shufflenetv2_wd2",
            "mnasnet_small", "ghostnet", "efficientnet_b0", "resnet10", "preresnet10", "seresnet10",
            "bninception", "peleenet", "igcv3_wd4", "darknet_tiny",
        ),
        _IMAGE,
    ),
    "simplepose_mobile_resnet18_coco": (3, 256, 192),
}  # fmt: skip


def _of_pytorchcv() -> list[Entry]:
    def build(name: str) -> Callable[[], nn.Module]:
        return lambda: importlib.import_module("pytorchcv.model_provider").get_model(name, pretrained=False)

    return [Entry("pytorchcv", name, build(name), shape) for name, shape in _PYTORCHCV.items()]


def _of_monai() -> list[Entry]:
    def build(name: str, **options: Any) -> Callable[[], nn.Module]:
        return lambda: getattr(importlib.import_module("monai.networks.nets"), name)(**options)

    flat, deep = (1, 32, 32), (1, 16, 16, 16)
    channels: dict[str, Any] = {"in_channels": 1, "out_channels": 2}
    widths: dict[str, Any] = {"channels": (4, 8, 16), "strides": (2, 2)}
    features = {"features": (4, 4, 8, 8, 16, 4)}
    kernels: dict[str, Any] = {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]}
    return [
        Entry("monai", "UNet 2-D", build("UNet", spatial_dims=2, **channels, **widths, norm="batch"), flat),
        Entry("monai", "UNet 3-D", build("UNet", spatial_dims=3, **channels, **widths, norm="batch"), deep),
        Entry(
            "monai", "AttentionUnet 3-D", build("AttentionUnet", spatial_dims=3, **channels, **widths), deep
        ),
        Entry(
            "monai",
            "BasicUNet 3-D",
            build("BasicUNet", spatial_dims=3, **channels, **features),
            (1, 32, 32, 32),
        ),
        Entry("monai", "SegResNet 3-D", build("SegResNet", spatial_dims=3, init_filters=8, **channels), deep),
        Entry("monai", "DynUNet 3-D", build("DynUNet", spatial_dims=3, **channels, **kernels), deep),
        Entry(
            "monai",
            "AutoEncoder 1-D",
            build(
                "AutoEncoder", spatial_dims=1, **channels, **{**widths, "strides": (2, 2, 2)}, norm="batch"
            ),
            (1, 64),
        ),
    ]


class _Logits(nn.Module):
    """A model of transformers by its first output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Return the output, whatever its shape."""
        first: Tensor = self.model(images)[0]
        return first


def _of_transformers() -> list[Entry]:
    def build(kind: str, **options: Any) -> Callable[[], nn.Module]:
        def made() -> nn.Module:
            library = importlib.import_module("transformers")
            return _Logits(getattr(library, f"{kind}Model")(getattr(library, f"{kind}Config")(**options)))

        return made

    small: dict[str, Any] = {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1]}
    speech: dict[str, Any] = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
        "conv_dim": [16] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
        "layerdrop": 0.0, "mask_time_prob": 0.0,
    }  # fmt: skip
    return [
        Entry("transformers", "ResNet", build("ResNet", embedding_size=16, **small), (3, 64, 64)),
        Entry("transformers", "ConvNext", build("ConvNext", **small), (3, 64, 64)),
        Entry("transformers", "ConvNextV2", build("ConvNextV2", **small), (3, 64, 64)),
        Entry(
            "transformers",
            "RegNet",
            build("RegNet", embedding_size=16, groups_width=16, **small),
            (3, 64, 64),
        ),
        Entry("transformers", "MobileNetV2", build("MobileNetV2"), (3, 64, 64)),
        Entry("transformers", "Wav2Vec2", build("Wav2Vec2", **speech), (4000,)),
    ]


def a_sample(entry: Entry, generator: torch.Generator) -> Tensor:
    """Return a batch of normal random values for a model."""
    return torch.randn((BATCH, *entry.shape), generator=generator, dtype=torch.float64)
