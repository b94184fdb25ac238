"""Plans as pictures."""

import dataclasses
import errno
import html
import re
import sys
from pathlib import Path

import matplotlib
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from mucudnn.choices import Mode
from mucudnn.division import Division
from mucudnn.errors import OptionError
from mucudnn.evidence import Evidence
from mucudnn.intervals import Estimate, Verdict
from mucudnn.plan import Assignment, ConvSite
from mucudnn.problem import ConvOp
from mucudnn.profile import Candidate
from mucudnn.report import draw_plan, render_plan
from mucudnn.report.plan_picture import plan_figure
from mucudnn.sizes import LARGEST
from tests.examples import a_plan, a_problem
from tests.figures import BLUE, GREY, ORANGE, RED, behind, dots, legend, names, titles
from tests.report.plans import FASTER, KEPT, MIB, OWN, PREDICTED, WINOGRAD, a_mixed_plan, assigned, seconds


def parts(figure: Figure) -> tuple[Axes, Axes, list[SubFigure]]:
    """Return the axes of times and of workspaces, and what is drawn below."""
    above, *below = figure.subfigs
    times, workspaces = above.axes
    return times, workspaces, below


def approx(*values: float) -> object:
    return pytest.approx(values)


def test_times_before_and_now_stand_on_the_line_of_their_site() -> None:
    times, _, _ = parts(plan_figure(a_mixed_plan()))

    assert names(times) == ["conv1 fprop", "conv1 dgrad", "conv1 wgrad", "conv2 fprop"]
    assert behind(times) == ["2.00", "", "", ""]
    assert [(dot.line, dot.colour, dot.is_hollow) for dot in dots(times)] == [
        (0, GREY, True),
        (0, BLUE, False),
        (1, GREY, True),
        (1, GREY, False),
        (2, ORANGE, False),
    ]
    assert [dot[1:4] for dot in dots(times)] == [
        approx(10.0, 9.9, 10.2),
        approx(5.0, 4.95, 5.1),
        approx(10.0, 9.9, 10.2),
        approx(10.0, 9.9, 10.2),
        approx(4.0, 3.96, 4.08),
    ]


def test_the_first_site_is_on_top_and_times_begin_at_nothing() -> None:
    times, _, _ = parts(plan_figure(a_mixed_plan()))

    bottom, top = times.get_ylim()
    assert top < 0 < 3 < bottom
    assert times.get_xlim()[0] == 0


def test_workspaces_stand_beside_the_limit_and_what_runs() -> None:
    _, workspaces, _ = parts(plan_figure(a_mixed_plan()))

    assert behind(workspaces) == ["winograd4 2×16", "aten 1×32", "winograd4 2×16", "aten 1×32"]
    assert [(dot.line, dot.value, dot.is_hollow) for dot in dots(workspaces)] == [
        (0, 3 * MIB, True),
        (0, MIB, False),
        (1, 3 * MIB, True),
        (1, 3 * MIB, False),
        (2, MIB, False),
        (3, 3 * MIB, True),
    ]
    (limit,) = (line for line in workspaces.lines if line.get_linestyle() == "--")
    assert [*limit.get_xdata()] == [8 * MIB, 8 * MIB]
    ticks = [label.get_text() for label in workspaces.get_xticklabels()]
    assert ticks == ["0 B", "64 KiB", "512 KiB", "4 MiB"]


def test_a_workspace_above_the_limit_is_drawn_too() -> None:
    evidence = dataclasses.replace(FASTER, reference_workspace_bytes=100 * MIB)
    plan = a_mixed_plan(assignments=(assigned("conv1", ConvOp.FPROP, WINOGRAD, evidence),))

    _, workspaces, _ = parts(plan_figure(plan))

    assert workspaces.get_xlim()[1] > 100 * MIB


@pytest.mark.parametrize("limit_bytes", [0, 1, 2**20, 2**40, 2**62, LARGEST])
def test_any_limit_has_an_axis(limit_bytes: int, tmp_path: Path) -> None:
    none = Division((Candidate("cpu:gemm", 32, 0.003, 0),))
    plan = a_plan(limit_bytes=limit_bytes, assignments=(assigned("conv1", ConvOp.FPROP, none, None),))

    _, workspaces, _ = parts(plan_figure(plan))

    left, right = workspaces.get_xlim()
    assert left < 0 <= limit_bytes < right
    assert 2 <= len(workspaces.get_xticks()) <= 6
    draw_plan(plan, tmp_path / "plan.svg")


def test_the_legend_says_what_is_drawn_and_nothing_else() -> None:
    assert legend(plan_figure(a_mixed_plan()).subfigs[0]) == [
        "before: PyTorch's own",
        "now, FASTER",
        "PyTorch's own stays",
        "now; the limit forbids PyTorch's own",
        "now, not timed",
        "limit, 8 MiB",
    ]


