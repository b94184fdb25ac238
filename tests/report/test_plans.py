"""Plans as text: a row for each site and each whole call."""

import dataclasses
import json
import math
from typing import Any

import pytest

from mucudnn.choices import Mode
from mucudnn.division import Division
from mucudnn.evidence import CallEvidence, Evidence
from mucudnn.intervals import Estimate, Verdict
from mucudnn.plan import Plan
from mucudnn.problem import ConvOp, Layout
from mucudnn.profile import Candidate
from mucudnn.report import (
    describe_environment,
    describe_runs,
    describe_shape,
    plan_as_json,
    render_notes,
    render_plan,
)
from tests.examples import a_candidate, a_plan, a_problem, an_environment
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
    assigned,
    note,
    seconds,
)

MIXED = Division.of((*WINOGRAD.parts[:1], Candidate("cpu:im2col", 8, 0.002, 512), a_candidate(batch=8)))


def row(text: str, start: str) -> list[str]:
    """Return the cells of the first row that starts so."""
    line = next(line for line in text.splitlines() if line.strip().startswith(start))
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


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


def test_what_stays_takes_as_much_now_as_before() -> None:
    unseen = dataclasses.replace(KEPT, reference_workspace_bytes=0, workspace_bytes=0)  # too small to be seen
    plan = a_plan(assignments=(assigned("conv", ConvOp.WGRAD, OWN, unseen),))

    (row,) = (line.split() for line in render_plan(plan).splitlines() if line.startswith("  wgrad"))

    assert [row[place - 1] for place, word in enumerate(row) if word == "MiB"] == ["3", "3"]


def test_a_site_whose_base_the_limit_forbids_has_no_number_for_it() -> None:
    cells = row(render_plan(a_mixed_plan()), "wgrad")

    assert cells[1:3] == ["not run", "-"]
    assert cells[-2:] == ["-", "over limit"]


@pytest.mark.parametrize(("beyond_bytes", "mark"), [(2**15, ""), (2**15 + 1, ", over limit")])
def test_a_base_that_ran_beyond_the_limit_to_compare_is_marked(beyond_bytes: int, mark: str) -> None:
    seen = dataclasses.replace(FASTER, reference_workspace_bytes=8 * MIB + beyond_bytes)  # weighed to 32 KiB
    plan = a_plan(limit_bytes=8 * MIB, assignments=(assigned("conv1", ConvOp.FPROP, WINOGRAD, seen),))

    text = render_plan(plan)
    assert row(text, "fprop")[-1] == f"FASTER{mark}"
    assert ("it was run for comparison only" in note(text, "verdicts")) == bool(mark)
    assert ("may not run" in note(text, "verdicts")) != bool(mark)


def test_in_sharing_mode_too_it_is_the_limit_that_forbids_to_run_the_base() -> None:
    text = render_plan(a_mixed_plan(mode=Mode.SHARING))

    assert row(text, "wgrad")[1] == "not run"
    assert "PyTorch's own needs more workspace there than the limit" in note(text, "over limit")
    assert "share" not in note(text, "verdicts")


@pytest.mark.parametrize(("mode", "mark"), [(Mode.SHARING, ", share"), (Mode.REUSE, "")])
def test_a_base_that_lost_for_want_of_room_alone_is_marked(mode: Mode, mark: str) -> None:
    slower = dataclasses.replace(FASTER, chosen=seconds(0.020), verdict=Verdict.SLOWER)
    plan = a_plan(
        mode=mode, limit_bytes=8 * MIB, assignments=(assigned("conv1", ConvOp.FPROP, WINOGRAD, slower),)
    )
    text, (site,) = render_plan(plan), json.loads(json.dumps(plan_as_json(plan)))["sites"]

    assert row(text, "fprop")[-1] == f"SLOWER{mark}"
    assert ("share: PyTorch's own needs more than the site's share" in note(text, "verdicts")) == bool(mark)
    assert site["is_base_over_share"] == bool(mark)


def test_the_speedup_is_that_of_the_rounds() -> None:
    rounds = (("cpu:im2col@32*1", seconds(1.4)), ("cpu:winograd4@16*2", seconds(1.75)))
    seen = dataclasses.replace(FASTER, speedups=rounds)
    plan = a_plan(limit_bytes=8 * MIB, assignments=(assigned("conv1", ConvOp.FPROP, WINOGRAD, seen),))
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


