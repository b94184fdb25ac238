"""Which of the rivals at a site wins, by rounds that are written down."""

import dataclasses
import math

import pytest

from mucudnn.division import Division
from mucudnn.evidence import Evidence
from mucudnn.intervals import Estimate, Verdict
from mucudnn.problem import ConvOp
from mucudnn.profile import Candidate, Comparison, Measurement
from mucudnn.profiling.outcome import Outcome
from mucudnn.tuning.confirming import Confirmed, Pool, Proven, evidence_of, in_turn, winner
from tests.examples import a_problem


def _outcome(**spans_ms: list[int]) -> tuple[dict[str, Division], Outcome]:
    """Rivals of these names, undivided, and rounds in which they took so many milliseconds."""
    problem = a_problem(batch=8)
    rivals = {name: Division((Candidate(name, 8, 0.0, 0),)) for name in spans_ms}
    times = {
        rival.key: Measurement(tuple(span * 10**6 for span in spans_ms[name]))
        for name, rival in rivals.items()
    }
    keyed = {rival.key: rival for rival in rivals.values()}
    return keyed, Outcome.of(Comparison(problem, times, dict.fromkeys(times, 0)))


@pytest.mark.parametrize(
    ("first", "second", "third", "wins"),
    [
        ([100] * 10, [90] * 10, [80] * 10, "third"),
        ([100] * 10, [80] * 10, [90] * 10, "second"),
        ([100] * 10, [99] * 10, [90] * 10, "third"),
        ([100] * 10, [99] * 10, [100] * 10, "first"),
        ([100] * 10, [90] * 10, [89] * 10, "second"),
    ],
)
def test_the_first_rival_wins_unless_a_later_one_is_faster_than_the_best_before(
    first: list[int], second: list[int], third: list[int], wins: str
) -> None:
    rivals, outcome = _outcome(first=first, second=second, third=third)

    assert winner(rivals, outcome, "first@8*1").key == f"{wins}@8*1"


def test_what_is_faster_than_the_best_but_not_than_the_first_does_not_win() -> None:
    # Medians of quotients are not transitive: 0.8 or 1.8 of the first may be 0.89 of 0.9 of it.
    rivals, outcome = _outcome(own=[100] * 10, steady=[200, *[90] * 9], wavering=[180, 180, *[80] * 8])

    assert outcome.verdict("own@8*1", "steady@8*1") is Verdict.FASTER
    assert outcome.verdict("steady@8*1", "wavering@8*1") is Verdict.FASTER
    assert outcome.verdict("own@8*1", "wavering@8*1") is Verdict.AMBIGUOUS
    assert winner(rivals, outcome, "own@8*1").key == "steady@8*1"


def _unbounded(outcome: Outcome, name: str) -> Outcome:
    """The outcome, with nothing known of how fast one of them may be, as of one that left a race at once."""
    estimate = dataclasses.replace(outcome.estimates[name], low=0.0)
    return dataclasses.replace(outcome, estimates={**outcome.estimates, name: estimate}, comparison=None)


def test_what_left_a_race_at_once_is_beaten_unless_it_is_the_base() -> None:
    rivals, outcome = _outcome(once=[450] * 10, others=[5] * 10, parted=[2] * 10)
    unknown = _unbounded(outcome, "once@8*1")

    assert unknown.verdict("once@8*1", "parted@8*1") is not Verdict.FASTER
    assert winner(rivals, unknown, "own@8*1").key == "parted@8*1"
    assert winner(rivals, unknown, "once@8*1").key == "once@8*1"


def _predicted(**medians_s: float) -> tuple[dict[str, Division], Outcome]:
    """Rivals of these names, and what three samples each of their parts add up to: no interval."""
    rivals = [Division((Candidate(name, 8, 0.0, 0),)) for name in medians_s]
    estimates = {
        rival.key: Estimate(median, median / 2, math.inf, 3)
        for rival, median in zip(rivals, medians_s.values(), strict=True)
    }
    return {rival.key: rival for rival in rivals}, Outcome(estimates, dict.fromkeys(estimates, 0))


def test_of_predictions_without_intervals_the_medians_decide_where_the_base_may_not_run() -> None:
    rivals, outcome = _predicted(whole=5.0, parted=1.0, slower=2.0)

    assert winner(rivals, outcome, "own@8*1").key == "parted@8*1"
    assert winner(rivals, outcome, "whole@8*1").key == "whole@8*1"  # the base, which stays in doubt


