"""Which version of the sources a result was measured with."""

import subprocess
from pathlib import Path

_ROOT = Path(__file__).parents[1]


def commit(root: Path = _ROOT) -> str:
    """Return the commit that is checked out at `root`, with "-dirty" if files differ; else "unknown"."""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        told = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return told.stdout.strip()
