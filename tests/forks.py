"""Asking a forked child, which must answer and end by itself."""

import os
import signal
from collections.abc import Callable

_TIMEOUT_S = 60


def in_a_child(check: Callable[[], bool]) -> bool:
    """Return what a forked child finds; one that waits for ever finds False after a minute."""
    child = os.fork()
    if child == 0:
        found = False
        try:
            signal.alarm(_TIMEOUT_S)
            found = check()
        finally:  # else the child would run the other tests
            os._exit(0 if found else 1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0
