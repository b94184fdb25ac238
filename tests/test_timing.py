"""Races and comparisons on a machine whose time is scripted."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from mucudnn.intervals import Verdict, compare, ratio
from mucudnn.profile import Measurement
from mucudnn.timing import CONFIRMING, PROFILING, Entrant, SamplingRule, compare_runs, race
from tests.worlds import Cost, World, scripted

MS = 1_000_000
"""Nanoseconds of a millisecond."""

WARM_UP_RUNS = 1 + PROFILING.warmups
"""Runs of a call that fills a span, before its first sample."""


def _timed(world: World, cost: float | Cost, **rule: Any) -> Measurement:
    """Time one call that has no rivals."""
    entrant = Entrant(world.call("it", cost), rivals=0, workspace_bytes=0)
    return race(
        {"it": entrant}, SamplingRule(**{"looks": (6, 10, 15), "precision": 0.02, **rule}), world.clock
    )["it"]


def test_a_steady_call_is_known_at_the_first_look() -> None:
    assert _timed(World(), 2 * MS) == Measurement((2 * MS,) * 6, calls=1, converged=True)


def test_a_call_that_settles_is_known_at_the_look_that_sees_it() -> None:
    # Of ten samples the interval leaves out the least and the greatest: one outlier is forgiven.
    warm_up = [2 * MS] * WARM_UP_RUNS

    measurement = _timed(World(), scripted(*warm_up, 9 * MS, 2 * MS))

    assert (len(measurement.spans_ns), measurement.converged) == (10, True)


def test_a_call_that_never_settles_is_marked_at_the_last_look() -> None:
    world = World()

    measurement = _timed(world, world.noisy(2 * MS, spread=0.3))

    assert (len(measurement.spans_ns), measurement.converged) == (15, False)


def test_spikes_do_not_move_the_median() -> None:
    world = World()

    assert _timed(world, world.spiky(2 * MS)).estimate.median == pytest.approx(0.002)


def test_two_modes_are_told_and_not_averaged() -> None:
    world = World()

    measurement = _timed(world, world.two_modes(2 * MS, 3 * MS))

    assert not measurement.converged
    assert (measurement.estimate.low, measurement.estimate.high) == pytest.approx((0.002, 0.003))


def test_warm_up_is_no_sample() -> None:
    world = World()

    measurement = _timed(world, scripted(900 * MS, 30 * MS, 30 * MS, 2 * MS), warmups=2)

    assert measurement.spans_ns == (2 * MS,) * 6


def test_fewer_than_six_samples_are_never_known_well_enough() -> None:
    assert not _timed(World(), 2 * MS, looks=(3, 5)).converged


def test_short_calls_are_repeated_within_a_span() -> None:
    measurement = _timed(World(), 100, min_span_ns=50_000)

    assert measurement.calls == 512
    assert measurement.spans_ns == (51_200,) * 6
    assert measurement.estimate.median == pytest.approx(100e-9)


def test_a_disturbed_warm_up_does_not_make_spans_too_short() -> None:
    measurement = _timed(World(), scripted(100, 60_000, 100), min_span_ns=50_000)

    assert measurement.calls == 512


def test_a_span_is_filled_in_few_steps_and_not_by_doubling() -> None:
    world = World()

    measurement = _timed(world, 1_000, looks=(6,), min_span_ns=1_000_000, warmups=2)

    assert measurement.calls == 1024
    assert len(world.ran) == 1 + 2 * (1 + 64 + 1024) + 6 * 1024


@pytest.mark.parametrize("call_ns", [100, 700, 1_000, 30_000, 999_999, 1_000_000])
def test_a_span_that_waits_for_a_device_still_has_the_fewest_calls_that_fill_it(call_ns: int) -> None:
    world = World()
    wait_ns = 5_000

    def clock() -> int:  # whoever asks waits for the device, and half of it is in either end of a span
        world.now_ns += wait_ns
        return world.now_ns

    entrant = Entrant(world.call("it", call_ns), rivals=0, workspace_bytes=0)
    rule = SamplingRule(looks=(6,), precision=0.02, min_span_ns=1_000_000)
    calls = race({"it": entrant}, rule, clock)["it"].calls

    assert wait_ns + calls * call_ns >= rule.min_span_ns
    assert calls == 1 or wait_ns + calls // 2 * call_ns < rule.min_span_ns


def test_a_coarse_clock_that_sees_nothing_of_a_call_does_not_make_spans_of_minutes() -> None:
    world = World()
    tick_ns = 15 * MS

    entrant = Entrant(world.call("it", MS), rivals=0, workspace_bytes=0)
    rule = SamplingRule(looks=(6,), precision=0.02)
    calls = race({"it": entrant}, rule, lambda: world.now_ns // tick_ns * tick_ns)["it"].calls

    assert calls <= 64


def test_a_clock_that_stands_still_ends() -> None:
    measurement = _timed(World(), 0, looks=(6,))

    assert measurement.spans_ns == (1,) * 6


def _racers(world: World, *racers: tuple[str, float | Cost, int], rivals: object = 32) -> dict[str, Entrant]:
    """Entrants by name, from their costs and workspaces; all are rivals of one another."""
    return {name: Entrant(world.call(name, cost), rivals, workspace) for name, cost, workspace in racers}


def _lengths(measurements: dict[str, Measurement]) -> dict[str, int]:
    return {name: len(measurement.spans_ns) for name, measurement in measurements.items()}


def test_the_hopeless_leave_after_three_rounds() -> None:
    world = World()

    measured = race(_racers(world, ("fast", 2 * MS, 0), ("slow", 5 * MS, 0)), clock=world.clock)

    assert measured["slow"] == Measurement((5 * MS,) * 3, converged=False)
    assert measured["fast"].converged


def test_twice_as_slow_is_not_hopeless() -> None:
    world = World()

    measured = race(_racers(world, ("fast", 2 * MS, 0), ("slow", 4 * MS, 0)), clock=world.clock)

    assert _lengths(measured) == {"fast": 6, "slow": 6}


def test_who_was_disturbed_is_not_hopeless() -> None:
    world = World()
    disturbed = scripted(*(2 * MS,) * 4, 9 * MS, 9 * MS, 2 * MS)  # a call, two warm-ups, rounds

    measured = race(_racers(world, ("fast", 2 * MS, 0), ("slow", disturbed, 0)), clock=world.clock)

    assert len(measured["slow"].spans_ns) >= 6


def test_the_slowest_sample_of_a_rival_decides_who_is_hopeless() -> None:
    world = World()
    disturbed = scripted(*(2 * MS,) * 5, 9 * MS, 2 * MS)  # a call, two warm-ups, rounds

    measured = race(_racers(world, ("fast", disturbed, 0), ("slow", 5 * MS, 0)), clock=world.clock)

    assert len(measured["slow"].spans_ns) >= 6


def test_the_beaten_leave_at_a_look_with_their_samples() -> None:
    world = World()
    noisy = world.noisy(2 * MS, spread=0.1)

    measured = race(_racers(world, ("fast", noisy, 0), ("slow", 3 * MS, 0)), clock=world.clock)

    assert _lengths(measured) == {"fast": 15, "slow": 6}
    assert not measured["slow"].converged


@pytest.mark.parametrize(
    ("workspace", "slow_ms", "rounds"),
    [
        (100, 4, 6),
        (100, 4.1, 3),
        (100, 16, 3),
        (100, 17, 1),
        (99, 32, 6),
        (99, 33, 3),
        (99, 128, 3),
        (99, 129, 1),
    ],
    ids=["2", "over 2", "8", "over 8", "less, 16", "less, over 16", "less, 64", "less, over 64"],
)
def test_the_slower_the_sooner_it_leaves_and_later_if_it_needs_less(
    workspace: int, slow_ms: float, rounds: int
) -> None:
    world = World()

    measured = race(
        _racers(world, ("fast", 2 * MS, 100), ("slow", slow_ms * MS, workspace)), clock=world.clock
    )

    assert _lengths(measured) == {"fast": 6, "slow": rounds}
    assert measured["slow"].converged == (workspace == 99 and rounds == 6)


def test_who_was_disturbed_in_the_first_round_stays_for_the_warm_up() -> None:
    world = World()
    disturbed = scripted(*(2 * MS,) * 3, 900 * MS, 2 * MS)  # a call, two warm-ups, rounds

    measured = race(_racers(world, ("fast", 2 * MS, 0), ("slow", disturbed, 0)), clock=world.clock)

    assert len(measured["slow"].spans_ns) >= 6


def test_of_short_calls_too_the_warm_up_counts_for_who_was_disturbed_in_the_first_round() -> None:
    world = World()
    warm_up = 1 + 2 * (1 + 8)  # a call, then two spans of 1 and of 8
    disturbed = scripted(*(8_000,) * warm_up, *(MS,) * 8, 8_000)

    measured = race(_racers(world, ("fast", 8_000, 0), ("slow", disturbed, 0)), clock=world.clock)

    assert measured["slow"].calls == 8
    assert len(measured["slow"].spans_ns) >= 6


@pytest.mark.parametrize("slow_ms", [3, 30])
def test_a_slow_one_with_less_workspace_stays(slow_ms: int) -> None:
    world = World()

    measured = race(_racers(world, ("fast", 2 * MS, 100), ("slow", slow_ms * MS, 99)), clock=world.clock)

    assert measured["slow"] == Measurement((slow_ms * MS,) * 6, converged=True)


def test_a_slow_one_with_as_much_workspace_leaves() -> None:
    world = World()

    measured = race(_racers(world, ("fast", 2 * MS, 100), ("slow", 50 * MS, 100)), clock=world.clock)

    assert not measured["slow"].converged


def test_those_who_are_no_rivals_do_not_drop_one_another() -> None:
    world = World()
    entrants = {
        **_racers(world, ("small", 2 * MS, 0), rivals=16),
        **_racers(world, ("large", 50 * MS, 0), rivals=32),
    }

    measured = race(entrants, clock=world.clock)

    assert measured["large"].converged


def test_equal_candidates_both_stay() -> None:
    world = World(seed=3)
    noise = world.noisy(2 * MS, spread=0.05)

    measured = race(_racers(world, ("one", noise, 0), ("other", noise, 0)), clock=world.clock)

    assert _lengths(measured) == {"one": 15, "other": 15}


def test_drift_does_not_drop_an_equal_candidate() -> None:
    world = World()
    drift = world.drifting(2 * MS, per_call=0.01)

    measured = race(_racers(world, ("one", drift, 0), ("other", drift, 0)), clock=world.clock)

    assert _lengths(measured) == {"one": 15, "other": 15}


def test_rivals_stay_together_until_all_are_known() -> None:
    world = World()
    noisy = world.noisy(2 * MS, spread=0.3)

    measured = race(_racers(world, ("steady", 2 * MS, 0), ("noisy", noisy, 0)), clock=world.clock)

    assert _lengths(measured) == {"steady": 15, "noisy": 15}
    assert (measured["steady"].converged, measured["noisy"].converged) == (True, False)


def test_those_who_are_no_rivals_do_not_wait_for_one_another() -> None:
    world = World()
    noisy = world.noisy(2 * MS, spread=0.3)
    entrants = {
        **_racers(world, ("steady", 2 * MS, 0), rivals=16),
        **_racers(world, ("noisy", noisy, 0), rivals=32),
    }

    assert _lengths(race(entrants, clock=world.clock)) == {"steady": 6, "noisy": 15}


def test_the_answer_has_the_keys_and_the_order_of_the_entrants() -> None:
    world = World()
    entrants = _racers(world, *((name, 2 * MS, 0) for name in "cab"))

    assert list(race(entrants, clock=world.clock)) == ["c", "a", "b"]


def _rounds(seed: int) -> list[tuple[str, ...]]:
    """The orders in which four equal entrants are timed, round by round."""
    world = World()
    race(_racers(world, *((name, 2 * MS, 0) for name in "abcd")), clock=world.clock, seed=seed)
    timed = world.ran[4 * WARM_UP_RUNS :]
    return [tuple(timed[start : start + 4]) for start in range(0, len(timed), 4)]


def test_every_round_times_each_once_in_an_order_of_its_own() -> None:
    rounds = _rounds(seed=0)

    assert all(sorted(names) == ["a", "b", "c", "d"] for names in rounds)
    assert len(set(rounds)) > 1


def test_the_order_follows_from_the_seed() -> None:
    assert _rounds(seed=1) == _rounds(seed=1)
    assert _rounds(seed=1) != _rounds(seed=2)


def test_what_a_call_finds_ready_is_made_before_every_sample_and_is_not_in_its_time() -> None:
    world = World()
    before, ready = world.call("before", MS), world.call("ready", 5 * MS)
    entrants = {
        "one": Entrant(world.call("one", 2 * MS), 0, 0, ready),
        "two": Entrant(world.call("two", 3 * MS), 1, 0),
    }

    found = race(entrants, clock=world.clock, before=before)

    assert {name: each.estimate.median for name, each in found.items()} == {"one": 0.002, "two": 0.003}
    # Once before the first run, which is no span.
    places = [place for place, name in enumerate(world.ran) if name == "one"]
    assert world.ran[:2] == ["ready", "one"]
    assert {tuple(world.ran[place - 2 : place]) for place in places[1 + PROFILING.warmups :]} == {
        ("ready", "before")
    }
    assert world.ran.count("ready") == 1 + 6


def test_what_a_call_raises_is_left_to_the_caller() -> None:
    def fail() -> None:
        raise MemoryError("the device has no memory left")

    with pytest.raises(MemoryError, match="no memory left"):
        race({"it": Entrant(fail, 0, 0)}, clock=World().clock)


def test_a_race_of_none_is_over() -> None:
    assert race({}) == {}


def test_a_comparison_of_none_is_over() -> None:
    assert compare_runs({}) == {}


def _compared(world: World, *costs: float | Cost, rule: SamplingRule = CONFIRMING) -> list[Measurement]:
    """Compare calls that cost as given; the first is the base."""
    names = [f"division {index}" for index in range(len(costs))]
    calls: dict[str, Callable[[], None]] = {
        name: world.call(name, cost) for name, cost in zip(names, costs, strict=True)
    }
    measured = compare_runs(calls, rule, world.clock)
    assert list(measured) == names
    return list(measured.values())


def _verdict(base: Measurement, other: Measurement) -> Verdict:
    return compare(base.samples_s, other.samples_s)


def test_a_clear_gain_is_seen_at_the_first_look() -> None:
    world = World()

    base, other = _compared(world, world.noisy(2 * MS, 0.05), world.noisy(1 * MS, 0.05))

    assert len(other.spans_ns) == 10
    assert (_verdict(base, other), other.converged) == (Verdict.FASTER, True)


def test_the_slow_are_never_dropped() -> None:
    base, slow = _compared(World(), 2 * MS, 50 * MS)

    assert len(base.spans_ns) == len(slow.spans_ns) == 10


def test_one_open_pair_keeps_all_in_the_comparison() -> None:
    world = World()

    measured = _compared(world, 2 * MS, 1 * MS, world.noisy(2 * MS, 0.3))

    assert [len(one.spans_ns) for one in measured] == [45, 45, 45]
    assert [one.converged for one in measured] == [False, True, False]


def test_a_precise_ratio_at_the_edge_of_the_tolerance_is_settled() -> None:
    world = World()

    base, other = _compared(world, 2 * MS, world.noisy(1.96 * MS, 0.002))

    assert (len(other.spans_ns), other.converged) == (10, True)
    assert _verdict(base, other) is Verdict.AMBIGUOUS


def test_noise_that_meets_a_whole_round_does_not_delay_the_verdict() -> None:
    world = World()
    per_round = {n: world.noisy(2 * MS, 0.3)() for n in range(100)}
    base, other = itertools.count(), itertools.count()

    first, second = _compared(world, lambda: per_round[next(base)], lambda: 0.9 * per_round[next(other)])

    assert len(first.spans_ns) == 10
    assert _verdict(first, second) is Verdict.FASTER


def test_drift_does_not_pass_for_a_difference() -> None:
    world = World()
    drift = world.drifting(2 * MS, per_call=0.005)

    base, other = _compared(world, drift, drift)

    assert base.spans_ns[-1] > 1.05 * base.spans_ns[0]
    assert _verdict(base, other) is Verdict.SAME


def test_spikes_do_not_pass_for_a_difference() -> None:
    world = World()

    base, other = _compared(world, world.spiky(2 * MS), world.spiky(2 * MS))

    assert _verdict(base, other) is Verdict.SAME


@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_equal_divisions_are_seldom_told_apart(noise: float) -> None:
    verdicts = []
    for seed in range(200):
        world = World(seed)
        verdicts.append(_verdict(*_compared(world, world.noisy(2 * MS, noise), world.noisy(2 * MS, noise))))

    # However large the noise is beside the tolerance: at most 2.5 % on each side, all five looks together.
    assert verdicts.count(Verdict.FASTER) <= 5
    assert verdicts.count(Verdict.SLOWER) <= 5


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_the_interval_of_a_ratio_covers_it_though_sampling_may_stop_early(noise: float) -> None:
    covered = 0
    for seed in range(1000):
        world = World(seed)
        base, other = _compared(world, world.noisy(2 * MS, noise), world.noisy(1.96 * MS, noise))
        interval = ratio(base.samples_s, other.samples_s)
        covered += interval.low <= 0.98 <= interval.high

    assert covered >= 950


def test_spans_of_a_comparison_hold_as_many_calls_of_each() -> None:
    measured = _compared(World(), 10_000, 1_000)

    assert [one.calls for one in measured] == [64, 64]


def test_spans_of_far_shorter_rivals_are_cut_for_the_sake_of_the_longest() -> None:
    world = World()
    calls = {"long": world.call("long", 5 * MS), "short": world.call("short", 0.02 * MS)}

    measured = compare_runs(calls, SamplingRule(looks=(6,), precision=1, min_span_ns=3 * MS), world.clock)

    assert [each.calls for each in measured.values()] == [8, 8]
    assert measured["short"].estimate.median == pytest.approx(0.02e-3)


def test_a_base_alone_is_timed_up_to_the_first_look() -> None:
    (base,) = _compared(World(), 2 * MS)

    assert base == Measurement((2 * MS,) * 10, converged=True)


def _logged(world: World) -> Callable[[], int]:
    """The world's clock; every reading is logged as well."""

    def clock() -> int:
        world.ran.append("clock")
        return world.now_ns

    return clock


