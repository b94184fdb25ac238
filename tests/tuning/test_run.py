"""One run of the tuner, on a machine whose times are scripted."""

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from torch import Tensor, nn

from mucudnn.backends import Job
from mucudnn.backends.base import Neighbours, NoNeighbours, Result
from mucudnn.choices import Mode, Policy, Search
from mucudnn.division import Division
from mucudnn.errors import BackendError, BusyWarning, InfeasibleError, UnmeasuredError, UntunedWarning
from mucudnn.evidence import Evidence, FrozenEvidence
from mucudnn.examining.extraction import Extraction, extract
from mucudnn.intervals import Verdict
from mucudnn.live.measurer import LiveMeasurer
from mucudnn.plan import Plan
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.profile import Candidate, Record, Refusal, RefusalKind
from mucudnn.profiling.measurer import Divisions, ModelCall, call_key, call_trial
from mucudnn.profiling.profiler import Profiler
from mucudnn.profiling.replay import Replay
from mucudnn.report import render_plan
from mucudnn.store import SqliteStore, Store
from mucudnn.store.memory import MemoryStore
from mucudnn.tuning.confirming import Confirmed, Pool, Proven, rivals_of
from mucudnn.tuning.run import Tuning
from tests.doubles import MS, Recipe, ScriptedBackend, rate
from tests.examples import a_problem
from tests.models import Listener, a_batch, a_chain

pytestmark = pytest.mark.usefixtures("one_thread")


def _tuned(
    backend: ScriptedBackend,
    extraction: Extraction,
    limit_bytes: int = 2**20,
    mode: Mode = Mode.REUSE,
    policy: Policy = Policy.POWER_OF_TWO,
    store: Store | None = None,
    listener: Listener | None = None,
    *,
    may_be_frozen: bool = False,
) -> Plan:
    """The plan for a machine whose time is scripted."""
    opened = MemoryStore() if store is None else store
    profiler = Profiler(LiveMeasurer(backend), opened, limit_bytes, policy)
    return Tuning(profiler, mode, extraction, listener or Listener(), may_be_frozen=may_be_frozen).plan()


def _one_convolution() -> Extraction:
    """fprop of 8 samples."""
    return extract(nn.Conv2d(3, 4, 3, padding=1).eval(), a_batch())


def _keys(plan: Plan) -> list[str]:
    return [division.key for division in plan.sites.values()]


