"""Which version of the sources a result was measured with."""

import os
import subprocess
from pathlib import Path

_ROOT = Path(__file__).parents[1]

_RESULTS = ":(exclude)bench/results"
"""What is measured lies beside the sources, and is none."""


def commit(root: Path = _ROOT) -> str:
    """Return the commit that the environment's MUCUDNN_COMMIT says, else the one checked out at `root`.

    What it says comes first, as a copy of the sources may lie within another repository, or over an older
    commit of its own; it is for such copies only. A checked-out one has "-dirty" behind it if its sources
    were changed; without a repository it is "unknown".
    """
    if told := os.environ.get("MUCUDNN_COMMIT"):
        return told
    try:
        if Path(_git(root, "rev-parse", "--show-toplevel")).resolve() == root.resolve():
            name = _git(root, "describe", "--always", "--abbrev=12", "--exclude=*")
            changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", _RESULTS)
            return f"{name}-dirty" if changed else name
    except (OSError, subprocess.CalledProcessError):
        pass
    return "unknown"


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
