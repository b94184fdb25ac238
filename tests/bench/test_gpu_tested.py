"""The reports of tests on a card, among the results."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu import tested
from bench.gpu.layers import MIDDLING
from bench.gpu.sections import Deadline, Task
from bench.gpu.tested import FailedRow, TestsRow
from bench.gpu.values import Answer
from tests.paper_ground import NoMemory

ROOT = Path(__file__).parents[2]

SOME = """
import pytest

def test_right(): pass

def test_wrong(): assert 1 == 2, "one is not two"

def test_left_out(): pytest.skip("not today")
"""

BROKEN_OFF = """
def test_stopped(): raise KeyboardInterrupt

def test_never(): pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tested, "FOLDER", tmp_path)
    return tmp_path


def found() -> list[object]:
    return [*tested.rows(Task(NoMemory(), {}, MIDDLING, {}, Deadline(60)))]


def run(folder: Path, name: str, text: str, *more: str) -> None:
    """Have pytest run these tests as `make gpu` does, and leave its report."""
    (folder / f"test_{name}.py").write_text(text)
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={folder}"]
    report = f"--junitxml={folder / name}.xml"
    command = [sys.executable, "-m", "pytest", *options, *more, report, str(folder / f"test_{name}.py")]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=False)


def test_tests_that_fail_are_skipped_or_never_run_are_counted_and_named(folder: Path) -> None:
    run(folder, "tests", SOME)
    run(folder, "training", SOME + BROKEN_OFF)

    rows = found()

    counts = {row.report: row for row in rows if isinstance(row, TestsRow)}
    assert [(row.collected, row.run, row.failed, row.skipped) for row in counts.values()] == [
        (3, 3, 1, 1),
        (5, 3, 1, 1),
    ]
    assert counts["tests"].date.startswith("20")
    assert [row for row in rows if isinstance(row, FailedRow)][:2] == [
        FailedRow("tests", "test_tests::test_wrong", "AssertionError: one is not two"),
        FailedRow("tests", "test_tests::test_left_out", "not today"),
    ]
    assert [*tested.answers(rows)] == [
        Answer("How many tests ran on the card?", "6; 2 failed, 2 were skipped, 2 did not come to run")
    ]


def test_tests_in_several_processes_are_counted_too(folder: Path) -> None:
    run(folder, "tests", SOME, "--numprocesses", "2")

    (counts,) = (row for row in found() if isinstance(row, TestsRow))

    assert (counts.collected, counts.run, counts.failed, counts.skipped) == (3, 3, 1, 1)


def test_a_report_that_does_not_say_how_many_there_were_is_no_proof_that_all_ran(folder: Path) -> None:
    one = '<testsuite time="1.5"><testcase classname="a" name="b"/></testsuite>'
    for name in tested.REPORTS:
        (folder / f"{name}.xml").write_text(one)

    (answer,) = tested.answers(found())

    assert answer.text == "2; 0 failed, 0 were skipped, how many there were is not known"


def test_a_process_that_died_without_a_report_is_told(folder: Path) -> None:
    run(folder, "training", SOME)

    (answer,) = tested.answers(found())

    assert answer.text.endswith("0 did not come to run; no report of tests.xml")
