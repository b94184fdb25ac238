"""Training that can be repeated: the same model, data and seed give the same loss at every step."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import islice

import torch
from torch import Tensor, nn

from bench.data import Digits, batches


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """What a training run showed.

    Attributes:
        losses: mean cross-entropy of each step's mini-batch in nats, before the step changed the weights.
        accuracy: share of the held-out images that the trained model names rightly, 0 to 1.
    """

    losses: tuple[float, ...]
    accuracy: float


def train(
    model: nn.Module,
    digits: Digits,
    epochs: int,
    batch_size: int,
    seed: int,
    *,
    learning_rate: float = 0.05,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    decay: bool = False,
    steps: int | None = None,
    drop_last: bool = False,
    channels_last: bool = False,
    on_step: Callable[[int, float], None] | None = None,
) -> TrainingRun:
    """Train `model` in place by stochastic gradient descent; return its losses and its accuracy.

    Images take the device and the dtype of the model's first parameter. `seed` fixes the order of the
    images, and nothing else is drawn: the runs of two equal models are bitwise equal wherever their
    arithmetic is deterministic.

    Args:
        model: maps images (n, 3, 32, 32) to scores (n, 10); left in training mode.
        digits: what to learn, and what to be tested on.
        epochs: how often every training image is seen.
        batch_size: images in a mini-batch, and in a batch of the test.
        seed: of the order of the training images, drawn anew for every epoch.
        learning_rate: step per unit of gradient.
        momentum: share of the previous step that is kept; 0.9 in He et al. 2015, section 4.2.
        weight_decay: gradient added per unit of weight; 1e-4 in the same place.
        decay: whether the learning rate falls linearly to 0 over the epochs, rather than stay constant.
        steps: stop after so many steps; None goes through all epochs.
        drop_last: whether the smaller mini-batch at the end of an epoch is left out.
        channels_last: whether model and images are laid out with the channels innermost.
        on_step: called after each step with its number, from 0, and its loss.
    """
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in the overloads
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), learning_rate, momentum, weight_decay=weight_decay)
    rates = _rates(optimiser, epochs * (len(digits.train_labels) // batch_size) if decay else None)
    stream = _epochs(digits, epochs, batch_size, seed, drop_last)
    losses = []
    for step, (images, labels) in enumerate(islice(stream, steps)):
        losses.append(_step(model, optimiser, _placed(images, model, channels_last), labels))
        rates.step()
        if on_step is not None:
            on_step(step, losses[-1])
    test = digits.test_images, digits.test_labels
    return TrainingRun(tuple(losses), accuracy(model, *test, batch_size, channels_last=channels_last))


def _rates(optimiser: torch.optim.Optimizer, steps: int | None) -> torch.optim.lr_scheduler.LambdaLR:
    """Return what sets the learning rate of every step: constant, or falling to 0 over `steps`."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: 1.0 if steps is None else max(0.0, 1 - step / steps)
    )


def _epochs(
    digits: Digits, epochs: int, batch_size: int, seed: int, drop_last: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the mini-batches of all epochs, each epoch in an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        yield from batches(digits.train_images, digits.train_labels, batch_size, generator, drop_last)


def _step(model: nn.Module, optimiser: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> float:
    """Change the weights by one step and return the loss that they had before it."""
    optimiser.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels.to(images.device))
    loss.backward()
    optimiser.step()
    return loss.item()


def accuracy(
    model: nn.Module, images: Tensor, labels: Tensor, batch_size: int, *, channels_last: bool = False
) -> float:
    """Return the share of `images` to which the model, in evaluation mode, gives the right label, 0 to 1.

    The mode of every module is afterwards what it was before.

    Raises:
        ValueError: there is no image.
    """
    if len(images) == 0:
        raise ValueError("accuracy needs at least one image, but got 0.")
    right = 0
    with _evaluating(model), torch.no_grad():
        for some_images, some_labels in batches(images, labels, batch_size):
            scores = model(_placed(some_images, model, channels_last))
            right += int((scores.argmax(dim=1).cpu() == some_labels.cpu()).sum())
    return right / len(images)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Hold the model in evaluation mode, then give every module its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def _placed(images: Tensor, model: nn.Module, channels_last: bool) -> Tensor:
    """Return `images` on the device and in the dtype of the model's first parameter."""
    weight = next(model.parameters())
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return images.to(weight.device, weight.dtype, memory_format=layout)


def perturbed(model: nn.Module, seed: int, relative: float = 1e-7) -> nn.Module:
    """Return a copy of the model with every weight w replaced by w (1 + `relative` e), e standard normal.

    Two runs that differ by nothing but rounding drift apart as they train. How far two such copies drift
    is the measure for any other difference between runs. The default is about the rounding error of
    float32, 2^-24 = 6e-8. The products are formed in float64 and rounded once to the dtype of the weight,
    so that part of the weights stays as it is if `relative` is no larger than that rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    twin = deepcopy(model)
    with torch.no_grad():
        for weight in twin.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight.device)
            weight.copy_(weight.double() * (1 + relative * noise))
    return twin
