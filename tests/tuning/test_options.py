"""What is made of the options before any work is done."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mucudnn.errors import OptionError
from mucudnn.progress import ProgressOption
from mucudnn.store import MemoryStore, StoreOption
from mucudnn.tuning.options import Settings
from tests.models import Listener
from tests.tuning.settings import settings_of


@pytest.mark.parametrize("kind", [str, Path])
def test_a_relative_path_means_the_file_in_the_folder_of_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[str] | type[Path]
) -> None:
    monkeypatch.chdir(tmp_path)

    assert settings_of(store=kind("profiles.sqlite3")).store == tmp_path / "profiles.sqlite3"


def test_a_tilde_stands_for_the_users_folder_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    assert settings_of(store="~/profiles.sqlite3").store == tmp_path / "profiles.sqlite3"


@pytest.mark.parametrize("store", [None, MemoryStore()])
def test_a_store_and_the_default_stay_as_they_are(store: StoreOption) -> None:
    assert settings_of(store=store).store is store


def test_a_default_that_is_a_relative_path_means_the_file_in_the_folder_of_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUCUDNN_STORE", "profiles.sqlite3")

    assert settings_of(store=None).store == tmp_path / "profiles.sqlite3"


@pytest.mark.parametrize("error", [1, 0.25, np.float32(0.25), np.float64(0.25)])
def test_an_error_is_a_number_of_any_kind(error: float) -> None:
    settings = settings_of(max_error=error)

    assert (settings.max_error, type(settings.max_error)) == (float(error), float)


def test_an_error_that_no_float_holds_is_refused() -> None:
    with pytest.raises(OptionError, match="max_error must be None or a number from 0 on"):
        settings_of(max_error=10**400)


COPYING = pytest.mark.parametrize(
    "way", [copy.copy, copy.deepcopy, lambda settings: pickle.loads(pickle.dumps(settings))]
)


@COPYING
@pytest.mark.parametrize("progress", [True, False, None])
def test_a_copy_is_equal(way: Callable[[Settings], Settings], progress: ProgressOption) -> None:
    settings = settings_of(progress=progress, again=True, max_error=1e-6)

    assert way(settings) == settings


@COPYING
def test_a_copy_tells_nobody_that_was_passed_in(way: Callable[[Settings], Settings]) -> None:
    listener = Listener()
    settings = settings_of(progress=listener)

    assert way(settings) == settings_of(progress=None)
    assert settings.progress is listener


def test_ranks_agree_on_every_option_but_those_that_are_known_not_to_matter() -> None:
    names = {field.name for field in dataclasses.fields(Settings)}
    agreed = {{"workspace_limit": "limit_bytes"}.get(name, name) for name in settings_of().asked}

    # Ranks compare the problems, which `ops` choose, and the environment, which `backend` does.
    assert names - agreed == {"ops", "backend", "store", "progress", "again"}
