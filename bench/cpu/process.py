"""Processes with one thread setting each: what OpenMP is told before it starts cannot be changed later."""

import os
import subprocess
import sys

from bench.cpu.settings import SETTINGS, environment_of


def ended(module: str, task: str, setting: str, timeout_s: float) -> str | None:
    """Have a process do a task; return how it ended if not in order.

    Args:
        module: what it runs.
        task: its standard input.
        setting: name of its thread setting.
        timeout_s: seconds after which it is taken to hang, and killed.
    """
    try:
        status = subprocess.run(
            [sys.executable, "-m", module],
            input=task,
            text=True,
            env=environment_of(SETTINGS[setting], os.environ),
            timeout=timeout_s,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        return "its process was ended, since it did not end in time."
    return f"its process ended with status {status}." if status else None