def test_a_whole_call_stands_below_its_sites() -> None:
    text = render_plan(a_plan_with_calls())

    starts = [line.split()[0] for line in text.partition("\n\ntotal")[0].splitlines()[4:]]
    assert starts == ["conv1", "fprop", "dgrad", "wgrad", "call", "conv2", "fprop", "call"]
    assert row(text, "call") == [
        "call", "30.00 [29.70, 30.60]", "20.00 [19.80, 20.40]", "1.49", "FASTER, partly"
    ]  # fmt: skip


def test_a_call_that_was_not_kept_shows_what_runs_now_and_what_was_tried() -> None:
    text = render_plan(a_plan_with_calls())

    assert row(text.partition("\nconv2")[2], "call")[1:] == [
        "10.00 [9.90, 10.20]", "tried: 11.00 [10.89, 11.22]", "10.00 [9.90, 10.20]", "1.00", "own"
    ]  # fmt: skip


def test_a_call_is_marked_unless_all_of_it_was_timed_before() -> None:
    call = CallEvidence(seconds(0.030), seconds(0.020), seconds(1.49), Verdict.FASTER, "conv", 0)
    timed = assigned("conv", ConvOp.FPROP, WINOGRAD, FASTER)
    over_limit = assigned("conv", ConvOp.WGRAD, WINOGRAD, OVER_LIMIT)
    compared = assigned(
        "conv", ConvOp.WGRAD, WINOGRAD, dataclasses.replace(FASTER, reference_workspace_bytes=9 * MIB)
    )

    for rows in ((timed,), (timed, over_limit), (timed, compared)):
        text = render_plan(a_plan(assignments=rows, calls=(call,), limit_bytes=8 * MIB))
        verdict = "FASTER" if rows == (timed,) else "FASTER, partly"
        assert row(text, "call")[-1] == verdict
        assert ("partly:" in note(text, "calls")) == ("partly" in verdict)


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


def test_in_sharing_mode_a_call_is_marked_where_the_share_keeps_pytorchs_own_away() -> None:
    call = CallEvidence(seconds(0.030), seconds(0.020), seconds(1.49), Verdict.FASTER, "conv", 0)
    rows = (assigned("conv", ConvOp.FPROP, WINOGRAD, FASTER),)  # PyTorch's own takes 3 MiB, and this one 1

    for mode, verdict in ((Mode.REUSE, "FASTER"), (Mode.SHARING, "FASTER, partly")):
        text = render_plan(a_plan(mode=mode, assignments=rows, calls=(call,), limit_bytes=8 * MIB))
        assert row(text, "call")[-1] == verdict


def test_a_second_shape_of_a_module_and_a_model_that_is_a_convolution_are_named() -> None:
    rows = (
        assigned("", ConvOp.FPROP, OWN, KEPT),
        assigned("conv", ConvOp.FPROP, OWN, KEPT, variant=1, input_size=(7, 7)),
    )
    text = render_plan(a_mixed_plan(assignments=rows))

    assert "the model itself  32x16x14x12 -> 24" in text
    assert "conv (shape 2)  32x16x7x7 -> 24" in text


def test_a_transposed_convolution_is_named_so_with_the_shapes_that_its_layer_sees() -> None:
    rows = (assigned("up", ConvOp.DGRAD, OWN, KEPT), assigned("down", ConvOp.FPROP, OWN, KEPT))
    text = render_plan(a_mixed_plan(assignments=rows, transposed=("up",)))

    assert "up  32x24x7x12 -> 16, 3x5, stride 2x1, padding 1x2, transposed, float32" in text
    assert "down  32x16x14x12 -> 24, 3x5, stride 2x1, padding 1x2, float32" in text


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


def test_a_predicted_site_says_so_in_its_row_and_below() -> None:
    text = render_plan(a_plan_of_a_recording())

    assert row(text, "fprop")[-1] == "FASTER, predicted"
    assert row(text, "dgrad")[-1] == "own"
    assert note(text, "predicted").startswith(
        "Sites whose rivals the recording never timed in the same rounds: 1."
    )
