"""Stores of every released schema are read, and packed ones too."""

import contextlib
import dataclasses
import gzip
import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from mucudnn.errors import StoreError, StoreWarning
from mucudnn.profile import Measurement, Record
from mucudnn.store import SqliteStore, open_store, rows, schema
from tests.data import make_store_schema_1 as former
from tests.data import make_store_schema_2 as released
from tests.examples import a_record, a_trial, an_environment
from tests.store.files import a_writer, execute, filled, query


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    ("file", "records"), [(former.PATH, former.RECORDS), (released.PATH, released.RECORDS)]
)
def test_every_released_schema_is_readable(
    tmp_path: Path, file: Path, records: tuple[Record, ...], read_only: bool
) -> None:
    path = tmp_path / "profiles.sqlite3"
    shutil.copyfile(file, path)

    with SqliteStore(path, read_only=read_only) as store:
        found = store.records(released.ENVIRONMENT, [record.trial for record in records])
        compared = store.comparison(
            released.ENVIRONMENT, released.COMPARISON.problem, released.COMPARISON.times
        )

    assert tuple(found.values()) == records
    assert compared == released.COMPARISON
    assert not read_only or path.read_bytes() == file.read_bytes()


def test_a_file_of_the_first_schema_is_brought_up_to_the_second_before_it_is_written_to(
    tmp_path: Path,
) -> None:
    path = tmp_path / "profiles.sqlite3"
    shutil.copyfile(former.PATH, path)

    for _ in range(2):
        with SqliteStore(path) as store:
            store.add_records(released.ENVIRONMENT, released.RECORDS)

    with SqliteStore(path, read_only=True) as store:
        trials = [record.trial for record in released.RECORDS]
        assert tuple(store.records(released.ENVIRONMENT, trials).values()) == released.RECORDS
    assert query(path, "PRAGMA user_version") == (2,)


def test_a_packed_file_of_the_first_schema_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "profiles.sqlite3.gz"
    path.write_bytes(gzip.compress(former.PATH.read_bytes()))

    with SqliteStore(path, read_only=True) as store:
        found = store.records(former.ENVIRONMENT, [record.trial for record in former.RECORDS])

    assert tuple(found.values()) == former.RECORDS


ONE_TAP = """problem = replace(problem, '"kernel_size":[3,5]', '"kernel_size":[1,1]')"""


@pytest.mark.parametrize(
    ("name", "read_only"),
    [("profiles.sqlite3", False), ("profiles.sqlite3", True), ("profiles.sqlite3.gz", True)],
)
def test_what_was_known_of_filters_of_one_tap_by_another_key_is_found_by_the_present_one(
    tmp_path: Path, name: str, read_only: bool
) -> None:
    file, path = tmp_path / "made.sqlite3", tmp_path / name
    shutil.copyfile(former.PATH, file)
    execute(file, f"UPDATE records SET {ONE_TAP}", f"UPDATE comparisons SET {ONE_TAP}")
    path.write_bytes(gzip.compress(file.read_bytes()) if path.suffix == ".gz" else file.read_bytes())
    before = path.read_bytes()
    problem = dataclasses.replace(former.PROBLEM, kernel_size=(1, 1))
    assert problem.filter_layout is not former.PROBLEM.filter_layout

    with SqliteStore(path, read_only=read_only) as store:
        found = store.records_of(released.ENVIRONMENT, problem)
        compared = store.comparisons_of(released.ENVIRONMENT, problem.with_batch(16))

    assert sorted(each.trial.algorithm for each in found) == ["cpu:fft", "cpu:fft", "cpu:winograd4"]
    assert [each.times for each in compared] == [former.COMPARISON.times]
    assert not read_only or path.read_bytes() == before


def test_a_file_that_knows_one_problem_by_a_former_key_and_the_present_one_opens(tmp_path: Path) -> None:
    path = tmp_path / "profiles.sqlite3"
    shutil.copyfile(former.PATH, path)
    other = """replace(problem, '"filter_layout":"channels_last"', '"filter_layout":"contiguous"')"""
    execute(
        path,
        f"UPDATE records SET {ONE_TAP}",
        f"UPDATE comparisons SET {ONE_TAP}",
        "INSERT INTO records (environment, problem, algorithm, whole)"
        f" SELECT environment, {other}, algorithm, whole FROM records",
        "INSERT INTO comparisons (environment, problem, divisions)"
        f" SELECT environment, {other}, divisions FROM comparisons",
    )

    problem = dataclasses.replace(former.PROBLEM, kernel_size=(1, 1))
    with SqliteStore(path) as store:
        found = store.records_of(released.ENVIRONMENT, problem)

    assert sorted(each.trial.algorithm for each in found) == ["cpu:fft", "cpu:fft", "cpu:winograd4"]


def test_several_processes_may_bring_the_same_file_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "profiles.sqlite3"
    shutil.copyfile(former.PATH, path)
    names = [f"process {index}" for index in range(4)]

    writers = [a_writer(path, name, 5) for name in names]
    for writer in writers:
        writer.communicate()

    assert [writer.returncode for writer in writers] == [0] * 4
    with SqliteStore(path, read_only=True) as store:
        assert store.count() == len(former.RECORDS) + 4 * 5


