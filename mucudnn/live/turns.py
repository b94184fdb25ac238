"""Taking turns: of the threads and processes of a user, one at a time measures on a device.

Two that measure at once slow each other down, and what they see stays in the store.
"""

import contextlib
import hashlib
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from mucudnn.errors import BusyWarning, warn_user
from mucudnn.files import cache_folder
from mucudnn.interruptions import pass_on_interruption
from mucudnn.profile import Environment
from mucudnn.timing import nothing

_POLL_S = 0.05
"""How often whoever waits looks; between two problems nobody measures for some milliseconds."""

_SLICE_S = 1.0
"""After how many seconds whoever waits tells so again."""

_PATIENCE_S = 600.0
"""Seconds after which it waits no more: a process that was stopped holds its locks."""


def turn_path(environment: Environment) -> Path:
    """Return the file that is locked by whoever measures on the device of `environment`.

    It lies in the user's cache, under a name of this machine's and the device's. Devices of one kind in a
    machine share a file: what is found on one of them serves them all.
    """
    device = environment.device.get("name") or environment.device.get("model name", "")
    digest = hashlib.sha256(f"{platform.node()}\n{device}".encode()).hexdigest()[:16]
    return cache_folder() / "measuring" / f"{environment.backend}-{digest}.lock"


@contextlib.contextmanager
def turn(path: Path, on_wait: Callable[[], None], patience_s: float = _PATIENCE_S) -> Iterator[None]:
    """Hold the lock of a file during the block; where none can be had, as in a folder without writing, go on.

    Times suffer without it, and nothing else: a store takes what several write.

    Args:
        path: of the file, which is made, with its folder.
        on_wait: called if somebody else has it, before waiting, and again every second.
        patience_s: seconds after which it goes on without, with a warning.
    """
    with contextlib.ExitStack() as held:
        held.callback(_taken(FileLock(path), on_wait, patience_s))
        yield


def _taken(lock: BaseFileLock, on_wait: Callable[[], None], patience_s: float) -> Callable[[], None]:
    """Take the lock if it can be had; return what gives it back."""
    end_s = time.monotonic() + patience_s
    wait_s = 0.0
    while True:
        try:
            Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=wait_s, poll_interval=_POLL_S)
            return lock.release
        except Timeout:
            wait_s = _SLICE_S
        except OSError as error:
            pass_on_interruption(error)
            return nothing  # the folder cannot be made or written to, or its file system refuses to lock
        except UserWarning:  # of a file system without locks, where the user makes warnings errors
            return nothing
        if time.monotonic() > end_s:
            warn_user(
                f"Somebody else has been measuring on this device for {patience_s:.0f} s. This process waits "
                "no longer and measures at the same time, so the times of both may be off.",
                BusyWarning,
            )
            return nothing
        on_wait()
