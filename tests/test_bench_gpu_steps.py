"""Training steps on a card on paper: what is compared with what, and what is kept of it."""

import dataclasses
import json
import math
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.gpu import steps
from bench.gpu.steps import BENCHMARK, DIVIDED, PYTORCH, UNDIVIDED, Comparison, StepRow, run, step_of, summary
from bench.record import SETTINGS, TimeIsUpError, Workload
from mucudnn.backends.cudnn.library import load_library
from mucudnn.errors import BackendError, DeviceLostError
from mucudnn.intervals import Verdict
from mucudnn.sizes import format_bytes
from mucudnn.timing import SamplingRule
from tests.paper_ground import PaperGround

pytestmark = [pytest.mark.deviceless, pytest.mark.usefixtures("one_thread")]

STRICT = SETTINGS[0]
CPU = torch.device("cpu")


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(),
        nn.Linear(4 * 36, 5),
    )  # fmt: skip


SMALL = Workload("small", network, (4, 3, 8, 8))
DENSE = Workload("dense", lambda: nn.Conv3d(2, 3, 3, padding=1), (2, 2, 4, 4, 4))


@pytest.fixture
def ground(monkeypatch: pytest.MonkeyPatch) -> PaperGround:
    monkeypatch.setattr(steps, "ROUNDS", SamplingRule(looks=(6,), precision=1.0, min_span_ns=0, warmups=1))
    return PaperGround(load_library())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[StepRow]:
    """All that is found of one network, which takes some seconds."""
    folder = tmp_path_factory.mktemp("steps")
    with pytest.MonkeyPatch.context() as patched, torch.random.fork_rng():
        patched.setattr(steps, "ROUNDS", SamplingRule(looks=(6,), precision=1.0, min_span_ns=0, warmups=1))
        here = PaperGround(load_library())
        return run(here, [SMALL], [STRICT], "1MiB", (folder / "store", folder / "rows"), math.inf)


def test_all_ways_are_compared_with_pytorchs_own_of_the_same_rounds(found: list[StepRow]) -> None:
    assert [(row.way, row.against) for row in found] == [
        (PYTORCH, PYTORCH),
        (UNDIVIDED, PYTORCH),
        (DIVIDED, PYTORCH),
        (f"{PYTORCH}, in a graph", f"{PYTORCH}, in a graph"),
        (f"{DIVIDED}, in a graph", f"{PYTORCH}, in a graph"),
        (BENCHMARK, BENCHMARK),
        (DIVIDED, BENCHMARK),
    ]
    assert all(row.failure is None and row.time is not None for row in found)
    assert {row.verdict for row in found} == {Verdict.SAME}  # by the clock on paper
    assert {row.network for row in found} == {"small 4x3x8x8"}


def test_all_ways_have_the_losses_of_their_twins(found: list[StepRow]) -> None:
    losses = [row.losses for row in found if row.losses]

    assert len(losses) == 4
    assert all(each == pytest.approx(losses[0], rel=1e-4) for each in losses)
    assert len(set(losses[0])) == 3  # it learns


def test_tuning_is_part_of_what_is_told(found: list[StepRow]) -> None:
    assert [row.way for row in found if row.tuning_s is not None] == [UNDIVIDED, DIVIDED]


def test_rows_are_kept_one_by_one_and_summed_up(
    ground: PaperGround, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = tmp_path / "store", tmp_path / "rows"

    rows = run(ground, [SMALL], [STRICT], "1MiB", files, math.inf)

    kept = [json.loads(line) for line in files[1].read_text().splitlines()]
    assert [row["way"] for row in kept] == [row.way for row in rows]
    assert len(kept[0]["time"]["spans_ns"]) == 6
    text = summary(rows)
    assert f"small 4x3x8x8, float32-nchw, {format_bytes(2**20)}" in text
    assert text.count("SAME") == sum(row.way != row.against for row in rows) == 4
    assert capsys.readouterr().out.count("small 4x3x8x8") == len(rows)


def test_every_voxel_has_a_class_where_every_voxel_is_scored() -> None:
    step = step_of(DENSE, STRICT, CPU)

    assert math.isfinite(float(step.train()))


def test_equal_arguments_give_equal_steps() -> None:
    one, other = (step_of(SMALL, STRICT, CPU) for _ in range(2))

    assert float(one.train()) == float(other.train())


def test_pytorchs_flag_is_on_for_what_is_named_so_and_off_afterwards(
    ground: PaperGround, tmp_path: Path
) -> None:
    seen = {
        (row.way, row.against): torch.backends.cudnn.benchmark
        for row in Comparison(ground, SMALL, STRICT, "1MiB").rows(tmp_path / "store", math.inf)
    }

    assert [pair for pair, is_on in seen.items() if is_on] == [(BENCHMARK, BENCHMARK), (DIVIDED, BENCHMARK)]
    assert not torch.backends.cudnn.benchmark


def test_a_step_that_cannot_be_captured_is_told_and_the_others_go_on(
    ground: PaperGround, tmp_path: Path
) -> None:
    def refuse(call: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    ground.captured = refuse

    rows = [*Comparison(ground, SMALL, STRICT, "1MiB").rows(tmp_path / "store", math.inf)]

    failed = [row for row in rows if row.failure is not None]
    assert [row.way for row in failed] == [f"{way}, in a graph" for way in (PYTORCH, DIVIDED)]
    assert all("not permitted" in row.failure for row in failed)
    assert len(rows) == 7
    assert "not permitted" in summary(rows)


def test_time_that_is_up_ends_the_run(
    ground: PaperGround, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = tmp_path / "store", tmp_path / "rows"

    assert run(ground, [SMALL], [STRICT], "1MiB", files, time.monotonic() - 1) == []
    assert "The time is up." in capsys.readouterr().out
    with pytest.raises(TimeIsUpError):
        [*Comparison(ground, SMALL, STRICT, "1MiB").rows(files[0], time.monotonic() - 1)]


def test_a_network_that_cannot_be_tuned_is_told_and_the_next_one_goes_on(
    ground: PaperGround, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    really, asked = steps.tune, []

    def fail_once(*given: object, **named: object) -> object:
        asked.append(given)
        if len(asked) == 1:
            raise BackendError("Nothing could be measured.")
        return really(*given, **named)

    monkeypatch.setattr(steps, "tune", fail_once)
    other = dataclasses.replace(SMALL, name="other")

    rows = run(ground, [SMALL, other], [STRICT], "1MiB", (tmp_path / "store", tmp_path / "rows"), math.inf)

    assert {row.network for row in rows} == {"other 4x3x8x8"}
    assert "small, float32-nchw: Nothing could be measured." in capsys.readouterr().err


def test_a_broken_card_ends_the_run(
    ground: PaperGround, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_it(*_: object, **__: object) -> None:
        raise DeviceLostError("cudnn:eng1", 4, "an illegal memory access was encountered")

    monkeypatch.setattr(steps, "tune", break_it)

    assert run(ground, [SMALL], [STRICT], "1MiB", (tmp_path / "store", tmp_path / "rows"), math.inf) == []
    assert "Run the same command again" in capsys.readouterr().err


def test_without_a_gpu_one_sentence_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    assert steps.main([]) == 1
    assert capsys.readouterr().err.strip()
