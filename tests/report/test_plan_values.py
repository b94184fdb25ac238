"""Plans as JSON, and the totals of their sites."""

import dataclasses
import json
import math

import pytest

from mucudnn.division import Division
from mucudnn.evidence import Evidence
from mucudnn.intervals import Estimate, Verdict
from mucudnn.problem import ConvOp
from mucudnn.profile import Candidate
from mucudnn.report import Totals, plan_as_json, render_plan
from tests.examples import a_plan, an_environment
from tests.report.plans import (
    FASTER,
    KEPT,
    MIB,
    OVER_LIMIT,
    OWN,
    WINOGRAD,
    a_mixed_plan,
    a_plan_of_a_recording,
    a_plan_with_calls,
    a_plan_with_frozen,
    assigned,
    note,
    seconds,
    within_the_limit,
)


def test_json_has_whole_calls_and_their_totals() -> None:
    plan = a_plan_with_calls(assignments=within_the_limit())
    value = json.loads(json.dumps(plan_as_json(plan), allow_nan=False))

    assert [each["is_undone"] for each in value["calls"]] == [False, True]
    first = value["calls"][0]
    assert (first["path"], first["variant"], first["verdict"]) == ("conv1", 0, "FASTER")
    assert (first["before"]["median_s"], first["divided"]["median_s"]) == (0.030, 0.020)
    assert first["speedup"] == 1.49
    assert first["speedup_interval"] == {
        "median": 1.49, "low": pytest.approx(0.99 * 1.49), "high": pytest.approx(1.02 * 1.49), "rounds": 10
    }  # fmt: skip
    assert (value["totals"]["calls"], value["totals"]["calls_undone"]) == (2, 1)
    assert value["totals"]["calls_speedup"] == pytest.approx(4 / 3)
    assert [each["is_partly"] for each in value["calls"]] == [False, False]
    assert plan_as_json(a_mixed_plan())["calls"] == []


def test_json_marks_calls_of_which_some_op_may_not_run_as_before() -> None:
    value = plan_as_json(a_plan_with_calls())

    assert [each["is_partly"] for each in value["calls"]] == [True, False]
    totals = value["totals"]
    assert (totals["calls"], totals["calls_over"], totals["calls_undone"]) == (1, 1, 1)


def test_json_has_what_frozen_graphs_run() -> None:
    first, second, third = json.loads(json.dumps(plan_as_json(a_plan_with_frozen())))["frozen"]

    assert [each["is_own"] for each in (first, second, third)] == [False, True, True]
    assert (first["path"], first["variant"], first["verdict"]) == ("conv1", 0, "FASTER")
    assert (first["before"]["median_s"], first["divided"]["median_s"]) == (0.030, 0.020)
    assert (first["speedup"], first["speedup_interval"]["median"]) == (1.49, 1.49)
    assert (second["workspace_before_bytes"], second["verdict"]) == (64, "SLOWER")
    assert {third[name] for name in ("before", "divided", "speedup", "speedup_interval", "verdict")} == {None}


def test_totals_are_sums_of_times_where_both_are_known() -> None:
    totals = Totals.of(a_mixed_plan())

    assert (totals.sites, totals.paired, totals.without_base) == (4, 2, 1)
    assert totals.before_s == pytest.approx(0.020)
    assert totals.now_s == pytest.approx(0.015)
    assert totals.without_base_s == pytest.approx(0.004)
    assert totals.speedup == pytest.approx(4 / 3)  # the mean of the ratios 2 and 1 would be 1.5


def test_totals_count_each_site_once() -> None:
    other = Division((Candidate("cpu:im2col", 32, 0.007, MIB),))
    rows = (*a_mixed_plan().assignments, assigned("conv3", ConvOp.FPROP, other, FASTER))

    totals = Totals.of(a_mixed_plan(assignments=rows))

    counts = (totals.divided, totals.exchanged, totals.kept, totals.untimed)
    assert counts == (2, 1, 1, 1)
    assert sum(counts) == totals.sites


def test_totals_of_nothing_have_no_speedup() -> None:
    assert Totals.of(a_plan(assignments=())).speedup is None


def test_the_ends_of_the_total_are_those_of_all_sites_at_once() -> None:
    rounds = ((WINOGRAD.key, Estimate(2.0, 1.6, 2.5, 10)),)
    rows = (
        assigned("conv1", ConvOp.FPROP, WINOGRAD, dataclasses.replace(FASTER, speedups=rounds)),
        assigned("conv2", ConvOp.FPROP, OWN, KEPT),
    )
    plan = a_mixed_plan(assignments=rows)

    totals = Totals.of(plan)

    assert totals.ends == pytest.approx((20 / (10 / 1.6 + 10), 20 / (10 / 2.5 + 10)))
    assert (
        "1.33 times as fast (1.23 if each site is at the lower end of its interval, 1.43 if at the upper)."
        in note(render_plan(plan), "total")
    )


def test_the_ends_are_those_of_the_quotients_of_rounds_whatever_the_medians_are() -> None:
    rounds = ((WINOGRAD.key, Estimate(1.5, 1.45, 1.55, 10)),)  # the quotient of the medians is 2
    rows = (assigned("conv1", ConvOp.FPROP, WINOGRAD, dataclasses.replace(FASTER, speedups=rounds)),)

    totals = Totals.of(a_mixed_plan(assignments=rows))

    assert totals.speedup == pytest.approx(2)
    assert totals.ends == pytest.approx((1.45, 1.55))


