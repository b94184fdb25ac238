"""Tune networks for the limits of µ-cuDNN, and keep all that is measured in one recording.

The recording is a store: `mucudnn tune --backend replay:FILE` answers from it on any machine, for these
limits and in both modes. Plans lie beside it, with a summary of them all. What is known is not measured
again: a run that was interrupted, or whose time was up, is gone on with by the next one.
"""

import argparse
import contextlib
import dataclasses
import fnmatch
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from bench import networks
from bench.cpu import deepbench
from bench.gpu.results import slug
from bench.precision import tf32
from mucudnn import tune
from mucudnn.algorithms.base import memory_format
from mucudnn.backends import backend_for
from mucudnn.choices import Mode
from mucudnn.errors import DeviceLostError, InfeasibleError, MucudnnError
from mucudnn.plan import Plan
from mucudnn.problem import Layout
from mucudnn.progress import Silence
from mucudnn.report import render_plan
from mucudnn.report.plans import Totals
from mucudnn.report.table import table
from mucudnn.sizes import format_bytes
from mucudnn.store import SqliteStore

Named = TypeVar("Named", "Workload", "Setting")

STORE = "recording.sqlite3"
PACKED = f"{STORE}.gz"


@dataclasses.dataclass(frozen=True)
class Workload:
    """A network and the mini-batch with which it is trained.

    Attributes:
        name: of both.
        build: returns the network, with weights from torch's global generator.
        shape: of the images, the mini-batch first.
        wants_gradient: whether that of the images is computed as well, as if there were a layer before.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    wants_gradient: bool = False


@dataclasses.dataclass(frozen=True)
class Setting:
    """Type and layout of images and filters, and whether float32 may be multiplied in TF32."""

    name: str
    dtype: torch.dtype
    layout: Layout
    allow_tf32: bool = False


@dataclasses.dataclass(frozen=True)
class Aim:
    """A limit, and whose it is."""

    limit: str
    mode: Mode

    @property
    def name(self) -> str:
        """For files and tables."""
        return f"{self.limit}-{self.mode}"


def _layer(row: deepbench.Row) -> Workload:
    name, batch, c, size, k, taps, padding, stride = row
    build = partial(nn.Conv2d, c, k, taps, stride, padding, bias=False)
    return Workload(f"deepbench/{name}", build, (batch, c, *size), wants_gradient=True)


WORKLOADS: tuple[Workload, ...] = (
    Workload("alexnet", networks.alexnet, (256, 3, 224, 224)),
    Workload("resnet18", networks.resnet18_224, (128, 3, 224, 224)),
    Workload("vgg16", networks.vgg16, (64, 3, 224, 224)),
    Workload("resnet50", networks.resnet50, (64, 3, 224, 224)),
    Workload("unet3d", networks.unet3d, (2, 3, 64, 64, 64)),
    Workload("densenet40", networks.densenet40, (256, 3, 32, 32)),
    *map(_layer, deepbench.LAYERS),
)
"""In the order in which they are tuned."""

SETTINGS: tuple[Setting, ...] = (
    Setting("float32-nchw", torch.float32, Layout.CONTIGUOUS),
    Setting("bfloat16-nhwc", torch.bfloat16, Layout.CHANNELS_LAST),
    Setting("tf32-nchw", torch.float32, Layout.CONTIGUOUS, allow_tf32=True),
    Setting("bfloat16-nchw", torch.bfloat16, Layout.CONTIGUOUS),
    Setting("float32-nhwc", torch.float32, Layout.CHANNELS_LAST),
    Setting("tf32-nhwc", torch.float32, Layout.CHANNELS_LAST, allow_tf32=True),
)

AIMS: tuple[Aim, ...] = (
    Aim("512MiB", Mode.REUSE),  # first: what it measures serves the others
    Aim("64MiB", Mode.REUSE),
    Aim("8MiB", Mode.REUSE),
    Aim("512MiB", Mode.SHARING),
)
"""The limits for each layer of the original's section IV; its totals depend on the network."""


def operands(workload: Workload, setting: Setting, device: torch.device) -> tuple[nn.Module, Tensor]:
    """Return a network in training mode, and normal random images; the same ones every time."""
    torch.manual_seed(0)
    dense = memory_format(setting.layout, len(workload.shape))
    model = workload.build().to(device, setting.dtype)
    model.to(memory_format=dense)  # type: ignore[call-overload]  # torch's hints lack it
    sample = torch.randn(workload.shape, device=device, dtype=setting.dtype)
    sample = sample.contiguous(memory_format=dense)
    return model, sample.requires_grad_(workload.wants_gradient)


class TimeIsUpError(Exception):
    """The time that was given is over."""


class Watch(Silence):
    """Ends a tuning run when the time is up; what it has measured is kept."""

    def __init__(self, end_s: float) -> None:
        self._end_s = end_s

    def at(self, what: str, done: float) -> None:  # noqa: ARG002  # the protocol's
        """Go on, or not.

        Raises:
            TimeIsUpError: not.
        """
        if time.monotonic() > self._end_s:
            raise TimeIsUpError


