"""Networks in all ways in `make bench-cpu`: what is run, what decides, what is told; the network is small."""

import copy
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.by_hand import a_plan_for
from bench.cpu import products, program, results, way_tables, ways
from bench.cpu.case_run import WAYS as WAY_KIND
from bench.cpu.case_run import CaseRun
from bench.cpu.ground import Ground, way_code
from bench.cpu.lines import Line, Recording, append, read
from bench.cpu.rounds import Rounds
from bench.cpu.step_cases import Network
from bench.cpu.step_lines import Tuned
from bench.cpu.step_models import ReadingStep, Recipe
from bench.cpu.way_cases import AS_IT_COMES, WAY_NETWORKS, WAYS, Form, Use, Way, WayCase, cases_of, ways_of
from bench.cpu.way_child import LINES, WayTask, work
from bench.cpu.way_lines import COPY, WayFailed, WayMeasured, Within, percentile
from bench.cpu.way_lines import OWN as UNPATCHED
from bench.cpu.way_lines import PATCHED as NOW
from bench.cpu.way_pictures import ways_figure
from mucudnn import Plan
from mucudnn.intervals import Estimate, Verdict, estimate
from mucudnn.problem import Layout
from tests.bench.recipes import HERE, TINY, diverging, tiny
from tests.figures import BLUE, GREY, behind, dots, names, titles
from tests.graphs import DYNAMOS

MISTAKEN = Network("tiny", f"{HERE}:mistaken", "made up", "noise")

