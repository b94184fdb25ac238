"""Which records still answer under another limit."""

import dataclasses

import pytest

from mucudnn.profile import Record, Refusal, RefusalKind
from mucudnn.profiling.trials import is_settled
from tests.examples import a_record, a_trial, an_over_limit_record


def _wrong() -> Record:
    refusal = Refusal(
        "cpu:direct", 32, RefusalKind.WRONG, "its relative error is 1.0e+00, the bound is 1e-06"
    )
    return dataclasses.replace(a_record(), times=None, refusal=refusal, limit_bytes=1)


@pytest.mark.parametrize("record", [a_record(a_trial()), _wrong()])
def test_what_was_measured_or_is_wrong_answers_under_every_limit(record: Record) -> None:
    assert is_settled(record, 2**40)


@pytest.mark.parametrize(("limit_bytes", "expected"), [(999, True), (1000, True), (1001, False)])
def test_a_refusal_for_size_answers_up_to_its_own_limit(limit_bytes: int, expected: bool) -> None:
    assert is_settled(an_over_limit_record(1000), limit_bytes) is expected


@pytest.mark.parametrize("record", [None, an_over_limit_record(None)])
def test_no_record_and_a_refusal_without_its_limit_answer_nothing(record: Record | None) -> None:
    assert not is_settled(record, 0)
