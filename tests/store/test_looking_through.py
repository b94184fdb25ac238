"""What a file holds is listed: its environments, and the problems and records of one."""

from pathlib import Path

from mucudnn.profile import Comparison, Measurement
from mucudnn.store import SqliteStore
from tests.examples import a_problem, a_record, a_trial, an_environment


def test_a_store_lists_environments_in_the_order_of_adding(tmp_path: Path) -> None:
    first, second = an_environment(backend="b"), an_environment(backend="a")
    with SqliteStore(tmp_path / "store") as store:
        for environment in (first, second, first):
            store.add_records(environment, [a_record()])

        assert [each.backend for each in store.environments()] == ["b", "a"]


def test_soft_facts_of_an_environment_stay_those_of_its_first_writer(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "store") as store:
        for load in ("0.3", "7.5"):
            store.add_records(an_environment(soft={"load": load}), [a_record()])

        assert [each.soft for each in store.environments()] == [{"load": "0.3"}]


def test_all_records_of_one_problem_in_one_environment_are_found(tmp_path: Path) -> None:
    records = [a_record(a_trial("cpu:a")), a_record(a_trial("cpu:a", whole=True)), a_record(a_trial("cpu:b"))]
    with SqliteStore(tmp_path / "store") as store:
        store.add_records(an_environment(), [*records, a_record(a_trial(batch=7))])
        store.add_records(an_environment(backend="other"), [a_record(a_trial("cpu:c"))])

        assert store.records_of(an_environment(), a_problem()) == records


def test_the_problems_of_whole_mini_batches_in_one_environment_are_found(tmp_path: Path) -> None:
    whole = [a_record(a_trial(name, whole=True, batch=n)) for name, n in (("a", 8), ("b", 8), ("a", 4))]
    with SqliteStore(tmp_path / "store") as store:
        store.add_records(an_environment(), [*whole, a_record(a_trial(batch=2))])
        store.add_records(an_environment(backend="other"), [a_record(a_trial(whole=True, batch=16))])

        assert {each.batch for each in store.problems_of(an_environment())} == {8, 4}
        assert len(store.problems_of(an_environment())) == 2


def test_comparisons_are_listed_in_the_order_of_adding_and_each_by_its_base_first(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "store") as store:
        for keys in ("ba", "cd", "ab", "ac"):
            comparison = Comparison(a_problem(), {key: Measurement((1,)) for key in keys}, {})
            store.add_comparisons(an_environment(), [comparison])

        found = store.comparisons_of(an_environment(), a_problem())

        assert ["".join(each.times) for each in found] == ["ba", "cd", "ac"]
