"""The tables of the SQLite store, and how a file is known to hold them whole."""

import sqlite3
from pathlib import Path

from mucudnn.errors import StoreError
from mucudnn.store import rows

SCHEMA = 2
"""Version of the tables; a newer one is refused, an older one is brought up to it before it is used."""

APPLICATION_ID = int.from_bytes(b"muNN")
"""What marks an SQLite file as ours."""

# No index beside the keys: every look-up names a whole key.
# Finished divisions are compared under their keys, whole calls under the names of `ModelCall.key`.
_TABLES = (
    """CREATE TABLE environments (
        id INTEGER PRIMARY KEY,
        key TEXT NOT NULL UNIQUE,    -- the facts that decide, as sorted JSON
        facts TEXT NOT NULL          -- the same with the soft ones, as the first writer saw them
    )""",
    """CREATE TABLE records (
        environment INTEGER NOT NULL REFERENCES environments (id),
        problem TEXT NOT NULL,       -- of the micro-batch, as sorted JSON
        algorithm TEXT NOT NULL,
        whole INTEGER NOT NULL,      -- 1: the micro-batch is the whole mini-batch
        workspace_bytes INTEGER,
        error REAL,                  -- relative to float64; the text 'nan' where it is no number
        times TEXT,                  -- raw spans in nanoseconds, in order, as JSON
        setup TEXT,                  -- the same, once per mini-batch
        refusal_kind TEXT,
        refusal_reason TEXT,
        limit_bytes INTEGER,
        date TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%SZ', 'now')),
        deterministic INTEGER NOT NULL DEFAULT 1,  -- 0: equal operands may give other bits in each run
        PRIMARY KEY (environment, problem, algorithm, whole)
    ) WITHOUT ROWID""",
    """CREATE TABLE comparisons (
        id INTEGER PRIMARY KEY,
        environment INTEGER NOT NULL REFERENCES environments (id),
        problem TEXT NOT NULL,       -- of the mini-batch, as sorted JSON
        divisions TEXT NOT NULL,     -- sorted keys of the divisions that ran in the same rounds, as JSON
        date TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%SZ', 'now')),
        UNIQUE (environment, problem, divisions)
    )""",
    """CREATE TABLE compared (
        comparison INTEGER NOT NULL REFERENCES comparisons (id),
        position INTEGER NOT NULL,   -- 0 is the base
        division TEXT NOT NULL,
        times TEXT NOT NULL,         -- raw spans in nanoseconds, one a round, as JSON
        workspace_bytes INTEGER,
        PRIMARY KEY (comparison, position)
    ) WITHOUT ROWID""",
)

_UPGRADES = {
    1: (
        "ALTER TABLE records ADD COLUMN deterministic INTEGER NOT NULL DEFAULT 1",
        "UPDATE OR IGNORE records SET problem = present_key(problem)",
        "UPDATE OR IGNORE comparisons SET problem = present_key(problem)",
    )
}
"""What brings the tables of a schema to the next one; present_key is what the key of a problem is by now."""


def is_empty(database: sqlite3.Connection) -> bool:
    """Return whether no application has put anything into the file."""
    return _number(database, "SELECT count(*) FROM sqlite_master") == 0 and _application(database) == 0


def is_older(database: sqlite3.Connection) -> bool:
    """Return whether the tables are of an older version than this one."""
    return _number(database, "PRAGMA user_version") < SCHEMA


def check(database: sqlite3.Connection, path: Path) -> None:
    """Verify that the file holds the tables of this version or of an older one, whole; this reads all of it.

    Raises:
        StoreError: the file is of another application, newer, or damaged; the message names `path`.
    """
    if _application(database) != APPLICATION_ID:
        raise StoreError(f"{path} must be a store of mucudnn, but got an SQLite file of another application.")
    _version(database, path)
    finding = database.execute("PRAGMA quick_check(1)").fetchone()[0]
    if finding != "ok":
        raise StoreError(
            f"{path} is damaged: {' '.join(finding.split())}; move it away, or choose another store."
        )


def prepare(database: sqlite3.Connection, path: Path) -> None:
    """Make the tables in an empty file, or bring older ones up to this version.

    Where they are of this version, write and take it back: that shows that one can. The connection is in a
    transaction that may write.

    Raises:
        StoreError: a newer version has changed the file since it was checked; the message names `path`.
    """
    is_new = is_empty(database)
    version = SCHEMA if is_new else _version(database, path)
    database.create_function("present_key", 1, lambda text: rows.problem_from_text(text).key)
    upgrades = [statement for number in range(version, SCHEMA) for statement in _UPGRADES[number]]
    for statement in _TABLES if is_new else upgrades:
        database.execute(statement)
    database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    database.execute(f"PRAGMA user_version = {SCHEMA}")
    if not is_new and version == SCHEMA:
        database.rollback()


def _version(database: sqlite3.Connection, path: Path) -> int:
    """Return the version of the tables.

    Raises:
        StoreError: it is newer than this one, or none.
    """
    version = _number(database, "PRAGMA user_version")
    if version < 1:
        raise StoreError(f"{path} is damaged: it names no schema; move it away, or choose another store.")
    if version > SCHEMA:
        raise StoreError(
            f"A store must have schema {SCHEMA} or lower, but {path} has {version}: "
            "it comes from a newer mucudnn."
        )
    return version


def _application(database: sqlite3.Connection) -> int:
    return _number(database, "PRAGMA application_id")


def _number(database: sqlite3.Connection, query: str) -> int:
    return int(database.execute(query).fetchone()[0])
