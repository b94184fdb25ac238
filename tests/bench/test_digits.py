"""What `make run` says of itself; tuning here is made up."""

import sys
from pathlib import Path
from typing import Any

import pytest

from bench import digits
from bench.cpu.process import INTERRUPTED
from bench.digits import Cost
from mucudnn.comparing.step_comparison import PairedTimes
from mucudnn.plan import Plan
from mucudnn.progress import Progress
from mucudnn.store import MemoryStore
from tests.examples import a_plan, a_record

TIMES = PairedTimes((2_000_000_000,) * 6, (1_000_000_000,) * 6)
"""A second is saved by every step."""


def told(**cost: Any) -> str:
    return digits._time_in_short(TIMES, Cost(**cost)).splitlines()[-1]


def test_tuning_is_paid_back_by_what_steps_save() -> None:
    first = told(seconds=30.2, measured=5, known=0)

    assert first == "The 30 s of tuning are paid back after 30 [30, 30] steps."
    assert "after at least 30 [30, 30]" in told(
        seconds=30.2, measured=5, known=7
    )  # they were paid for before
    assert "--again" in told(seconds=0.5, measured=0, known=7)


def test_what_was_measured_is_told_though_the_store_knew_as_many_records_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def tune(*_: object, progress: Progress, **__: object) -> Plan:
        progress.begin(1.0)
        progress.at("what", 1.0)
        progress.end(34)
        return a_plan()

    monkeypatch.setattr(digits, "tune", tune)
    store = MemoryStore()
    store.add_records(a_plan().environment, [a_record()])
    step = digits.digits_step(2, channels_last=False)

    _, cost = digits._tuned(step, store, digits._parser().parse_args([]))
    _, anew = digits._tuned(step, store, digits._parser().parse_args(["--again"]))

    assert cost.told().endswith(
        ": 34 candidates and divisions were measured (records in the store before: 1)."
    )
    assert (cost.known, anew.measured, anew.known) == (1, 34, 0)


def test_an_interrupt_is_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def tune(*_: object, **__: object) -> Plan:
        raise KeyboardInterrupt

    monkeypatch.setattr(digits, "tune", tune)
    monkeypatch.setattr(sys, "argv", ["digits", "--batch", "2", "--plan", str(tmp_path / "plan.json")])

    assert digits.main() == INTERRUPTED
    assert capsys.readouterr().err == "mucudnn: interrupted; finished measurements are kept in the store.\n"


def test_a_limit_that_cannot_be_read_is_refused_before_anything_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["digits", "--limit", "16"])

    with pytest.raises(SystemExit, match="2"):
        digits.main()

    output = capsys.readouterr()
    assert output.out == ""
    assert "argument --limit: " in output.err
