"""Layers on a card on paper: what is asked of each, and what is left to the next process."""

import argparse
import dataclasses
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.cpu import measure
from bench.cpu.lines import (
    BENCHMARK,
    Failed,
    Measured,
    Recording,
    Started,
    append,
    read,
)
from bench.gpu import layer_child
from bench.gpu.ground import LOST
from bench.gpu.layer_cases import Layer, LayerCase, cases
from bench.gpu.layer_child import (
    Aims,
    CardLostError,
    LayerRun,
    find_by_benchmark,
    measured,
)
from bench.gpu.layer_kinds import ENDED, IN_PARTS, STOPPED, UNDIVIDED, UNTILED, with_status
from bench.gpu.layer_options import parser
from bench.record import TimeIsUpError, Watch
from bench.workloads import SETTINGS
from mucudnn import timing
from mucudnn.backends.base import Job
from mucudnn.backends.cudnn.compiler import KernelLaunch
from mucudnn.backends.cudnn.graph import UID_X
from mucudnn.backends.cudnn.library import load_library
from mucudnn.choices import Policy
from mucudnn.division import Division
from mucudnn.errors import BackendError, DeviceLostError, StoreError
from mucudnn.execution import weighing
from mucudnn.intervals import estimate
from mucudnn.problem import ConvOp, ConvProblem, Layout
from mucudnn.profile import Candidate, Comparison, Environment, Profile
from mucudnn.profiling.measurer import Limits
from mucudnn.profiling.profiler import Profiler
from mucudnn.profiling.replay import Replay
from mucudnn.store import MemoryStore, SqliteStore
from tests.paper_ground import SMALL, SPAN_NS, PaperGround
from tests.threads import threads

pytestmark = [pytest.mark.deviceless, pytest.mark.usefixtures("one_thread", "few_to_collect")]

MIB = 2**20
LIMITS = (MIB, 64 * MIB)
STRICT = [each for each in SETTINGS if each.name == "float32-nchw"]
BOTH = [each for each in SETTINGS if each.name in ("float32-nchw", "tf32-nchw")]
TINY = dataclasses.replace(SMALL, batch=4)


def a_layer(name: str = "small/a", batch: int = 4) -> Layer:
    layer = dataclasses.replace(TINY, batch=batch)
    ops = {op: layer.problem(op, "float32", Layout.CONTIGUOUS) for op in (ConvOp.FPROP, ConvOp.WGRAD)}
    return Layer(name, ops)


def some_cases() -> list[LayerCase]:
    return list(cases([a_layer()], STRICT))


def computing(ground: PaperGround, patch: pytest.MonkeyPatch) -> PaperGround:
    """Have all that asks for a card's backend find that of the card on paper."""
    for module in (layer_child, weighing):
        patch.setattr(module, "backend_of", lambda *_: ground.backend)
    return ground


@pytest.fixture
def ground(monkeypatch: pytest.MonkeyPatch) -> PaperGround:
    return computing(PaperGround(load_library()), monkeypatch)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return tmp_path / "layers.jsonl"


def a_run(
    ground: PaperGround, lines: Path, limits: tuple[int, ...] = LIMITS, end_s: float = math.inf
) -> LayerRun:
    aims = Aims(limits, Policy.POWER_OF_TWO, 60.0)
    return LayerRun(ground, lines, MemoryStore(), aims, Watch(end_s), {"date": "today"})


@pytest.fixture(scope="module")
def found() -> list[Measured]:
    """Both ops of a tiny layer, once."""
    with pytest.MonkeyPatch.context() as patch:
        seen: list[Measured | Failed | Started] = []
        patch.setattr(layer_child, "append", lambda _, line: seen.append(line))
        ground = computing(PaperGround(load_library()), patch)
        with threads(1):
            a_run(ground, Path("nowhere")).measure(some_cases())
    return [line for line in seen if isinstance(line, Measured)]


class Meter:
    """Measures nothing; some cases end otherwise."""

    ends: Mapping[str, Callable[[], None]] = {}
    asked: list[str]

    def __init__(self, line: Measured) -> None:
        self.line = line
        self.asked = []

    def measure(self, case: object, problem: object) -> Measured:
        self.asked.append(str(case))
        self.ends.get(str(case), lambda: None)()
        return dataclasses.replace(self.line, case=case, problem=problem)