def test_where_nothing_was_changed_no_ends_are_told() -> None:
    plan = a_mixed_plan(assignments=(assigned("conv2", ConvOp.FPROP, OWN, KEPT),))

    assert Totals.of(plan).ends is None


@pytest.mark.parametrize(
    "rounds",
    [(), ((WINOGRAD.key, Estimate(2.0, -math.inf, math.inf, 3)),), (("cpu:im2col@32*1", seconds(1.4)),)],
)
def test_a_site_without_an_interval_leaves_the_total_without_ends(
    rounds: tuple[tuple[str, Estimate], ...],
) -> None:
    rows = (
        assigned("conv1", ConvOp.FPROP, WINOGRAD, dataclasses.replace(FASTER, speedups=rounds)),
        assigned("conv2", ConvOp.FPROP, OWN, KEPT),
    )
    plan = a_mixed_plan(assignments=rows)

    assert Totals.of(plan).ends is None
    assert "lower end" not in render_plan(plan)


def test_the_same_time_in_several_parts_is_no_site_left_as_before() -> None:
    same = Evidence(seconds(0.010), seconds(0.010), Verdict.SAME)

    assert assigned("conv", ConvOp.FPROP, OWN, same).is_kept
    assert not assigned("conv", ConvOp.FPROP, WINOGRAD, same).is_kept
    assert not assigned("conv", ConvOp.FPROP, OWN, OVER_LIMIT).is_kept
    assert not assigned("conv", ConvOp.FPROP, OWN, Evidence()).is_kept


def test_json_has_times_in_seconds_and_workspaces_in_bytes() -> None:
    site = json.loads(json.dumps(plan_as_json(a_mixed_plan()), allow_nan=False))["sites"][0]

    assert (site["path"], site["op"], site["variant"]) == ("conv1", "fprop", 0)
    assert site["before"] == {
        "time": {"median_s": 0.010, "low_s": 0.0099, "high_s": pytest.approx(0.0102), "rounds": 10},
        "workspace_bytes": 3 * MIB,
    }
    assert site["now"]["division"] == "cpu:winograd4@16*2"
    assert site["now"]["parts"] == [{"algorithm": "cpu:winograd4", "batch": 16}] * 2
    assert site["now"]["time"]["median_s"] == 0.005
    assert (site["now"]["workspace_bytes"], site["now"]["allotted_bytes"]) == (MIB, MIB)
    assert (site["speedup"], site["verdict"], site["is_kept"]) == (2.0, "FASTER", False)
    assert site["rejected"][0]["division"] == "cpu:im2col@32*1"


def test_json_says_which_convolutions_are_transposed() -> None:
    sites = plan_as_json(a_mixed_plan(transposed=("conv2",)))["sites"]

    assert isinstance(sites, list)
    assert [site["is_transposed"] for site in sites] == [False, False, False, True]


def test_json_has_null_where_nothing_is_known() -> None:
    sites = json.loads(json.dumps(plan_as_json(a_mixed_plan()), allow_nan=False))["sites"]

    assert sites[2]["before"] == {"time": None, "workspace_bytes": None}
    assert (sites[2]["speedup"], sites[2]["verdict"]) == (None, None)
    assert sites[3]["now"]["time"] is None


def test_json_has_null_for_the_ends_of_no_interval() -> None:
    few = Estimate(0.010, -math.inf, math.inf, 5)
    rows = (assigned("conv", ConvOp.FPROP, WINOGRAD, Evidence(few, few)),)

    site = json.loads(json.dumps(plan_as_json(a_mixed_plan(assignments=rows)), allow_nan=False))["sites"][0]

    assert site["before"]["time"] == {"median_s": 0.010, "low_s": None, "high_s": None, "rounds": 5}


def test_json_has_limit_totals_environment_and_untouched() -> None:
    plan = a_mixed_plan(untouched=(("stem", "it is 3-D"),))

    value = json.loads(json.dumps(plan_as_json(plan), allow_nan=False))

    assert (value["mode"], value["policy"], value["version"]) == ("reuse", "power_of_two", "0.1.0")
    assert (value["limit_bytes"], value["workspace_bytes"]) == (8 * MIB, 3 * MIB)
    assert value["totals"]["speedup"] == pytest.approx(4 / 3)
    assert value["totals"]["predicted_s"] == pytest.approx(plan.time_s)
    assert value["environment"] == an_environment().to_json()
    assert value["untouched"] == [{"path": "stem", "reason": "it is 3-D"}]


def test_totals_count_predictions_among_the_sites_that_have_both_times() -> None:
    alone = dataclasses.replace(OVER_LIMIT, is_predicted=True)
    rows = (*a_plan_of_a_recording().assignments, assigned("conv3", ConvOp.FPROP, WINOGRAD, alone))
    plan = a_plan(assignments=rows, limit_bytes=8 * MIB)
    totals = Totals.of(plan)

    assert (totals.paired, totals.without_base, totals.predicted) == (2, 1, 1)
    assert "Of these, 1 are predicted." in note(render_plan(plan), "total")


def test_json_says_which_sites_are_predicted() -> None:
    value = json.loads(json.dumps(plan_as_json(a_plan_of_a_recording())))

    assert [site["is_predicted"] for site in value["sites"]] == [True, False]
