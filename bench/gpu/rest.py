"""`make gpu-rest`: what no card has shown yet, one errand after the other for as long as there is time.

Cards are lent for minutes, so what is still to be shown is listed in the order of what it tells, each with
the time that it may take. An errand is one of the programs beside this one. What is known is not measured
again: results are added to a folder under build/, which begins with what `bench/results` has, and the next
run goes on. (A machine that is lent gets tracked files anew at each call, and keeps what is ignored.) Tuning
begins with the recordings that come with the package. `python -m bench.gpu.rest --list` prints all commands,
anywhere.
"""

import argparse
import functools
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bench.arguments import seconds
from bench.endings import INTERRUPTED
from bench.gpu.available import obstacle
from bench.gpu.hanging import DYING_S, heed_termination, status_of
from bench.gpu.layer_run import PATIENCE_S
from mucudnn.errors import MucudnnError

if TYPE_CHECKING:
    from bench.gpu.rest_results import Held  # needs torch, which is imported where it is needed
    from mucudnn.profile import Environment

_RECORDINGS = Path("mucudnn/recordings")
_RESULTS = Path("bench/results")

_OF_LAYERS = "deepbench"
"""How names of recordings go on whose candidates were timed three times, too few for plans of networks."""

_PROFILES = Path("build/gpu-layers")
_KEPT = Path("build/gpu-rest")

_SECONDS = 480.0
"""Of ten minutes: setting up comes before."""

_AROUND_S = 25.0
"""That a program takes beside its time: it imports torch before it, and after it ends what it has begun."""

_PROCESS_S = 28.0
"""More of that, where a process of the program's own imports torch once more and examines the networks."""

_RACES_S = 30.0
"""More of that, where a training step is timed in all ways, in rounds that do not look at the time."""

_LONG_RACES_S = 60.0
"""The same of the largest networks."""

_PACKING_S = 5.0
"""For the stores, at the end."""

_PATIENCE_S = 45.0
"""By how much a program may pass its time, and that of processes of its own, before it is killed."""

_CONCLUDING_S = 8.0
"""That it has before, after an interrupt, to say what it was stopped in: that is tried again. A process of
its own may take three seconds to end, and the lines are read once more."""

_CASE_S, _LARGE_CASE_S = 60, 90
"""Seconds after which a case of layers is taken to hang, and one of a large mini-batch."""


class Errand(NamedTuple):
    """One thing to be shown.

    Attributes:
        about: what it shows.
        program: module that shows it.
        arguments: of the program, without time and folder.
        least_s: seconds with which it is begun.
        most_s: that it is given.
        processes_s: by which processes of its own may pass that before it kills them.
        races_s: what it has begun to time may take after that, and would be lost.
    """

    about: str
    program: str
    arguments: tuple[str, ...]
    least_s: float
    most_s: float
    processes_s: float = 0.0
    races_s: float = 0.0

    def seconds(self, left_s: float) -> float:
        """Return the time that it is given if it is begun with so much left."""
        around_s = _AROUND_S + self.races_s + (_PROCESS_S if self.processes_s else 0.0)
        return min(left_s - around_s, self.most_s)

    def timeout_s(self, left_s: float) -> float:
        """Return after how many seconds it is stopped then: when nothing is left, if not before."""
        beyond_s = self.processes_s + self.races_s + _PATIENCE_S
        return min(left_s - _CONCLUDING_S - DYING_S, self.seconds(left_s) + beyond_s)

    def command(self, left_s: float, output: Path | None = None) -> list[str]:
        """Return how it is run then, and whereto its results go if that is said."""
        given = ["--seconds", f"{self.seconds(left_s):.0f}"]
        if output is not None and self.program != "bench.record":
            given += ["--output", str(output)]
        return [sys.executable, "-m", self.program, *self.arguments, *given]

    def is_shown(self, held: "Held") -> bool:
        """Return whether lines hold all of it, steps with all controls; nobody knows of plans."""
        if self.program == "bench.gpu.steps":
            network, setting, limit = self.arguments[1::2]
            return held.steps([network], [setting], [limit])
        return self.program == "bench.gpu.layer_run" and held.layers(self.arguments)


def _record(network: str, setting: str, most_s: float) -> Errand:
    arguments = ("--networks", network, "--settings", setting)
    return Errand(f"plans of {network}, {setting}", "bench.record", arguments, 40.0, most_s)


def _steps(
    network: str,
    setting: str,
    least_s: float,
    most_s: float,
    limit: str = "64MiB",
    *,
    races_s: float = _RACES_S,
) -> Errand:
    """Return an errand that is begun if there is time to tune both ways: before that nothing is timed.

    It is given what that takes on a card without recordings; with them it ends earlier by itself.
    """
    arguments = ("--networks", network, "--settings", setting, "--limit", limit)
    about = f"training steps of {network}, {setting}, {limit}"
    return Errand(about, "bench.gpu.steps", arguments, least_s, most_s, races_s=races_s)


