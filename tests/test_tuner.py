"""From a model and a limit to a patched model, on this machine."""

import contextlib
import copy
import dataclasses
import math
import pickle
import sqlite3
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import mucudnn
from mucudnn.choices import Mode, Policy
from mucudnn.errors import (
    BackendError,
    InfeasibleError,
    NothingToTuneError,
    OptionError,
    PlanError,
    SampleError,
    SizeError,
    StoreError,
    StoreWarning,
    UntunedWarning,
)
from mucudnn.evidence import CallEvidence
from mucudnn.examining import passes
from mucudnn.intervals import Estimate, Verdict
from mucudnn.patching.applying import is_armed, plan_of
from mucudnn.plan import Plan
from mucudnn.problem import ConvOp
from mucudnn.store.memory import MemoryStore
from mucudnn.store.sqlite import SqliteStore
from mucudnn.tuning.run import Tuning
from tests.models import Listener, a_batch, a_chain, on_one_thread
from tests.operands import a_convolution

LIMIT = "1MiB"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that knows all about `a_chain` on `a_batch` in training, under `LIMIT`, on this machine."""
    path = tmp_path_factory.mktemp("known") / "profiles.sqlite3"
    with on_one_thread():
        mucudnn.tune(a_chain(), a_batch(), LIMIT, store=path, progress=False)
    return path


def test_optimize_returns_the_same_model_patched(known: Path) -> None:
    model = a_chain()

    optimised = mucudnn.optimize(model, LIMIT, a_batch(), store=known, progress=False)

    assert optimised is model
    assert [str(site) for site in plan_of(model).sites] == [
        "0 fprop",
        "0 wgrad",
        "3 fprop",
        "3 dgrad",
        "3 wgrad",
    ]


def test_an_optimised_model_computes_as_before(known: Path) -> None:
    model = a_chain()
    twin = copy.deepcopy(model)

    result = mucudnn.optimize(model, LIMIT, a_batch(), store=known, progress=False)(a_batch())

    # Winograd's bound in float32, on numbers of which none is much above one.
    torch.testing.assert_close(result, twin(a_batch()), rtol=1e-5, atol=1e-5)


def test_tune_leaves_the_model_untouched(known: Path) -> None:
    model = a_chain()
    before = [dict(module.__dict__) for module in model.modules()]

    mucudnn.tune(model, a_batch(), LIMIT, store=known, progress=False)

    assert [dict(module.__dict__) for module in model.modules()] == before


def test_tune_leaves_a_patched_model_patched(known: Path) -> None:
    model = mucudnn.optimize(a_chain(), LIMIT, a_batch(), store=known, progress=False)
    before = [dict(module.__dict__) for module in model.modules()]

    mucudnn.tune(model, a_batch(), LIMIT, store=known, progress=False)

    assert [dict(module.__dict__) for module in model.modules()] == before


def test_a_plan_holds_what_it_was_made_for(known: Path) -> None:
    plan = mucudnn.tune(a_chain(), a_batch(), LIMIT, store=known, progress=False)

    plan.check()
    assert (plan.mode, plan.policy, plan.limit_bytes) == (Mode.REUSE, Policy.POWER_OF_TWO, 2**20)
    assert (plan.environment.backend, plan.version) == ("cpu", mucudnn.__version__)
    assert all(each.evidence is not None and each.candidates for each in plan.assignments)


def test_a_second_run_measures_nothing_and_makes_the_same_plan_byte_for_byte(known: Path) -> None:
    first, second = Listener(), Listener()

    plans = [
        mucudnn.tune(a_chain(), a_batch(), LIMIT, store=known, progress=listener)
        for listener in (first, second)
    ]

    assert (first.measured, second.measured) == (0, 0)
    assert plans[0].to_text() == plans[1].to_text()


def test_a_first_run_makes_the_plan_that_later_runs_make(tmp_path: Path) -> None:
    listener = Listener()
    options: dict[str, Any] = {"store": tmp_path / "store", "policy": "undivided"}

    first = mucudnn.tune(a_chain().eval(), a_batch(), LIMIT, progress=listener, **options)
    second = mucudnn.tune(a_chain().eval(), a_batch(), LIMIT, progress=False, **options)

    assert listener.measured
    assert first.to_text() == second.to_text()


def test_again_measures_anew_what_the_store_knows(tmp_path: Path) -> None:
    listeners = [Listener() for _ in range(3)]

    measured = []
    for listener, again in zip(listeners, (False, True, False), strict=True):
        mucudnn.tune(
            nn.Conv2d(3, 4, 3).eval(), a_batch(), LIMIT, policy="undivided", store=tmp_path / "store",
            again=again, progress=listener,
        )  # fmt: skip
        measured.append(listener.measured)

    assert (bool(measured[0]), bool(measured[1]), measured[2]) == (True, True, 0)


def test_equal_layers_that_are_met_one_by_one_are_measured_anew_once(tmp_path: Path) -> None:
    listener, measured = Listener(), []
    options: dict[str, Any] = {"policy": "undivided", "store": tmp_path / "store", "progress": listener}
    for _ in range(2):
        learn = mucudnn.autotune(LIMIT, again=True, **options)._learn
        for _ in range(2):
            learn(torch.device("cpu"), "conv", 0, a_convolution(batch=8), (ConvOp.FPROP,))
            measured.append(bool(listener.measured))

    assert measured == [True, False, True, False]


def test_a_recording_cannot_be_measured_again() -> None:
    with pytest.raises(OptionError, match="again must come with a backend that measures, but got 'replay:x'"):
        mucudnn.tune(a_chain(), a_batch(), LIMIT, backend="replay:x", again=True)


def test_the_default_store_is_used_without_another(store_path: Path) -> None:
    mucudnn.tune(a_chain().eval(), a_batch(), LIMIT, policy="undivided", progress=False)

    assert store_path.exists()


def test_a_saved_plan_is_loaded_and_applied(known: Path, tmp_path: Path) -> None:
    plan = mucudnn.tune(a_chain(), a_batch(), LIMIT, store=known, progress=False)
    plan.save(tmp_path / "plan.json")
    model = a_chain()

    mucudnn.apply(model, Plan.load(tmp_path / "plan.json"))

    assert mucudnn.plan_of(model) == plan


def test_without_a_sample_the_first_call_is_one(known: Path) -> None:
    model = mucudnn.optimize(a_chain(), LIMIT, store=known, progress=False)
    twin = copy.deepcopy(mucudnn.restore(copy.deepcopy(model)))
    expected = mucudnn.tune(a_chain(), a_batch(), LIMIT, store=known, progress=False)

    result = model(a_batch())

    assert plan_of(model) == expected
    torch.testing.assert_close(result, twin(a_batch()), rtol=1e-5, atol=1e-5)  # Winograd's bound


@pytest.mark.parametrize(
    "way", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_an_armed_model_that_is_validated_before_it_is_trained_says_that_it_is_tuned_for_that(
    way: Callable[[nn.Module], nn.Module], known: Path
) -> None:
    model = way(mucudnn.optimize(a_chain(), LIMIT, store=known, progress=False)).eval()

    with pytest.warns(
        UntunedWarning, match="in training mode when it was armed, but its first call came in eval"
    ):
        model(a_batch())

    assert {site.op for site in plan_of(model).sites} == {ConvOp.FPROP}


@pytest.mark.parametrize(("is_training", "ops"), [(True, "fprop"), (False, "auto")])
def test_an_armed_model_that_is_tuned_for_what_was_asked_does_not_warn(
    *, is_training: bool, ops: str, known: Path
) -> None:
    model = a_chain().train(is_training)
    mucudnn.optimize(model, LIMIT, ops=ops, store=known, progress=False)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UntunedWarning)
        model.eval()(a_batch())


def test_an_armed_model_counts_the_first_batch_once(known: Path) -> None:
    model = mucudnn.optimize(a_chain(), LIMIT, store=known, progress=False)

    model(a_batch())

    assert model.get_buffer("1.num_batches_tracked").item() == 1


def test_an_armed_model_is_tuned_once(known: Path) -> None:
    listener = Listener()
    model = mucudnn.optimize(a_chain(), LIMIT, store=known, progress=listener)
    model(a_batch())
    steps = len(listener.steps)

    model(a_batch())

    assert len(listener.steps) == steps


def test_an_armed_model_leaves_arguments_that_it_rejects_to_its_own_error_and_stays_armed(
    known: Path,
) -> None:
    model = mucudnn.optimize(a_chain(), LIMIT, store=known, progress=False)
    with pytest.raises(RuntimeError, match=r"expected input.* to have 3 channels") as raised:
        model(a_batch(channels=2))
    assert not isinstance(raised.value, mucudnn.errors.MucudnnError)

    model(a_batch())

    assert len(plan_of(model).sites) == 5


class Watchful(nn.Module):
    """Refuses to run while somebody watches its convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, image: Tensor) -> Tensor:
        if "_conv_forward" in self.conv.__dict__:
            raise RuntimeError("who is there?")
        return self.conv(image)


