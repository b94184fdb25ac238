"""Whether something has a name, as far as that can be told."""

from pathlib import Path

import pytest

from mucudnn.files import is_there


def test_what_has_a_name_is_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert is_there(tmp_path)
    assert is_there(tmp_path / "file")
    assert not is_there(tmp_path / "none")
    assert not is_there(tmp_path / "file" / "in it")


def test_a_name_that_cannot_be_looked_for_is_neither_there_nor_not(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File name too long"):
        is_there(tmp_path / ("x" * 300))
