"""What a patched module costs where PyTorch's own convolution stays: nothing but finding that out.

The convolution is so small that the calls around it are all that there is. The difference of the two medians
of a row's pair is the cost; it should be at most 10 microseconds.
"""

import dataclasses

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import nn

from mucudnn.backends import backend_of
from mucudnn.calls import problems_of
from mucudnn.choices import Mode, Policy
from mucudnn.extraction import extract
from mucudnn.functional import undivided
from mucudnn.patching import apply
from mucudnn.plan import Assignment, ConvSite, Plan

KINDS = {"Conv2d": nn.Conv2d, "Conv1d": nn.Conv1d, "ConvTranspose2d": nn.ConvTranspose2d}


def patched(module: nn.Module, images: torch.Tensor) -> nn.Module:
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
    return apply(module, Plan(Mode.REUSE, Policy.UNDIVIDED, 2**20, environment, assignments))


@pytest.mark.parametrize("who", ["plain", "patched"])
@pytest.mark.parametrize("name", KINDS)
def test_undivided_call(name: str, who: str, benchmark: BenchmarkFixture) -> None:
    """Time a call of a module as it is, or of a patched one."""
    benchmark.group = f"undivided {name}"
    torch.set_num_threads(1)
    module = KINDS[name](4, 4, 3, padding=1).eval()
    images = torch.randn(1, 4, *(4,) * len(module.kernel_size))
    if who == "patched":
        patched(module, images)
    with torch.no_grad():
        benchmark.pedantic(  # type: ignore[no-untyped-call]  # not in the library's hints
            module, (images,), iterations=200, rounds=100, warmup_rounds=5
        )