def test_an_armed_model_that_can_never_be_examined_says_so_once(tmp_path: Path) -> None:
    model = mucudnn.optimize(Watchful(), LIMIT, store=tmp_path / "store", progress=False)
    model(a_batch())  # it might have been rejected

    with pytest.warns(UntunedWarning, match="runs as before, untuned.*who is there") as told:
        results = [model(a_batch()) for _ in range(3)]

    assert len(told) == 1
    assert results[0].shape == (8, 4, 4, 4)


def test_an_armed_model_whose_first_call_has_nothing_to_tune_warns_once_and_runs_as_before() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, dtype=torch.complex64))
    twin = copy.deepcopy(model)
    before = [dict(module.__dict__) for module in model.modules()]
    mucudnn.optimize(model, LIMIT, progress=False)
    images = a_batch().to(torch.complex64)

    with pytest.warns(
        UntunedWarning, match="runs as before, untuned.*0: complex64 has PyTorch's own"
    ) as told:
        results = [model(images), model(images)]
    expected = [twin(images), twin(images)]

    assert len(told) == 1
    assert all(map(torch.equal, results, expected))
    assert [module.__dict__.keys() for module in model.modules()] == [each.keys() for each in before]
    assert not model._forward_pre_hooks


def test_an_armed_model_that_nothing_fits_raises_and_stays_armed(tmp_path: Path) -> None:
    model, images = _too_large_for_nothing()
    mucudnn.optimize(model, 0, store=tmp_path / "store", progress=False)

    for _ in range(2):
        with pytest.raises(InfeasibleError, match="fits the workspace limit of 0 bytes"):
            model(images)


