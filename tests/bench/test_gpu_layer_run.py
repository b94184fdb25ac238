"""How layers on a card are gone on with when a process ends in the middle of them."""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.cpu.lines import Case, Failed, Recording, read, read_packed_too, write_lines
from bench.endings import INTERRUPTED
from bench.gpu import layer_run
from bench.gpu.layer_kinds import STOPPED
from bench.gpu.layer_options import parser
from mucudnn.problem import ConvOp, Layout

ENDED = "its process ended."
ABORTED = "its process ended with status -6."


def options(folder: Path, *given: str) -> argparse.Namespace:
    made = parser().parse_args(
        ["--output", str(folder / "results"), "--recording", str(folder / "store"), *given]
    )
    assert isinstance(made, argparse.Namespace)
    return made


_CHILD = """
import os, sys
from pathlib import Path
from bench.cpu.lines import Case, Failed, Recording, Started, append, read
from mucudnn.profile import Environment
lines, ended = Path(sys.argv[1]), sys.argv[2]
lines.parent.mkdir(parents=True, exist_ok=True)
known = Recording.of(read(lines)).failed
append(lines, Started("float32-nchw", Environment("cudnn", {}, {}, {})))
for number in range(3):
    case = Case("float32-nchw", f"small/{number}", "contiguous", "fprop")
    if case not in known:
        append(lines, Failed(case, ended))
        if number == 1:
            os.abort()
        append(lines, Failed(case, "done"))
"""


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that each process was given; the second case aborts it."""
    asked: list[float] = []

    def command(given: argparse.Namespace, _: object, seconds: float) -> list[str]:
        asked.append(seconds)
        return [sys.executable, "-c", _CHILD, str(given.output / "layers.jsonl"), ENDED]

    monkeypatch.setattr(layer_run, "_command", command)
    return asked


def test_another_process_goes_on_with_the_next_case_and_all_is_told(
    commands: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert layer_run.watched(options(tmp_path, "--seconds", "500"), []) == 0

    assert len(commands) == 2
    assert commands[1] < commands[0] == 500
    recording = Recording.of(read_packed_too(tmp_path / "results/layers.jsonl"))
    assert [line.reason for line in recording.failed.values()] == ["done", ABORTED, "done"]
    text = (tmp_path / "results/layers.md").read_text()
    assert f"| float32-nchw small/1 contiguous fprop | {ABORTED} |" in text
    assert "another one goes on" in capsys.readouterr().out


def test_who_is_lent_a_card_has_the_summary_written_elsewhere(commands: list[float], tmp_path: Path) -> None:
    results = tmp_path / "results"

    assert layer_run.watched(options(tmp_path, "--seconds", "500", "--untold"), []) == 0

    assert [path.name for path in results.iterdir()] == ["layers.jsonl"]
    assert layer_run.main(["--retell", str(results)]) == 0
    assert ABORTED in (results / "layers.md").read_text()


def test_a_process_that_begins_no_case_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_run, "_command", lambda *_: [sys.executable, "-c", "raise SystemExit(7)"])
    assert layer_run.watched(options(tmp_path), []) == 7
    assert not (tmp_path / "results").exists()


def test_a_process_that_hangs_between_cases_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layer_run, "PATIENCE_S", 0.2)
    monkeypatch.setattr(
        layer_run, "_command", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"]
    )
    assert layer_run.watched(options(tmp_path, "--seconds", "0", "--case-seconds", "0"), []) == 1
    assert capfd.readouterr().err.startswith("Killed: ")


def test_what_failed_is_forgotten_if_it_is_to_be_tried_again(commands: list[float], tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    case = Case("float32-nchw", "vgg16/a", Layout.CONTIGUOUS, ConvOp.FPROP)
    write_lines(results / "layers.jsonl", [Failed(case, ENDED)])

    layer_run.watched(options(tmp_path, "--again", "--seconds", "500"), [])

    assert case not in Recording.of(read(results / "layers.jsonl")).failed


@pytest.mark.parametrize("selected", [["--layers", "resnet*"], ["--settings", "tf32-*"]])
def test_what_failed_elsewhere_is_not_forgotten(
    commands: list[float], tmp_path: Path, selected: list[str]
) -> None:
    results = tmp_path / "results"
    results.mkdir()
    case = Case("float32-nchw", "vgg16/a", Layout.CONTIGUOUS, ConvOp.FPROP)
    write_lines(results / "layers.jsonl", [Failed(case, ENDED)])

    layer_run.watched(options(tmp_path, "--again", "--seconds", "500", *selected), [])

    assert case in Recording.of(read(results / "layers.jsonl")).failed


def test_a_case_that_is_killed_by_an_interrupt_is_measured_by_the_next_run(
    commands: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(command: Sequence[str], *_: object, **__: object) -> int:
        subprocess.run(command, check=False)
        raise KeyboardInterrupt

    monkeypatch.setattr(layer_run, "status_of", interrupted)

    assert layer_run.watched(options(tmp_path), []) == INTERRUPTED

    failed = Recording.of(read(tmp_path / "results/layers.jsonl")).failed
    assert [line.reason for line in failed.values()] == ["done", STOPPED]


def test_an_interrupt_while_the_summary_is_written_loses_no_line(
    commands: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def retell(_: Path) -> list[Path]:
        raise KeyboardInterrupt

    monkeypatch.setattr(layer_run, "obstacle", lambda: None)
    monkeypatch.setattr(layer_run, "retell", retell)
    monkeypatch.setattr(layer_run, "_fill_in_folders", lambda _: None)  # they are given

    given = ["--output", str(tmp_path / "results"), "--recording", str(tmp_path / "store")]
    assert layer_run.main(given) == INTERRUPTED

    told = f"interrupted; `--retell {tmp_path}/results` writes the summary."
    assert told in capsys.readouterr().err
    assert len(Recording.of(read(tmp_path / "results/layers.jsonl")).failed) == 3


@pytest.mark.parametrize("interrupted", ["_say_of_the_last_case", "write_lines"])
def test_an_interrupt_after_another_or_while_lines_are_written_anew_is_told_in_a_sentence(
    commands: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    interrupted: str,
) -> None:
    def interrupt(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(layer_run, "obstacle", lambda: None)
    monkeypatch.setattr(layer_run, "_fill_in_folders", lambda _: None)  # they are given
    monkeypatch.setattr(layer_run, "status_of", interrupt)
    monkeypatch.setattr(layer_run, interrupted, interrupt)

    given = ["--again", "--output", str(tmp_path / "results"), "--recording", str(tmp_path / "store")]
    assert layer_run.main(given) == INTERRUPTED

    assert capsys.readouterr().err.endswith(f"`--retell {tmp_path}/results` writes the summary.\n")


def test_a_process_is_given_what_was_asked_for_and_the_time_that_is_left(tmp_path: Path) -> None:
    given = ["--layers", "vgg16/*", "--seconds", "500", "--limit", "8MiB"]
    asked = options(tmp_path, *given)

    command = layer_run._command(asked, given, 123.0)

    read_again = vars(parser().parse_args(command[3:]))
    typed = "--layers 'vgg16/*' --seconds 500 --limit 8MiB"
    assert read_again == {**vars(asked), "seconds": 123.0, "typed": typed}


@pytest.mark.parametrize(
    ("given", "told"), [(["--limit", "8"], "unit"), (["--retell", "nowhere"], "no lines")]
)
def test_what_cannot_be_done_is_told(given: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert layer_run.main(given) == 2
    assert told in capsys.readouterr().err
