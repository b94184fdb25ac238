"""A store in an SQLite file, which threads and processes share."""

import contextlib
import gzip
import os
import sqlite3
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from mucudnn.errors import StoreError
from mucudnn.files import write_whole
from mucudnn.locks import ForkSafeLock
from mucudnn.problem import ConvProblem
from mucudnn.profile import Comparison, Environment, Record, RefusalKind, Trial
from mucudnn.store import connections, rows, schema
from mucudnn.store.base import Store

_NOBODY = 0
"""No process."""

_ENVIRONMENT = "(SELECT id FROM environments WHERE key = ?)"

_ADD_ENVIRONMENT = "INSERT INTO environments (key, facts) VALUES (?, ?) ON CONFLICT DO NOTHING"

_FIND_RECORD = f"""
    SELECT * FROM records
    WHERE environment = {_ENVIRONMENT} AND problem = ? AND algorithm = ? AND whole = ?"""

# What is there stays, unless it was refused for its size under a limit smaller than the new record's.
_ADD_RECORD = f"""
    INSERT INTO records (environment, problem, algorithm, whole, workspace_bytes, error, times, setup,
                         refusal_kind, refusal_reason, limit_bytes, deterministic)
    VALUES ({_ENVIRONMENT}, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (environment, problem, algorithm, whole) DO UPDATE SET
        workspace_bytes = excluded.workspace_bytes, error = excluded.error, times = excluded.times,
        setup = excluded.setup, refusal_kind = excluded.refusal_kind,
        refusal_reason = excluded.refusal_reason, limit_bytes = excluded.limit_bytes,
        deterministic = excluded.deterministic, date = excluded.date
    WHERE records.refusal_kind = '{RefusalKind.OVER_LIMIT}'
        AND records.limit_bytes IS NOT NULL
        AND (excluded.limit_bytes IS NULL OR records.limit_bytes < excluded.limit_bytes)"""

_FIND_ENVIRONMENTS = "SELECT * FROM environments ORDER BY id"

_FIND_RECORDS = f"SELECT * FROM records WHERE environment = {_ENVIRONMENT} AND problem = ?"

_FIND_PROBLEMS = f"SELECT DISTINCT problem FROM records WHERE environment = {_ENVIRONMENT} AND whole = 1"

_FIND_COMPARISONS = (
    f"SELECT * FROM comparisons WHERE environment = {_ENVIRONMENT} AND problem = ? ORDER BY id"
)

_FIND_COMPARED = f"""
    SELECT compared.* FROM compared JOIN comparisons ON comparisons.id = compared.comparison
    WHERE environment = {_ENVIRONMENT} AND problem = ? AND divisions = ? ORDER BY position"""

_ADD_COMPARISON = f"""
    INSERT INTO comparisons (environment, problem, divisions) VALUES ({_ENVIRONMENT}, ?, ?)
    ON CONFLICT DO NOTHING"""

_FORGET_PARTS = (f"DELETE FROM records WHERE environment = {_ENVIRONMENT} AND problem = ? AND whole = 0",)
_FORGET_WHOLE = (
    f"DELETE FROM records WHERE environment = {_ENVIRONMENT} AND problem = ? AND whole = 1",
    f"""DELETE FROM compared WHERE comparison IN
        (SELECT id FROM comparisons WHERE environment = {_ENVIRONMENT} AND problem = ?)""",
    f"DELETE FROM comparisons WHERE environment = {_ENVIRONMENT} AND problem = ?",
)

_ADD_COMPARED = "INSERT INTO compared VALUES (?, ?, ?, ?, ?)"


