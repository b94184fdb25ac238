"""What holds for every test: hypothesis has no deadline, and no test touches the user's store."""

import os
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("mucudnn", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("mucudnn")


@pytest.fixture(autouse=True)
def store_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default store of this test, a file that does not exist yet."""
    path = tmp_path / "store" / "profiles.sqlite3"
    monkeypatch.setenv("MUCUDNN_STORE", str(path))
    return path
