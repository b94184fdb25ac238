"""Armed models, which are tuned by the first call that reaches them: once, and whoever calls."""

import contextlib
import copy
import pickle
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
from mucudnn.backends.cpu.backend import CpuBackend
from mucudnn.errors import InfeasibleError, NothingToTuneError, OptionError, PlanError, UntunedWarning
from mucudnn.examining import passes
from mucudnn.patching.applying import is_armed, plan_of
from mucudnn.problem import ConvOp
from mucudnn.store.sqlite import SqliteStore
from tests.divided import is_divided
from tests.models import Listener, a_batch, a_chain, too_large_for_nothing
from tests.tuned import LIMIT, a_known_store

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_known_store(tmp_path_factory.mktemp("known"))


def test_without_a_sample_the_first_call_is_one(known: Path) -> None:
    model = mucudnn.optimize(a_chain(), LIMIT, store=known, progress=False)
    twin = copy.deepcopy(mucudnn.restore(copy.deepcopy(model)))
    expected = mucudnn.tune(a_chain(), a_batch(), LIMIT, store=known, progress=False)

    result = model(a_batch())

    assert plan_of(model) == expected
    torch.testing.assert_close(result, twin(a_batch()), rtol=1e-5, atol=1e-5)  # Winograd's bound


@pytest.mark.parametrize("kind", [list, dict.fromkeys, lambda ops: dict.fromkeys(ops).keys()])
def test_the_ops_are_those_that_were_asked_for_whatever_becomes_of_them(
    kind: Callable[[list[str]], Any], known: Path
) -> None:
    ops = kind(["fprop", "wgrad"])
    model = copy.deepcopy(mucudnn.optimize(a_chain(), LIMIT, ops=ops, store=known, progress=False))
    if isinstance(ops, list):
        ops[:] = ["nonsense"]

    model(a_batch())

    assert {site.op for site in plan_of(model).sites} == {ConvOp.FPROP, ConvOp.WGRAD}


@pytest.mark.parametrize(
    "way", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_an_armed_model_that_is_validated_before_it_is_trained_says_that_it_is_tuned_for_that(
    way: Callable[[nn.Module], nn.Module], known: Path
) -> None:
    model = way(mucudnn.optimize(a_chain(), LIMIT, store=known, progress=False)).eval()

    with pytest.warns(
        UntunedWarning, match="in training mode when optimize got it, but its first call came in eval"
    ):
        model(a_batch())

    assert {site.op for site in plan_of(model).sites} == {ConvOp.FPROP}


def test_what_was_told_so_is_not_told_again_when_it_is_trained(divided_by_hand: None, known: Path) -> None:
    model = mucudnn.optimize(a_chain(), LIMIT, store=known, progress=False).eval()
    with pytest.warns(UntunedWarning, match="but its first call came in eval mode"):
        model(a_batch())

    result = model.train()(a_batch())
    result.sum().backward()  # of which a warning would be an error

    assert is_divided(result)


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
    model, images = too_large_for_nothing()
    mucudnn.optimize(model, 0, store=tmp_path / "store", progress=False)

    for _ in range(2):
        with pytest.raises(InfeasibleError, match="fits the workspace limit of 0 bytes") as raised:
            model(images)
        assert ["mucudnn.restore(model)" in note for note in raised.value.__notes__] == [True]
    mucudnn.restore(model)(images)


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
    with pytest.raises(PlanError, match="it still waits for its first"):
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


def test_threads_that_examine_one_model_take_turns(known: Path) -> None:
    model, begun = a_chain(), threading.Barrier(3)

    def tune() -> str:
        begun.wait()
        return mucudnn.tune(model, a_batch(), LIMIT, store=known, progress=False).to_text()

    with ThreadPoolExecutor(3) as pool:
        plans = {future.result(120) for future in [pool.submit(tune) for _ in range(3)]}

    assert len(plans) == 1


def test_an_armed_model_may_be_tuned_and_stays_armed(known: Path) -> None:
    model = mucudnn.optimize(a_chain(), LIMIT, store=known, progress=False)

    mucudnn.tune(model, a_batch(), LIMIT, store=known, progress=False)
    with pytest.raises(PlanError, match="still waits for its first"):
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


def test_an_armed_model_may_be_dynamic_and_pickled(tmp_path: Path) -> None:
    model = a_chain()
    mucudnn.optimize(model, LIMIT, store=tmp_path / "store", progress=False, dynamic=True)
    model(a_batch(2))
    other = pickle.loads(pickle.dumps(model))

    with warnings.catch_warnings():
        warnings.simplefilter("error", UntunedWarning)
        torch.testing.assert_close(other(a_batch(5)), model(a_batch(5)), rtol=1e-3, atol=1e-3)


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

    assert not is_armed(model)
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


def test_an_armed_model_without_values_is_tuned_once_it_has_some(tmp_path: Path) -> None:
    values = a_chain().eval().state_dict()
    model = a_chain().eval().to("meta")
    mucudnn.optimize(model, LIMIT, store=tmp_path / "s", policy="undivided", progress=False)

    assert model(a_batch().to("meta")).is_meta
    with pytest.warns(UntunedWarning, match="called while it lies on the meta device; the first call else"):
        model(a_batch().to("meta"))
    assert is_armed(model)

    model.to_empty(device="cpu").load_state_dict(values)
    model(a_batch())
    assert not is_armed(model)


def test_an_armed_model_is_not_tuned_while_its_call_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = a_chain().eval()
    mucudnn.optimize(model, LIMIT, store=tmp_path / "s", policy="undivided", progress=False)

    with monkeypatch.context() as capture:
        capture.setattr(CpuBackend, "is_capturing", True)
        model(a_batch())
        with pytest.warns(UntunedWarning, match="called while it is captured in a CUDA graph; the"):
            model(a_batch())
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
    assert not is_armed(model)


def test_an_armed_model_says_what_to_do_where_a_graph_must_hold_all_of_it(tmp_path: Path) -> None:
    from torch._dynamo.exc import Unsupported  # which takes a second to import

    torch.compiler.reset()  # it may have been told in another test to leave such calls alone
    model = mucudnn.optimize(a_chain(), LIMIT, store=tmp_path / "s", policy="undivided", progress=False)
    compiled = torch.compile(model, backend="eager", fullgraph=True)

    with pytest.raises(
        Unsupported, match=r"in its first call: call it once before exporting it or compiling it"
    ):
        compiled(a_batch())
    model(a_batch())

    assert compiled(a_batch()).shape == model(a_batch()).shape
