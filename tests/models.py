"""Small models, and whoever listens while they are tuned."""

import torch
from torch import Tensor, nn

from mucudnn.examining.extraction import Extraction, extract


def a_chain() -> nn.Sequential:
    """Two convolutions of different shapes, with what usually lies between them."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3, stride=2, bias=False)
    )


def a_batch(samples: int = 8, channels: int = 3, size: int = 6, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, channels, size, size, generator=generator, dtype=dtype)


def too_large_for_nothing() -> tuple[nn.Module, Tensor]:
    """A model and a sample for which every algorithm needs some workspace; smaller ones hide in a page.

    In float32 PyTorch's own needs some on some processors only.
    """
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1)).eval().double(), a_batch(size=48).double()


def an_extraction(model: nn.Module, samples: int = 8) -> Extraction:
    return extract(model, a_batch(samples))


class Listener:
    """Notes what it is told, and gives up when it has been told of `patience` steps."""

    def __init__(self, patience: int | None = None) -> None:
        self.work: float | None = None
        self.steps: list[tuple[str, float]] = []
        self.measured: int | None = None
        self._patience = patience

    def begin(self, work: float) -> None:
        self.work = work

    def at(self, what: str, done: float) -> None:
        if len(self.steps) == self._patience:
            raise KeyboardInterrupt("at the fourth step")
        self.steps.append((what, done))

    def end(self, measured: int) -> None:
        self.measured = measured
