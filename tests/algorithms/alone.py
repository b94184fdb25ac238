"""Programs in processes of their own, each forked from one that has loaded PyTorch and computed nothing yet.

When it forks, OpenMP has no threads, and nothing of mucudnn is loaded: to a program all is new.
"""

import json
import subprocess
from pathlib import Path

LONG_S = 60
"""What never takes so long has hung."""

SERVER = """
import contextlib, gc, json, os, signal, sys, warnings
import torch

def serve(script, output, errors):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
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

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self._process = process
        self._output, self._errors = folder / "output", folder / "errors"

    def run(self, script: str) -> str:
        """Run a program, and return what it prints."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for each in (self._output, self._errors):
            each.write_text("", encoding="utf-8")
        request = json.dumps([script, str(self._output), str(self._errors)])
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        status = self._process.stdout.readline().strip()
        hung = f"it has hung for {LONG_S} s" if status == "-9" else ""
        assert status == "0", (status, hung, self._errors.read_text(encoding="utf-8"))
        return self._output.read_text(encoding="utf-8").strip()
