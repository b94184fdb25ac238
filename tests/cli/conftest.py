"""Where a user works."""

import functools
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mucudnn import progress
from tests.cli.commands import MODELS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a user works: a folder with a module of models."""
    path = tmp_path_factory.mktemp("work")
    (path / "models_of_a_test.py").write_text(MODELS)
    (path / "broken_models_of_a_test.py").write_text("import a_module_that_is_not_there\n")
    return path


@pytest.fixture(autouse=True)
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test runs in the folder; afterwards Python looks for modules where it did before."""
    before = list(sys.path)
    monkeypatch.chdir(folder)
    yield
    sys.path[:] = before


@pytest.fixture(autouse=True)
def without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a command takes in this process, it does not say how far it has come."""
    monkeypatch.setattr(progress, "Lines", functools.partial(progress.Lines, every_s=math.inf))
