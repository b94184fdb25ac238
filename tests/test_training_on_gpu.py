"""Patched models train on a card: by plans made by hand, compiled, and tuned."""

import copy
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import mucudnn
from bench.by_hand import a_plan_for
from bench.precision import tf32
from mucudnn.backends import backend_for
from tests.graphs import served

pytestmark = pytest.mark.gpu

BATCH = 16

CUDA = torch.device("cuda")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.Flatten(),
        nn.Linear(16 * 16 * 16, 10),
    ).cuda()


def train(model: nn.Module, steps: int) -> list[float]:
    """Return the losses of some steps on the same images."""
    generator = torch.Generator("cuda").manual_seed(1)
    images = torch.randn(BATCH, 3, 16, 16, device="cuda", generator=generator)
    labels = torch.arange(BATCH, device="cuda") % 10
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""A few hundred roundings of 6e-8, as tiles and engines add up in other orders; and some of 4e-3."""


def assert_same_step(model: Callable[[Tensor], Tensor], twin: nn.Module, images: Tensor) -> None:
    """Results and gradients are equal to rounding; `model` and `twin` have equal weights."""
    found = []
    for run, module in ((model, model), (twin, twin)):
        given = images.clone().requires_grad_()
        result = run(given)
        wanted = [given, *cast(nn.Module, module).parameters()]
        found.append([result, *torch.autograd.grad(result.square().mean(), wanted)])
    for ours, expected in zip(*found, strict=True):
        assert (ours - expected).norm() <= ROUNDING[images.dtype] * expected.norm()


def assert_same_inference(
    model: Callable[[Tensor], Tensor], twin: Callable[[Tensor], Tensor], images: Tensor
) -> None:
    """Results without gradients are equal to rounding."""
    with torch.no_grad():
        ours, expected = model(images), twin(images)
    assert (ours - expected).norm() <= ROUNDING[images.dtype] * expected.norm()


def divided_by_hand(twin: nn.Module, images: Tensor) -> nn.Module:
    """A copy of `twin` whose convolutions run in uneven parts, by several algorithms each."""
    backend = backend_for("auto", images.device)
    plan = a_plan_for(copy.deepcopy(twin), images.clone().requires_grad_(), backend=backend)
    return mucudnn.apply(copy.deepcopy(twin), plan)


@pytest.mark.timeout(110)  # it tunes three convolutions, some 400 trials, before others have loaded anything
def test_a_patched_model_trains_as_its_twin_does() -> None:
    model = network()
    twin = copy.deepcopy(model)
    sample = torch.randn(BATCH, 3, 16, 16, device="cuda")
    with tf32(is_allowed=False):
        mucudnn.optimize(model, "16MiB", sample)

        losses, expected = train(model, 3), train(twin, 3)

    assert losses == pytest.approx(expected, rel=1e-4)
    for name, value in twin.state_dict().items():
        # After three steps of rate 0.01 roundings of 1e-6 are still far below this.
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_transposed_convolutions_are_divided(rank: int) -> None:
    torch.manual_seed(0)
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 1]
    twin = nn.Sequential(kind(8, 16, 4, stride=2, padding=1), kind(16, 8, 3, groups=4)).to(CUDA)
    images = torch.randn(8, 8, *(6,) * rank, device=CUDA)
    with tf32(is_allowed=False):
        assert_same_step(divided_by_hand(twin, images), twin, images)


@pytest.mark.timeout(100)  # a compiler starts
@pytest.mark.parametrize(
    ("dtype", "order"),
    [(torch.float32, torch.contiguous_format), (torch.bfloat16, torch.channels_last)],
    ids=["float32-contiguous", "bfloat16-channels_last"],
)
def test_a_compiled_model_is_one_graph_of_divided_convolutions(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, order: torch.memory_format
) -> None:
    torch.manual_seed(0)
    twin = nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1)
    ).to(CUDA, dtype, memory_format=order)
    images = torch.randn(8, 8, 12, 12, device=CUDA, dtype=dtype).contiguous(memory_format=order)
    ran = served(monkeypatch)
    with tf32(is_allowed=False):
        model = divided_by_hand(twin, images)

        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert_same_step(compiled, twin, images)
        assert_same_inference(compiled, twin, images)

    assert len(ran) == 4


@pytest.mark.timeout(100)  # a compiler starts
def test_what_a_compiler_captures_by_itself_leaves_divided_convolutions_out() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    twin = nn.Sequential(*layers).to(CUDA)
    images = torch.randn(8, 8, 12, 12, device=CUDA)
    with tf32(is_allowed=False):
        model = torch.compile(divided_by_hand(twin, images), mode="reduce-overhead", fullgraph=True)
        before = dict(counters["inductor"])
        for _ in range(4):  # eager, to warm up, captured, replayed
            torch.compiler.cudagraph_mark_step_begin()
            assert_same_step(model, twin, images)
        assert_same_inference(model, twin, images)

    counted = counters["inductor"]
    assert counted["cudagraph_partitions"] > before.get("cudagraph_partitions", 0)
    assert counted["cudagraph_skips"] == before.get("cudagraph_skips", 0)
