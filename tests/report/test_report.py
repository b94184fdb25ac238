"""Plans as text and as JSON."""

import dataclasses
import json
import math
from typing import Any

import pytest

from mucudnn.choices import Mode
from mucudnn.division import Division
from mucudnn.evidence import CallEvidence, CallTimes, Evidence, FrozenEvidence
from mucudnn.intervals import Estimate, Verdict
from mucudnn.plan import Assignment, ConvSite, Plan
from mucudnn.problem import ConvOp, Layout
from mucudnn.profile import Candidate
from mucudnn.report import (
    Totals,
    describe_environment,
    describe_runs,
    describe_shape,
    is_kept,
    plan_as_json,
    render_notes,
    render_plan,
)
from tests.examples import a_candidate, a_plan, a_problem, an_environment

MIB = 2**20

OWN = Division((Candidate("cpu:aten", 32, 0.010, 3 * MIB),))
WINOGRAD = Division((Candidate("cpu:winograd4", 16, 0.003, MIB),) * 2)
MIXED = Division.of((*WINOGRAD.parts[:1], Candidate("cpu:im2col", 8, 0.002, 512), a_candidate(batch=8)))


def seconds(median: float, samples: int = 10) -> Estimate:
    """An interval of 1 % below and 2 % above the median."""
    return Estimate(median, 0.99 * median, 1.02 * median, samples)


FASTER = Evidence(
    reference=seconds(0.010),
    chosen=seconds(0.005),
    verdict=Verdict.FASTER,
    reference_workspace_bytes=3 * MIB,
    workspace_bytes=MIB,
    error=2e-6,
    rejected=(("cpu:im2col@32*1", seconds(0.007)),),
)
PREDICTED = dataclasses.replace(FASTER, is_predicted=True)
KEPT = Evidence(seconds(0.010, 45), seconds(0.010, 45), Verdict.SAME, 3 * MIB, 3 * MIB)
OVER_LIMIT = Evidence(chosen=seconds(0.004), workspace_bytes=MIB)


def assigned(
    path: str, op: ConvOp, division: Division, evidence: Evidence | None, variant: int = 0, **problem: Any
) -> Assignment:
    return Assignment(ConvSite(path, op, variant), a_problem(op=op, **problem), division, (), evidence)


def a_mixed_plan(**changes: Any) -> Plan:
    """Four sites: one twice as fast, one left as before, one that the limit forbids, one not timed."""
    rows = (
        assigned("conv1", ConvOp.FPROP, WINOGRAD, FASTER),
        assigned("conv1", ConvOp.DGRAD, OWN, KEPT),
        assigned("conv1", ConvOp.WGRAD, WINOGRAD, OVER_LIMIT),
        assigned("conv2", ConvOp.FPROP, OWN, None),
    )
    return a_plan(**{"assignments": rows, "limit_bytes": 8 * MIB, **changes})


def row(text: str, start: str) -> list[str]:
    """Return the cells of the first row that starts so."""
    line = next(line for line in text.splitlines() if line.strip().startswith(start))
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def note(text: str, label: str) -> str:
    """Return the text beside a label, its lines joined."""
    lines = iter(text.splitlines())
    first = next(line for line in lines if line.startswith(f"{label} "))
    rest = []
    for line in lines:
        if not line.startswith(" "):
            break
        rest.append(line.strip())
    return " ".join([first.removeprefix(label).strip(), *rest])


def test_a_row_tells_time_and_workspace_before_and_now() -> None:
    assert row(render_plan(a_mixed_plan()), "fprop") == [
        "fprop",
        "10.00 [9.90, 10.20]",
        "3 MiB",
        "winograd4 2×16",
        "5.000 [4.950, 5.100]",
        "1 MiB",
        "2.00",
        "FASTER",
    ]


def test_a_site_without_gain_is_listed_like_all_others() -> None:
    cells = row(render_plan(a_mixed_plan()), "dgrad")

    assert cells[3:] == [
        "aten 1×32",
        "10.00 [9.90, 10.20]",
        "3 MiB",
        "1.00",
        "own",
    ]


def test_a_site_whose_base_the_limit_forbids_has_no_number_for_it() -> None:
    cells = row(render_plan(a_mixed_plan()), "wgrad")

    assert cells[1:3] == ["not run", "-"]
    assert cells[-2:] == ["-", "over limit"]


