"""What `make bench-cpu` draws of its lines; all lines here are made up."""

import sys
from pathlib import Path

import pytest

from bench.cpu import program, results
from bench.cpu.ground import Ground
from bench.cpu.layers import ALL
from bench.cpu.lines import Choice, Measured, Recording
from bench.cpu.pictures import layers_figure, pictures, steps_figure
from bench.cpu.step_lines import StepMeasured
from mucudnn.problem import Layout
from tests.bench import layer_lines, step_lines
from tests.bench.layer_lines import LIMITS, OWN, environment
from tests.figures import BLUE, GREY, RED, behind, dots, legend, names, titles

NOISE = (0.9, 0.95, 1.0, 1.0, 1.0, 1.0, 1.0, 1.05, 1.1)


def a_step(own_ms: float = 2500.0, divided_ms: float = 1250.0, network: str = "resnet18") -> StepMeasured:
    return step_lines.measured(step_lines.case(network), own_ms, divided_ms)


def a_layer(name: str, own_ms: float, divided_ms: float, stays: bool = False) -> Measured:
    choices = tuple(Choice(limit, OWN, OWN) for limit in LIMITS) if stays else None
    case = layer_lines.case(name)
    return layer_lines.measured(case, own_ms, divided_ms, NOISE, choices=choices)


def test_a_step_is_a_line_with_both_times_and_the_speedup() -> None:
    figure = steps_figure([a_step(), a_step(100.0, 200.0, "unet")])

    (axes,) = figure.axes
    assert names(axes) == [
        "resnet18, 16 MiB, channels_last, 1 thread",
        "unet, 16 MiB, channels_last, 1 thread",
    ]
    assert behind(axes) == ["2.00 [2.00, 2.00]", "0.50 [0.50, 0.50]"]
    assert [(dot.line, dot.value, dot.colour, dot.is_hollow) for dot in dots(axes)] == [
        (0, pytest.approx(2.5), GREY, True),
        (0, pytest.approx(1.25), BLUE, False),
        (1, pytest.approx(0.1), GREY, True),
        (1, pytest.approx(0.2), RED, False),
    ]
    assert legend(figure) == ["unpatched", "patched, FASTER", "patched, SLOWER"]
    assert axes.get_xlim()[0] == 0


def test_a_limit_that_its_setting_names_stands_there_alone() -> None:
    case = step_lines.case(setting="2-threads-8mib")

    (axes,) = steps_figure([step_lines.measured(case, 2500.0, 1250.0)]).axes

    assert names(axes) == ["resnet18, channels_last, 2 threads, within 8 MiB"]


def test_layers_stand_in_the_order_of_their_speedups_losses_and_all() -> None:
    lines = [
        a_layer("net/a", 20.0, 10.0),
        a_layer("net/b", 10.0, 20.0),
        a_layer("net/few", 10.0, 10.0),
        a_layer("net/5x5", 20.0, 10.0, stays=True),
    ]

    figure = layers_figure([("1 thread, contiguous, fprop", lines)])

    axes = figure.axes[0]
    found = sorted(
        (place, speedup, line.lines[0].get_color())
        for line in axes.containers
        for place, speedup in zip(line.lines[0].get_xdata(), line.lines[0].get_ydata(), strict=True)
    )
    assert found == [
        (0, pytest.approx(0.5), RED),
        (1, pytest.approx(1.0), GREY),
        (2, pytest.approx(1.0), GREY),
        (3, pytest.approx(2.0), BLUE),
    ]
    assert titles(figure) == ["1 thread, contiguous, fprop\n4 layers, 16 MiB: 1.00 [0.98, 1.01]"]


def test_an_interval_without_end_does_not_set_the_scale() -> None:
    noise = (*NOISE[:4], *[1000.0] * 5)
    line = layer_lines.measured(layer_lines.case("net/a"), 1.0, 1.0, noise)

    figure = layers_figure([("these", [line, a_layer("net/b", 20.0, 10.0)])])

    low, high = figure.axes[0].get_ylim()
    assert low < 0.5
    assert high == pytest.approx(1400)


def test_a_name_that_is_long_has_lines() -> None:
    figure = layers_figure(
        [("2 threads, GOMP_SPINCOUNT=10000, channels_last, fprop", [a_layer("net/a", 2, 1)])]
    )

    assert titles(figure)[0].splitlines()[:2] == ["2 threads, GOMP_SPINCOUNT=10000,", "channels_last, fprop"]


def test_what_was_not_measured_is_not_drawn() -> None:
    layers = layer_lines.LAYERS
    assert pictures(Recording.of([]), layers) == {}
    assert [*pictures(Recording.of([a_step()]), layers)] == ["steps.svg"]
    assert [*pictures(Recording.of([a_layer("net/a", 2, 1)]), layers)] == ["layers.svg"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Results of a layer that there is, and of a step."""
    layer = next(each for each in ALL if Layout.CONTIGUOUS in each.layouts)
    case = layer_lines.case(layer.name)
    rounds = layer_lines.rounds({OWN: [20.0] * 9})
    line = Measured(
        case, layer.problem(case.op, case.layout), OWN, 0, 1, (), {}, (), None,
        tuple(Choice(limit, OWN, OWN) for limit in LIMITS), rounds, rounds, 1.0,
    )  # fmt: skip
    results.write(tmp_path, Ground(environment(), "0123"), [line], "python -m bench.cpu", [a_step()])
    return tmp_path


def test_pictures_lie_beside_the_summary_which_shows_them(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {
        "env.json", "layers.jsonl", "layers.svg", "steps.jsonl", "steps.svg", "summary.md"
    }  # fmt: skip
    summary = (folder / "summary.md").read_text(encoding="utf-8")
    assert "\n![steps](steps.svg)\n\n![layers](layers.svg)\n" in summary


def test_a_folder_is_retold_from_what_it_holds(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name in ("summary.md", "steps.svg", "layers.svg"):
        (folder / name).write_text("of yesterday")

    assert program.main(["--retell", str(folder)]) == 0

    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_packed_folder_is_retold_and_old_pictures_go(folder: Path) -> None:
    case = a_layer("net/a", 2, 1)
    results.write(folder, Ground(environment(), "0123"), [case] * 2000, "")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    results.retell(folder)

    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert "layers.jsonl.gz" in before
    assert not {"steps.svg", "layers.svg"} & set(before)  # no layer of that name is known


def test_what_cannot_draw_says_so_before_anything_else(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    for arguments in (["--retell", str(folder)], ["--seconds", "60"]):
        assert program.main(arguments) == 2
        assert "matplotlib must be installed to draw" in capsys.readouterr().err


def test_no_results_cannot_be_retold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--retell", str(tmp_path)]) == 2

    assert "No such file or directory" in capsys.readouterr().err
