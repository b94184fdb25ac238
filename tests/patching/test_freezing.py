"""Graphs that torch.compile freezes hold PyTorch's own convolution where that is faster there."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mucudnn.choices import Mode
from mucudnn.division import undivided
from mucudnn.evidence import CallTimes, FrozenEvidence
from mucudnn.intervals import Estimate, Verdict
from mucudnn.patching.applying import apply, patch
from mucudnn.plan import Plan
from mucudnn.problem import ConvOp
from tests import graphs
from tests.models import a_batch
from tests.plans import a_plan_for

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    graphs.DYNAMOS,
    pytest.mark.timeout(200),  # a compiler starts
]

ONCE = Estimate(1.0, 0.9, 1.1, 10)

FREEZING = torch._inductor.config.patch(freezing=True)


@pytest.fixture(autouse=True)
def counted_anew(compiled_anew: None) -> None:
    """Compile everything anew, and count from 0 what is done to graphs."""
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The images of convolutions that are served by mucudnn's operator, as they are."""
    return graphs.served(monkeypatch)


def a_pair() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ConvTranspose2d(8, 4, 3, bias=False))
    return model.eval(), a_batch()


def seen(path: str, verdict: Verdict, workspace_bytes: int = 0) -> FrozenEvidence:
    return FrozenEvidence(path, 0, workspace_bytes, CallTimes(ONCE, ONCE, ONCE, verdict))


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
        ((seen("0", Verdict.FASTER), FrozenEvidence("1", 0, 0)), [3]),  # which could not be timed
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

        torch.testing.assert_close(result, model(images), rtol=1e-5, atol=1e-5)
    assert _packed_filters() == 2 - len(channels)
    assert [each.shape[1] for each in served] == channels


def test_a_site_with_a_workspace_of_its_own_is_asked_about_too(served: list[Tensor]) -> None:
    model, images = a_pair()
    plan = dataclasses.replace(a_plan_for(copy.deepcopy(model), images, Mode.SHARING), frozen=SLOWER)

    with torch.no_grad(), FREEZING:
        torch.compile(apply(copy.deepcopy(model), plan), dynamic=False, fullgraph=True)(images)

    assert served == []
    assert _packed_filters() == 2


@pytest.mark.parametrize(("n_bytes", "channels"), [(0, []), (1, [3])])
def test_where_more_is_tuned_later_the_buffer_may_come_to_leave_no_room(
    n_bytes: int, channels: list[int], served: list[Tensor]
) -> None:
    def learn(*_: object) -> Plan:
        raise AssertionError("nothing is to be tuned here")

    model, images = a_pair()
    frozen = (seen("0", Verdict.SLOWER, n_bytes), SLOWER[1])
    plan = dataclasses.replace(a_plan_for(copy.deepcopy(model), images), frozen=frozen)
    patched = patch(copy.deepcopy(model), plan, learn)

    with torch.no_grad(), FREEZING:
        torch.compile(patched, dynamic=False, fullgraph=True)(images)

    assert [each.shape[1] for each in served] == channels


@pytest.mark.parametrize("verdict", [Verdict.FASTER, Verdict.SLOWER])
def test_what_is_known_of_a_batch_is_not_said_of_smaller_ones(verdict: Verdict, served: list[Tensor]) -> None:
    model, images = a_pair()
    patched = divided(model, images, seen("0", verdict), seen("1", verdict))

    with torch.inference_mode(), FREEZING:
        torch.compile(patched, dynamic=False, fullgraph=True)(images[:5])

    assert served == []
    assert _packed_filters() == 2


def test_a_module_that_changes_elsewhere_is_pytorchs_own_in_frozen_graphs_where_it_was_planned_so(
    served: list[Tensor],
) -> None:
    model, images = a_pair()
    plan = a_plan_for(copy.deepcopy(model).train(), images)  # with gradients, which are divided
    own = tuple(
        dataclasses.replace(each, division=undivided("cpu:aten", each.problem.batch))
        if (each.site.path, each.site.op) in [("0", ConvOp.FPROP), ("1", ConvOp.DGRAD)]
        else each
        for each in plan.assignments
    )
    patched = apply(copy.deepcopy(model), dataclasses.replace(plan, assignments=own))

    with torch.no_grad(), FREEZING:
        torch.compile(patched, dynamic=False, fullgraph=True)(images)

    assert len(own) > 2
    assert served == []
    assert _packed_filters() == 2


def test_what_was_not_tuned_forwards_is_pytorchs_own_in_frozen_graphs(served: list[Tensor]) -> None:
    model, images = a_pair()
    plan = a_plan_for(copy.deepcopy(model).train(), images)
    forward = [("0", ConvOp.FPROP), ("1", ConvOp.DGRAD)]
    gradients = tuple(each for each in plan.assignments if (each.site.path, each.site.op) not in forward)
    patched = apply(copy.deepcopy(model), dataclasses.replace(plan, assignments=gradients))

    with torch.no_grad(), FREEZING:
        torch.compile(patched, dynamic=False, fullgraph=True)(images)

    assert gradients
    assert served == []
    assert _packed_filters() == 2


class _Computed(nn.Conv2d):
    """Computes its filter from the images."""

    def forward(self, images: Tensor) -> Tensor:
        return self._conv_forward(images, self.weight * images.mean(), self.bias)


def test_a_filter_that_is_no_constant_is_not_packed(served: list[Tensor]) -> None:
    model, images = _Computed(3, 8, 3).eval(), a_batch()
    patched = divided(model, images, seen("", Verdict.SLOWER))

    with torch.no_grad(), FREEZING:
        result = torch.compile(patched, dynamic=False, fullgraph=True)(images)

        torch.testing.assert_close(result, model(images), rtol=1e-5, atol=1e-5)
    assert [each.shape[1] for each in served] == [3]
    assert _packed_filters() == 0


@pytest.mark.parametrize("setting", ["cpp.weight_prepack", "layout_optimization"])
def test_where_inductor_packs_no_filters_convolutions_are_divided(setting: str, served: list[Tensor]) -> None:
    model, images = a_pair()

    with torch.no_grad(), FREEZING, torch._inductor.config.patch({setting: False}):
        torch.compile(divided(model, images, *SLOWER), dynamic=False)(images)

    assert [each.shape[1] for each in served] == [3, 8]


def test_what_follows_a_convolution_is_computed_along_with_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()).eval()
    images = a_batch().contiguous(memory_format=torch.channels_last)
    model = model.to(memory_format=torch.channels_last)
    patched = pickle.loads(pickle.dumps(divided(model, images, seen("0", Verdict.SLOWER))))
    found = []
    for each in (model, patched):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        with torch.no_grad(), FREEZING:
            result = torch.compile(each, dynamic=False)(images)
        seen_by = torch._dynamo.utils.counters["inductor"]
        found.append((seen_by["binary_folding_conv"], seen_by["mkldnn_unary_fusion_matcher_count"]))
        torch.testing.assert_close(result, model(images), rtol=1e-5, atol=1e-5)

    assert found[0] == found[1]
    assert min(found[0]) > 0


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


def _packed_filters() -> int:
    """How many packed filters the graphs hold that were compiled in this test."""
    return int(torch._dynamo.utils.counters["inductor"]["mkldnn_conv_weight_pack_matcher_count"])


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
    assert _packed_filters() == 0  # nor in the unpatched model
