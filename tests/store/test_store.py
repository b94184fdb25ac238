"""Which file is used, by how many at once, and what becomes of one that cannot be written."""

import contextlib
import copy
import gc
import json
import os
import pickle
import re
import resource
import signal
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import platformdirs
import pytest

import mucudnn
from mucudnn.errors import StoreError, StoreWarning
from mucudnn.profile import Comparison, Measurement, Record, Trial
from mucudnn.sizes import LARGEST
from mucudnn.store import (
    MemoryStore,
    SqliteStore,
    Store,
    StoreOption,
    connections,
    default_path,
    in_memory,
    open_store,
    opened,
    readable_store,
)
from mucudnn.store.steadfast import SteadfastStore
from tests.data import make_store_schema_1 as former
from tests.data import make_store_schema_2 as released
from tests.examples import a_record, a_trial, an_environment, an_over_limit_record, copy_in_a_write
from tests.forks import in_a_child
from tests.models import a_batch, a_chain
from tests.store.files import a_writer, execute, filled, query

pytestmark = pytest.mark.usefixtures("few_to_collect")

NOBODY = 65534


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "profiles.sqlite3")
    store.close()

    with pytest.raises(StoreError, match="closed database"):
        store.count()


def test_whoever_finds_the_file_locked_waits_for_up_to_half_a_minute(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "profiles.sqlite3") as store, store._transaction("DEFERRED") as database:
        (timeout_ms,) = database.execute("PRAGMA busy_timeout").fetchone()

    assert timeout_ms == 30_000


def test_a_thread_waits_until_another_has_ended_its_transaction(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "profiles.sqlite3") as store, ThreadPoolExecutor() as pool:
        with store._transaction("DEFERRED"):
            counted = pool.submit(store.count)
            with pytest.raises(TimeoutError):
                counted.result(timeout=0.1)

        assert counted.result() == 0


@pytest.mark.parametrize("kind", ["DEFERRED", "IMMEDIATE"])
def test_a_forked_child_opens_the_file_once_more_though_a_thread_was_in_a_transaction(
    tmp_path: Path, kind: str
) -> None:
    store, trials = SqliteStore(tmp_path / "profiles.sqlite3"), [a_trial(f"cpu:{n}") for n in range(3)]
    store.add_records(an_environment(), [a_record(trials[0])])
    is_inside = threading.Event()

    def use() -> None:
        with store._transaction(kind) as database:
            database.execute("SELECT * FROM records").fetchall()
            is_inside.set()
            time.sleep(0.1)  # by when a fork that waited for nobody is over

    def check() -> bool:
        signal.alarm(20)  # instead of waiting for half a minute
        store.add_records(an_environment(), [a_record(trials[1])])
        is_known = store.count() == 2
        store.close()
        return is_known

    thread = threading.Thread(target=use)
    thread.start()
    is_inside.wait()
    found = in_a_child(check)
    thread.join()

    assert found
    store.add_records(an_environment(), [a_record(trials[2])])
    assert store.count() == 3


def test_a_forked_child_closes_nothing_of_its_parent_and_its_closed_store_says_so(tmp_path: Path) -> None:
    path = filled(tmp_path / "profiles.sqlite3")
    dropped, closed = SqliteStore(path), SqliteStore(path)
    opened = _opened(path)

    def check() -> bool:
        nonlocal dropped
        del dropped
        gc.collect()
        closed.close()
        with pytest.raises(StoreError, match="closed database"):
            closed.count()
        return _opened(path) == opened == 2

    assert in_a_child(check)
    assert dropped.count() == closed.count() > 0


def _opened(path: Path) -> int:
    """Return how often this process has opened a file."""
    return sum(os.path.realpath(each) == str(path) for each in Path("/proc/self/fd").iterdir())


def test_a_forked_child_that_could_not_open_a_store_may_do_so_later(tmp_path: Path) -> None:
    path = filled(tmp_path / "profiles.sqlite3")
    store, whole = SqliteStore(path), path.read_bytes()

    def check() -> bool:
        path.write_bytes(b"what was measured" * 1000)
        with pytest.raises(StoreError, match="not a database"):
            store.count()
        path.write_bytes(whole)
        return store.count() > 0

    assert in_a_child(check)


