"""Convolutions that are tuned when they are first met, and where what was measured of them stays."""

import contextlib
import copy
import pickle
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from mucudnn.choices import Policy
from mucudnn.errors import AccuracyWarning, BusyWarning, StoreWarning
from mucudnn.live.measurer import LiveMeasurer
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.profile import Environment
from mucudnn.store import MemoryStore, SqliteStore, StoreOption, connections
from mucudnn.tuning import run
from mucudnn.tuning.learning import Learner
from mucudnn.tuning.run import Tuning
from tests.models import Listener
from tests.operands import a_convolution
from tests.tuning.settings import settings_of

pytestmark = pytest.mark.usefixtures("one_thread")


def _learner(store: StoreOption, listener: Listener) -> Learner:
    return Learner(settings_of(store=store, progress=listener))


def _meet(learn: Learner, *, batch: int = 8) -> None:
    """Have a convolution of `batch` samples tuned."""
    learn(torch.device("cpu"), "conv", 0, a_convolution(batch=batch), (ConvOp.FPROP,))


def _measured(listener: Listener, learn: Learner, *, batch: int = 8) -> bool:
    """Return whether anything is measured when `learn` meets a convolution of `batch` samples."""
    _meet(learn, batch=batch)
    return bool(listener.measured)


def _in_the_way(path: Path) -> Path:
    """Return a path below a file, `path`, where no store can be made."""
    path.touch()
    return path / "profiles.sqlite3"


def test_equal_problems_are_measured_once_where_no_store_can_be_made(tmp_path: Path) -> None:
    listener = Listener()
    learn = _learner(_in_the_way(tmp_path / "file"), listener)

    with pytest.warns(StoreWarning, match="What is measured now is not kept") as told:
        measured = [_measured(listener, learn, batch=batch) for batch in (8, 8, 4, 8, 4)]

    assert measured == [True, False, True, False, False]
    assert [each.category for each in told].count(StoreWarning) == 1  # others may be busy meanwhile


def test_equal_problems_are_measured_once_where_the_file_fails_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_BUSY_TIMEOUT_S", 0.05)
    path = tmp_path / "profiles.sqlite3"
    SqliteStore(path).close()

    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:

        class Rival(Listener):
            """Locks the file as soon as something is to be measured, and keeps it locked."""

            def begin(self, work: float) -> None:
                super().begin(work)
                if not other.in_transaction:
                    other.execute("BEGIN IMMEDIATE")

        listener = Rival()
        learn = _learner(path, listener)
        with pytest.warns(StoreWarning, match="What is measured from now on is not kept: .* is locked"):
            measured = [_measured(listener, learn) for _ in range(2)]

    assert measured == [True, False]


@pytest.mark.parametrize("way", [copy.deepcopy, lambda learn: pickle.loads(pickle.dumps(learn))])
def test_a_copy_tries_the_file_anew(tmp_path: Path, way: Callable[[Learner], Learner]) -> None:
    path = _in_the_way(tmp_path / "file")
    learn = _learner(path, Listener())
    with pytest.warns(StoreWarning, match="What is measured now is not kept"):
        _meet(learn)
    path.parent.unlink()

    _meet(way(learn))

    with SqliteStore(path, read_only=True) as store:
        assert store.count() > 0


def test_learners_of_one_file_know_what_each_of_them_has_measured(tmp_path: Path) -> None:
    listener = Listener()
    first, second = (_learner(tmp_path / "profiles.sqlite3", listener) for _ in range(2))

    measured = [
        _measured(listener, learn, batch=batch)
        for learn, batch in ((first, 8), (second, 8), (second, 4), (first, 4))
    ]

    assert measured == [True, False, True, False]


def test_each_problem_is_measured_anew_once_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    forgotten: list[set[tuple[ConvOp, int, bool]]] = []

    def noted(_: Environment, problems: Iterable[ConvProblem], *, whole: bool) -> None:
        forgotten[-1] |= {(each.op, each.batch, whole) for each in problems}

    monkeypatch.setattr(store, "forget", noted)
    monkeypatch.setattr(Tuning, "plan", lambda _: None)
    learn = Learner(settings_of(store=store, again=True, policy=Policy.POWER_OF_TWO))
    forward, gradient = (ConvOp.FPROP,), (ConvOp.WGRAD,)

    meetings = [(4, forward, 1), (4, forward, 1), (2, forward, 1), (4, gradient, 1), (4, forward, 2)]
    for batch, ops, threads in meetings:
        torch.set_num_threads(threads)
        forgotten.append(set())
        learn(torch.device("cpu"), "conv", 0, a_convolution(batch=batch), ops)

    of_four = {(ConvOp.FPROP, 4, True), (ConvOp.FPROP, 2, False), (ConvOp.FPROP, 1, False)}
    assert forgotten[:2] == [of_four, set()]
    assert forgotten[2] == {(ConvOp.FPROP, 2, True)}  # its part was measured anew with that of four
    assert forgotten[3] == {(ConvOp.WGRAD, size, whole) for _, size, whole in of_four}  # not the whole call
    assert forgotten[4] == of_four


def test_what_was_measured_anew_stays_when_an_equal_layer_wants_more() -> None:
    store, problem = MemoryStore(), a_convolution(batch=4)
    learn = Learner(settings_of(store=store, again=True))
    learn(torch.device("cpu"), "first", 0, problem, (ConvOp.FPROP, ConvOp.WGRAD))
    before = {*store._records}

    learn(torch.device("cpu"), "second", 0, problem, tuple(ConvOp))

    after = {*store._records}
    assert before < after
    assert {trial.problem.op for _, trial in after} == set(ConvOp)


def test_a_copy_measures_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[int] = []
    monkeypatch.setattr(
        MemoryStore, "forget", lambda _, __, problems, *, whole: forgotten.append(len([*problems]) * whole)
    )
    learn = Learner(settings_of(store=MemoryStore(), again=True))
    for way in (lambda known: known, lambda known: known, copy.deepcopy):
        _meet(way(learn))

    assert forgotten[::2] == [1, 0, 1]


def test_others_who_use_the_processors_are_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveMeasurer, "complaint", lambda _: "Others took all.")
    learn = Learner(settings_of(store=MemoryStore()))

    with pytest.warns(BusyWarning, match=r"^Others took all\. .* tune --again.* This is told once ") as told:
        _meet(learn, batch=2)
    _meet(learn, batch=3)  # of which a warning would be an error
    with pytest.warns(BusyWarning):
        _meet(pickle.loads(pickle.dumps(learn)), batch=4)

    assert len([each for each in told if each.category is BusyWarning]) == 1


def test_that_pytorchs_own_is_wrong_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "inaccuracy", lambda _: "It is wrong.")
    learn = Learner(settings_of(store=MemoryStore()))

    with pytest.warns(AccuracyWarning, match=r"^It is wrong\. This is told once ") as told:
        _meet(learn, batch=2)
    _meet(learn, batch=3)

    assert len([each for each in told if each.category is AccuracyWarning]) == 1


def test_what_is_met_under_autocast_is_measured_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(Tuning, "plan", lambda _: seen.append(torch.is_autocast_enabled("cpu")))

    with torch.autocast("cpu", torch.bfloat16):
        _meet(Learner(settings_of(store=MemoryStore())))

    assert seen == [False]