def test_the_legend_has_no_mark_of_before_where_all_stays_as_it_was() -> None:
    plan = a_plan(assignments=(assigned("conv1", ConvOp.FPROP, OWN, KEPT),))

    assert legend(plan_figure(plan).subfigs[0]) == ["PyTorch's own stays", "limit, 2 KiB"]


def test_what_gave_way_without_a_gain_looks_so() -> None:
    slower = dataclasses.replace(FASTER, chosen=seconds(0.020), verdict=Verdict.SLOWER)
    plan = a_plan(mode=Mode.SHARING, assignments=(assigned("conv1", ConvOp.FPROP, WINOGRAD, slower),))

    figure = plan_figure(plan)

    assert dots(parts(figure)[0])[1].colour == RED
    assert legend(figure.subfigs[0])[1:] == [
        "now, not FASTER: PyTorch's own does not fit", "limit of all together, 2 KiB"
    ]  # fmt: skip


def test_a_plan_without_sites_is_drawn(tmp_path: Path) -> None:
    draw_plan(a_plan(assignments=()), tmp_path / "plan.svg")

    assert (tmp_path / "plan.svg").exists()


def test_equal_sites_are_one_line() -> None:
    rows = tuple(assigned(path, ConvOp.FPROP, WINOGRAD, FASTER) for path in ("one", "two", "three"))

    times, _, _ = parts(plan_figure(a_mixed_plan(assignments=rows)))

    assert names(times) == ["one fprop and 2 more"]
    assert len(dots(times)) == 2


def test_predicted_times_say_so() -> None:
    rows = (assigned("one", ConvOp.FPROP, WINOGRAD, PREDICTED),)

    times, _, _ = parts(plan_figure(a_mixed_plan(assignments=rows)))

    assert names(times) == ["one fprop, predicted"]


def test_a_time_without_an_interval_is_drawn_alone() -> None:
    few = Estimate(0.004, float("-inf"), float("inf"), 3)
    rows = (assigned("one", ConvOp.FPROP, WINOGRAD, Evidence(chosen=few)),)

    times, _, _ = parts(plan_figure(a_mixed_plan(assignments=rows)))

    assert [dot[1:4] for dot in dots(times)] == [approx(4.0, 4.0, 4.0)]


def test_an_interval_beside_its_median_is_drawn_up_to_it(tmp_path: Path) -> None:
    odd = Estimate(0.004, 0.005, 0.006, 10)
    plan = a_mixed_plan(assignments=(assigned("one", ConvOp.FPROP, WINOGRAD, Evidence(chosen=odd)),))

    times, _, _ = parts(plan_figure(plan))

    assert [dot[1:4] for dot in dots(times)] == [approx(4.0, 4.0, 6.0)]


def test_what_runs_is_cut_where_it_is_long() -> None:
    sizes = (16, 8, 4, 2, 1, 1)
    long = Division(
        tuple(Candidate(f"cpu:winograd{place}", size, 0.1, 0) for place, size in enumerate(sizes))
    )
    rows = (assigned("one", ConvOp.FPROP, long, None),)

    _, workspaces, _ = parts(plan_figure(a_mixed_plan(assignments=rows)))

    (text,) = behind(workspaces)
    assert text == "winograd0 1×16 + winogra…ad4 1×1 + winograd5 1×1"


def a_site(path: str, times_s: dict[int, float]) -> Assignment:
    """A site whose candidates take less time the more workspace there is; the fastest runs."""
    candidates = tuple(
        Candidate(f"cpu:fft{index}", 32, time_s, n_bytes)
        for index, (n_bytes, time_s) in enumerate(times_s.items())
    )
    fastest = Division((min(candidates, key=lambda each: each.time_s),))
    evidence = dataclasses.replace(FASTER, reference=seconds(2 * max(times_s.values())))
    return Assignment(ConvSite(path, ConvOp.FPROP), a_problem(), fastest, candidates, evidence)


def test_a_front_is_drawn_in_steps_up_to_the_limit() -> None:
    site = a_site("one", {MIB: 0.009, 2 * MIB: 0.004, 3 * MIB: 0.005, 4 * MIB: 0.003})

    _, _, (below,) = parts(plan_figure(a_mixed_plan(assignments=(site,))))

    axes = below.axes[1]
    steps, points, now, limit = axes.lines
    assert axes.get_title(loc="left") == "one fprop"
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylim()[1] > 1.05 * max([*steps.get_ydata(), *now.get_ydata()])  # no mark is cut off
    assert steps.get_drawstyle() == "steps-post"
    assert [*steps.get_xdata()] == [MIB, 2 * MIB, 4 * MIB, 8 * MIB]
    assert [*steps.get_ydata()] == pytest.approx([9.0, 4.0, 3.0, 3.0])
    assert [*points.get_ydata()] == pytest.approx([9.0, 4.0, 3.0])
    assert ([*now.get_xdata()], [*now.get_ydata()]) == ([4 * MIB], pytest.approx([3.0]))
    assert [*limit.get_xdata()] == [8 * MIB, 8 * MIB]


