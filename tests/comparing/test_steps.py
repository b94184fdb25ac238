"""A program's step with a plan and without it, on a clock that its convolutions move themselves."""

import contextlib
import copy
import dataclasses
import itertools
import pickle
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

import mucudnn
from bench.by_hand import a_plan_for
from mucudnn.backends import backend_for
from mucudnn.backends.base import NoNeighbours
from mucudnn.backends.cpu.backend import CpuBackend
from mucudnn.comparing import steps
from mucudnn.comparing.step_comparison import StepComparison
from mucudnn.comparing.steps import _WARMUPS, compared
from mucudnn.division import Division, undivided
from mucudnn.errors import OptionError, PlanError, UntunedWarning
from mucudnn.evidence import Evidence
from mucudnn.intervals import Estimate, Verdict
from mucudnn.patching.applying import patched_modules, unpatched
from mucudnn.patching.routing import Router
from mucudnn.plan import Plan
from mucudnn.problem import ConvOp
from mucudnn.profile import Candidate
from mucudnn.progress import Silence
from mucudnn.timing import Clock
from tests.graphs import DYNAMOS

pytestmark = pytest.mark.usefixtures("one_thread")

IMAGES = torch.randn(4, 4, 6, 6)
ROUNDS = 6


class Ticking(CpuBackend):
    """The processor, with a clock that stands still until it is moved, and ticks whenever it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns, self.ticks = 0, 0

    @property
    def clock(self) -> Clock:
        return self._read

    def _read(self) -> int:
        self.now_ns += self.ticks
        return self.now_ns


class Timed(nn.Conv2d):
    """A convolution that takes so many nanoseconds before it is patched, and so many now."""

    def __init__(self, kernel: int, backend: Ticking) -> None:
        super().__init__(4, 4, kernel)
        self.clock, self.taken = backend, (0, 0)

    def forward(self, image: Tensor) -> Tensor:
        self.clock.now_ns += self.taken["_conv_forward" in self.__dict__]
        return super().forward(image)


class Network(nn.Module):
    """Runs one convolution twice, and another once."""

    def __init__(self, backend: Ticking) -> None:
        super().__init__()
        self.first, self.second = Timed(1, backend), Timed(3, backend)

    def forward(self, image: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(self.first(image)))
        return result


@pytest.fixture
def backend() -> Ticking:
    return Ticking()


@pytest.fixture
def model(backend: Ticking) -> Network:
    """Patched by a plan in which PyTorch's own fits the limit everywhere."""
    model = Network(backend)
    plan = a_plan_for(model, IMAGES)
    seen = Evidence(reference=Estimate(2.0, 1.9, 2.1, 10), chosen=Estimate(1.0, 0.9, 1.1, 10))
    assignments = tuple(dataclasses.replace(each, evidence=seen) for each in plan.assignments)
    mucudnn.apply(model, dataclasses.replace(plan, assignments=assignments))
    return model


def seen_of(model: Network, backend: Ticking, step: Callable[[], object] | None = None) -> StepComparison:
    step = step or (lambda: model(IMAGES).sum().backward())
    return compared(model, step, ROUNDS, progress=False, backend=backend)


def algorithms(plan: Plan, path: str) -> set[str]:
    return {part.algorithm for site, each in plan.sites.items() if site.path == path for part in each.parts}


def test_the_step_and_all_calls_of_each_convolution_in_it_are_timed(model: Network, backend: Ticking) -> None:
    model.first.taken, model.second.taken = (40, 50), (300, 100)

    seen = seen_of(model, backend)

    first, second = seen.layers
    assert (seen.step.before_ns, seen.step.now_ns) == ((380,) * ROUNDS, (200,) * ROUNDS)
    assert (first.path, first.times.before_ns, first.times.now_ns) == (
        "first",
        (80,) * ROUNDS,
        (100,) * ROUNDS,
    )
    assert (second.path, second.times.speedup.median) == ("second", 3)
    assert (seen.step.verdict, seen.slower, seen.unseen) == (Verdict.FASTER, ("first",), ())


