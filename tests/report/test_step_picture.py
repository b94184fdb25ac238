"""What a plan is worth within a step, as a picture."""

import dataclasses
import html
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection

from mucudnn.comparing.step_comparison import LayerComparison, PairedTimes, StepComparison
from mucudnn.comparing.taking_back import taken_back
from mucudnn.errors import OptionError
from mucudnn.intervals import Verdict
from mucudnn.report import draw_comparison, render_comparison
from mucudnn.report.step_picture import comparison_figure
from tests.comparing.plans import assigned, planned
from tests.figures import BLUE, GREY, ORANGE, RED, behind, dots, legend, names, titles
from tests.report.comparisons import FOUND, MS


def drawn(found: StepComparison) -> tuple[Axes, list[Axes]]:
    """Return the axes of the whole step, and those of its convolutions if there are any."""
    step, *layers = comparison_figure(found).axes
    return step, layers


def clouds(axes: Axes) -> list[list[tuple[float, float]]]:
    """Return the dots of all rounds, before and now: milliseconds and places."""
    found = [each for each in axes.collections if isinstance(each, PathCollection)]
    return [[(float(ms), float(place)) for ms, place in np.asarray(each.get_offsets())] for each in found]


def test_every_round_of_the_step_is_a_dot_from_top_to_bottom() -> None:
    found = dataclasses.replace(FOUND, step=PairedTimes((100 * MS, 104 * MS, 99 * MS), (80 * MS,) * 3))

    before, now = clouds(drawn(found)[0])

    assert [ms for ms, _ in before] == [100, 104, 99]
    assert [ms for ms, _ in now] == [80, 80, 80]
    assert [place for _, place in before] == pytest.approx([-0.35, 0, 0.35])
    assert [place for _, place in now] == pytest.approx([0.65, 1, 1.35])


def test_a_single_round_is_drawn() -> None:
    found = dataclasses.replace(FOUND, step=PairedTimes((100 * MS,), (80 * MS,)), layers=())

    assert [len(cloud) for cloud in clouds(drawn(found)[0])] == [1, 1]


def test_the_median_of_the_step_stands_with_its_interval_and_the_speedup_behind() -> None:
    step, _ = drawn(FOUND)

    assert names(step) == ["before", "now"]
    assert behind(step) == ["", "1.26 [1.25, 1.27]"]
    assert [(dot.line, dot.colour, dot.is_hollow) for dot in dots(step)] == [
        (0, GREY, True),
        (1, BLUE, False),
    ]
    assert [dot[1:4] for dot in dots(step)] == [
        pytest.approx((101.0, 100.0, 102.0)),
        pytest.approx((80.0, 80.0, 80.0)),
    ]


def test_each_convolution_has_a_line_with_its_times_before_and_now() -> None:
    _, (layers,) = drawn(FOUND)

    assert (names(layers), behind(layers)) == (["stem", "head"], ["2.00", "0.83"])
    assert [(dot.line, round(dot.value), dot.colour, dot.is_hollow) for dot in dots(layers)] == [
        (0, 60, GREY, True),
        (0, 30, BLUE, False),
        (1, 10, GREY, True),
        (1, 12, RED, False),
    ]
    assert layers.get_xlim()[0] == 0


def test_what_is_slower_since_the_limit_forbids_pytorchs_own_has_a_look_of_its_own() -> None:
    rows = planned(assigned("stem"), assigned("head"))
    forbidden = tuple(
        dataclasses.replace(row, evidence=dataclasses.replace(row.evidence, reference=None))
        for row in rows.assignments
        if row.evidence is not None
    )
    plan = dataclasses.replace(rows, assignments=forbidden)
    found = dataclasses.replace(FOUND, plan=plan, settled=taken_back(plan, FOUND.layers[1:]))

    figure = comparison_figure(found)

    assert [dot.colour for dot in dots(figure.axes[1]) if not dot.is_hollow] == [BLUE, ORANGE]
    assert legend(figure)[1:] == ["now, FASTER", "now, SLOWER; the limit forbids PyTorch's own"]


def test_what_is_not_told_apart_is_grey() -> None:
    alike = LayerComparison("stem", PairedTimes((10 * MS,) * 10, (10 * MS,) * 10))
    assert alike.times.verdict is Verdict.SAME
    figure = comparison_figure(dataclasses.replace(FOUND, layers=(alike,)))

    assert [dot.colour for dot in dots(figure.axes[1])] == [GREY, GREY]
    assert legend(figure)[2] == "now, not told apart"


def test_a_step_without_timed_convolutions_is_drawn_alone() -> None:
    figure = comparison_figure(dataclasses.replace(FOUND, layers=()))

    assert [title.partition(" in ms")[0] for title in titles(figure)] == ["The whole step"]


def test_the_title_says_what_was_compared_where() -> None:
    figure = comparison_figure(FOUND)

    what, where = figure.get_suptitle().splitlines()
    assert what.startswith("A step with the plan (within ")
    assert where.startswith("cpu: ")


def test_a_page_has_the_table_and_equal_comparisons_give_equal_bytes(tmp_path: Path) -> None:
    page, again = tmp_path / "step.html", tmp_path / "again.html"

    draw_comparison(FOUND, page)
    draw_comparison(FOUND, again)

    assert page.read_bytes() == again.read_bytes()
    assert html.escape(render_comparison(FOUND)) in page.read_text(encoding="utf-8")


def test_the_kind_of_a_file_must_be_known(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="must end in"):
        draw_comparison(FOUND, tmp_path / "step.gif")
