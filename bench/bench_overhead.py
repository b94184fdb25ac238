"""What Python costs a call of a patched module, and of one where PyTorch's own convolution stays.

The convolution is so small that the calls around it are all that there is. A module that its plan leaves
undivided is not patched at all; one that tunes what it meets (`dynamic=True`) asks at each call. One that
runs another algorithm, here a single matrix product, pays for a call in Python, and for those of autograd.
Its median less that of the plain one in its group is the cost; of the undivided at most 10 microseconds.
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
from mucudnn.patching.applying import patch, patched_modules
from mucudnn.patching.routing import NotNowError
from mucudnn.patching.shapes import Learn
from mucudnn.plan import Assignment, ConvSite, Plan
from mucudnn.problem import problems_of

KINDS = {"Conv2d": nn.Conv2d, "Conv1d": nn.Conv1d, "ConvTranspose2d": nn.ConvTranspose2d}


def patched(
    module: nn.Module, images: torch.Tensor, learn: Learn | None = None, algorithm: str = "cpu:aten"
) -> nn.Module:
    """Patch a module with a plan that runs an algorithm undivided."""
    backend = backend_of("cpu:")
    extraction = extract(module, images)
    assignments = tuple(
        Assignment(
            ConvSite(call.path, op, call.variant),
            problems_of(call.problem)[op],
            undivided(algorithm, call.problem.batch),
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


@pytest.mark.parametrize("who", ["plain", "patched"])
@pytest.mark.parametrize("what", ["forward", "with gradients"])
def test_call_of_another_algorithm(what: str, who: str, benchmark: BenchmarkFixture) -> None:
    """Time a call of a module as it is, and of one that runs a matrix product instead, in a loop."""
    benchmark.group = f"another algorithm, {what}"
    torch.set_num_threads(1)
    module = nn.Conv2d(4, 4, 1).train(what != "forward")
    images = torch.randn(1, 4, 4, 4, requires_grad=module.training)
    if who == "patched":
        assert patched_modules(patched(module, images, algorithm="cpu:gemm"))

    def call() -> None:
        y = module(images)
        if module.training:
            y.sum().backward()

    with torch.set_grad_enabled(module.training):
        benchmark.pedantic(  # type: ignore[no-untyped-call]  # not in the library's hints
            call, iterations=200, rounds=100, warmup_rounds=5
        )