def test_opening_a_store_does_not_change_it(tmp_path: Path) -> None:
    path = filled(tmp_path / "profiles.sqlite3")
    before = path.read_bytes()

    SqliteStore(path).close()

    assert path.read_bytes() == before


def test_an_empty_file_is_a_new_store(tmp_path: Path) -> None:
    path = tmp_path / "profiles.sqlite3"
    path.touch()

    assert _count(filled(path)) == 1


def _count(path: Path) -> int:
    with SqliteStore(path) as store:
        return store.count()


def test_a_path_may_hold_any_character(tmp_path: Path) -> None:
    path = tmp_path / "a b#c?d%41é" / ":memory:"

    filled(path)

    assert path.is_file()


def test_soft_facts_and_dates_are_kept_for_the_reader(tmp_path: Path) -> None:
    path = filled(tmp_path / "profiles.sqlite3")

    facts, date = query(path, "SELECT facts, date FROM environments JOIN records ON environment = id")

    assert json.loads(str(facts)) == an_environment().to_json()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", str(date))


def test_nothing_that_a_process_adds_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "profiles.sqlite3"
    names = [f"process {index}" for index in range(4)]

    writers = [a_writer(path, name, 50) for name in names]
    for writer in writers:
        writer.communicate()

    trials = [a_trial(f"{name}:{index}") for name in names for index in range(50)]
    with SqliteStore(path) as store:
        assert list(store.records(an_environment(), trials)) == trials


def test_a_killed_process_leaves_all_that_it_had_added(tmp_path: Path) -> None:
    path = tmp_path / "profiles.sqlite3"
    with a_writer(path, "killed", 1_000_000) as writer:
        assert writer.stdout is not None
        for _ in range(20):
            last = int(writer.stdout.readline())
        writer.kill()

    trials = [a_trial(f"killed:{index}") for index in range(last + 1)]
    with SqliteStore(path) as store:
        assert list(store.records(an_environment(), trials)) == trials


def test_a_write_that_a_crash_tore_is_undone(tmp_path: Path) -> None:
    path, crashed = filled(tmp_path / "profiles.sqlite3"), tmp_path / "crashed.sqlite3"

    copy_in_a_write(path, crashed)

    assert crashed.stat().st_size > path.stat().st_size
    assert _count(crashed) == 1


def test_who_reads_does_not_wait_for_who_writes(tmp_path: Path) -> None:
    path = filled(tmp_path / "profiles.sqlite3")
    with contextlib.closing(sqlite3.connect(path)) as writer:
        writer.execute("DELETE FROM records")  # not committed yet
        assert Path(f"{path}-journal").exists()

        with readable_store(path) as store:
            assert store.count() == 1
            with pytest.raises(StoreError, match="readonly"):
                store.add_records(an_environment(), [a_record(a_trial("another"))])


def test_a_journal_alone_is_no_store_to_read(tmp_path: Path) -> None:
    (tmp_path / "profiles.sqlite3-journal").write_bytes(b"left over")

    with pytest.raises(StoreError, match="there is no such file"):
        readable_store(tmp_path / "profiles.sqlite3")

    assert [each.name for each in tmp_path.iterdir()] == ["profiles.sqlite3-journal"]


def test_a_full_disk_is_told_and_loses_nothing(tmp_path: Path) -> None:
    path = filled(tmp_path / "profiles.sqlite3")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    more = [a_record(a_trial(f"more:{index}")) for index in range(100)]

    with SqliteStore(path) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, hard))
        try:
            with pytest.raises(
                StoreError, match=r"profiles\.sqlite3 cannot be used as a store: .*(disk|full)"
            ):
                store.add_records(an_environment(), more)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert store.count() == 1


def test_the_store_is_where_the_environment_variable_says(store_path: Path) -> None:
    assert default_path() == store_path


def test_the_environment_variable_may_name_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MUCUDNN_STORE", "~/profiles.sqlite3")

    assert default_path() == tmp_path / "profiles.sqlite3"


