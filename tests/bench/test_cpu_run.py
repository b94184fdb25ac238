"""What competes in a case of `make bench-cpu`, in which order cases are measured, and how a run goes on."""

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import mucudnn
from bench.cpu import choice, ground, measure, settings
from bench.cpu.child import LINES, Task
from bench.cpu.layers import ALL, Layer
from bench.cpu.lines import (
    Case,
    Choice,
    Failed,
    GemmRate,
    Measured,
    Recording,
    Rounds,
    Started,
    append,
    read,
    read_packed_too,
    to_text,
    write_lines,
)
from bench.cpu.measure import CaseMeter
from bench.cpu.process import task_from, task_text
from bench.cpu.program import Run, main
from bench.cpu.schedule import Selection, Stage, pending, tiers
from mucudnn import timing
from mucudnn.backends import backend_of
from mucudnn.backends.cpu.backend import CpuBackend
from mucudnn.division import Division
from mucudnn.errors import BackendError
from mucudnn.plan_file import decode, encode
from mucudnn.problem import ConvOp, Layout
from mucudnn.profile import Candidate
from mucudnn.store import open_store

MIB = 2**20
EVERYTHING = Selection(("*",), tuple(settings.SETTINGS), tuple(Layout), tuple(ConvOp))


def a_layer(name: str = "small/conv", is_core: bool = True) -> Layer:
    return Layer(name, "made up", 4, 8, (8, 8), 8, (3, 3), (1, 1), (1, 1), is_core=is_core)


OWN = Candidate("cpu:aten", 4, 8.0, 50 * MIB)
PART = Candidate("cpu:aten", 1, 1.9, 8 * MIB)
QUICK = Candidate("cpu:winograd4", 4, 4.0, 60 * MIB)
SMALL = Candidate("cpu:winograd4", 1, 1.5, 3 * MIB)


def a_contest() -> choice.Contest:
    return choice.contest([OWN, PART, QUICK, SMALL], Division((OWN,)), (4 * MIB, 16 * MIB, 64 * MIB))


def samples(**times: float) -> dict[str, list[float]]:
    keys = {
        "own": "cpu:aten@4*1",
        "quick": "cpu:winograd4@4*1",
        "small": "cpu:winograd4@1*4",
    }
    return {keys[name]: [seconds] * 9 for name, seconds in times.items()}


def test_the_best_divisions_within_each_limit_compete() -> None:
    found = a_contest()
    assert list(found.rivals) == ["cpu:winograd4@4*1", "cpu:winograd4@1*4"]
    assert found.undivided == "cpu:winograd4@4*1"


def test_under_each_limit_the_fastest_that_fits_is_chosen() -> None:
    choices = a_contest().choose(samples(own=8.0, quick=4.0, small=6.0), {})
    assert [(each.key, each.strict_key) for each in choices] == [
        ("cpu:winograd4@1*4", "cpu:winograd4@1*4"),
        ("cpu:winograd4@1*4", "cpu:winograd4@1*4"),
        ("cpu:winograd4@4*1", "cpu:winograd4@4*1"),
    ]


def test_what_fits_a_small_limit_is_chosen_under_a_large_one_if_it_is_faster() -> None:
    choices = a_contest().choose(samples(own=8.0, quick=7.0, small=6.0), {})
    assert choices[-1].key == "cpu:winograd4@1*4"


def test_own_stays_where_nothing_is_faster_and_the_strict_choice_stands_beside_it() -> None:
    first, _, last = a_contest().choose(samples(own=8.0, quick=7.9, small=9.0), {})
    assert (first.key, first.strict_key) == ("cpu:aten@4*1", "cpu:winograd4@1*4")
    assert (last.key, last.strict_key) == ("cpu:aten@4*1", "cpu:aten@4*1")


def test_a_disturbed_rival_does_not_stand_before_one_that_is_faster_for_sure() -> None:
    times = samples(own=8.0, quick=5.0, small=6.0)
    times["cpu:winograd4@4*1"][:3] = [9.0] * 3

    assert a_contest().choose(times, {})[-1].key == "cpu:winograd4@1*4"


