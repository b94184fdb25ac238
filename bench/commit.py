"""Which version of the sources a result was measured with."""

import subprocess
from pathlib import Path

_ROOT = Path(__file__).parents[1]


def commit(root: Path = _ROOT) -> str:
    """Return the commit checked out at `root`, with "-dirty" if what it tracks differs; else "unknown".

    A copy of the sources within another repository is of no commit that is known.
    """
    try:
        if Path(_git(root, "rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return "unknown"
        return _git(root, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
