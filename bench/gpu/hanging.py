"""What ends where nothing else would end it: a process in a call that hangs, and one that started it."""

import contextlib
import faulthandler
import subprocess
import sys
from collections.abc import Iterator, Sequence

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

    Args:
        command: with its arguments.
        seconds: that it may take; None for whatever it takes.
    """
    with subprocess.Popen(command) as child:
        try:
            return child.wait(seconds)
        except subprocess.TimeoutExpired as error:
            child.kill()
            print(f"Killed: it had not ended after {error.timeout:.0f} s.", file=sys.stderr)
            return 1
        except BaseException:  # an interrupt, which the command has had too, and concludes
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_CONCLUDING_S)
            child.kill()
            raise
