"""What was refused when a plan was made."""

from pathlib import Path

import pytest

from mucudnn.profile import RefusalKind, Trial
from mucudnn.report import refusals_of, render_refusals
from mucudnn.store import SqliteStore
from tests.examples import a_plan, a_problem, a_record, a_trial, an_environment, an_over_limit_record


@pytest.fixture
def store(tmp_path: Path) -> SqliteStore:
    return SqliteStore(tmp_path / "store")


@pytest.mark.parametrize(("limit_bytes", "holds"), [(2047, False), (2048, True), (2**20, True)])
def test_a_refusal_for_size_holds_up_to_its_limit(store: SqliteStore, limit_bytes: int, holds: bool) -> None:
    plan = a_plan(limit_bytes=2048)
    store.add_records(an_environment(), [an_over_limit_record(limit_bytes, a_trial(whole=True))])

    (found,) = refusals_of(plan, store).values()

    assert [each.kind for each in found] == [RefusalKind.OVER_LIMIT] * holds


def test_what_was_refused_as_a_whole_says_nothing_of_a_part(store: SqliteStore) -> None:
    elsewhere = Trial(a_problem().part(16), "cpu:direct", whole=True)
    store.add_records(
        an_environment(), [a_record(a_trial(whole=True)), an_over_limit_record(2**20, elsewhere)]
    )

    assert refusals_of(a_plan(), store) == {a_problem(): []}


def test_where_nothing_was_refused_that_is_said(store: SqliteStore) -> None:
    store.add_records(an_environment(), [a_record(a_trial(whole=True))])

    assert render_refusals(a_plan(), refusals_of(a_plan(), store)).endswith("\n  Nothing.")
