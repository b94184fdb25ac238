"""What an installed package has: every file of the folder that the code reads."""

import fnmatch
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mucudnn"

OF_CODE = (".py", ".pyc")
OF_READERS = (".md",)


def test_whatever_lies_beside_the_code_is_installed_with_it() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["mucudnn"]
    files = [path for path in PACKAGE.rglob("*") if path.is_file()]
    read = [path.relative_to(PACKAGE) for path in files if path.suffix not in (*OF_CODE, *OF_READERS)]
    assert Path("algorithms/matrix/products.c") in read
    left_out = [path for path in read if not any(_is_of(path, pattern) for pattern in patterns)]
    assert left_out == []


def _is_of(path: Path, pattern: str) -> bool:
    """As setuptools understands it: a star stands for no slash."""
    parts = pattern.split("/")
    return len(parts) == len(path.parts) and all(map(fnmatch.fnmatchcase, path.parts, parts))