def test_an_armed_model_takes_arguments_by_name(known: Path) -> None:
    model = mucudnn.optimize(a_chain(), LIMIT, store=known, progress=False)

    model(input=a_batch())

    assert len(plan_of(model).sites) == 5


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_an_armed_model_tunes_itself(known: Path, way: Callable[[nn.Module], nn.Module]) -> None:
    model = mucudnn.optimize(a_chain(), LIMIT, store=known, progress=False)

    copied = way(model)
    copied(a_batch())

    assert len(plan_of(copied).sites) == 5
    with pytest.raises(PlanError, match="it still waits for its first call"):
        plan_of(model)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_model_that_is_armed_with_an_open_store_can_be_copied(
    known: Path, way: Callable[[nn.Module], nn.Module]
) -> None:
    with SqliteStore(known) as store:
        listener = Listener()
        copied = way(mucudnn.optimize(a_chain(), LIMIT, store=store, progress=False))

        copied(a_batch())

        mucudnn.tune(a_chain(), a_batch(), LIMIT, store=store, progress=listener)
    assert len(plan_of(copied).sites) == 5
    assert listener.measured == 0


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_model_can_be_copied_whose_progress_cannot_and_the_copy_does_not_tell_it(
    known: Path, way: Callable[[nn.Module], nn.Module], *, dynamic: bool
) -> None:
    listener = Listener()
    listener.__dict__["lock"] = threading.Lock()
    model = mucudnn.optimize(a_chain(), LIMIT, store=known, progress=listener, dynamic=dynamic)

    armed = way(model)
    armed(a_batch())
    assert listener.steps == []
    model(a_batch())

    assert len(plan_of(way(model)).sites) == len(plan_of(armed).sites) == 5
    assert listener.steps


@pytest.mark.parametrize("store", ["profiles.sqlite3", None])
def test_a_store_stays_where_it_is_when_the_current_folder_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str | None
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    monkeypatch.setenv("MUCUDNN_STORE", "profiles.sqlite3")
    monkeypatch.chdir(before)
    model = mucudnn.optimize(
        nn.Conv2d(3, 4, 3).eval(), LIMIT, policy="undivided", store=store, progress=False, dynamic=True
    )

    monkeypatch.chdir(after)
    for batch in (a_batch(), a_batch(size=9)):
        model(batch)

    assert [path.name for path in before.iterdir()] == ["profiles.sqlite3"]
    assert list(after.iterdir()) == []