def test_in_sharing_mode_too_it_is_the_limit_that_forbids_to_run_the_base() -> None:
    text = render_plan(a_mixed_plan(mode=Mode.SHARING))

    assert row(text, "wgrad")[1] == "not run"
    assert "PyTorch's own needs more workspace there than the limit" in note(text, "over limit")
    assert "share" not in note(text, "verdicts")


@pytest.mark.parametrize(("mode", "mark"), [(Mode.SHARING, ", share"), (Mode.REUSE, "")])
def test_a_base_that_lost_for_want_of_room_alone_is_marked(mode: Mode, mark: str) -> None:
    slower = dataclasses.replace(FASTER, chosen=seconds(0.020), verdict=Verdict.SLOWER)
    plan = a_plan(mode=mode, assignments=(assigned("conv1", ConvOp.FPROP, WINOGRAD, slower),))
    text, (site,) = render_plan(plan), json.loads(json.dumps(plan_as_json(plan)))["sites"]

    assert row(text, "fprop")[-1] == f"SLOWER{mark}"
    assert ("share: it needs more than the site's share" in note(text, "verdicts")) == bool(mark)
    assert site["is_base_over_share"] == bool(mark)


def test_the_speedup_is_that_of_the_rounds() -> None:
    rounds = (("cpu:im2col@32*1", seconds(1.4)), ("cpu:winograd4@16*2", seconds(1.75)))
    seen = dataclasses.replace(FASTER, speedups=rounds)
    plan = a_plan(assignments=(assigned("conv1", ConvOp.FPROP, WINOGRAD, seen),))
    text, (site,) = render_plan(plan), json.loads(json.dumps(plan_as_json(plan)))["sites"]

    assert row(text, "fprop")[-2:] == ["1.75", "FASTER"]  # the quotient of the medians is 2
    assert site["speedup"] == 1.75
    assert site["speedups"]["cpu:im2col@32*1"]["median"] == 1.4
    assert "Comparisons made: 2;" in note(text, "verdicts")


def test_what_was_not_chosen_is_compared_too_where_pytorchs_own_stays() -> None:
    rival = ("cpu:im2col@32*1", seconds(0.97))
    seen = dataclasses.replace(KEPT, rejected=(("cpu:im2col@32*1", seconds(0.011)),), speedups=(rival,))
    plan = a_plan(assignments=(assigned("conv1", ConvOp.FPROP, OWN, seen),))
    text, (site,) = render_plan(plan), json.loads(json.dumps(plan_as_json(plan)))["sites"]

    assert row(text, "fprop")[-2:] == ["1.00", "own"]
    assert (site["verdict"], site["speedups"]["cpu:im2col@32*1"]["median"]) == (None, 0.97)
    assert "Comparisons made: 1;" in note(text, "verdicts")


def test_a_site_that_was_not_timed_says_so() -> None:
    text = render_plan(a_plan())

    assert row(text, "fprop") == [
        "fprop", "not timed", "-", "direct 2×16", "not timed", "1 KiB", "-", "-"
    ]  # fmt: skip
    assert note(text, "total").startswith("No site has both a time before and a time now")
    assert "verdicts" not in text


def test_rows_stand_under_the_convolution_that_they_belong_to() -> None:
    text = render_plan(a_mixed_plan())

    starts = [line.split()[0] for line in text.partition("\n\ntotal")[0].splitlines()[4:]]
    assert starts == ["conv1", "fprop", "dgrad", "wgrad", "conv2", "fprop"]


def a_plan_with_calls() -> Plan:
    """The mixed plan, of which one convolution is 1.5 times as fast in whole calls, and one no faster."""
    calls = (
        CallEvidence(seconds(0.030), seconds(0.020), seconds(1.49), Verdict.FASTER, "conv1", 0),
        CallEvidence(seconds(0.010), seconds(0.011), seconds(0.91), Verdict.AMBIGUOUS, "conv2", 0),
    )
    return a_mixed_plan(calls=calls)


def test_a_whole_call_stands_below_its_sites() -> None:
    text = render_plan(a_plan_with_calls())

    starts = [line.split()[0] for line in text.partition("\n\ntotal")[0].splitlines()[4:]]
    assert starts == ["conv1", "fprop", "dgrad", "wgrad", "call*", "conv2", "fprop", "call*"]
    assert row(text, "call") == ["call*", "30.00 [29.70, 30.60]", "20.00 [19.80, 20.40]", "1.49", "FASTER"]


