"""Has the sections run in a process of their own, and those that it leaves in another one.

A fault in a library, or a hang, ends a process without an exception; what it had found is in its files.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.gpu import program, results
from bench.gpu.available import obstacle
from bench.gpu.hanging import status_of

_PATIENCE_S = 2 * program.PATIENCE_S
"""By how much a process may pass its time: twice as long as a section, which ends itself if it hangs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Have all sections run; return the exit status, 1 if one has failed."""
    options = program.parsed(arguments)
    reason = obstacle()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    return watched(options, program.folder_of(options, torch.cuda.get_device_name(options.device)))


def watched(options: argparse.Namespace, folder: Path) -> int:
    """Start processes until every section has begun; a section in which one ends stays unfinished."""
    end = time.monotonic() + options.seconds
    left: list[str] = options.only
    readme = folder / "README.md"
    for path in (readme, *(results.path_of(folder, name) for name in left)):
        path.unlink(missing_ok=True)
    while left:
        left_s = end - time.monotonic()
        status = status_of(_command(options, folder, left_s, left), max(left_s, 0.0) + _PATIENCE_S)
        begun = [name for name in left if results.path_of(folder, name).exists()]
        if not begun:
            return status or 1
        left = [name for name in left if name not in begun]
    return status if readme.exists() else program.conclude(folder, options.only)


def _command(options: argparse.Namespace, folder: Path, seconds: float, names: Sequence[str]) -> list[str]:
    return [
        *(sys.executable, "-m", "bench.gpu.program"),
        *("--seconds", f"{max(seconds, 1):.0f}", "--device", str(options.device), "--output", str(folder)),
        *("--only", *names),
    ]
