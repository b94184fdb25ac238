"""Errors of signal handlers, and those of whatever runs."""

import functools
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import mucudnn
from mucudnn.interruptions import is_interruption
from mucudnn.store.memory import MemoryStore
from tests.models import a_batch, a_chain


class TimeIsOverError(Exception):
    """What a handler raises."""


def raises(*_: object) -> None:
    raise TimeIsOverError("the time is over")


class Handler:
    def __call__(self, *_: object) -> None:
        raises()

    def method(self, *_: object) -> None:
        raises()


@pytest.fixture(autouse=True)
def former() -> Iterator[None]:
    known = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, known)


def caught(run: Callable[[], object]) -> Exception:
    with pytest.raises((TimeIsOverError, RuntimeError, ZeroDivisionError)) as raised:
        run()
    return raised.value


def interrupted() -> None:
    signal.raise_signal(signal.SIGUSR1)


def wrapped() -> None:
    try:
        interrupted()
    except TimeIsOverError as error:
        raise RuntimeError("it failed") from error


def in_the_wake() -> None:
    try:
        interrupted()
    except TimeIsOverError:
        raise RuntimeError("it failed")  # noqa: B904  # as libraries do


@pytest.mark.parametrize("handler", [raises, Handler(), Handler().method, functools.partial(raises, 1)])
@pytest.mark.parametrize("run", [interrupted, wrapped, in_the_wake])
def test_what_a_handler_raises_is_an_interruption(
    run: Callable[[], None], handler: Callable[..., None]
) -> None:
    signal.signal(signal.SIGUSR1, handler)

    assert is_interruption(caught(run))


@pytest.mark.parametrize("handler", [Handler(), signal.SIG_IGN, signal.SIG_DFL])
def test_what_anything_else_raises_is_none(handler: object) -> None:
    signal.signal(signal.SIGUSR1, handler)  # type: ignore[arg-type]  # as typeshed has it

    assert not is_interruption(caught(lambda: 1 // 0))
    assert not is_interruption(caught(raises))


@pytest.fixture(scope="module")
def imported() -> None:
    """Nothing is imported any more: torch goes on with half of a package if that is interrupted."""
    mucudnn.tune(a_chain(), a_batch(), "1MiB", policy="undivided", store=MemoryStore(), progress=False)


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("after_s", [0.01, 0.1, 0.3])
def test_a_time_limit_ends_tuning_and_is_no_algorithms_fault(after_s: float, tmp_path: Path) -> None:
    former = signal.signal(signal.SIGALRM, raises)
    path = tmp_path / "store"
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        with pytest.raises(TimeIsOverError):
            mucudnn.tune(a_chain(), a_batch(), "1MiB", store=path, progress=False)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, former)

    told = [*sqlite3.connect(path).execute("SELECT refusal_reason FROM records")] if path.exists() else []
    assert ("the time is over",) not in told
