"""What `make run` says of itself; tuning here is made up."""

import sys
from pathlib import Path

import pytest

from bench import digits
from bench.digits import Cost
from bench.endings import INTERRUPTED
from mucudnn.comparing.step_comparison import PairedTimes
from mucudnn.evidence import Evidence
from mucudnn.plan import Plan
from mucudnn.profile import Comparison, Measurement
from mucudnn.profiling.outcome import Outcome
from mucudnn.progress import Progress
from mucudnn.store import MemoryStore
from tests.examples import a_plan, a_problem, a_record

TIMES = PairedTimes((2_000_000_000,) * 6, (1_000_000_000,) * 6)
"""A second is saved by every step."""


def told(cost: Cost) -> str:
    return digits._time_in_short(TIMES, cost).splitlines()[-1]


def test_tuning_is_paid_back_by_what_steps_save() -> None:
    assert told(Cost(30.2, 5, known=0)) == "The 30 s of tuning are paid back after 30 [30, 30] steps."


def test_where_an_earlier_run_may_have_tuned_in_part_it_is_paid_back_by_that_many_steps_at_least() -> None:
    assert told(Cost(30.2, 5, known=7)).endswith("after at least 30 [30, 30] steps.")
    assert told(Cost(0.5, 0, known=7)).endswith("is told by a run with --again.")


def test_what_was_measured_is_told_though_the_store_knew_as_many_records_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def tune(*_: object, progress: Progress, again: bool, **__: object) -> Plan:
        asked.append(again)
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

    assert cost.told().endswith(" measured: 34; known before: 1, perhaps of other models.")
    assert anew.told().endswith(" measured: 34.")
    assert asked == [False, True]


@pytest.mark.parametrize(("again", "end"), [([], "."), (["--again"], "; go on without --again.")])
def test_an_interrupt_tells_what_is_kept(
    again: list[str], end: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def tune(*_: object, **__: object) -> Plan:
        raise KeyboardInterrupt

    monkeypatch.setattr(digits, "tune", tune)
    plan = str(tmp_path / "plan.json")
    monkeypatch.setattr(sys, "argv", ["digits", "--batch", "2", "--plan", plan, *again])

    assert digits.main() == INTERRUPTED
    kept = f"mucudnn: interrupted; finished measurements are kept in the store{end}\n"
    assert capsys.readouterr().err == kept


def test_rows_that_are_measured_for_the_table_alone_say_what_others_took_then() -> None:
    rounds = Measurement((1_000_000_000,) * 6, others=0.7)
    seen = Outcome.of(Comparison(a_problem(), {"own": rounds, "new": rounds}, {"own": 9, "new": 3}))

    assert digits._against("own", "new", seen, Evidence()).others == 0.7


def test_a_limit_that_cannot_be_read_is_refused_before_anything_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["digits", "--limit", "16"])

    with pytest.raises(SystemExit, match="2"):
        digits.main()

    output = capsys.readouterr()
    assert output.out == ""
    assert "argument --limit: " in output.err