def test_a_call_that_was_not_kept_shows_what_runs_now_and_what_was_tried() -> None:
    text = render_plan(a_plan_with_calls())

    assert row(text.partition("\nconv2")[2], "call")[1:] == [
        "10.00 [9.90, 10.20]", "tried: 11.00 [10.89, 11.22]", "10.00 [9.90, 10.20]", "1.00", "own"
    ]  # fmt: skip


def test_a_call_is_marked_unless_all_of_it_was_timed_before() -> None:
    call = CallEvidence(seconds(0.030), seconds(0.020), seconds(1.49), Verdict.FASTER, "conv", 0)
    timed = assigned("conv", ConvOp.FPROP, WINOGRAD, FASTER)
    over_limit = assigned("conv", ConvOp.WGRAD, WINOGRAD, OVER_LIMIT)

    for rows, name in (((timed,), "call"), ((timed, over_limit), "call*")):
        assert row(render_plan(a_plan(assignments=rows, calls=(call,))), "call")[0] == name


def test_a_convolution_whose_rows_are_anothers_names_that_one() -> None:
    rows = tuple(assigned(f"conv{number}", ConvOp.FPROP, WINOGRAD, FASTER) for number in range(3))
    others = (
        assigned("wide", ConvOp.FPROP, WINOGRAD, FASTER, in_channels=24),
        assigned("slow", ConvOp.FPROP, OWN, KEPT),
    )

    text = render_plan(a_plan(assignments=(*rows, *others)))

    table = text.partition("\n\ntotal")[0].splitlines()[4:]
    assert [line for line in table if " as " in line] == ["conv1  as conv0", "conv2  as conv0"]
    assert sum(line.startswith("  fprop") for line in table) == 3


def test_the_notes_add_up_whole_calls_and_count_what_was_not_kept() -> None:
    text = render_plan(a_plan_with_calls())

    assert note(text, "whole calls") == (
        "2 convolutions timed with forward pass and gradients together: 40.00 ms before, 30.00 ms now, 1.33 "
        "times as fast (1.32 if each call is at the lower end of its interval, 1.35 if at the upper); 1 "
        "tried, but not kept."
    )
    assert note(text, "calls").endswith("Calls compared: 2.")
    assert "\ncalls " not in render_plan(a_mixed_plan())


def test_a_convolution_that_was_not_timed_as_a_whole_call_is_counted() -> None:
    text = render_plan(a_mixed_plan())

    assert note(text, "whole calls").startswith("Not timed for 1 convolution, whose sites are chosen by")
    assert "Not timed for" not in render_plan(a_plan_with_calls())
    kept = assigned("conv", ConvOp.FPROP, OWN, KEPT)
    assert "Not timed for" not in render_plan(a_plan(assignments=(kept,)))


def test_in_sharing_mode_a_call_is_marked_where_the_share_keeps_pytorchs_own_away() -> None:
    call = CallEvidence(seconds(0.030), seconds(0.020), seconds(1.49), Verdict.FASTER, "conv", 0)
    rows = (assigned("conv", ConvOp.FPROP, WINOGRAD, FASTER),)  # PyTorch's own takes 3 MiB, and this one 1

    for mode, name in ((Mode.REUSE, "call"), (Mode.SHARING, "call*")):
        assert row(render_plan(a_plan(mode=mode, assignments=rows, calls=(call,))), "call")[0] == name


def test_equal_calls_count_as_one_comparison() -> None:
    (call, _) = a_plan_with_calls().calls
    plan = a_mixed_plan(calls=(call, dataclasses.replace(call, path="conv2")))

    assert note(render_plan(plan), "calls").endswith("Calls compared: 1.")


def test_json_has_whole_calls_and_their_totals() -> None:
    value = json.loads(json.dumps(plan_as_json(a_plan_with_calls()), allow_nan=False))

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
    assert plan_as_json(a_mixed_plan())["calls"] == []


def test_times_that_others_may_have_moved_are_told_of() -> None:
    rows = (
        assigned("conv1", ConvOp.FPROP, WINOGRAD, dataclasses.replace(FASTER, others=0.42)),
        assigned("conv2", ConvOp.FPROP, WINOGRAD, dataclasses.replace(FASTER, others=0.42)),  # the same
        assigned("conv1", ConvOp.DGRAD, OWN, KEPT),
    )
    plan = a_mixed_plan(assignments=rows)

    assert note(render_plan(plan), "disturbed").startswith(
        "While 1 of the plan's 2 times were measured, others took up to 0.4 processors, so these and "
    )
    assert [each["others"] for each in plan_as_json(plan)["sites"]] == [0.42, 0.42, 0]
    assert "disturbed" not in render_plan(a_mixed_plan())


