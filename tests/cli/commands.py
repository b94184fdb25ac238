"""The command line as tests run it: in this process, or in one of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner, Result

from mucudnn.cli import main
from tests.alone import Server, waiting_as_here

MODELS = '''
import functools
import sys
import torch
from torch import nn

instance = nn.Conv2d(3, 4, 3)
number = 3

def conv():
    print("a model is being made")
    return nn.Conv2d(3, 4, 3)

def wide():
    return nn.Conv2d(64, 64, 3)

def wide_224():
    return nn.Conv2d(64, 64, 3, padding=1)

def linear():
    return nn.Linear(3, 4)

def broken():
    raise ValueError("no weights\\nare here")

def silent():
    raise AssertionError

def keyless():
    return {}["weights"]

def strange():
    return nn.Conv2d(3, 4, 3, groups=2)

def leaving():
    sys.exit("enough")

def ending():
    sys.exit(3)

@functools.wraps(lambda width: None)
def wrapped(*args):
    return nn.Conv2d(3, 4, 3)

def needing(width):
    return nn.Conv2d(3, width, 3)

def interrupted():
    raise KeyboardInterrupt

class Failing(nn.Module):
    def forward(self, image):
        raise ValueError("the image is too small")

class Leaving(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, image):
        sys.exit()

class Volumes(nn.Module):
    """Convolutions in three dimensions, one of them transposed, and a functional one of one dimension."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(3, 8, 3, padding=1)
        self.enlarge = nn.ConvTranspose3d(8, 4, 2, stride=2)

    def forward(self, volume):
        print("volumes are computed")
        lines = self.enlarge(self.conv(volume)).flatten(2)
        return nn.functional.conv1d(lines, torch.ones(1, 4, 3, dtype=lines.dtype))

class Twins(nn.Module):
    """The same convolution twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 3, 3, padding=1)
        self.second = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, image):
        return self.second(self.first(image))

class Shown(nn.Module):
    """Says on what it is run, in an error."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, *images):
        planes = [image for image in images if image.dim() == 4]
        layouts = [image.is_contiguous(memory_format=torch.channels_last) for image in planes]
        dtypes = " ".join(str(image.dtype) for image in images)
        weight = self.conv.weight
        raise TypeError(
            f"training {self.training}, weight {weight.dtype} "
            f"{weight.is_contiguous(memory_format=torch.channels_last)}, "
            f"inputs {[tuple(image.shape) for image in images]} {dtypes} {layouts}"
        )
'''

_PASSING = re.compile(r"^mucudnn: (\d+%|done) after |times( were measured)?, others took")

SMALL = ("--input", "4x3x8x8", "--workspace-limit", "1MiB", "--eval", "--policy", "undivided")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def tune(name: str, *arguments: str | Path) -> Result:
    return run("tune", f"models_of_a_test:{name}", *(arguments or SMALL))


def in_a_process(
    *arguments: str | Path, stdout: int = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    """Run the command line as a user does, with standard streams that are no terminal."""
    package = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-m", "mucudnn", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(package), "PYTHONSAFEPATH": "1", **environment},
        stdout=stdout,
        stderr=subprocess.PIPE,
        check=False,
    )


_UNREAD = "reading, writing = os.pipe(); os.close(reading); os.dup2(writing, 1)\n"


def in_a_fork(
    alone: Server, *arguments: str | Path, is_read: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a new process that has loaded PyTorch before, in the folder of this one.

    What it prints may go where nobody reads it, as when a pager is left early.
    """
    return alone.finished(
        "import os, runpy, sys\n"
        f"{'' if is_read else _UNREAD}"
        f"os.chdir({str(Path.cwd())!r}); sys.argv[1:] = {[*map(str, arguments)]!r}\n"
        "runpy.run_module('mucudnn', run_name='__main__', alter_sys=True)",
        **waiting_as_here(),
    )


def lasting(stderr: str) -> str:
    """Return what a command says on any machine: not how far it has come, nor who else runs there."""
    lines = stderr.splitlines(keepends=True)
    return "".join(line for line in lines if not _PASSING.search(line))


def assert_one_sentence(result: Result, start: str, status: int = 1) -> None:
    """The command has printed nothing but one line on standard error, and ended with `status`."""
    assert result.stderr.startswith(start)
    assert (result.stderr.count("\n"), result.stdout, result.exit_code) == (1, "", status)
    assert result.stderr.endswith(".\n")


def damage(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("what was measured\n" * 1000)