def _parts(algorithm: str, size: int) -> Division:
    """Eight samples in equal parts."""
    return Division((Candidate(algorithm, size, 0.0, 0),) * (8 // size))


def _affine(each: float, part: float) -> Callable[[int], float]:
    """Milliseconds for each sample and for each part: the larger a part, the better."""
    return lambda samples: (each * samples + part) * MS


def _with_rival(ns: Callable[[int], float]) -> ScriptedBackend:
    """PyTorch's own takes 8 ms for 8 samples; the rival runs 4 samples at most in good time."""
    slow_when_whole = Recipe(lambda samples: ns(samples) if samples <= 4 else 100 * MS, setup_ns=0.001 * MS)
    return ScriptedBackend({"rival": slow_when_whole})


def test_a_division_that_is_faster_replaces_pytorchs_own() -> None:
    plan = _tuned(_with_rival(_affine(0.9, 0.02)), _one_convolution())

    assert _keys(plan) == ["scripted:rival@4*2"]


def test_a_division_that_is_as_fast_to_two_percent_does_not() -> None:
    # The profile says that it wins, by about one percent.
    plan = _tuned(_with_rival(_affine(0.98, 0.02)), _one_convolution())

    assert _keys(plan) == ["scripted:own@8*1"]


def test_a_division_that_may_or_may_not_be_faster_does_not() -> None:
    # Faster while it is profiled, in its median; then it wavers between much faster and much slower.
    noise = random.Random(1)

    def wavering(samples: int) -> float:
        return samples * MS * (0.5 if noise.random() < 0.55 else 1.5)

    plan = _tuned(_with_rival(wavering), _one_convolution())

    evidence = plan.assignments[0].evidence
    assert _keys(plan) == ["scripted:own@8*1"]
    assert evidence is not None
    assert [key for key, _ in evidence.rejected] == ["scripted:rival@4*2"]


def test_an_undivided_algorithm_that_is_faster_replaces_pytorchs_own() -> None:
    backend = ScriptedBackend({"rival": Recipe(_affine(0.5, 0.1))})

    assert _keys(_tuned(backend, _one_convolution())) == ["scripted:rival@8*1"]


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

    assert _keys(_tuned(backend, _one_convolution())) == ["scripted:whole@8*1"]


def test_what_was_profiled_slower_than_pytorchs_own_has_a_second_chance() -> None:
    own, slow = Candidate("own", 8, 8.0, 0), Candidate("rival", 4, 5.0, 0)

    rivals = rivals_of(a_problem(batch=8), Division((own,)), [own, slow], "own")

    assert list(rivals) == ["own@8*1", "rival@4*2"]


def test_where_the_limit_forbids_pytorchs_own_a_slower_division_runs() -> None:
    backend = ScriptedBackend({"slow": Recipe(rate(5 * MS))})

    plan = _tuned(backend, _one_convolution(), limit_bytes=500)

    evidence = plan.assignments[0].evidence
    assert {part.algorithm for division in plan.sites.values() for part in division.parts} == {
        "scripted:slow"
    }
    assert evidence is not None
    assert evidence.reference is None


def test_what_takes_more_than_it_declares_gives_way_to_what_fits() -> None:
    backend = ScriptedBackend(
        {
            "greedy": Recipe(rate(0.1 * MS), sample_bytes=100, unforeseen_bytes=2**20),
            "modest": Recipe(rate(2 * MS), sample_bytes=10),
        },
        own=Recipe(rate(MS), sample_bytes=10**6),
    )

    plan = _tuned(backend, _one_convolution(), limit_bytes=1000)

    assert {part.algorithm for division in plan.sites.values() for part in division.parts} == {
        "scripted:modest"
    }


@pytest.mark.parametrize("mode", Mode)
def test_where_everything_takes_more_than_it_declares_nothing_fits(mode: Mode) -> None:
    backend = ScriptedBackend(
        {"greedy": Recipe(rate(MS), sample_bytes=100, unforeseen_bytes=2**20)},
        own=Recipe(rate(MS), sample_bytes=10**6),
    )

    with pytest.raises(InfeasibleError, match="the model itself fprop"):
        _tuned(backend, _one_convolution(), limit_bytes=1000, mode=mode)


@pytest.mark.parametrize("mode", Mode)
def test_nothing_above_the_limit_is_run_by_a_whole_tuning(mode: Mode) -> None:
    backend = ScriptedBackend({"large": Recipe(rate(0.1 * MS), sample_bytes=900, unforeseen_bytes=300)})

    _tuned(backend, extract(a_chain(), a_batch()), limit_bytes=20_000, mode=mode)

    assert 0 < backend.largest_bytes <= 20_000


@pytest.mark.parametrize("mode", Mode)
def test_the_limit_named_is_the_least_where_all_workspaces_are_declared(mode: Mode) -> None:
    extraction = extract(a_chain(), a_batch())
    recipes = {"small": Recipe(rate(MS), sample_bytes=100), "large": Recipe(rate(MS), sample_bytes=500)}
    with pytest.raises(InfeasibleError, match=r"fits? the workspace limit of 0 bytes") as raised:
        _tuned(ScriptedBackend(recipes), extraction, 0, mode)
    least = raised.value.least_bytes
    assert least is not None

    plan = _tuned(ScriptedBackend(recipes), extraction, least, mode)

    assert plan.workspace_bytes == least
    with pytest.raises(InfeasibleError, match=f"a limit of {least} bytes .* may do"):
        _tuned(ScriptedBackend(recipes), extraction, least - 1, mode)


@pytest.mark.parametrize("mode", Mode)
def test_the_limit_named_does_even_where_less_would_that_nobody_could_weigh(mode: Mode) -> None:
    # PyTorch's own takes 80 bytes for the whole, which only running it would have told.
    def tuned(limit_bytes: int) -> Plan:
        backend = ScriptedBackend(
            {"small": Recipe(rate(MS), sample_bytes=100)}, own=Recipe(rate(MS), sample_bytes=10)
        )
        return _tuned(backend, _one_convolution(), limit_bytes, mode, Policy.UNDIVIDED)

    with pytest.raises(InfeasibleError, match=r"a limit of 800 bytes \(.*\) may do") as raised:
        tuned(0)

    assert raised.value.least_bytes == 800
    assert tuned(800).workspace_bytes <= 800
    assert tuned(80).workspace_bytes == 80


@pytest.mark.parametrize("limit_bytes", [0, 1000])
def test_in_sharing_mode_the_sentence_is_about_all_and_names_the_neediest(limit_bytes: int) -> None:
    # With 1000 bytes each convolution fits alone, but all together do not.
    backend = ScriptedBackend({"small": Recipe(rate(MS), sample_bytes=100)})
    extraction = extract(a_chain(), a_batch())

    with pytest.raises(
        InfeasibleError,
        match=r"all convolutions together fit the workspace .* may do, of which '3 wgrad' needs most",
    ) as raised:
        _tuned(backend, extraction, limit_bytes, Mode.SHARING)

    error = raised.value
    assert error.least_bytes is not None
    assert (error.limit_bytes, error.site, error.is_total) == (limit_bytes, "3 wgrad", True)
    plan = _tuned(backend, extraction, error.least_bytes, Mode.SHARING)
    assert plan.workspace_bytes <= error.least_bytes


def test_the_site_that_needs_most_is_named() -> None:
    # The sum of a weight gradient needs room for a filter: 4·3·9 numbers here, 5·4·9 there.
    backend = ScriptedBackend({"small": Recipe(rate(MS), sample_bytes=100)})

    with pytest.raises(InfeasibleError, match=r"'?3 wgrad'? fits the workspace limit of 0 bytes"):
        _tuned(backend, extract(a_chain(), a_batch()), 0)


def test_what_is_wrong_does_not_count_for_the_limit_named() -> None:
    def off_by_one(problem: object, result: Tensor, behind: Tensor) -> None:
        result.add_(1)

    backend = ScriptedBackend(
        {"wrong": Recipe(rate(MS), 0, damage=off_by_one), "right": Recipe(rate(MS), sample_bytes=100)}
    )

    with pytest.raises(InfeasibleError, match=r"a limit of 100 bytes \(.*\) may do"):
        _tuned(backend, _one_convolution(), 0)


@pytest.mark.parametrize("limit_bytes", [3000, 5000, 10_000, 20_000])
def test_in_sharing_mode_all_workspaces_together_are_within_the_limit(limit_bytes: int) -> None:
    # More workspace is always faster, so that every byte is worth having.
    backend = ScriptedBackend(
        {"large": Recipe(lambda samples: 2 * MS + samples * 0.1 * MS, sample_bytes=300)}
    )

    plan = _tuned(backend, extract(a_chain(), a_batch()), limit_bytes, Mode.SHARING)

    workspaces = [division.workspace_bytes for division in plan.sites.values()]
    assert sum(workspaces) <= limit_bytes
    assert sum(workspaces) == plan.workspace_bytes


def _seen_bytes(plan: Plan) -> list[int]:
    return [assigned.evidence.workspace_bytes or 0 for assigned in plan.assignments if assigned.evidence]


def test_in_sharing_mode_what_was_seen_of_all_sites_together_is_within_the_limit() -> None:
    # Declared is next to nothing, seen are 2/3 of the limit: one site may take that, two may not.
    greedy = Recipe(rate(0.1 * MS), sample_bytes=100, unforeseen_bytes=2**21)
    backend = ScriptedBackend({"greedy": greedy, "modest": Recipe(rate(0.5 * MS))})

    plan = _tuned(backend, extract(a_chain(), a_batch()), 3 * 2**20, Mode.SHARING)

    names = [key.partition("@")[0] for key in _keys(plan)]
    assert (names.count("scripted:greedy"), names.count("scripted:modest")) == (1, len(names) - 1)
    assert 2**21 < sum(_seen_bytes(plan)) <= 3 * 2**20


def test_in_sharing_mode_equal_sites_take_what_was_seen_of_one_each() -> None:
    # Each of three equal sites may take a third of what is spare: 1 MiB, and not 2.
    model = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))).eval()
    greedy = Recipe(rate(0.1 * MS), sample_bytes=100, unforeseen_bytes=2**21)
    backend = ScriptedBackend({"greedy": greedy, "modest": Recipe(rate(0.5 * MS))})

    plans = [_tuned(backend, extract(model, a_batch()), n * 2**20, Mode.SHARING) for n in (5, 7)]

    names = [{key.partition("@")[0] for key in _keys(plan)} for plan in plans]
    assert names == [{"scripted:modest"}, {"scripted:greedy"}]


