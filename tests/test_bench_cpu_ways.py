"""Networks in all ways in `make bench-cpu`: what is run, what decides, what is told; the network is small."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.cpu import program, results, way_tables, ways
from bench.cpu.case_run import WAYS, CaseRun
from bench.cpu.ground import Ground, step_code
from bench.cpu.lines import Line, Recording, append, read
from bench.cpu.rounds import Rounds
from bench.cpu.step_cases import Network
from bench.cpu.step_lines import Tuned
from bench.cpu.way_cases import AS_IT_COMES, WAY_NETWORKS, Form, Use, Way, WayCase, cases_of, ways_of
from bench.cpu.way_child import LINES, WayTask, work
from bench.cpu.way_lines import WayFailed, WayMeasured, percentile
from mucudnn.intervals import Verdict
from mucudnn.problem import Layout
from tests.test_bench_cpu_steps import HERE as STEPS_HERE

TINY = Network("tiny", f"{STEPS_HERE}:tiny", "made up", "noise")
MISTAKEN = Network("tiny", f"{STEPS_HERE}:mistaken", "made up", "noise")

OWN = str(AS_IT_COMES)
PATCHED = f"{OWN}, patched"
FASTER_OWN = "channels_last, compiled"
FASTER_PATCHED = f"{FASTER_OWN}, patched"
TIMES_MS = {OWN: 40.0, PATCHED: 30.0, FASTER_OWN: 20.0, FASTER_PATCHED: 10.0}


@pytest.fixture
def eager_compiler(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Has torch.compile run graphs as they are; what it was asked for is returned."""
    own, asked = torch.compile, list[object]()

    def compiled(model: Any, *, options: object) -> Any:
        asked.append(options)
        return own(model, backend="eager")

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(ways, "_PROVING_S", 0.0)
    return asked


def case(use: Use = Use.INFERENCE, setting: str = "1-thread", network: str = "resnet18") -> WayCase:
    return WayCase(setting, network, use, 8)


def rounds(times_ms: Mapping[str, float], number: int = 15, calls: int = 1) -> Rounds:
    spans = {way: tuple(int(ms * 1e6) + index for index in range(number)) for way, ms in times_ms.items()}
    return Rounds(calls, spans)