OWN = str(AS_IT_COMES)
PATCHED = f"{OWN}, patched"
FASTER_OWN = "channels_last, compiled"
FASTER_PATCHED = f"{FASTER_OWN}, patched"
TIMES_MS = {OWN: 40.0, PATCHED: 30.0, FASTER_OWN: 20.0, FASTER_PATCHED: 10.0}
WHAT = "inference of resnet18, 8x3x32x32, 1 thread"
COST = Tuned(60.0, 0, 100, 2**20, {"stem fprop": "cpu:aten@8*1", "head fprop": "cpu:gemm@8*1"}, 1, (), 2**20)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Has torch.compile run graphs as they are, by hand-made plans, in few rounds; returns what was asked."""
    own, found = torch.compile, list[object]()

    def compiled(model: Any, *, dynamic: bool, options: object) -> Any:
        found.append(options)
        return own(model, backend="eager", dynamic=dynamic)

    def tuned(model: nn.Module, images: Tensor, path: Path) -> tuple[Plan, Tuned]:
        plan = a_plan_for(copy.deepcopy(model), images)
        plan.save(path.with_suffix(".json"))
        return plan, COST

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(ways, "tuned", tuned)
    monkeypatch.setattr(ways, "_PROVING_S", 0.0)
    return found


def case(use: Use = Use.INFERENCE, setting: str = "1-thread", network: str = "resnet18") -> WayCase:
    return WayCase(setting, network, use, 8)


def rounds(times_ms: Mapping[str, float], number: int = 15, calls: int = 1) -> Rounds:
    spans = {way: tuple(int(ms * 1e6) + index for index in range(number)) for way, ms in times_ms.items()}
    return Rounds(calls, spans)


def proven(times_ms: Mapping[str, float] | None = None, number: int = 15, calls: int = 1) -> Rounds:
    known = (
        {way: TIMES_MS[way] for way in (OWN, FASTER_OWN, FASTER_PATCHED)} if times_ms is None else times_ms
    )
    return rounds({**known, COPY: 20.0}, number, calls)


def measured(
    which: WayCase,
    proving: Rounds | None = None,
    failed: Mapping[str, str] | None = None,
    divided: str | None = FASTER_PATCHED,
    cost: Tuned = COST,
) -> WayMeasured:
    return WayMeasured(
        case=which,
        shape=(8, 3, 32, 32),
        limit_bytes=16 * 2**20,
        tuned={str(layout): cost for layout in Layout},
        errors=dict.fromkeys(TIMES_MS, 2e-7),
        choosing=rounds(TIMES_MS, 10),
        divided=divided,
        proving=proving or proven(),
        copied=FASTER_OWN,
        failed=failed or {},
        seconds=100.0,
    )


def told(*lines: Line) -> str:
    return "\n".join(way_tables.section(Recording.of(lines), ()))


def row(text: str, *beginnings: str) -> list[str]:
    (found,) = [line for line in text.splitlines() if line.startswith("| " + " | ".join(beginnings) + " |")]
    return [cell.strip() for cell in found.split("|")[1:-1]]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("use", Use)
def test_a_network_is_run_in_all_ways_and_all_agree(use: Use, tmp_path: Path, asked: list[Any]) -> None:
    which = WayCase("1-thread", "tiny", use, 2)

    line = ways.measure(which, TINY.recipe, tmp_path)

    every = {str(way) for way in ways_of(use)}
    assert {*line.choosing.spans_ns} == {*line.errors} == every
    assert line.failed == {}
    assert max(line.errors.values()) < 1e-4
    compiled = [way for way in ways_of(use) if way.form in (Form.COMPILED, Form.FROZEN)]
    assert [options["freezing"] for options in asked[: len(compiled)]] == [
        way.form is Form.FROZEN for way in compiled
    ]
    assert line.shape == (2, 3, 64, 64)
    assert {*line.tuned} == {"contiguous", "channels_last"}
    assert line.divided is not None
    assert {OWN, COPY, line.copied, line.divided, str(WAYS[line.divided].unpatched)} <= {
        *line.proving.spans_ns
    }
    assert {len(spans) for spans in line.proving.spans_ns.values()} == {15}
    layers = {(each.layout, each.path) for each in line.within}
    assert bool(layers) == (use is Use.INFERENCE)
    assert {layout for layout, _ in layers} == ({*line.tuned} if layers else set())
    assert torch.backends.mkldnn.enabled
    assert {path.name for path in tmp_path.glob("*.json")} == {
        f"1-thread_tiny_{use}_2_{layout}.json" for layout in Layout
    }


@pytest.mark.usefixtures("one_thread", "asked")
def test_the_fastest_of_both_are_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Rounds.timed.__func__  # type: ignore[attr-defined]  # a class method's
    times = {**{str(way): 5.0 for way in ways_of(Use.TRAINING)}, FASTER_OWN: 2.0, f"{OWN}, patched": 1.0}

    def timed(calls: Mapping[str, object], rule: object, *rest: object) -> Rounds:
        return rounds(times) if rule is ways.CHOOSING else own(Rounds, calls, rule, *rest)

    monkeypatch.setattr(Rounds, "timed", timed)

    line = ways.measure(WayCase("1-thread", "tiny", Use.TRAINING, 2), TINY.recipe, tmp_path)

    assert (line.divided, line.copied) == (f"{OWN}, patched", FASTER_OWN)
    assert [*line.proving.spans_ns] == [FASTER_OWN, OWN, f"{OWN}, patched", COPY]


def test_those_that_rounds_do_not_tell_apart_are_rivals() -> None:
    seen = {
        way: Estimate(middle, middle - 1, middle + 1, 10)
        for way, middle in zip(ways_of(Use.TRAINING), (9.0, 5.0, 6.0, 5.5, 7.5, 6.5), strict=False)
    }
    order = ways_of(Use.TRAINING)
    assert ways._not_told_apart(seen) == [order[1], order[3], order[2]]
    assert ways._not_told_apart(
        {order[0]: Estimate(9.0, 8.0, 10.0, 10), order[1]: Estimate(2.0, 1.0, 3.0, 10)}
    ) == [order[1]]


@pytest.mark.parametrize(("round_s", "expected"), [(1000.0, 15), (1.0, 150), (0.001, 400), (0.0, 400)])
def test_there_are_as_many_rounds_as_there_is_time_for(round_s: float, expected: int) -> None:
    assert ways._proving_rule(round_s).looks == (expected,)


def test_losses_may_be_as_far_off_as_pytorchs_are_and_not_much_farther_and_scores_may_not() -> None:
    assert ways.largest_error(Use.TRAINING, 1e-7) == pytest.approx(1e-3)
    assert 7e-3 < ways.largest_error(Use.TRAINING, 2e-3) < 3e-2
    assert ways.largest_error(Use.TRAINING, None) == pytest.approx(1e-2)
    for own in (None, 1e-7, 2e-3):
        assert ways.largest_error(Use.INFERENCE, own) == pytest.approx(1e-3)


@pytest.mark.usefixtures("one_thread", "asked")
def test_ways_that_fail_or_are_wrong_are_told_and_never_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, nan = ways._first, float("nan")
    spoilt = {
        Form.FROZEN: lambda y: y.no_such_thing,
        Form.COMPILED: lambda y: y * 1.005,
        Form.WITHOUT_ONEDNN: lambda y: y * nan,
    }

    def first(runner: ways.Runner, form: Form) -> Tensor:
        result = own(runner, form)
        return spoilt[form](result) if form in spoilt else result

    monkeypatch.setattr(ways, "_first", first)

    line = ways.measure(WayCase("1-thread", "tiny", Use.INFERENCE, 2), TINY.recipe, tmp_path)
    append(tmp_path / LINES, line)

    assert {WAYS[way].form for way in line.choosing.spans_ns} == {Form.EAGER}
    reasons = {WAYS[way].form: why for way, why in line.failed.items()}
    assert reasons[Form.FROZEN] == "AttributeError: 'Tensor' object has no attribute 'no_such_thing'"
    assert reasons[Form.COMPILED] == "ValueError: Its results must be those of float64, but are 5e-03 off."
    assert (
        reasons[Form.WITHOUT_ONEDNN] == "ValueError: Its results must be those of float64, but are inf off."
    )
    assert Recording.of(read(tmp_path / LINES)).ways == {line.case: line}


@pytest.mark.usefixtures("one_thread")
def test_a_step_whose_loss_is_no_number_ends_its_network() -> None:
    recipe = diverging()
    step = ways.Training(ReadingStep(recipe, Layout.CONTIGUOUS))

    with pytest.raises(ValueError, match=r"^The loss must be finite, but got nan\.$"):
        step()


def normalised() -> Recipe:
    """A convolution with batch norm, which can be folded."""
    recipe = tiny()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    return Recipe(model, recipe.images, recipe.targets, 2)


@pytest.mark.usefixtures("one_thread")
@DYNAMOS
@pytest.mark.timeout(200)  # a compiler starts
def test_what_is_frozen_is_folded_and_packed() -> None:
    subject = ways.Subject(WayCase("1-thread", "tiny", Use.INFERENCE, 2), Layout.CONTIGUOUS, normalised())
    folded, results = [], []
    for form in (Form.EAGER, Form.COMPILED, Form.FROZEN):
        torch._dynamo.utils.counters.clear()
        results.append(ways._first(subject.runner(), form))
        seen = torch._dynamo.utils.counters["inductor"]
        folded.append((seen["binary_folding_conv"] > 0, seen["mkldnn_conv_weight_pack_matcher_count"] > 0))

    assert folded == [(False, False), (False, False), (True, True)]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


@pytest.mark.usefixtures("one_thread", "asked")
def test_what_a_process_finds_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_SIZE", 64)
    which = WayCase("1-thread", "tiny", Use.INFERENCE, 2)
    for network in (TINY, MISTAKEN):
        work(WayTask(which, network, str(tmp_path)))

    found = Recording.of(read(tmp_path / LINES))
    assert found.ways[which].case == which
    assert "RuntimeError" in found.failed_ways[which].reason
    assert found.started["1-thread"].environment.backend == "cpu"


def test_the_base_is_the_fastest_of_pytorchs_own_in_the_proving_rounds() -> None:
    line = measured(case(), proven({OWN: 15.0, FASTER_OWN: 20.0, FASTER_PATCHED: 10.0}))
    assert line.own == OWN
    assert line.speedup(FASTER_PATCHED, line.own).median == pytest.approx(1.5, rel=1e-3)
    assert line.verdict(FASTER_PATCHED) is Verdict.FASTER
    assert line.break_even(FASTER_PATCHED).median == pytest.approx(60.0 / 5e-3, rel=1e-3)


def test_a_patched_way_that_is_slower_is_told_so() -> None:
    text = told(measured(case(), proven({OWN: 8.0, FASTER_OWN: 9.0, FASTER_PATCHED: 10.0})))
    assert row(text, WHAT, "8 [8, 8]")[4:6] == ["0.80 [0.80, 0.80]", "SLOWER"]
    assert "∞" in text


def test_where_nothing_is_patched_nothing_is_compared() -> None:
    line = measured(case(), proven({OWN: 8.0, FASTER_OWN: 9.0}), divided=None)
    text = told(line)
    assert row(text, WHAT, "8 [8, 8]")[3:7] == ["nothing is patched", "–", "–", "–"]
    assert "Comparisons with the fastest of PyTorch's own: 0." in text
    assert "nothing is patched" in way_tables.told(line)


def test_all_ways_stand_in_the_tables() -> None:
    failed = {"contiguous, compiled and frozen": "Error: no"}
    text = told(measured(case(), failed=failed), WayFailed(case(Use.TRAINING), "no room"))

    cells = row(text, WHAT, "40 [40, 40]")
    assert cells[2:4] == ["20 [20, 20], channels_last, compiled", "10 [10, 10], channels_last, compiled"]
    assert cells[4:8] == ["2.00 [2.00, 2.00]", "FASTER", "4.00 [4.00, 4.00]", "1.00 [1.00, 1.00]"]
    assert row(text, PATCHED) == [PATCHED, "30 [30, 30] (2e-07)"]
    assert row(text, "channels_last, eager") == ["channels_last, eager", "="]
    assert row(text, "contiguous, compiled and frozen")[1] == "failed"
    assert row(text, WHAT, "channels_last", "60 s") == [
        WHAT, "channels_last", "60 s", "6000 [6000, 6000]", "1 MiB", "1 of 2",
    ]  # fmt: skip
    assert row(text, WHAT, "contiguous", "60 s")[3] == "–"
    assert "contiguous, compiled and frozen failed: Error: no" in text
    assert "1-thread resnet18 training 8 failed: no room" in text
    assert "2-threads resnet18 inference 8" in text.splitlines()[-1]


def test_what_the_tuner_found_stands_beside_what_comes_of_it_within_the_model() -> None:
    layers = (
        Within("contiguous", "stem", "cpu:gemm@8*1", rounds({UNPATCHED: 8.0, NOW: 10.0}), 1.25),
        Within("contiguous", "head", "cpu:im2col@8*1", Rounds(1, {UNPATCHED: (8,) * 9, NOW: (4,) * 9}, 0.25)),
    )
    text = told(dataclasses.replace(measured(case()), within=layers))

    assert row(text, WHAT, "contiguous", "stem")[3:] == [
        "cpu:gemm@8*1", "8 [8, 8]", "10 [10, 10]", "0.80 [0.80, 0.80] SLOWER", "1.25", "–",
    ]  # fmt: skip
    assert row(text, WHAT, "contiguous", "head")[6:] == ["2.00 [2.00, 2.00] FASTER", "–", "0.25"]
    assert "Comparisons: 2." in text
    assert "within its model" not in told(measured(case()))


def test_what_an_interrupted_run_paid_is_not_forgotten() -> None:
    resumed = Tuned(6.0, 50, 50, 2**20, COST.runs, 1, (), None)
    cells = row(told(measured(case(), cost=resumed)), WHAT, "channels_last", "at least 6 s")
    assert cells[3:5] == ["at least 600 [600, 600]", "–"]


@pytest.mark.parametrize(("number", "known"), [(71, 0), (72, 1), (367, 1), (368, 2)])
def test_a_percentile_needs_enough_samples(number: int, known: int) -> None:
    cells = row(told(measured(case(), proven(number=number))), WHAT, OWN)[2:]
    assert cells == ["40 [40, 40]", *["40 [40, 40]"] * known, *["–"] * (2 - known)]


def test_training_has_no_latencies() -> None:
    assert "Latencies" not in told(measured(case(Use.TRAINING)))


def test_spans_of_several_calls_have_no_percentiles() -> None:
    cells = row(told(measured(case(), proven(number=400, calls=2))), WHAT, OWN)
    assert cells[3:] == ["–", "–"]


@pytest.mark.parametrize("number", [15, 30, 100])
def test_the_interval_of_a_middle_percentile_is_that_of_the_median(number: int) -> None:
    samples = [float(each) for each in range(1, number + 1)]
    found, median = percentile(samples[::-1], 0.5), estimate(samples)
    assert found is not None
    assert (found.low, found.high) == (median.low, median.high)


def test_percentiles_are_samples_with_others_around_them() -> None:
    found = percentile([float(each) for each in range(400, 0, -1)], 0.95)
    assert found == Estimate(380.0, 371.0, 389.0, 400)


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    seen: list[WayTask] = []

    def process(task: WayTask, _: float) -> str | None:
        seen.append(task)
        append(tmp_path / LINES, measured(task.case))
        return None

    cases = cases_of(WAY_NETWORKS, ["2-threads"])
    run = CaseRun(WAY_KIND, tmp_path, WAY_NETWORKS, process)
    run.measure(cases, 3600)
    run.measure(cases, 3600)

    assert [task.case for task in seen] == cases
    assert {task.network.name for task in seen} == {task.case.network for task in seen}


def test_a_process_that_ends_is_a_failure(tmp_path: Path) -> None:
    run = CaseRun(WAY_KIND, tmp_path, WAY_NETWORKS, lambda *_: "its process ended with status 1.")
    run.measure([case()], 3600)
    assert Recording.of(run.lines()).failed_ways == {
        case(): WayFailed(case(), "its process ended with status 1.")
    }


def test_ways_are_measured_where_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []
    monkeypatch.setattr(program.Run, "measure", lambda *_: asked.append("layers"))
    monkeypatch.setattr(CaseRun, "measure", lambda _, cases, __: asked.extend(str(each) for each in cases))

    folder = Path("build/bench-cpu") / Ground.here().digest / f"ways-{way_code()}"
    folder.mkdir(parents=True)
    append(folder / LINES, measured(WayCase("2-threads", "unet", Use.INFERENCE, 1)))
    program.main(["--ways", "unet", "--settings", "1-thread", "--output", "found"])

    assert asked == ["1-thread unet inference 1", "1-thread unet training 4"]
    assert "inference of unet" in Path("found/summary.md").read_text(encoding="utf-8")
    assert json.loads(Path("found/env.json").read_text(encoding="utf-8"))["command"].endswith(
        "--output found"
    )
    asked.clear()
    program.main(["--seconds", "0"])
    assert asked[0] == "layers"
    assert not any("inference" in each for each in asked)


def test_ways_without_a_setting_of_theirs_are_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--ways", "--settings", "2-threads-spin"]) == 2
    assert capsys.readouterr().err == "bench.cpu: --ways needs --settings 1-thread or 2-threads.\n"


def test_a_folder_is_told_anew_with_its_ways(tmp_path: Path) -> None:
    results.write(tmp_path, Ground.here(), [], "make bench-cpu", ways=[measured(case())])
    first = (tmp_path / "summary.md").read_text(encoding="utf-8")
    (tmp_path / "summary.md").unlink()

    results.retell(tmp_path)

    assert (tmp_path / "summary.md").read_text(encoding="utf-8") == first
    assert FASTER_OWN in first


def test_ways_that_are_gone_leave_no_lines(tmp_path: Path) -> None:
    results.write(tmp_path, Ground.here(), [], "make bench-cpu", ways=[measured(case())])
    results.write(tmp_path, Ground.here(), [], "make bench-cpu")

    assert {path.name for path in tmp_path.iterdir()} == {
        "env.json",
        "layers.jsonl",
        "steps.jsonl",
        "summary.md",
    }


def test_each_way_is_a_line_with_its_time_patched_beside_it() -> None:
    figure = ways_figure([measured(case()), measured(case(Use.TRAINING))])

    axes = figure.axes[0]
    assert names(axes) == [OWN, FASTER_OWN]
    assert behind(axes) == ["1.33 [1.33, 1.33]", "2.00 [2.00, 2.00]"]
    assert titles(figure)[0] == WHAT
    assert [(dot.line, dot.value, dot.colour, dot.is_hollow) for dot in dots(axes)] == [
        (0, pytest.approx(40.0, rel=1e-3), GREY, True),
        (0, pytest.approx(30.0, rel=1e-3), BLUE, False),
        (1, pytest.approx(20.0, rel=1e-3), GREY, True),
        (1, pytest.approx(10.0, rel=1e-3), BLUE, False),
    ]


def test_every_network_and_batch_has_a_case_in_both_settings() -> None:
    names = {network.name for network in WAY_NETWORKS}
    for setting in ("1-thread", "2-threads"):
        found = cases_of(WAY_NETWORKS, [setting])
        assert {each.network for each in found} == names
        assert {each.batch for each in found if each.use is Use.INFERENCE} == {1, 8, 64}
    assert Way(Layout.CHANNELS_LAST, Form.FROZEN, is_divided=True) in ways_of(Use.INFERENCE)
    assert not any(way.form is Form.FROZEN for way in ways_of(Use.TRAINING))
