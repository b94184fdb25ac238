"""Second looks at what was faster, on a machine whose times are scripted."""

from collections.abc import Mapping
from typing import Any

import pytest
from torch import nn

from mucudnn.choices import Mode, Policy
from mucudnn.division import undivided
from mucudnn.errors import UnmeasuredError
from mucudnn.examining.extraction import Extraction, extract
from mucudnn.intervals import Verdict
from mucudnn.live.measurer import LiveMeasurer
from mucudnn.plan import Plan
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.profile import Record, Refusal, RefusalKind
from mucudnn.profiling.measurer import Divisions, ModelCall
from mucudnn.profiling.profiler import Profiler
from mucudnn.store import Store
from mucudnn.store.memory import MemoryStore
from mucudnn.tuning.run import Tuning
from tests.doubles import MS, Recipe, ScriptedBackend, rate
from tests.models import Listener, a_batch

pytestmark = pytest.mark.usefixtures("one_thread")

OWN, RIVAL = "scripted:aten@8*1", "scripted:rival@8*1"


class Drifting(ScriptedBackend):
    """All but PyTorch's own, which takes 8 ms, takes half of that, times a factor that changes."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__({"rival": Recipe(rate(0.5 * MS), setup_ns=1.0)})

    def ran(self, problem: ConvProblem, algorithm: str, n_bytes: int) -> None:
        before = self.world.now_ns
        super().ran(problem, algorithm, n_bytes)
        if algorithm != self.own:
            self.world.now_ns = before + round(self.factor * (self.world.now_ns - before))


class Looking(LiveMeasurer):
    """Tells the looks at whole calls: their numbers, input channels, and whether graphs are frozen."""

    def __init__(self, backend: Drifting, factors: Mapping[int, float]) -> None:
        super().__init__(backend)
        self.looks: list[tuple[int, int, bool]] = []
        self._drifting, self._factors = backend, factors

    def compare_calls(self, call: ModelCall, base: Divisions, divisions: Divisions) -> Any:
        self.looks.append((call.look, call.problem.in_channels, call.is_frozen))
        self._drifting.factor = self._factors.get(call.look, 1.0)
        return super().compare_calls(call, base, divisions)


class Lacking(Looking):
    """Memory is lacking for all but first looks."""

    def compare_calls(self, call: ModelCall, base: Divisions, divisions: Divisions) -> Any:
        if call.look > 1:
            raise UnmeasuredError("no memory")
        return super().compare_calls(call, base, divisions)


class Breaking(Looking):
    """The second look breaks, where there are frozen graphs at these."""

    def compare_calls(self, call: ModelCall, base: Divisions, divisions: Divisions) -> Any:
        if call.look == 2 and call.is_frozen == (self._drifting.packed is not None):
            return Record(call.trial(divisions), refusal=Refusal("", 8, RefusalKind.FAILED, "it broke"))
        return super().compare_calls(call, base, divisions)


def inference(*layers: nn.Module) -> Extraction:
    return extract(nn.Sequential(*layers).eval(), a_batch())


ONE = inference(nn.Conv2d(3, 4, 3))
TWO = inference(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))


def planned(
    extraction: Extraction,
    factors: Mapping[int, float],
    store: Store | None = None,
    packed_ms: float | None = None,
    kind: type[Looking] = Looking,
) -> tuple[Plan, list[tuple[int, int, bool]]]:
    """Return the plan, and the looks there were; factors are of the looks, packed_ms of a sample."""
    backend = Drifting()
    if packed_ms is not None:
        backend.packed = Recipe(rate(packed_ms * MS))
    measurer = kind(backend, factors)
    profiler = Profiler(measurer, MemoryStore() if store is None else store, 2**20, Policy.UNDIVIDED)
    tuning = Tuning(profiler, Mode.REUSE, extraction, Listener(), may_be_frozen=packed_ms is not None)
    return tuning.plan(), measurer.looks


def keys(plan: Plan) -> list[str]:
    return [division.key for division in plan.sites.values()]


def test_what_was_faster_is_looked_at_again_after_all_others() -> None:
    plan, looks = planned(TWO, {})

    assert looks == [(1, 3, False), (1, 4, False), (2, 3, False), (2, 4, False)]
    assert keys(plan) == [RIVAL] * 2
    assert [call.verdict for call in plan.calls] == [Verdict.FASTER] * 2


@pytest.mark.parametrize(("factor", "verdict"), [(2.0, Verdict.SAME), (3.0, Verdict.SLOWER)])
def test_what_is_not_faster_the_second_time_stays_pytorchs_own(factor: float, verdict: Verdict) -> None:
    plan, looks = planned(ONE, {2: factor})

    assert [look for look, *_ in looks] == [1, 2]
    assert keys(plan) == [OWN]
    (call,) = plan.calls
    assert call.verdict is verdict
    assert call.speedup.median == pytest.approx(2 / factor, rel=0.01)  # rounds that have chosen prove nothing


def test_what_is_not_faster_the_first_time_is_not_looked_at_again() -> None:
    plan, looks = planned(ONE, {1: 3.0})

    assert [look for look, *_ in looks] == [1]
    assert keys(plan) == [OWN]
    assert [call.verdict for call in plan.calls] == [Verdict.SLOWER]


def test_what_breaks_in_a_second_look_stays_pytorchs_own_and_has_no_times() -> None:
    plan, _ = planned(ONE, {}, kind=Breaking)

    assert keys(plan) == [OWN]
    assert plan.calls == ()


class LackingAtFirst(Looking):
    """Memory is lacking for the first look at the first convolution."""

    def compare_calls(self, call: ModelCall, base: Divisions, divisions: Divisions) -> Any:
        if not self.looks:
            self.looks.append((0, 0, False))
            raise UnmeasuredError("no memory")
        return super().compare_calls(call, base, divisions)


def test_calls_stand_in_a_plan_as_in_the_model_whenever_they_were_timed() -> None:
    store = MemoryStore()
    plan, _ = planned(TWO, {}, store, kind=LackingAtFirst)
    again, _ = planned(TWO, {}, store)

    assert [call.path for call in plan.calls] == ["0", "1"]
    assert again.to_text() == plan.to_text()


def test_where_nothing_can_be_looked_at_again_the_first_look_counts() -> None:
    plan, _ = planned(ONE, {}, kind=Lacking)

    assert keys(plan) == [RIVAL]
    assert [(call.verdict, call.speedup.samples) for call in plan.calls] == [(Verdict.FASTER, 10)]


def test_a_second_tuning_looks_at_nothing_anew() -> None:
    store = MemoryStore()
    first, looks = planned(ONE, {2: 3.0}, store)
    again, none = planned(ONE, {}, store)

    assert (len(looks), none) == (2, [])
    assert again.to_text() == first.to_text()


def test_a_first_look_has_the_name_that_stores_know_it_by() -> None:
    (problem,) = ONE.problems.values()
    call = ModelCall(problem, is_sharing=True, limit_bytes=2**20, is_frozen=True)
    divisions = {ConvOp.FPROP: undivided("scripted:rival", 8)}

    assert call.key(divisions) == f"fprop={RIVAL} sharing frozen"
    assert call._replace(look=2).key(divisions) == f"fprop={RIVAL} sharing frozen look2"


def test_frozen_graphs_are_looked_at_again_too() -> None:
    plan, looks = planned(TWO, {}, packed_ms=0.8)

    assert looks[4:] == [(1, 3, True), (1, 4, True), (2, 3, True), (2, 4, True)]
    assert [seen.is_own for seen in plan.frozen] == [False, False]
    assert all(seen.times is not None and seen.times.is_faster for seen in plan.frozen)


def test_what_is_not_faster_in_frozen_graphs_is_not_looked_at_again() -> None:
    plan, looks = planned(ONE, {}, packed_ms=0.3)

    assert [look for look, _, is_frozen in looks if is_frozen] == [1]
    assert [seen.is_own for seen in plan.frozen] == [True]


def test_what_breaks_in_a_second_look_at_frozen_graphs_is_pytorchs_own_there() -> None:
    plan, _ = planned(ONE, {}, packed_ms=0.8, kind=Breaking)

    assert keys(plan) == [RIVAL]
    assert [(seen.times, seen.is_own) for seen in plan.frozen] == [(None, True)]
