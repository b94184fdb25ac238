"""What a run makes of limits: what fits, what is shared out, and what is named where nothing does."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from mucudnn.backends import Job
from mucudnn.choices import Mode, Policy
from mucudnn.division import Division
from mucudnn.errors import InfeasibleError
from mucudnn.evidence import Evidence
from mucudnn.examining.extraction import Extraction, extract
from mucudnn.live.measurer import LiveMeasurer
from mucudnn.plan import Plan
from mucudnn.problem import ConvProblem
from mucudnn.profile import Candidate
from mucudnn.profiling.measurer import Divisions, ModelCall
from mucudnn.profiling.profiler import Profiler
from mucudnn.report import render_plan
from mucudnn.store.memory import MemoryStore
from mucudnn.tuning.confirming import Confirmed, Pool, Proven
from mucudnn.tuning.run import Tuning
from tests.doubles import MS, Recipe, ScriptedBackend, rate
from tests.models import Listener, a_batch, a_chain
from tests.tuning.runs import affine, keys_of, one_convolution, planned, with_rival

pytestmark = pytest.mark.usefixtures("one_thread")


def test_where_the_limit_forbids_pytorchs_own_a_slower_division_runs() -> None:
    backend = ScriptedBackend({"slow": Recipe(rate(5 * MS))})

    plan = planned(backend, one_convolution(), limit_bytes=500)

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

    plan = planned(backend, one_convolution(), limit_bytes=1000)

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
        planned(backend, one_convolution(), limit_bytes=1000, mode=mode)


class Telling(ScriptedBackend):
    """A device that tells what a finished division takes, be it above the limit."""

    def footprint(self, job: Job, limit_bytes: int) -> int | None:
        return super().footprint(job, max(limit_bytes, 2**30))


@pytest.mark.parametrize(("mode", "least_bytes"), [(Mode.REUSE, 2**20 + 100), (Mode.SHARING, None)])
def test_a_limit_is_named_by_what_was_seen_where_one_site_alone_is_bound(
    mode: Mode, least_bytes: int | None
) -> None:
    backend = Telling(
        {"greedy": Recipe(rate(MS), sample_bytes=100, unforeseen_bytes=2**20)},
        own=Recipe(rate(MS), sample_bytes=10**6),
    )

    with pytest.raises(InfeasibleError) as raised:
        planned(backend, one_convolution(), limit_bytes=1000, mode=mode)

    assert raised.value.least_bytes == least_bytes


@pytest.mark.parametrize("mode", Mode)
def test_nothing_above_the_limit_is_run_by_a_whole_tuning(mode: Mode) -> None:
    backend = ScriptedBackend({"large": Recipe(rate(0.1 * MS), sample_bytes=900, unforeseen_bytes=300)})

    planned(backend, extract(a_chain(), a_batch()), limit_bytes=20_000, mode=mode)

    assert 0 < backend.largest_bytes <= 20_000


@pytest.mark.parametrize("mode", Mode)
def test_the_limit_named_is_the_least_where_all_workspaces_are_declared(mode: Mode) -> None:
    extraction = extract(a_chain(), a_batch())
    recipes = {"small": Recipe(rate(MS), sample_bytes=100), "large": Recipe(rate(MS), sample_bytes=500)}
    with pytest.raises(InfeasibleError, match=r"fits? the workspace limit of 0 bytes") as raised:
        planned(ScriptedBackend(recipes), extraction, 0, mode)
    least = raised.value.least_bytes
    assert least is not None

    plan = planned(ScriptedBackend(recipes), extraction, least, mode)

    assert plan.workspace_bytes == least
    with pytest.raises(InfeasibleError, match=f"a limit of {least} bytes .* may be enough"):
        planned(ScriptedBackend(recipes), extraction, least - 1, mode)


@pytest.mark.parametrize("mode", Mode)
def test_the_limit_named_does_even_where_less_would_that_nobody_could_weigh(mode: Mode) -> None:
    # PyTorch's own takes 80 bytes for the whole, which only running it would have told.
    def tuned(limit_bytes: int) -> Plan:
        backend = ScriptedBackend(
            {"small": Recipe(rate(MS), sample_bytes=100)}, own=Recipe(rate(MS), sample_bytes=10)
        )
        return planned(backend, one_convolution(), limit_bytes, mode, Policy.UNDIVIDED)

    with pytest.raises(InfeasibleError, match=r"a limit of 800 bytes \(.*\) may be enough") as raised:
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
        match=r"all convolutions together fit the workspace .* may be enough, of which '3 wgrad' needs most",
    ) as raised:
        planned(backend, extraction, limit_bytes, Mode.SHARING)

    error = raised.value
    assert error.least_bytes is not None
    assert (error.limit_bytes, error.site, error.is_total) == (limit_bytes, "3 wgrad", True)
    plan = planned(backend, extraction, error.least_bytes, Mode.SHARING)
    assert plan.workspace_bytes <= error.least_bytes


def test_the_site_that_needs_most_is_named() -> None:
    # The sum of a weight gradient needs room for a filter: 4·3·9 numbers here, 5·4·9 there.
    backend = ScriptedBackend({"small": Recipe(rate(MS), sample_bytes=100)})

    with pytest.raises(InfeasibleError, match=r"'?3 wgrad'? fits the workspace limit of 0 bytes"):
        planned(backend, extract(a_chain(), a_batch()), 0)


@pytest.mark.parametrize(("limit_bytes", "mode"), [(0, Mode.REUSE), (1000, Mode.SHARING)])
def test_what_the_site_computes_that_needs_most_is_told(limit_bytes: int, mode: Mode) -> None:
    backend = ScriptedBackend({"small": Recipe(rate(MS), sample_bytes=100)})

    with pytest.raises(InfeasibleError, match=r"'?3 wgrad'? .* It computes wgrad 8x4x6x6 -> 5, "):
        planned(backend, extract(a_chain(), a_batch()), limit_bytes, mode)


@pytest.mark.parametrize("mode", Mode)
def test_of_a_module_that_meets_several_shapes_the_one_that_needs_most_is_told(mode: Mode) -> None:
    backend = ScriptedBackend({"small": Recipe(rate(MS), sample_bytes=100)})
    shared = nn.Conv2d(3, 3, 3)
    model = nn.Sequential(shared, shared, shared).eval()
    shapes = extract(model, torch.randn(2, 3, 9, 8))

    with pytest.raises(
        InfeasibleError, match=r"It computes fprop 2x3x9x8 -> 3, kernel 3x3, .*, float32 contiguous\.$"
    ) as raised:
        planned(backend, shapes, 0, mode)

    assert raised.value.site == "0 fprop"


def test_what_is_wrong_does_not_count_for_the_limit_named() -> None:
    def off_by_one(problem: object, result: Tensor, behind: Tensor) -> None:
        result.add_(1)

    backend = ScriptedBackend(
        {"wrong": Recipe(rate(MS), 0, damage=off_by_one), "right": Recipe(rate(MS), sample_bytes=100)}
    )

    with pytest.raises(InfeasibleError, match=r"a limit of 100 bytes \(.*\) may be enough"):
        planned(backend, one_convolution(), 0)


@pytest.mark.parametrize("limit_bytes", [3000, 5000, 10_000, 20_000])
def test_in_sharing_mode_all_workspaces_together_are_within_the_limit(limit_bytes: int) -> None:
    # More workspace is always faster, so that every byte is worth having.
    backend = ScriptedBackend(
        {"large": Recipe(lambda samples: 2 * MS + samples * 0.1 * MS, sample_bytes=300)}
    )

    plan = planned(backend, extract(a_chain(), a_batch()), limit_bytes, Mode.SHARING)

    workspaces = [division.workspace_bytes for division in plan.sites.values()]
    assert sum(workspaces) <= limit_bytes
    assert sum(workspaces) == plan.workspace_bytes


def _seen_bytes(plan: Plan) -> list[int]:
    return [assigned.evidence.workspace_bytes or 0 for assigned in plan.assignments if assigned.evidence]


def test_in_sharing_mode_what_was_seen_of_all_sites_together_is_within_the_limit() -> None:
    # Declared is next to nothing, seen are 2/3 of the limit: one site may take that, two may not.
    greedy = Recipe(rate(0.1 * MS), sample_bytes=100, unforeseen_bytes=2**21)
    backend = ScriptedBackend({"greedy": greedy, "modest": Recipe(rate(0.5 * MS))})

    plan = planned(backend, extract(a_chain(), a_batch()), 3 * 2**20, Mode.SHARING)

    names = [key.partition("@")[0] for key in keys_of(plan)]
    assert (names.count("scripted:greedy"), names.count("scripted:modest")) == (1, len(names) - 1)
    assert 2**21 < sum(_seen_bytes(plan)) <= 3 * 2**20


def test_in_sharing_mode_equal_sites_take_what_was_seen_of_one_each() -> None:
    # Each of three equal sites may take a third of what is spare: 1 MiB, and not 2.
    model = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))).eval()
    greedy = Recipe(rate(0.1 * MS), sample_bytes=100, unforeseen_bytes=2**21)
    backend = ScriptedBackend({"greedy": greedy, "modest": Recipe(rate(0.5 * MS))})

    plans = [planned(backend, extract(model, a_batch()), n * 2**20, Mode.SHARING) for n in (5, 7)]

    names = [{key.partition("@")[0] for key in keys_of(plan)} for plan in plans]
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
    first, second = planned(with_rival(affine(0.5, 0.02)), _two_alike()).assignments

    assert not first.division.is_undivided
    assert (first.division, first.candidates) == (second.division, second.candidates)


def test_in_sharing_mode_pytorchs_own_is_timed_to_compare_though_no_share_has_room_for_it() -> None:
    # Undivided it takes 1.2 MB, for which the limit of both sites has room, but no site's half of it.
    backend = ScriptedBackend({}, own=Recipe(affine(1, 0.1), sample_bytes=150_000))

    plan = planned(backend, _two_alike(), 1_300_000, Mode.SHARING)

    assert keys_of(plan) == ["scripted:aten@4*2"] * 2
    for evidence in (each.evidence for each in plan.assignments):
        assert evidence is not None
        assert evidence.reference is not None
    assert "SAME, share" in render_plan(plan)


def test_in_sharing_mode_pytorchs_own_does_not_stay_if_it_was_seen_to_take_more_than_a_share() -> None:
    # It declares next to nothing, and is seen to take 1 MiB, for which one site of both has room.
    own = Recipe(affine(0.9, 0.8), sample_bytes=1000, unforeseen_bytes=2**20)
    as_fast = Recipe(affine(0.8, 1.5), sample_bytes=2000, setup_ns=0.001 * MS)
    backend = ScriptedBackend({"rival": as_fast}, own=own)
    limit_bytes = int(1.2 * 2**20)

    plan = planned(backend, _two_alike(), limit_bytes, Mode.SHARING)

    assert keys_of(plan) == ["scripted:rival@8*1"] * 2
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
    recipe, own = Recipe(affine(0.1, 0.1), sample_bytes=2**17), Recipe(rate(MS), sample_bytes=2**22)
    backend, store = _Startled({"fast": recipe}, own=own), MemoryStore()
    extraction, limit_bytes = extract(model, a_batch()), 5 * 2**19

    first = planned(backend, extraction, limit_bytes, Mode.SHARING, store=store)
    second = planned(backend, extraction, limit_bytes, Mode.SHARING, store=store)

    assert keys_of(first) == ["scripted:fast@8*1"] * 2
    assert _seen_bytes(first) == [2**20] * 2
    assert first.to_text() == second.to_text()


def test_in_sharing_mode_a_site_that_finds_no_room_is_named() -> None:
    backend = ScriptedBackend(
        {"greedy": Recipe(rate(MS), sample_bytes=100, unforeseen_bytes=2**20)},
        own=Recipe(rate(MS), sample_bytes=2**21),
    )

    with pytest.raises(InfeasibleError, match=r"all convolutions together .* found no room"):
        planned(backend, extract(a_chain(), a_batch()), 2**21, Mode.SHARING)


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

    assert keys_of(plan) == ["scripted:rival@8*1"] * 2 + ["scripted:aten@8*1"]
    assert [division.workspace_bytes for division in plan.sites.values()] == [7200] * 3
    assert seen == [7500, 7500]  # what is above was given back


class FailsAsAWhole(ScriptedBackend):
    """One algorithm can be timed in parts, but not run in a finished division."""

    def footprint(self, job: Job, limit_bytes: int) -> int | None:
        if any(name == "scripted:quick" for name, _ in cast("list[list[object]]", job.payload["parts"])):
            raise RuntimeError("no such engine")
        return super().footprint(job, limit_bytes)


def test_a_division_that_fails_as_a_whole_gives_way_to_another_algorithm_of_any_size() -> None:
    backend = FailsAsAWhole({"quick": Recipe(rate(0.1 * MS)), "slow": Recipe(rate(3 * MS), sample_bytes=50)})

    plan = planned(backend, one_convolution(), limit_bytes=500)  # PyTorch's own needs 1000 a sample

    assert {part.algorithm for each in plan.sites.values() for part in each.parts} == {"scripted:slow"}


def test_an_algorithm_that_takes_more_than_those_that_fail_is_still_tried() -> None:
    quick, slow = Recipe(affine(1.0, 0.01), sample_bytes=50), Recipe(affine(9.0, 0.1), sample_bytes=100)
    backend = FailsAsAWhole({"quick": quick, "slow": slow})

    plan = planned(backend, one_convolution(), limit_bytes=900)  # PyTorch's own needs 1000 a sample

    assert keys_of(plan) == ["scripted:slow@8*1"]


def test_no_limit_is_named_that_only_what_breaks_would_fit() -> None:
    backend = FailsAsAWhole({"quick": Recipe(rate(0.1 * MS), sample_bytes=20)})

    with pytest.raises(InfeasibleError) as raised:
        planned(backend, one_convolution(), limit_bytes=500)  # PyTorch's own needs 1000 a sample

    assert raised.value.least_bytes is None


def test_of_what_may_run_at_a_site_the_heavier_counts_against_the_total() -> None:
    def seen(n_bytes: int) -> Proven:
        return Proven(Division((Candidate("a", 8, 1.0, 10),)), Evidence(workspace_bytes=n_bytes))

    light, heavy = seen(10), seen(15)

    assert Confirmed(light, None).heavier == light
    assert Confirmed(light, whole=heavy).heavier == heavy
    assert Confirmed(heavy, whole=light).heavier == heavy
