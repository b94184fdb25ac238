"""PyTorch's own convolution put back into a plan."""

import dataclasses

import pytest

from mucudnn.choices import Mode
from mucudnn.comparing.step_comparison import LayerComparison, PairedTimes
from mucudnn.comparing.taking_back import taken_back
from mucudnn.division import Division
from mucudnn.errors import PlanError
from mucudnn.intervals import Verdict
from mucudnn.plan import ConvSite
from mucudnn.problem import ConvOp
from mucudnn.profile import Candidate
from mucudnn.standing import may_stay
from tests.comparing.plans import FAST, HALF, SLOW, TIMES, WHOLE, assigned, planned

WITHIN = PairedTimes((100,) * 6, (150,) * 6)


def slower(*paths: str) -> list[LayerComparison]:
    return [LayerComparison(path, WITHIN) for path in paths]


def test_all_sites_of_a_module_run_pytorchs_own_again() -> None:
    plan = planned(assigned("one"), assigned("one", ConvOp.WGRAD), assigned("two"))

    back = taken_back(plan, slower("one"))

    assert [each.division.parts for each in back.assignments] == [(WHOLE,), (WHOLE,), (HALF, HALF)]
    assert [each.is_kept for each in back.assignments] == [True, True, False]
    back.check()


def test_the_evidence_is_that_of_pytorchs_own() -> None:
    first = taken_back(planned(assigned("one")), slower("one")).assignments[0].evidence

    assert first is not None
    assert (first.reference, first.chosen, first.verdict) == (SLOW, SLOW, Verdict.SAME)
    assert (first.workspace_bytes, first.error) == (3000, None)
    assert first.rejected == (("cpu:winograd4@16*2", FAST), ("cpu:z@32*1", SLOW))


def test_what_was_seen_of_the_call_gives_way_to_what_the_step_has_shown() -> None:
    back = taken_back(planned(assigned("one"), assigned("two")), slower("one"))

    two, one = back.calls
    assert (two.path, one.path, one.verdict, one.is_faster) == ("two", "one", Verdict.SLOWER, False)
    assert (one.reference, one.divided, one.speedup) == (WITHIN.before, WITHIN.now, WITHIN.speedup)
    assert [(seen.path, seen.times) for seen in back.frozen] == [("one", None), ("two", TIMES)]


def test_of_calls_of_several_shapes_a_step_tells_nothing_each() -> None:
    other = dataclasses.replace(assigned("one"), site=ConvSite("one", ConvOp.FPROP, 1))
    plan = planned(assigned("one"), other, assigned("two"))

    back = taken_back(plan, slower("one"))

    assert [each.path for each in back.calls] == ["two"]
    assert [each.is_kept for each in back.assignments] == [True, True, False]


def test_a_module_that_must_stay_keeps_all_that_is_known_of_it() -> None:
    plan = planned(assigned("one"), assigned("two", reference=None))

    back = taken_back(plan, slower("one", "two"))

    assert back.assignments[1] == plan.assignments[1]
    assert back.calls[0] == plan.calls[1]
    assert back.frozen[1] == plan.frozen[1]


def test_a_module_goes_back_as_a_whole_or_not_at_all() -> None:
    plan = planned(assigned("one"), assigned("one", ConvOp.WGRAD, reference=None))

    assert taken_back(plan, slower("one")) is plan


@pytest.mark.parametrize("seen_bytes", [None, 0])
def test_in_sharing_mode_what_was_profiled_counts_as_much_as_what_was_seen(seen_bytes: int | None) -> None:
    plan = planned(assigned("one", reference_workspace_bytes=seen_bytes), mode=Mode.SHARING)

    assert taken_back(plan, slower("one")) is plan


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        (Mode.REUSE, {"reference": None}),
        (Mode.REUSE, {"reference_workspace_bytes": 1 << 40}),
        (Mode.SHARING, {}),
        (Mode.SHARING, {"reference": None}),
    ],
    ids=["over the limit", "over it, but timed to compare", "over its share", "over both"],
)
def test_no_site_gets_more_than_it_may_take(mode: Mode, changes: dict[str, object]) -> None:
    plan = planned(assigned("one", **changes), mode=mode)

    assert not may_stay(plan.assignments[0], plan)
    assert taken_back(plan, slower("one")) is plan


@pytest.mark.parametrize("own_bytes", [500, HALF.workspace_bytes])
def test_in_sharing_mode_what_fits_the_share_goes_back(own_bytes: int) -> None:
    small = dataclasses.replace(WHOLE, workspace_bytes=own_bytes)
    site = assigned("one", reference_workspace_bytes=own_bytes)
    plan = planned(dataclasses.replace(site, candidates=(small, HALF)), mode=Mode.SHARING)

    assert taken_back(plan, slower("one")).assignments[0].division.parts == (small,)


@pytest.mark.parametrize("candidates", [(), (WHOLE,)], ids=["without a profile", "with one"])
def test_a_site_that_is_pytorchs_own_already_stays_as_it_is(candidates: tuple[Candidate, ...]) -> None:
    kept = dataclasses.replace(
        assigned("one", ConvOp.WGRAD, chosen=SLOW, verdict=Verdict.SAME),
        division=Division((WHOLE,)),
        candidates=candidates,
    )

    assert kept.is_kept
    assert taken_back(planned(assigned("one"), kept), slower("one")).assignments[1] == kept
    alone = planned(kept)
    assert taken_back(alone, slower("one")) is alone


def test_what_would_take_more_than_the_limit_is_refused() -> None:
    large = dataclasses.replace(WHOLE, workspace_bytes=10001)
    plan = planned(dataclasses.replace(assigned("one"), candidates=(large, HALF)))

    with pytest.raises(PlanError, match="at most 10000 bytes"):
        taken_back(plan, slower("one"))


def test_a_site_without_a_profile_stays() -> None:
    plan = planned(dataclasses.replace(assigned("one"), candidates=()))

    assert taken_back(plan, slower("one")) is plan


@pytest.mark.parametrize("paths", [[], ["three"]])
def test_nothing_changes_where_nothing_is_taken_back(paths: list[str]) -> None:
    plan = planned(assigned("one"))

    assert taken_back(plan, slower(*paths)) is plan
