"""What ends where nothing else would end it: a process in a call that hangs, and one that started it."""

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

DYING_S = 5.0
"""That it may take until a process that is killed has given back what it has of a card."""

_CONCLUDING_S = 30.0
"""That a command has to write what it found, after an interrupt."""


@contextlib.contextmanager
def ended_if_it_hangs(seconds: float) -> Iterator[None]:
    """End the process, and tell where it is, if the block takes longer: nothing else ends a hang."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def status_of(command: Sequence[str], seconds: float | None) -> int:
    """Return the exit status of a command; one that has not ended by then is killed, and has failed.

    With it all processes are killed that it has begun: on a card they would go on beside what comes next.

    Args:
        command: with its arguments.
        seconds: that it may take; None for whatever it takes.
    """
    child = subprocess.Popen(command)
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired as error:
        _kill(child)
        print(f"Killed: it had not ended after {error.timeout:.0f} s.", file=sys.stderr)
        return 1
    except BaseException:  # an interrupt, which the command has had too, and concludes
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_CONCLUDING_S)
        _kill(child)
        raise


def _kill(child: "subprocess.Popen[bytes]") -> None:
    """Kill a process, then those that it has begun and that are left: it begins no others for them.

    One that a driver does not let go is waited for no longer than others take.
    """
    begun = _begun_by(child.pid)
    child.kill()
    for pid in begun:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(DYING_S)


def _begun_by(pid: int) -> set[int]:
    """Return the processes that a process has begun, and those that these have."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parents[int(path.parent.name)] = int(
                path.read_text(errors="replace").rpartition(")")[2].split()[1]
            )
    found = {pid}
    while more := {each for each, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}
