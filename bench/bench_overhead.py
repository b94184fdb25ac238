"""What a module costs where PyTorch's own convolution stays: nothing, or finding that out.

The convolution is so small that the calls around it are all that there is. A module that its plan leaves
undivided is not patched at all; one that tunes what it meets (`dynamic=True`) asks at each call. The
difference of the medians of a row's group is the cost; the first should be at most 10 microseconds.
"""

import dataclasses

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import nn

from mucudnn.backends import backend_of
from mucudnn.choices import Mode, Policy
from mucudnn.division import undivided
from mucudnn.examining.extraction import extract
from mucudnn.patching.applying import patch
from mucudnn.patching.routing import NotNowError
from mucudnn.patching.shapes import Learn
from mucudnn.plan import Assignment, ConvSite, Plan
from mucudnn.problem import problems_of

KINDS = {"Conv2d": nn.Conv2d, "Conv1d": nn.Conv1d, "ConvTranspose2d": nn.ConvTranspose2d}


def patched(module: nn.Module, images: torch.Tensor, learn: Learn | None) -> nn.Module:
    """Patch a module with a plan that leaves it to PyTorch's own convolution."""
    backend = backend_of("cpu:")
    extraction = extract(module, images)
    assignments = tuple(
        Assignment(
            ConvSite(call.path, op, call.variant),
            problems_of(call.problem)[op],
            undivided(backend.own, call.problem.batch),
        )
        for call in extraction.calls
        for op in call.ops
    )
    environment = dataclasses.replace(backend.environment(), soft={})
    return patch(module, Plan(Mode.REUSE, Policy.UNDIVIDED, 2**20, environment, assignments), learn)


def never(*_: object) -> Plan:
    """Tune nothing."""
    raise NotNowError


@pytest.mark.parametrize("who", ["plain", "patched", "dynamic"])
@pytest.mark.parametrize("name", KINDS)
def test_undivided_call(name: str, who: str, benchmark: BenchmarkFixture) -> None:
    """Time a call of a module as it is, with a plan, or with one that may grow."""
    benchmark.group = f"undivided {name}"
    torch.set_num_threads(1)
    module = KINDS[name](4, 4, 3, padding=1).eval()
    images = torch.randn(1, 4, *(4,) * len(module.kernel_size))
    if who != "plain":
        patched(module, images, never if who == "dynamic" else None)
    with torch.no_grad():
        benchmark.pedantic(  # type: ignore[no-untyped-call]  # not in the library's hints
            module, (images,), iterations=200, rounds=100, warmup_rounds=5
        )