def a_plan_with_frozen() -> Plan:
    """The mixed plan, of whose convolutions frozen graphs run one as planned, one not, and one is its own."""
    frozen = (
        FrozenEvidence(
            "conv1", 0, 0, CallTimes(seconds(0.030), seconds(0.020), seconds(1.49), Verdict.FASTER)
        ),
        FrozenEvidence(
            "conv2", 0, 64, CallTimes(seconds(0.010), seconds(0.011), seconds(0.91), Verdict.SLOWER)
        ),
        FrozenEvidence("conv3", 0, 64),
    )
    return a_mixed_plan(frozen=frozen)


def test_a_note_tells_what_frozen_graphs_run() -> None:
    assert note(render_plan(a_plan_with_frozen()), "frozen") == (
        "Graphs that torch.compile freezes for inference hold PyTorch's own with its filters packed "
        "beforehand. Against that 1 of 2 convolutions are faster; the others are PyTorch's own there: "
        "40.00 ms before, 30.00 ms now."
    )
    untimed = a_mixed_plan(frozen=a_plan_with_frozen().frozen[2:])
    assert not any("frozen" in render_plan(plan) for plan in (a_mixed_plan(), untimed))


def test_json_has_what_frozen_graphs_run() -> None:
    first, second, third = json.loads(json.dumps(plan_as_json(a_plan_with_frozen())))["frozen"]

    assert [each["is_own"] for each in (first, second, third)] == [False, True, True]
    assert (first["path"], first["variant"], first["verdict"]) == ("conv1", 0, "FASTER")
    assert (first["before"]["median_s"], first["divided"]["median_s"]) == (0.030, 0.020)
    assert (first["speedup"], first["speedup_interval"]["median"]) == (1.49, 1.49)
    assert (second["workspace_before_bytes"], second["verdict"]) == (64, "SLOWER")
    assert {third[name] for name in ("before", "divided", "speedup", "speedup_interval", "verdict")} == {None}


def test_a_second_shape_of_a_module_and_a_model_that_is_a_convolution_are_named() -> None:
    rows = (
        assigned("", ConvOp.FPROP, OWN, KEPT),
        assigned("conv", ConvOp.FPROP, OWN, KEPT, variant=1, input_size=(7, 7)),
    )
    text = render_plan(a_mixed_plan(assignments=rows))

    assert "the model itself  32x16x14x12 -> 24" in text
    assert "conv (shape 2)  32x16x7x7 -> 24" in text


def test_several_algorithms_stand_below_one_another() -> None:
    text = render_plan(a_mixed_plan(assignments=(assigned("conv", ConvOp.FPROP, MIXED, FASTER),)))

    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if "winograd4 1×16" in line)
    assert [line.strip() for line in lines[start + 1 : start + 3]] == ["+ direct 1×8", "+ im2col 1×8"]


def test_the_workspace_now_is_what_the_plan_allots_where_none_was_seen() -> None:
    unseen = Evidence(seconds(0.010), seconds(0.005), Verdict.FASTER, 0, workspace_bytes=0)
    text = render_plan(a_mixed_plan(assignments=(assigned("conv", ConvOp.FPROP, WINOGRAD, unseen),)))

    assert row(text, "fprop")[2:6:3] == ["0 B", "1 MiB"]


@pytest.mark.parametrize(
    ("median", "text"),
    [
        (3.2154, "3215 [3183, 3280]"),
        (0.0321541, "32.15 [31.83, 32.80]"),
        (0.00321541, "3.215 [3.183, 3.280]"),
        (0.0000321541, "0.0322 [0.0318, 0.0328]"),
        (0.0, "0.0000 [0.0000, 0.0000]"),
    ],
)
def test_times_are_milliseconds_in_four_digits(median: float, text: str) -> None:
    evidence = Evidence(seconds(median), seconds(median), Verdict.SAME)

    rows = (assigned("conv", ConvOp.FPROP, OWN, evidence),)
    assert row(render_plan(a_mixed_plan(assignments=rows)), "fprop")[1] == text