def test_all_sites_together_take_the_time_of_each_within_the_same_limit() -> None:
    sites = (
        a_site("one", {MIB: 0.009, 4 * MIB: 0.003}),
        dataclasses.replace(
            a_site("two", {2 * MIB: 0.007, 3 * MIB: 0.005}), problem=a_problem(in_channels=3)
        ),
        dataclasses.replace(
            a_site("like two", {2 * MIB: 0.007, 3 * MIB: 0.005}), problem=a_problem(in_channels=3)
        ),
    )

    _, _, (below,) = parts(plan_figure(a_mixed_plan(assignments=sites)))

    steps, _, now, _ = below.axes[0].lines
    assert titles(below) == ["all convolutions (black: the plan)", "one fprop", "two fprop"]
    assert [*steps.get_xdata()] == [2 * MIB, 3 * MIB, 4 * MIB, 8 * MIB]
    assert [*steps.get_ydata()] == pytest.approx([9 + 7 + 7, 9 + 5 + 5, 3 + 5 + 5, 3 + 5 + 5])
    assert ([*now.get_xdata()], [*now.get_ydata()]) == ([4 * MIB], pytest.approx([3 + 5 + 5]))


def test_where_a_site_knows_no_front_nothing_is_said_of_all_together() -> None:
    sites = (a_site("one", {MIB: 0.009, 4 * MIB: 0.003}), assigned("two", ConvOp.WGRAD, WINOGRAD, FASTER))

    _, _, (below,) = parts(plan_figure(a_mixed_plan(assignments=sites)))

    assert titles(below) == ["one fprop"]


def test_in_sharing_mode_a_front_ends_with_the_share() -> None:
    site = a_site("one", {MIB: 0.009, 2 * MIB: 0.004})

    _, _, (below,) = parts(plan_figure(a_mixed_plan(mode=Mode.SHARING, assignments=(site,))))

    assert titles(below) == ["one fprop"]
    assert [*below.axes[0].lines[0].get_xdata()] == [MIB, 2 * MIB, 2 * MIB]


def test_fronts_are_those_of_what_takes_most_time_in_the_order_of_the_model() -> None:
    ms = [5, 9, 1, 8, 7, 6, 4, 3, 2, 11, 10]
    sites = tuple(
        dataclasses.replace(
            a_site(f"conv{each}", {MIB: each / 1000, 2 * MIB: each / 2000}),
            problem=a_problem(in_channels=each),
        )
        for each in ms
    )

    _, _, (below,) = parts(plan_figure(a_mixed_plan(assignments=sites)))

    assert titles(below)[1:] == [f"conv{each} fprop" for each in ms if each > 3]


def test_equal_sites_take_their_time_together() -> None:
    fast = [a_site(f"fast{number}", {MIB: 0.004, 2 * MIB: 0.001}) for number in range(4)]
    slow = [
        dataclasses.replace(
            a_site(f"slow{number}", {MIB: 0.01, 2 * MIB: 0.002}), problem=a_problem(in_channels=number)
        )
        for number in range(1, 10)
    ]

    _, _, (below,) = parts(plan_figure(a_mixed_plan(assignments=(*slow, *fast))))

    assert "fast0 fprop" in titles(below)
    assert len(titles(below)) == 1 + 8


def test_without_a_choice_there_is_no_front() -> None:
    _, _, below = parts(plan_figure(a_mixed_plan(assignments=(a_site("one", {MIB: 0.009}),))))

    assert below == []


def test_candidates_that_do_not_add_up_have_no_front() -> None:
    site = dataclasses.replace(a_site("one", {MIB: 0.009}), candidates=(Candidate("cpu:fft16", 24, 0.1, 0),))

    assert parts(plan_figure(a_mixed_plan(assignments=(site,))))[2] == []


@pytest.mark.parametrize(
    ("kind", "start"),
    [("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG"), ("html", b"<!DOCTYPE html>")],
)
def test_the_name_of_the_file_says_what_is_drawn(tmp_path: Path, kind: str, start: bytes) -> None:
    path, again = tmp_path / f"plan.{kind}", tmp_path / f"again.{kind.upper()}"
    draw_plan(a_mixed_plan(), path)
    draw_plan(a_mixed_plan(), again)

    assert path.read_bytes().startswith(start)
    assert path.read_bytes() == again.read_bytes()