def test_what_was_seen_to_take_more_than_the_limit_is_out() -> None:
    seen = {"cpu:winograd4@1*4": 5 * MIB}
    first, second, _ = a_contest().choose(samples(own=8.0, quick=4.0, small=6.0), seen)
    assert (first.key, first.strict_key) == ("cpu:aten@4*1", None)
    assert second.key == "cpu:winograd4@1*4"


def test_without_candidates_own_runs_alone() -> None:
    found = choice.contest([], Division((OWN,)), (4 * MIB, 64 * MIB))
    assert found.rivals == {}
    assert found.undivided is None
    keys = [(each.key, each.strict_key) for each in found.choose(samples(own=8.0), {})]
    assert keys == [("cpu:aten@4*1", None), ("cpu:aten@4*1", "cpu:aten@4*1")]


WHOLE = choice.Family("undivided", lambda part, batch: part.batch == batch)
OWN_PARTS = choice.Family("own", lambda part, batch: part.algorithm == "cpu:aten" and part.batch < batch)


def of_families(candidates: list[Candidate], own_bytes: int = 50 * MIB) -> choice.Contest:
    own = Division((dataclasses.replace(OWN, workspace_bytes=own_bytes),))
    return choice.contest(candidates, own, (16 * MIB, 64 * MIB), (WHOLE, OWN_PARTS))


def test_the_best_of_each_family_competes_under_every_limit() -> None:
    slow = Candidate("cpu:gemm", 4, 9.0, 1 * MIB)
    found = of_families([OWN, PART, QUICK, SMALL, slow])
    assert set(found.rivals) == {"cpu:winograd4@4*1", "cpu:winograd4@1*4", "cpu:gemm@4*1", "cpu:aten@1*4"}
    times = {**samples(own=8.0, quick=4.0, small=6.0), "cpu:gemm@4*1": [9.0] * 9, "cpu:aten@1*4": [7.0] * 9}
    small, large = found.choose(times, {})
    assert small == Choice(
        16 * MIB, "cpu:winograd4@1*4", "cpu:winograd4@1*4",
        {"undivided": "cpu:gemm@4*1", "own": "cpu:aten@1*4"},
    )  # fmt: skip
    assert large.of_family("undivided") == "cpu:winograd4@4*1"


def test_own_undivided_is_the_best_of_a_family_only_where_it_fits_and_belongs_to_it() -> None:
    times = samples(own=2.0, quick=4.0, small=6.0)
    times["cpu:aten@1*4"] = [7.0] * 9
    small, large = of_families([OWN, PART, QUICK, SMALL]).choose(times, {})
    assert small.best == {"own": "cpu:aten@1*4"}
    assert large.best == {"undivided": "cpu:aten@4*1", "own": "cpu:aten@1*4"}


def test_the_two_quickest_undivided_candidates_compete_under_every_limit_where_there_are_families() -> None:
    engines = [Candidate(f"cpu:gemm_k{n}", 4, 9.0 + n, n * 10 * MIB) for n in (1, 2, 3, 5)]
    candidates = [OWN, PART, QUICK, SMALL, *engines]
    found = of_families(candidates)
    wholes = {key for key in found.rivals if key.endswith("@4*1")}
    assert wholes == {"cpu:winograd4@4*1", "cpu:gemm_k1@4*1"}

    more = of_families([OWN, PART, SMALL, *engines])
    assert {key for key in more.rivals if "gemm" in key} == {"cpu:gemm_k1@4*1", "cpu:gemm_k2@4*1"}
    without = choice.contest([OWN, PART, SMALL, *engines], Division((OWN,)), (16 * MIB, 64 * MIB))
    assert "cpu:gemm_k2@4*1" not in without.rivals