def test_a_time_of_few_rounds_has_their_number_instead_of_an_interval() -> None:
    few = Estimate(0.010, -math.inf, math.inf, 5)
    plan = a_mixed_plan(
        assignments=(assigned("conv", ConvOp.FPROP, WINOGRAD, Evidence(few, few, Verdict.AMBIGUOUS)),)
    )

    assert row(render_plan(plan), "fprop")[1] == "10.00 (n = 5)"


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

    assert is_kept(assigned("conv", ConvOp.FPROP, OWN, same))
    assert not is_kept(assigned("conv", ConvOp.FPROP, WINOGRAD, same))
    assert not is_kept(assigned("conv", ConvOp.FPROP, OWN, OVER_LIMIT))
    assert not is_kept(assigned("conv", ConvOp.FPROP, OWN, Evidence()))


def test_the_note_on_totals_names_sites_times_and_base() -> None:
    text = render_plan(a_mixed_plan())

    assert note(text, "total") == (
        "2 of 4 sites have a time before and now: 20.00 ms before, 15.00 ms now, 1.33 times as fast."
    )
    assert note(text, "over limit").startswith("1 of 4 sites, 4.000 ms now. PyTorch's own needs more")
    assert "over limit  " not in render_plan(a_mixed_plan(assignments=a_mixed_plan().assignments[:2]))


def test_a_plan_that_is_slower_says_so() -> None:
    slower = dataclasses.replace(FASTER, chosen=seconds(0.025), verdict=Verdict.SLOWER)
    plan = a_plan(mode=Mode.SHARING, assignments=(assigned("conv", ConvOp.FPROP, WINOGRAD, slower),))

    assert note(render_plan(plan), "slower").startswith(
        "These convolutions take 2.50 times as long as before"
    )
    assert "slower  " not in render_plan(a_mixed_plan())


def test_the_note_on_sites_counts_what_became_of_them() -> None:
    assert note(render_plan(a_mixed_plan()), "sites") == (
        "2 in micro-batches, 0 undivided with another algorithm, PyTorch's own at 1, 1 undivided and not "
        "timed."
    )


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        (Mode.REUSE, "The largest site is allotted 3 MiB; the limit for each is 8 MiB."),
        (Mode.SHARING, "All sites together are allotted 8 MiB; the limit for their sum is 8 MiB."),
    ],
)
def test_the_note_on_workspace_says_whose_the_limit_is(mode: Mode, text: str) -> None:
    assert note(render_plan(a_mixed_plan(mode=mode)), "workspace") == text


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        (
            Mode.REUSE,
            "The largest site is allotted 1 MiB, and 1.5 MiB were seen; the limit for each is 8 MiB.",
        ),
        (Mode.SHARING, "are allotted 2 MiB, and 3 MiB were seen; the limit for their sum is 8 MiB."),
    ],
)
def test_the_note_on_workspace_says_what_was_seen_where_that_is_more(mode: Mode, text: str) -> None:
    more = dataclasses.replace(FASTER, workspace_bytes=3 * MIB // 2)
    rows = (assigned("a", ConvOp.FPROP, WINOGRAD, more), assigned("b", ConvOp.FPROP, WINOGRAD, more))

    assert note(render_plan(a_mixed_plan(mode=mode, assignments=rows)), "workspace").endswith(text)


def test_the_notes_tell_mode_policy_and_environment() -> None:
    text = render_plan(a_mixed_plan())

    assert note(text, "chosen in") == "mode reuse, policy power_of_two, mucudnn 0.1.0"
    assert note(render_plan(a_mixed_plan(max_error=2e-6)), "chosen in") == (
        "mode reuse, policy power_of_two, max_error 2e-06 (but for PyTorch's own), mucudnn 0.1.0"
    )
    assert note(text, "device") == "cpu: caches 32K 1M 16M, name Example 9000"
    assert note(text, "software") == "onednn 3.7, torch 2.11.0"
    assert note(text, "settings") == "deterministic no, threads 8"


@pytest.mark.parametrize("workers", [{}, {"workers": "pool"}])
def test_the_notes_say_that_idle_threads_can_be_told_to_sleep_sooner(workers: dict[str, str]) -> None:
    plan = a_mixed_plan(environment=an_environment(policy={"threads": "8", **workers}))

    assert note(render_plan(plan), "idle threads") == (
        "After an operation OpenMP's idle threads spin and take the cores of worker threads meanwhile. "
        "Setting GOMP_SPINCOUNT in the environment shortens that; mucudnn info measures what it costs here."
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": {"threads": "1"}},
        {"policy": {}},
        {"policy": {"threads": "8", "GOMP_SPINCOUNT": "10000"}},
        {"policy": {"threads": "8", "OMP_WAIT_POLICY": "PASSIVE"}},
        {"policy": {"threads": "8", "workers": "pool", "GOMP_SPINCOUNT": "10000"}},
        {"policy": {"threads": "8", "workers": "team"}},
        {"backend": "cudnn"},
    ],
)
def test_the_notes_say_nothing_of_idle_threads_that_are_none_or_workers_or_were_told_how_to_wait(
    changes: dict[str, Any],
) -> None:
    plan = a_mixed_plan(environment=an_environment(**changes))

    assert "idle threads" not in render_plan(plan)


