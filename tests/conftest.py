"""What holds for every test: hypothesis has no deadline, and no test touches the user's store."""

import os
from collections.abc import Iterator
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


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests of small shapes: threads that wait for one another cost far more than they compute."""
    import torch  # not for the tests of the pure part, which never load it

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
