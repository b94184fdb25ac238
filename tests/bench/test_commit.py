"""Which commit a result names."""

import subprocess
from pathlib import Path

import pytest

from bench.commit import commit


@pytest.fixture(autouse=True)
def _untold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUCUDNN_COMMIT", raising=False)


def git(root: Path, *arguments: str) -> str:
    names = ("-c", "user.name=N", "-c", "user.email=n@example.org")
    command = ["git", *names, "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_result_names_the_commit_that_is_checked_out_and_whether_files_differ(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "--message", "one")
    git(tmp_path, "tag", "v1")  # a tag's name would say less
    clean = commit(tmp_path)
    (tmp_path / "file").write_text("two")

    assert clean == git(tmp_path, "rev-parse", "--short=12", "HEAD")
    assert commit(tmp_path) == f"{clean}-dirty"


def test_results_that_were_measured_change_no_sources(tmp_path: Path) -> None:
    measured, other = tmp_path / "bench" / "results" / "card.json", tmp_path / "bench" / "card.py"
    measured.parent.mkdir(parents=True)
    git(tmp_path, "init", "--quiet")
    for file in (measured, other):
        file.write_text("one")
        git(tmp_path, "add", str(file))
    git(tmp_path, "commit", "--quiet", "--message", "one")

    measured.write_text("two")
    assert not commit(tmp_path).endswith("-dirty")
    other.unlink()
    assert commit(tmp_path).endswith("-dirty")


def test_a_copy_is_of_the_commit_that_it_was_told_whatever_repository_it_lies_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUCUDNN_COMMIT", "0123456789ab")
    assert commit(tmp_path) == "0123456789ab"

    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", "one")
    assert commit(tmp_path) == "0123456789ab"


def test_outside_of_a_repository_of_its_own_the_commit_is_unknown(tmp_path: Path) -> None:
    assert commit(tmp_path) == "unknown"
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", "one")
    (tmp_path / "copy").mkdir()
    assert commit(tmp_path / "copy") == "unknown"