def test_nobody_else_writes_while_a_file_is_brought_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, prepare = tmp_path / "profiles.sqlite3", schema.prepare

    def watched(database: sqlite3.Connection, path: Path) -> None:
        other = sqlite3.connect(path, timeout=0, isolation_level=None)
        with contextlib.closing(other), pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
        prepare(database, path)

    monkeypatch.setattr(schema, "prepare", watched)

    SqliteStore(path).close()


def test_the_schema_is_still_the_released_one(tmp_path: Path) -> None:
    path = filled(tmp_path / "profiles.sqlite3")
    tables = "SELECT group_concat(sql, char(10)) FROM (SELECT sql FROM sqlite_master ORDER BY name)"

    assert query(path, tables) == query(released.PATH, tables)


def test_a_read_only_store_of_an_older_version_refuses_what_is_new() -> None:
    with (
        SqliteStore(former.PATH, read_only=True) as store,
        pytest.raises(StoreError, match="readonly database"),
    ):
        store.add_records(an_environment(), [a_record()])


def test_a_packed_store_is_replayed_as_what_it_was_packed_from(tmp_path: Path) -> None:
    path = filled(tmp_path / "profiles.sqlite3", records=200)
    packed = tmp_path / "profiles.sqlite3.gz"
    trials = [a_trial(f"cpu:{index}") for index in range(200)]
    with SqliteStore(path) as store:
        expected = store.records(an_environment(), trials)
        store.pack(packed)

    with SqliteStore(packed, read_only=True) as store:
        assert store.records(an_environment(), trials) == expected
        assert store.environments() == [an_environment()]
    assert packed.stat().st_size < path.stat().st_size / 5


def test_the_same_store_is_packed_to_the_same_bytes(tmp_path: Path) -> None:
    with SqliteStore(filled(tmp_path / "profiles.sqlite3")) as store:
        for name in ("a.gz", "b.gz"):
            store.pack(tmp_path / name)

    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


def test_a_packed_store_has_no_room_for_what_was_forgotten(tmp_path: Path) -> None:
    path, packed = filled(tmp_path / "profiles.sqlite3", records=200), tmp_path / "profiles.sqlite3.gz"
    with SqliteStore(path) as store:
        store.forget(an_environment(), [a_trial().problem], whole=False)
        store.pack(packed)

    assert len(gzip.decompress(packed.read_bytes())) < path.stat().st_size / 2


def test_a_packed_store_is_never_written_to(tmp_path: Path) -> None:
    packed = tmp_path / "profiles.sqlite3.gz"
    with SqliteStore(filled(tmp_path / "profiles.sqlite3")) as store:
        store.pack(packed)
    before = packed.read_bytes()

    with pytest.warns(StoreWarning, match="is packed, and can only be read"):
        store = open_store(packed)
    assert store.records(an_environment(), [a_trial("cpu:0")])
    store.add_records(an_environment(), [a_record(a_trial("cpu:new"))])

    with SqliteStore(packed, read_only=True) as store, pytest.raises(StoreError, match="read"):
        store.add_records(an_environment(), [a_record(a_trial("cpu:new"))])
    assert packed.read_bytes() == before


@pytest.mark.parametrize("keep", [0, 10, 100])
def test_what_is_left_of_a_packed_store_is_refused(tmp_path: Path, keep: int) -> None:
    packed = tmp_path / "profiles.sqlite3.gz"
    with SqliteStore(filled(tmp_path / "profiles.sqlite3")) as store:
        store.pack(packed)
    packed.write_bytes(packed.read_bytes()[:keep])

    with pytest.raises(StoreError, match=r"profiles\.sqlite3\.gz"):
        SqliteStore(packed, read_only=True)


def test_another_file_that_ends_so_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.gz"
    other.write_text("no store")

    with pytest.raises(StoreError, match=r"other\.gz is damaged, it cannot be unpacked"):
        SqliteStore(other, read_only=True)


def test_a_store_is_packed_under_a_name_that_says_so(tmp_path: Path) -> None:
    with (
        SqliteStore(filled(tmp_path / "profiles.sqlite3")) as store,
        pytest.raises(StoreError, match=r"must end with '\.gz', but got .*packed"),
    ):
        store.pack(tmp_path / "packed")


def test_a_new_file_says_whose_it_is_and_by_which_schema(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "new.sqlite3").close()

    with contextlib.closing(sqlite3.connect(tmp_path / "new.sqlite3")) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (schema.SCHEMA,)
        assert database.execute("PRAGMA application_id").fetchone() == (schema.APPLICATION_ID,)


@pytest.mark.parametrize(("others", "fields"), [(0.0, 3), (0.5, 4)])
def test_what_others_took_stands_in_a_row_only_where_they_took_something(others: float, fields: int) -> None:
    record = dataclasses.replace(a_record(), times=Measurement((1, 2), others=others), setup=None)

    (times,) = (text for text in rows.record_to_row(record) if str(text).startswith('{"calls"'))

    assert len(json.loads(str(times))) == fields