def test_what_is_hopeless_under_every_limit_that_it_fits_does_not_compete_but_as_a_base() -> None:
    slow = Candidate("cpu:aten", 1, 20.0, 8 * MIB)
    slow_whole = Candidate("cpu:gemm", 4, 90.0, 1 * MIB)
    own = Division((OWN,))
    bases = (dataclasses.replace(WHOLE, is_base=True), OWN_PARTS)
    candidates = [OWN, slow, QUICK, SMALL, slow_whole]

    found = choice.contest(candidates, own, (16 * MIB, 64 * MIB), bases, hopeless=8.0)
    assert set(found.rivals) == {"cpu:winograd4@4*1", "cpu:winograd4@1*4", "cpu:gemm@4*1"}

    alone = choice.contest([OWN, slow, QUICK], own, (16 * MIB, 64 * MIB), bases, hopeless=8.0)
    assert set(alone.rivals) == {"cpu:winograd4@4*1", "cpu:aten@1*4"}  # nothing else fits 16 MiB


@pytest.mark.parametrize("spans_us", [(50, 5_000), (100, 300), (700, 900, 2_000), (3_000, 70_000)])
def test_calls_are_repeated_within_a_span_as_foreseen(spans_us: tuple[int, ...]) -> None:
    now = 0

    def taking(ns: int) -> Callable[[], None]:
        def call() -> None:
            nonlocal now
            now += ns

        return call

    calls = {str(us): taking(us * 1000) for us in spans_us}
    rule = timing.SamplingRule((6,), 0.01, 1_000_000)
    times = timing.compare_runs(calls, rule, lambda: now)
    seen = {each.calls for each in times.values()}
    assert seen == {measure.calls_per_span([us * 1e-6 for us in spans_us], 1e-3)}


def test_what_was_seen_to_take_more_than_the_limit_is_no_best_of_a_family() -> None:
    times = {**samples(own=8.0, quick=4.0, small=6.0), "cpu:aten@1*4": [7.0] * 9}
    small, _ = of_families([OWN, PART, QUICK, SMALL]).choose(times, {"cpu:aten@1*4": 17 * MIB})
    assert small.of_family("own") is None


def test_a_choice_without_families_is_written_as_it_was() -> None:
    assert encode(Choice(1, "a", "b")) == {"limit_bytes": 1, "key": "a", "strict_key": "b"}
    whole = Choice(1, "a", None, {"own": "c"})
    assert decode(Choice, encode(whole)) == whole


def test_an_eighth_of_what_own_hides_is_a_limit_where_that_is_much() -> None:
    assert choice.limits_of((4, 16), 40 * MIB) == (4, 16)
    assert choice.limits_of((4 * MIB, 64 * MIB), 48 * MIB) == (4 * MIB, 6 * MIB, 64 * MIB)
    assert choice.limits_of((4 * MIB, 64 * MIB), 800 * MIB) == (4 * MIB, 64 * MIB)
    assert choice.limits_of((4 * MIB,), 50 * MIB, divisor=25) == (2 * MIB, 4 * MIB)


def some_failures(count: int) -> list[Failed]:
    return [
        Failed(Case("1-thread", f"net/{number}", Layout.CONTIGUOUS, ConvOp.FPROP), "x" * 1000)
        for number in range(count)
    ]