def test_what_is_slower_within_the_step_is_pytorchs_own_in_the_settled_plan(
    model: Network, backend: Ticking
) -> None:
    model.first.taken, model.second.taken = (40, 50), (300, 100)

    seen = seen_of(model, backend)

    assert algorithms(seen.settled, "first") == {"cpu:aten"}
    assert algorithms(seen.settled, "second") == algorithms(seen.plan, "second") != {"cpu:aten"}
    mucudnn.apply(model, seen.settled)
    assert [*patched_modules(model)] == ["second"]


def test_the_plan_is_settled_where_nothing_is_slower(model: Network, backend: Ticking) -> None:
    model.first.taken = (50, 50)

    seen = seen_of(model, backend)

    assert seen.settled is seen.plan is mucudnn.plan_of(model)


def counted(model: nn.Module) -> None:
    """Run a step in a mode that sees PyTorch's own convolutions."""
    with FlopCounterMode(display=False):
        model(IMAGES).sum().backward()


@pytest.mark.parametrize(
    "run",
    [
        lambda model: model(IMAGES),  # of a plan for training the gradients never run
        lambda model: model(IMAGES[:3]).sum().backward(),
        lambda model: model(torch.cat([IMAGES, IMAGES])).sum().backward(),
        lambda model: model(IMAGES[0]).sum().backward(),
        counted,
    ],
    ids=["no gradients", "a smaller batch", "a larger batch", "one sample", "in a mode"],
)
def test_what_does_not_run_as_it_was_planned_is_told_of_and_never_taken_back(
    model: Network, backend: Ticking, run: Callable[[Network], object]
) -> None:
    model.first.taken, model.second.taken = (40, 50), (300, 100)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntunedWarning)
        seen = seen_of(model, backend, lambda: run(model))

    assert seen.layers[0].times.verdict is Verdict.SLOWER
    assert (seen.unplanned, seen.slower) == (("first", "second"), ())
    assert seen.settled is seen.plan


@DYNAMOS
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's, too
def test_of_what_runs_in_a_graph_nobody_says_that_it_runs_otherwise(backend: Ticking) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    mucudnn.apply(model, a_plan_for(model, IMAGES))
    model[0].compile(backend="eager")

    seen = compared(model, lambda: model(IMAGES).sum().backward(), ROUNDS, progress=False, backend=backend)

    assert "0" in [layer.path for layer in seen.layers]
    assert seen.unplanned == ()


def test_a_plan_of_forward_passes_alone_runs_as_it_was_planned(model: Network, backend: Ticking) -> None:
    forward = [each for each in mucudnn.plan_of(model).assignments if each.site.op is ConvOp.FPROP]
    plan = dataclasses.replace(mucudnn.plan_of(model), assignments=tuple(forward))
    mucudnn.apply(model, plan)
    model.first.taken = (40, 50)

    seen = seen_of(model, backend, lambda: model(IMAGES))

    assert (seen.unplanned, seen.slower) == ((), ("first",))


ONCE = Estimate(1.0, 0.9, 1.1, 10)


@pytest.mark.parametrize(
    ("algorithm", "evidence"),
    [("cpu:aten", None), ("cpu:im2col", Evidence(reference=ONCE, chosen=ONCE))],
    ids=["by its name", "by its times"],
)
def test_gradients_that_a_plan_leaves_as_they_were_need_not_run(
    model: Network, backend: Ticking, algorithm: str, evidence: Evidence | None
) -> None:
    own = Division((Candidate(algorithm, len(IMAGES), 1.0, 2**20),))
    assignments = tuple(
        each if each.site.op is ConvOp.FPROP else dataclasses.replace(each, division=own, evidence=evidence)
        for each in mucudnn.plan_of(model).assignments
    )
    mucudnn.apply(model, dataclasses.replace(mucudnn.plan_of(model), assignments=assignments))
    model.first.taken = (40, 50)

    seen = seen_of(model, backend, lambda: model(IMAGES))

    assert (seen.unplanned, seen.slower) == ((), ("first",))