class Recorder:
    """Tunes workloads on one device into one folder.

    Args:
        folder: of the recording, the plans and the summary.
        device: where the networks lie.
        end_s: of `time.monotonic`, after which nothing new is begun.
    """

    def __init__(self, folder: Path, device: torch.device, end_s: float) -> None:
        self._folder = folder
        self._device = device
        self._end_s = end_s

    def record(self, workloads: Sequence[Workload], settings: Sequence[Setting]) -> bool:
        """Tune all workloads in all settings; return whether the time was enough.

        Raises:
            DeviceLostError: an algorithm has broken the device; it is known now, and not tried again.
        """
        with SqliteStore(self._folder / STORE) as store:
            try:
                for setting in settings:
                    for workload in workloads:
                        with tf32(setting.allow_tf32):
                            self._record(workload, setting, store)
            except TimeIsUpError:
                return False
        return True

    def _record(self, workload: Workload, setting: Setting, store: SqliteStore) -> None:
        left = [aim for aim in AIMS if not self._is_known(workload, setting, aim)]
        if not left:
            return
        if time.monotonic() > self._end_s:
            raise TimeIsUpError
        model, sample = operands(workload, setting, self._device)
        for aim in left:
            start = time.monotonic()
            told = self._planned(model, sample, aim, store, self._path(workload, setting, aim))
            seconds = f"{time.monotonic() - start:.1f} s"
            print(f"{workload.name:22} {setting.name:14} {aim.name:15} {seconds:>8}  {told}", flush=True)

    def _planned(self, model: nn.Module, sample: Tensor, aim: Aim, store: SqliteStore, path: Path) -> str:
        """Tune for one aim and save the plan; return what came of it, in a line."""
        try:
            plan = tune(model, sample, aim.limit, mode=aim.mode, store=store, progress=Watch(self._end_s))
        except DeviceLostError:
            raise
        except InfeasibleError as error:
            return f"nothing fits: {error}"
        except (MucudnnError, torch.OutOfMemoryError) as error:
            return f"failed: {str(error).splitlines()[0]}"
        plan.save(path)
        path.with_suffix(".txt").write_text(render_plan(plan) + "\n", encoding="utf-8")
        totals = Totals.of(plan)
        return "nothing was timed" if totals.speedup is None else f"x{totals.speedup:.2f}"

    def _path(self, workload: Workload, setting: Setting, aim: Aim) -> Path:
        name = workload.name.replace("/", "-")
        return self._folder / "plans" / f"{name}.{setting.name}.{aim.name}.json"

    def _is_known(self, workload: Workload, setting: Setting, aim: Aim) -> bool:
        """Whether there is such a plan, made in the present environment."""
        path = self._path(workload, setting, aim)
        if not path.exists():
            return False
        present = backend_for("auto", self._device).environment()
        return Plan.load(path).environment.key == present.key


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


def chosen(patterns: Sequence[str], named: Iterable[Named]) -> list[Named]:
    """Return those whose names match some pattern, as in a shell, in their order."""
    return [each for each in named if any(fnmatch.fnmatchcase(each.name, pattern) for pattern in patterns)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.record", description=__doc__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=device, help="(default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="after which nothing new is begun (default: no end)"
    )
    parser.add_argument(
        "--networks", nargs="+", default=["*"], metavar="PATTERN",
        help="names, as in a shell: " + ", ".join(each.name for each in WORKLOADS if "/" not in each.name)
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
    end_s = time.monotonic() + options.seconds
    workloads, settings = chosen(options.networks, WORKLOADS), chosen(options.settings, SETTINGS)
    if not (workloads and settings):
        print("bench.record: no network or no setting has such a name.", file=sys.stderr)
        return 2
    folder = options.output or folder_of(options.device)
    (folder / "plans").mkdir(parents=True, exist_ok=True)
    status = 0
    try:
        with contextlib.suppress(KeyboardInterrupt):
            is_done = Recorder(folder, options.device, end_s).record(workloads, settings)
            print("All is recorded." if is_done else "The time is up; the next run goes on.")
    except DeviceLostError as error:
        print(f"bench.record: {error} Run the same command again to go on without it.", file=sys.stderr)
        status = 1
    except MucudnnError as error:
        print(f"bench.record: {error}", file=sys.stderr)
        return 1
    _conclude(folder)
    return status


def _conclude(folder: Path) -> None:
    """Pack the recording, and write and print the summary of its plans."""
    with SqliteStore(folder / STORE) as store:
        store.pack(folder / PACKED)
    text = summary(folder)
    (folder / "summary.txt").write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}\n\nWritten to {folder}.")


def folder_of(device: torch.device) -> Path:
    """Return where the recording of a device goes if nothing else is said."""
    return Path("build/record", slug(torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"))


if __name__ == "__main__":
    sys.exit(main())