@pytest.fixture
def meter(found: list[Measured], monkeypatch: pytest.MonkeyPatch) -> Meter:
    made = Meter(found[0])
    monkeypatch.setattr(layer_child, "CaseMeter", lambda *_: made)
    return made


def test_every_case_has_the_best_of_each_family_under_every_limit(found: list[Measured]) -> None:
    assert [line.case.op for line in found] == [ConvOp.FPROP, ConvOp.WGRAD]
    for line in found:
        assert [choice.limit_bytes for choice in line.choices] == list(LIMITS)
        for choice in line.choices:
            assert {*(choice.best or {})} == {UNDIVIDED, IN_PARTS, UNTILED}
            assert choice.of_family(UNDIVIDED).endswith("@4*1")
            parts = choice.of_family(IN_PARTS)
            assert all(part.startswith("cudnn:aten@") for part in parts.split("+"))
            assert parts != line.own
            assert "cuda:" not in choice.of_family(UNTILED)


def test_all_that_is_chosen_is_proved_and_weighed(found: list[Measured]) -> None:
    for line in found:
        chosen = {key for each in line.choices for key in (each.key, each.strict_key, *each.best.values())}
        assert chosen | {line.own} == {*line.proving.spans_ns}
        assert all(line.rival(key) is None or line.rival(key).seen_bytes is not None for key in chosen)


def test_benchmark_has_rounds_with_what_was_chosen_but_own(found: list[Measured]) -> None:
    for line in found:
        strict = {each.strict_key for each in line.choices} - {line.own, None}
        assert {*line.benchmark.spans_ns} == {BENCHMARK, *strict}