def test_the_pool_of_sharing_mode_never_leaves_a_site_less_than_its_division_declares() -> None:
    # Proven are 40 KiB more than is declared, of which 10 are there for each site; the rest is noise.
    division = Division((Candidate("any", 8, 1.0, 1000),))
    pool = Pool(17 * 1000 + 160 * 2**10, [division] * 17)

    pool.settle(division, Proven(division, Evidence(workspace_bytes=1000 + 40 * 2**10)), sites=16)

    assert pool.room(division, sites=1) == 1000


def _two_alike() -> Extraction:
    """fprop of 8 samples, twice."""
    return extract(nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))).eval(), a_batch())


def test_equal_layers_have_equal_divisions_and_candidates() -> None:
    first, second = _tuned(_with_rival(_affine(0.5, 0.02)), _two_alike()).assignments

    assert not first.division.is_undivided
    assert (first.division, first.candidates) == (second.division, second.candidates)


def test_in_sharing_mode_pytorchs_own_is_timed_to_compare_though_no_share_has_room_for_it() -> None:
    # Undivided it takes 1.2 MB, for which the limit of both sites has room, but no site's half of it.
    backend = ScriptedBackend({}, own=Recipe(_affine(1, 0.1), sample_bytes=150_000))

    plan = _tuned(backend, _two_alike(), 1_300_000, Mode.SHARING)

    assert _keys(plan) == ["scripted:own@4*2"] * 2
    for evidence in (each.evidence for each in plan.assignments):
        assert evidence is not None
        assert evidence.reference is not None
    assert "SAME, share" in render_plan(plan)


