"""What every store must do, whatever it is made of."""

import dataclasses
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mucudnn.problem import ConvProblem
from mucudnn.profile import Comparison, Measurement, Record, Refusal, RefusalKind, Trial
from mucudnn.sizes import LARGEST
from mucudnn.store import MemoryStore, SqliteStore, Store
from mucudnn.store.steadfast import SteadfastStore
from tests.examples import (
    DECIDING_CHANGES,
    OTHER_VALUES,
    a_problem,
    a_record,
    a_trial,
    an_environment,
    an_over_limit_record,
)


class ReopenedStore(SqliteStore):
    """An SQLite store of which every look-up is made by another store, which opens the file anew."""

    def records(self, *args: Any) -> dict[Trial, Record]:
        with SqliteStore(self.path) as store:
            return store.records(*args)

    def comparison(self, *args: Any) -> Comparison | None:
        with SqliteStore(self.path) as store:
            return store.comparison(*args)

    def count(self) -> int:
        with SqliteStore(self.path) as store:
            return store.count()


def _on_a_full_disk(folder: Path) -> Store:
    file = SqliteStore(folder / "profiles.sqlite3")
    file._connection.execute("PRAGMA query_only = ON")  # whatever is written is refused
    return SteadfastStore(file)


pytestmark = pytest.mark.filterwarnings("ignore:What is measured from now on is not kept")

KINDS: dict[str, Callable[[Path], Store]] = {
    "memory": lambda _: MemoryStore(),
    "sqlite": lambda folder: SqliteStore(folder / "profiles.sqlite3"),
    "sqlite reopened": lambda folder: ReopenedStore(folder / "profiles.sqlite3"),
    "steadfast": lambda folder: SteadfastStore(SqliteStore(folder / "profiles.sqlite3")),
    "full disk": _on_a_full_disk,
}


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with KINDS[request.param](tmp_path) as store:
        yield store


def test_an_empty_store_knows_nothing(store: Store) -> None:
    assert store.records(an_environment(), [a_trial()]) == {}
    assert store.comparison(an_environment(), a_problem(), ["a"]) is None
    assert store.count() == 0


def test_a_record_is_returned_as_it_was_added(store: Store) -> None:
    store.add_records(an_environment(), [a_record()])

    assert store.records(an_environment(), [a_trial()]) == {a_trial(): a_record()}


_measurements = st.builds(
    Measurement,
    st.lists(st.integers(1, 2**62), min_size=1).map(tuple),
    calls=st.integers(1, 2**16),
    converged=st.booleans(),
    others=st.just(0.0) | st.floats(0, 1000),
)


@given(
    workspace_bytes=st.none() | st.integers(0, LARGEST),
    error=st.none() | st.floats(min_value=0, allow_nan=False),
    times=st.none() | _measurements,
    setup=st.none() | _measurements,
    limit_bytes=st.none() | st.integers(0, LARGEST),
    refusal=st.none() | st.tuples(st.sampled_from(RefusalKind), st.text(st.characters(codec="utf-8"))),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
def test_every_field_of_a_record_survives(store: Store, refusal: Any, **fields: Any) -> None:
    trial = a_trial(algorithm=f"cpu:{store.count()}")  # a trial that this store has not seen
    refused = refusal and Refusal(trial.algorithm, trial.problem.batch, *refusal)
    record = Record(trial, refusal=refused, **fields)

    store.add_records(an_environment(), [record])

    assert store.records(an_environment(), [trial]) == {trial: record}


def test_an_error_that_is_no_number_stays_none(store: Store) -> None:
    store.add_records(an_environment(), [dataclasses.replace(a_record(), error=math.nan)])

    (record,) = store.records(an_environment(), [a_trial()]).values()

    assert record.error is not None
    assert math.isnan(record.error)


def test_a_limit_beyond_all_memory_can_be_kept(store: Store) -> None:
    store.add_records(an_environment(), [dataclasses.replace(a_record(), limit_bytes=10**30)])

    (record,) = store.records(an_environment(), [a_trial()]).values()

    assert record.limit_bytes is not None
    assert record.limit_bytes >= LARGEST


def test_a_look_up_answers_in_the_order_of_the_trials(store: Store) -> None:
    trials = [a_trial(algorithm) for algorithm in ("c", "unknown", "a", "b")]
    store.add_records(an_environment(), [a_record(a_trial(algorithm)) for algorithm in "abc"])

    found = store.records(an_environment(), iter(trials))

    assert [trial.algorithm for trial in found] == ["c", "a", "b"]


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(ConvProblem)])
def test_each_field_of_a_problem_alone_makes_a_miss(store: Store, name: str) -> None:
    store.add_records(an_environment(), [a_record()])

    assert store.records(an_environment(), [a_trial(**{name: OTHER_VALUES[name]})]) == {}