class Paces:
    """A clock that stands still but for what runs: cuDNN's engines are slow with more than two samples."""

    def __init__(self) -> None:
        self.now_ns = 0

    def clock(self) -> int:
        self.now_ns += 10_000
        return self.now_ns

    def of_engines(self, compute: Callable[..., None]) -> Callable[..., None]:
        """Let time pass while an engine computes."""

        def computed(op: ConvOp, beta: float, what: ConvProblem, tensors: Mapping[int, torch.Tensor]) -> None:
            self.now_ns += 50_000 if tensors[UID_X].shape[0] <= 2 else 1_000_000
            compute(op, beta, what, tensors)

        return computed

    def of_own(self, own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Let more time pass while PyTorch's own computes."""

        def computed(*arguments: object) -> torch.Tensor:
            self.now_ns += 2_000_000
            return own(*arguments)

        return computed

    def of_tiles(self, compiled: Callable[..., KernelLaunch]) -> Callable[..., KernelLaunch]:
        """Let little time pass while a kernel runs."""

        def made(source: str, kernel: str) -> KernelLaunch:
            launch = compiled(source, kernel)

            def launched(*arguments: Any) -> None:
                self.now_ns += 15_000
                launch(*arguments)

            return launched

        return made


@pytest.fixture
def paced(ground: PaperGround, monkeypatch: pytest.MonkeyPatch) -> PaperGround:
    paces = Paces()
    monkeypatch.setattr(timing, "_MOST_CALLS", 2**8)  # by this clock set-ups take no time, and fill no span
    monkeypatch.setattr(ground.card, "clock", paces.clock)
    monkeypatch.setattr(ground.paper, "_compute", paces.of_engines(ground.paper._compute))
    monkeypatch.setattr(ground.card, "compiled", paces.of_tiles(ground.card.compiled))
    own = paces.of_own(ground.backend.own_convolution)
    monkeypatch.setattr(ground.backend, "own_convolution", own, raising=False)
    return ground


def test_a_quick_division_is_chosen_and_timed_beside_benchmark(
    paced: PaperGround, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paced.card, "can_compile", False)  # no tiles

    a_run(paced, lines).measure(some_cases()[:1])

    line = read(lines)[-1]
    for choice in line.choices:
        assert choice.strict_key.startswith("cudnn:eng")
        assert choice.strict_key.endswith("@2*2")
        assert choice.of_family(UNTILED) == choice.strict_key
        assert choice.of_family(UNDIVIDED).endswith("@4*1")
        assert choice.strict_key in line.benchmark.spans_ns
        assert line.speedup(choice.strict_key).low > 10


def test_a_quick_algorithm_with_tiles_is_chosen_beside_the_best_without(
    paced: PaperGround, lines: Path
) -> None:
    a_run(paced, lines).measure(some_cases()[:1])

    line = read(lines)[-1]
    for choice in line.choices:
        assert choice.strict_key.startswith("cuda:")
        assert choice.of_family(UNTILED).startswith("cudnn:eng")
        assert choice.of_family(UNTILED).endswith("@2*2")
        assert choice.strict_key in line.benchmark.spans_ns
        assert choice.of_family(UNTILED) in line.proving.spans_ns


def test_rounds_are_fewer_where_calls_are_seen_to_be_slow(
    ground: PaperGround, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = itertools.count(0, 10**9)  # a second a call
    monkeypatch.setattr(ground.card, "clock", lambda: next(looks))

    a_run(ground, lines).measure(some_cases()[:1])

    proving = read(lines)[-1].proving
    assert {len(spans) for spans in proving.spans_ns.values()} == {measure.LEAST_ROUNDS}


def test_times_are_of_the_clock_of_the_card(found: list[Measured]) -> None:
    for line in found:
        for rounds in (line.deciding, line.proving, line.benchmark):
            assert {span for spans in rounds.spans_ns.values() for span in spans} == {SPAN_NS}
        assert line.conditions == {"SM clock": "0 MHz"}


def test_lines_are_read_as_they_were_written(found: list[Measured], lines: Path) -> None:
    for line in found:
        append(lines, line)
    assert read(lines) == found


def test_pytorchs_own_is_weighed_on_the_device_of_the_backend(
    ground: PaperGround, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[torch.device] = []
    really = measure.own_job

    def own_job(problem: object, device: torch.device) -> Job:
        devices.append(device)
        return really(problem, device)

    monkeypatch.setattr(measure, "own_job", own_job)
    monkeypatch.setattr(type(ground.backend), "workspace_bytes", lambda *_: None)  # nothing fits

    a_run(ground, lines).measure(some_cases()[:1])

    assert devices == [ground.card.device]
    assert read(lines)[-1].choices[0].strict_key in (None, "cudnn:aten@4*1")


def test_pytorchs_own_is_run_without_a_limit_before_it_is_run_under_one(
    ground: PaperGround, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weigh = ground.card.weigh
    limits: list[int] = []

    def weighed(job: Job, limit_bytes: int) -> int | None:
        if job.function.startswith("mucudnn.backends.own:"):
            limits.append(limit_bytes)
        return weigh(job, limit_bytes)

    monkeypatch.setattr(ground.card, "weigh", weighed)

    a_run(ground, lines).measure(some_cases()[:1])

    assert limits[0] > max(LIMITS)
    assert max(LIMITS) in limits


@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_an_error_that_is_no_number_is_told_in_words(
    ground: PaperGround, lines: Path, monkeypatch: pytest.MonkeyPatch, error: float
) -> None:
    really = Profiler.profile

    def profile(profiler: Profiler, problem: ConvProblem) -> Profile:
        found = really(profiler, problem)
        return dataclasses.replace(found, errors={**found.errors, ("cudnn:aten", 4): error})

    monkeypatch.setattr(Profiler, "profile", profile)

    a_run(ground, lines).measure(some_cases()[:1])

    line = read(lines)[-1]
    assert f"cudnn:aten@4: its error is {error}." in line.refused
    assert all(math.isfinite(each) for each in line.errors.values())


def test_a_tenth_of_what_pytorchs_own_hides_is_one_more_limit_which_it_does_not_fit(
    ground: PaperGround, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weigh = ground.card.weigh

    def weighed(job: Job, limit_bytes: int) -> int | None:
        return 50 * MIB if job.function.startswith("mucudnn.backends.own:") else weigh(job, limit_bytes)

    monkeypatch.setattr(ground.card, "weigh", weighed)

    a_run(ground, lines).measure(some_cases()[:1])

    line = read(lines)[-1]
    assert [each.limit_bytes for each in line.choices] == [MIB, 5 * MIB, 64 * MIB]
    assert line.own_bytes == 50 * MIB
    assert line.choices[1].of_family(UNDIVIDED) not in (None, line.own)
    assert line.choices[1].of_family(IN_PARTS) is None  # parts hide as much


def test_the_flag_is_on_in_the_first_call_only_of_a_thread_of_its_own(
    ground: PaperGround, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, bool]] = []

    def note() -> None:
        seen.append((threading.get_ident(), torch.backends.cudnn.benchmark))

    execute = ground.paper._execute
    own = ground.backend.own_convolution

    def own_convolution(problem: object, *operands: object) -> torch.Tensor:
        note()
        return own(problem, *operands)

    def executed(*arguments: int) -> int:
        assert not torch.backends.cudnn.benchmark
        return execute(*arguments)

    monkeypatch.setattr(ground.paper, "_execute", executed)
    monkeypatch.setattr(ground.backend, "own_convolution", own_convolution, raising=False)

    a_run(ground, lines).measure(some_cases()[:1])

    assert isinstance(read(lines)[-1], Measured)
    here = [flag for thread, flag in seen if thread == threading.get_ident()]
    first, *others = [flag for thread, flag in seen if thread != threading.get_ident()]
    assert first
    assert len(others) > 7
    assert not any((*here, *others))
    assert not torch.backends.cudnn.benchmark


def test_the_flag_is_as_it_was_after_a_call_that_fails() -> None:
    def call() -> None:
        raise RuntimeError("no engine")

    with pytest.raises(RuntimeError, match="no engine"):
        find_by_benchmark(call)
    assert not torch.backends.cudnn.benchmark


def test_every_setting_begins_with_what_it_is_measured_with(
    ground: PaperGround, lines: Path, meter: Meter
) -> None:
    a_run(ground, lines).measure(cases([a_layer()], BOTH))

    kinds = [type(line).__name__ for line in read(lines)]
    assert kinds == ["Started", *["Failed", "Measured"] * 2] * 2
    first, second = (line for line in read(lines) if isinstance(line, Started))
    assert (first.setting, second.setting) == ("float32-nchw", "tf32-nchw")
    assert first.run == {"date": "today", "cases": "2"}


def test_what_is_known_is_not_measured_again_unless_other_limits_are_asked_for(
    ground: PaperGround, lines: Path, meter: Meter
) -> None:
    for limits in (LIMITS, LIMITS, LIMITS[:1], (*LIMITS, 2 * MIB)):
        a_run(ground, lines, limits).measure(some_cases())

    assert len(meter.asked) == 4


def test_a_case_that_fails_is_told_and_the_next_one_is_measured(
    ground: PaperGround, lines: Path, meter: Meter, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = some_cases()

    def fail() -> None:
        raise RuntimeError("out of memory")

    meter.ends = {str(first.case): fail}

    a_run(ground, lines).measure([first, second])
    a_run(ground, lines).measure([first, second])

    recording = Recording.of(read(lines))
    assert {case: line.reason for case, line in recording.failed.items()} == {
        first.case: "RuntimeError: out of memory"
    }
    assert list(recording.measured) == [second.case]
    assert meter.asked == [str(first.case), str(second.case)]
    assert "failed: RuntimeError: out of memory" in capsys.readouterr().out


def test_a_case_in_which_two_processes_ended_is_left_out_and_the_next_one_is_measured(
    ground: PaperGround, lines: Path, meter: Meter
) -> None:
    first, second = some_cases()

    def end() -> None:
        raise SystemExit  # as good as a crash: nobody writes a line

    meter.ends = {str(first.case): end}
    for _ in range(2):
        with pytest.raises(SystemExit):
            a_run(ground, lines).measure([first, second])
        assert read(lines)[-1] == Failed(first.case, ENDED)
        append(lines, Failed(first.case, with_status(-6)))  # as who started the process tells

    a_run(ground, lines).measure([first, second])

    assert meter.asked == [str(first.case), str(first.case), str(second.case)]


def test_interrupts_are_no_ends_of_a_process(ground: PaperGround, lines: Path, meter: Meter) -> None:
    first, *_ = some_cases()
    for _ in range(3):
        append(lines, Failed(first.case, ENDED))
        append(lines, Failed(first.case, STOPPED))
    append(lines, Failed(first.case, ENDED))

    a_run(ground, lines).measure([first])

    assert list(Recording.of(read(lines)).measured) == [first.case]


def test_a_case_has_begun_when_the_last_one_is_cleared_away(
    ground: PaperGround, lines: Path, meter: Meter, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_ = some_cases()

    def end() -> None:
        raise SystemExit

    monkeypatch.setattr(ground.allocator, "settle", end)
    with pytest.raises(SystemExit):
        a_run(ground, lines).measure([first])
    assert not any(isinstance(line, Failed) for line in read(lines))


def test_a_case_that_was_interrupted_is_measured_by_the_next_run(
    ground: PaperGround, lines: Path, meter: Meter
) -> None:
    first, *_ = some_cases()

    def interrupt() -> None:
        raise KeyboardInterrupt

    meter.ends = {str(first.case): interrupt}
    with pytest.raises(KeyboardInterrupt):
        a_run(ground, lines).measure([first])
    assert read(lines)[-1] == Failed(first.case, STOPPED)
    meter.ends = {}

    a_run(ground, lines).measure([first])

    assert list(Recording.of(read(lines)).measured) == [first.case]


def test_a_broken_card_ends_the_process_and_the_case(ground: PaperGround, lines: Path, meter: Meter) -> None:
    first, second = some_cases()

    def fail() -> None:
        def clock() -> int:
            raise RuntimeError("an illegal memory access was encountered")

        ground.card.clock = clock
        raise RuntimeError("an illegal memory access was encountered")

    meter.ends = {str(first.case): fail}

    with pytest.raises(CardLostError, match="works no more"):
        a_run(ground, lines).measure([first, second])
    a_run(PaperGround(load_library()), lines).measure([first, second])

    assert meter.asked == [str(first.case), str(second.case)]


def test_a_case_with_an_algorithm_that_breaks_the_card_is_tried_without_it_three_times(
    ground: PaperGround, lines: Path, meter: Meter
) -> None:
    first, *_ = some_cases()

    def fail() -> None:
        raise DeviceLostError("cudnn:eng1", 4, "an illegal memory access was encountered")

    meter.ends = {str(first.case): fail}
    for _ in range(3):
        with pytest.raises(CardLostError):
            a_run(ground, lines).measure([first])
    a_run(ground, lines).measure([first])

    assert len(meter.asked) == 3


def test_when_the_time_is_up_no_case_is_begun(ground: PaperGround, lines: Path, meter: Meter) -> None:
    with pytest.raises(TimeIsUpError):
        a_run(ground, lines, end_s=time.monotonic() - 1).measure(some_cases())
    assert not any(isinstance(line, Failed | Measured) for line in read(lines))


def test_lines_of_another_environment_are_not_gone_on_with(
    ground: PaperGround, lines: Path, meter: Meter
) -> None:
    present = ground.backend.environment()
    append(lines, Started("float32-nchw", dataclasses.replace(present, software={"cuDNN": "8"})))

    with pytest.raises(BackendError, match=r"cuDNN.*another --output"):
        a_run(ground, lines).measure(some_cases())


def options(folder: Path, *given: str) -> argparse.Namespace:
    made = parser().parse_args(
        ["--output", str(folder / "results"), "--recording", str(folder / "store"), *given]
    )
    assert isinstance(made, argparse.Namespace)
    return made


def test_a_process_writes_its_lines_and_its_store(ground: PaperGround, tmp_path: Path, meter: Meter) -> None:
    asked = options(tmp_path, "--limit", "64MiB", "1MiB", "--policy", "undivided")

    assert measured(ground, some_cases(), asked, "--limit 64MiB 1MiB") == 0
    assert measured(ground, some_cases(), options(tmp_path, "--seconds", "-1"), "") == 0

    (started, *_) = read(tmp_path / "results/layers-undivided.jsonl")
    assert started.run["policy"] == "undivided"
    assert started.run["command"] == "python -m bench.gpu.layer_run --limit 64MiB 1MiB"
    assert (tmp_path / "store").is_dir()
    assert len(meter.asked) == 2


def a_division(key: str) -> Division:
    """A division with that key, of which a replay asks for no more."""
    runs = [part.rpartition("@") for part in key.split("+")]
    sizes = [(algorithm, *map(int, numbers.split("*"))) for algorithm, _, numbers in runs]
    parts = [[Candidate(algorithm, batch, 1.0, 0)] * count for algorithm, batch, count in sizes]
    return Division(tuple(itertools.chain(*parts)))


def slow_to_prove(line: Measured) -> Measured:
    """The same, but for times of the proving rounds, which are all other ones."""
    spans = {
        key: tuple(span * factor for span in each)
        for factor, (key, each) in enumerate(line.proving.spans_ns.items(), start=2)
    }
    return dataclasses.replace(line, proving=dataclasses.replace(line.proving, spans_ns=spans))


def test_rounds_are_kept_for_a_replay_which_takes_those_that_prove(
    ground: PaperGround, lines: Path, meter: Meter, found: list[Measured], tmp_path: Path
) -> None:
    aims, environment = Aims(LIMITS, Policy.POWER_OF_TWO, 60.0), ground.backend.environment()
    meter.line = slow_to_prove(found[0])
    proving = meter.line.proving
    asked = [a_division(key) for key in proving.spans_ns]
    assert {each.key for each in asked} < found[0].deciding.spans_ns.keys()

    with SqliteStore(tmp_path / "store") as store:
        LayerRun(ground, lines, store, aims, Watch(math.inf), {}).measure(some_cases())
        replay = Replay(store, environment)
        for case in some_cases():
            outcome, refusals = replay.compare(case.problem, asked, Limits(max(LIMITS)))
            assert not refusals
            assert not outcome.is_predicted
            assert outcome.estimates == {key: estimate(proving.samples_s(key)) for key in proving.spans_ns}
            assert outcome.workspaces == {key: found[0].bytes_of(key) for key in proving.spans_ns}


class FullStore(MemoryStore):
    """Keeps no rounds; the lines are asked whether that of the case was there when it should have."""

    def __init__(self, lines: Path) -> None:
        super().__init__()
        self._lines = lines
        self.were_there: list[bool] = []

    def add_comparisons(self, environment: Environment, comparisons: Iterable[Comparison]) -> None:
        last = read(self._lines)[-1]
        self.were_there.append(
            isinstance(last, Measured) and {each.problem for each in comparisons} == {last.problem}
        )
        raise StoreError("The disk is full.")


def test_what_was_measured_is_in_the_lines_even_where_its_rounds_cannot_be_kept(
    ground: PaperGround, lines: Path, meter: Meter, capsys: pytest.CaptureFixture[str]
) -> None:
    store = FullStore(lines)

    run = LayerRun(ground, lines, store, Aims(LIMITS, Policy.POWER_OF_TWO, 60.0), Watch(math.inf), {})
    run.measure(some_cases())

    assert store.were_there == [True, True]
    recording = Recording.of(read(lines))
    assert [*recording.measured] == [each.case for each in some_cases()]
    assert not recording.failed
    told = capsys.readouterr().err
    assert told.count("rounds are not in the store: The disk is full.") == 2
    assert "`python -m bench.gpu.layer_records FOLDER STORE` adds those" in told


def test_a_process_whose_card_is_broken_says_so_by_its_status(
    ground: PaperGround, tmp_path: Path, meter: Meter, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise DeviceLostError("cudnn:eng1", 4, "gone")

    meter.ends = {str(some_cases()[0].case): fail}
    assert measured(ground, some_cases(), options(tmp_path), "") == LOST
    assert "works no more" in capsys.readouterr().err


def test_names_that_are_none_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layer_child.layer_cases, "layers", lambda: iter([a_layer()]))
    assert layer_child.main(["--layers", "lenet/*"]) == 2
    assert "no layer or no setting has such a name" in capsys.readouterr().err
