"""Forecasts as text and as JSON."""

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from mucudnn.forecast import Forecast
from mucudnn.problem import ConvProblem, Layout
from mucudnn.report import describe_shape, forecast_as_json, render_forecast
from mucudnn.version import __version__
from tests.examples import a_problem
from tests.forecasts import (
    DGRAD,
    FPROP,
    MIB,
    WGRAD,
    ScriptedPlan,
    a_forecast,
    a_layer,
    at_sizes,
    forecast_of,
    occurrence,
    plans_of,
    three_layers,
)
from tests.report.plans import note


def cells(text: str, start: str) -> list[list[str]]:
    """Return the cells of all rows that start so."""
    return [line.split() for line in text.splitlines() if line.strip().startswith(f"{start} ")]


def table_of(forecast: Forecast, **options: Any) -> str:
    """Return the table, without the notes."""
    return render_forecast(forecast, **options).split("\n\n")[1]


def test_a_row_tells_the_first_ranked_plan_at_every_size_and_the_least() -> None:
    table = table_of(a_forecast(plans_of(7)))

    assert table.splitlines()[0].split() == ["sites", "undivided", "8", "4", "2", "1", "least", "at", "plans"]
    assert cells(table, "fprop") == [["fprop", "1", "112", "56.0", "28.0", "14.0", "7.0", "<0.1", "16", "2"]]


def test_equal_convolutions_share_their_rows_with_a_count() -> None:
    table = table_of(three_layers())

    assert "stem and 1 more  16x16x14x12 -> 24, 3x5, stride 2x1, padding 1x2, bfloat16\n" in table
    assert "\nhead  16x16x14x12 -> 48, 3x5, stride 2x1, padding 1x2, bfloat16\n" in table
    assert [row[:2] for row in cells(table, "fprop")] == [["fprop", "2"], ["fprop", "1"]]
    assert [row[:2] for row in cells(table, "dgrad")] == [["dgrad", "1"]]
    assert [row[:2] for row in cells(table, "wgrad")] == [["wgrad", "2"]]


def test_all_sites_are_named_on_request_in_lines_that_fit() -> None:
    forecast = a_forecast(plans_of(1), [each for n in range(30) for each in a_layer(f"block{n}", FPROP)])

    table = table_of(forecast, names_sites=True, width=100)

    assert max(map(len, table.splitlines())) <= 100
    assert all(f" block{n}," in f" {table}".replace("\n", " ") for n in range(29))
    assert "block29  16x16" in table.replace("\n    ", "  ")


def test_a_second_shape_of_a_module_is_named_as_such() -> None:
    table = table_of(a_forecast(plans_of(1), a_layer("head", FPROP, variant=1)))

    assert "head (shape 2)  16x16x14x12" in table


def test_a_transposed_convolution_shows_its_forward_pass_first() -> None:
    text = render_forecast(a_forecast(plans_of(1), a_layer("up", is_transposed=True)))

    assert "up  16x24x7x12 -> 16, 3x5, stride 2x1, padding 1x2, transposed, bfloat16\n" in text
    rows = [line.split()[0] for line in text.splitlines() if line.startswith("  ")]
    assert rows[1:4] == ["dgrad", "fprop", "wgrad"]
    assert note(text, "transposed").startswith("The forward pass of a transposed convolution is dgrad")


def test_a_transposed_convolution_has_rows_apart_from_an_equal_one_that_is_not() -> None:
    occurrences = [*a_layer("up", DGRAD, is_transposed=True), *a_layer("conv", DGRAD)]

    assert [row[1] for row in cells(table_of(a_forecast(plans_of(1), occurrences)), "dgrad")] == ["1", "1"]


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0"),
        (1, "<0.1"),
        (MIB // 20 - 1, "<0.1"),
        (MIB // 20 + 1, "0.1"),
        (99 * MIB, "99.0"),
        (100 * MIB - 1, "100"),
        (3136 * MIB, "3136"),
    ],
)
def test_mebibytes_have_sensible_digits(n_bytes: int, text: str) -> None:
    table = table_of(a_forecast(at_sizes({16: (ScriptedPlan(n_bytes),)})))

    assert cells(table, "fprop")[0][2] == text


def test_where_there_is_no_plan_there_is_no_number() -> None:
    table = table_of(a_forecast(at_sizes({4: (ScriptedPlan(MIB),)}), a_layer("conv", FPROP)))

    assert table.splitlines()[0].split() == ["sites", "undivided", "4", "least", "at", "plans"]
    assert cells(table, "fprop") == [["fprop", "1", "-", "1.0", "1.0", "4", "none"]]


