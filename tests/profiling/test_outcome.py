"""What the times of parts add up to, and what that says of divisions."""

import math

import pytest

from mucudnn.intervals import Estimate, Verdict
from mucudnn.profile import Comparison, Measurement, Record
from mucudnn.profiling.outcome import Outcome, predicted_estimate
from tests.divisions import of_parts
from tests.examples import a_problem, a_trial

SEVEN = (90, 100, 100, 100, 100, 100, 120)
"""Nanoseconds whose interval reaches from 90 to 120: of seven samples, from the least to the largest."""


def _record(algorithm: str, spans_ns: tuple[int, ...], setup_ns: tuple[int, ...] = ()) -> Record:
    setup = Measurement(setup_ns) if setup_ns else None
    return Record(a_trial(algorithm), times=Measurement(spans_ns), setup=setup)


def test_parts_and_the_set_up_of_each_algorithm_add_up() -> None:
    division = of_parts(("a", 4), ("a", 4), ("b", 2))
    a, b = _record("a", SEVEN, (10, 10, 10, 10, 10, 10)), _record("b", (50,) * 6, (1, 2, 3, 3, 4, 5, 6))

    estimate = predicted_estimate(division, [a, a, b])

    # 2·100 + 10 + 50 + 3; the set-up of b reaches from 1 to 6.
    assert estimate == Estimate(
        pytest.approx(263e-9), pytest.approx(241e-9), pytest.approx(306e-9), samples=6
    )


def test_a_set_up_that_was_measured_twice_reaches_from_end_to_end() -> None:
    division = of_parts(("a", 4), ("a", 2))
    records = [_record("a", (50,) * 9, (10,) * 7), _record("a", (30,) * 9, (20,) * 8)]

    estimate = predicted_estimate(division, records)

    assert estimate.samples == 7
    assert (estimate.median, estimate.low, estimate.high) == pytest.approx((95e-9, 90e-9, 100e-9))


def test_who_left_a_race_early_is_beaten_by_what_takes_less_than_half_of_its_fastest_sample() -> None:
    slow = predicted_estimate(of_parts(("a", 4)), [_record("a", (100, 110, 120))])

    assert (slow.low, slow.high, slow.samples) == (pytest.approx(50e-9), math.inf, 3)


@pytest.mark.parametrize("spans_ns", [(100,), (100, 110)])
def test_fewer_samples_than_a_race_takes_before_anybody_leaves_bound_nothing(
    spans_ns: tuple[int, ...],
) -> None:
    disturbed = predicted_estimate(of_parts(("a", 4)), [_record("a", spans_ns)])

    assert (disturbed.low, disturbed.high, disturbed.samples) == (0.0, math.inf, len(spans_ns))


def test_a_part_without_times_has_no_prediction() -> None:
    with pytest.raises(ValueError, match=r"Every part must have times, but got none of a@4\."):
        predicted_estimate(of_parts(("a", 4)), [Record(a_trial("a"))])


def test_rounds_are_judged_in_pairs() -> None:
    # The pairs differ by ten percent, the intervals overlap.
    rounds = {"base": Measurement((100, 200, 300) * 5), "other": Measurement((90, 180, 270) * 5)}

    outcome = Outcome.of(Comparison(a_problem(), rounds, {"base": 7}))

    assert outcome.verdict("base", "other") is Verdict.FASTER
    assert (outcome.is_predicted, outcome.workspaces) == (False, {"base": 7})


def test_a_prediction_is_the_same_as_itself() -> None:
    outcome = Outcome({"a": Estimate(1.0, 0.5, 2.0, 10)}, {})

    assert outcome.verdict("a", "a") is Verdict.SAME
    assert (outcome.is_predicted, outcome.others) == (True, 0.0)


def test_predictions_are_judged_by_their_intervals() -> None:
    outcome = Outcome({"slow": Estimate(2.0, 1.9, 2.1, 10), "fast": Estimate(1.0, 0.9, 1.1, 10)}, {})

    assert outcome.verdict("slow", "fast") is Verdict.FASTER
    assert outcome.verdict("fast", "slow") is Verdict.SLOWER


def test_what_is_taken_out_keeps_its_workspace() -> None:
    outcome = Outcome({"a": Estimate(1.0, 0.5, 2.0, 10), "b": Estimate(1.0, 0.5, 2.0, 10)}, {"a": 1, "b": 2})

    assert list(outcome.without(["b"]).estimates) == ["a"]
    assert outcome.without(["b"]).workspaces == {"a": 1, "b": 2}


def test_a_speedup_is_that_of_the_rounds() -> None:
    times = {
        "base": Measurement((100, 200, 300)),
        "other": Measurement((50, 200, 100)),
        "too large": Measurement((1, 1, 1)),
    }
    outcome = Outcome.of(Comparison(a_problem(), times, {})).without(["too large"])

    ((key, speedup),) = outcome.speedups("base")

    assert (key, speedup.median, speedup.samples) == ("other", pytest.approx(2), 3)  # of 2, 1 and 3
    assert outcome.speedups("unknown") == ()


def test_speedups_are_told_in_the_order_of_their_keys() -> None:
    times = {key: Measurement((100, 100, 100)) for key in ("z", "base", "a")}

    outcome = Outcome.of(Comparison(a_problem(), times, {}))

    assert [key for key, _ in outcome.speedups("base")] == ["a", "z"]


def test_a_prediction_has_no_speedups() -> None:
    second = Estimate(1.0, 0.5, 2.0, 10)

    assert Outcome({"base": second, "other": second}, {}).speedups("base") == ()