def test_a_convolution_that_a_plan_leaves_as_it_was_is_not_missed(model: Network, backend: Ticking) -> None:
    own = undivided("cpu:aten", len(IMAGES))
    assignments = tuple(
        dataclasses.replace(each, division=own) if each.site.path == "second" else each
        for each in mucudnn.plan_of(model).assignments
    )
    mucudnn.apply(model, dataclasses.replace(mucudnn.plan_of(model), assignments=assignments))

    seen = seen_of(model, backend)

    assert [*patched_modules(model)] == ["first"]
    assert (seen.unseen, seen.unpatched) == ((), ())


def test_what_autograd_computes_of_a_convolution_counts(model: Network, backend: Ticking) -> None:
    backend.ticks = 1  # from each look at the clock to the next

    seen = seen_of(model, backend, lambda: model(IMAGES).sum().backward())

    assert [layer.times.now_ns[0] for layer in seen.layers] == [
        4,
        2,
    ]  # two forward passes and their gradients
    assert [layer.times.before_ns[0] for layer in seen.layers] == [4, 2]


def test_a_sample_without_a_batch_counts_likewise(model: Network, backend: Ticking) -> None:
    backend.ticks = 1

    seen = seen_of(model, backend, lambda: model(IMAGES[0]).sum().backward())

    assert [layer.times.now_ns[0] for layer in seen.layers] == [4, 2]


def test_a_pass_that_is_computed_again_counts_each_time(model: Network, backend: Ticking) -> None:
    backend.ticks = 1
    image = IMAGES.clone().requires_grad_()

    seen = seen_of(model, backend, lambda: checkpoint(model, image, use_reentrant=True).sum().backward())

    assert [layer.times.now_ns[0] for layer in seen.layers] == [6, 3]


@pytest.mark.parametrize("stops_early", [True, False])
def test_what_a_node_has_others_compute_again_is_counted_once_and_theirs(
    model: Network, backend: Ticking, *, stops_early: bool
) -> None:
    """Where that stops early, the last pass breaks off: it has saved all that there is to save."""
    model.first.taken = model.second.taken = (100, 100)
    image = IMAGES.clone().requires_grad_()

    def step() -> None:
        with set_checkpoint_early_stop(stops_early):
            result = checkpoint(model, image, use_reentrant=False)
        result.sum().backward()

    seen = seen_of(model, backend, step)

    # The node of the second has both computed again: twice 100 of the first, and 100 of its own.
    assert [layer.times.now_ns[0] for layer in seen.layers] == [400, 200]
    assert seen.step.now_ns[0] == 600


def test_what_hooks_of_others_take_is_not_the_convolutions(model: Network, backend: Ticking) -> None:
    def take(*_: object) -> None:
        backend.now_ns += 1000

    model.second.register_forward_pre_hook(take)
    model.second.register_forward_hook(take)
    model.second.taken = (30, 20)

    assert seen_of(model, backend).layers[1].times.before_ns == (30,) * ROUNDS


def test_a_convolution_that_a_step_does_not_always_call_is_named_and_has_no_times(
    model: Network, backend: Ticking
) -> None:
    count = iter(range(100))

    def step() -> None:
        model.first(IMAGES)
        if next(count) % 3:
            model.second(IMAGES)

    seen = seen_of(model, backend, step)

    assert ([layer.path for layer in seen.layers], seen.unseen) == (["first"], ("second",))


def test_a_convolution_that_a_step_calls_with_the_plan_alone_has_no_times(
    model: Network, backend: Ticking
) -> None:
    def step() -> None:
        model.first(IMAGES)
        if patched_modules(model):
            model.second(IMAGES)

    seen = seen_of(model, backend, step)

    assert ([layer.path for layer in seen.layers], seen.unseen) == (["first"], ("second",))


