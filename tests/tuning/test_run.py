"""One run of the tuner, on a machine whose times are scripted."""

import contextlib
import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from mucudnn.backends.base import Neighbours, NoNeighbours, Result
from mucudnn.choices import Mode, Policy, Search
from mucudnn.division import Division
from mucudnn.errors import AccuracyWarning, BackendError, BusyWarning, UnmeasuredError, UntunedWarning
from mucudnn.examining.extraction import extract
from mucudnn.live.measurer import LiveMeasurer
from mucudnn.plan import Plan
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.profile import Candidate
from mucudnn.profiling.measurer import ModelCall
from mucudnn.profiling.profiler import Profiler
from mucudnn.store.memory import MemoryStore
from mucudnn.tuning.confirming import rivals_of
from mucudnn.tuning.run import Tuning
from mucudnn.tuning.solving import Solution
from tests.divisions import a_division
from tests.doubles import MS, Recipe, ScriptedBackend, rate
from tests.models import Listener, a_batch, a_chain
from tests.tuning.runs import affine, keys_of, one_convolution, planned, with_rival

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_division_that_is_faster_replaces_pytorchs_own() -> None:
    plan = planned(with_rival(affine(0.9, 0.02)), one_convolution())

    assert keys_of(plan) == ["scripted:rival@4*2"]


def test_a_plan_holds_the_best_division_though_a_larger_part_costs_less_for_each_sample() -> None:
    # The rival's set-up is paid once: 2 * 1.8 + 3 ms are more than 4 * 1.5, which are PyTorch's own in parts.
    own_ms, rival_ms = {1: 1.0, 2: 1.5, 4: 4.0, 8: 20.0}, {1: 3.0, 2: 3.0, 4: 1.8, 8: 20.0}
    rival = Recipe(lambda samples: rival_ms[samples] * MS, setup_ns=3 * MS)
    backend = ScriptedBackend({"rival": rival}, own=Recipe(lambda samples: own_ms[samples] * MS))

    assert keys_of(planned(backend, one_convolution())) == ["scripted:aten@2*4"]


def test_a_division_that_is_as_fast_to_two_percent_does_not() -> None:
    # The profile says that it wins, by about one percent.
    plan = planned(with_rival(affine(0.98, 0.02)), one_convolution())

    assert keys_of(plan) == ["scripted:aten@8*1"]


def test_a_division_that_may_or_may_not_be_faster_does_not() -> None:
    # Faster while it is profiled, in its median; then it wavers between much faster and much slower.
    noise = random.Random(1)

    def wavering(samples: int) -> float:
        return samples * MS * (0.5 if noise.random() < 0.55 else 1.5)

    plan = planned(with_rival(wavering), one_convolution())

    evidence = plan.assignments[0].evidence
    assert keys_of(plan) == ["scripted:aten@8*1"]
    assert evidence is not None
    assert [key for key, _ in evidence.rejected] == ["scripted:rival@4*2"]


def test_an_undivided_algorithm_that_is_faster_replaces_pytorchs_own() -> None:
    backend = ScriptedBackend({"rival": Recipe(affine(0.5, 0.1))})

    assert keys_of(planned(backend, one_convolution())) == ["scripted:rival@8*1"]


def test_a_division_must_also_beat_the_best_undivided_algorithm() -> None:
    # Both are faster than PyTorch's own; of the two the division is faster by one percent only.
    backend = ScriptedBackend(
        {
            "whole": Recipe(lambda samples: 4 * MS if samples == 8 else 100 * MS, setup_ns=0.001 * MS),
            "parts": Recipe(
                lambda samples: 0.495 * MS * samples if samples <= 4 else 100 * MS, 0, 0.001 * MS
            ),
        }
    )

    assert keys_of(planned(backend, one_convolution())) == ["scripted:whole@8*1"]


def test_what_was_profiled_slower_than_pytorchs_own_has_a_second_chance() -> None:
    own, slow = Candidate("cpu:aten", 8, 8.0, 0), Candidate("rival", 4, 5.0, 0)

    rivals = rivals_of(Solution(Division((own,)), [own, slow]))

    assert list(rivals) == ["cpu:aten@8*1", "rival@4*2"]


