"""Taking turns: of the threads and processes of a user, one at a time measures on a device.

Two that measure at once slow each other down, and what they see stays in the store.
"""

import contextlib
import hashlib
import json
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from mucudnn.profile import Environment

_POLL_S = 0.05
"""How often whoever waits looks; between two problems nobody measures for some milliseconds."""


def turn_path(environment: Environment) -> Path:
    """Return the file that is locked by whoever measures on the device of `environment`.

    It lies in the user's cache, under a name of this machine's. Devices of one kind in it share a file: what
    one finds serves them all.
    """
    device = json.dumps([platform.node(), environment.backend, dict(environment.device)], sort_keys=True)
    name = f"{environment.backend}-{hashlib.sha256(device.encode()).hexdigest()[:16]}.lock"
    return platformdirs.user_cache_path("mucudnn", appauthor=False) / "measuring" / name


@contextlib.contextmanager
def turn(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a file during the block; where none can be had, as in a folder without writing, go on.

    Times suffer without it, and nothing else: a store takes what several write.

    Args:
        path: of the file, which is made, with its folder.
        on_wait: called once if somebody else has it, before waiting.
    """
    lock = FileLock(path, poll_interval=_POLL_S)
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, NotImplementedError):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                held.enter_context(lock.acquire(timeout=0))
            except Timeout:
                on_wait()
                held.enter_context(lock.acquire())
        yield
