"""What calls have shown, and what other layers take before one, for which the common buffer makes room."""

import pytest

from mucudnn.choices import Mode, Policy
from mucudnn.division import Division, Room
from mucudnn.evidence import CallTimes
from mucudnn.examining.extraction import SiteCall
from mucudnn.live.measurer import LiveMeasurer
from mucudnn.plan import ConvSite
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.profile import Candidate, Comparison, Measurement
from mucudnn.profiling.measurer import ModelCall
from mucudnn.profiling.profiler import Profiler
from mucudnn.store import MemoryStore
from mucudnn.tuning.whole_calls import WholeCalls
from tests.doubles import MS, Recipe, ScriptedBackend, rate
from tests.examples import a_problem

PROBLEM = a_problem(op=ConvOp.FPROP)


def running(**workspaces: tuple[str, int]) -> dict[ConvSite, tuple[ConvProblem, Division]]:
    """Sites by their paths, with the algorithm and the bytes of workspace of each."""
    return {
        ConvSite(path, ConvOp.FPROP): (PROBLEM, Division((Candidate(name, PROBLEM.batch, 1.0, n_bytes),)))
        for path, (name, n_bytes) in workspaces.items()
    }


def taken(path: str, sites: dict[ConvSite, tuple[ConvProblem, Division]], mode: Mode = Mode.REUSE) -> int:
    """What other layers take before that one, under a limit of 100 bytes."""
    profiler = Profiler(LiveMeasurer(ScriptedBackend({})), MemoryStore(), 100, Policy.UNDIVIDED)
    return WholeCalls(profiler, mode).taken_before(SiteCall(path, 0, PROBLEM, *2 * [(ConvOp.FPROP,)]), sites)


def test_it_is_the_most_that_does_not_fit_beside_the_buffer() -> None:
    sites = running(
        here=("fast", 70), small=("cpu:aten", 30), large=("cpu:aten", 31), larger=("cpu:aten", 40)
    )

    assert taken("here", sites) == 40
    assert taken("here", sites, Mode.SHARING) == 0


def test_what_fits_beside_the_buffer_takes_none_of_it() -> None:
    assert taken("here", running(here=("fast", 70), small=("cpu:aten", 30))) == 0


def test_a_layer_makes_no_room_for_itself() -> None:
    sites = running(here=("cpu:aten", 90), other=("fast", 70))

    assert taken("here", sites) == 0
    assert taken("other", sites) == 90


def by(**names: str) -> dict[ConvOp, Division]:
    """Each op undivided, by an algorithm."""
    batch = PROBLEM.batch
    return {
        ConvOp(op): Division((Candidate(f"scripted:{name}", batch, 1.0, 0),)) for op, name in names.items()
    }


def test_a_call_against_pytorchs_own_of_any_op_stands_before_one_against_others() -> None:
    store, limit_bytes = MemoryStore(), 2**20
    profiler = Profiler(LiveMeasurer(ScriptedBackend({})), store, limit_bytes, Policy.UNDIVIDED)
    site = SiteCall("here", 0, PROBLEM, *2 * [(ConvOp.FPROP, ConvOp.DGRAD)])
    asked = ModelCall(PROBLEM, is_sharing=False, limit_bytes=limit_bytes)
    called, best = WholeCalls(profiler, Mode.REUSE), by(fprop="best", dgrad="best")

    for base, others in ((by(fprop="aten", dgrad="good"), 0.5), (by(fprop="good", dgrad="good"), 0.25)):
        times = {
            asked.key(each): Measurement((span_ns,) * 6, others=others)
            for each, span_ns in ((base, 200), (best, 100))
        }
        store.add_comparisons(profiler.environment, [Comparison(PROBLEM, times, {})])
        assert called.is_worth_it(site, base, best, look=1, taken_bytes=0)

    evidence = called.evidence(site)
    assert evidence is not None
    assert evidence.others == 0.5


@pytest.mark.parametrize(("first_ns", "is_faster"), [(100, True), (300, False)])
def test_a_later_look_counts_only_if_all_before_were_faster(first_ns: int, is_faster: bool) -> None:
    store, limit_bytes = MemoryStore(), 2**20
    profiler = Profiler(LiveMeasurer(ScriptedBackend({})), store, limit_bytes, Policy.UNDIVIDED)
    site = SiteCall("here", 0, PROBLEM, *2 * [(ConvOp.FPROP,)])
    base, best = by(fprop="aten"), by(fprop="best")
    for look, span_ns in ((1, first_ns), (2, 100)):
        asked = ModelCall(PROBLEM, is_sharing=False, limit_bytes=limit_bytes, look=look)
        spans = ((asked.key(base), 200), (asked.key(best), span_ns))
        times = {key: Measurement((span,) * 6) for key, span in spans}
        store.add_comparisons(profiler.environment, [Comparison(PROBLEM, times, {})])

    times = WholeCalls(profiler, Mode.REUSE).times(site, base, best, look=2)

    assert isinstance(times, CallTimes)
    assert times.is_faster is is_faster


@pytest.mark.parametrize("is_frozen", [False, True], ids=["called", "frozen"])
def test_a_call_is_timed_with_what_other_layers_take_before_it(is_frozen: bool) -> None:
    store, limit_bytes, taken_bytes = MemoryStore(), 2000, 1500
    backend = ScriptedBackend({}, own=Recipe(rate(MS), sample_bytes=0))
    backend.packed = Recipe(rate(MS))
    profiler = Profiler(LiveMeasurer(backend), store, limit_bytes, Policy.UNDIVIDED)
    site, called = SiteCall("here", 0, PROBLEM, *2 * [(ConvOp.FPROP,)]), WholeCalls(profiler, Mode.REUSE)
    base, best = by(fprop="aten"), Division((Candidate("scripted:best", PROBLEM.batch, 1.0, 1000),))
    asked = ModelCall(
        PROBLEM,
        is_sharing=False,
        limit_bytes=limit_bytes,
        is_frozen=is_frozen,
        taken_bytes=taken_bytes,
    )
    names = asked.key(base), asked.key({ConvOp.FPROP: best})
    times = {name: Measurement((span_ns,) * 6) for name, span_ns in zip(names, (200, 100), strict=True)}
    store.add_comparisons(profiler.environment, [Comparison(PROBLEM, times, {})])

    if is_frozen:
        frozen = called.frozen(site, best, Room(limit_bytes, 0), look=1, taken_bytes=taken_bytes)
        assert frozen is not None
        seen = frozen.times
    else:
        called.is_worth_it(site, base, {ConvOp.FPROP: best}, look=1, taken_bytes=taken_bytes)
        seen = called.evidence(site)

    assert "lost=500" in names[1]
    assert seen is not None
    assert seen.is_faster