@pytest.mark.usefixtures("one_thread")
def test_threads_that_call_an_armed_model_at_once_wait_until_it_is_tuned(known: Path) -> None:
    model = a_chain()
    expected = copy.deepcopy(model)(a_batch())
    listener, begun = Listener(), threading.Barrier(4)
    mucudnn.optimize(model, LIMIT, store=known, progress=listener)

    def call() -> Tensor:
        begun.wait()
        return model(a_batch())

    with ThreadPoolExecutor(4) as pool:
        results = [future.result() for future in [pool.submit(call) for _ in range(4)]]

    assert [type(result) for result in results] == [Tensor] * 4
    for result in results:
        torch.testing.assert_close(result, expected)
    assert sum(what.startswith("profiling") for what, _ in listener.steps) == 5  # by one of them
    plan_of(model)


@pytest.mark.usefixtures("one_thread")
def test_threads_that_examine_one_model_take_turns(known: Path) -> None:
    model, begun = a_chain(), threading.Barrier(3)

    def tune() -> str:
        begun.wait()
        return mucudnn.tune(model, a_batch(), LIMIT, store=known, progress=False).to_text()

    with ThreadPoolExecutor(3) as pool:
        plans = {future.result(120) for future in [pool.submit(tune) for _ in range(3)]}

    assert len(plans) == 1


@pytest.mark.usefixtures("one_thread")
def test_an_armed_model_may_be_tuned_and_stays_armed(known: Path) -> None:
    model = mucudnn.optimize(a_chain(), LIMIT, store=known, progress=False)

    mucudnn.tune(model, a_batch(), LIMIT, store=known, progress=False)
    with pytest.raises(PlanError, match="still waits for its first call"):
        plan_of(model)
    model(a_batch())

    assert len(plan_of(model).sites) == 5


def test_a_model_that_calls_itself_in_a_thread_is_examined_all_the_same(
    known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, image: Tensor, depth: int = 1) -> Tensor:
            if depth:
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(self, torch.zeros(2, 3, 8, 8), 0).result()
            return self.convolution(image)

    monkeypatch.setattr(passes, "_PATIENCE_S", 0.1)

    plan = mucudnn.tune(Recursive().eval(), a_batch(), LIMIT, policy="undivided", store=known, progress=False)

    assert plan.sites


@pytest.mark.usefixtures("one_thread")
def test_whoever_calls_a_model_while_it_is_examined_waits(known: Path) -> None:
    class Slow(nn.Conv2d):
        def forward(self, image: Tensor) -> Tensor:
            if is_examined := threading.current_thread() is threading.main_thread():
                inside.set()
                time.sleep(0.2)
            order.append("examined" if is_examined else "served")
            return super().forward(image)

    inside, order = threading.Event(), []
    model = nn.Sequential(Slow(3, 4, 3)).eval()

    def serve() -> Tensor:
        assert inside.wait(60)
        return model(a_batch())

    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve)
        with contextlib.suppress(NothingToTuneError):  # the class computes something of its own
            mucudnn.tune(model, a_batch(), LIMIT, store=known, progress=False)
        assert type(served.result()) is Tensor

    assert order == ["examined", "served"]
    assert not model._forward_pre_hooks


def test_restore_disarms_and_leaves_nothing_behind() -> None:
    model = a_chain()
    before = [copy.copy(module.__dict__) for module in model.modules()]

    mucudnn.restore(mucudnn.optimize(model, LIMIT))
    model(a_batch())

    assert [module.__dict__ for module in model.modules()] == before


def test_an_armed_model_refuses_wrong_options_at_once() -> None:
    with pytest.raises(OptionError, match="mode must be one of 'reuse', 'sharing', but got 'both'"):
        mucudnn.optimize(a_chain(), LIMIT, mode="both")


@pytest.mark.parametrize("mode", ["reuse", "sharing"])
@pytest.mark.parametrize("policy", ["undivided", "power_of_two", "all"])
def test_every_mode_and_policy_makes_a_plan_within_the_limit(known: Path, mode: str, policy: str) -> None:
    model = a_chain().eval()

    plan = mucudnn.tune(model, a_batch(), LIMIT, mode=mode, policy=policy, store=known, progress=False)

    plan.check()
    assert (plan.mode, plan.policy) == (mode, policy)
    sizes = {part.batch for division in plan.sites.values() for part in division.parts}
    assert sizes <= set(Policy(policy).sizes(8))


