"""What is trained in tests of steps, and in their child processes: networks too small for anything else."""

import os
import time
from pathlib import Path

import torch
from torch import nn

from bench.cpu.step_cases import Network
from bench.cpu.step_models import Recipe
from bench.networks import conv_norm

HERE = __name__


def tiny() -> Recipe:
    """Two convolutions with batch norm, on twelve images of noise; few algorithms can compute them."""
    model = nn.Sequential(
        conv_norm(3, 8, 1, 1), nn.ReLU(), conv_norm(8, 8, 1, 1), nn.Flatten(), nn.Linear(8 * 64**2, 2)
    )
    images = torch.randn(12, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    return Recipe(model, images, torch.arange(12) % 2, batch=2)


def waiting() -> Recipe:
    """One whose process says which it is, and then takes its time."""
    Path(os.environ["MUCUDNN_TEST_PROCESS"]).write_text(str(os.getpid()), encoding="utf-8")
    time.sleep(300)
    return tiny()


def diverging() -> Recipe:
    """A step whose loss is no number."""
    recipe = tiny()
    return Recipe(recipe.model, recipe.images * float("nan"), recipe.targets, recipe.batch)


def mistaken() -> Recipe:
    """A model that cannot read its images."""
    recipe = tiny()
    return Recipe(recipe.model, recipe.images[:, :2], recipe.targets, recipe.batch)


TINY = Network("tiny", f"{HERE}:tiny", "made up", "noise")