def test_where_the_base_may_not_run_one_sample_tells_enough_to_be_chosen_by() -> None:
    rivals, outcome = _predicted(whole=5.0, parted=1.0)

    assert winner(rivals, _unbounded(outcome, "parted@8*1"), "own@8*1").key == "parted@8*1"


def test_what_is_predicted_to_be_hardly_faster_does_not_win() -> None:
    rivals, outcome = _predicted(whole=1.0, parted=0.99, more=0.985)

    assert winner(rivals, outcome, "own@8*1").key == "whole@8*1"


def test_where_the_base_may_not_run_what_rounds_leave_in_doubt_does_not_win() -> None:
    rivals, outcome = _outcome(whole=[100] * 10, parted=[*[90] * 6, *[110] * 4])

    assert outcome.verdict("whole@8*1", "parted@8*1") is Verdict.AMBIGUOUS
    assert winner(rivals, outcome, "own@8*1").key == "whole@8*1"


def test_rounds_tell_how_many_times_as_fast_as_the_reference_each_is_and_what_others_took() -> None:
    rivals, outcome = _outcome(own=[100] * 10, fast=[50] * 10, other=[200] * 10)
    assert outcome.comparison is not None
    disturbed = {key: dataclasses.replace(each, others=0.5) for key, each in outcome.comparison.times.items()}
    seen = Outcome.of(dataclasses.replace(outcome.comparison, times=disturbed))

    evidence = evidence_of(rivals["fast@8*1"], seen, "own@8*1", error=None)

    assert [(key, each.median) for key, each in evidence.speedups] == [("fast@8*1", 2), ("other@8*1", 0.5)]
    assert (evidence.others, evidence.is_predicted) == (0.5, False)


def test_what_was_predicted_is_told_so_and_has_no_rounds() -> None:
    rivals, outcome = _predicted(own=5.0, parted=1.0)

    evidence = evidence_of(rivals["parted@8*1"], outcome, "own@8*1", error=None)

    assert (evidence.is_predicted, evidence.speedups, evidence.others) == (True, (), 0)


def test_pytorchs_own_that_was_only_weighed_is_no_reference() -> None:
    rivals, outcome = _outcome(own=[100] * 10, fast=[50] * 10)

    evidence = evidence_of(rivals["fast@8*1"], outcome.without(["own@8*1"]), "own@8*1", error=None)

    assert (evidence.reference, evidence.verdict, evidence.reference_workspace_bytes) == (None, None, None)
    assert evidence.workspace_bytes == 0


@pytest.mark.parametrize(("seen", "expected"), [(None, 100), (80, 100), (120, 120)])
def test_a_division_takes_what_it_declares_or_was_seen_to_take_if_that_is_more(
    seen: int | None, expected: int
) -> None:
    division = Division((Candidate("fast", 8, 0.0, 100),))

    assert Proven(division, Evidence(workspace_bytes=seen)).workspace_bytes == expected


def test_what_may_take_a_divisions_place_comes_apart_pytorchs_own_last() -> None:
    own, other, parted = (
        Proven(Division((Candidate(name, size, 0.0, 0),) * (8 // size)), Evidence())
        for name, size in (("cpu:aten", 8), ("other", 8), ("cpu:aten", 4))
    )
    found = {
        ConvOp.FPROP: Confirmed(parted, own),
        ConvOp.DGRAD: Confirmed(parted, other),
        ConvOp.WGRAD: Confirmed(parted, None),
    }

    assert in_turn(found) == ({ConvOp.DGRAD: other}, {ConvOp.FPROP: own})


MIB = 2**20


@pytest.mark.parametrize(("seen", "room"), [(None, 4), (1, 4), (3, 3), (9, 2)])
def test_what_a_site_is_seen_to_take_beyond_its_share_is_no_longer_there_for_others(
    seen: int | None, room: int
) -> None:
    first, second = (Division((Candidate(name, 8, 0.0, 2 * MIB),)) for name in ("first", "second"))
    pool = Pool(6 * MIB, [first, second])

    pool.settle(first, Proven(first, Evidence(workspace_bytes=None if seen is None else seen * MIB)), 1)

    assert pool.room(second, sites=1) == room * MIB
