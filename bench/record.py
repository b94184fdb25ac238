"""Tune networks for the limits of µ-cuDNN, and keep all that is measured in one recording.

The recording is a store: `mucudnn tune --backend replay:FILE` answers from it on any machine, for these
limits and in both modes, with #1 or #2 behind it where TF32 was allowed for some and not for others. Plans
lie beside it, with a summary of them all. What is known is not measured again: a run that was interrupted, or
whose time was up, is gone on with by the next one, from the packed recording if that is all there is.
"""

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from bench.arguments import seconds
from bench.attempts import Attempts
from bench.cpu.process import reason_of
from bench.endings import INTERRUPTED
from bench.gpu.results import slug
from bench.precision import tf32
from bench.ship import MOST_BYTES
from bench.workloads import LAYERS, NETWORKS, SETTINGS, Setting, Workload, chosen, in_order, operands
from mucudnn import tune
from mucudnn.backends import backend_for
from mucudnn.choices import Mode
from mucudnn.errors import DeviceLostError, InfeasibleError, MucudnnError
from mucudnn.plan import Plan
from mucudnn.profile import Environment
from mucudnn.report import render_plan
from mucudnn.report.table import table
from mucudnn.report.totals import Totals
from mucudnn.sizes import format_bytes
from mucudnn.store import SqliteStore

STORE = "recording.sqlite3"
PACKED = f"{STORE}.gz"
COSTS = "costs.jsonl"

_LEAST_TIME_S = 30.0
"""With which a new process is begun after the device was lost."""

_PACKING_S = 60.0
"""Between two packed recordings, so that a run that is killed leaves one."""


@dataclasses.dataclass(frozen=True)
class Aim:
    """A limit, and whose it is."""

    limit: str
    mode: Mode

    @property
    def name(self) -> str:
        """For files and tables."""
        return f"{self.limit}-{self.mode}"


AIMS: tuple[Aim, ...] = (
    Aim("512MiB", Mode.REUSE),  # first: what it measures serves the others
    Aim("64MiB", Mode.REUSE),
    Aim("8MiB", Mode.REUSE),
    Aim("512MiB", Mode.SHARING),
)


class TimeIsUpError(Exception):
    """The time that was given is over."""


class BrokenDeviceError(Exception):
    """The device works no more, and no algorithm is blamed."""


class Watch:
    """A `Progress` that ends a tuning run when the time is up; what it has measured is kept.

    Args:
        end_s: of `time.monotonic`.
    """

    def __init__(self, end_s: float) -> None:
        self._end_s = end_s

    def begin(self, work: float) -> None:
        """Nobody is told."""

    def at(self, what: str, done: float) -> None:  # noqa: ARG002  # the protocol's
        """Go on, or not.

        Raises:
            TimeIsUpError: not.
        """
        self.check()

    def end(self, measured: int) -> None:
        """Nobody is told."""

    def check(self) -> None:
        """Raise if the time is up.

        Raises:
            TimeIsUpError: it is.
        """
        if time.monotonic() > self._end_s:
            raise TimeIsUpError("The time is up; the next run goes on.")