def _raced(world: World, before: Callable[[], None]) -> dict[str, Measurement]:
    racers = _racers(world, ("one", 2 * MS, 0), ("other", 3_000, 0))
    return race(racers, clock=_logged(world), before=before)


def _run_and_compared(world: World, before: Callable[[], None]) -> dict[str, Measurement]:
    calls = {"one": world.call("one", 2 * MS), "other": world.call("other", 3_000)}
    return compare_runs(calls, clock=_logged(world), before=before)


@pytest.mark.parametrize("timed", [_raced, _run_and_compared])
def test_every_span_follows_what_runs_before_it_directly(
    timed: Callable[[World, Callable[[], None]], dict[str, Measurement]],
) -> None:
    world = World()

    timed(world, world.call("before", 50 * MS))

    starts = [place for place, name in enumerate(world.ran) if name == "clock"][::2]
    assert {world.ran[place - 1] for place in starts} == {"before"}
    assert world.ran.count("before") == len(starts)


@pytest.mark.parametrize("timed", [_raced, _run_and_compared])
def test_what_runs_before_a_span_is_not_in_its_time(
    timed: Callable[[World, Callable[[], None]], dict[str, Measurement]],
) -> None:
    world = World()

    with_it, without = timed(world, world.call("before", 50 * MS)), timed(World(), lambda: None)

    assert with_it == without


@pytest.mark.parametrize("looks", [(), (0, 6), (6, 6), (10, 6)])
def test_looks_that_do_not_rise_are_refused(looks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="looks must rise from at least 1, but got"):
        SamplingRule(looks, precision=0.01)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"precision": 0.0}, "precision must be above 0, but got 0.0"),
        ({"precision": float("nan")}, "precision must be above 0, but got nan"),
        ({"min_span_ns": -1}, "min_span_ns must not be negative, but got -1"),
        ({"warmups": 0}, "warmups must be at least 1, but got 0"),
    ],
)
def test_a_rule_out_of_range_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingRule(**{"looks": (6,), "precision": 0.01, **fields})


def test_the_least_that_a_rule_may_ask_for_suffices_it() -> None:
    measurement = _timed(World(), 100, looks=(1,), min_span_ns=0, warmups=1)

    assert measurement == Measurement((100,), calls=1, converged=False)
