"""Which records still answer under another limit, and what fits as it was seen."""

import dataclasses

import pytest

from mucudnn.profile import Record, Refusal, RefusalKind
from mucudnn.profiling.trials import fits_as_seen, is_settled
from tests.examples import a_record, a_trial, an_over_limit_record

KIB = 2**10


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


@pytest.mark.parametrize(
    ("seen_bytes", "expected"), [(0, True), (132 * KIB, True), (132 * KIB + 1, False), (None, False)]
)
def test_eight_pages_more_than_the_limit_are_noise(seen_bytes: int | None, expected: bool) -> None:
    assert fits_as_seen(seen_bytes, 100 * KIB) is expected
