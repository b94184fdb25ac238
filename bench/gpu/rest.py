"""`make gpu-rest`: what no card has shown yet, one errand after the other for as long as there is time.

Cards are lent for minutes, so what is still to be shown is listed in the order of what it tells. Each errand
is one of the programs beside this one, which measure nothing twice: what they know takes them no time. Tuning
begins with the recordings that come with the package.
"""

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.arguments import seconds
from bench.gpu.available import obstacle

_RECORDINGS = Path("mucudnn/recordings")

_SECONDS = 560.0

_PATIENCE_S = 90.0
"""By how much a program may pass its time before it is stopped: most end a case that they have begun."""


class Errand(NamedTuple):
    """One thing to be shown.

    Attributes:
        about: what it shows.
        program: module that shows it.
        arguments: of the program, without the time.
        least_s: seconds with which it is begun.
    """

    about: str
    program: str
    arguments: tuple[str, ...]
    least_s: float

    def command(self, left_s: float) -> list[str]:
        """Return how it is run in so much time."""
        return [sys.executable, "-m", self.program, *self.arguments, "--seconds", f"{left_s:.0f}"]


def _record(networks: str, settings: str) -> Errand:
    arguments = ("--networks", networks, "--settings", settings)
    return Errand(f"plans of {networks}, {settings}", "bench.record", arguments, 40.0)


def _steps(network: str, setting: str, *limits: str) -> Errand:
    arguments = ("--networks", network, "--settings", setting, "--limit", *limits)
    return Errand(f"training steps of {network}, {setting}", "bench.gpu.steps", arguments, 40.0)


def _layers(about: str, layers: Sequence[str], settings: Sequence[str], *more: str) -> Errand:
    arguments = ("--layers", *layers, "--settings", *settings, "--case-seconds", "60", *more)
    return Errand(about, "bench.gpu.layer_run", arguments, 30.0)


ERRANDS: tuple[Errand, ...] = (
    _record("resnet50", "bfloat16-nhwc"),
    _steps("resnet50", "bfloat16-nhwc", "512MiB", "64MiB"),
    _layers("cliffs", ["cliffs/dw7x7", "cliffs/rn50_c1", "cliffs/grp32", "cliffs/conv3d"],
            ["float32-nchw", "bfloat16-nhwc"]),
    _layers("workspace saved on large batches", ["vgg16_b256/*"], ["bfloat16-nchw"],
            "--limit", "8MiB", "64MiB", "512MiB", "2GiB"),
    _layers("DeepBench's list in TF32, channels_last", ["deepbench/*_b16"], ["tf32-nhwc"]),
    _steps("vgg16", "float32-nchw", "512MiB", "64MiB"),
    _steps("alexnet", "tf32-nchw", "512MiB", "64MiB"),
    _steps("unet3d", "tf32-nchw", "512MiB", "64MiB"),
    _layers("DeepBench's list in bfloat16, contiguous", ["deepbench/*_b16"], ["bfloat16-nchw"]),
    _layers("DeepBench's list in strict float32, channels_last", ["deepbench/*_b16"], ["float32-nhwc"]),
    _layers("all sizes of micro-batches", ["deepbench/*_b16"], ["float32-nchw"], "--policy", "all"),
)  # fmt: skip
"""By what each tells in its time."""


def run(
    errands: Sequence[Errand],
    left_s: float,
    call: Callable[[list[str], float], int],
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run errands in their order; return the first status of those that failed, or 0.

    Args:
        errands: what is to be shown.
        left_s: seconds for all of them.
        call: runs a command, stops it after so many seconds, and returns its status.
        clock: seconds.
    """
    end_s, first = clock() + left_s, 0
    for errand in errands:
        left_s = end_s - clock()
        if left_s < errand.least_s:
            print(f"{left_s:.0f} s left, too few for {errand.about}.", flush=True)
            continue
        print(f"\n{left_s:.0f} s left: {errand.about}", flush=True)
        command = errand.command(left_s)
        print(shlex.join(["python", *command[1:]]), flush=True)
        status = call(command, left_s + _PATIENCE_S)
        first = first or status
    return first


def _called(command: list[str], timeout_s: float) -> int:
    try:
        return subprocess.run(command, check=False, timeout=timeout_s).returncode
    except subprocess.TimeoutExpired:
        print("It was stopped, as it did not end.", flush=True)
        return 124


def seed(folder: Path, card: str) -> list[str]:
    """Put the package's recordings of a card into the store that tuning uses; return their names.

    Args:
        folder: of the recording; one that has a store is left as it is.
        card: such as nvidia-h200, which has the recordings whose names begin with h200.
    """
    from bench.record import STORE, recording
    from mucudnn.store import SqliteStore

    if (folder / STORE).exists():
        return []
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    with recording(folder) as store:
        for path in sorted(_RECORDINGS.glob(f"{card.removeprefix('nvidia-')}*.sqlite3.gz")):
            with SqliteStore(path, read_only=True) as known:
                known.copy_into(store)
            names.append(path.name.partition(".")[0])
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what there is time for, or list it; return the exit status."""
    parser = argparse.ArgumentParser(prog="bench.gpu.rest", description=__doc__)
    parser.add_argument(
        "--seconds", type=seconds, default=_SECONDS, help="for all of it (default: %(default).0f)"
    )
    parser.add_argument("--list", action="store_true", help="print the commands and end")
    options = parser.parse_args(arguments)
    if options.list:
        for errand in ERRANDS:
            print(f"{errand.about}:\n    {shlex.join(['python', *errand.command(options.seconds)[1:]])}")
        return 0
    reason = obstacle()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    import torch

    from bench.gpu.results import slug
    from bench.record import folder_of

    card = slug(torch.cuda.get_device_name())
    names = seed(folder_of(torch.device("cuda")), card)
    print(f"Begun with the recordings: {', '.join(names) or 'none'}.")
    return run(ERRANDS, options.seconds, _called)


if __name__ == "__main__":
    sys.exit(main())
