"""What cuDNN lists by a description on a machine without a driver: that of whoever has no card.

Where there is a driver, cuDNN may also list what it compiles for the card at run time, whatever it is told of
the device. `python -m bench.gpu.driverless` lists problems in a process that finds no driver: it reads a
description, the flags' rules, and the problems, one JSON text a line, and answers each with a line.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple, cast

from mucudnn.backends.cudnn.configurations import Rules
from mucudnn.backends.cudnn.devices import DeviceDescription
from mucudnn.backends.cudnn.engines import Enumerator
from mucudnn.backends.cudnn.library import load_library
from mucudnn.problem import ConvProblem

_DRIVER = ("libcuda.so.1", "libcuda.so")


class Listed(NamedTuple):
    """A configuration as it stands in a list.

    Attributes:
        id: of engine and knobs.
        workspace_bytes: what it declares.
        notes: on numerics and behaviour.
    """

    id: str
    workspace_bytes: int
    notes: tuple[str, ...]


class Driverless:
    """A process without a driver that lists problems; it computes ahead while others are looked at.

    Args:
        process: it.
    """

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def listed(self) -> list[Listed]:
        """Return the list of the next of its problems.

        Raises:
            RuntimeError: the process has ended.
        """
        line = cast("IO[str]", self._process.stdout).readline()
        if not line:
            raise RuntimeError(f"the process without a driver has ended with status {self._process.wait()}")
        return [Listed(name, n_bytes, tuple(notes)) for name, n_bytes, notes in json.loads(line)]


@contextlib.contextmanager
def driverless(
    description: DeviceDescription, rules: Rules, problems: Sequence[ConvProblem]
) -> Iterator[Driverless]:
    """Yield a process that lists `problems`, one after the other.

    Args:
        description: of the card.
        rules: what the flags permit.
        problems: in the order in which they are asked for.
    """
    request = "\n".join(
        [
            json.dumps(json.loads(description.text)),
            json.dumps(dataclasses.asdict(rules)),
            *(problem.key for problem in problems),
            "",
        ]
    )
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+", encoding="utf-8") as asked:
        for name in _DRIVER:  # found first, and no library
            Path(folder, name).touch()
        asked.write(request)
        asked.seek(0)
        paths = [folder, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        with subprocess.Popen(
            [sys.executable, "-m", "bench.gpu.driverless"],
            stdin=asked,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(paths)},
        ) as process:
            try:
                yield Driverless(process)
            finally:
                process.kill()


def main() -> None:
    """List the problems that standard input names."""
    description, rules, *problems = sys.stdin.read().splitlines()
    device = DeviceDescription.from_json(description)
    enumerator = Enumerator(load_library(), device, Rules(**json.loads(rules)))
    for text in problems:
        found = enumerator.listed(ConvProblem.from_json(json.loads(text)))
        print(json.dumps([(each.id, each.workspace_bytes, each.notes) for each in found]), flush=True)


if __name__ == "__main__":
    main()