def test_the_notes_advise_channels_last_for_contiguous_images_on_processors() -> None:
    last = assigned("last", ConvOp.FPROP, OWN, None, layout=Layout.CHANNELS_LAST)
    plan = a_mixed_plan(assignments=(*a_mixed_plan().assignments, last))

    assert note(render_plan(plan), "layout").startswith(
        "Images are contiguous at 4 of 5 sites. Tuned for channels_last, most training steps measured so far"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("op", [ConvOp.FPROP, ConvOp.WGRAD])
def test_the_notes_advise_channels_last_for_contiguous_images_of_few_bits_on_a_card(
    op: ConvOp, dtype: str
) -> None:
    only = assigned("only", op, OWN, None, dtype=dtype)
    card = an_environment(backend="cudnn", policy={"TF32": "True"})

    told = note(render_plan(a_mixed_plan(assignments=(only,), environment=card)), "layout")

    assert told.startswith(
        "Images are contiguous at 1 of 1 sites of 16 bits or TF32. There cuDNN copies them"
    )


@pytest.mark.parametrize(
    ("backend", "problem"),
    [
        ("cudnn", {}),
        ("cudnn", {"dtype": "float64"}),
        ("cudnn", {"dtype": "bfloat16", "layout": Layout.CHANNELS_LAST}),
        ("scripted", {"dtype": "bfloat16"}),
        ("cpu", {"layout": Layout.CHANNELS_LAST}),
        ("cpu", {"op": ConvOp.FPROP}),
        ("cpu", dict.fromkeys(("input_size", "kernel_size", "padding", "stride", "dilation"), (1, 1, 1))),
    ],
)
def test_the_notes_advise_no_layout_where_none_was_found_faster(
    backend: str, problem: dict[str, Any]
) -> None:
    only = assigned("only", **{"op": ConvOp.WGRAD, "division": OWN, "evidence": None, **problem})
    plan = a_mixed_plan(assignments=(only,), environment=an_environment(backend=backend))

    assert "memory_format" not in render_plan(plan)


def test_the_notes_count_sites_whose_results_may_differ_from_run_to_run() -> None:
    varying = Division((Candidate("cudnn:eng1", 32, 0.01, 0, is_deterministic=False),))
    plan = a_mixed_plan(assignments=(assigned("a", ConvOp.WGRAD, varying, None), *a_mixed_plan().assignments))

    assert note(render_plan(plan), "repeating").startswith(
        "1 of 5 sites run an algorithm of which cuDNN says"
    )
    assert [site["now"]["is_deterministic"] for site in plan_as_json(plan)["sites"]] == [False, *4 * [True]]
    assert "repeating" not in render_plan(a_mixed_plan())


def test_untouched_convolutions_are_listed_with_their_reasons() -> None:
    plan = a_mixed_plan(untouched=(("stem", "Conv3d is not divided"), ("", "it has a batch of none")))

    assert note(render_plan(plan), "not tuned") == (
        "stem: Conv3d is not divided. the model itself: it has a batch of none."
    )
    assert note(render_plan(a_mixed_plan()), "not tuned") == "Nothing: every convolution was tuned."


def test_the_notes_say_how_many_rounds_and_comparisons_there_were() -> None:
    text = render_plan(a_mixed_plan())

    assert note(text, "times").startswith("Medians of 10 to 45 rounds,")
    assert note(text, "verdicts").count("Comparisons made: 2;") == 1  # the chosen, and one more
    assert note(text, "error") == "At most 2.0e-06 relative to float64."


def test_the_note_on_the_error_tells_the_largest_of_all_sites() -> None:
    rows = [
        assigned(f"conv{n}", ConvOp.FPROP, WINOGRAD, dataclasses.replace(FASTER, error=error), in_channels=n)
        for n, error in enumerate((1e-7, 2e-6, None), 16)
    ]
    text = render_plan(a_mixed_plan(assignments=tuple(rows)))

    assert note(text, "measured once").startswith("Measurements: 3,")
    assert note(text, "error") == "At most 2.0e-06 relative to float64."


def test_the_error_of_pytorchs_own_which_no_bound_holds_is_told_apart() -> None:
    exact = assigned("a", ConvOp.FPROP, WINOGRAD, dataclasses.replace(FASTER, error=2e-6))
    rows = [
        assigned(path, ConvOp.WGRAD, OWN, dataclasses.replace(FASTER, error=error), in_channels=n)
        for n, (path, error) in enumerate({"b": 1e-7, "c": 5e-3, "d": 3e-6}.items(), 16)
    ]
    own = (
        "At most 5.0e-03 relative to float64 where PyTorch's own runs (c wgrad), for which there is no bound."
    )

    text = render_plan(a_mixed_plan(assignments=(exact, *rows)))

    assert note(text, "error") == f"At most 2.0e-06 relative to float64. {own}"
    assert note(render_plan(a_mixed_plan(assignments=tuple(rows))), "error") == own


def test_of_parts_by_pytorchs_own_and_by_others_the_error_may_be_pytorchs_own() -> None:
    parts = Division((*WINOGRAD.parts[:1], Candidate("cpu:aten", 16, 0.005, MIB)))
    mixed = assigned("a", ConvOp.WGRAD, parts, dataclasses.replace(FASTER, error=5e-3))

    text = render_plan(a_mixed_plan(assignments=(mixed,)))

    assert note(text, "error") == (
        "At most 5.0e-03 relative to float64 where PyTorch's own runs (a wgrad), for which there is no bound."
    )


def test_sites_that_share_problem_and_division_count_as_one_measurement() -> None:
    rows = tuple(assigned(f"conv{i}", ConvOp.FPROP, WINOGRAD, FASTER) for i in range(5))

    text = render_plan(a_mixed_plan(assignments=rows))

    assert note(text, "measured once").startswith("Measurements: 1, sites: 5;")
    assert note(text, "times").startswith("Medians of 10 rounds,")


def test_the_note_on_prediction_compares_with_the_sum_of_the_parts() -> None:
    assert note(render_plan(a_mixed_plan()), "prediction") == (
        "Whole divisions took 0.67 to 1.00 times (median 0.83) what their parts' measured times add up to."
    )


def test_a_prediction_of_nothing_is_not_compared() -> None:
    free = Division((Candidate("cpu:free", 32, 0.0, 0),))
    plan = a_mixed_plan(assignments=(assigned("conv", ConvOp.FPROP, free, FASTER),))

    assert note(render_plan(plan), "prediction") == "The profiles predict nothing."


def test_a_full_table_is_readable_in_120_columns() -> None:
    wide = Evidence(
        seconds(0.0001234), seconds(0.0001234), Verdict.AMBIGUOUS, 1025 * 1023, 1025 * 1023, error=1e-6
    )
    parts = (Candidate("cpu:winograd4", 128, 0.001, MIB),) * 128
    rows = tuple(
        assigned("layer1.0.downsample.conv", op, Division(parts), wide, batch=128**2) for op in ConvOp
    )

    text = render_plan(a_mixed_plan(assignments=(*rows, *a_mixed_plan().assignments)))

    assert max(len(line) for line in text.splitlines()) <= 120


def test_nothing_is_cut_off_however_long_it_is() -> None:
    path = "encoder." * 40 + "conv"
    plan = a_mixed_plan(assignments=(assigned(path, ConvOp.FPROP, OWN, KEPT),), untouched=((path, "why"),))

    assert render_plan(plan).count(path) == 2


def test_the_text_is_plain() -> None:
    text = render_plan(a_mixed_plan())

    assert "\x1b" not in text
    assert [line for line in text.splitlines() if line != line.rstrip()] == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"kernel_size": (3, 3), "stride": (1, 1), "padding": (1, 1)},
            "32x16x14x12 -> 24, 3x3, padding 1, float32",
        ),
        ({"padding": (0, 0)}, "32x16x14x12 -> 24, 3x5, stride 2x1, float32"),
        (
            {"stride": (2, 2), "dilation": (2, 2), "groups": 8},
            "32x16x14x12 -> 24, 3x5, stride 2, padding 1x2, dilation 2, groups 8, float32",
        ),
        (
            {"dtype": "bfloat16", "layout": Layout.CHANNELS_LAST},
            "32x16x14x12 -> 24, 3x5, stride 2x1, padding 1x2, bfloat16, channels_last",
        ),
    ],
)
def test_a_shape_names_what_is_unusual(changes: dict[str, Any], text: str) -> None:
    assert describe_shape(a_problem(**changes)) == text


