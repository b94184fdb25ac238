"""Forecasts as pictures."""

import html
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection

from mucudnn.forecast import Forecast
from mucudnn.report import draw_forecast, render_forecast
from mucudnn.report.forecast_picture import forecast_figure
from tests.figures import behind, dots, legend, names, titles
from tests.forecasts import (
    FPROP,
    MIB,
    ScriptedPlan,
    a_forecast,
    a_layer,
    at_sizes,
    forecast_of,
    plans_of,
    three_layers,
)


def parts(axes: Axes) -> list[tuple[int, int, float]]:
    """Return line, size and bytes of what is drawn of micro-batches."""
    (marks,) = (each for each in axes.collections if isinstance(each, PathCollection))
    found = zip(marks.get_offsets().tolist(), marks.get_array().tolist(), strict=True)
    return sorted((round(line), round(size), n_bytes) for (n_bytes, line), size in found)


def test_a_line_has_the_first_ranked_plan_at_every_size() -> None:
    axes, _ = forecast_figure(a_forecast(plans_of(7))).axes

    assert names(axes) == ["conv fprop"]
    assert behind(axes) == ["112 MiB"]
    assert [(dot.line, dot.value, dot.is_hollow) for dot in dots(axes)] == [(0, 112 * MIB, True)]
    assert parts(axes) == [(0, size, 7 * size * MIB) for size in (1, 2, 4, 8)]
    assert titles(axes.figure)[0].startswith("Workspace of the first-ranked plan (")


def test_the_sizes_are_colours_that_a_bar_explains() -> None:
    _, bar = forecast_figure(a_forecast(plans_of(7))).axes

    assert bar.get_xlabel() == "micro-batch size"
    assert [label.get_text() for label in bar.get_xticklabels()] == ["1", "2", "4", "8"]


def test_equal_problems_are_one_line() -> None:
    axes, _ = forecast_figure(three_layers()).axes

    assert names(axes) == ["stem fprop and 1 more", "stem wgrad and 1 more", "block dgrad", "head fprop"]


def test_a_limit_is_a_line_and_in_the_legend() -> None:
    figure = forecast_figure(a_forecast(plans_of(7)), 500 * MIB)

    (limit,) = (line for line in figure.axes[0].lines if line.get_linestyle() == "--")
    assert [*limit.get_xdata()] == [500 * MIB] * 2
    assert figure.axes[0].get_xlim()[1] > 500 * MIB
    assert legend(figure) == ["undivided", "limit for each, 500 MiB"]
    assert legend(forecast_figure(a_forecast(plans_of(7)))) == ["undivided"]


def test_the_title_says_of_what_device_library_type_and_layout() -> None:
    forecast = a_forecast(plans_of(7))

    title = forecast_figure(forecast).get_suptitle()

    assert title.splitlines()[0] == forecast.device
    assert title.splitlines()[1].startswith(f"{forecast.library}, bfloat16 contiguous")


def test_without_a_plan_nothing_is_drawn_and_the_line_says_so() -> None:
    (axes,) = forecast_figure(a_forecast(at_sizes({}))).axes

    assert (dots(axes), behind(axes)) == ([], ["no plan"])


def test_plans_of_some_sizes_alone_are_drawn() -> None:
    axes, _ = forecast_figure(a_forecast(at_sizes({1: [ScriptedPlan(3)], 16: [ScriptedPlan(MIB)]}))).axes

    assert parts(axes) == [(0, 1, 3)]
    assert behind(axes) == ["1 MiB"]


@pytest.mark.parametrize(
    "forecast", [forecast_of([], plans_of(1)), a_forecast(plans_of(0), a_layer("a", FPROP, batch=1))]
)
def test_what_is_small_is_drawn_too(forecast: Forecast, tmp_path: Path) -> None:
    draw_forecast(forecast, tmp_path / "small.svg")

    assert (tmp_path / "small.svg").read_bytes().startswith(b"<?xml")


def test_a_page_has_the_text_for_the_limit(tmp_path: Path) -> None:
    draw_forecast(three_layers(), tmp_path / "forecast.html", 2 * MIB)

    page = (tmp_path / "forecast.html").read_text(encoding="utf-8")
    text = html.unescape(page.partition("<pre>")[2].partition("</pre>")[0])
    assert text == render_forecast(three_layers(), 2 * MIB)
    assert "<svg" in page