def test_a_smaller_batch_has_no_number_at_the_sizes_above_and_counts_undivided_in_the_totals() -> None:
    table = table_of(a_forecast(plans_of(1), [*a_layer("wide", FPROP), *a_layer("narrow", FPROP, batch=4)]))

    assert cells(table, "fprop") == [
        ["fprop", "1", "16.0", "8.0", "4.0", "2.0", "1.0", "<0.1", "16", "2"],
        ["fprop", "1", "4.0", "-", "-", "2.0", "1.0", "<0.1", "4", "2"],
    ]
    assert cells(table, "all together") == [
        ["all", "together", "2", "20.0", "12.0", "8.0", "4.0", "2.0", "<0.1"]
    ]
    assert cells(table, "the largest") == [["the", "largest", "16.0", "8.0", "4.0", "2.0", "1.0", "<0.1"]]


def test_a_narrow_terminal_shows_fewer_sizes_evenly_spread() -> None:
    forecast = a_forecast(plans_of(1), a_layer("conv", FPROP, batch=256))

    shown = {
        width: table_of(forecast, width=width).splitlines()[0].split()[2:-3] for width in (118, 80, 70, 60)
    }

    assert shown[118] == ["128", "64", "32", "16", "8", "4", "2", "1"]
    assert shown[80] == ["64", "16", "4", "1"]
    assert shown[70] == ["64", "8", "1"]
    assert shown[60] == ["16", "1"]


@pytest.mark.parametrize(("width", "left_out"), [(118, None), (80, 4), (60, 6)])
def test_sizes_without_a_column_are_counted(width: int, left_out: int | None) -> None:
    text = render_forecast(a_forecast(plans_of(1), a_layer("conv", FPROP, batch=256)), width=width)

    said = re.search(r"Number of sizes that have no column for want of room: (\d+);", " ".join(text.split()))
    assert (said and int(said[1])) == left_out


@pytest.mark.parametrize("width", [80, 118, 200])
def test_no_line_is_longer_than_the_terminal(width: int) -> None:
    text = render_forecast(three_layers(), MIB, width=width)

    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize(("limit_mib", "word"), [(16, "whole"), (15, "8"), (1, "1"), (0, "never")])
def test_under_a_limit_a_row_says_how_much_of_the_batch_fits(limit_mib: int, word: str) -> None:
    table = table_of(a_forecast(plans_of(1)), limit_bytes=limit_mib * MIB)

    assert table.splitlines()[0].split()[-2:] == ["fits", "plans"]
    assert cells(table, "fprop")[0][-2] == word


def test_under_a_limit_a_row_says_if_only_another_plan_fits() -> None:
    assert " other plan  " in table_of(a_forecast(plans_of(1)), limit_bytes=1024)


def test_the_notes_say_what_fits_and_name_what_never_does() -> None:
    rule = lambda problem: plans_of(1)(problem)[:1] if problem.op is WGRAD else plans_of(1)(problem)  # noqa: E731
    text = render_forecast(a_forecast(rule, a_layer("conv", dtype="float32")), MIB - 1024)

    assert note(text, "limit") == (
        "Sites that fit into 1023 KiB with the first-ranked plan undivided: 0; with that of a micro-batch: "
        "0; with a lower-ranked plan only: 2; not at all: 1 (conv wgrad)."
    )


def test_the_notes_say_what_the_columns_show() -> None:
    shown = ("sites", "least", "at", "fits", "whole", "other plan", "never", "plans")
    made = a_forecast(plans_of(1))

    text = note(render_forecast(made, MIB), "columns")

    assert set(re.findall("[a-z]+", render_forecast(made, MIB).splitlines()[2])) <= {*shown, "undivided"}
    assert all(re.search(rf"\b{word}[:,]", text) for word in shown)
    assert "fits:" not in note(render_forecast(made), "columns")


def test_the_notes_say_whose_figures_these_are_and_that_nothing_was_timed() -> None:
    text = render_forecast(a_forecast(plans_of(1), settings=("TF32 allowed", "forward pass alone")))

    assert note(text, "device") == "Example 9000"
    assert note(text, "library") == "cuDNN 9.9.9"
    assert note(text, "settings") == "TF32 allowed, forward pass alone"
    assert "Nothing was run and no time was measured." in note(text, "figures")