def test_lines_stay_where_writing_them_anew_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines.jsonl"
    few, many = some_failures(3), some_failures(1500)
    write_lines(path, few)

    def end(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", end)  # the new file is there, but beside the old one
        for lines in (few[:1], many):
            with pytest.raises(KeyboardInterrupt):
                write_lines(path, lines)
    assert read_packed_too(path) == few

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", end)  # the packed one is in place, the other not yet gone
        with pytest.raises(KeyboardInterrupt):
            write_lines(path, [*many, *few])
    assert path.exists()
    assert read_packed_too(path) == [*many, *few]

    append(path, many[0])
    assert read_packed_too(path) == [*many, *few, many[0]]


def test_lines_are_packed_where_they_are_many_and_one_form_is_left(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    for lines in (some_failures(3), some_failures(1500), some_failures(2)):
        write_lines(path, lines)
        assert read_packed_too(path) == lines
        assert len([*tmp_path.iterdir()]) == 1


def test_a_child_finds_no_other_setting_of_threads_than_its_own() -> None:
    present = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "7", "MKL_DYNAMIC": "0", "HOME": "/"}
    spinning = settings.environment_of(settings.TWO_SPINNING_LESS, present)
    assert spinning == {"HOME": "/", "GOMP_SPINCOUNT": "10000"}
    assert settings.environment_of(settings.TWO, present) == {"HOME": "/"}


def test_forward_of_the_core_layers_comes_first_and_then_backward_on_one_thread() -> None:
    layers = [a_layer("a/1"), a_layer("b/1", is_core=False)]
    forward, backward, on_two, others = tiers(layers, EVERYTHING)
    assert [stage.setting for stage in forward] == [
        "1-thread",
        "2-threads",
        "2-threads-spin",
        "2-threads-tf32",
    ]
    assert {case.op for stage in forward for case in stage.cases} == {ConvOp.FPROP}
    assert [stage.setting for stage in backward] == ["1-thread"]
    assert [stage.setting for stage in on_two] == ["2-threads", "2-threads-spin", "2-threads-tf32"]
    assert {case.layer for stage in others for case in stage.cases} == {"b/1"}
    assert [case.op for case in others[0].cases[:2]] == [ConvOp.FPROP] * 2


def test_backward_goes_layer_by_layer() -> None:
    ((stage,),) = tiers(
        [a_layer("a/1"), a_layer("b/1")],
        Selection(("*",), ("1-thread",), (Layout.CONTIGUOUS,), (ConvOp.DGRAD, ConvOp.WGRAD)),
    )
    assert [case.layer for case in stage.cases] == ["a/1", "a/1", "b/1", "b/1"]


def test_tiers_hold_every_case_once() -> None:
    cases = [case for tier in tiers(ALL, EVERYTHING) for stage in tier for case in stage.cases]
    expected = sum(len(layer.ops) * len(layer.layouts) for layer in ALL) * len(settings.OF_LAYERS)
    assert len(cases) == len(set(cases)) == expected


def test_only_what_is_selected_is_measured() -> None:
    selection = Selection(("a/*",), ("1-thread",), (Layout.CONTIGUOUS,), (ConvOp.WGRAD,))
    ((stage,),) = tiers([a_layer("a/1"), a_layer("b/1")], selection)
    assert stage.cases == (Case("1-thread", "a/1", Layout.CONTIGUOUS, ConvOp.WGRAD),)


def test_what_is_done_is_not_pending() -> None:
    case, other = (Case("1-thread", "a/1", layout, ConvOp.FPROP) for layout in Layout)
    assert pending([Stage("1-thread", (case, other))], {case}) == [Stage("1-thread", (other,))]
    assert pending([Stage("1-thread", (case,))], {case}) == []


def measured(case: Case) -> Measured:
    rounds = Rounds(1, {"cpu:aten@4*1": (5,) * 7})
    found = choice.contest([], Division((OWN,)), (4 * MIB,))
    choices = found.choose({"cpu:aten@4*1": [1.0] * 7}, {})
    problem = a_layer().problem(case.op, case.layout)
    return Measured(case, problem, "cpu:aten@4*1", 0, 0, (), {}, (), None, choices, rounds, rounds, 0.1)


SELECTED = Selection(("cifar-resnet18/layer*",), ("1-thread", "2-threads"), tuple(Layout), (ConvOp.FPROP,))


def test_a_run_measures_every_case_once_and_the_next_run_none(tmp_path: Path) -> None:
    seen: list[Case] = []

    def process(task: Task) -> None:
        for case in task.cases:
            seen.append(case)
            append(tmp_path / LINES, measured(case))

    Run(tmp_path, (4 * MIB,), 3600, process).measure(SELECTED)
    assert len(seen) == len(set(seen)) == 2 * 2 * 5
    Run(tmp_path, (4 * MIB,), 3600, process).measure(SELECTED)
    assert len(seen) == 20


def test_a_case_is_measured_again_under_a_limit_that_it_lacks(tmp_path: Path) -> None:
    case = Case("1-thread", "alexnet/conv2", Layout.CONTIGUOUS, ConvOp.FPROP)
    append(tmp_path / LINES, measured(case))
    selection = Selection(("alexnet/conv2",), ("1-thread",), (Layout.CONTIGUOUS,), (ConvOp.FPROP,))
    asked: list[tuple[int, ...]] = []

    def process(task: Task) -> None:
        asked.append(task.limits)
        append(tmp_path / LINES, Failed(task.cases[0], "no"))

    Run(tmp_path, (4 * MIB,), 3600, process).measure(selection)
    Run(tmp_path, (4 * MIB, 16 * MIB), 3600, process).measure(selection)
    assert asked == [(4 * MIB, 16 * MIB)]


def test_measuring_a_layer_again_leaves_the_others_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["--seconds", "0", "--output", "out"])
    (folder,) = (tmp_path / "build" / "bench-cpu").iterdir()
    conv, other = (
        Case("1-thread", name, Layout.CONTIGUOUS, ConvOp.FPROP) for name in ("vgg16/conv1_2", "unet/level1")
    )
    for line in (measured(conv), measured(other), Failed(conv, "it died")):
        append(folder / LINES, line)

    main(["--again", "--layers", "vgg16/*", "--seconds", "0", "--output", "out"])

    assert read(folder / LINES) == [measured(other)]
    (aside,) = folder.glob("layers-until-*.jsonl")
    assert len(read(aside)) == 3