def _layers(
    about: str,
    layers: Sequence[str],
    settings: Sequence[str],
    most_s: float,
    *more: str,
    case_s: int = _CASE_S,
) -> Errand:
    arguments = ("--layers", *layers, "--settings", *settings, "--case-seconds", str(case_s), "--untold")
    return Errand(about, "bench.gpu.layer_run", (*arguments, *more), 30.0, most_s, case_s + PATIENCE_S)


_DEEPBENCH = ["deepbench/*_b16"]

_CLIFFS = ["cliffs/dw7x7", "cliffs/rn50_c1", "cliffs/grp32", "cliffs/conv3d"]

_LARGE = ["vgg16_b512/conv[123]_2", "resnet18_b512/stage1.0.first.conv", "resnet18_b512/stage2.0.second.conv"]

ERRANDS: tuple[Errand, ...] = (
    _steps("resnet18", "bfloat16-nhwc", 90.0, 110.0, "8MiB"),
    _layers("DeepBench's list in strict float32, contiguous", _DEEPBENCH, ["float32-nchw"], 200.0),
    _layers("cliffs", _CLIFFS, ["float32-nchw", "bfloat16-nhwc"], 90.0),
    _steps("unet3d", "tf32-nchw", 90.0, 150.0),
    _steps("vgg16", "float32-nchw", 150.0, 240.0, races_s=_LONG_RACES_S),
    _layers("DeepBench's list in TF32, channels_last", _DEEPBENCH, ["tf32-nhwc"], 240.0),
    _steps("resnet50", "bfloat16-nhwc", 170.0, 240.0, races_s=_LONG_RACES_S),
    _steps("resnet18", "float32-nchw", 100.0, 150.0),
    _steps("resnet18", "tf32-nchw", 80.0, 110.0, "8MiB"),
    _steps("alexnet", "tf32-nchw", 60.0, 80.0),
    _layers("DeepBench's list in strict float32, channels_last", _DEEPBENCH, ["float32-nhwc"], 240.0),
    _layers("cliffs in bfloat16, contiguous", _CLIFFS, ["bfloat16-nchw"], 60.0),
    _record("resnet50", "bfloat16-nhwc", 60.0),
    _steps("alexnet", "bfloat16-nhwc", 60.0, 80.0),
    _steps("unet3d", "bfloat16-nhwc", 90.0, 150.0),
    _layers("all sizes of micro-batches", ["deepbench/speaker*_b16"], ["float32-nchw"], 60.0,
            "--policy", "all"),
    _layers("DeepBench's list in bfloat16, contiguous", _DEEPBENCH, ["bfloat16-nchw"], 300.0),
    _layers("workspace saved on large batches", _LARGE, ["bfloat16-nchw"], 200.0,
            "--limit", "64MiB", "512MiB", case_s=_LARGE_CASE_S),
    _record("vgg16", "float32-nchw", 200.0),
    _record("densenet40", "bfloat16-nhwc", 300.0),
)  # fmt: skip
"""By what each tells in its time: what lost most on the H200, what tells cards apart, what none has shown."""


def unshown(errands: Sequence[Errand], held: "Held") -> list[Errand]:
    """Return the errands that are left, in their order, and tell of those that are not."""
    left = []
    for errand in errands:
        if errand.is_shown(held):
            print(f"Known: {errand.about}.")
        else:
            left.append(errand)
    return left


