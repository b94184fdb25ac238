"""Errors of signal handlers, and those of whatever runs."""

import contextlib
import functools
import signal
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch

import mucudnn
from mucudnn.algorithms.compiled import compiler as compilers
from mucudnn.algorithms.scripts import Script, called_from_scripts
from mucudnn.backends.cpu.footprint import FootprintMeter
from mucudnn.backends.cudnn.discovery import System, opened_cudnn
from mucudnn.examining import extraction
from mucudnn.interruptions import interruption_of, pass_on_interruption
from mucudnn.live.stand import Stand
from mucudnn.profiling import replay
from mucudnn.store import SqliteStore, rows
from mucudnn.store.steadfast import SteadfastStore
from tests.examples import a_record, a_trial, an_environment
from tests.models import a_batch, a_chain


class TimeIsOverError(TimeoutError):
    """What a handler raises: to the system's errors it belongs, as many do."""


def raises(*_: object) -> None:
    raise TimeIsOverError("the time is over")


@torch.no_grad()
def decorated(_number: int, _frame: object) -> None:
    raise TimeIsOverError("the time is over")


def resets(number: int, _frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)
    raises()


class Handler:
    def __call__(self, *_: object) -> None:
        raises()

    def method(self, _number: int, _frame: object) -> None:
        raises()


@pytest.fixture(autouse=True)
def former() -> Iterator[None]:
    known = signal.signal(signal.SIGUSR1, raises)
    yield
    signal.signal(signal.SIGUSR1, known)


def interrupt() -> None:
    signal.raise_signal(signal.SIGUSR1)


def wrapped() -> None:
    try:
        interrupt()
    except TimeIsOverError as error:
        raise RuntimeError("it failed") from error


def in_the_wake() -> None:
    try:
        interrupt()
    except TimeIsOverError:
        raise RuntimeError("it failed")  # noqa: B904  # as libraries do


def caught(run: Callable[[], object]) -> Exception:
    with pytest.raises((TimeIsOverError, RuntimeError, ZeroDivisionError)) as raised:
        run()
    return raised.value


HANDLERS = {
    "function": raises,
    "decorated": decorated,
    "resets": resets,
    "object": Handler(),
    "method": Handler().method,
    "partial": functools.partial(raises, 1),
    "lambda": lambda *_: raises(),
}


@pytest.mark.parametrize("handler", HANDLERS.values(), ids=HANDLERS)
@pytest.mark.parametrize("run", [interrupt, wrapped, in_the_wake])
def test_what_a_handler_raises_is_an_interruption(
    run: Callable[[], None], handler: Callable[..., None]
) -> None:
    signal.signal(signal.SIGUSR1, handler)

    error = caught(run)

    assert isinstance(interruption_of(error), TimeIsOverError)
    with pytest.raises(TimeIsOverError):
        pass_on_interruption(error)


@torch.no_grad()
def fails() -> float:
    return 1 / 0


@pytest.mark.parametrize("handler", [raises, decorated, Handler(), signal.SIG_IGN, signal.SIG_DFL])
def test_what_anything_else_raises_is_none(handler: Any) -> None:
    signal.signal(signal.SIGUSR1, handler)

    assert interruption_of(caught(fails)) is None
    assert interruption_of(caught(raises)) is None


def test_what_was_handled_before_is_none() -> None:
    def fails_and_is_caught() -> Exception:
        try:
            fails()
        except ZeroDivisionError as error:
            return error
        pytest.fail("It did not fail.")

    try:
        interrupt()
    except TimeIsOverError:
        error = fails_and_is_caught()

    assert isinstance(error.__context__, TimeIsOverError)
    assert interruption_of(error) is None


def interrupted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, interrupted whenever it is called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        interrupt()
        return function(*args, **kwargs)

    return call


PLACES: dict[str, tuple[Any, str]] = {
    "examining": (extraction, "run_without_arithmetic"),
    "waiting": (filelock.FileLock, "acquire"),
    "weighing": (FootprintMeter, "measure"),
    "checking": (Stand, "run"),
}


@pytest.mark.parametrize("place", ["examining", "waiting", "weighing", "checking"])
def test_an_interruption_ends_tuning_and_is_no_algorithms_fault(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = PLACES[place]
    monkeypatch.setattr(owner, name, interrupted(getattr(owner, name)))
    path = tmp_path / "store"

    with pytest.raises(TimeIsOverError):
        mucudnn.tune(a_chain(), a_batch(), "1MiB", policy="undivided", store=path, progress=False)

    if path.exists():
        with contextlib.closing(sqlite3.connect(path)) as store:
            failed = "SELECT refusal_reason FROM records WHERE refusal_kind = 'failed'"
            assert not store.execute(failed).fetchall()


def test_an_interruption_of_a_compiler_is_not_kept_for_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compilers.needed_compiler()
    source = "int of_an_interruption(void) { return 5; }"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "communicate", interrupted(subprocess.Popen.communicate))
        with pytest.raises(TimeIsOverError):
            compilers.library(source)

    assert compilers.library(source).of_an_interruption() == 5


@pytest.mark.parametrize("error", [TimeIsOverError, sqlite3.OperationalError, ValueError])
def test_an_interruption_says_nothing_against_a_store(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupts(*_: object) -> None:
        raise error("the time is over")

    signal.signal(signal.SIGUSR1, interrupts)
    monkeypatch.setattr(rows, "environment_to_row", interrupted(rows.environment_to_row))
    with SteadfastStore(SqliteStore(tmp_path / "profiles.sqlite3")) as store:
        with pytest.raises(error, match="the time is over"):
            store.add_records(an_environment(), [a_record(a_trial())])
        assert store.is_kept


def test_an_interruption_says_nothing_against_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "readable_store", interrupted(replay.readable_store))

    with pytest.raises(TimeIsOverError), replay.replaying("xeon"):
        pass


@called_from_scripts
def _interrupted_in_a_script(x: torch.Tensor) -> torch.Tensor:
    interrupt()
    return x


def _calls(x: torch.Tensor) -> torch.Tensor:
    return _interrupted_in_a_script(x)


def test_an_interruption_within_a_script_comes_out_as_it_was_raised() -> None:
    with pytest.raises(TimeIsOverError, match="the time is over"):
        Script(_calls)(torch.zeros(2))


@pytest.mark.parametrize("override", [None, "/named.so"])
def test_the_search_for_cudnn_ends(override: str | None) -> None:
    system = System(override=override, open_library=lambda *_: interrupt())

    with pytest.raises(TimeIsOverError):
        opened_cudnn(system)