@pytest.mark.parametrize("trial", [a_trial(algorithm="cpu:fft"), a_trial(whole=True)])
def test_another_algorithm_or_role_makes_a_miss(store: Store, trial: Trial) -> None:
    store.add_records(an_environment(), [a_record()])

    assert store.records(an_environment(), [trial]) == {}


@pytest.mark.parametrize("name", DECIDING_CHANGES)
def test_each_deciding_fact_alone_makes_a_miss(store: Store, name: str) -> None:
    store.add_records(an_environment(), [a_record()])

    assert store.records(an_environment(**{name: DECIDING_CHANGES[name]}), [a_trial()]) == {}


def test_other_soft_facts_make_a_hit(store: Store) -> None:
    store.add_records(an_environment(soft={"load": "0.1"}), [a_record()])

    assert store.records(an_environment(soft={"load": "9.9"}), [a_trial()]) == {a_trial(): a_record()}


def test_the_first_writer_wins(store: Store) -> None:
    store.add_records(an_environment(), [a_record(first_span_ns=1)])
    store.add_records(an_environment(), [a_record(first_span_ns=2)])

    assert store.records(an_environment(), [a_trial()]) == {a_trial(): a_record(first_span_ns=1)}


def test_the_first_of_one_call_wins_too(store: Store) -> None:
    store.add_records(an_environment(), [a_record(first_span_ns=1), a_record(first_span_ns=2)])

    assert store.records(an_environment(), [a_trial()]) == {a_trial(): a_record(first_span_ns=1)}


def test_a_refusal_for_size_is_returned_with_its_limit(store: Store) -> None:
    store.add_records(an_environment(), [an_over_limit_record(1000)])

    assert store.records(an_environment(), [a_trial()]) == {a_trial(): an_over_limit_record(1000)}


@pytest.mark.parametrize("limit_bytes", [1001, None])
def test_a_refusal_for_size_gives_way_to_a_larger_limit(store: Store, limit_bytes: int | None) -> None:
    measured = dataclasses.replace(a_record(), limit_bytes=limit_bytes)
    store.add_records(an_environment(), [an_over_limit_record(1000)])

    store.add_records(an_environment(), [measured])

    assert store.records(an_environment(), [a_trial()]) == {a_trial(): measured}
    assert store.count() == 1


def test_a_refusal_under_the_largest_limit_gives_way_to_none(store: Store) -> None:
    measured = dataclasses.replace(a_record(), limit_bytes=None)
    store.add_records(an_environment(), [an_over_limit_record(LARGEST), measured])

    assert store.records(an_environment(), [a_trial()]) == {a_trial(): measured}


def test_a_refusal_for_size_gives_way_to_one_under_a_larger_limit(store: Store) -> None:
    store.add_records(an_environment(), [an_over_limit_record(1000), an_over_limit_record(1001)])

    assert store.records(an_environment(), [a_trial()]) == {a_trial(): an_over_limit_record(1001)}


