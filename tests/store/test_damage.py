"""What is no store, or holds what no store does, is refused by name and left as it is."""

import contextlib
import json
import math
import os
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from mucudnn.errors import StoreError
from mucudnn.profile import Comparison, Measurement
from mucudnn.store import MemoryStore, SqliteStore, connections, open_store, schema
from tests.data import make_store_schema_1 as former
from tests.examples import a_problem, a_trial, an_environment
from tests.store.files import execute, filled


def _make_text(path: Path) -> None:
    path.write_text("what was measured\n" * 1000)


def _make_truncated(path: Path) -> None:
    filled(path, records=50)
    os.truncate(path, path.stat().st_size // 2)


def _make_overwritten(path: Path) -> None:
    contents = bytearray(filled(path, records=50).read_bytes())
    contents[-8192:-4096] = b"\xa5" * 4096
    path.write_bytes(contents)


def _make_newer(path: Path) -> None:
    execute(filled(path), f"PRAGMA user_version = {schema.SCHEMA + 1}")


def _make_other_application(path: Path) -> None:
    execute(path, "CREATE TABLE places (name TEXT)")


def _make_other_marked_application(path: Path) -> None:
    execute(path, "PRAGMA application_id = 1")


REFUSED = [
    (_make_text, "cannot be used as a store: file is not a database; move it away"),
    (_make_truncated, "cannot be used as a store: database disk image is malformed; move it away"),
    (_make_overwritten, "(is damaged: |malformed)"),
    (_make_newer, f"has {schema.SCHEMA + 1}: it comes from a newer mucudnn"),
    (_make_other_application, "got an SQLite file of another application"),
    (_make_other_marked_application, "got an SQLite file of another application"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_a_file_that_is_no_whole_store_is_refused_by_name(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    path = tmp_path / "profiles.sqlite3"
    make(path)

    with pytest.raises(StoreError, match=f"{re.escape(str(path))}.*{message}"):
        open_store(path)


@pytest.mark.parametrize("make", [make for make, _ in REFUSED])
def test_a_refused_file_stays_byte_for_byte(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "profiles.sqlite3"
    make(path)
    before = path.read_bytes()

    with pytest.raises(StoreError, match="profiles"):
        open_store(path)

    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_refused_file_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opened, connect = tmp_path / "profiles.sqlite3", list[sqlite3.Connection](), connections.connect

    def noted(path: Path, read_only: bool) -> sqlite3.Connection:
        opened.append(connect(path, read_only))
        return opened[-1]

    monkeypatch.setattr(connections, "connect", noted)
    path.write_text("what was measured\n" * 1000)
    with pytest.raises(StoreError, match="file is not a database"):
        SqliteStore(path)

    with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
        opened[0].execute("SELECT 1")


@pytest.mark.parametrize(
    "damage",
    [
        "times = '[1, 2'",
        pytest.param(f"times = '{'[' * 100_000}'", id="nested too deeply"),
        "times = '{}'",
        "refusal_kind = 'bad luck'",
        "refusal_kind = 'failed', refusal_reason = NULL",
        "times = '[]'",
        "times = times || times",
        "error = 'much'",
        "workspace_bytes = 'abc'",
        "workspace_bytes = -5",
        "workspace_bytes = 1.5",
        "limit_bytes = 'x'",
    ],
)
def test_a_damaged_row_is_refused_when_it_is_looked_up(tmp_path: Path, damage: str) -> None:
    path = filled(tmp_path / "profiles.sqlite3")
    execute(path, f"UPDATE records SET {damage}")

    with SqliteStore(path) as store, pytest.raises(StoreError, match=r"profiles\.sqlite3 is damaged, a row"):
        store.records(an_environment(), [a_trial("cpu:0")])


def test_a_comparison_that_has_lost_rounds_is_refused_when_it_is_looked_up(tmp_path: Path) -> None:
    path, keys = tmp_path / "profiles.sqlite3", ("cpu:aten@2", "cpu:im2col@2")
    with SqliteStore(path) as store:
        times = dict.fromkeys(keys, Measurement((7, 8, 9)))
        store.add_comparisons(an_environment(), [Comparison(a_problem(), times, {})])
    shorter = "replace(times, '[7, 8, 9]', '[7, 8]')"
    execute(path, f"UPDATE compared SET times = {shorter} WHERE division = '{keys[0]}'")

    with SqliteStore(path) as store, pytest.raises(StoreError, match=r"profiles\.sqlite3 is damaged, a row"):
        store.comparison(an_environment(), a_problem(), keys)


@pytest.mark.parametrize(
    "use",
    [
        lambda store: store.comparison(an_environment(), a_problem(), ("cpu:aten@2", "cpu:im2col@2")),
        lambda store: store.copy_into(MemoryStore()),
    ],
    ids=["looked up", "copied"],
)
def test_a_comparison_that_has_lost_a_division_is_refused(
    tmp_path: Path, use: Callable[[SqliteStore], object]
) -> None:
    path, keys = tmp_path / "profiles.sqlite3", ("cpu:aten@2", "cpu:im2col@2")
    with SqliteStore(path) as store:
        times = dict.fromkeys(keys, Measurement((7, 8, 9)))
        store.add_comparisons(an_environment(), [Comparison(a_problem(), times, {})])
    execute(path, f"DELETE FROM compared WHERE division = '{keys[0]}'")

    with SqliteStore(path) as store, pytest.raises(StoreError, match=r"must have a row for each.*; move it"):
        use(store)


def test_a_damaged_problem_is_refused_when_it_is_copied(tmp_path: Path) -> None:
    path = filled(tmp_path / "profiles.sqlite3")
    execute(path, "UPDATE records SET problem = '[]'")

    with SqliteStore(path) as store, pytest.raises(StoreError, match=r"profiles\.sqlite3 is damaged, a row"):
        store.copy_into(MemoryStore())


def test_a_missing_table_is_refused_when_it_is_used(tmp_path: Path) -> None:
    path = filled(tmp_path / "profiles.sqlite3")
    execute(path, "DROP TABLE records")

    with SqliteStore(path) as store, pytest.raises(StoreError, match="no such table: records"):
        store.count()


def test_a_file_that_a_newer_version_takes_while_it_is_opened_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profiles.sqlite3"
    shutil.copyfile(former.PATH, path)
    checked = schema.check

    def check(database: sqlite3.Connection, name: Path) -> None:
        checked(database, name)
        monkeypatch.setattr(schema, "_version", lambda *_: newer(name))

    def newer(name: Path) -> int:
        raise StoreError(f"{name} comes from a newer mucudnn.")

    monkeypatch.setattr(schema, "check", check)

    with pytest.raises(StoreError, match="newer mucudnn"):
        SqliteStore(path)
    assert path.read_bytes() == former.PATH.read_bytes()


def test_a_file_of_ours_without_a_schema_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "profiles.sqlite3"
    execute(filled(path), "PRAGMA user_version = 0")

    with pytest.raises(StoreError, match="damaged: it names no schema"):
        SqliteStore(path)


@pytest.mark.parametrize(
    "times",
    [
        {"spans_ns": [], "calls": 1, "converged": True},
        {"spans_ns": [5, 0], "calls": 1, "converged": True},
        {"spans_ns": [5, math.nan], "calls": 1, "converged": True},
        {"spans_ns": ["5"], "calls": 1, "converged": True},
        {"spans_ns": [5], "calls": 0, "converged": True},
    ],
)
def test_times_that_no_clock_has_shown_are_damage(tmp_path: Path, times: dict[str, object]) -> None:
    path = filled(tmp_path / "profiles.sqlite3")
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE records SET times = ?", (json.dumps(times),))

    with open_store(path) as store, pytest.raises(StoreError, match="is damaged, a row cannot be read"):
        store.records(an_environment(), [a_trial("cpu:0")])