@pytest.mark.parametrize("limit", ["1MiB", "1024KiB", 2**20])
def test_a_limit_may_be_bytes_or_have_a_unit(known: Path, limit: int | str) -> None:
    assert mucudnn.tune(a_chain(), a_batch(), limit, store=known, progress=False).limit_bytes == 2**20


@pytest.mark.parametrize("limit", ["64", "-1MiB", -1, "lots", 1.5])
def test_a_limit_that_cannot_be_read_is_refused(limit: Any) -> None:
    with pytest.raises(SizeError, match="must"):
        mucudnn.optimize(a_chain(), limit, a_batch())


WRONG_OPTIONS = pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"mode": "both"}, "mode must be one of 'reuse', 'sharing', but got 'both'"),
        ({"policy": "some"}, "policy must be one of 'undivided', 'power_of_two', 'all', but got 'some'"),
        ({"search": "all"}, "search must be one of 'heuristic', 'exhaustive', but got 'all'"),
        ({"max_error": -1e-6}, "max_error must be None or a number from 0 on, such as 2e-6, but got -1e-06"),
        ({"max_error": math.nan}, "max_error must be None or a number from 0 on, such as 2e-6, but got nan"),
        ({"max_error": "2e-6"}, "max_error must be None or a number .*, but got '2e-6'"),
        ({"max_error": True}, "max_error must be None or a number .*, but got True"),
        ({"ops": ["forward"]}, "ops must be 'auto' or some of 'fprop', 'dgrad', 'wgrad'"),
        ({"ops": "bogus"}, "ops must be 'auto' or some of 'fprop', 'dgrad', 'wgrad', but got 'bogus'"),
        ({"ops": None}, "ops must be 'auto' or some of 'fprop', 'dgrad', 'wgrad', but got None"),
        ({"ops": 5}, "ops must be 'auto' or some of 'fprop', 'dgrad', 'wgrad', but got 5"),
        ({"backend": "abacus"}, "backend must be one of 'auto', .*or 'replay:FILE', but got 'abacus'"),
        ({"backend": None}, "backend must be one of 'auto', .*or 'replay:FILE', but got None"),
        ({"backend": []}, r"backend must be one of 'auto', .*or 'replay:FILE', but got \[\]"),
        ({"backend": "replay:"}, "backend must be one of 'auto', .*or 'replay:FILE', but got 'replay:'"),
        ({"again": "yes"}, "again must be True or False, but got 'yes'"),
        ({"store": 5}, "store must be a path, a Store or None, but got 5"),
        ({"store": MemoryStore}, r"or None, but got the class MemoryStore, not an instance\.$"),
        ({"progress": "x"}, "progress must be True, False, None or a Progress, but got 'x'"),
        ({"progress": Listener}, r"or a Progress, but got the class Listener, not an instance\.$"),
    ],
)


@WRONG_OPTIONS
def test_a_wrong_option_is_answered_with_the_choices(option: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        mucudnn.tune(a_chain(), a_batch(), LIMIT, **option)


@WRONG_OPTIONS
def test_a_wrong_option_does_not_arm_a_model(option: dict[str, Any], message: str) -> None:
    model = a_chain()

    with pytest.raises(OptionError, match=message):
        mucudnn.optimize(model, LIMIT, **option)

    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("auto", "Convolutions can be tuned on cpu.*, but the model lies on meta"),
        ("cpu", "The backend 'cpu' tunes models on cpu, but the model lies on meta"),
    ],
)
def test_a_model_that_lies_where_the_backend_does_not_tune_is_refused(backend: str, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        mucudnn.tune(a_chain().to("meta"), a_batch().to("meta"), LIMIT, backend=backend)


def test_a_model_that_needs_none_of_the_ops_asked_for_is_refused() -> None:
    with pytest.raises(NothingToTuneError, match="none of it can: the model itself: it needs no dgrad"):
        mucudnn.tune(nn.Conv2d(3, 4, 3), a_batch(), LIMIT, ops="dgrad")


def test_a_convolution_that_needs_none_of_the_ops_asked_for_is_listed_in_the_plan(tmp_path: Path) -> None:
    plan = mucudnn.tune(
        a_chain(), a_batch(), LIMIT, ops="dgrad", policy="undivided", store=tmp_path / "s", progress=False
    )

    assert [str(site) for site in plan.sites] == ["3 dgrad"]
    assert plan.untouched == (("0", "it needs no dgrad"),)


def test_a_convolution_that_others_have_patched_stays_patched_by_them(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)).eval()

    def theirs(image: Tensor, *parameters: Tensor | None) -> Tensor:
        return image

    model[1].__dict__["_conv_forward"] = theirs

    mucudnn.optimize(model, LIMIT, a_batch(), policy="undivided", store=tmp_path / "store", progress=False)

    assert plan_of(model).untouched == (("1", "its _conv_forward has been replaced by something else"),)
    assert model[1].__dict__["_conv_forward"] is theirs


