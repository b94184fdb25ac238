"""Tuning in the midst of a run: shapes that are met later, and what checkpoints compute again."""

import copy
import dataclasses
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mucudnn
from mucudnn.errors import OptionError, UntunedWarning
from mucudnn.evidence import CallEvidence
from mucudnn.intervals import Estimate, Verdict
from mucudnn.patching.applying import plan_of
from mucudnn.plan import Plan
from mucudnn.tuning.run import Tuning
from tests.models import a_batch, a_chain
from tests.tuned import LIMIT

pytestmark = pytest.mark.usefixtures("one_thread")


def test_shapes_that_are_met_later_are_tuned_then(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = a_chain()
    twin = copy.deepcopy(model)
    mucudnn.optimize(model, LIMIT, a_batch(4), store=tmp_path / "store", progress=False, dynamic=True)
    before = plan_of(model)

    for images in (a_batch(8), a_batch(4, size=9), a_batch(2, size=9)):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UntunedWarning)
            result = model(images)
        torch.testing.assert_close(result, twin(images), rtol=1e-3, atol=1e-3)

    plan = plan_of(model)
    assert plan.assignments[: len(before.assignments)] == before.assignments
    assert {(site.path, site.variant) for site in plan.sites} == {
        (path, number) for path in ("0", "3") for number in range(3)
    }
    assert {site.op for site in plan.sites if site.variant} == {site.op for site in before.sites}


def test_what_was_seen_of_calls_that_are_tuned_later_is_in_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tuned = a_chain(), Tuning.plan
    mucudnn.optimize(model, LIMIT, a_batch(4), store=tmp_path / "store", progress=False, dynamic=True)
    once = Estimate(1.0, 0.9, 1.1, 7)

    def seeing_a_call(tuning: Tuning) -> Plan:
        plan = tuned(tuning)
        site = plan.assignments[0].site
        seen = CallEvidence(once, once, once, Verdict.SAME, site.path, site.variant)
        return dataclasses.replace(plan, calls=(seen,))

    monkeypatch.setattr(Tuning, "plan", seeing_a_call)
    before = plan_of(model).calls

    model(a_batch(8))

    found = plan_of(model).calls
    assert found[: len(before)] == before
    assert [(each.path, each.variant) for each in found[len(before) :]] == [("0", 1), ("3", 1)]


def test_what_was_tuned_later_is_saved_and_applied_with_the_rest(tmp_path: Path) -> None:
    model = a_chain()
    mucudnn.optimize(model, LIMIT, a_batch(4), store=tmp_path / "store", progress=False, dynamic=True)
    model(a_batch(8))
    plan_of(model).save(tmp_path / "plan.json")
    other = mucudnn.apply(a_chain(), Plan.load(tmp_path / "plan.json"))

    with warnings.catch_warnings():
        warnings.simplefilter("error", UntunedWarning)
        other(a_batch(8))

    assert plan_of(other) == plan_of(model)


def test_shapes_that_threads_meet_at_once_are_numbered_one_by_one(tmp_path: Path) -> None:
    model = a_chain()
    mucudnn.optimize(
        model, LIMIT, a_batch(4), store=tmp_path / "store", policy="undivided", progress=False, dynamic=True
    )
    met = [a_batch(4, size=size) for size in (9, 10, 9, 11)]
    together = threading.Barrier(len(met))

    def run(images: Tensor) -> None:
        together.wait()
        model(images)

    with ThreadPoolExecutor(len(met)) as pool:
        list(pool.map(run, met))

    plan = plan_of(model)
    plan.check()  # no site stands twice
    assert {site.variant for site in plan.sites} == {0, 1, 2, 3}


def test_what_is_met_later_has_no_share_of_a_total() -> None:
    with pytest.raises(OptionError, match="dynamic must come with mode 'reuse', but got 'sharing'"):
        mucudnn.optimize(a_chain(), LIMIT, mode="sharing", dynamic=True)


def test_dynamic_is_true_or_false() -> None:
    with pytest.raises(OptionError, match="dynamic must be True or False, but got 'no'"):
        mucudnn.optimize(a_chain(), LIMIT, dynamic="no")  # type: ignore[arg-type]


class Checkpointed(nn.Module):
    """Computes its convolution again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.second, self.first(x), use_reentrant=False)
        return result


@pytest.fixture
def others_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is not PyTorch's own counts as faster alone, so that calls are rehearsed."""
    from mucudnn.tuning import run

    def quickest(rivals: Any, *_: Any) -> Any:
        return min(rivals.values(), key=lambda each: "aten" in each.key)

    monkeypatch.setattr(run, "winner", quickest)


@pytest.mark.usefixtures("others_win")
def test_what_is_tuned_inside_of_a_checkpoint_does_not_disturb_it(tmp_path: Path) -> None:
    model = Checkpointed()
    twin = copy.deepcopy(model)
    mucudnn.optimize(
        model, LIMIT, a_batch(2), store=tmp_path / "s", policy="undivided", progress=False, dynamic=True
    )
    images = a_batch(3)

    model(images).square().sum().backward()
    twin(images).square().sum().backward()

    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("others_win")
def test_autotune_around_a_checkpoint_does_not_disturb_it(tmp_path: Path) -> None:
    model, images = Checkpointed(), a_batch(3)
    twin = copy.deepcopy(model)

    with mucudnn.autotune(LIMIT, store=tmp_path / "s", policy="undivided", progress=False):
        model(images).square().sum().backward()
    twin(images).square().sum().backward()

    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