def test_a_step_that_calls_no_convolution_is_not_run_to_look_into_it(
    model: Network, backend: Ticking
) -> None:
    runs = []

    seen = seen_of(model, backend, lambda: runs.append(1))

    assert (seen.layers, seen.unseen, seen.settled) == ((), ("first", "second"), seen.plan)
    assert len(runs) == 4 + 2 * ROUNDS + 1
    assert seen.step.speedup.median == 1  # though the clock stood still


def test_both_ways_take_turns_in_an_order_drawn_anew(model: Network, backend: Ticking) -> None:
    order = []

    seen_of(model, backend, lambda: order.append(bool(patched_modules(model))))

    pairs = {tuple(order[place : place + 2]) for place in range(0, 4 + 2 * ROUNDS, 2)}
    assert pairs == {(True, False), (False, True)}


def test_the_way_to_either_is_as_long(
    model: Network, backend: Ticking, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[bool] = []
    taken_off_before: list[int] = []

    def counted(model: nn.Module) -> contextlib.AbstractContextManager[None]:
        taken_off_before.append(len(runs))
        return unpatched(model)

    monkeypatch.setattr("mucudnn.comparing.steps.unpatched", counted)

    seen_of(model, backend, lambda: runs.append(True))

    assert taken_off_before == [*range(4 + 2 * ROUNDS)]


def test_a_short_step_has_many_rounds_and_a_long_one_enough(model: Network, backend: Ticking) -> None:
    def rounds(taken_ns: int) -> int:
        model.second.taken = (taken_ns, taken_ns)
        seen = compared(model, lambda: model(IMAGES), None, progress=False, backend=backend)
        return len(seen.step.now_ns)

    assert (rounds(1), rounds(10**8), rounds(10**10)) == (200, 50, 20)


def test_what_a_step_takes_at_first_does_not_make_its_rounds_fewer(model: Network, backend: Ticking) -> None:
    spans_ns = iter([10**10, 10**10])

    def step() -> None:
        backend.now_ns += next(spans_ns, 10**8)

    seen = compared(model, step, None, progress=False, backend=backend)

    assert len(seen.step.now_ns) == 50


def test_pages_that_a_step_takes_anew_are_told(
    model: Network, backend: Ticking, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(ru_minflt=1000)
    monkeypatch.setattr(steps, "getrusage", lambda _: usage)

    def step() -> None:
        usage.ru_minflt += 3 if patched_modules(model) else 7

    assert seen_of(model, backend, step).pages == (7, 3)
    monkeypatch.setattr(steps, "getrusage", None)  # as where nobody counts them
    assert seen_of(model, backend, step).pages is None


def test_others_are_watched_while_the_step_runs(
    model: Network, backend: Ticking, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []

    class Watching(NoNeighbours):
        taken = 0.25

        @contextlib.contextmanager
        def watched(self) -> Iterator[None]:
            events.append("begin")
            yield
            events.append("end")

    monkeypatch.setattr(Ticking, "neighbours", Watching)

    seen = seen_of(model, backend, lambda: events.append("step"))

    assert seen.others == 0.25
    assert (events[0], {*events[1:-1]}, events[-1]) == ("begin", {"step"}, "end")


def test_nothing_is_left_behind_though_the_step_fails(model: Network, backend: Ticking) -> None:
    patches = [module.__dict__["_conv_forward"] for module in patched_modules(model).values()]
    count = iter(range(100))

    def step() -> None:
        model(IMAGES)
        if next(count) == 20:
            raise RuntimeError("out of data")

    with pytest.raises(RuntimeError, match="out of data"):
        seen_of(model, backend, step)

    assert [module.__dict__["_conv_forward"] for module in patched_modules(model).values()] == patches
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


def test_results_are_those_of_the_unpatched_model_meanwhile(model: Network) -> None:
    with unpatched(model):
        own = model(IMAGES)
        assert patched_modules(model) == {}

    assert [*patched_modules(model)] == ["first", "second"]
    torch.testing.assert_close(model(IMAGES), own)


def test_a_patch_that_somebody_has_wrapped_rests_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    served = []
    found = Router.served
    monkeypatch.setattr(Router, "served", lambda *args: served.append(1) or found(*args))
    model = nn.ConvTranspose2d(4, 4, 3)
    mucudnn.apply(model, a_plan_for(model, IMAGES))
    patched = model.forward
    model.forward = lambda *args: patched(*args)  # as libraries that move modules about do

    with unpatched(model):
        model(IMAGES)

    assert served == []
    model(IMAGES)
    assert served == [1]
    assert [*patched_modules(model)] == [""]


def test_a_transposed_convolution_has_no_patch_meanwhile() -> None:
    model = nn.ConvTranspose2d(4, 4, 3)
    mucudnn.apply(model, a_plan_for(model, IMAGES))
    patched = model.__dict__["forward"]

    with unpatched(model):
        assert "forward" not in model.__dict__

    assert model.__dict__["forward"] is patched


def test_a_compiled_model_is_compared_too_and_not_looked_into(backend: Ticking) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU())
    mucudnn.apply(model, a_plan_for(model, IMAGES))
    torch.compiler.reset()  # from torch 2.14 on all compiled models together have eight graphs
    compiled = torch.compile(model, backend="eager")
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()

    seen = seen_of(model, backend, lambda: compiled(IMAGES))  # type: ignore[arg-type]

    assert (seen.layers, seen.unseen) == ((), ("0",))
    assert graphs["unique_graphs"] == 2  # one of either way, for all rounds


def test_who_watches_is_told_of_every_round(model: Network, backend: Ticking) -> None:
    class Watching(Silence):
        def begin(self, work: float) -> None:
            self.work, self.done = work, [0.0]

        def at(self, what: str, done: float) -> None:
            self.done.append(done)

        def end(self, measured: int) -> None:
            self.measured = measured

    watching = Watching()

    compared(model, lambda: model(IMAGES), ROUNDS, watching, backend)

    assert (watching.work, watching.measured) == (2 * ROUNDS, 2 * ROUNDS)
    assert watching.done == [0, *range(2 * ROUNDS)]


def not_run() -> None:
    raise AssertionError


def test_a_model_without_a_plan_is_refused_before_the_step_runs() -> None:
    with pytest.raises(PlanError, match="it runs no plan"):
        mucudnn.compare(nn.Conv2d(4, 4, 3), not_run)


def test_a_plan_that_patches_nothing_is_settled_as_it_is_in_few_rounds(model: Network) -> None:
    plan = dataclasses.replace(mucudnn.plan_of(model), assignments=())
    mucudnn.apply(model, plan)

    found = mucudnn.compare(model, lambda: model(IMAGES))

    assert found.settled == plan
    assert found.layers == found.unseen == found.slower == ()
    assert len(found.step.now_ns) == 6


def test_a_step_that_cannot_be_run_is_refused(model: Network) -> None:
    with pytest.raises(OptionError, match="must be a function that runs a step, but got Tensor"):
        mucudnn.compare(model, model(IMAGES))


def test_a_step_that_would_not_run_when_it_is_called_is_refused(model: Network) -> None:
    def generator() -> Iterator[Tensor]:
        yield model(IMAGES)

    async def coroutine() -> None:
        model(IMAGES)

    async def asynchronous() -> AsyncIterator[Tensor]:
        yield model(IMAGES)

    class Called:
        async def __call__(self) -> None:
            model(IMAGES)

    for step, kind in (
        (generator, "generator"),
        (coroutine, "coroutine"),
        (asynchronous, "asynchronous generator"),
        (Called(), "coroutine"),
    ):
        told = f"must run a step when it is called, but got the {kind} function "
        with pytest.raises(OptionError, match=told):
            mucudnn.compare(model, step)


def test_a_step_may_ask_for_the_plan(model: Network, backend: Ticking) -> None:
    plan = mucudnn.plan_of(model)
    seen = []

    seen_of(model, backend, lambda: seen.append(mucudnn.plan_of(model)))

    assert len(seen) > ROUNDS
    assert all(each == plan for each in seen)


def test_a_step_may_copy_the_model() -> None:
    model, copies = nn.Sequential(nn.Conv2d(IMAGES.shape[1], 4, 3)), []
    mucudnn.apply(model, a_plan_for(model, IMAGES))

    def step() -> None:
        model(IMAGES).sum().backward()
        copies.append(pickle.loads(pickle.dumps(copy.deepcopy(model))))

    found = mucudnn.compare(model, step, rounds=6, progress=False)

    assert [each.path for each in found.layers] == ["0"]
    for each in copies:
        torch.testing.assert_close(each(IMAGES), model(IMAGES))


def test_of_a_convolution_that_a_step_restores_nothing_is_told(model: Network, backend: Ticking) -> None:
    steps = itertools.count()

    def step() -> None:
        if next(steps) == 2 * _WARMUPS:  # in the first round
            mucudnn.restore(model.second)
        model(IMAGES).sum().backward()

    found = seen_of(model, backend, step)

    assert "second" not in found.unplanned


def test_a_convolution_that_was_replaced_is_told_of(model: Network, backend: Ticking) -> None:
    model.second = Timed(3, backend)

    found = seen_of(model, backend)

    assert [each.path for each in found.layers] == ["first"]
    assert found.unpatched == ("second",)
    assert seen_of(mucudnn.apply(model, found.plan), backend).unpatched == ()


@pytest.mark.parametrize("rounds", [-1, 0, 5, 6.5])
def test_too_few_rounds_are_refused(model: Network, rounds: int) -> None:
    with pytest.raises(OptionError, match=f"at least 6.* got {rounds}"):
        mucudnn.compare(model, lambda: None, rounds=rounds)


def test_who_cannot_be_told_is_refused_before_the_step_runs(model: Network) -> None:
    with pytest.raises(
        OptionError, match=r"progress must be True, .* or a Progress \(begin, at and end\), but got 1"
    ):
        mucudnn.compare(model, not_run, progress=1)  # type: ignore[arg-type]


def test_shapes_that_are_tuned_when_they_are_met_belong_to_the_plan(tmp_path: Path) -> None:
    model = mucudnn.optimize(
        nn.Conv2d(4, 4, 3).eval(), "1MiB", IMAGES, policy="undivided", store=tmp_path / "store", dynamic=True
    )
    others = torch.randn(2, 4, 9, 9)

    with torch.no_grad():
        seen = mucudnn.compare(model, lambda: model(others), rounds=6)

    assert {site.variant for site in seen.plan.sites} == {0, 1}


def test_a_step_is_compared_in_as_many_rounds_as_are_asked_for(model: Network) -> None:
    seen = mucudnn.compare(model, lambda: model(IMAGES), rounds=6, progress=False)

    assert seen.step.now.samples == 6
    assert {layer.times.now.samples for layer in seen.layers} == {6}
    assert "times as fast" in repr(seen)


@pytest.mark.gpu
def test_a_step_on_a_card_is_compared_by_what_its_stream_takes() -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3)).cuda()
    image = torch.randn(8, 16, 32, 32, device="cuda")
    mucudnn.apply(model, a_plan_for(model, image, backend=backend_for("cudnn", image.device)))

    seen = mucudnn.compare(model, lambda: model(image).sum().backward(), rounds=6, progress=False)

    assert [layer.path for layer in seen.layers] == ["0", "2"]
    assert all(0 < layer.times.now.median < 1 for layer in seen.layers)