def test_equal_problems_are_profiled_and_confirmed_once() -> None:
    once, thrice = (nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(n))).eval() for n in (1, 3))
    listeners = Listener(), Listener()

    plans = [
        planned(ScriptedBackend({"other": Recipe(rate(MS))}), extract(model, a_batch()), listener=listener)
        for model, listener in zip((once, thrice), listeners, strict=True)
    ]

    assert [len(plan.sites) for plan in plans] == [1, 3]
    assert listeners[0].measured == listeners[1].measured
    assert listeners[0].work == listeners[1].work
    assert listeners[0].steps == listeners[1].steps


def test_two_tunings_with_one_store_make_the_same_plan_though_times_differ() -> None:
    store, extraction = MemoryStore(), extract(a_chain(), a_batch())
    first = planned(ScriptedBackend({"other": Recipe(rate(0.5 * MS))}), extraction, store=store)

    second = planned(ScriptedBackend({"other": Recipe(rate(2 * MS))}), extraction, store=store)

    assert first.to_text() == second.to_text()


def test_a_division_too_large_to_be_timed_does_not_change_the_plan_of_a_second_run() -> None:
    backend = ScriptedBackend({"greedy": Recipe(rate(0.1 * MS), unforeseen_bytes=2**21)})
    store, listener = MemoryStore(), Listener()
    first = planned(backend, one_convolution(), store=store)

    second = planned(backend, one_convolution(), store=store, listener=listener)

    assert listener.measured == 0
    assert first.to_text() == second.to_text()


def test_the_ops_asked_for_are_the_sites_of_the_plan() -> None:
    plan = planned(ScriptedBackend({}), extract(a_chain(), a_batch(), [ConvOp.WGRAD]))

    assert [str(site) for site in plan.sites] == ["0 wgrad", "3 wgrad"]


def test_evidence_tells_times_workspaces_error_and_verdict() -> None:
    backend = ScriptedBackend({"rival": Recipe(affine(0.5, 0.1), sample_bytes=10)})

    evidence = planned(backend, one_convolution()).assignments[0].evidence

    assert evidence is not None
    assert evidence.reference is not None
    assert evidence.chosen is not None
    assert (evidence.reference.median, evidence.chosen.median) == pytest.approx((0.008, 0.0042))
    assert (evidence.reference_workspace_bytes, evidence.workspace_bytes) == (8000, 80)
    assert evidence.verdict == "FASTER"
    assert evidence.error is not None
    assert 0 < evidence.error < 1e-6  # a few roundings of float32, each 6e-8


def test_the_error_of_a_division_is_the_largest_of_its_algorithms() -> None:
    def only(size: int) -> Callable[[int], float]:
        return lambda samples: MS if samples == size else 100 * MS

    def a_little(problem: object, result: Tensor, behind: Tensor) -> None:
        result.mul_(1 + 3e-6)

    recipes = {"exact": Recipe(only(5)), "off": Recipe(only(3), damage=a_little)}

    (assigned,) = planned(ScriptedBackend(recipes), one_convolution(), policy=Policy.ALL).assignments

    assert assigned.division.key == "scripted:exact@5*1+scripted:off@3*1"
    assert assigned.evidence is not None
    assert assigned.evidence.error == pytest.approx(3e-6, rel=0.2)  # roundings are 6e-8


