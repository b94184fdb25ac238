"""Graphs that torch.compile freezes hold PyTorch's own convolution where that is faster there."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mucudnn.compiling import GraphServer
from mucudnn.intervals import Estimate, Verdict
from mucudnn.patching import apply
from mucudnn.plan import FrozenEvidence
from tests.models import a_batch
from tests.plans import a_plan_for

# Dynamo warns of its own use of deprecated functions of torch and Python.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.timeout(200),  # a compiler starts
]

ONCE = Estimate(1.0, 0.9, 1.1, 10)

FREEZING = torch._inductor.config.patch(freezing=True)


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """Compile everything anew."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The images of convolutions that are served by mucudnn's operator, as they are."""
    images: list[Tensor] = []
    own = GraphServer.compute
    monkeypatch.setattr(GraphServer, "compute", lambda *args: (images.append(args[1]), own(*args))[1])
    return images


def a_pair() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ConvTranspose2d(8, 4, 3, bias=False))
    return model.eval(), a_batch()


def seen(path: str, verdict: Verdict, workspace_bytes: int = 0) -> FrozenEvidence:
    return FrozenEvidence(path, 0, workspace_bytes, ONCE, ONCE, ONCE, verdict)


def divided(model: nn.Module, images: Tensor, *frozen: FrozenEvidence) -> nn.Module:
    """A copy of the model, each of whose convolutions is divided, but where frozen graphs know better."""
    twin = copy.deepcopy(model)
    plan = a_plan_for(copy.deepcopy(model), images)
    return apply(twin, dataclasses.replace(plan, frozen=frozen))


SLOWER = (seen("0", Verdict.SLOWER), seen("1", Verdict.SAME))


@pytest.mark.parametrize(
    ("frozen", "channels"),
    [
        (SLOWER, []),
        ((SLOWER[0], seen("1", Verdict.FASTER)), [8]),
        ((seen("0", Verdict.FASTER), FrozenEvidence("1", 0, 0)), [3]),
        ((), [3, 8]),  # nothing is known of such graphs, as where other versions have made the plan
        ((seen("0", Verdict.SLOWER, workspace_bytes=2**40), SLOWER[1]), [3]),  # no room beside the buffer
    ],
    ids=["slower", "one faster", "one its own", "unknown", "no room"],
)
def test_a_frozen_graph_holds_pytorchs_own_unless_something_is_faster_there(
    frozen: tuple[FrozenEvidence, ...], channels: list[int], served: list[Tensor]
) -> None:
    model, images = a_pair()
    compiled = torch.compile(divided(model, images, *frozen), dynamic=False, fullgraph=True)

    with torch.no_grad(), FREEZING:
        result = compiled(images)

        torch.testing.assert_close(result, torch.compile(model, dynamic=False)(images), rtol=1e-5, atol=1e-5)
    assert _packs_filters()
    assert [each.shape[1] for each in served] == channels


def test_what_is_known_of_a_batch_counts_for_smaller_ones(served: list[Tensor]) -> None:
    model, images = a_pair()
    compiled = torch.compile(divided(model, images, *SLOWER), dynamic=False, fullgraph=True)

    with torch.no_grad(), FREEZING:
        compiled(images[:5])

    assert served == []


class _NoGrad(nn.Module):
    """Ceases to record gradients within what is compiled."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            return self.model(images)


def _only_by_options(model: nn.Module, images: Tensor) -> Any:
    with torch.no_grad():
        return torch.compile(model, dynamic=False, options={"freezing": True})(images)


def _all_but_options(model: nn.Module, images: Tensor) -> Any:
    with torch.no_grad(), FREEZING:
        return torch.compile(model, dynamic=False, options={"freezing": False})(images)


def _with_gradients(model: nn.Module, images: Tensor) -> Any:
    with FREEZING:
        return torch.compile(model, dynamic=False)(images)


def _without_gradients_within(model: nn.Module, images: Tensor) -> Any:
    with FREEZING:
        return torch.compile(_NoGrad(model), dynamic=False)(images)


def _by_another_compiler(model: nn.Module, images: Tensor) -> Any:
    with torch.no_grad(), FREEZING:
        return torch.compile(model, dynamic=False, backend="aot_eager")(images)


def _not_frozen(model: nn.Module, images: Tensor) -> Any:
    with torch.no_grad():
        return torch.compile(model, dynamic=False)(images)


def _packs_filters() -> bool:
    """Whether some graph, the unpatched model's among them, holds a packed filter."""
    return torch._dynamo.utils.counters["inductor"]["mkldnn_conv_weight_pack_matcher_count"] > 0


def test_of_a_graph_for_any_batch_no_filter_is_packed_beforehand(served: list[Tensor]) -> None:
    model, images = a_pair()

    with torch.no_grad(), FREEZING:
        torch.compile(divided(model, images, *SLOWER), dynamic=True)(images)

    assert [each.shape[1] for each in served] == [3, 8]


@pytest.mark.parametrize(
    "compute",
    [
        _only_by_options,
        _all_but_options,
        _with_gradients,
        _without_gradients_within,
        _by_another_compiler,
        _not_frozen,
    ],
)
def test_graphs_that_are_not_frozen_are_divided_as_ever(
    compute: Callable[[nn.Module, Tensor], Any], served: list[Tensor]
) -> None:
    model, images = a_pair()

    result = compute(divided(model, images, *SLOWER), images)

    torch.testing.assert_close(result, compute(model, images), rtol=1e-5, atol=1e-5)
    assert [each.shape[1] for each in served] == [3, 8]
    assert not _packs_filters()