@pytest.mark.parametrize("value", ["", None])
def test_the_store_is_in_the_cache_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("MUCUDNN_STORE")
    if value is not None:
        monkeypatch.setenv("MUCUDNN_STORE", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    assert default_path() == tmp_path / "cache" / "mucudnn" / "profiles.sqlite3"


def test_no_name_opens_the_default_store(store_path: Path) -> None:
    with open_store() as store:
        assert isinstance(store, SteadfastStore)
    assert store_path.is_file()


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_opens_the_store_there(tmp_path: Path, kind: type[str] | type[Path]) -> None:
    with open_store(kind(filled(tmp_path / "mine.sqlite3"))) as store:
        assert store.count() == 1


def test_a_store_is_taken_as_it_is() -> None:
    store = MemoryStore()

    assert open_store(store) is store


@pytest.mark.parametrize("named", [str, Path, lambda _: None], ids=["text", "a path", "the default"])
def test_a_file_is_closed_by_whoever_opened_it_though_something_fails(
    named: Callable[[Path], StoreOption], store_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt), opened(named(store_path)) as store:
        raise KeyboardInterrupt

    with pytest.raises(StoreError, match="closed database"):
        store.count()


def test_a_store_that_was_passed_in_open_stays_open(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "profiles.sqlite3") as store:
        with opened(store) as found:
            assert found is store

        assert store.count() == 0


def test_everything_can_be_copied_into_another_store(tmp_path: Path) -> None:
    with SqliteStore(filled(tmp_path / "profiles.sqlite3")) as source:
        source.add_records(released.ENVIRONMENT, released.RECORDS)
        source.add_comparisons(released.ENVIRONMENT, [released.COMPARISON])
        target = MemoryStore()
        source.copy_into(target)

    trials = [record.trial for record in released.RECORDS]
    compared = target.comparison(released.ENVIRONMENT, released.COMPARISON.problem, released.COMPARISON.times)
    assert target.count() == 5
    assert tuple(target.records(released.ENVIRONMENT, trials).values()) == released.RECORDS
    assert compared == released.COMPARISON


def test_a_copy_writes_to_a_file_twice_however_much_an_environment_has(tmp_path: Path) -> None:
    statements: list[str] = []
    with (
        SqliteStore(tmp_path / "one.sqlite3") as source,
        SqliteStore(tmp_path / "two.sqlite3") as target,
    ):
        source.add_records(released.ENVIRONMENT, released.RECORDS)
        times = [{key: Measurement((span,))} for key in "ab" for span in (1, 2)]
        compared = [Comparison(released.PROBLEM, each, {}) for each in times]
        source.add_comparisons(released.ENVIRONMENT, compared)
        target._connection.set_trace_callback(statements.append)
        source.copy_into(target)
        target._connection.set_trace_callback(None)

        assert target.comparisons_of(released.ENVIRONMENT, released.PROBLEM) == [compared[0], compared[2]]
    assert statements.count("COMMIT") == 2


def test_a_copy_keeps_what_was_there(tmp_path: Path) -> None:
    (other,) = [a_record(a_trial("cpu:0"), first_span_ns=7)]
    target = MemoryStore()
    target.add_records(an_environment(), [other])

    with SqliteStore(filled(tmp_path / "profiles.sqlite3")) as source:
        source.copy_into(target)

    assert target.records(an_environment(), [a_trial("cpu:0")]) == {a_trial("cpu:0"): other}


def test_a_tilde_stands_for_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    with open_store("~/profiles.sqlite3") as store:
        assert isinstance(store, SteadfastStore)
        assert store.path == tmp_path / "profiles.sqlite3"


def test_a_tilde_of_an_unknown_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with open_store("~nobody-of-this-name/profiles.sqlite3") as store:
        assert isinstance(store, SteadfastStore)
        assert store.path == tmp_path / "~nobody-of-this-name" / "profiles.sqlite3"


def test_a_folder_that_cannot_be_made_gives_a_store_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "profiles.sqlite3"

    with pytest.warns(StoreWarning, match=f"What is measured now is not kept: {re.escape(str(path))} cannot"):
        store = open_store(path)

    assert isinstance(store, MemoryStore)
    assert store.count() == 0


def test_a_disk_that_fills_up_costs_what_is_measured_from_then_on_and_nothing_else(tmp_path: Path) -> None:
    path = filled(tmp_path / "profiles.sqlite3")
    new = [a_record(a_trial(f"{'new':1000}{number}")) for number in range(20)]
    file = SqliteStore(path)
    file._connection.execute("PRAGMA max_page_count = 1")  # no less than it has

    with SteadfastStore(file) as store:
        with pytest.warns(
            StoreWarning, match="^What is measured from now on is not kept: .* is full"
        ) as told:
            store.add_records(an_environment(), new)
        store.add_records(an_environment(), [a_record(a_trial("later"))])

        assert store.count() == 22
        assert len(store.records(an_environment(), [each.trial for each in new])) == 20
    assert len(told) == 1
    with SqliteStore(path) as kept:
        assert kept.count() == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [("", "got an empty name"), ("replay:xeon", "'replay:xeon': a recording is a backend")],
)
def test_what_names_no_file_is_no_store(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)

    for use in (
        lambda store: open_store(store),
        lambda store: mucudnn.tune(a_chain(), a_batch(), "1MiB", store=store, progress=False),
        lambda store: mucudnn.optimize(a_chain(), "1MiB", store=store),
        lambda store: mucudnn.autotune("1MiB", store=store),
    ):
        with pytest.raises(StoreError, match=message):
            use(name)
    monkeypatch.setenv("MUCUDNN_STORE", name)
    if name:  # else the variable counts as not set
        for opening in (open_store, lambda: readable_store(default_path())):
            with pytest.raises(StoreError, match=message):
                opening()
    assert [*tmp_path.iterdir()] == []