class Recorder:
    """Tunes workloads on one device into one folder.

    Attributes:
        missing: plans that failed, or were left out as processes have ended in them.

    Args:
        folder: of the recording, the plans and the summary.
        device: where the networks lie.
        watch: which ends it.
    """

    def __init__(self, folder: Path, device: torch.device, watch: Watch) -> None:
        self._folder = folder
        self._device = device
        self._watch = watch
        self.missing = 0
        self._packed_s = time.monotonic()

    def record(self, workloads: Sequence[Workload], settings: Sequence[Setting]) -> None:
        """Tune all workloads in all settings, in their order.

        Raises:
            TimeIsUpError: the time was not enough.
            DeviceLostError: an algorithm has broken the device; it is known now, and not tried again.
            BrokenDeviceError: something else has broken the device.
        """
        with recording(self._folder) as store:
            for workload, setting in in_order(workloads, settings):
                with tf32(setting.allow_tf32):
                    self._record(workload, setting, store)

    def _record(self, workload: Workload, setting: Setting, store: SqliteStore) -> None:
        present = backend_for("auto", self._device).environment()
        left = [aim for aim in AIMS if not _is_known(self._path(workload, setting, aim), present)]
        if not left:
            return
        self._watch.check()
        try:
            model, sample = operands(workload, setting, self._device)
        except Exception as error:  # noqa: BLE001  # whatever one network dies of, the others are to be had
            self._check_device()
            self._say(workload, setting, "", 0.0, f"failed: {reason_of(error)}")
            self.missing += len(left)
            return
        for aim in left:
            path = self._path(workload, setting, aim)
            start, known = time.monotonic(), store.count()
            attempts = Attempts(path.with_suffix(".begun"), (TimeIsUpError, DeviceLostError))
            if attempts.give_up_if_vain(known):
                told = (
                    f"skipped: runs ended in it and got no further; delete {attempts.path.name} to try again"
                )
                self._say(workload, setting, aim.name, 0.0, told)
                self.missing += 1
                continue
            try:
                with attempts.another(known):
                    told = self._planned(model, sample, aim, store, path)
            finally:
                seconds, measured = time.monotonic() - start, store.count() - known
                keep_cost(self._folder, workload, setting, aim.name, seconds, measured)
            self._say(workload, setting, aim.name, seconds, told)
            self._pack_now_and_then(store)

    def _pack_now_and_then(self, store: SqliteStore) -> None:
        """Pack what there is if that was long ago, so that a run that is killed leaves it."""
        if time.monotonic() - self._packed_s > _PACKING_S:
            store.pack(self._folder / PACKED)
            self._packed_s = time.monotonic()

    def _planned(self, model: nn.Module, sample: Tensor, aim: Aim, store: SqliteStore, path: Path) -> str:
        """Tune for one aim and save the plan; return what came of it, in a line."""
        try:
            plan = tune(model, sample, aim.limit, mode=aim.mode, store=store, progress=self._watch)
        except (DeviceLostError, TimeIsUpError):
            raise
        except InfeasibleError as error:
            return f"nothing fits: {error}"
        except Exception as error:  # noqa: BLE001  # whatever one plan dies of, the others are to be had
            self._check_device()
            self.missing += 1
            return f"failed: {reason_of(error)}"
        self._check_device()  # once it is broken every site is left as it was
        plan.save(path)
        path.with_suffix(".txt").write_text(render_plan(plan) + "\n", encoding="utf-8")
        totals = Totals.of(plan)
        return "nothing was timed" if totals.speedup is None else f"x{totals.speedup:.2f}"

    def _check_device(self) -> None:
        """Verify that the device still works.

        Raises:
            BrokenDeviceError: it does not.
        """
        try:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise BrokenDeviceError(f"The device works no more: {reason_of(error)}") from error

    def _say(self, workload: Workload, setting: Setting, aim: str, seconds: float, told: str) -> None:
        taken = f"{seconds:.1f} s"
        print(f"{workload.name:22} {setting.name:14} {aim:15} {taken:>8}  {told}", flush=True)

    def _path(self, workload: Workload, setting: Setting, aim: Aim) -> Path:
        name = workload.name.replace("/", "-")
        return self._folder / "plans" / f"{name}.{setting.name}.{aim.name}.json"


def _is_known(path: Path, present: Environment) -> bool:
    """Whether there is a plan, made in the present environment."""
    return path.exists() and Plan.load(path).environment.key == present.key


def recording(folder: Path) -> SqliteStore:
    """Return the recording in a folder, with what its packed form holds if there is nothing else."""
    path, packed = folder / STORE, folder / PACKED
    is_new = not path.exists()
    store = SqliteStore(path)
    if is_new and packed.exists():
        with SqliteStore(packed, read_only=True) as known:
            known.copy_into(store)
    return store


def keep_cost(
    folder: Path, workload: Workload, setting: Setting, aim: str, seconds: float, measured: int
) -> None:
    """Keep what tuning took, also where the time was up: a plan costs the sum of its lines."""
    cost = {"network": workload.name, "setting": setting.name, "aim": aim}
    line = json.dumps({**cost, "seconds": round(seconds, 3), "trials": measured})
    with (folder / COSTS).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def seconds_of(folder: Path, network: str, setting: str) -> float:
    """Return how long tuning a network in a setting has taken in all, for all aims."""
    path = folder / COSTS
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    costs = (json.loads(line) for line in lines)
    return math.fsum(
        cost["seconds"] for cost in costs if (cost["network"], cost["setting"]) == (network, setting)
    )