def _fails_for_four_channels(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Let memory be lacking when a convolution from 4 channels to 4 is measured or compared."""
    own = getattr(LiveMeasurer, method)

    def fails(self: LiveMeasurer, problem: ConvProblem, *args: object) -> object:
        if problem.in_channels == problem.out_channels == 4:
            raise UnmeasuredError(f"{problem} could not be measured: CUDA \x1b[31mout of memory")
        return own(self, problem, *args)

    monkeypatch.setattr(LiveMeasurer, method, fails)


@pytest.mark.parametrize("method", ["measure", "compare"])
@pytest.mark.parametrize("mode", Mode)
def test_sites_that_cannot_be_measured_stay_as_they_are_and_are_told_of(
    method: str, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fails_for_four_channels(monkeypatch, method)
    layers = [nn.Conv2d(n, k, 3, padding=1) for n, k in itertools.pairwise((3, 4, 4, 4, 3))]
    extraction = extract(nn.Sequential(*layers).eval(), a_batch())

    with pytest.warns(UntunedWarning, match=r"stay as they are: 1 fprop, 2 fprop \(.*out of memory"):
        plan = planned(ScriptedBackend({"rival": Recipe(rate(0.5 * MS))}), extraction, mode=mode)

    assert [str(site) for site in plan.sites] == ["0 fprop", "3 fprop"]
    assert [path for path, _ in plan.untouched] == ["1", "2"]
    assert {reason.partition(" ")[0] for _, reason in plan.untouched} == {"fprop"}
    assert all(reason.endswith("CUDA ?[31mout of memory") for _, reason in plan.untouched)
    assert Plan.from_text(plan.to_text()) == plan


@pytest.mark.parametrize("method", ["measure", "compare"])
def test_where_no_site_can_be_measured_tuning_ends(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _fails_for_four_channels(monkeypatch, method)
    extraction = extract(nn.Conv2d(4, 4, 3).eval(), a_batch(channels=4))

    with pytest.raises(UnmeasuredError, match=r"could not be measured: CUDA .*out of memory"):
        planned(ScriptedBackend({}), extraction)


class Unlisting(ScriptedBackend):
    """A device whose library cannot list the algorithms of a convolution from 4 channels to 4."""

    def algorithms(
        self, problem: ConvProblem, search: Search = Search.HEURISTIC, whole: bool = True
    ) -> tuple[str, ...]:
        if problem.in_channels == problem.out_channels == 4:
            raise BackendError("CUDNN_STATUS_INTERNAL_ERROR")
        return super().algorithms(problem, search, whole)


@pytest.mark.parametrize("may_be_frozen", [False, True])
def test_a_site_whose_algorithms_cannot_be_listed_stays_as_it_is_and_is_told_of(may_be_frozen: bool) -> None:
    layers = [nn.Conv2d(n, k, 3, padding=1) for n, k in itertools.pairwise((3, 4, 4, 3))]
    extraction = extract(nn.Sequential(*layers).eval(), a_batch())

    with pytest.warns(
        UntunedWarning, match=r"stay as they are: 1 fprop \(.* measured: CUDNN_STATUS_INTERNAL"
    ):
        plan = planned(Unlisting({}), extraction, may_be_frozen=may_be_frozen)

    assert [str(site) for site in plan.sites] == ["0 fprop", "2 fprop"]


def test_what_was_measured_on_a_busy_machine_can_be_measured_anew() -> None:
    store = MemoryStore()
    convolution = extract(nn.Conv2d(3, 4, 3), a_batch().requires_grad_(), "wgrad")
    other = extract(nn.Conv2d(3, 5, 3), a_batch().requires_grad_(), "wgrad")
    busy = ScriptedBackend({"rival": Recipe(rate(2 * MS))})
    plans = [planned(busy, each, store=store) for each in (convolution, other)]
    call = convolution.calls[0]
    asked = ModelCall(call.problem, is_sharing=False, limit_bytes=2**20)
    own, parts = (dict.fromkeys(call.computed, a_division(busy.own, *sizes)) for sizes in [(8,), (4, 4)])
    Profiler(LiveMeasurer(busy), store, 2**20, Policy.UNDIVIDED).compare_calls(asked, own, parts)

    idle = ScriptedBackend({"rival": Recipe(rate(0.5 * MS))})
    profiler = Profiler(LiveMeasurer(idle), store, 2**20, Policy.POWER_OF_TWO)
    tuning = Tuning(profiler, Mode.REUSE, convolution, Listener())
    tuning.forget()
    anew = tuning.plan()

    assert [keys_of(plan) for plan in (*plans, anew)] == [["scripted:aten@8*1"]] * 2 + [
        ["scripted:rival@8*1"]
    ]
    times = {c.batch: c.time_s for c in anew.assignments[0].candidates if c.algorithm == "scripted:rival"}
    assert times == pytest.approx({size: size * 0.5e-3 for size in (1, 2, 4, 8)})  # of parts, too
    assert anew == planned(busy, convolution, store=store)
    keys = [asked.key(each) for each in (own, parts)]
    assert store.comparison(idle.environment(), call.problem, keys) is None  # fprop, which is not tuned
    assert planned(idle, other, store=store) == plans[1]


def test_what_a_smaller_mini_batch_was_tuned_with_stays_when_a_larger_one_is_measured_anew() -> None:
    store, backend = MemoryStore(), ScriptedBackend({"rival": Recipe(rate(2 * MS))})
    small, large = (extract(nn.Conv2d(3, 4, 3), a_batch(samples), "fprop") for samples in (4, 8))
    planned(backend, small, store=store, policy=Policy.UNDIVIDED)
    profiler = Profiler(LiveMeasurer(backend), store, 2**20, Policy.POWER_OF_TWO)

    tuning = Tuning(profiler, Mode.REUSE, large, Listener())
    tuning.plan()
    tuning.forget()

    ran = len(backend.world.ran)
    planned(backend, small, store=store, policy=Policy.UNDIVIDED)
    assert len(backend.world.ran) == ran


def test_a_site_that_is_left_is_no_work_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    extraction = extract(nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 3, 1)).eval(), a_batch(channels=4))
    listener, own = Listener(), LiveMeasurer.compare

    def fails(self: LiveMeasurer, problem: ConvProblem, *args: Any) -> Any:
        if problem.out_channels == 4:
            raise UnmeasuredError("no memory")
        return own(self, problem, *args)

    monkeypatch.setattr(LiveMeasurer, "compare", fails)
    profiler = Profiler(LiveMeasurer(ScriptedBackend({})), MemoryStore(), 2**20, Policy.UNDIVIDED)
    tuning = Tuning(profiler, Mode.REUSE, extraction, listener)

    with pytest.warns(UntunedWarning, match="0 fprop"):
        tuning.plan()
    tuning._work.at("the end")

    assert listener.steps[-1] == ("the end", pytest.approx(listener.work))


def test_waiting_for_somebody_else_is_told() -> None:
    class Waiting(LiveMeasurer):
        @contextlib.contextmanager
        def alone(self, on_wait: Callable[[], None]) -> Iterator[None]:
            on_wait()
            yield

    listener, profiler = (
        Listener(),
        Profiler(Waiting(ScriptedBackend({})), MemoryStore(), 2**20, Policy.UNDIVIDED),
    )
    Tuning(profiler, Mode.REUSE, one_convolution(), listener).plan()

    what, done = zip(*listener.steps, strict=True)
    profiled, confirmed = ["profiling", "waiting", "profiling"], ["confirming", "waiting", "confirming"]
    assert [text.split()[0] for text in what] == [*profiled, *confirmed]
    assert what[0] == what[2]
    assert list(done) == sorted(done)


@pytest.mark.parametrize("mode", Mode)
def test_when_all_is_done_nothing_of_the_work_is_left(mode: Mode) -> None:
    layers = [nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)] + [nn.Conv2d(4, 3, 1)]
    extraction, listener = extract(nn.Sequential(*layers), a_batch(channels=4)), Listener()
    backend = ScriptedBackend({"rival": Recipe(rate(0.5 * MS), 100)})
    profiler = Profiler(LiveMeasurer(backend), MemoryStore(), 2**20, Policy.UNDIVIDED)
    tuning = Tuning(profiler, mode, extraction, listener)

    tuning.plan()
    tuning._work.at("the end")

    assert listener.steps[-1] == ("the end", pytest.approx(listener.work))


def test_a_busy_machine_is_told_of_with_what_helps() -> None:
    class Complaining(LiveMeasurer):
        def complaint(self) -> str | None:
            return "Others took all."

    profiler = Profiler(Complaining(ScriptedBackend({})), MemoryStore(), 2**20, Policy.UNDIVIDED)

    with pytest.warns(BusyWarning, match=r"^Others took all\. Tune with again=True \(mucudnn tune --again\)"):
        Tuning(profiler, Mode.REUSE, one_convolution(), Listener()).plan()


def test_what_was_measured_on_a_busy_machine_is_told_of_whenever_it_is_read() -> None:
    class Busy(ScriptedBackend):
        def neighbours(self) -> Neighbours:
            return Taking()

    class Taking(NoNeighbours):
        def undisturbed(self, measure: Callable[[], Result]) -> tuple[Result, float]:
            return measure(), 1.25

    store, recipes = MemoryStore(), {"rival": Recipe(rate(0.5 * MS))}
    words = r"^While (\d) of the plan's \1 times were measured, others took up to 1\.2 processors, .*--again"
    for backend in (Busy(recipes), ScriptedBackend(recipes)):
        with pytest.warns(BusyWarning, match=words):
            plan = planned(backend, one_convolution(), store=store)
        assert set(plan.others) == {1.25}


def _has_errors(monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    """Let one error be known, that of the whole by PyTorch's own."""
    profile = Profiler.profile
    monkeypatch.setattr(
        Profiler,
        "profile",
        lambda *args: dataclasses.replace(profile(*args), errors={("scripted:aten", 8): error}),
    )


@pytest.mark.parametrize("error", [0.2, math.nan, math.inf])
def test_pytorchs_own_that_is_wrong_stays_and_is_told_of(
    error: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _has_errors(monkeypatch, error)

    with pytest.warns(AccuracyWarning, match="^At 1 of 1 sites, the first of them .* fprop, PyTorch's own "):
        plan = planned(ScriptedBackend({}), one_convolution())

    assert keys_of(plan) == ["scripted:aten@8*1"]
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_part_of_pytorchs_own_that_is_wrong_is_refused_though_the_whole_is_not() -> None:
    class WrongInParts(ScriptedBackend):
        def own_convolution(self, problem: ConvProblem, *operands: Any) -> Tensor:
            right = super().own_convolution(problem, *operands)
            return right if problem.batch == 8 or problem.dtype == "float64" else 2 * right

    recipes = {"slow": Recipe(rate(9 * MS), sample_bytes=10)}

    def keys(backend: ScriptedBackend, limit_bytes: int) -> list[str]:
        return keys_of(planned(backend, one_convolution(), limit_bytes))

    assert keys(ScriptedBackend(recipes), 7000) == ["scripted:aten@2*4"]
    assert keys(WrongInParts(recipes), 7000) == ["scripted:slow@8*1"]
    assert keys(WrongInParts(recipes), 8000) == ["scripted:aten@8*1"]


def test_an_error_that_was_not_recorded_is_none_in_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    _has_errors(monkeypatch, 1e-7)

    (assigned,) = planned(with_rival(affine(0.5, 0.02)), one_convolution()).assignments

    assert assigned.division.key == "scripted:rival@4*2"
    assert assigned.evidence is not None
    assert assigned.evidence.error is None


def test_a_problem_that_is_left_after_a_site_of_it_was_confirmed_is_left_altogether(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = [nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)] + [nn.Conv2d(4, 3, 1)]
    extraction = extract(nn.Sequential(*layers).eval(), a_batch(channels=4))
    backend = ScriptedBackend({"rival": Recipe(affine(0.5, 0.4), 1000)})
    compared: list[ConvProblem] = []
    own = LiveMeasurer.compare

    def fails_the_second_time(self: LiveMeasurer, problem: ConvProblem, *args: Any) -> Any:
        compared.append(problem)
        if compared.count(problem) == 2:
            raise UnmeasuredError(f"{problem} could not be measured")
        return own(self, problem, *args)

    monkeypatch.setattr(LiveMeasurer, "compare", fails_the_second_time)

    with pytest.warns(UntunedWarning, match="0 fprop, 1 fprop, 2 fprop"):
        plan = planned(backend, extraction, limit_bytes=24_500, mode=Mode.SHARING)

    assert [str(site) for site in plan.sites] == ["3 fprop"]


def test_a_plan_says_which_convolutions_are_transposed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 3, 3), nn.ConvTranspose2d(3, 3, 1))

    trained = planned(ScriptedBackend({}), extract(model, a_batch()))
    served = planned(ScriptedBackend({}), extract(model.eval(), a_batch()))

    assert trained.transposed == served.transposed == ("1", "2")