def run(
    errands: Sequence[Errand],
    left_s: float,
    call: Callable[[list[str], float], int],
    output: Path | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run errands in their order, until the time is over; return the first status of those that failed, or 0.

    Args:
        errands: what is to be shown.
        left_s: seconds for all of them.
        call: runs a command, stops it after so many seconds, and returns its status.
        output: folder of results; None for that of the card.
        clock: seconds.
    """
    end_s, first = clock() + left_s, 0
    for errand in errands:
        left_s = end_s - clock()
        if errand.seconds(left_s) < errand.least_s:
            print(f"{left_s:.0f} s left, too few for {errand.about}.", flush=True)
            continue
        command = errand.command(left_s, output)
        print(f"\n{left_s:.0f} s left: {errand.about}\n{_told(command)}", flush=True)
        status = call(command, errand.timeout_s(left_s))
        if status:  # a process that was killed says nothing itself
            print(f"That ended with status {status}: {errand.about}.", flush=True)
        first = first or status
    return first


def _told(command: Sequence[str]) -> str:
    return shlex.join(["python", *command[1:]])


def seed(folder: Path, card: str) -> list[str]:
    """Put what the package knows of a card where tuning looks for it; return the names of the recordings.

    Args:
        folder: of the recording; one that has a store or a packed one is left as it is.
        card: such as nvidia-h200, which has the recordings of networks whose names begin with h200 (and
            nvidia-h20 has not), or nvidia-h100-80gb-hbm3, which has those of h100.
    """
    from bench.record import COSTS, PACKED, STORE  # needs torch
    from mucudnn.store import SqliteStore

    if (folder / STORE).exists() or (folder / PACKED).exists():
        return []
    folder.mkdir(parents=True, exist_ok=True)
    model = card.removeprefix("nvidia-").partition("-")[0]
    paths = sorted(_RECORDINGS.glob(f"{model}[-.]*sqlite3.gz"))
    paths = [path for path in paths if not path.name.startswith(f"{model}-{_OF_LAYERS}")]
    costs = _RESULTS / card / f"record-{COSTS}"
    if costs.exists():
        shutil.copy(costs, folder / COSTS)
    beside = folder / f"{STORE}.part"  # who is killed in here has no store, rather than half of one
    beside.unlink(missing_ok=True)
    with SqliteStore(beside) as store:
        for path in paths:
            with SqliteStore(path, read_only=True) as known:
                known.copy_into(store)
    beside.replace(folder / STORE)
    return [path.name.partition(".")[0] for path in paths]


def pack(*folders: Path) -> None:
    """Pack the recordings in folders, as far as they have any: a lent machine gives no large files back."""
    from bench.record import PACKED, STORE, recording

    for folder in folders:
        if (folder / STORE).exists():
            with recording(folder) as store:
                store.pack(folder / PACKED)
            print(f"Packed: {folder / PACKED}.", flush=True)


def present_environment() -> "Environment":
    """Return that of the card that is taken if nothing else is said."""
    from mucudnn.backends import backend_of

    return backend_of("cudnn:").environment()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what there is time for, or list it; return the exit status."""
    parser = argparse.ArgumentParser(prog="bench.gpu.rest", description=__doc__)
    parser.add_argument(
        "--seconds", type=seconds, default=_SECONDS, help="for all of it (default: %(default).0f)"
    )
    parser.add_argument("--list", action="store_true", help="print the commands and end")
    parser.add_argument(
        "--output",
        type=Path,
        help="folder of layers and steps (default: one under build/gpu-rest/, with what bench/results/ has)",
    )
    options = parser.parse_args(arguments)
    end_s = time.monotonic() + options.seconds
    if options.list:
        for errand in ERRANDS:
            print(f"{errand.about}:\n    {_told(errand.command(options.seconds, options.output))}")
        return 0
    reason = obstacle()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    try:
        return _run_unshown(options.output, end_s)
    except (MucudnnError, OSError, ValueError) as error:
        print(f"bench.gpu.rest: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench.gpu.rest: interrupted; the next run goes on.", file=sys.stderr)
        return INTERRUPTED


def _run_unshown(folder: Path | None, end_s: float) -> int:
    """Run what the lines of a folder, or those of the card, do not hold; return the exit status.

    Raises:
        MucudnnError: the card, or a recording, cannot be used.
        OSError, ValueError: lines cannot be read.
    """
    import torch

    from bench.gpu.rest_results import Held, differences, take_up
    from bench.gpu.results import slug
    from bench.record import folder_of

    card = slug(torch.cuda.get_device_name())
    output, present = folder or _KEPT / card, present_environment()
    others = differences(output, present)
    if others:
        told = f"{output} must hold lines of one environment, but {'; '.join(others)}: give another --output."
        print(f"bench.gpu.rest: {told}", file=sys.stderr)
        return 2
    names = seed(folder_of(torch.device("cuda")), card)
    print(f"Recordings that come with the package and were added: {', '.join(names) or 'none'}.")
    known = differences(_RESULTS / card, present)
    if known:
        print(f"What {_RESULTS / card} holds is to be shown anew: {'; '.join(known)}.")
    elif folder is None:
        take_up(_RESULTS / card, output)
    print(f"Results are added to {output}.")
    left, call = unshown(ERRANDS, Held(output)), functools.partial(status_of, concluding_s=_CONCLUDING_S)
    try:
        return run(left, end_s - _PACKING_S - time.monotonic(), call, output)
    finally:
        pack(folder_of(torch.device("cuda")), _PROFILES / card)
        print(f"Summaries, anywhere: python -m bench.gpu.layer_run --retell {output}")


if __name__ == "__main__":
    heed_termination()
    sys.exit(main())
