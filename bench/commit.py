"""Which version of the sources a result was measured with."""

import os
import subprocess
from pathlib import Path

_ROOT = Path(__file__).parents[1]

_RESULTS = ":(exclude)bench/results"
"""What is measured lies beside the sources, and is none."""


def commit(root: Path = _ROOT) -> str:
    """Return the commit checked out at `root`, with "-dirty" if its sources were changed; else "unknown".

    A copy of the sources within another repository, or without one, is of the commit that the environment's
    MUCUDNN_COMMIT says, if it says any.
    """
    try:
        if Path(_git(root, "rev-parse", "--show-toplevel")).resolve() == root.resolve():
            name = _git(root, "describe", "--always", "--abbrev=12", "--exclude=*")
            changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", _RESULTS)
            return f"{name}-dirty" if changed else name
    except (OSError, subprocess.CalledProcessError):
        pass
    return os.environ.get("MUCUDNN_COMMIT", "unknown")


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
