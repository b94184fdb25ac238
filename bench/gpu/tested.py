"""What came of the tests that `make gpu` runs on the card, by the reports that they leave."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from bench.gpu.sections import Task, only
from bench.gpu.values import Answer

FOLDER = Path(__file__).parents[2] / "build" / "gpu"
"""Where the reports lie, in JUnit's form; those of earlier runs are removed before."""

REPORTS = ("training", "tests")
"""Their names. A process that dies leaves none."""


@dataclasses.dataclass(frozen=True)
class TestsRow:
    """The tests of one report on this card.

    Attributes:
        report: its name.
        date: at which they began.
        collected: how many were to run; None if the report does not say so.
        run: how many did, failed ones and those that skipped themselves included.
        failed: of these.
        skipped: of these.
        seconds: that they took.
    """

    __test__ = False  # in spite of its name, for pytest

    report: str
    date: str
    collected: int | None
    run: int
    failed: int
    skipped: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class FailedRow:
    """A test that failed or was skipped, and why."""

    report: str
    test: str
    reason: str


def rows(task: Task) -> Iterator[object]:  # noqa: ARG001  # the card was asked before
    """Yield the counts of each report, then the tests that failed or were skipped."""
    for path in sorted(FOLDER.glob("*.xml")):
        yield from _reported(path)


def _reported(path: Path) -> Iterator[object]:
    for suite in ElementTree.parse(path).getroot().iter("testsuite"):
        cases = [case for case in suite.iter("testcase") if case.get("name")]  # not what was interrupted
        failed = [case for case in cases if _reason(case, "failure", "error") is not None]
        skipped = [case for case in cases if _reason(case, "skipped") is not None]
        said = {each.get("name"): each.get("value", "") for each in suite.iter("property")}
        yield TestsRow(
            report=path.stem,
            date=suite.get("timestamp", ""),
            collected=int(said["collected"]) if "collected" in said else None,
            run=len(cases),
            failed=len(failed),
            skipped=len(skipped),
            seconds=float(suite.get("time", "nan")),
        )
        for case in (*failed, *skipped):
            test = f"{case.get('classname')}::{case.get('name')}"
            yield FailedRow(path.stem, test, _reason(case, "failure", "error", "skipped") or "")


def _reason(case: ElementTree.Element, *kinds: str) -> str | None:
    """Return the first line of what is said of a test under one of these names; None if nothing is."""
    found = next((child for kind in kinds for child in case.iter(kind)), None)
    return None if found is None else found.get("message", "").partition("\n")[0]


def answers(rows: Sequence[object]) -> Iterator[Answer]:
    """Yield how many tests ran, failed, were skipped, and did not come to run."""
    reports = only(TestsRow, rows)
    question = "How many tests ran on the card?"
    missing = [name for name in REPORTS if name not in {row.report for row in reports}]
    run, failed, skipped = (
        sum(getattr(row, name) for row in reports) for name in ("run", "failed", "skipped")
    )
    known = [row for row in reports if row.collected is not None]
    left = sum(max(0, (row.collected or 0) - row.run) for row in known)
    are_all_known = bool(reports) and len(known) == len(reports)
    told = f"{left} did not come to run" if are_all_known else "how many there were is not known"
    died = "".join(f"; no report of {name}.xml" for name in missing)
    yield Answer(question, f"{run}; {failed} failed, {skipped} were skipped, {told}{died}")
