"""Training steps on a card on paper: what is compared with what, and what is kept of it."""

import dataclasses
import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bench.gpu import step_trial, steps
from bench.gpu.step_lines import LINES, TABLES, read
from bench.gpu.step_rows import (
    APART,
    BENCHMARK,
    DIVIDED,
    EQUAL,
    PYTORCH,
    UNDIVIDED,
    PairRow,
    StepRow,
    paid_back,
    summary,
    told,
)
from bench.gpu.step_trial import Trial
from bench.gpu.step_ways import Room, Step, Way, rooms_seen, segment_bytes, step_of
from bench.gpu.steps import run
from bench.gpu.values import Timing, jsonable
from bench.record import STORE, TimeIsUpError, Watch, keep_cost
from bench.workloads import SETTINGS, Workload
from mucudnn.backends import backend_of
from mucudnn.backends.cudnn.library import load_library
from mucudnn.division import undivided
from mucudnn.errors import BackendError
from mucudnn.execution.runner import Runner
from mucudnn.execution.workspace import Workspace
from mucudnn.intervals import Estimate, Verdict
from mucudnn.profile import Measurement
from mucudnn.sizes import format_bytes
from mucudnn.timing import SamplingRule
from tests.operands import a_convolution, operands_of
from tests.paper_ground import PaperGround
from tests.threads import threads

pytestmark = [pytest.mark.deviceless, pytest.mark.usefixtures("one_thread", "few_to_collect")]

STRICT = next(each for each in SETTINGS if each.name == "float32-nchw")
CPU = torch.device("cpu")
ENDLESS = Watch(math.inf)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(),
        nn.Dropout(0.5), nn.Linear(4 * 36, 5),
    )  # fmt: skip


SMALL = Workload("small", network, (4, 3, 8, 8))
DENSE = Workload("dense", lambda: nn.Conv3d(2, 3, 3, padding=1), (2, 2, 4, 4, 4))


class Memory:
    """An allocator that holds 1000 bytes, and 300 more at the peak of a step."""

    def settle(self) -> None:
        pass

    def allocated_bytes(self) -> int:
        return 1000

    def peak_bytes(self) -> int:
        return 1300


def a_ground() -> PaperGround:
    made = PaperGround(load_library())
    made.allocator = Memory()
    used = iter(range(0, 10**6, 40))
    made.used_bytes = lambda: next(used)
    made.captured = captured
    return made


