"""Programs in processes of their own, each forked from one that has loaded PyTorch and computed nothing yet.

When it forks, OpenMP has no threads, and nothing of mucudnn is loaded: to a program all is new. But what
libraries read in the environment as they are loaded was read in that of the process it is forked from.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

LONG_S = 60
"""What never takes so long has hung."""

_ROOT = Path(__file__).parents[1]

_SERVER = """
import contextlib, gc, json, os, signal, sys, warnings
import torch

def serve(script, output, errors, environment):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    for stream, path in ((0, os.devnull), (1, output), (2, errors)):
        os.dup2(os.open(path, os.O_RDWR), stream)
    exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})

warnings.simplefilter("ignore", DeprecationWarning)  # it forks beside threads of NumPy, says Python 3.12
gc.freeze()  # a program has not all that is loaded here to look through, nor to copy
def end(*_):
    with contextlib.suppress(ProcessLookupError):  # it may just have ended
        os.kill(number, signal.SIGKILL)

for line in sys.stdin:
    number = os.fork()
    if number == 0:
        serve(*json.loads(line))
        break
    signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    status = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
    signal.alarm(0)
    print(status, flush=True)
""".replace("SECONDS", str(LONG_S))


class Server:
    """Runs one program after another."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path, settings: dict[str, str]) -> None:
        self._process = process
        self._output, self._errors = folder / "output", folder / "errors"
        self._settings = settings

    def run(self, script: str, **environment: str) -> str:
        """Run a program, which must succeed, and return what it prints."""
        finished = self.finished(script, **environment)
        hung = f"it has hung for {LONG_S} s" if finished.returncode == -9 else ""
        assert finished.returncode == 0, (finished.returncode, hung, finished.stderr)
        return finished.stdout.strip()

    def finished(self, script: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run a program in the environment that there is now, and return how it ended and what it printed.

        What `environment` says beside, it reads, and libraries that were loaded before do not.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for each in (self._output, self._errors):
            each.write_text("", encoding="utf-8")
        told = {**_environment(self._settings), **environment}
        request = [script, str(self._output), str(self._errors), told]
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        output, errors = (each.read_text(encoding="utf-8") for each in (self._output, self._errors))
        return subprocess.CompletedProcess(script, status, output, errors)


@contextlib.contextmanager
def a_server(folder: Path, **settings: str) -> Iterator[Server]:
    """What runs programs whose environment says nothing of OpenMP but what is in `settings`."""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
        env={**_environment(settings), "PYTHONPATH": str(_ROOT)},
    ) as process:
        yield Server(process, folder, settings)


def waiting_as_here() -> dict[str, str]:
    """What a program's environment must say for a plan of this process to be one of its own."""
    return {"OMP_WAIT_POLICY": os.environ["OMP_WAIT_POLICY"]}


def _environment(settings: dict[str, str]) -> dict[str, str]:
    others = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    return {**others, **settings}