def test_a_case_in_which_the_process_dies_has_failed_and_the_others_are_measured(tmp_path: Path) -> None:
    def process(task: Task) -> str | None:
        for case in task.cases:
            append(tmp_path / LINES, GemmRate(case.setting, 8, (1,)))
            if case.layer == "cifar-resnet18/layer2":
                return "its process ended with status -11."
            append(tmp_path / LINES, measured(case))
        return None

    Run(tmp_path, (4 * MIB,), 3600, process).measure(SELECTED)
    recording = Recording.of(read(tmp_path / LINES))
    assert {case.layer for case in recording.failed} == {"cifar-resnet18/layer2"}
    assert len(recording.failed) == 4
    assert len(recording.measured) == 16


def test_what_failed_is_tried_once_more_by_the_next_run(tmp_path: Path) -> None:
    case = Case("1-thread", "alexnet/conv2", Layout.CONTIGUOUS, ConvOp.FPROP)
    append(tmp_path / LINES, Failed(case, "no"))
    tried: list[Case] = []

    def process(task: Task) -> None:
        tried.extend(task.cases)
        append(tmp_path / LINES, Failed(task.cases[0], "again no"))

    selection = Selection(("alexnet/conv2",), ("1-thread",), (Layout.CONTIGUOUS,), (ConvOp.FPROP,))
    Run(tmp_path, (4 * MIB,), 3600, process).measure(selection)
    assert tried == [case]


def test_a_process_that_writes_nothing_ends_the_run(tmp_path: Path) -> None:
    def process(task: Task) -> str:
        return "its process ended with status 1."

    run = Run(tmp_path, (4 * MIB,), 3600, process)
    with pytest.raises(BackendError, match=r"^A process for 1-thread must start, but its process ended"):
        run.measure(SELECTED)


def test_stages_share_the_time_by_their_cases(tmp_path: Path) -> None:
    given: list[float] = []

    def process(task: Task) -> None:
        given.append(task.seconds)
        for case in task.cases:
            append(tmp_path / LINES, measured(case))

    Run(tmp_path, (4 * MIB,), 3600, process).measure(SELECTED)
    assert given == [pytest.approx(1800, rel=0.01), pytest.approx(3600, rel=0.01)]


def test_without_time_nothing_is_started(tmp_path: Path) -> None:
    def process(task: Task) -> str:
        raise AssertionError("no process was expected")

    Run(tmp_path, (4 * MIB,), 0, process).measure(SELECTED)
    assert read(tmp_path / LINES) == []


def test_results_stay_where_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    assert main(["--seconds", "0", "--output", "results"]) == 1
    assert not Path("results").exists()
    assert capsys.readouterr().err == (
        "bench.cpu: nothing is known of this code here, so results stays as it is\n"
    )


