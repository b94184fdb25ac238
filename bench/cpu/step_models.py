"""The networks of the training steps with their data, and a step as one call, to be timed and weighed."""

import contextlib
import copy
import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name that PyTorch's users know it by

from bench.cpu.using import casting_in
from bench.data import IMAGE_SIZE, batches, load
from bench.depthwise_networks import convnext_tiny, efficientnet_b0, mobilenetv2
from bench.networks import resnet18, resnet18_224, resnet50, unet2d, unet3d, vgg11
from bench.steps import Weighed
from mucudnn.algorithms.base import memory_format
from mucudnn.problem import Layout

SEED = 0
"""Of weights and of the order of the data: equal recipes give equal steps."""

_BATCH = 64
_MOSAIC_BATCH = 4
_STACK_BATCH = 2
_SMALL_IMAGENET_BATCH = 8
_IMAGENET_BATCH = 16
_MOSAIC_SIDE = 4
"""Digits along each side of a mosaic, of 32x32 pixels each."""


_NOTHING = contextlib.nullcontext()


@dataclasses.dataclass(frozen=True, eq=False)
class Recipe:
    """A model with what it is trained on.

    Attributes:
        model: maps images to scores before softmax, shape (n, classes[, d][, h, w]).
        images: of the whole data set, shape (n, c[, d], h, w).
        targets: classes, shape (n[, d][, h, w]).
        batch: samples in a step.
    """

    model: nn.Module
    images: Tensor
    targets: Tensor
    batch: int


def resnet18_on_digits() -> Recipe:
    """Return ResNet-18 for images of 32 x 32, and the handwritten digits."""
    digits = load()
    return Recipe(resnet18(), digits.train_images, digits.train_labels, _BATCH)


def vgg11_on_digits() -> Recipe:
    """Return VGG-11 for images of 32 x 32, and the handwritten digits."""
    digits = load()
    return Recipe(vgg11(), digits.train_images, digits.train_labels, _BATCH)


def unet_on_mosaics() -> Recipe:
    """Return the 2-D U-Net, and mosaics of digits whose pixels are ink or paper."""
    mosaics = mosaics_of(load().train_images)
    return Recipe(unet2d(), mosaics, (mosaics.squeeze(1) > 0).long(), _MOSAIC_BATCH)


def unet3d_on_stacks() -> Recipe:
    """Return the 3-D U-Net, and stacks of digits whose voxels are ink or paper."""
    stacks = stacks_of(load().train_images)
    return Recipe(unet3d(1, 2), stacks, (stacks.squeeze(1) > 0).long(), _STACK_BATCH)


def resnet18_on_noise() -> Recipe:
    """Return ResNet-18 for images of 224 x 224, and normal random images."""
    return _on_noise(resnet18_224(), _IMAGENET_BATCH)


def resnet50_on_noise() -> Recipe:
    """Return ResNet-50 for images of 224 x 224, and normal random images."""
    return _on_noise(resnet50(), _SMALL_IMAGENET_BATCH)


def mobilenetv2_on_noise() -> Recipe:
    """Return MobileNetV2, and normal random images of 224 x 224."""
    return _on_noise(mobilenetv2(), _IMAGENET_BATCH)


def efficientnet_on_noise() -> Recipe:
    """Return EfficientNet-B0, and normal random images of 224 x 224."""
    return _on_noise(efficientnet_b0(), _IMAGENET_BATCH)


def convnext_on_noise() -> Recipe:
    """Return ConvNeXt-T, and normal random images of 224 x 224."""
    return _on_noise(convnext_tiny(), _SMALL_IMAGENET_BATCH)


def _on_noise(model: nn.Module, batch: int) -> Recipe:
    """Return a model with a single batch, each image of a class of its own."""
    images = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(SEED))
    return Recipe(model, images, torch.arange(batch), batch)


