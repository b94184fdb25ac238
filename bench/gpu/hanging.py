"""What ends where nothing else would end it, or in good order: processes, and those that they have begun."""

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

DYING_S = 5.0
"""That it may take until a process that is killed has given back what it has of a card."""

_CONCLUDING_S = 30.0
"""That a command has to write what it found, after an interrupt."""

_LOOK_S = 0.02
"""Between looks at whether processes have ended."""

_ONCE_S = 1.0
"""Within which signals are one: who ends a group of processes tells each, as does the one that began it."""


def heed_termination() -> None:
    """Have SIGTERM interrupt this process and all that it has begun from now on, as Control-C does.

    By itself it would end the process at once, and nobody else. If an interrupt is ignored here, as in the
    background of a shell, it goes on to be, and what this process begins ignores it too: that gets SIGTERM.
    """
    told_s = -_ONCE_S

    def interrupt(number: int, _frame: object) -> None:
        nonlocal told_s
        before_s, told_s = told_s, time.monotonic()
        if told_s - before_s < _ONCE_S:
            return  # a second interrupt would break off what the first one has begun to conclude
        if number == signal.SIGTERM:
            is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            _send(signal.SIGTERM if is_ignored else signal.SIGINT, _begun_by(os.getpid()))
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


@contextlib.contextmanager
def ended_if_it_hangs(seconds: float) -> Iterator[None]:
    """End the process, and tell where it is, if the block takes longer: nothing else ends a hang."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def status_of(
    command: Sequence[str],
    seconds: float | None,
    concluding_s: float = 0.0,
    interrupted_s: float = _CONCLUDING_S,
) -> int:
    """Return the exit status of a command; one that has not ended by then is killed, and has failed.

    With it all processes are killed that it has begun: on a card they would go on beside what comes next.

    Args:
        command: with its arguments.
        seconds: that it may take; None for whatever it takes.
        concluding_s: that it, and what it has begun, then have after an interrupt, to write what they found.
        interrupted_s: that it has for that where this process is interrupted, and so all are.
    """
    child = subprocess.Popen(command)
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired as error:
        _end(child, concluding_s, is_told=not concluding_s)
        print(f"Killed: it had not ended after {error.timeout:.0f} s.", file=sys.stderr)
        return 1
    except BaseException:  # an interrupt, which the command has had too, and concludes
        _end(child, interrupted_s, is_told=True)
        raise


def _end(child: "subprocess.Popen[bytes]", concluding_s: float, *, is_told: bool) -> None:
    """Interrupt a process and those that it has begun, unless they are told, wait, and kill what is left."""
    end_s, begun = time.monotonic() + concluding_s, set[int]()
    try:
        begun = _begun_by(child.pid)
        if not is_told:
            _send(signal.SIGINT, [child.pid, *begun])
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(concluding_s)
        if not is_told:  # those of a session of their own have not been told
            _wait_for(begun, end_s)
    finally:
        _kill(child, begun)


def _kill(child: "subprocess.Popen[bytes]", begun: set[int]) -> None:
    """Kill a process, then those that it has begun and that are left: it begins no others for them.

    One that a driver does not let go is waited for no longer than others take.

    Args:
        child: the process, which may have ended meanwhile: then nobody knows any more what it had begun.
        begun: what it was known to have begun.
    """
    end_s = time.monotonic() + DYING_S
    if child.returncode is None:
        begun = begun | _begun_by(child.pid)
    child.kill()
    _send(signal.SIGKILL, begun)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(DYING_S)
    _wait_for(begun, end_s)


def _wait_for(pids: Iterable[int], end_s: float) -> None:
    while any(map(_is_running, pids)) and time.monotonic() < end_s:
        time.sleep(_LOOK_S)


def _send(number: signal.Signals, pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _is_running(pid: int) -> bool:
    """Return whether a process is there, and has not ended unseen by whoever takes in orphans."""
    try:
        return _fields(Path(f"/proc/{pid}/stat"))[0] != "Z"
    except OSError:
        return False


def _fields(path: Path) -> list[str]:
    """Return what the system tells of a process after its name: state, parent and more."""
    return path.read_text(errors="replace").rpartition(")")[2].split()


def _begun_by(pid: int) -> set[int]:
    """Return the processes that a process has begun, and those that these have."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parents[int(path.parent.name)] = int(_fields(path)[1])
    found = {pid}
    while more := {each for each, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}