def test_a_sample_that_the_model_rejects_leaves_it_unpatched() -> None:
    model = a_chain()
    before = [dict(module.__dict__) for module in model.modules()]

    with pytest.raises(SampleError, match="must run on the sample"):
        mucudnn.optimize(model, LIMIT, a_batch(channels=2), progress=False)

    assert [dict(module.__dict__) for module in model.modules()] == before


def _too_large_for_nothing() -> tuple[nn.Module, Tensor]:
    """A model and a sample for which every algorithm needs some workspace; smaller ones hide in a page.

    In float32 PyTorch's own needs some on some processors only.
    """
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1)).eval().double(), a_batch(size=48).double()


def test_a_limit_that_nothing_fits_names_the_site_the_limit_and_one_that_would_do(
    tmp_path: Path,
) -> None:
    model, images = _too_large_for_nothing()
    with pytest.raises(InfeasibleError, match=r"0 fprop'? fits the workspace limit of 0 bytes") as raised:
        mucudnn.tune(model, images, 0, store=tmp_path / "store", progress=False)
    least = raised.value.least_bytes
    assert least

    plan = mucudnn.tune(model, images, least, store=tmp_path / "store", progress=False)

    assert plan.workspace_bytes <= least


def test_where_pytorchs_own_needs_more_one_byte_less_than_the_limit_named_is_too_little(
    tmp_path: Path,
) -> None:
    model, images = _too_large_for_nothing()
    with pytest.raises(InfeasibleError, match="fits the workspace limit of 0 bytes") as raised:
        mucudnn.tune(model, images, 0, store=tmp_path / "store", progress=False)
    least = raised.value.least_bytes
    assert least

    with pytest.raises(InfeasibleError, match=f"a limit of {least} bytes .* may do"):
        mucudnn.tune(model, images, least - 1, store=tmp_path / "store", progress=False)


def test_without_workspace_pytorchs_own_may_still_run(tmp_path: Path) -> None:
    # PyTorch's own runs a 1x1 convolution in doubles as a matrix product, in place.
    model = nn.Conv2d(3, 4, 1).double().eval()

    plan = mucudnn.tune(
        model, a_batch(dtype=torch.float64), 0, policy="undivided", store=tmp_path / "store", progress=False
    )

    assert plan.workspace_bytes == 0


def test_a_damaged_store_is_refused_by_name_and_left_as_it_is(tmp_path: Path) -> None:
    store = tmp_path / "store.sqlite3"
    store.write_bytes(b"this was a store once")

    with pytest.raises(StoreError, match=r"store\.sqlite3 .*file is not a database"):
        mucudnn.tune(a_chain(), a_batch(), LIMIT, store=store, progress=False)

    assert store.read_bytes() == b"this was a store once"


