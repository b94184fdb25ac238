"""Models that do more than compute convolutions, and the ops that are found."""

import torch
from torch import Tensor, nn

from mucudnn.examining.extraction import Extraction
from mucudnn.problem import ConvOp

ALL = (ConvOp.FPROP, ConvOp.DGRAD, ConvOp.WGRAD)


def ops_of(extraction: Extraction) -> dict[str, tuple[ConvOp, ...]]:
    return {call.path: call.ops for call in extraction.calls}


class DependsOnValues(nn.Module):
    """Decides by what it has computed, which takes real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Conv2d(4, 4, 3)

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.first(image)))
        return self.second(hidden) if hidden.abs().sum().item() > 0 else hidden


class Remembers(nn.Module):
    """Keeps what its first call has computed, as models do with position encodings."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.offset: Tensor | None = None

    def forward(self, image: Tensor) -> Tensor:
        if self.offset is None:
            self.offset = torch.arange(image.shape[-1]).to(image)
        return self.conv(image + self.offset)


class RunningMean(nn.Module):
    """Binds its buffer to a new tensor in every pass, and needs real numbers."""

    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.register_buffer("running", torch.zeros(()))

    def forward(self, image: Tensor) -> Tensor:
        self.running = self.running + image.mean().item()
        return self.conv(image)


class ChangesItsInput(nn.Module):
    """Adds to its input in place, and needs real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.seen: list[Tensor] = []

    def forward(self, image: Tensor, other: Tensor | None = None) -> Tensor:
        self.seen.append(image)
        if image.requires_grad and image.is_leaf:
            return self.conv(image * image.sum().item())
        image.add_(1 if image.sum().item() else 2)
        if other is not None and other is not image:
            raise ValueError("image and other must be one")
        return self.conv(image)