def summary(folder: Path) -> str:
    """Return a table of all plans in the folder of a recording: what each adds up to."""
    plans = {path: Plan.load(path) for path in sorted(folder.glob("plans/*.json"))}
    groups: dict[str, list[tuple[str, ...]]] = {}
    for path, plan in plans.items():
        workload, setting, aim = path.stem.split(".")
        groups.setdefault(f"{workload}, {setting}", []).append(_row(aim, plan))
    headings = ("limit", "sites", "divided", "exchanged", "before [ms]", "now [ms]", "as fast", "workspace")
    lines = table(headings, "<>>>>>>>", list(groups.items()))
    return "\n".join(
        [
            *lines,
            "",
            "Sums of medians over the sites whose times before (PyTorch's own convolution as it comes) and",
            "now are both known, from the same rounds. Intervals and losses stand in the plans.",
        ]
    )


def _row(aim: str, plan: Plan) -> tuple[str, ...]:
    totals = Totals.of(plan)
    speedup = "" if totals.speedup is None else f"x{totals.speedup:.2f}"
    counts = (totals.sites, totals.divided, totals.exchanged)
    times = (f"{seconds * 1e3:.2f}" for seconds in (totals.before_s, totals.now_s))
    return (aim, *map(str, counts), *times, speedup, format_bytes(plan.workspace_bytes))


def _device(name: str) -> torch.device:
    """Return the device of that name, if networks can lie there."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"there is no device {name!r}") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(f"torch sees no device {name!r}")
    return device


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.record", description=__doc__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=_device, default=device, help="(default: %(default)s)")
    parser.add_argument(
        "--seconds", type=seconds, default=math.inf, help="after which nothing new is begun (default: no end)"
    )
    parser.add_argument(
        "--networks", nargs="+", default=["*"], metavar="PATTERN",
        help="names, as in a shell: " + ", ".join(each.name for each in NETWORKS)
        + ", deepbench/* (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--settings", nargs="+", default=["*"], metavar="PATTERN",
        help="names, as in a shell: " + ", ".join(each.name for each in SETTINGS) + " (default: all)",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, help="folder (default: build/record/ and the device's name)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Record what is asked for; return the exit status."""
    options = _parser().parse_args(arguments)
    settings = chosen(options.settings, SETTINGS)
    lists = [chosen(options.networks, workloads) for workloads in (NETWORKS, LAYERS)]
    if not (any(lists) and settings):
        print("bench.record: no network or no setting has such a name.", file=sys.stderr)
        return 2
    folder = options.output or folder_of(options.device)
    (folder / "plans").mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + options.seconds
    recorder = Recorder(folder, options.device, Watch(end_s))
    status, is_lost = 1, False
    try:
        for workloads in lists:  # single layers when all networks are done, in all settings
            recorder.record(workloads, settings)
        print(f"Plans that are missing: {recorder.missing}." if recorder.missing else "All is recorded.")
        status = 0
    except TimeIsUpError as error:
        print(error)
        status = 0
    except (DeviceLostError, BrokenDeviceError) as error:
        print(f"bench.record: {error}", file=sys.stderr, flush=True)
        is_lost = True
    except KeyboardInterrupt:
        print("bench.record: interrupted; the next run goes on.", file=sys.stderr)
        status = INTERRUPTED
    except (MucudnnError, RuntimeError) as error:
        print(f"bench.record: {error} Run the same command again to go on.", file=sys.stderr)
    finally:
        _conclude(folder)
    if is_lost:
        _go_on_in_another_process(options, end_s - time.monotonic())
    return status


def _go_on_in_another_process(options: argparse.Namespace, seconds: float) -> None:
    """Become a process anew, for which the device works again, if there is time left; else return."""
    if seconds < _LEAST_TIME_S:
        return
    print(f"Going on with a new process, {seconds:.0f} s left.", flush=True)
    arguments = ["--device", str(options.device), "--seconds", str(seconds)]
    arguments += ["--networks", *options.networks, "--settings", *options.settings]
    arguments += [] if options.output is None else ["--output", str(options.output)]
    os.execv(sys.executable, [sys.executable, "-m", "bench.record", *arguments])


def _conclude(folder: Path) -> None:
    """Pack the recording, and write and print the summary of its plans."""
    with recording(folder) as store:
        store.pack(folder / PACKED)
    packed_bytes = (folder / PACKED).stat().st_size
    text = summary(folder)
    (folder / "summary.txt").write_text(text + "\n", encoding="utf-8")
    size = format_bytes(packed_bytes)
    over = f", more than {format_bytes(MOST_BYTES)}" if packed_bytes > MOST_BYTES else ""
    print(f"\n{text}\n\nWritten to {folder}; {PACKED} is of {size}{over}.")


def folder_of(device: torch.device) -> Path:
    """Return where the recording of a device goes if nothing else is said."""
    return Path("build/record", slug(torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"))


if __name__ == "__main__":
    sys.exit(main())