def test_runs_are_counted_by_algorithm_and_size() -> None:
    assert describe_runs(MIXED) == ["winograd4 1×16", "direct 1×8", "im2col 1×8"]
    assert describe_runs(Division((a_candidate(algorithm="plain"),))) == ["plain 1×16"]


def test_a_processor_is_told_by_its_name() -> None:
    environment = an_environment(device={"model name": "Example 9000", "model": "17", "stepping": "1"})

    assert describe_environment(environment)["device"] == "cpu: model name Example 9000"


def test_a_plan_reads_the_same_after_it_was_saved() -> None:
    software = {"torch": "2.11.0", "oneDNN": "3.7", "algorithms": "1"}
    plan = a_mixed_plan(environment=an_environment(software=software))

    assert render_plan(Plan.from_text(plan.to_text())) == render_plan(plan)


def test_notes_are_wrapped_beside_their_labels() -> None:
    first, second = render_notes([("label", "word " * 30)])

    assert first.startswith("label          word word")
    assert second.startswith(" " * 15 + "word")


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


def a_plan_of_a_recording() -> Plan:
    """Two sites, of which one was run when it was recorded."""
    rows = (
        assigned("conv1", ConvOp.FPROP, WINOGRAD, PREDICTED),
        assigned("conv2", ConvOp.DGRAD, OWN, KEPT),
    )
    return a_plan(assignments=rows, limit_bytes=8 * MIB)