def test_in_sharing_mode_pytorchs_own_does_not_stay_if_it_was_seen_to_take_more_than_a_share() -> None:
    # It declares next to nothing, and is seen to take 1 MiB, for which one site of both has room.
    own = Recipe(_affine(0.9, 0.8), sample_bytes=1000, unforeseen_bytes=2**20)
    as_fast = Recipe(_affine(0.8, 1.5), sample_bytes=2000, setup_ns=0.001 * MS)
    backend = ScriptedBackend({"rival": as_fast}, own=own)
    limit_bytes = int(1.2 * 2**20)

    plan = _tuned(backend, _two_alike(), limit_bytes, Mode.SHARING)

    assert _keys(plan) == ["scripted:rival@8*1"] * 2
    assert sum(_seen_bytes(plan)) <= limit_bytes


class _Startled(ScriptedBackend):
    """Weighs 1 MiB too much once, and again, as the processor's backend does, if that is over the limit."""

    is_startled = True

    def footprint(self, job: Job, limit_bytes: int) -> int | None:
        n_bytes, extra = super().footprint(job, limit_bytes), 2**20 if self.is_startled else 0
        self.is_startled = False
        return n_bytes if n_bytes is None or n_bytes + extra > limit_bytes else n_bytes + extra


def test_in_sharing_mode_what_was_seen_to_take_too_much_once_is_weighed_again() -> None:
    # Both sites want 1 MiB of 2.5; the first is weighed as 2, for which there is no room.
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)).eval()
    recipe, own = Recipe(_affine(0.1, 0.1), sample_bytes=2**17), Recipe(rate(MS), sample_bytes=2**22)
    backend, store = _Startled({"fast": recipe}, own=own), MemoryStore()
    extraction, limit_bytes = extract(model, a_batch()), 5 * 2**19

    first = _tuned(backend, extraction, limit_bytes, Mode.SHARING, store=store)
    second = _tuned(backend, extraction, limit_bytes, Mode.SHARING, store=store)

    assert _keys(first) == ["scripted:fast@8*1"] * 2
    assert _seen_bytes(first) == [2**20] * 2
    assert first.to_text() == second.to_text()


def test_in_sharing_mode_a_site_that_finds_no_room_is_named() -> None:
    backend = ScriptedBackend(
        {"greedy": Recipe(rate(MS), sample_bytes=100, unforeseen_bytes=2**20)},
        own=Recipe(rate(MS), sample_bytes=2**21),
    )

    with pytest.raises(InfeasibleError, match=r"all convolutions together .* found no room"):
        _tuned(backend, extract(a_chain(), a_batch()), 2**21, Mode.SHARING)


class _Weighing(ScriptedBackend):
    """Adds what lies in the buffer to what PyTorch's own takes elsewhere, whenever that runs."""

    held_bytes = 0
    together_bytes = 0

    def ran(self, problem: ConvProblem, algorithm: str, n_bytes: int) -> None:
        super().ran(problem, algorithm, n_bytes)
        if algorithm != self.own:
            self.held_bytes = max(self.held_bytes, n_bytes)

    def release(self, tail: Tensor) -> None:
        super().release(tail)
        self.held_bytes -= tail.numel()

    def own_convolution(self, problem: ConvProblem, *operands: Any) -> Tensor:
        self.together_bytes = max(self.together_bytes, self.held_bytes + self._needed(problem, self.own))
        return super().own_convolution(problem, *operands)


def test_in_reuse_mode_buffer_and_elsewhere_are_within_the_limit_together() -> None:
    # wgrad stays PyTorch's own, as a rival's sum finds no room; the others hold a buffer as large as that.
    undivided = Recipe(lambda samples: (0.5 if samples == 8 else 100) * samples * MS, sample_bytes=900)
    backend = _Weighing({"rival": undivided}, own=Recipe(rate(MS), sample_bytes=900))
    extraction, seen = extract(nn.Conv2d(3, 4, 3), a_batch().requires_grad_()), []

    class Weighed(LiveMeasurer):
        def compare_calls(self, call: ModelCall, base: Divisions, divisions: Divisions) -> Any:
            backend.held_bytes = backend.together_bytes = 0
            found = super().compare_calls(call, base, divisions)
            seen.append(backend.together_bytes)
            return found

    profiler = Profiler(Weighed(backend), MemoryStore(), 7500, Policy.POWER_OF_TWO)
    plan = Tuning(profiler, Mode.REUSE, extraction, Listener()).plan()

    assert _keys(plan) == ["scripted:rival@8*1"] * 2 + ["scripted:own@8*1"]
    assert [division.workspace_bytes for division in plan.sites.values()] == [7200] * 3
    assert seen == [7500, 7500]  # what is above was given back