@pytest.mark.parametrize("limit_bytes", [999, 1000])
def test_a_refusal_for_size_stays_under_no_larger_limit(store: Store, limit_bytes: int) -> None:
    store.add_records(an_environment(), [an_over_limit_record(1000)])

    store.add_records(an_environment(), [dataclasses.replace(a_record(), limit_bytes=limit_bytes)])

    assert store.records(an_environment(), [a_trial()]) == {a_trial(): an_over_limit_record(1000)}


def test_a_refusal_for_size_without_a_limit_stays(store: Store) -> None:
    store.add_records(an_environment(), [an_over_limit_record(None), a_record()])

    assert store.records(an_environment(), [a_trial()]) == {a_trial(): an_over_limit_record(None)}


@pytest.mark.parametrize("kind", [RefusalKind.WRONG, RefusalKind.FAILED])
def test_a_refusal_for_another_reason_stays(store: Store, kind: RefusalKind) -> None:
    refused = Record(a_trial(), refusal=Refusal("cpu:direct", 32, kind, "it is no good."), limit_bytes=1)
    store.add_records(an_environment(), [refused])

    store.add_records(an_environment(), [a_record()])

    assert store.records(an_environment(), [a_trial()]) == {a_trial(): refused}


def test_count_is_that_of_all_environments(store: Store) -> None:
    store.add_records(an_environment(), [a_record(), a_record(a_trial("cpu:fft"))])
    store.add_records(an_environment(backend="cudnn"), [a_record()])

    assert store.count() == 3


def test_records_that_cannot_all_be_listed_are_not_added(store: Store) -> None:
    def records() -> Iterator[Record]:
        yield a_record()
        raise MemoryError("out of memory")

    with pytest.raises(MemoryError, match="out of memory"):
        store.add_records(an_environment(), records())
    assert store.count() == 0


def _comparison(**spans_ns: int) -> Comparison:
    return Comparison(
        a_problem(),
        times={key: Measurement((span, span + 1), calls=2) for key, span in spans_ns.items()},
        workspaces={key: span * 10 for key, span in spans_ns.items()},
    )


def test_what_takes_the_place_of_a_refusal_for_size_brings_all_that_it_says(store: Store) -> None:
    record = dataclasses.replace(
        a_record(), error=1e-7, setup=Measurement((7,)), workspace_bytes=5, is_deterministic=False
    )
    store.add_records(an_environment(), [an_over_limit_record(100)])
    store.add_records(an_environment(), [record])

    assert store.records(an_environment(), [a_trial()]) == {a_trial(): record}


def test_a_comparison_is_returned_as_it_was_added_in_its_order(store: Store) -> None:
    store.add_comparisons(an_environment(), [_comparison(b=1, a=2)])

    found = store.comparison(an_environment(), a_problem(), ["a", "b"])

    assert found == _comparison(b=1, a=2)
    assert list(found.times) == ["b", "a"]


def test_several_comparisons_are_added_at_once(store: Store) -> None:
    store.add_comparisons(an_environment(), iter([_comparison(a=1), _comparison(a=2, b=3), _comparison(a=4)]))

    assert store.comparison(an_environment(), a_problem(), ["a"]) == _comparison(a=1)
    assert store.comparison(an_environment(), a_problem(), ["a", "b"]) == _comparison(a=2, b=3)


def test_of_comparisons_that_cannot_all_be_added_none_is(store: Store) -> None:
    def broken() -> Iterator[Comparison]:
        yield _comparison(a=1)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        store.add_comparisons(an_environment(), broken())

    assert store.comparison(an_environment(), a_problem(), ["a"]) is None


def test_a_comparison_without_some_workspace_can_be_kept(store: Store) -> None:
    comparison = dataclasses.replace(_comparison(a=1, b=2), workspaces={"b": 5})
    store.add_comparisons(an_environment(), [comparison])

    assert store.comparison(an_environment(), a_problem(), ["a", "b"]) == comparison