def test_a_predicted_site_says_so_in_its_row_and_below() -> None:
    text = render_plan(a_plan_of_a_recording())

    assert row(text, "fprop")[-1] == "FASTER, predicted"
    assert row(text, "dgrad")[-1] == "own"
    assert note(text, "predicted").startswith(
        "Sites whose rivals a recording never had in the same rounds: 1."
    )


def test_a_plan_of_predictions_alone_explains_its_times_and_verdicts() -> None:
    few = dataclasses.replace(PREDICTED, chosen=Estimate(0.01, 0.005, math.inf, 3))
    rows = (
        assigned("conv1", ConvOp.FPROP, WINOGRAD, few),
        assigned("conv2", ConvOp.FPROP, WINOGRAD, dataclasses.replace(OVER_LIMIT, is_predicted=True)),
    )
    text = render_plan(a_plan(assignments=rows, limit_bytes=8 * MIB, mode=Mode.SHARING))

    assert "10.00 (n = 3)" in text
    explained = note(text, "predicted")
    assert all(f"{word}: " in explained for word in ("n", "own", "limit"))
    assert all(verdict in explained for verdict in ("FASTER", "SLOWER", "SAME", "AMBIGUOUS"))
    assert "share: " not in explained


def test_totals_count_predictions_among_the_sites_that_have_both_times() -> None:
    alone = dataclasses.replace(OVER_LIMIT, is_predicted=True)
    rows = (*a_plan_of_a_recording().assignments, assigned("conv3", ConvOp.FPROP, WINOGRAD, alone))
    plan = a_plan(assignments=rows, limit_bytes=8 * MIB)
    totals = Totals.of(plan)

    assert (totals.paired, totals.without_base, totals.predicted) == (2, 1, 1)
    assert "Of these, 1 are predicted." in note(render_plan(plan), "total")


def test_a_predicted_site_is_no_measurement() -> None:
    text = render_plan(a_plan_of_a_recording())

    assert note(text, "measured once").startswith("Measurements: 1, sites: 2;")
    assert note(text, "verdicts").count("Comparisons made: 0;") == 1


def test_json_says_which_sites_are_predicted() -> None:
    value = json.loads(json.dumps(plan_as_json(a_plan_of_a_recording())))

    assert [site["is_predicted"] for site in value["sites"]] == [True, False]


def test_a_plan_of_which_everything_was_run_says_nothing_of_predictions() -> None:
    assert "predicted" not in render_plan(a_mixed_plan())


def test_where_nothing_is_gained_that_is_said() -> None:
    kept = a_plan(assignments=(assigned("conv1", ConvOp.FPROP, OWN, KEPT),))

    assert note(render_plan(kept), "sites").endswith(
        "Within this limit nothing is faster than PyTorch's own."
    )
    assert "nothing is faster" not in note(render_plan(a_mixed_plan()), "sites")