def test_equal_problems_are_profiled_and_confirmed_once() -> None:
    once, thrice = (nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(n))).eval() for n in (1, 3))
    listeners = Listener(), Listener()

    plans = [
        _tuned(ScriptedBackend({"other": Recipe(rate(MS))}), extract(model, a_batch()), listener=listener)
        for model, listener in zip((once, thrice), listeners, strict=True)
    ]

    assert [len(plan.sites) for plan in plans] == [1, 3]
    assert listeners[0].measured == listeners[1].measured
    assert listeners[0].work == listeners[1].work
    assert listeners[0].steps == listeners[1].steps


def test_two_tunings_with_one_store_make_the_same_plan_though_times_differ() -> None:
    store, extraction = MemoryStore(), extract(a_chain(), a_batch())
    first = _tuned(ScriptedBackend({"other": Recipe(rate(0.5 * MS))}), extraction, store=store)

    second = _tuned(ScriptedBackend({"other": Recipe(rate(2 * MS))}), extraction, store=store)

    assert first.to_text() == second.to_text()


def test_a_division_too_large_to_be_timed_does_not_change_the_plan_of_a_second_run() -> None:
    backend = ScriptedBackend({"greedy": Recipe(rate(0.1 * MS), unforeseen_bytes=2**21)})
    store, listener = MemoryStore(), Listener()
    first = _tuned(backend, _one_convolution(), store=store)

    second = _tuned(backend, _one_convolution(), store=store, listener=listener)

    assert listener.measured == 0
    assert first.to_text() == second.to_text()


def test_the_ops_asked_for_are_the_sites_of_the_plan() -> None:
    plan = _tuned(ScriptedBackend({}), extract(a_chain(), a_batch(), [ConvOp.WGRAD]))

    assert [str(site) for site in plan.sites] == ["0 wgrad", "3 wgrad"]


def test_evidence_tells_times_workspaces_error_and_verdict() -> None:
    backend = ScriptedBackend({"rival": Recipe(_affine(0.5, 0.1), sample_bytes=10)})

    evidence = _tuned(backend, _one_convolution()).assignments[0].evidence

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

    (assigned,) = _tuned(ScriptedBackend(recipes), _one_convolution(), policy=Policy.ALL).assignments

    assert assigned.division.key == "scripted:exact@5*1+scripted:off@3*1"
    assert assigned.evidence is not None
    assert assigned.evidence.error == pytest.approx(3e-6, rel=0.2)  # roundings are 6e-8