@pytest.mark.parametrize("keys", [["a"], ["a", "b", "c"], ["a", "c"], []])
def test_a_comparison_answers_for_exactly_its_divisions(store: Store, keys: list[str]) -> None:
    store.add_comparisons(an_environment(), [_comparison(a=1, b=2)])

    assert store.comparison(an_environment(), a_problem(), keys) is None


def test_a_comparison_is_found_however_often_its_divisions_are_named(store: Store) -> None:
    store.add_comparisons(an_environment(), [_comparison(a=1, b=2)])

    assert store.comparison(an_environment(), a_problem(), ["a", "b", "a"]) == _comparison(a=1, b=2)


def test_a_comparison_answers_for_its_problem_and_environment_only(store: Store) -> None:
    store.add_comparisons(an_environment(), [_comparison(a=1)])

    assert store.comparison(an_environment(), a_problem(batch=31), ["a"]) is None
    assert store.comparison(an_environment(backend="cudnn"), a_problem(), ["a"]) is None


def test_the_first_comparison_of_the_same_divisions_stays(store: Store) -> None:
    store.add_comparisons(an_environment(), [_comparison(a=1, b=2)])
    store.add_comparisons(an_environment(), [_comparison(b=3, a=4)])

    assert store.comparison(an_environment(), a_problem(), ["a", "b"]) == _comparison(a=1, b=2)


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_forgotten_can_be_measured_anew(store: Store, whole: bool) -> None:
    trial, other = a_trial(whole=whole), a_trial(whole=not whole)
    store.add_records(an_environment(), [a_record(trial, first_span_ns=1), a_record(other, first_span_ns=1)])
    store.add_comparisons(an_environment(), [_comparison(a=1, b=2)])

    store.forget(an_environment(), iter([a_problem()]), whole=whole)

    known = store.records(an_environment(), [trial, other])
    assert known == {other: a_record(other, first_span_ns=1)}  # in the other role
    assert (store.comparison(an_environment(), a_problem(), ["a", "b"]) is None) is whole
    store.add_records(an_environment(), [a_record(trial, first_span_ns=2)])
    assert store.records(an_environment(), [trial]) == {trial: a_record(trial, first_span_ns=2)}
    if whole:
        store.add_comparisons(an_environment(), [_comparison(a=3, b=4)])
        assert store.comparison(an_environment(), a_problem(), ["a", "b"]) == _comparison(a=3, b=4)


def test_other_problems_and_environments_are_not_forgotten(store: Store) -> None:
    other, trial = an_environment(backend="cudnn"), a_trial(whole=True)
    for environment in (an_environment(), other):
        store.add_records(environment, [a_record(trial)])
        store.add_comparisons(environment, [_comparison(a=1)])

    store.forget(an_environment(), [a_problem(batch=31)], whole=True)
    store.forget(other, [a_problem()], whole=True)
    store.forget(an_environment(backend="nowhere"), [a_problem()], whole=True)

    assert store.records(an_environment(), [trial]) == {trial: a_record(trial)}
    assert store.comparison(an_environment(), a_problem(), ["a"]) == _comparison(a=1)
    assert store.records(other, [trial]) == {}
    assert store.comparison(other, a_problem(), ["a"]) is None


def test_comparisons_of_other_divisions_stand_side_by_side(store: Store) -> None:
    store.add_comparisons(an_environment(), [_comparison(a=1, b=2)])
    store.add_comparisons(an_environment(), [_comparison(a=3)])

    assert store.comparison(an_environment(), a_problem(), ["a"]) == _comparison(a=3)


def test_nothing_that_a_thread_adds_is_lost(store: Store) -> None:
    def add(thread: int) -> None:
        for index in range(10):
            store.add_records(an_environment(), [a_record(a_trial(f"cpu:{thread}-{index}"))])

    threads = [threading.Thread(target=add, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert store.count() == 40


def test_closing_again_does_nothing(store: Store) -> None:
    store.close()
    store.close()