def test_a_task_survives_its_text() -> None:
    case = Case("1-thread", "alexnet/conv2", Layout.CHANNELS_LAST, ConvOp.DGRAD)
    task = Task("1-thread", (case,), (4, 16), "build", 1.5, 0.0, 3600.0)
    assert task_from(Task, task_text(task)) == task


@pytest.mark.parametrize("kind", ["c", "py"])
def test_results_are_told_apart_by_every_file_that_computes(kind: str) -> None:
    algorithms = Path(mucudnn.__file__).parent / "algorithms"

    content = ground._content(algorithms.parent, ground._CODE)

    files = sorted(algorithms.rglob(f"*.{kind}"))
    assert {file.parent.name for file in files} >= {"compiled", "depthwise", "matrix", "panels"}
    assert all(file.read_bytes() in content for file in files)


def test_a_folder_is_named_after_the_processor() -> None:
    here = ground.Ground.here()
    assert here.slug.startswith("cpu-")
    assert here.slug == here.slug.lower()
    assert "threads" not in here.environment.policy
    assert ground.Ground(here.environment, "other code").digest != here.digest


def test_what_selects_nothing_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--layers", "nosuch*"]) == 2
    assert capsys.readouterr().err.startswith("bench.cpu: there is nothing of that kind to measure")


def test_a_wrong_limit_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--limits", "4"]) == 2
    assert capsys.readouterr().err.startswith("bench.cpu: A size in a string must name its unit")


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("op", [ConvOp.FPROP, ConvOp.WGRAD])
def test_a_small_layer_is_measured_from_end_to_end(tmp_path: Path, op: ConvOp, layout: Layout) -> None:
    case = Case("1-thread", "small/conv", layout, op)
    with open_store(tmp_path / "profiles.sqlite3") as store:
        meter = CaseMeter(backend_of("cpu:"), store, (4 * MIB, 64 * MIB))
        line = meter.measure(case, a_layer().problem(op, layout))
    assert [each.limit_bytes for each in line.choices] == [4 * MIB, 64 * MIB]
    assert set(line.deciding.spans_ns) == {line.own, *(rival.key for rival in line.rivals)}
    assert len({len(spans) for spans in line.proving.spans_ns.values()}) == 1
    chosen = [line.rival(each.key) for each in line.choices]
    assert all(rival is None or rival.seen_bytes is not None for rival in chosen)
    assert 0 < line.errors["cpu:aten"] < 1e-5
    append(tmp_path / LINES, line)
    assert read(tmp_path / LINES) == [line]


def test_rounds_are_timed_by_the_clock_of_the_backend_in_spans_as_long_as_it_asks_for(tmp_path: Path) -> None:
    looks = itertools.count(0, 1000)
    case = Case("1-thread", "small/conv", Layout.CONTIGUOUS, ConvOp.FPROP)
    with open_store(tmp_path / "profiles.sqlite3") as store, pytest.MonkeyPatch.context() as patched:
        patched.setattr(CpuBackend, "least_span_ns", 1_000_000)
        patched.setattr(CpuBackend, "clock", staticmethod(lambda: next(looks)))
        patched.setattr(timing, "_MOST_CALLS", 4)  # a span of them is still too short
        meter = CaseMeter(backend_of("cpu:"), store, (4 * MIB,))
        line = meter.measure(case, a_layer().problem(case.op, case.layout))
    for rounds in (line.deciding, line.proving):
        assert rounds.calls == 4
        assert {span for spans in rounds.spans_ns.values() for span in spans} == {1000}


def test_lines_are_json_objects_with_their_kind(tmp_path: Path) -> None:
    case = Case("1-thread", "small/conv", Layout.CONTIGUOUS, ConvOp.FPROP)
    started = Started("1-thread", backend_of("cpu:").environment())
    for line in (Failed(case, "no"), GemmRate("1-thread", 2048, (1, 2)), started):
        append(tmp_path / LINES, line)
        assert json.loads(to_text(line))["kind"] == type(line).__name__
    assert read(tmp_path / LINES) == [Failed(case, "no"), GemmRate("1-thread", 2048, (1, 2)), started]