def test_a_store_that_cannot_be_written_is_read_and_the_rest_is_kept_in_memory(
    known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whoever runs as root writes everywhere, so that the disk's refusal has to be made up.
    expected = mucudnn.tune(a_chain(), a_batch(), LIMIT, store=known, progress=False)
    connect = sqlite3.connect

    def refuse_writing(address: str, **options: Any) -> sqlite3.Connection:
        if "mode=ro" not in address:
            raise PermissionError(30, "Read-only file system")
        return connect(address, **options)

    monkeypatch.setattr(sqlite3, "connect", refuse_writing)
    listener = Listener()
    with pytest.warns(StoreWarning, match=r"not kept: .*Read-only file system") as told:
        plan = mucudnn.tune(a_chain(), a_batch(), LIMIT, store=known, progress=listener)

    assert [warning.filename for warning in told] == [__file__]
    assert plan.to_text() == expected.to_text()
    assert listener.measured == 0


def test_a_folder_that_cannot_be_made_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    with pytest.warns(StoreWarning, match="What is measured now is not kept"):
        plan = mucudnn.tune(
            nn.Conv2d(3, 4, 3).eval(),
            a_batch(),
            LIMIT,
            policy="undivided",
            store=tmp_path / "file" / "store",
            progress=False,
        )

    assert len(plan.sites) == 1


def test_a_store_that_was_passed_in_stays_open(known: Path) -> None:
    with SqliteStore(known) as store:
        mucudnn.tune(a_chain(), a_batch(), LIMIT, store=store, progress=False)

        assert store.count() > 0


@pytest.mark.parametrize(
    ("model", "got"),
    [(len, "builtin_function_or_method"), (nn.Conv2d, "the class Conv2d"), (3, "int"), ("resnet18", "str")],
)
def test_what_is_no_model_is_refused_in_a_sentence(model: Any, got: str, known: Path) -> None:
    message = f"^A model must be a torch.nn.Module, but got {got}.$"
    calls: list[Callable[[], object]] = [
        lambda: mucudnn.optimize(model, LIMIT, a_batch()),
        lambda: mucudnn.optimize(model, LIMIT),
        lambda: mucudnn.tune(model, a_batch(), LIMIT),
        lambda: mucudnn.apply(model, mucudnn.tune(a_chain(), a_batch(), LIMIT, store=known)),
        lambda: mucudnn.restore(model),
        lambda: plan_of(model),
    ]

    for call in calls:
        with pytest.raises(OptionError, match=message):
            call()


def test_a_plan_s_file_is_not_taken_for_the_plan() -> None:
    with pytest.raises(OptionError, match=r"but got 'plan.json'; Plan.load\(path\) reads one from a file"):
        mucudnn.apply(a_chain(), "plan.json")  # type: ignore[arg-type]  # that is the point


def test_a_plan_s_text_is_not_shown_as_a_whole() -> None:
    with pytest.raises(OptionError, match=r"must be a Plan, but got '\{.* \.\.\.; Plan.load") as raised:
        mucudnn.apply(a_chain(), '{"schema": 1}' * 1000)  # type: ignore[arg-type]  # that is the point

    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("sample", ["8x3x6x6", a_batch().numpy()])
def test_a_sample_that_no_model_computes_with_is_refused(sample: object) -> None:
    with pytest.raises(SampleError, match="must be a tensor, a tuple of arguments or a dict of keyword"):
        mucudnn.tune(a_chain(), sample, LIMIT)


def test_a_sample_in_the_place_of_the_limit_is_told_in_a_line() -> None:
    with pytest.raises(SizeError) as raised:
        mucudnn.optimize(a_chain(), a_batch(), LIMIT)  # type: ignore[arg-type]  # that is the point

    assert len(str(raised.value)) < 160


def test_progress_is_told_from_the_beginning_to_the_end(known: Path) -> None:
    listener = Listener()

    mucudnn.tune(a_chain(), a_batch(), LIMIT, store=known, progress=listener)

    told = [what.split()[0] for what, _ in listener.steps]
    done = [done for _, done in listener.steps]
    assert told == ["profiling"] * 5 + ["confirming"] * 5
    assert done == sorted(done)
    assert done[0] == 0
    assert listener.work is not None
    assert done[-1] < listener.work
    assert listener.measured == 0


def test_a_bar_is_drawn_on_standard_error_if_that_is_a_terminal(
    known: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich looks at more than that

    mucudnn.tune(a_chain(), a_batch(), LIMIT, store=known)

    told = capsys.readouterr()
    assert told.out == ""
    assert "confirming" in told.err


def test_nothing_is_drawn_where_nobody_watches(known: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mucudnn.tune(a_chain(), a_batch(), LIMIT, store=known)

    assert capsys.readouterr() == ("", "")


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


def test_an_armed_model_may_be_dynamic_and_pickled(tmp_path: Path) -> None:
    model = a_chain()
    mucudnn.optimize(model, LIMIT, store=tmp_path / "store", progress=False, dynamic=True)
    model(a_batch(2))
    other = pickle.loads(pickle.dumps(model))

    with warnings.catch_warnings():
        warnings.simplefilter("error", UntunedWarning)
        torch.testing.assert_close(other(a_batch(5)), model(a_batch(5)), rtol=1e-3, atol=1e-3)


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


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_an_armed_model_may_be_called_first_inside_of_a_checkpoint(
    tmp_path: Path, use_reentrant: bool
) -> None:
    model = a_chain()
    twin = copy.deepcopy(model)
    mucudnn.optimize(model, LIMIT, store=tmp_path / "s", policy="undivided", progress=False)
    images = a_batch().requires_grad_()

    for each in (model, twin):
        checkpoint(each, images, use_reentrant=use_reentrant).square().sum().backward()

    assert mucudnn.plan_of(model) is not None
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def _mapped(model: nn.Module) -> Tensor:
    return torch.vmap(model)(a_batch().unsqueeze(0))[0]


def _counted(model: nn.Module) -> Tensor:
    with FlopCounterMode(display=False) as counted:
        result: Tensor = model(a_batch())
    return result.new_tensor(counted.get_total_flops())


def _traced(model: nn.Module) -> Tensor:
    result: Tensor = torch.jit.trace(model, a_batch(), check_trace=False)(a_batch())
    return result


def _exported(model: nn.Module) -> Tensor:
    result: Tensor = torch.export.export(model, (a_batch(),)).module()(a_batch())
    return result


@pytest.mark.parametrize("way", [_mapped, _counted, _traced, _exported])
@pytest.mark.filterwarnings("ignore:.torch.jit.")
def test_an_armed_model_that_is_transformed_or_watched_runs_as_it_comes_and_stays_armed(
    tmp_path: Path, way: Callable[[nn.Module], Tensor]
) -> None:
    model = a_chain().eval()
    twin = copy.deepcopy(model)
    mucudnn.optimize(model, LIMIT, store=tmp_path / "s", policy="undivided", progress=False)

    assert torch.equal(way(model), way(twin))
    assert is_armed(model)

    model(a_batch())
    assert not is_armed(model)


def test_an_armed_model_that_is_only_ever_watched_says_that_it_is_not_tuned(tmp_path: Path) -> None:
    model = a_chain().eval()
    mucudnn.optimize(model, LIMIT, store=tmp_path / "s", policy="undivided", progress=False)

    _counted(model)
    with pytest.warns(UntunedWarning, match="is called in a FlopCounterMode; the first call elsewhere tunes"):
        _counted(model)
    _counted(model)

    assert is_armed(model)


def test_an_armed_model_that_is_compiled_is_not_tuned_by_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mucudnn import tuner

    seen = []
    planned = tuner._plan

    def plan(*args: Any) -> Any:
        seen.append(torch.compiler.is_compiling())
        return planned(*args)

    monkeypatch.setattr(tuner, "_plan", plan)
    model = a_chain()
    twin = copy.deepcopy(model)
    mucudnn.optimize(model, LIMIT, store=tmp_path / "s", policy="undivided", progress=False)

    compiled = torch.compile(model, backend="eager")

    torch.testing.assert_close(compiled(a_batch()), twin(a_batch()), rtol=1e-4, atol=1e-4)
    assert seen == [False]
    assert mucudnn.plan_of(model) is not None


def test_an_armed_model_says_what_to_do_where_a_graph_must_hold_all_of_it(tmp_path: Path) -> None:
    from torch._dynamo.exc import Unsupported  # which takes a second to import

    torch.compiler.reset()  # it may have been told in another test to leave such calls alone
    model = mucudnn.optimize(a_chain(), LIMIT, store=tmp_path / "s", policy="undivided", progress=False)
    compiled = torch.compile(model, backend="eager", fullgraph=True)

    with pytest.raises(
        Unsupported, match=r"armed by mucudnn\.optimize.*: call it once before it is compiled"
    ):
        compiled(a_batch())
    model(a_batch())

    assert compiled(a_batch()).shape == model(a_batch()).shape


@pytest.mark.filterwarnings("ignore:.torch.jit.")
@pytest.mark.parametrize("arguments", [(), (a_batch(),)], ids=["armed", "tuned"])
def test_a_model_of_torchscript_has_nothing_to_tune(arguments: tuple[Tensor, ...]) -> None:
    model = torch.jit.script(a_chain())

    with pytest.raises(NothingToTuneError, match="but it is scripted or traced, and such modules run as"):
        mucudnn.optimize(model, LIMIT, *arguments)


@pytest.mark.usefixtures("others_win")
def test_autotune_around_a_checkpoint_does_not_disturb_it(tmp_path: Path) -> None:
    model, images = Checkpointed(), a_batch(3)
    twin = copy.deepcopy(model)

    with mucudnn.autotune(LIMIT, store=tmp_path / "s", policy="undivided", progress=False):
        model(images).square().sum().backward()
    twin(images).square().sum().backward()

    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