def _fails_for_four_channels(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Let memory be lacking when a convolution from 4 channels to 4 is measured or compared."""
    own = getattr(LiveMeasurer, method)

    def fails(self: LiveMeasurer, problem: ConvProblem, *args: object) -> object:
        if problem.in_channels == problem.out_channels == 4:
            raise UnmeasuredError(f"{problem} could not be measured: CUDA out of memory")
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

    with pytest.warns(UntunedWarning, match=r"left as they are: 1 fprop, 2 fprop \(.*CUDA out of memory"):
        plan = _tuned(ScriptedBackend({"rival": Recipe(rate(0.5 * MS))}), extraction, mode=mode)

    assert [str(site) for site in plan.sites] == ["0 fprop", "3 fprop"]
    assert [path for path, _ in plan.untouched] == ["1", "2"]
    assert {reason.partition(" ")[0] for _, reason in plan.untouched} == {"fprop"}


@pytest.mark.parametrize("method", ["measure", "compare"])
def test_where_no_site_can_be_measured_tuning_ends(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _fails_for_four_channels(monkeypatch, method)
    extraction = extract(nn.Conv2d(4, 4, 3).eval(), a_batch(channels=4))

    with pytest.raises(UnmeasuredError, match="CUDA out of memory"):
        _tuned(ScriptedBackend({}), extraction)


class Unlisting(ScriptedBackend):
    """A device whose library cannot list the algorithms of a convolution from 4 channels to 4."""

    def algorithms(
        self, problem: ConvProblem, search: Search = Search.HEURISTIC, whole: bool = True
    ) -> tuple[str, ...]:
        if problem.in_channels == problem.out_channels == 4:
            raise BackendError("CUDNN_STATUS_INTERNAL_ERROR")
        return super().algorithms(problem, search, whole)


def test_a_site_whose_algorithms_cannot_be_listed_stays_as_it_is_and_is_told_of() -> None:
    layers = [nn.Conv2d(n, k, 3, padding=1) for n, k in itertools.pairwise((3, 4, 4, 3))]
    extraction = extract(nn.Sequential(*layers).eval(), a_batch())

    with pytest.warns(
        UntunedWarning, match=r"left as they are: 1 fprop \(.* measured: CUDNN_STATUS_INTERNAL"
    ):
        plan = _tuned(Unlisting({}), extraction)

    assert [str(site) for site in plan.sites] == ["0 fprop", "2 fprop"]


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
    ("fraction", "expected"), [(1.0, {"scripted:rival@8*1"}), (0.3, {"scripted:own@8*1"})]
)
def test_what_is_not_faster_as_a_model_calls_it_goes_back(
    fraction: float, expected: set[str], mode: Mode
) -> None:
    backend, store = QuickTogether({"rival": Recipe(_affine(0.85, 0.4), 1000)}), MemoryStore()
    backend.fraction = fraction
    extraction = extract(nn.Conv2d(3, 4, 3), a_batch().requires_grad_())

    plans = [_tuned(backend, extraction, mode=mode, store=store) for _ in range(2)]

    assert {*_keys(plans[0])} == expected
    assert len(plans[0].sites) == 3
    assert plans[1] == plans[0]


@pytest.mark.parametrize(("fraction", "verdict"), [(1.0, Verdict.FASTER), (0.3, Verdict.SLOWER)])
def test_the_plan_tells_what_whole_calls_took(fraction: float, verdict: Verdict) -> None:
    backend = QuickTogether({"rival": Recipe(_affine(0.85, 0.4), 1000)})
    backend.fraction = fraction
    plan = _tuned(backend, extract(nn.Conv2d(3, 4, 3), a_batch().requires_grad_()))

    (call,) = plan.calls

    assert (call.path, call.variant, call.verdict) == ("", 0, verdict)
    assert call.is_faster == (call.speedup.median > 1)
    assert call.is_faster == (call.divided.median < call.reference.median) == (verdict is Verdict.FASTER)


def test_what_was_measured_on_a_busy_machine_can_be_measured_anew() -> None:
    store = MemoryStore()
    convolution = extract(nn.Conv2d(3, 4, 3), a_batch().requires_grad_(), "wgrad")
    other = extract(nn.Conv2d(3, 5, 3), a_batch().requires_grad_(), "wgrad")
    busy = ScriptedBackend({"rival": Recipe(rate(2 * MS))})
    plans = [_tuned(busy, each, store=store) for each in (convolution, other)]
    call = convolution.calls[0]
    asked = ModelCall(call.problem, busy.own, is_sharing=False, limit_bytes=2**20)
    own, parts = ({op: _parts(busy.own, size) for op in call.computed} for size in (8, 4))
    Profiler(LiveMeasurer(busy), store, 2**20, Policy.UNDIVIDED).compare_calls(asked, own, parts)

    idle = ScriptedBackend({"rival": Recipe(rate(0.5 * MS))})
    profiler = Profiler(LiveMeasurer(idle), store, 2**20, Policy.POWER_OF_TWO)
    tuning = Tuning(profiler, Mode.REUSE, convolution, Listener())
    tuning.forget()
    anew = tuning.plan()

    assert [_keys(plan) for plan in (*plans, anew)] == [["scripted:own@8*1"]] * 2 + [["scripted:rival@8*1"]]
    times = {c.batch: c.time_s for c in anew.assignments[0].candidates if c.algorithm == "scripted:rival"}
    assert times == pytest.approx({size: size * 0.5e-3 for size in (1, 2, 4, 8)})  # of parts, too
    assert anew == _tuned(busy, convolution, store=store)
    keys = [call_key(asked, each) for each in (own, parts)]
    assert store.comparison(idle.environment(), call.problem, keys) is None  # fprop, which is not tuned
    assert _tuned(idle, other, store=store) == plans[1]


def test_what_a_smaller_mini_batch_was_tuned_with_stays_when_a_larger_one_is_measured_anew() -> None:
    store, backend = MemoryStore(), ScriptedBackend({"rival": Recipe(rate(2 * MS))})
    small, large = (extract(nn.Conv2d(3, 4, 3), a_batch(samples), "fprop") for samples in (4, 8))
    _tuned(backend, small, store=store, policy=Policy.UNDIVIDED)
    profiler = Profiler(LiveMeasurer(backend), store, 2**20, Policy.POWER_OF_TWO)

    tuning = Tuning(profiler, Mode.REUSE, large, Listener())
    tuning.plan()
    tuning.forget()

    ran = len(backend.world.ran)
    _tuned(backend, small, store=store, policy=Policy.UNDIVIDED)
    assert len(backend.world.ran) == ran


def test_a_call_of_which_nothing_is_divided_was_not_timed() -> None:
    assert _tuned(ScriptedBackend({}), _one_convolution()).calls == ()


def _with_packing(ns: Callable[[int], float], sample_bytes: int = 10) -> ScriptedBackend:
    """PyTorch's own takes 8 ms for 8 samples, and less in frozen graphs; the rival takes 4 ms."""
    backend = ScriptedBackend({"rival": Recipe(_affine(0.5, 0.001), sample_bytes=100)})
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
        _tuned(each, _one_convolution(), mode=mode, store=store, may_be_frozen=True) for each in backends
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
    for extraction, may_be_frozen in ((training, True), (_one_convolution(), False)):
        backend = _with_packing(rate(0.3 * MS))

        plan = _tuned(backend, extraction, may_be_frozen=may_be_frozen)

        assert plan.frozen == ()
        assert "packed@8" not in backend.world.ran


def test_what_frozen_graphs_run_is_within_the_limit_too() -> None:
    backend = _with_packing(rate(0.3 * MS), sample_bytes=2**20)

    assert _tuned(backend, _one_convolution(), may_be_frozen=True).frozen == ()
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
            return Record(call_trial(call, divisions), refusal=Refusal("", 8, RefusalKind.FAILED, answer))

    measurer = Answering(_with_packing(rate(0.7 * MS)))
    profiler = Profiler(measurer, MemoryStore(), 2**20, Policy.UNDIVIDED)

    plan = Tuning(profiler, Mode.REUSE, _one_convolution(), Listener(), may_be_frozen=True).plan()

    assert _keys(plan) == ["scripted:rival@8*1"]
    assert plan.frozen == (FrozenEvidence("", 0, 80),)


def test_pytorchs_own_may_stay_in_frozen_graphs_though_the_limit_forbids_it_elsewhere() -> None:
    backend = _with_packing(rate(0.3 * MS))

    plan = _tuned(backend, _one_convolution(), limit_bytes=1000, may_be_frozen=True)

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

    plan = _tuned(backend, extraction, limit_bytes=8000, may_be_frozen=True)

    assert _keys(plan) == ["scripted:rival@8*1", "scripted:own@8*1"]
    assert [(seen.path, seen.workspace_bytes, seen.times is None) for seen in plan.frozen] == [
        ("0", 0, False),
        ("1", 0, True),
    ]
    assert all(seen.is_own for seen in plan.frozen)
    backend.packed = Recipe(rate(0.3 * MS), 1)
    assert _tuned(backend, extraction, limit_bytes=8000, may_be_frozen=True).frozen == ()  # no room
    roomy = _tuned(backend, extraction, limit_bytes=16000, may_be_frozen=True)
    assert [seen.path for seen in roomy.frozen] == ["0"]


@pytest.mark.parametrize(("answer", "key"), [(None, "scripted:rival@8*1"), ("broken", "scripted:own@8*1")])
def test_divisions_stay_where_calls_cannot_be_timed_but_not_where_they_break(
    answer: str | None, key: str
) -> None:
    class Answering(LiveMeasurer):
        def compare_calls(self, call: ModelCall, base: Divisions, divisions: Divisions) -> Any:
            if answer is None:
                raise UnmeasuredError("no memory")
            return Record(call_trial(call, divisions), refusal=Refusal("", 8, RefusalKind.FAILED, answer))

    backend = ScriptedBackend({"rival": Recipe(rate(0.5 * MS))})
    profiler = Profiler(Answering(backend), MemoryStore(), 2**20, Policy.UNDIVIDED)

    plan = Tuning(profiler, Mode.REUSE, _one_convolution(), Listener()).plan()

    assert (_keys(plan), plan.calls) == ([key], ())


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
    Tuning(profiler, Mode.REUSE, _one_convolution(), listener).plan()

    what, done = zip(*listener.steps, strict=True)
    assert [text.split()[0] for text in what] == ["profiling", "waiting", "confirming", "waiting"]
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

    with pytest.warns(
        BusyWarning, match=r"^Others took all\. again=True \(mucudnn tune --again\) measures anew"
    ):
        Tuning(profiler, Mode.REUSE, _one_convolution(), Listener()).plan()


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
            plan = _tuned(backend, _one_convolution(), store=store)
        assert set(plan.others) == {1.25}


def test_what_was_called_as_in_a_model_is_not_called_again() -> None:
    backend, store = QuickTogether({"rival": Recipe(rate(0.5 * MS))}), MemoryStore()
    _tuned(backend, _one_convolution(), store=store)
    ran = len(backend.world.ran)

    _tuned(backend, _one_convolution(), store=store)

    assert len(backend.world.ran) == ran


def test_where_the_limit_forbids_pytorchs_own_nothing_goes_back() -> None:
    backend = QuickTogether({"rival": Recipe(rate(2 * MS), sample_bytes=10)})
    backend.fraction = 0.1

    plan = _tuned(backend, _one_convolution(), limit_bytes=500)

    assert _keys(plan) == ["scripted:rival@8*1"]


class FailsAsAWhole(ScriptedBackend):
    """One algorithm can be timed in parts, but not run in a finished division."""

    def footprint(self, job: Job, limit_bytes: int) -> int | None:
        if any(name == "scripted:quick" for name, _ in cast("list[list[object]]", job.payload["parts"])):
            raise RuntimeError("no such engine")
        return super().footprint(job, limit_bytes)


def test_a_division_that_fails_as_a_whole_gives_way_to_another_algorithm_of_any_size() -> None:
    backend = FailsAsAWhole({"quick": Recipe(rate(0.1 * MS)), "slow": Recipe(rate(3 * MS), sample_bytes=50)})

    plan = _tuned(backend, _one_convolution(), limit_bytes=500)  # PyTorch's own needs 1000 a sample

    assert {part.algorithm for each in plan.sites.values() for part in each.parts} == {"scripted:slow"}


def test_no_limit_is_named_that_only_what_breaks_would_fit() -> None:
    backend = FailsAsAWhole({"quick": Recipe(rate(0.1 * MS), sample_bytes=20)})

    with pytest.raises(InfeasibleError) as raised:
        _tuned(backend, _one_convolution(), limit_bytes=500)  # PyTorch's own needs 1000 a sample

    assert raised.value.least_bytes is None


def test_an_error_that_was_not_recorded_is_none_in_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Profiler, "errors", lambda *_: {("scripted:own", 8): 1e-7})

    (assigned,) = _tuned(_with_rival(_affine(0.5, 0.02)), _one_convolution()).assignments

    assert assigned.division.key == "scripted:rival@4*2"
    assert assigned.evidence is not None
    assert assigned.evidence.error is None


