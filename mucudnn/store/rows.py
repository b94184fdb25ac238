"""Values as rows of the SQLite store, and back."""

import dataclasses
import functools
import json
import math
import sqlite3
from collections.abc import Iterable, Sequence

from mucudnn.problem import ConvProblem
from mucudnn.profile import Comparison, Environment, Measurement, Record, Refusal, RefusalKind, Trial
from mucudnn.sizes import LARGEST

_read = json.JSONDecoder().raw_decode
"""Reads what is at the beginning of a text; a recording has a hundred thousand, and no spaces around them."""


def environment_to_row(environment: Environment) -> tuple[str, str]:
    """Return key and facts."""
    return environment.key, json.dumps(environment.to_json(), sort_keys=True)


def environment_from_row(row: sqlite3.Row) -> Environment:
    """Return the environment with the soft facts of its first writer."""
    return Environment(**json.loads(row["facts"]))


def trial_to_row(trial: Trial) -> tuple[str, str, bool]:
    """Return problem, algorithm and whole: with the environment, the key of a record."""
    return trial.problem.key, trial.algorithm, trial.whole


def trial_from_row(row: sqlite3.Row) -> Trial:
    """Return the trial that `row` is a record of."""
    return Trial(problem_from_text(row["problem"]), row["algorithm"], bool(row["whole"]))


@functools.lru_cache(1024)  # hundreds of records have the same
def problem_from_text(text: str) -> ConvProblem:
    """Return the problem whose key is `text`, or was in an earlier version."""
    return ConvProblem.from_json(json.loads(text))


def record_to_row(record: Record) -> tuple[object, ...]:
    """Return the key of `record`, then all that it says, in the order of the columns."""
    refusal, limit_bytes = record.refusal, record.limit_bytes
    return (
        *trial_to_row(record.trial),
        record.workspace_bytes,
        _error_to_column(record.error),
        _measurement_to_text(record.times),
        _measurement_to_text(record.setup),
        None if refusal is None else str(refusal.kind),
        None if refusal is None else refusal.reason,
        None if limit_bytes is None else min(limit_bytes, LARGEST),  # what SQLite can hold
        record.is_deterministic,
    )


def record_from_row(trial: Trial, row: sqlite3.Row) -> Record:
    """Return the record of `trial` that `row` holds.

    Raises:
        LookupError, TypeError, ValueError: the row is damaged.
    """
    return Record(
        trial,
        workspace_bytes=row["workspace_bytes"],
        error=None if row["error"] is None else float(row["error"]),
        times=_measurement_from_text(row["times"]),
        setup=_measurement_from_text(row["setup"]),
        refusal=_refusal_from_row(trial, row),
        limit_bytes=row["limit_bytes"],
        is_deterministic=bool(row["deterministic"]),
    )


def keys_to_text(keys: Iterable[str]) -> str:
    """Return a text that is equal for equal sets of division keys only."""
    return json.dumps(sorted(set(keys)))


def comparison_to_rows(comparison: Comparison) -> list[tuple[int, str, str | None, int | None]]:
    """Return position, division, times and workspace of every division."""
    return [
        (position, key, _measurement_to_text(times), comparison.workspaces.get(key))
        for position, (key, times) in enumerate(comparison.times.items())
    ]


def comparison_from_rows(problem: ConvProblem, divisions: str, rows: Sequence[sqlite3.Row]) -> Comparison:
    """Return the comparison on `problem` whose divisions `rows` hold, by position.

    Args:
        problem: of the mini-batch.
        divisions: the text of their keys.
        rows: one for each.

    Raises:
        LookupError, TypeError, ValueError: a row is damaged, or missing.
    """
    found = keys_to_text(row["division"] for row in rows)
    if found != divisions:
        raise ValueError(f"A comparison of {divisions} must have a row for each, but has {found}.")
    return Comparison(
        problem,
        times={row["division"]: _some_measurement(row["times"]) for row in rows},
        workspaces={
            row["division"]: row["workspace_bytes"] for row in rows if row["workspace_bytes"] is not None
        },
    )


def _refusal_from_row(trial: Trial, row: sqlite3.Row) -> Refusal | None:
    if row["refusal_kind"] is None:
        return None
    kind, reason = RefusalKind(row["refusal_kind"]), row["refusal_reason"]
    if not isinstance(reason, str):
        raise TypeError(f"The reason of a refusal must be a text, but got {reason!r}.")
    return Refusal(trial.algorithm, trial.problem.batch, kind, reason)


def _error_to_column(error: float | None) -> float | str | None:
    return "nan" if error is not None and math.isnan(error) else error  # SQLite takes a NaN for NULL


def _measurement_to_text(measurement: Measurement | None) -> str | None:
    if measurement is None:
        return None
    fields = {field.name: getattr(measurement, field.name) for field in dataclasses.fields(measurement)}
    if not measurement.others:  # as in the rows of versions that did not know of others
        del fields["others"]
    return json.dumps(fields, sort_keys=True)


def _measurement_from_text(text: str | None) -> Measurement | None:
    return None if text is None else _some_measurement(text)


def _some_measurement(text: str) -> Measurement:
    fields, end = _read(text)
    if end != len(text):
        raise ValueError(f"Times must be one JSON object and nothing beside it, but got {text!r}.")
    return Measurement(
        tuple(fields["spans_ns"]), fields["calls"], fields["converged"], fields.get("others", 0.0)
    )