def test_the_notes_add_up_what_the_table_shows() -> None:
    text = render_forecast(three_layers())

    assert note(text, "sites") == "6, with 4 distinct problems"
    assert note(text, "undivided") == (
        "First-ranked plans need 96 MiB all together, where each site owns its workspace; "
        "16 MiB in one buffer that all reuse (stem fprop)."
    )
    assert note(text, "least").endswith(
        "At 6 of the 6 sites whose first-ranked plan computes on tensor cores, no plan with so little "
        "workspace does."
    )


@pytest.mark.parametrize(
    ("changes", "notes", "is_named"),
    [
        ({}, ("TENSOR_CORE",), True),
        ({"layout": Layout.CHANNELS_LAST}, ("TENSOR_CORE",), False),
        ({}, (), False),
        (
            {"input_size": (9,), "kernel_size": (3,), "stride": (1,), "padding": (1,), "dilation": (1,)},
            ("TENSOR_CORE",),
            False,
        ),
    ],
)
def test_channels_last_is_named_as_the_baseline_where_tensor_cores_work_on_copies(
    changes: dict[str, Any], notes: tuple[str, ...], is_named: bool
) -> None:
    def rule(problem: ConvProblem) -> Sequence[ScriptedPlan]:
        return (ScriptedPlan(problem.batch, notes),)

    text = render_forecast(a_forecast(rule, a_layer("conv", FPROP, **changes)))

    assert ("honest baseline" in " ".join(text.split())) is is_named


def test_json_has_every_size_of_every_site() -> None:
    value = json.loads(json.dumps(forecast_as_json(three_layers(), 15 * MIB)))

    assert [(site["path"], site["op"]) for site in value["sites"]] == [
        ("stem", "fprop"), ("stem", "wgrad"), ("block", "fprop"), ("block", "dgrad"), ("block", "wgrad"),
        ("head", "fprop"),
    ]  # fmt: skip
    first = value["sites"][0]
    assert [(need["batch"], need["first_bytes"], need["least_bytes"]) for need in first["sizes"]] == [
        (batch, batch * MIB, 1024) for batch in (1, 2, 4, 8, 16)
    ]
    assert first["undivided_bytes"] == 16 * MIB
    assert (first["best"], first["least"]) == (
        {"batch": 1, "workspace_bytes": MIB},
        {"batch": 16, "workspace_bytes": 1024},
    )
    assert first["limit"] == {"fit": "divided", "largest_batch": 8}
    assert ConvProblem.from_json(first["problem"]).batch == 16


def test_json_has_the_totals() -> None:
    value = forecast_as_json(three_layers())

    assert (value["report"], value["version"]) == ("forecast", __version__)

    assert value["totals"] == {
        "undivided": {
            "sum_bytes": 96 * MIB,
            "largest_bytes": 16 * MIB,
            "largest": "stem fprop",
            "sites_without_plan": 0,
        },
        "best": {
            "sum_bytes": 6 * MIB + 2 * a_problem(op=WGRAD, dtype="bfloat16").running_sum_bytes,
            "largest_bytes": MIB + a_problem(op=WGRAD, dtype="bfloat16").running_sum_bytes,
            "largest": "stem wgrad",
            "sites_without_plan": 0,
        },
        "least": {
            "sum_bytes": 6 * 1024,
            "largest_bytes": 1024,
            "largest": "stem fprop",
            "sites_without_plan": 0,
        },
    }
    assert value["limit_bytes"] is None
    assert value["sites"][0]["limit"] is None  # type: ignore[index]


def test_a_transposed_shape_is_told_as_its_layer_sees_it() -> None:
    assert describe_shape(a_problem(), is_transposed=True) == (
        "32x24x7x12 -> 16, 3x5, stride 2x1, padding 1x2, transposed, float32"
    )


def test_sites_without_a_plan_are_no_zeros() -> None:
    unknown = forecast_of([occurrence("conv")], at_sizes({}))
    partly = forecast_of(
        [occurrence("conv", batch=8), occurrence("other")], at_sizes({8: (ScriptedPlan(MIB),)})
    )

    assert "an unknown amount: no site has such a plan" in render_forecast(unknown)
    assert forecast_as_json(unknown)["totals"]["undivided"]["sum_bytes"] is None  # type: ignore[index]
    assert "1 sites without such a plan not counted" in render_forecast(partly)