def mosaics_of(images: Tensor) -> Tensor:
    """Return images (n, 3, 32, 32) of equal channels as grey mosaics (n // 16, 1, 128, 128).

    Images that do not fill a mosaic are left out.
    """
    side, size = _MOSAIC_SIDE, IMAGE_SIZE
    whole = len(images) // side**2
    tiles = images[: whole * side**2, 0].reshape(whole, side, side, size, size)
    return tiles.transpose(2, 3).reshape(whole, 1, side * size, side * size)


def stacks_of(images: Tensor) -> Tensor:
    """Return images (n, 3, 32, 32) of equal channels as grey volumes (n // 32, 1, 32, 32, 32), one a slice.

    Images that do not fill a volume are left out.
    """
    whole = len(images) // IMAGE_SIZE
    return images[: whole * IMAGE_SIZE, 0].reshape(whole, 1, IMAGE_SIZE, IMAGE_SIZE, IMAGE_SIZE)


def prepared(
    recipe: str, layout: Layout, casting: AbstractContextManager[object] = _NOTHING
) -> "ReadingStep":
    """Return the step of the `module:function` that returns a `Recipe`, with its model in that layout.

    The same arguments give the same weights and the same data in the same order.
    """
    module, _, function = recipe.partition(":")
    torch.manual_seed(SEED)
    found: Recipe = getattr(importlib.import_module(module), function)()
    lying = memory_format(layout, found.images.dim())
    found.model.train().to(memory_format=lying)  # type: ignore[call-overload]  # torch's stub forgets it
    return ReadingStep(found, layout, casting)


class ReadingStep:
    """Reading a batch, forward, loss, backward and update of one model.

    Attributes:
        model: in training mode.
        recipe: it and its data.
        batch: samples in a step.
        loss: of the last step, mean cross-entropy in nats; 0 before the first.

    Args:
        recipe: whose model is in training mode.
        layout: that the model is in.
        casting: in which forward pass and loss are computed, again and again.
    """

    def __init__(
        self, recipe: Recipe, layout: Layout, casting: AbstractContextManager[object] = _NOTHING
    ) -> None:
        self.model = recipe.model
        self.batch = recipe.batch
        self.loss = 0.0
        self.recipe = recipe
        self._layout = layout
        self._casting = casting
        self._optimiser = torch.optim.SGD(recipe.model.parameters(), lr=0.01, momentum=0.9)
        self._stream = _endless(recipe)

    def copy(self) -> "ReadingStep":
        """Return the step of a copy of the model, which reads the data from their beginning."""
        model = copy.deepcopy(self.model)
        return ReadingStep(dataclasses.replace(self.recipe, model=model), self._layout, self._casting)

    def read(self) -> tuple[Tensor, Tensor]:
        """Return the next batch as the model takes it: images and targets."""
        images, targets = next(self._stream)
        return images.to(memory_format=memory_format(self._layout, images.dim())), targets

    def train(self, images: Tensor, targets: Tensor) -> None:
        """Change the weights by one step."""
        self._optimiser.zero_grad()
        with self._casting:
            loss = F.cross_entropy(self.model(images), targets)
        loss.backward()
        self._optimiser.step()
        self.loss = loss.item()

    def __call__(self) -> None:
        """Run the step."""
        self.train(*self.read())


def _endless(recipe: Recipe) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches for ever, each pass over the data in an order of its own."""
    generator = torch.Generator().manual_seed(SEED)
    while True:
        yield from batches(recipe.images, recipe.targets, recipe.batch, generator, drop_last=True)


class WeighedStep(Weighed):
    """The step of `prepared`."""

    def __init__(self, payload: Mapping[str, object]) -> None:
        """Take the values that `bench.cpu.steps` gives: recipe, layout, setting, a plan's text or None."""
        casting = casting_in(str(payload["setting"]))
        step = prepared(str(payload["recipe"]), Layout(str(payload["layout"])), casting)
        super().__init__(step.model, step, payload["plan"])
