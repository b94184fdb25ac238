"""`python -m bench.gpu.install FOLDER [WHEELS]`: an environment beside the installed torch, which stays.

It sees all packages of the Python that makes it, and adds those that are missing: from a folder of wheels, or
from the index that pip knows. It needs nothing but Python and pip.
"""

import argparse
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

REQUIRED = {
    "numpy": "numpy",
    "pulp": "pulp>=3.3.1,<4",
    "pynvml": "nvidia-ml-py",
    "platformdirs": "platformdirs",
    "filelock": "filelock>=3.24",
    "click": "click>=8.2",
    "rich": "rich>=13",
    "pytest": "pytest>=8",
    "pytest_timeout": "pytest-timeout",
    "xdist": "pytest-xdist",
    "pytest_benchmark": "pytest-benchmark",
    "hypothesis": "hypothesis",
}
"""By module, what pip calls it: all that mucudnn and its GPU tests import, torch aside."""

OPTIONAL = {"highspy": "highspy>=1.14"}
"""What is gone without."""


def missing(packages: Mapping[str, str]) -> list[str]:
    """Return what pip must install for the modules that this Python lacks, or has in another version."""
    return [name for module, name in packages.items() if not _is_there(module, name)]


def _is_there(module: str, requirement: str) -> bool:
    name, _, bounds = re.sub(r"(?=[<>])", " ", requirement, count=1).partition(" ")
    try:
        version = _numbers(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False
    fits = all(
        version >= _numbers(bound) if sign == ">=" else version < _numbers(bound)
        for sign, bound in re.findall(r"(>=|<)([\d.]+)", bounds)
    )
    return fits and importlib.util.find_spec(module) is not None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def pip_command(python: Path, packages: Sequence[str], wheels: str | None) -> list[str]:
    """Return the command that adds packages to the environment of `python`, and replaces none."""
    source = ["--no-index", "--find-links", wheels] if wheels else []
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    return [*pip, "install", "--quiet", *source, *packages]


def made(folder: Path) -> Path:
    """Make an environment that sees what this Python sees; return its Python."""
    venv.create(folder, with_pip=False, clear=True, symlinks=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    # By a file of paths: "system site packages" of a Python that is in an environment itself are not its own.
    paths = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site_packages / "outer.pth").write_text("\n".join(paths) + "\n", encoding="utf-8")
    return folder / "bin" / "python"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.gpu.install", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the environment is made")
    parser.add_argument("wheels", nargs="?", metavar="WHEELS", help="folder of wheels (default: pip's index)")
    return parser


def _may_be_made_anew(folder: Path) -> bool:
    return folder.is_dir() and ((folder / "pyvenv.cfg").exists() or not any(folder.iterdir()))


def main(arguments: Sequence[str]) -> int:
    """Make the environment; return the status of pip."""
    parser = _parser()
    options = parser.parse_args(arguments)
    folder, wheels = options.folder, options.wheels
    if folder.exists() and not _may_be_made_anew(folder):
        parser.error(f"{folder} must be an environment, which is made anew, or an empty folder")
    python = made(folder)
    required, optional = missing(REQUIRED), missing(OPTIONAL)
    if optional:
        subprocess.run(pip_command(python, optional, wheels), check=False, stderr=subprocess.DEVNULL)
    if not required:
        return 0
    return subprocess.run(pip_command(python, required, wheels), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