def test_of_what_may_run_at_a_site_the_heavier_counts_against_the_total() -> None:
    def seen(n_bytes: int) -> Proven:
        return Proven(Division((Candidate("a", 8, 1.0, 10),)), Evidence(workspace_bytes=n_bytes))

    light, heavy = seen(10), seen(15)

    assert Confirmed(light, None).heavier == light
    assert Confirmed(light, own=heavy).heavier == heavy
    assert Confirmed(heavy, own=light).heavier == heavy


def test_a_recording_replays_what_went_back(tmp_path: Path) -> None:
    backend = QuickTogether({"rival": Recipe(_affine(0.85, 0.4), 1000)})
    backend.fraction = 0.3
    extraction = extract(nn.Conv2d(3, 4, 3), a_batch().requires_grad_())
    with SqliteStore(tmp_path / "store.sqlite3") as store:
        plan = _tuned(backend, extraction, store=store)
        replay = Replay(store, store.environments()[0])
        profiler = Profiler(replay, MemoryStore(), plan.limit_bytes, plan.policy)
        replayed = Tuning(profiler, Mode.REUSE, extraction, Listener()).plan()

    assert {*_keys(plan)} == {"scripted:own@8*1"}
    assert replayed.sites == plan.sites


def test_a_problem_that_is_left_after_a_site_of_it_was_confirmed_is_left_altogether(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = [nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)] + [nn.Conv2d(4, 3, 1)]
    extraction = extract(nn.Sequential(*layers).eval(), a_batch(channels=4))
    backend = ScriptedBackend({"rival": Recipe(_affine(0.5, 0.4), 1000)})
    compared: list[ConvProblem] = []
    own = LiveMeasurer.compare

    def fails_the_second_time(self: LiveMeasurer, problem: ConvProblem, *args: Any) -> Any:
        compared.append(problem)
        if compared.count(problem) == 2:
            raise UnmeasuredError(f"{problem} could not be measured")
        return own(self, problem, *args)

    monkeypatch.setattr(LiveMeasurer, "compare", fails_the_second_time)

    with pytest.warns(UntunedWarning, match="0 fprop, 1 fprop, 2 fprop"):
        plan = _tuned(backend, extraction, limit_bytes=24_500, mode=Mode.SHARING)

    assert [str(site) for site in plan.sites] == ["3 fprop"]


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("ops", ["fprop", "wgrad"])
def test_ops_that_are_not_tuned_are_called_all_the_same(ops: str, mode: Mode) -> None:
    backend = ScriptedBackend({"rival": Recipe(_affine(0.5, 0.4), 1000)})
    extraction = extract(nn.Conv2d(3, 4, 3), a_batch().requires_grad_(), ops)
    asked: list[str] = []

    class Listening(LiveMeasurer):
        def compare_calls(self, call: ModelCall, base: Divisions, divisions: Divisions) -> Any:
            asked.append(call_key(call, divisions))
            return super().compare_calls(call, base, divisions)

    profiler = Profiler(Listening(backend), MemoryStore(), 2**20, Policy.UNDIVIDED)
    Tuning(profiler, mode, extraction, Listener()).plan()

    expected = {op: "scripted:rival@8*1" if op == ops else "scripted:own@8*1" for op in map(str, ConvOp)}
    first, second = (key.split() for key in asked)
    assert first[:3] == second[:3] == [f"{op}={name}" for op, name in expected.items()]
    assert ("sharing" in first) == ("sharing" in second) == (mode is Mode.SHARING)
    assert set(second) - set(first) == {"look2"}