def test_a_page_has_the_picture_and_the_text_and_needs_nothing_else(tmp_path: Path) -> None:
    plan = a_mixed_plan(untouched=(("head", "it is <strange> & new"),))
    draw_plan(plan, tmp_path / "plan.html")

    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert page.count("<svg") == page.count("</svg>") == 1
    assert "it is &lt;strange&gt; &amp; new" in page
    assert html.unescape(page.partition("<pre>")[2].partition("</pre>")[0]) == render_plan(plan)
    assert not re.search(r"<script|<link|src=|@import", page)


def test_a_user_s_settings_of_matplotlib_are_neither_used_nor_changed(tmp_path: Path) -> None:
    draw_plan(a_mixed_plan(), tmp_path / "plain.svg")
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "red", "svg.fonttype": "none"}):
        draw_plan(a_mixed_plan(), tmp_path / "theirs.svg")

        assert matplotlib.rcParams["font.size"] == 20
    assert (tmp_path / "theirs.svg").read_bytes() == (tmp_path / "plain.svg").read_bytes()


def test_a_name_is_no_formula(tmp_path: Path) -> None:
    rows = (assigned(r"a$\frac$b", ConvOp.FPROP, OWN, KEPT),)

    draw_plan(a_mixed_plan(assignments=rows), tmp_path / "plan.svg")

    assert (tmp_path / "plan.svg").exists()


def test_a_large_model_is_drawn_whole(tmp_path: Path) -> None:
    rows = tuple(
        assigned(f"stage.{number}.conv", ConvOp.FPROP, WINOGRAD, FASTER, in_channels=number)
        for number in range(1, 161)
    )
    plan = a_mixed_plan(assignments=rows)

    draw_plan(plan, tmp_path / "plan.svg")

    times, _, _ = parts(plan_figure(plan))
    assert len(names(times)) == 160


@pytest.mark.parametrize("name", ["plan", "plan.gif", "plan.svg.txt", "html"])
def test_another_ending_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"must end in \.svg, \.pdf, \.png, \.html, but got '.*'\.$"):
        draw_plan(a_plan(), tmp_path / name)

    assert [*tmp_path.iterdir()] == []


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(
        OptionError, match=r"matplotlib must be installed to draw \(.*\); pip install matplotlib adds"
    ):
        draw_plan(a_plan(), tmp_path / "plan.svg")


def test_an_old_matplotlib_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(matplotlib, "__version_info__", (3, 8, 4))
    monkeypatch.setattr(matplotlib, "__version__", "3.8.4")

    with pytest.raises(OptionError, match=r"must be 3\.9 or later to draw, but is 3\.8\.4\.$"):
        draw_plan(a_plan(), tmp_path / "plan.svg")


def test_long_names_lose_their_middle_and_leave_room(tmp_path: Path) -> None:
    engine = Division((Candidate("cudnn:eng65_k2=5_k13=1_k18=1_k25=0_k27=1_k28=3_k33=2", 32, 0.1, 0),))
    path = "submodule.1." * 12 + "conv"
    rows = (assigned(path, ConvOp.FPROP, engine, dataclasses.replace(FASTER)),)
    plan = a_mixed_plan(assignments=rows)

    times, workspaces, _ = parts(plan_figure(plan))
    draw_plan(plan, tmp_path / "plan.svg")  # a warning would say that there is no room

    assert names(times)[0].startswith("submodule.1.submodule.1")
    assert names(times)[0].endswith(".conv fprop")
    assert behind(workspaces)[0].startswith("eng65_k2=5")
    assert behind(workspaces)[0].endswith(" 1×32")
    assert max(map(len, (*names(times), *behind(workspaces)))) <= 48


def test_a_shared_limit_is_drawn_as_that_of_a_sum(tmp_path: Path) -> None:
    plan = a_mixed_plan(mode=Mode.SHARING, assignments=(a_site("one", {MIB: 0.009, 2 * MIB: 0.004}),))

    figure = plan_figure(plan)
    draw_plan(plan, tmp_path / "plan.svg")

    _, _, (below,) = parts(figure)
    assert legend(figure.subfigs[0])[-1] == "limit of all together, 8 MiB"
    assert below.get_suptitle().startswith("What a smaller share would cost")
    assert all(line.get_linestyle() != "--" for line in below.axes[0].lines)


@pytest.mark.parametrize("kind", ["svg", "html"])
def test_a_picture_that_cannot_be_written_leaves_the_former_one(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    page = tmp_path / f"plan.{kind}"
    draw_plan(a_mixed_plan(), page)
    former = page.read_bytes()
    monkeypatch.setattr("mucudnn.files.os.fsync", fail)  # a disk may be full only when it is written to

    with pytest.raises(OSError, match="No space left on device") as raised:
        draw_plan(a_plan(), page)

    assert raised.value.filename == str(page)
    assert page.read_bytes() == former
    assert [*tmp_path.iterdir()] == [page]