def test_what_is_in_memory_is_told_from_what_is_in_a_file(tmp_path: Path) -> None:
    memory, file = MemoryStore(), SqliteStore(filled(tmp_path / "profiles.sqlite3"))

    with SteadfastStore(file) as store:
        assert (in_memory(memory), in_memory(file), in_memory(store)) == (memory, None, None)
        file._connection.execute("PRAGMA query_only = ON")
        with pytest.warns(StoreWarning, match="not kept"):
            store.add_records(an_environment(), [a_record(a_trial("new"))])
        moved = in_memory(store)

    assert isinstance(moved, MemoryStore)
    assert moved.count() == 2


@pytest.fixture
def shelf() -> Iterator[Path]:
    """A store of one record in a read-only folder; root, who may write anywhere, becomes nobody meanwhile."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:  # unlike the usual one, it can be opened to others
        path = filled(Path(folder) / "profiles.sqlite3")
        path.parent.chmod(0o555)
        os.seteuid(user or NOBODY)
        try:
            yield path
        finally:
            os.seteuid(user)
            path.parent.chmod(0o755)


def _set_mode(path: Path, mode: int) -> None:
    user = os.geteuid()
    os.seteuid(path.stat().st_uid)
    path.chmod(mode)
    os.seteuid(user)


@pytest.mark.parametrize("mode", [0o444, 0o666])
def test_a_store_on_a_read_only_disk_is_still_read(shelf: Path, mode: int) -> None:
    _set_mode(shelf, mode)
    before = shelf.read_bytes()

    with pytest.warns(StoreWarning, match=r"profiles\.sqlite3 cannot be used as a store: "):
        store = open_store(shelf)

    store.add_records(an_environment(), [a_record(a_trial("new"))])
    assert list(store.records(an_environment(), [a_trial("cpu:0"), a_trial("new")])) == [
        a_trial("cpu:0"),
        a_trial("new"),
    ]
    assert shelf.read_bytes() == before


def test_a_store_that_may_not_be_read_gives_an_empty_one(shelf: Path) -> None:
    _set_mode(shelf, 0)

    with pytest.warns(StoreWarning, match="What is measured now is not kept"):
        store = open_store(shelf)

    assert store.count() == 0


def test_a_store_in_a_folder_that_may_not_be_entered_gives_an_empty_one(shelf: Path) -> None:
    _set_mode(shelf.parent, 0)

    with pytest.warns(StoreWarning, match=r"What is measured now is not kept: .*: .* Permission denied"):
        store = open_store(shelf)

    assert store.count() == 0
    with pytest.raises(StoreError, match=r"cannot be used as a store: .* Permission denied"):
        readable_store(shelf)


def test_a_store_whose_name_is_too_long_gives_an_empty_one(tmp_path: Path) -> None:
    with pytest.warns(StoreWarning, match="What is measured now is not kept: .* File name too long"):
        store = open_store(tmp_path / ("x" * 300))

    assert store.count() == 0


def test_what_is_wrong_with_a_store_is_told_though_its_journal_cannot_be_looked_for(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250)  # of which a journal's name is too long
    path.write_bytes(b"no database" * 1000)

    with pytest.raises(StoreError, match="file is not a database"):
        readable_store(path)


def test_a_name_with_a_nul_is_none(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="a file's name has no NUL"):
        open_store(f"{tmp_path}/profiles\0.sqlite3")

    assert [*tmp_path.iterdir()] == []


def test_an_empty_file_on_a_read_only_disk_gives_an_empty_store(shelf: Path) -> None:
    _set_mode(shelf, 0o666)
    os.truncate(shelf, 0)

    with pytest.warns(StoreWarning, match="What is measured now is not kept"):
        store = open_store(shelf)

    assert store.count() == 0


def test_a_damaged_store_on_a_read_only_disk_is_refused(shelf: Path) -> None:
    _set_mode(shelf, 0o666)
    shelf.write_text("what was measured\n" * 1000)

    with pytest.raises(StoreError, match="file is not a database"):
        open_store(shelf)


def test_a_read_only_store_knows_what_others_add_meanwhile(tmp_path: Path) -> None:
    path = filled(tmp_path / "profiles.sqlite3")
    with SqliteStore(path, read_only=True) as store:
        filled(path, 3)

        assert store.count() == 3


def test_an_empty_file_holds_nothing_to_read(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()

    with pytest.raises(StoreError, match="empty holds nothing to read"):
        SqliteStore(tmp_path / "empty", read_only=True)


def test_a_read_only_store_refuses_what_is_new(tmp_path: Path) -> None:
    path = filled(tmp_path / "profiles.sqlite3")

    with SqliteStore(path, read_only=True) as store, pytest.raises(StoreError, match="readonly database"):
        store.add_records(an_environment(), [a_record()])


@pytest.mark.parametrize("lock", ["IMMEDIATE", "EXCLUSIVE"])
def test_a_file_that_somebody_else_keeps_locked_does_not_end_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: str
) -> None:
    monkeypatch.setattr(connections, "_BUSY_TIMEOUT_S", 0.05)
    path, new = filled(tmp_path / "profiles.sqlite3"), a_trial("new")

    def look_and_add(store: Store) -> dict[Trial, Record]:
        known = store.records(an_environment(), [new])  # which a writer that has not begun to write allows
        store.add_records(an_environment(), [a_record(new)])
        return known

    with open_store(path) as store, contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute(f"BEGIN {lock}")

        with pytest.warns(StoreWarning, match="not kept: .* database is locked"):
            known = look_and_add(store)

        assert known == {}
        assert store.records(an_environment(), [new]) == {new: a_record(new)}


def test_raw_spans_are_kept_in_order(tmp_path: Path) -> None:
    path = filled(tmp_path / "profiles.sqlite3")

    (times,) = query(path, "SELECT times FROM records")

    assert json.loads(str(times)) == {"spans_ns": [51_000, 50_000, 52_000], "calls": 4, "converged": True}
    assert a_record().times == Measurement((51_000, 50_000, 52_000), calls=4)


def test_a_record_that_takes_the_place_of_another_has_a_date_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "profiles.sqlite3"
    with SqliteStore(path) as store:
        store.add_records(an_environment(), [an_over_limit_record(100)])
        execute(path, "UPDATE records SET date = 'once'")
        store.add_records(an_environment(), [an_over_limit_record(200)])

    assert query(path, "SELECT limit_bytes, date = 'once' FROM records") == (200, 0)


def test_a_limit_beyond_what_a_file_can_hold_is_kept_as_the_largest_that_it_can(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "profiles.sqlite3") as store:
        store.add_records(an_environment(), [an_over_limit_record(LARGEST + 1)])
        (record,) = store.records(an_environment(), [a_trial()]).values()

    assert record.limit_bytes == LARGEST


def _through_pickle(store: Store) -> Store:
    copied: Store = pickle.loads(pickle.dumps(store))
    return copied


COPYING = pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, _through_pickle])


@COPYING
def test_a_copy_of_a_store_in_a_file_is_the_same_file(tmp_path: Path, way: Callable[[Store], Store]) -> None:
    with SqliteStore(filled(tmp_path / "profiles.sqlite3")) as store, way(store) as copied:
        copied.add_records(an_environment(), [a_record(a_trial("new"))])

        assert isinstance(copied, SqliteStore)
        assert (copied.path, store.count()) == (store.path, 2)


def test_a_copy_of_a_read_only_store_is_read_only(tmp_path: Path) -> None:
    path = filled(tmp_path / "profiles.sqlite3")

    with (
        SqliteStore(path, read_only=True) as store,
        copy.copy(store) as copied,
        pytest.raises(StoreError, match="readonly database"),
    ):
        copied.add_records(an_environment(), [a_record()])


@pytest.mark.parametrize(
    "made",
    [
        SqliteStore,
        lambda path: copy.copy(SqliteStore(path)),
        lambda _: SqliteStore(former.PATH, read_only=True),  # which is a copy in memory
    ],
)
def test_a_store_in_a_file_closes_itself_when_it_is_forgotten(
    tmp_path: Path, made: Callable[[Path], SqliteStore]
) -> None:
    store = made(filled(tmp_path / "profiles.sqlite3"))
    connection = store._connection
    del store
    gc.collect()

    with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
        connection.execute("SELECT 1")


def test_a_copy_of_a_store_whose_file_is_no_store_any_more_is_refused(tmp_path: Path) -> None:
    path = filled(tmp_path / "profiles.sqlite3")
    with SqliteStore(path) as store:
        pickled = pickle.dumps(store)
    path.write_text("what was measured\n" * 1000)

    with pytest.raises(StoreError, match="file is not a database"):
        pickle.loads(pickled)


@COPYING
def test_a_copy_of_a_steadfast_store_goes_on_where_it_was(
    tmp_path: Path, way: Callable[[Store], Store]
) -> None:
    store = SteadfastStore(SqliteStore(filled(tmp_path / "profiles.sqlite3")))

    with store, way(store) as kept:
        kept.add_records(an_environment(), [a_record(a_trial("new"))])
        assert isinstance(kept, SteadfastStore)
        assert (kept.is_kept, store.count()) == (True, 2)
        store._file._connection.execute("PRAGMA query_only = ON")
        with pytest.warns(StoreWarning, match="not kept"):
            store.add_records(an_environment(), [a_record(a_trial("newer"))])
        moved = way(store)
        assert isinstance(moved, SteadfastStore)
        assert (moved.is_kept, moved.count()) == (False, 3)
        moved.close()


@COPYING
def test_a_copy_of_a_store_in_memory_holds_the_same_and_then_goes_its_own_way(
    way: Callable[[Store], Store],
) -> None:
    store = MemoryStore()
    store.add_records(an_environment(), [a_record()])
    store.add_comparisons(released.ENVIRONMENT, [released.COMPARISON])

    copied = way(store)
    copied.add_records(an_environment(), [a_record(a_trial("new"))])

    compared = copied.comparison(released.ENVIRONMENT, released.COMPARISON.problem, released.COMPARISON.times)
    assert copied.records(an_environment(), [a_trial()]) == {a_trial(): a_record()}
    assert compared == released.COMPARISON
    assert (store.count(), copied.count()) == (1, 2)


def test_without_a_home_nothing_is_kept_and_tuning_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(*_: object, **__: object) -> Path:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.delenv("MUCUDNN_STORE", raising=False)
    monkeypatch.setattr(platformdirs, "user_cache_path", homeless)

    with pytest.warns(StoreWarning, match="What is measured now is not kept"):
        plan = mucudnn.tune(a_chain(), a_batch(), "1MiB", policy="undivided", progress=False)

    assert plan.sites