def captured(call: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """As on a card nothing is computed until the first replay."""
    loss = torch.zeros(())

    def replay() -> None:
        loss.copy_(call())

    return replay, loss


@pytest.fixture(scope="module", autouse=True)
def few_rounds() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        few = SamplingRule(looks=(6,), precision=1.0, min_span_ns=0, warmups=1)
        patched.setattr(step_trial, "ROUNDS", few)
        yield


@pytest.fixture
def ground() -> PaperGround:
    return a_ground()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a recording and of results, in which all is tuned once."""
    return tmp_path_factory.mktemp("steps")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[StepRow | PairRow]:
    """All that is found of one network, which takes some seconds."""
    with torch.random.fork_rng(), threads(1):
        rows, is_well = run(a_ground(), [SMALL], [STRICT], ["1MiB"], (folder, folder), ENDLESS)
    assert is_well
    return rows


@pytest.fixture
def ways(found: list[StepRow | PairRow]) -> list[StepRow]:
    return [row for row in found if isinstance(row, StepRow)]


def a_trial(ground: PaperGround, folder: Path, watch: Watch = ENDLESS) -> Trial:
    return Trial(ground, SMALL, STRICT, "1MiB", folder, watch)


def test_all_ways_run_in_the_same_rounds_and_again_in_graphs(ways: list[StepRow]) -> None:
    assert [row.way for row in ways] == [
        PYTORCH, EQUAL, APART, BENCHMARK, UNDIVIDED, DIVIDED,
        f"{PYTORCH}, in a graph", f"{DIVIDED}, in a graph",
    ]  # fmt: skip
    assert all(row.failure is None and row.time is not None for row in ways)
    assert {row.network for row in ways} == {"small 4x3x8x8"}
    assert ways[0].conditions == {"SM clock": "0 MHz"}


def test_divided_is_compared_with_undivided_too(found: list[StepRow | PairRow]) -> None:
    pairs = [row for row in found if isinstance(row, PairRow)]

    assert [(row.base, row.way) for row in pairs] == [
        (PYTORCH, EQUAL), (PYTORCH, APART), (PYTORCH, BENCHMARK), (PYTORCH, UNDIVIDED), (PYTORCH, DIVIDED),
        (UNDIVIDED, DIVIDED),
        (f"{PYTORCH}, in a graph", f"{DIVIDED}, in a graph"),
    ]  # fmt: skip
    assert {(row.ratio, row.verdict) for row in pairs} == {(1.0, Verdict.SAME)}  # by the clock on paper


def test_all_ways_have_the_losses_of_their_twins(ways: list[StepRow]) -> None:
    assert len(set(ways[0].losses)) == 6  # it learns
    assert ways[0].difference == 0
    assert all(row.difference < 1e-4 for row in ways)
    assert all(len(row.losses) == 6 for row in ways)


def test_all_ways_have_the_weights_of_their_twins(ways: list[StepRow]) -> None:
    assert ways[0].weights == 0
    assert all(row.weights < 1e-4 for row in ways[:6])
    assert len({row.spread for row in ways[:6]}) == 1
    assert 0 < ways[0].spread < 1e-4  # what a rounding of the first weights comes to


def test_every_op_of_a_patched_model_is_weighed_with_its_buffer_and_without_its_result(
    ground: PaperGround,
) -> None:
    problem = a_convolution(batch=4)
    runner = Runner(backend_of("cpu:"), problem, undivided("cpu:im2col", 4))
    workspace, operands = Workspace(CPU), operands_of(problem)
    result = runner(workspace, *operands)

    with rooms_seen(ground) as taken:
        again = runner(workspace, *operands)
    runner(workspace, *operands)

    assert torch.equal(again, result)
    assert workspace.held_bytes > 0
    allocated = workspace.held_bytes - result.nbytes + 300
    assert taken == [Room(allocated, allocated)]  # what the card has more is less than the result's segment


def test_by_nvml_an_op_takes_what_is_in_use_afterwards_but_for_a_segment_for_its_result(
    ground: PaperGround, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = iter([5 * 2**30, 5 * 2**30 + 100 * 2**20])
    monkeypatch.setattr(ground, "used_bytes", lambda: next(used))
    runner = Runner(backend_of("cpu:"), a_convolution(batch=4), undivided("cpu:im2col", 4))
    workspace = Workspace(CPU)

    with rooms_seen(ground) as taken:
        runner(workspace, *operands_of(runner.problem))

    assert [each.used for each in taken] == [98 * 2**20]  # and nothing was held before


@pytest.mark.parametrize(
    ("n_bytes", "expected"),
    [(0, 2), (2**20, 2), (2**20 + 1, 20), (10 * 2**20 - 512, 20), (10 * 2**20 - 1, 10), (11 * 2**20, 12)],
)
def test_segments_are_those_of_pytorchs_allocator(n_bytes: int, expected: int) -> None:
    assert segment_bytes(n_bytes) == expected * 2**20


def test_a_way_that_fails_takes_too_much_or_learns_something_else_is_not_well(
    ground: PaperGround, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = StepRow("small", "float32-nchw", 2**20, DIVIDED, room_bytes=2**20)
    others = (
        (dataclasses.replace(row, room_bytes=2**20 + 2**16), False),
        (dataclasses.replace(row, weights=3.5e-7, spread=1e-7), False),
        (dataclasses.replace(row, weights=2.5e-7, spread=1e-7), True),
        (dataclasses.replace(row, failure="It failed."), False),
    )
    for seen, expected in ((row, True), *others):
        monkeypatch.setattr(steps, "_rows_of", lambda *_, seen=seen: iter([seen]))

        _, is_well = run(ground, [SMALL], [STRICT], ["1MiB"], (tmp_path, tmp_path), ENDLESS)

        assert is_well is expected


def test_memory_is_what_a_step_takes_beside_what_was_there(ways: list[StepRow]) -> None:
    assert {(row.peak_bytes, row.used_bytes) for row in ways[:6]} == {(300, 40)}


def test_tuning_counts_with_what_it_had_cost_before(
    ways: list[StepRow], ground: PaperGround, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [row.way for row in ways if row.tuning_s is not None] == [UNDIVIDED, DIVIDED]
    assert {row.break_even for row in ways if row.tuning_s is not None} == {None}  # nothing is saved
    assert [row.divided is None for row in ways] == [True, True, True, True, False, False, True, True]
    keep_cost(tmp_path, SMALL, STRICT, "8MiB-reuse", 1000.0, 7)

    rows = [*a_trial(ground, tmp_path).rows()]
    more = [*a_trial(ground, tmp_path).rows()]

    first, second, third, fourth = (
        row.tuning_s for row in (*rows, *more) if getattr(row, "tuning_s", None) is not None
    )
    assert 1000 < first < second <= third <= fourth < 1100  # what is known takes almost nothing


def test_tuning_is_paid_back_only_by_steps_that_are_faster() -> None:
    before = [1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0]

    paid = paid_back(100.0, before, [each - 0.5 for each in before])

    assert paid is not None
    assert (paid.median, paid.low, paid.high) == pytest.approx((200.0,) * 3)
    for now in (0.99, 1.0, 1.5):  # of the step before: within 2 %, the same, slower
        assert paid_back(100.0, before, [now * each for each in before]) is None


def test_steps_that_pay_tuning_back_are_told_with_their_interval_or_not_seen() -> None:
    timing = Timing.of(Measurement((1_000_000,) * 7, 1, converged=True))
    row = StepRow("net", "float32-nchw", 0, DIVIDED, timing, tuning_s=70.0)

    told_paid = told(dataclasses.replace(row, break_even=Estimate(200.0, 190.0, 210.0, 7)))

    assert "70 s  200 [190, 210] steps" in told_paid
    assert "70 s  not seen" in told(row)


def test_rows_tell_for_which_of_several_limits_they_are(
    ground: PaperGround, folder: Path, tmp_path: Path
) -> None:
    shutil.copy(folder / STORE, tmp_path / STORE)

    rows, _ = run(ground, [SMALL], [STRICT], ["512KiB", "1MiB"], (tmp_path, tmp_path), ENDLESS)

    for kind in (StepRow, PairRow):
        limits = [row.limit_bytes for row in rows if isinstance(row, kind)]
        assert limits == sorted(limits)
        assert {*limits} == {2**19, 2**20}
    assert "small 4x3x8x8  float32-nchw  512 KiB" in told(rows[0])
    assert summary(rows).count("small 4x3x8x8, float32-nchw, 512 KiB") == 2


def test_rows_are_kept_one_by_one_under_their_conditions(
    found: list[StepRow | PairRow], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header, *kept = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]

    assert header["environment"]["backend"] == "cudnn"
    assert {"date", "version", "commit", "command"} <= header.keys()
    assert header["command"].startswith("python -m bench.gpu.steps")  # and no folder of a machine
    assert [row["way"] for row in kept] == [row.way for row in found]
    assert len(kept[0]["time"]["spans_ns"]) == 6


def test_lines_are_told_anew_as_they_were_and_the_last_of_equal_trials_counts(
    found: list[StepRow | PairRow], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (folder / LINES).read_text()
    older = lines.replace('"losses": [', '"losses": [7.0, ')
    assert older != lines
    (tmp_path / LINES).write_text(older + lines)

    assert read(tmp_path / LINES) == found
    assert steps.main(["--retell", str(tmp_path)]) == 0
    assert (tmp_path / TABLES).read_text() == summary(found) + "\n"

    assert steps.main(["--retell", str(tmp_path / "none")]) == 2
    assert "No such file or directory." in capsys.readouterr().err


def test_a_line_in_the_middle_of_which_a_process_died_costs_its_trial_alone(
    found: list[StepRow | PairRow], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (folder / LINES).read_text()
    header, first, *_ = lines.splitlines(keepends=True)
    (tmp_path / LINES).write_text(header + first + first[:40] + lines + "7\n")

    assert read(tmp_path / LINES) == found

    (tmp_path / LINES).write_text('{"way": "divided", "colour": "red"}\n')
    assert steps.main(["--retell", str(tmp_path)]) == 2
    assert "A line must be a row of training steps" in capsys.readouterr().err


def test_lines_of_steps_that_are_faster_say_when_tuning_is_paid_back(tmp_path: Path) -> None:
    def line(way: str, ms: int, **more: object) -> str:
        timing = Timing.of(Measurement((ms * 1_000_000,) * 7, 1, converged=True))
        row = StepRow("net", "float32-nchw", 2**20, way, timing, **more)
        return json.dumps(jsonable(row)) + "\n"

    undivided, divided = line(UNDIVIDED, 30, tuning_s=5.0), line(DIVIDED, 20, tuning_s=5.0)
    (tmp_path / LINES).write_text(line(PYTORCH, 30) + undivided + divided)

    _, same, faster = read(tmp_path / LINES)

    assert same.break_even is None
    assert faster.break_even.median == pytest.approx(500.0)


def test_the_summary_tells_ways_and_pairs(found: list[StepRow | PairRow]) -> None:
    text = summary(found)

    assert f"small 4x3x8x8, float32-nchw, {format_bytes(2**20)}" in text
    assert text.count("SAME") == 7
    assert text.count("in a graph") == 4


def test_each_row_is_told_in_a_line_of_its_own(found: list[StepRow | PairRow]) -> None:
    for row in found:
        line = told(row)
        assert line.startswith(f"small 4x3x8x8  float32-nchw  1 MiB  {row.way}  ")
        assert "\n" not in line
        assert ("  1.000 [" in line) == isinstance(row, PairRow)


def test_a_pair_is_told_as_how_many_times_as_fast_a_way_is() -> None:
    pair = PairRow("small", "float32-nchw", 2**20, PYTORCH, DIVIDED, 0.5, 0.4, 0.8, Verdict.FASTER)

    assert "  2.000 [1.250, 2.500]  FASTER" in told(pair)
    assert "times as fast" in summary([pair])


def test_every_voxel_has_a_class_where_every_voxel_is_scored() -> None:
    assert math.isfinite(float(step_of(DENSE, STRICT, CPU).train()))


def test_equal_arguments_give_equal_steps_without_dropout() -> None:
    one, other = (step_of(SMALL, STRICT, CPU) for _ in range(2))

    assert [float(one.train()) for _ in range(2)] == [float(other.train()) for _ in range(2)]


def test_a_way_runs_both_passes_in_its_thread_and_has_the_flag_alone(ground: PaperGround) -> None:
    seen: list[tuple[int, bool]] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: seen.append((threading.get_ident(), torch.backends.cudnn.benchmark)))

    def call() -> int:
        (x * 2).sum().backward()
        return threading.get_ident()

    step = step_of(SMALL, STRICT, CPU)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        ways = Way(ground, step, one), Way(ground, step, other, has_benchmark=True)
        threads = [way.run(call) for way in (*ways, *ways)]

    assert seen == list(zip(threads, [False, True, False, True], strict=True))
    assert threads[:2] == threads[2:]
    assert len({*threads, threading.get_ident()}) == 3
    assert not torch.backends.cudnn.benchmark


def test_all_ways_have_one_thread_in_common_but_for_benchmark_and_a_control(
    ground: PaperGround, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[bool, set[int]] = {False: set(), True: set()}
    train = Step.train

    def noted(step: Step) -> torch.Tensor:
        seen[torch.backends.cudnn.benchmark].add(threading.get_ident())
        return train(step)

    monkeypatch.setattr(Step, "train", noted)
    ground.captured = lambda call: (lambda: None, call())  # who replays a graph runs no step

    assert len([*a_trial(ground, folder).rows()]) > 6
    assert [len(threads) for threads in seen.values()] == [2, 1]
    assert seen[False].isdisjoint(seen[True])


def test_a_step_that_cannot_be_captured_is_told_and_the_others_go_on(
    ground: PaperGround, folder: Path, found: list[StepRow | PairRow]
) -> None:
    def refuse(call: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    ground.captured = refuse

    rows = [*a_trial(ground, folder).rows()]

    failed = [row for row in rows if isinstance(row, StepRow) and row.failure is not None]
    assert [row.way for row in failed] == [f"{way}, in a graph" for way in (PYTORCH, DIVIDED)]
    assert all("not permitted" in row.failure for row in failed)
    assert "not permitted" in summary(rows)


def test_a_replay_that_does_not_learn_as_the_eager_step_does_is_seen(
    ground: PaperGround, folder: Path, found: list[StepRow | PairRow]
) -> None:
    def forget(call: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        return lambda: None, call()

    ground.captured = forget

    rows = [row for row in a_trial(ground, folder).rows() if isinstance(row, StepRow)]

    assert [row.difference > 1e-3 for row in rows] == [False] * 6 + [True] * 2


def test_time_that_is_up_ends_the_run(
    ground: PaperGround, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    over = Watch(time.monotonic() - 1)

    assert run(ground, [SMALL], [STRICT], ["1MiB"], (tmp_path, tmp_path), over) == ([], True)
    assert "The time is up" in capsys.readouterr().out
    with pytest.raises(TimeIsUpError):
        [*a_trial(ground, tmp_path, over).rows()]


def test_a_network_that_cannot_be_tuned_is_a_row_and_the_next_one_goes_on(
    ground: PaperGround, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, asked = step_trial.tune, []

    def fail_once(*given: object, **named: object) -> object:
        asked.append(given)
        if len(asked) == 1:
            raise BackendError("Nothing could be measured.")
        return really(*given, **named)

    monkeypatch.setattr(step_trial, "tune", fail_once)
    other = dataclasses.replace(SMALL, name="other")

    rows, is_well = run(ground, [SMALL, other], [STRICT], ["1MiB"], (folder, tmp_path), ENDLESS)

    assert not is_well
    assert [(rows[0].network, rows[0].failure)] == [("small 4x3x8x8", "Nothing could be measured.")]
    assert {row.network for row in rows[1:]} == {"other 4x3x8x8"}


def test_a_broken_card_ends_the_run(
    ground: PaperGround, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_it(*_: object, **__: object) -> None:
        def broken() -> int:
            raise RuntimeError("an illegal memory access was encountered")

        ground.card.clock = broken
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(step_trial, "tune", break_it)

    rows, is_well = run(ground, [SMALL, SMALL], [STRICT], ["1MiB"], (tmp_path, tmp_path), ENDLESS)

    assert not is_well
    assert [row.failure for row in rows] == ["an illegal memory access was encountered"]
    assert "The card works no more; run the same command again." in capsys.readouterr().out


def test_without_a_gpu_one_sentence_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    assert steps.main([]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("make gpu needs an NVIDIA GPU, but ")


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [(["--networks", "lenet"], 2, "no network or no setting"), (["--limit", "64"], 1, "bench.gpu.steps: ")],
)
def test_a_users_mistake_is_a_sentence(
    arguments: list[str],
    status: int,
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps, "obstacle", lambda: None)

    assert steps.main(arguments) == status
    assert told in capsys.readouterr().err
