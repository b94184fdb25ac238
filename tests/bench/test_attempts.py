"""Attempts at work in which processes end: how often it is tried, and what ends without a word."""

from pathlib import Path

import pytest

from bench.attempts import Attempts


class CrashError(BaseException):
    """The end of a process."""


@pytest.fixture
def attempts(tmp_path: Path) -> Attempts:
    return Attempts(tmp_path / "work.begun", orderly=(TimeoutError,))


def crash(attempts: Attempts, known: int) -> None:
    with pytest.raises(CrashError), attempts.another(known):
        raise CrashError


def test_work_that_ends_well_leaves_nothing(attempts: Attempts) -> None:
    with attempts.another(5):
        assert attempts.path.exists()

    assert not attempts.path.exists()


def test_work_is_given_up_after_two_ends_at_one_place_and_stays_so(attempts: Attempts) -> None:
    crash(attempts, 5)
    assert not attempts.give_up_if_vain(5)
    crash(attempts, 5)

    assert attempts.give_up_if_vain(5)
    assert attempts.give_up_if_vain(9)  # whatever other work adds
    attempts.path.unlink()
    assert not attempts.give_up_if_vain(9)


def test_ends_at_different_places_do_not_add_up(attempts: Attempts) -> None:
    for known in range(5):
        crash(attempts, known)

        assert not attempts.give_up_if_vain(known + 1)


@pytest.mark.parametrize("end", [TimeoutError, KeyboardInterrupt])
def test_an_orderly_end_leaves_what_was_known_before(attempts: Attempts, end: type[BaseException]) -> None:
    crash(attempts, 5)
    with pytest.raises(end), attempts.another(5):
        raise end
    crash(attempts, 5)

    assert attempts.give_up_if_vain(5)


def test_a_torn_mark_counts_as_one_end_elsewhere(attempts: Attempts) -> None:
    attempts.path.write_text('{"number": 2, "kn')
    assert not attempts.give_up_if_vain(5)

    crash(attempts, 5)
    assert not attempts.give_up_if_vain(5)
    crash(attempts, 5)
    assert attempts.give_up_if_vain(5)