class SqliteStore:
    """A store in an SQLite file, which threads and processes share.

    Each call is one short transaction; a process that finds the file locked waits for up to half a minute.
    The journal is the plain one: a write-ahead log needs shared memory, which network file systems lack. A
    process that is killed leaves all that it had added. A file that is refused stays, byte for byte, as it
    is. A copy, pickled or not, is the same file opened once more. A store closes itself when it is forgotten.
    A file that was packed (`pack`) is read into memory, and can only be read. A file of an older version is
    brought up to this one: in memory, as it is now, where it is only to be read.

    Attributes:
        path: of the file, absolute.

    Args:
        path: of the file; it and its folder are made where they do not exist.
        read_only: whether to read only; the file must then exist and hold something.

    Raises:
        StoreError: the file is damaged, newer than this version or not ours, or it cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False) -> None:
        self.path = Path(path).absolute()
        self._read_only = read_only
        self._lock = ForkSafeLock()
        self._is_closed = False
        self._open()

    def _open(self) -> None:
        """Open the file for this process."""
        self._connection = connections.connect(self.path, self._read_only)
        self._process = os.getpid()
        try:
            self._prepare()
        except BaseException:
            self._connection.close()
            self._process = _NOBODY  # who asks again opens it again
            raise
        # Whoever copies a model knows of no store to close.
        weakref.finalize(self, connections.close, self._connection, self._process)

    def __reduce__(self) -> tuple[Callable[[Path, bool], "SqliteStore"], tuple[Path, bool]]:
        return _reopened, (self.path, self._read_only)

    def _prepare(self) -> None:
        copied = None
        with self._transaction("DEFERRED") as database:
            if not schema.is_empty(database):
                schema.check(database, self.path)
            elif self._read_only:
                raise connections.UnusableFileError(f"{self.path} holds nothing to read.")
            if self._read_only and schema.is_older(database):
                copied = connections.memory_connection()
                database.backup(copied)
        if copied is not None:
            self._connection.close()
            self._connection = copied
        if copied is not None or not self._read_only:
            with self._transaction("IMMEDIATE") as database:
                schema.prepare(database, self.path)
        if self._read_only:
            self._connection.execute("PRAGMA query_only = ON")

    @contextlib.contextmanager
    def _transaction(self, kind: str) -> Iterator[sqlite3.Connection]:
        """Run the block in one transaction: all of it or, if it raises, nothing of it."""
        with connections.errors_naming(self.path), self._lock, connections.unforked:
            if self._is_closed:
                raise sqlite3.ProgrammingError("it is a closed database")
            if os.getpid() != self._process:
                connections.close(self._connection, self._process)
                self._open()
            with self._connection:
                self._connection.execute(f"BEGIN {kind}")
                yield self._connection

    def records(self, environment: Environment, trials: Iterable[Trial]) -> dict[Trial, Record]:
        """Return the records of those `trials` that are known in `environment`, in the order of `trials`."""
        places = {trial: (environment.key, *rows.trial_to_row(trial)) for trial in trials}
        with self._transaction("DEFERRED") as database:
            found = {
                trial: database.execute(_FIND_RECORD, place).fetchone() for trial, place in places.items()
            }
            return {
                trial: rows.record_from_row(trial, row) for trial, row in found.items() if row is not None
            }

    def add_records(self, environment: Environment, records: Iterable[Record]) -> None:
        """Keep all `records`, as far as what is there gives way."""
        added = [(environment.key, *rows.record_to_row(record)) for record in records]
        with self._transaction("IMMEDIATE") as database:
            database.execute(_ADD_ENVIRONMENT, rows.environment_to_row(environment))
            database.executemany(_ADD_RECORD, added)

    def comparison(
        self, environment: Environment, problem: ConvProblem, keys: Iterable[str]
    ) -> Comparison | None:
        """Return the comparison of exactly the divisions `keys`, in any order; None if there is none."""
        divisions = rows.keys_to_text(keys)
        place = (environment.key, problem.key, divisions)
        with self._transaction("DEFERRED") as database:
            found = database.execute(_FIND_COMPARED, place).fetchall()
            return rows.comparison_from_rows(problem, divisions, found) if found else None

    def add_comparisons(self, environment: Environment, comparisons: Iterable[Comparison]) -> None:
        """Keep those of `comparisons` of whose divisions there is none yet."""
        added = [
            (each.problem.key, rows.keys_to_text(each.times), rows.comparison_to_rows(each))
            for each in comparisons
        ]
        with self._transaction("IMMEDIATE") as database:
            database.execute(_ADD_ENVIRONMENT, rows.environment_to_row(environment))
            for problem, divisions, compared in added:
                cursor = database.execute(_ADD_COMPARISON, (environment.key, problem, divisions))
                if cursor.rowcount:
                    database.executemany(_ADD_COMPARED, [(cursor.lastrowid, *row) for row in compared])

    def forget(self, environment: Environment, problems: Iterable[ConvProblem], *, whole: bool) -> None:
        """Remove what is known of these `problems` in `environment`, in one role."""
        places = [(environment.key, problem.key) for problem in problems]
        with self._transaction("IMMEDIATE") as database:
            for statement in _FORGET_WHOLE if whole else _FORGET_PARTS:
                database.executemany(statement, places)

    def count(self) -> int:
        """Return the number of records, of all environments together."""
        with self._transaction("DEFERRED") as database:
            return int(database.execute("SELECT count(*) FROM records").fetchone()[0])

    def environments(self) -> list[Environment]:
        """Return all environments, in the order in which they were first added."""
        with self._transaction("DEFERRED") as database:
            found = database.execute(_FIND_ENVIRONMENTS).fetchall()
            return [rows.environment_from_row(row) for row in found]

    def records_of(self, environment: Environment, problem: ConvProblem) -> list[Record]:
        """Return the records in `environment` of all trials whose micro-batch has this `problem`."""
        with self._transaction("DEFERRED") as database:
            found = database.execute(_FIND_RECORDS, (environment.key, problem.key)).fetchall()
            return [rows.record_from_row(rows.trial_from_row(row), row) for row in found]

    def problems_of(self, environment: Environment) -> list[ConvProblem]:
        """Return the problems of which whole mini-batches have records in `environment`."""
        with self._transaction("DEFERRED") as database:
            found = database.execute(_FIND_PROBLEMS, (environment.key,)).fetchall()
            return [rows.problem_from_text(row["problem"]) for row in found]

    def comparisons_of(self, environment: Environment, problem: ConvProblem) -> list[Comparison]:
        """Return the comparisons of divisions of `problem` in `environment`, in the order of adding."""
        with self._transaction("DEFERRED") as database:
            found = database.execute(_FIND_COMPARISONS, (environment.key, problem.key)).fetchall()
            return [_comparison_of(database, row) for row in found]

    def copy_into(self, store: Store, number: int | None = None) -> None:
        """Add all that is here to `store`, under its rules; or the environment of that number alone, from 1.

        One that is not there adds nothing.
        """
        with self._transaction("DEFERRED") as database:
            contents = [
                (
                    rows.environment_from_row(row),
                    _records_of(database, row["id"]),
                    _comparisons_of(database, row["id"]),
                )
                for place, row in enumerate(database.execute(_FIND_ENVIRONMENTS).fetchall(), start=1)
                if number in (None, place)
            ]
        for environment, records, comparisons in contents:
            store.add_records(environment, records)
            store.add_comparisons(environment, comparisons)

    def pack(self, path: str | os.PathLike[str]) -> None:
        """Write all that is here to a new file in compressed form, to be sent about and replayed.

        Args:
            path: of the file, whose name ends with ".gz".

        Raises:
            StoreError: the name does not, or the file cannot be written.
        """
        target = Path(path)
        if target.suffix != connections.PACKED:
            raise StoreError(
                f"The name of a packed store must end with {connections.PACKED!r}, but got {str(path)!r}."
            )
        with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as copy:
            with self._transaction("DEFERRED") as database:
                database.backup(copy)
            copy.execute("VACUUM")
            packed = gzip.compress(copy.serialize(), mtime=0)  # the same bytes from the same store
        with connections.errors_naming(target):
            write_whole(target, packed)

    def close(self) -> None:
        """Close the file."""
        self._is_closed = True
        connections.close(self._connection, self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _reopened(path: Path, read_only: bool) -> SqliteStore:
    return SqliteStore(path, read_only=read_only)


def _records_of(database: sqlite3.Connection, environment: int) -> list[Record]:
    found = database.execute("SELECT * FROM records WHERE environment = ?", (environment,))
    return [rows.record_from_row(rows.trial_from_row(row), row) for row in found]


def _comparisons_of(database: sqlite3.Connection, environment: int) -> list[Comparison]:
    found = database.execute(
        "SELECT * FROM comparisons WHERE environment = ? ORDER BY id", (environment,)
    ).fetchall()
    return [_comparison_of(database, row) for row in found]


def _comparison_of(database: sqlite3.Connection, row: sqlite3.Row) -> Comparison:
    compared = "SELECT * FROM compared WHERE comparison = ? ORDER BY position"
    problem = rows.problem_from_text(row["problem"])
    found = database.execute(compared, (row["id"],)).fetchall()
    return rows.comparison_from_rows(problem, row["divisions"], found)
