"""Training steps on a card as lines of a file, read again: `steps.jsonl`, of which `steps.txt` is made."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.gpu.step_rows import APART, DIVIDED, EQUAL, IN_GRAPH, PairRow, StepRow, paid_back, summary
from bench.gpu.values import Timing
from mucudnn.intervals import Verdict
from mucudnn.profile import Environment

LINES = "steps.jsonl"
TABLES = "steps.txt"

Row = StepRow | PairRow
Key = tuple[str, str, int]
"""Of a trial: network, setting, and bytes of the limit."""


def read(path: Path) -> list[Row]:
    """Return the rows of a file, those of a trial together; of equal trials the last one counts.

    One that was cut off counts only where there is no whole one, and one that no graph held before it. When
    tuning is paid back is worked out anew, from the rounds. A line that says under which conditions a trial
    ran begins it; so does one in which a process died, and to which the next one added its own.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line has other values than a row.
    """
    return [row for rows in _trials(path).values() for row in _paid(rows)]


def known(folder: Path) -> set[Key]:
    """Return the trials that a folder's lines hold to their end, with all controls, which early ones lack.

    By whatever card and libraries: a folder is of one card. A step that no graph holds ends its trial, too.

    Raises:
        ValueError: a line has other values than a row.
    """
    path = folder / LINES
    trials = _trials(path) if path.exists() else {}
    return {key for key, rows in trials.items() if {EQUAL, APART} <= _timed(rows) and _has_ended(rows)}


def environments(folder: Path) -> Iterator[Environment]:
    """Yield those in which the trials of a folder's lines ran.

    Raises:
        ValueError: a line has something else.
    """
    path = folder / LINES
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        line = _object(text)
        if "environment" in line:
            try:
                yield Environment(**line["environment"])
            except TypeError as error:
                raise ValueError(f"{path} must tell of environments, but has {dict(line)}.") from error


def _trials(path: Path) -> dict[Key, list[Row]]:
    """Return the rows of each trial that counts."""
    found: list[list[Row]] = []
    for text in path.read_text(encoding="utf-8").splitlines():
        line = _object(text)
        if "way" not in line:
            found.append([])
        else:
            row = _row(line)
            if not found or (found[-1] and _key(found[-1][0]) != _key(row)):
                found.append([])
            found[-1].append(row)
    trials = [rows for rows in found if rows]
    ended = {_key(rows[0]): rows for rows in trials if _has_ended(rows)}
    whole = {_key(rows[0]): rows for rows in trials if DIVIDED + IN_GRAPH in _timed(rows)}
    return {_key(rows[0]): rows for rows in trials} | ended | whole


def _key(row: Row) -> Key:
    return row.network, row.setting, row.limit_bytes


def _timed(rows: Iterable[Row]) -> set[str]:
    """Return the ways that have a time; the last one of a trial is the divided one in a graph."""
    return {row.way for row in rows if isinstance(row, StepRow) and row.time is not None}


def _has_ended(rows: Iterable[Row]) -> bool:
    """Return whether the last way of a trial has been tried."""
    last = (row for row in rows if isinstance(row, StepRow) and row.way == DIVIDED + IN_GRAPH)
    return any(row.time is not None or row.failure is not None for row in last)


def retell(folder: Path) -> Path:
    """Write the tables of a folder's lines, and return their file."""
    tables = folder / TABLES
    tables.write_text(summary(read(folder / LINES)) + "\n", encoding="utf-8")
    return tables


def _object(text: str) -> Mapping[str, Any]:
    """Return the object that a line holds; an empty one where it holds none."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _row(line: Mapping[str, Any]) -> Row:
    try:
        if "base" in line:
            return PairRow(**{**line, "verdict": Verdict(line["verdict"])})
        time = line["time"]
        timing = None if time is None else Timing(**{**time, "spans_ns": tuple(time["spans_ns"])})
        return StepRow(**{**line, "time": timing, "losses": tuple(line["losses"]), "break_even": None})
    except (KeyError, TypeError) as error:
        raise ValueError(f"A line must be a row of training steps, but got {dict(line)}.") from error


def _paid(rows: list[Row]) -> Iterator[Row]:
    """Yield the rows of a trial, whose first way is PyTorch as it comes, with when tuning is paid back."""
    base = rows[0].time if isinstance(rows[0], StepRow) else None
    for row in rows:
        if not isinstance(row, StepRow) or row.tuning_s is None or row.time is None or base is None:
            yield row
        else:
            paid = paid_back(row.tuning_s, base.samples_s, row.time.samples_s)
            yield dataclasses.replace(row, break_even=paid)
