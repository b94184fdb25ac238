"""What a run sees in whole calls and in frozen graphs, and what goes back for it."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from mucudnn.choices import Mode, Policy, Search
from mucudnn.errors import UnmeasuredError
from mucudnn.evidence import FrozenEvidence
from mucudnn.examining.extraction import extract
from mucudnn.intervals import Verdict
from mucudnn.live.measurer import LiveMeasurer
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.profile import Comparison, Record, Refusal, RefusalKind
from mucudnn.profiling.measurer import Divisions, ModelCall
from mucudnn.profiling.profiler import Profiler
from mucudnn.profiling.replay import Replay
from mucudnn.report import render_plan
from mucudnn.store import SqliteStore
from mucudnn.store.memory import MemoryStore
from mucudnn.tuning.run import Tuning
from tests.doubles import MS, Recipe, ScriptedBackend, rate
from tests.models import Listener, a_batch
from tests.tuning.runs import affine, keys_of, one_convolution, planned

pytestmark = pytest.mark.usefixtures("one_thread")


class QuickTogether(ScriptedBackend):
    """A device on which PyTorch's own takes a fraction of the time of its parts when a model calls it."""

    fraction = 1.0

    def recorded_convolution(
        self, problem: ConvProblem, image: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        before = self.world.now_ns
        result = super().recorded_convolution(problem, image, weight, bias)
        self.world.now_ns = before + round((self.world.now_ns - before) * self.fraction)
        return result


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(
    ("fraction", "expected"), [(1.0, {"scripted:rival@8*1"}), (0.3, {"scripted:aten@8*1"})]
)
def test_what_is_not_faster_as_a_model_calls_it_goes_back(
    fraction: float, expected: set[str], mode: Mode
) -> None:
    backend, store = QuickTogether({"rival": Recipe(affine(0.85, 0.4), 1000)}), MemoryStore()
    backend.fraction = fraction
    extraction = extract(nn.Conv2d(3, 4, 3), a_batch().requires_grad_())

    plans = [planned(backend, extraction, mode=mode, store=store) for _ in range(2)]

    assert {*keys_of(plans[0])} == expected
    assert len(plans[0].sites) == 3
    assert plans[1] == plans[0]


@pytest.mark.parametrize(("fraction", "verdict"), [(1.0, Verdict.FASTER), (0.3, Verdict.SLOWER)])
def test_the_plan_tells_what_whole_calls_took(fraction: float, verdict: Verdict) -> None:
    backend = QuickTogether({"rival": Recipe(affine(0.85, 0.4), 1000)})
    backend.fraction = fraction
    plan = planned(backend, extract(nn.Conv2d(3, 4, 3), a_batch().requires_grad_()))

    (call,) = plan.calls

    assert (call.path, call.variant, call.verdict) == ("", 0, verdict)
    assert call.is_faster == (call.speedup.median > 1)
    assert call.is_faster == (call.divided.median < call.reference.median) == (verdict is Verdict.FASTER)


class _DearParts(LiveMeasurer):
    """A machine on which a model's call takes a millisecond for each part that it launches."""

    def compare_calls(self, call: ModelCall, base: Divisions, divisions: Divisions) -> Comparison | Record:
        seen = super().compare_calls(call, base, divisions)
        if isinstance(seen, Record):
            return seen
        parts = {
            call.key(each): sum(len(division.parts) for division in each.values())
            for each in (base, divisions)
        }
        times = {
            key: dataclasses.replace(time, spans_ns=tuple(ns + parts[key] * MS for ns in time.spans_ns))
            for key, time in seen.times.items()
        }
        return dataclasses.replace(seen, times=times)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(
    ("whole_ms", "expected"), [(12.0, "scripted:rival@4*2"), (4.8, "scripted:whole@8*1")]
)
def test_where_pytorchs_own_may_not_run_a_call_in_parts_has_to_beat_one_that_is_undivided(
    whole_ms: float, expected: str, mode: Mode
) -> None:
    # Alone two parts of the rival take 4.2 ms; in a call 6.2, where what is undivided takes 1 ms more.
    rival = Recipe(lambda samples: (0.5 * samples + 0.1 if samples <= 4 else 100) * MS, sample_bytes=900)
    backend = ScriptedBackend(
        {"rival": rival, "whole": Recipe(rate(whole_ms / 8 * MS), sample_bytes=100)},
        own=Recipe(rate(MS), sample_bytes=2**21),
    )
    profiler = Profiler(_DearParts(backend), MemoryStore(), 2**20, Policy.POWER_OF_TWO)

    plan = Tuning(profiler, mode, one_convolution(), Listener()).plan()

    assert keys_of(plan) == [expected]
    (call,) = plan.calls
    assert call.is_faster == ("rival" in expected)
    text = render_plan(plan)
    assert ", partly\n" in text
    assert "own, partly" not in text
    assert "times as fast" not in text  # what ran before it, nobody knows


class _GreedyGradient(ScriptedBackend):
    """PyTorch's own needs more than any limit for the input gradient."""

    def _needed(self, problem: ConvProblem, algorithm: str) -> int:
        is_greedy = (problem.op, algorithm) == (ConvOp.DGRAD, self.own)
        return 2**40 if is_greedy else super()._needed(problem, algorithm)


def test_what_parts_gain_where_pytorchs_own_may_not_run_hides_no_loss_where_it_may() -> None:
    # Alone two parts take 3.8 ms, PyTorch's own 4.4; in a call 5.8 and 5.4. Undivided the other takes 16.
    rival = Recipe(lambda samples: (0.45 * samples + 0.1 if samples <= 4 else 100) * MS)
    recipes = {"rival": rival, "whole": Recipe(rate(2 * MS))}
    backend = _GreedyGradient(recipes, own=Recipe(rate(0.55 * MS)))
    profiler = Profiler(_DearParts(backend), MemoryStore(), 2**20, Policy.POWER_OF_TWO)
    extraction = extract(nn.Conv2d(3, 4, 3).requires_grad_(requires_grad=False), a_batch().requires_grad_())

    plan = Tuning(profiler, Mode.REUSE, extraction, Listener()).plan()

    assert keys_of(plan) == ["scripted:aten@8*1", "scripted:rival@4*2"]
    (call,) = plan.calls
    assert not call.is_faster


def test_a_call_of_which_nothing_is_divided_was_not_timed() -> None:
    assert planned(ScriptedBackend({}), one_convolution()).calls == ()


def _with_packing(ns: Callable[[int], float], sample_bytes: int = 10) -> ScriptedBackend:
    """PyTorch's own takes 8 ms for 8 samples, and less in frozen graphs; the rival takes 4 ms."""
    backend = ScriptedBackend({"rival": Recipe(affine(0.5, 0.001), sample_bytes=100)})
    backend.packed = Recipe(ns, sample_bytes)
    return backend


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(("each_ms", "verdict"), [(0.7, Verdict.FASTER), (0.3, Verdict.SLOWER)])
def test_what_runs_in_inference_is_timed_against_pytorchs_own_in_frozen_graphs(
    each_ms: float, verdict: Verdict, mode: Mode
) -> None:
    store, n_bytes = MemoryStore(), 80 if mode is Mode.REUSE else 0  # a site has no room beside its buffer
    backends = [_with_packing(rate(each_ms * MS), n_bytes // 8) for _ in range(2)]
    plans = [
        planned(each, one_convolution(), mode=mode, store=store, may_be_frozen=True) for each in backends
    ]

    (seen,) = plans[0].frozen

    assert {part.algorithm for part in plans[0].assignments[0].division.parts} == {"scripted:rival"}
    assert (seen.path, seen.variant, seen.workspace_bytes) == ("", 0, n_bytes)
    assert seen.is_own == (verdict is not Verdict.FASTER)
    assert seen.times is not None
    assert seen.times.verdict is verdict
    assert seen.times.reference.median == pytest.approx(8 * each_ms * 1e-3)
    assert seen.times.divided.median == pytest.approx(4e-3, rel=0.05)
    assert (plans[1], backends[1].world.ran, backends[1].weighed) == (plans[0], [], 0)


def test_frozen_graphs_are_asked_about_only_for_inference_and_only_where_that_may_matter() -> None:
    training = extract(nn.Conv2d(3, 4, 3), a_batch().requires_grad_())
    for extraction, may_be_frozen in ((training, True), (one_convolution(), False)):
        backend = _with_packing(rate(0.3 * MS))

        plan = planned(backend, extraction, may_be_frozen=may_be_frozen)

        assert plan.frozen == ()
        assert "packed@8" not in backend.world.ran


def test_what_frozen_graphs_run_is_within_the_limit_too() -> None:
    backend = _with_packing(rate(0.3 * MS), sample_bytes=2**20)

    assert planned(backend, one_convolution(), may_be_frozen=True).frozen == ()
    assert backend.largest_bytes < 2**20
    assert "packed@8" not in backend.world.ran


@pytest.mark.parametrize("answer", [None, "broken"])
def test_what_cannot_be_timed_for_frozen_graphs_is_pytorchs_own_there(answer: str | None) -> None:
    class Answering(LiveMeasurer):
        def compare_calls(self, call: ModelCall, base: Divisions, divisions: Divisions) -> Any:
            if not call.is_frozen:
                return super().compare_calls(call, base, divisions)
            if answer is None:
                raise UnmeasuredError("no memory")
            return Record(call.trial(divisions), refusal=Refusal("", 8, RefusalKind.FAILED, answer))

    measurer = Answering(_with_packing(rate(0.7 * MS)))
    profiler = Profiler(measurer, MemoryStore(), 2**20, Policy.UNDIVIDED)

    plan = Tuning(profiler, Mode.REUSE, one_convolution(), Listener(), may_be_frozen=True).plan()

    assert keys_of(plan) == ["scripted:rival@8*1"]
    assert plan.frozen == (FrozenEvidence("", 0, 80),)


def test_pytorchs_own_may_stay_in_frozen_graphs_though_the_limit_forbids_it_elsewhere() -> None:
    backend = _with_packing(rate(0.3 * MS))

    plan = planned(backend, one_convolution(), limit_bytes=1000, may_be_frozen=True)

    (seen,) = plan.frozen
    assert (seen.workspace_bytes, seen.times is not None, seen.is_own) == (80, True, True)
    assert plan.assignments[0].evidence is not None
    assert plan.assignments[0].evidence.verdict is None  # it was never run


def test_pytorchs_own_is_weighed_for_frozen_graphs_where_it_makes_room_elsewhere() -> None:
    # Four to four channels stay PyTorch's own, beside whose 8000 bytes the buffer of the other has no room.
    class QuickForFew(ScriptedBackend):
        def ran(self, problem: ConvProblem, algorithm: str, n_bytes: int) -> None:
            before = self.world.now_ns
            super().ran(problem, algorithm, n_bytes)
            if algorithm == self.own and problem.in_channels == 4:
                self.world.now_ns = before + (self.world.now_ns - before) // 4

    backend = QuickForFew({"rival": Recipe(rate(0.5 * MS), sample_bytes=1000)})
    backend.packed = Recipe(rate(0.3 * MS))
    extraction = extract(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)).eval(), a_batch())

    plan = planned(backend, extraction, limit_bytes=8000, may_be_frozen=True)

    assert keys_of(plan) == ["scripted:rival@8*1", "scripted:aten@8*1"]
    assert [(seen.path, seen.workspace_bytes, seen.times is None) for seen in plan.frozen] == [
        ("0", 0, False),
        ("1", 0, True),
    ]
    assert all(seen.is_own for seen in plan.frozen)
    backend.packed = Recipe(rate(0.3 * MS), 1)
    assert planned(backend, extraction, limit_bytes=8000, may_be_frozen=True).frozen == ()  # no room
    roomy = planned(backend, extraction, limit_bytes=16000, may_be_frozen=True)
    assert [seen.path for seen in roomy.frozen] == ["0"]


@pytest.mark.parametrize(("answer", "key"), [(None, "scripted:rival@8*1"), ("broken", "scripted:aten@8*1")])
def test_divisions_stay_where_calls_cannot_be_timed_but_not_where_they_break(
    answer: str | None, key: str
) -> None:
    class Answering(LiveMeasurer):
        def compare_calls(self, call: ModelCall, base: Divisions, divisions: Divisions) -> Any:
            if answer is None:
                raise UnmeasuredError("no memory")
            return Record(call.trial(divisions), refusal=Refusal("", 8, RefusalKind.FAILED, answer))

    backend = ScriptedBackend({"rival": Recipe(rate(0.5 * MS))})
    profiler = Profiler(Answering(backend), MemoryStore(), 2**20, Policy.UNDIVIDED)

    plan = Tuning(profiler, Mode.REUSE, one_convolution(), Listener()).plan()

    assert (keys_of(plan), plan.calls) == ([key], ())


def test_what_was_called_as_in_a_model_is_not_called_again() -> None:
    backend, store = QuickTogether({"rival": Recipe(rate(0.5 * MS))}), MemoryStore()
    planned(backend, one_convolution(), store=store)
    ran = len(backend.world.ran)

    planned(backend, one_convolution(), store=store)

    assert len(backend.world.ran) == ran


def test_where_the_limit_forbids_pytorchs_own_nothing_goes_back() -> None:
    backend = QuickTogether({"rival": Recipe(rate(2 * MS), sample_bytes=10)})
    backend.fraction = 0.1

    plan = planned(backend, one_convolution(), limit_bytes=500)

    assert keys_of(plan) == ["scripted:rival@8*1"]


def test_a_recording_replays_what_went_back(tmp_path: Path) -> None:
    backend = QuickTogether({"rival": Recipe(affine(0.85, 0.4), 1000)})
    backend.fraction = 0.3
    extraction = extract(nn.Conv2d(3, 4, 3), a_batch().requires_grad_())
    with SqliteStore(tmp_path / "store.sqlite3") as store:
        plan = planned(backend, extraction, store=store)
        replay = Replay(store, store.environments()[0])
        profiler = Profiler(replay, MemoryStore(), plan.limit_bytes, plan.policy)
        replayed = Tuning(profiler, Mode.REUSE, extraction, Listener()).plan()

    assert {*keys_of(plan)} == {"scripted:aten@8*1"}
    assert replayed.sites == plan.sites


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("ops", ["fprop", "wgrad"])
def test_ops_that_are_not_tuned_are_called_all_the_same(ops: str, mode: Mode) -> None:
    backend = ScriptedBackend({"rival": Recipe(affine(0.5, 0.4), 1000)})
    extraction = extract(nn.Conv2d(3, 4, 3), a_batch().requires_grad_(), ops)
    asked: list[str] = []

    class Listening(LiveMeasurer):
        def compare_calls(self, call: ModelCall, base: Divisions, divisions: Divisions) -> Any:
            asked.append(call.key(divisions))
            return super().compare_calls(call, base, divisions)

    profiler = Profiler(Listening(backend), MemoryStore(), 2**20, Policy.UNDIVIDED)
    Tuning(profiler, mode, extraction, Listener()).plan()

    expected = {op: "scripted:rival@8*1" if op == ops else "scripted:aten@8*1" for op in map(str, ConvOp)}
    first, second = (key.split() for key in asked)
    assert first[:3] == second[:3] == [f"{op}={name}" for op, name in expected.items()]
    assert ("sharing" in first) == ("sharing" in second) == (mode is Mode.SHARING)
    assert set(second) - set(first) == {"look2"}


class _OnlyBehind(ScriptedBackend):
    """A device whose rival computes what has four channels, and nothing else."""

    def computes(self, problem: ConvProblem, algorithm: str) -> bool:
        return super().computes(problem, algorithm) and (algorithm == self.own or problem.in_channels == 4)

    def algorithms(
        self, problem: ConvProblem, search: Search = Search.HEURISTIC, whole: bool = True
    ) -> tuple[str, ...]:
        every = super().algorithms(problem, search, whole)
        return tuple(each for each in every if self.computes(problem, each))


class _Watching(LiveMeasurer):
    """Remembers what other layers take before each call."""

    def __init__(self, backend: ScriptedBackend) -> None:
        super().__init__(backend)
        self.taken: set[int] = set()

    def compare_calls(self, call: ModelCall, base: Divisions, divisions: Divisions) -> Comparison | Record:
        self.taken.add(call.taken_bytes)
        return super().compare_calls(call, base, divisions)


@pytest.mark.parametrize(("limit_bytes", "expected"), [(11_000, {8000}), (12_000, {0})])
def test_a_call_is_timed_after_what_the_layers_before_it_take_of_the_common_buffer(
    limit_bytes: int, expected: set[int]
) -> None:
    # The first layer keeps PyTorch's own, in 8 kB; the second one's rival works in 4 kB.
    backend = _OnlyBehind({"rival": Recipe(rate(MS / 2), sample_bytes=500)})
    measurer = _Watching(backend)
    extraction = extract(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)).eval(), a_batch())
    profiler = Profiler(measurer, MemoryStore(), limit_bytes, Policy.POWER_OF_TWO)

    plan = Tuning(profiler, Mode.REUSE, extraction, Listener()).plan()

    assert keys_of(plan) == ["scripted:aten@8*1", "scripted:rival@8*1"]
    assert measurer.taken == expected