def measured(
    which: WayCase,
    choosing_ms: Mapping[str, float] = TIMES_MS,
    proving: Rounds | None = None,
    failed: Mapping[str, str] | None = None,
) -> WayMeasured:
    cost = Tuned(
        60.0, 0, 100, 2**20, {"stem fprop": "cpu:aten@8*1", "head fprop": "cpu:gemm@8*1"}, 1, (), 2**20
    )
    return WayMeasured(
        case=which,
        shape=(8, 3, 32, 32),
        limit_bytes=16 * 2**20,
        tuned={str(layout): cost for layout in Layout},
        ready_s=dict.fromkeys(choosing_ms, 3.0),
        errors=dict.fromkeys(choosing_ms, 2e-07),
        choosing=rounds(choosing_ms, 7),
        divided=FASTER_PATCHED,
        proving=proving or rounds({way: TIMES_MS[way] for way in (OWN, FASTER_OWN, FASTER_PATCHED)}),
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
def test_a_network_is_run_in_all_ways_and_all_agree(
    use: Use, tmp_path: Path, eager_compiler: list[object]
) -> None:
    which = WayCase("1-thread", "tiny", use, 2)

    line = ways.measure(which, TINY.recipe, tmp_path)

    every = [str(way) for way in ways_of(use)]
    assert [*line.choosing.spans_ns] == [*line.errors] == [*line.ready_s] == every
    assert line.failed == {}
    assert max(line.errors.values()) < 1e-5
    assert (
        eager_compiler
        == ([None, None, *[{"freezing": True}] * 2] if use is Use.INFERENCE else [None] * 2) * 2
    )
    assert line.shape == (2, 3, 64, 64)
    assert {*line.tuned} == {"contiguous", "channels_last"}
    assert OWN in line.proving.spans_ns
    assert line.divided in line.proving.spans_ns
    assert line.divided.removesuffix(", patched") in line.proving.spans_ns
    assert {len(spans) for spans in line.proving.spans_ns.values()} == {15}
    assert torch.backends.mkldnn.enabled
    assert {path.name for path in tmp_path.glob("*.json")} == {
        f"1-thread_tiny_{use}_2_{layout}.json" for layout in Layout
    }


@pytest.mark.usefixtures("one_thread", "eager_compiler")
def test_a_way_that_fails_is_told_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(runner: ways.Runner, form: Form) -> None:
        if form is Form.FROZEN:
            runner.model.register_forward_pre_hook(lambda *_: 1 / 0)

    monkeypatch.setattr(ways, "_prepare", refuse)

    line = ways.measure(WayCase("1-thread", "tiny", Use.INFERENCE, 2), TINY.recipe, tmp_path)

    frozen = {str(way) for way in ways_of(Use.INFERENCE) if way.form is Form.FROZEN}
    assert line.failed == dict.fromkeys(frozen, "ZeroDivisionError: division by zero")
    assert not frozen & {*line.choosing.spans_ns}


def test_a_result_that_is_no_number_is_infinitely_far_off() -> None:
    assert ways._distance(torch.tensor([1.0, float("nan")]), torch.ones(2).double()) == float("inf")


@pytest.mark.usefixtures("one_thread", "eager_compiler")
def test_what_a_process_finds_is_a_line(tmp_path: Path) -> None:
    which = WayCase("1-thread", "tiny", Use.INFERENCE, 2)
    for network in (TINY, MISTAKEN):
        work(WayTask(which, network, str(tmp_path)))

    found = Recording.of(read(tmp_path / LINES))
    assert found.ways[which].case == which
    assert "RuntimeError" in found.failed_ways[which].reason
    assert found.started["1-thread"].environment.backend == "cpu"


def test_the_base_is_the_fastest_of_pytorchs_own_in_the_proving_rounds() -> None:
    slow_twin = rounds({OWN: 15.0, FASTER_OWN: 20.0, FASTER_PATCHED: 10.0})
    line = measured(case(), proving=slow_twin)
    assert line.own == OWN
    assert line.speedup(line.own).median == pytest.approx(1.5, rel=1e-3)
    assert line.verdict is Verdict.FASTER
    assert line.break_even.median == pytest.approx(60.0 / 5e-3, rel=1e-3)


def test_a_patched_way_that_is_slower_is_told_so() -> None:
    line = measured(case(), proving=rounds({OWN: 8.0, FASTER_PATCHED: 10.0}))
    cells = row(told(line), "inference of resnet18, 8x3x32x32, 1 thread", "8 [8, 8]")
    assert cells[4:6] == ["0.80 [0.80, 0.80]", "SLOWER"]
    assert "∞" in told(line)


def test_all_ways_stand_in_the_tables() -> None:
    text = told(
        measured(case(), failed={f"{OWN} and frozen": "Error: no"}), WayFailed(case(Use.TRAINING), "no room")
    )
    what = "inference of resnet18, 8x3x32x32, 1 thread"

    cells = row(text, what, "40 [40, 40]")
    assert cells[2:4] == ["20 [20, 20], channels_last, compiled", "10 [10, 10], channels_last, compiled"]
    assert cells[4:7] == ["2.00 [2.00, 2.00]", "FASTER", "4.00 [4.00, 4.00]"]
    assert row(text, PATCHED) == [PATCHED, "30 [30, 30] (2e-07)"]
    assert row(text, "channels_last, eager") == ["channels_last, eager", "–"]
    assert row(text, what, "contiguous 60 s; channels_last 60 s")[2] == "6000 [6000, 6000]"
    assert f"{OWN} and frozen failed: Error: no" in text
    assert "1-thread resnet18 training 8 failed: no room" in text
    assert "2-threads resnet18 inference 8" in text.splitlines()[-1]


@pytest.mark.parametrize(("number", "expected"), [(58, ["–", "–"]), (59, ["40", "–"]), (299, ["40", "40"])])
def test_a_percentile_needs_enough_samples(number: int, expected: Sequence[str]) -> None:
    line = measured(case(), proving=rounds({OWN: 40.0, FASTER_PATCHED: 10.0}, number))
    what = "inference of resnet18, 8x3x32x32, 1 thread"
    assert row(told(line), what, OWN)[2:] == ["40", *expected]


def test_training_has_no_latencies() -> None:
    assert "Latencies" not in told(measured(case(Use.TRAINING)))


def test_spans_of_several_calls_have_no_percentiles() -> None:
    line = measured(case(), proving=rounds({OWN: 40.0, FASTER_PATCHED: 10.0}, 300, calls=2))
    assert row(told(line), "inference of resnet18, 8x3x32x32, 1 thread", OWN)[2:] == ["–"] * 3


def test_percentiles_are_samples() -> None:
    samples = [float(each) for each in range(1, 301)]
    assert [percentile(samples[::-1], share) for share in (0.5, 0.95, 0.99)] == [150.0, 285.0, 297.0]


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    seen: list[WayTask] = []

    def process(task: WayTask, _: float) -> str | None:
        seen.append(task)
        append(tmp_path / LINES, measured(task.case))
        return None

    cases = cases_of(WAY_NETWORKS, ["2-threads"])
    run = CaseRun(WAYS, tmp_path, WAY_NETWORKS, process)
    run.measure(cases, 3600)
    run.measure(cases, 3600)

    assert [task.case for task in seen] == cases
    assert {task.network.name for task in seen} == {task.case.network for task in seen}


def test_a_process_that_ends_is_a_failure(tmp_path: Path) -> None:
    run = CaseRun(WAYS, tmp_path, WAY_NETWORKS, lambda *_: "its process ended with status 1.")
    run.measure([case()], 3600)
    assert Recording.of(run.lines()).failed_ways == {
        case(): WayFailed(case(), "its process ended with status 1.")
    }


def test_ways_are_measured_where_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []
    monkeypatch.setattr(program.Run, "measure", lambda *_: asked.append("layers"))
    monkeypatch.setattr(CaseRun, "measure", lambda _, cases, __: asked.extend(str(each) for each in cases))

    folder = Path("build/bench-cpu") / Ground.here().digest / f"ways-{step_code()}"
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


def test_a_folder_is_told_anew_with_its_ways(tmp_path: Path) -> None:
    results.write(tmp_path, Ground.here(), [], "make bench-cpu", ways=[measured(case())])
    first = (tmp_path / "summary.md").read_text(encoding="utf-8")
    (tmp_path / "summary.md").unlink()

    results.retell(tmp_path)

    assert (tmp_path / "summary.md").read_text(encoding="utf-8") == first
    assert FASTER_OWN in first


def test_every_network_and_batch_has_a_case_in_both_settings() -> None:
    names = {network.name for network in WAY_NETWORKS}
    for setting in ("1-thread", "2-threads"):
        found = cases_of(WAY_NETWORKS, [setting])
        assert {each.network for each in found} == names
        assert {each.batch for each in found if each.use is Use.INFERENCE} == {1, 8, 64}
    assert Way(Layout.CHANNELS_LAST, Form.FROZEN, is_divided=True) in ways_of(Use.INFERENCE)
    assert not any(way.form is Form.FROZEN for way in ways_of(Use.TRAINING))
