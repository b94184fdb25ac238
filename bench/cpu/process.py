"""Processes with one thread setting each: what OpenMP is told before it starts cannot be changed later."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import TypeVar

from bench.cpu.settings import SETTINGS, environment_of
from bench.endings import INTERRUPTED
from mucudnn.plan_file import decode, encode

Task = TypeVar("Task")

_PR_SET_PDEATHSIG = 1
"""Linux's number, of prctl, for the signal that a process gets when the one that started it ends."""


def ended(module: str, task: object, setting: str, timeout_s: float) -> str | None:
    """Have a process do a task; return how it ended if not in order.

    Args:
        module: what it runs: a program that calls `done`.
        task: a dataclass, its standard input.
        setting: name of its thread setting.
        timeout_s: seconds after which it is taken to hang, and killed.
    """
    try:
        status = subprocess.run(
            [sys.executable, "-m", module],
            input=task_text(task),
            text=True,
            env=environment_of(SETTINGS[setting], os.environ),
            timeout=timeout_s,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        return "its process was ended, since it did not end in time."
    return f"its process ended with status {status}." if status else None


def done(kind: type[Task], work: Callable[[Task], None]) -> int:
    """Do the task on standard input; return the exit status.

    Whoever started this process is interrupted with it, and says so. It is killed when that one ends, so that
    nothing computes beside what is measured next.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        work(task_from(kind, sys.stdin.read()))
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def task_text(task: object) -> str:
    """Return a task as JSON."""
    return json.dumps(encode(task))


def task_from(kind: type[Task], text: str) -> Task:
    """Return the task of which `task_text` gave `text`.

    Raises:
        ValueError: the text is no task's.
    """
    task: Task = decode(kind, json.loads(text), "the task")
    return task


def reason_of(error: Exception) -> str:
    """Return in one line why a case could not be measured."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
