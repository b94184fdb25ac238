"""What was refused when a plan was made."""

import dataclasses
from pathlib import Path

import pytest

from mucudnn.choices import Mode
from mucudnn.plan import ConvSite
from mucudnn.problem import ConvOp
from mucudnn.profile import RefusalKind, Trial
from mucudnn.report import describe_shape, refusals_as_json, refusals_of, render_refusals
from mucudnn.store import SqliteStore
from tests.examples import a_plan, a_problem, a_record, a_trial, an_environment, an_over_limit_record

ROOMY = a_plan(limit_bytes=2**20)


@pytest.fixture
def store(tmp_path: Path) -> SqliteStore:
    return SqliteStore(tmp_path / "store")


@pytest.mark.parametrize(("limit_bytes", "holds"), [(2047, False), (2048, True), (2**20, True)])
def test_a_refusal_for_size_holds_up_to_its_limit(store: SqliteStore, limit_bytes: int, holds: bool) -> None:
    plan = a_plan(limit_bytes=2048)
    store.add_records(an_environment(), [an_over_limit_record(limit_bytes, a_trial(whole=True))])

    (found,) = refusals_of(plan, store).values()

    assert [each.kind for each in found] == [RefusalKind.OVER_LIMIT] * holds


@pytest.mark.parametrize(("mode", "expected"), [(Mode.SHARING, ["cpu:direct@16*2"]), (Mode.REUSE, [])])
def test_a_division_refused_for_its_room_is_of_matter_in_sharing_mode_alone(
    store: SqliteStore, mode: Mode, expected: list[str]
) -> None:
    plan = a_plan(mode=mode, limit_bytes=2048)
    trials = [a_trial("cpu:direct@16*2", whole=True), a_trial("cpu:direct", whole=True)]
    store.add_records(an_environment(), [an_over_limit_record(1500, trial) for trial in trials])

    (found,) = refusals_of(plan, store).values()

    assert found is not None
    assert [each.algorithm for each in found] == expected


def test_what_was_refused_as_a_whole_says_nothing_of_a_part(store: SqliteStore) -> None:
    elsewhere = Trial(a_problem().part(16), "cpu:direct", whole=True)
    store.add_records(
        an_environment(), [a_record(a_trial(whole=True)), an_over_limit_record(2**20, elsewhere)]
    )

    assert refusals_of(ROOMY, store) == {a_problem(): []}


def test_what_was_measured_and_is_too_large_for_the_plan_is_refused(store: SqliteStore) -> None:
    record = dataclasses.replace(a_record(a_trial(whole=True)), workspace_bytes=4096)
    store.add_records(an_environment(), [record])

    (found,) = refusals_of(a_plan(limit_bytes=2048), store).values()

    assert found is not None
    assert [each.kind for each in found] == [RefusalKind.OVER_LIMIT]
    assert found[0].reason == "it needs 4096 bytes (0.0039 MiB), the limit is 2048 bytes (0.002 MiB)"


def test_what_was_measured_and_is_less_exact_than_the_plan_allows_is_refused(store: SqliteStore) -> None:
    trials = [a_trial("cpu:winograd4", whole=True), a_trial("cpu:aten", whole=True)]
    records = [dataclasses.replace(a_record(trial), error=3e-6) for trial in trials]
    store.add_records(an_environment(), records)

    (found,) = refusals_of(dataclasses.replace(ROOMY, max_error=2e-6), store).values()

    assert found is not None
    assert [(each.algorithm, each.kind) for each in found] == [("cpu:winograd4", RefusalKind.WRONG)]
    assert refusals_of(ROOMY, store) == {a_problem(): []}


def test_a_problem_that_the_store_does_not_know_is_not_said_to_have_no_refusals(store: SqliteStore) -> None:
    known, unknown = a_plan().assignments[0], a_problem(out_channels=7)
    other = dataclasses.replace(known, site=ConvSite("other", known.site.op), problem=unknown)
    plan = dataclasses.replace(ROOMY, assignments=(known, other))
    store.add_records(an_environment(), [a_record(a_trial(whole=True))])

    found = refusals_of(plan, store)

    assert found[unknown] is None
    assert render_refusals(plan, found).endswith("\n  Not known to this store.")
    assert refusals_as_json(plan, found) == {
        "refusals": [],
        "not_known": [{"path": "other", "op": "fprop", "variant": 0}],
    }


def test_where_nothing_was_refused_that_is_said(store: SqliteStore) -> None:
    store.add_records(an_environment(), [a_record(a_trial(whole=True))])

    assert render_refusals(ROOMY, refusals_of(ROOMY, store)).endswith("\n\nNothing.")
    other = {a_problem(out_channels=7): None}
    assert "\n\nNothing for 1 of 2 problems.\n\n" in render_refusals(ROOMY, {a_problem(): [], **other})


def test_lines_are_as_wide_as_asked_for(store: SqliteStore) -> None:
    store.add_records(an_environment(), [a_record(a_trial(whole=True))])
    found = refusals_of(a_plan(limit_bytes=16), store)

    narrow, wide = (render_refusals(a_plan(limit_bytes=16), found, width).splitlines() for width in (60, 118))

    assert max(map(len, narrow)) <= 60 < max(map(len, wide)) <= 118
    assert " ".join(narrow).split() == " ".join(wide).split()


def test_a_transposed_convolution_has_the_shapes_of_its_layer_unless_others_have_the_same_problem() -> None:
    rows = tuple(
        dataclasses.replace(ROOMY.assignments[0], site=ConvSite(path, ConvOp.FPROP)) for path in "ab"
    )
    texts = [
        render_refusals(
            dataclasses.replace(ROOMY, assignments=rows, transposed=transposed), {a_problem(): None}
        )
        for transposed in (("a", "b"), ("a",))
    ]

    assert f"a fprop, b fprop  {describe_shape(a_problem(), is_transposed=True)}" in texts[0]
    assert f"a fprop, b fprop  {describe_shape(a_problem())}" in texts[1]
