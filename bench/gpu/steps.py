"""Whole training steps on a card: as PyTorch comes, with `cudnn.benchmark`, undivided and divided in a limit.

All ways begin with the same weights and train on the same batch. Those that are compared run in the same
rounds; `cudnn.benchmark` comes last, since PyTorch keeps what it has found for the whole process, and is
compared with the divided network once more. Profiles are those of `make record` where it has run.
"""

import argparse
import copy
import dataclasses
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name that PyTorch's users know it by

from bench.gpu.available import obstacle
from bench.gpu.ground import CardGround, Ground
from bench.gpu.results import slug
from bench.gpu.sections import attempted
from bench.gpu.values import Timing, duration, jsonable
from bench.record import (
    SETTINGS,
    STORE,
    WORKLOADS,
    Setting,
    TimeIsUpError,
    Watch,
    Workload,
    chosen,
    folder_of,
    operands,
)
from mucudnn import apply, tune
from mucudnn.errors import DeviceLostError, MucudnnError
from mucudnn.intervals import Verdict, compare, ratio
from mucudnn.plan import Plan
from mucudnn.profile import Measurement
from mucudnn.report.table import table
from mucudnn.sizes import format_bytes, parse_bytes
from mucudnn.store import open_store
from mucudnn.timing import SamplingRule, compare_runs

PYTORCH, BENCHMARK, UNDIVIDED, DIVIDED = "as it comes", "benchmark", "undivided", "divided"
"""Ways to train; the first two are PyTorch's own, the others within the limit."""

ROUNDS = SamplingRule(looks=(10, 15, 20, 30), precision=0.01)

_LOSSES = 3
"""Steps whose losses are compared."""

_WARM_STEPS = 3
"""On a side stream, before a step is captured."""


@dataclasses.dataclass(frozen=True)
class StepRow:
    """One way to train one network.

    Attributes:
        network: its name, with the mini-batch's shape.
        setting: type, layout and precision.
        limit_bytes: of workspace.
        way: as it comes, benchmark, undivided or divided, and whether captured in a graph.
        against: the way from the same rounds with which it is compared.
        time: of a step.
        ratio: of its time to that of the other, the median of the rounds.
        ratio_low: lower end of its 95 % interval.
        ratio_high: upper end of it.
        verdict: what these rounds say.
        peak_bytes: that the allocator held at most in a step, beside what it held before.
        used_bytes: of the card's memory by NVML, after that step.
        losses: of the first steps.
        tuning_s: seconds that tuning took, with what was known before.
        failure: why there is nothing of it.
    """

    network: str
    setting: str
    limit_bytes: int
    way: str
    against: str
    time: Timing | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    verdict: Verdict | None = None
    peak_bytes: int | None = None
    used_bytes: int | None = None
    losses: tuple[float, ...] = ()
    tuning_s: float | None = None
    failure: str | None = None


class Step:
    """Forward, loss, backward and update of a network on one batch."""

    def __init__(self, model: nn.Module, images: Tensor, targets: Tensor) -> None:
        """Take a model in training mode, images (n, ...) and classes of all that is scored."""
        self.model = model
        self._images = images
        self._targets = targets
        self._optimiser = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def train(self) -> Tensor:
        """Run the step; return the loss."""
        self._optimiser.zero_grad(set_to_none=True)
        loss = F.cross_entropy(self.model(self._images).float(), self._targets)
        loss.backward()
        self._optimiser.step()
        return loss.detach()

    def __call__(self) -> None:
        """Run the step."""
        self.train()

    def copy(self, plan: Plan | None = None) -> "Step":
        """Return the step of a copy of the model, which runs as the plan says if there is one."""
        model = copy.deepcopy(self.model)
        return Step(model if plan is None else apply(model, plan), self._images, self._targets)


def step_of(workload: Workload, setting: Setting, device: torch.device) -> Step:
    """Return the step of a fresh network; the same arguments give the same weights, images and classes."""
    model, images = operands(workload, setting, device)
    with torch.no_grad():
        scores = copy.deepcopy(model)(images[:2])
    shape = (len(images), *scores.shape[2:])
    return Step(model, images, torch.randint(scores.size(1), shape, device=device))


class Comparison:
    """One network in one setting, trained in all ways.

    Args:
        ground: the card.
        workload: the network.
        setting: its type and layout.
        limit: of workspace.
    """

    def __init__(self, ground: Ground, workload: Workload, setting: Setting, limit: str) -> None:
        self._ground = ground
        self._empty = StepRow(
            f"{workload.name} {'x'.join(map(str, workload.shape))}", setting.name, parse_bytes(limit), "", ""
        )
        self._own = step_of(workload, setting, ground.card.device)
        self._limit = limit

    def rows(self, store: Path, end_s: float) -> Iterator[StepRow]:
        """Yield a row for every way, each as soon as its rounds are over.

        Args:
            store: where profiles are kept.
            end_s: of `time.monotonic`, after which tuning ends.

        Raises:
            TimeIsUpError: that moment has come.
            MucudnnError: the network cannot be tuned.
        """
        steps, seconds = {PYTORCH: self._own.copy()}, {}
        for way, policy in ((UNDIVIDED, "undivided"), (DIVIDED, "power_of_two")):
            start = time.monotonic()
            plan = self._tuned(policy, store, end_s)
            steps[way], seconds[way] = self._own.copy(plan), time.monotonic() - start
        known = {way: self._seen(step, seconds.get(way)) for way, step in steps.items()}
        yield from self._compared(steps, known)
        yield from self._captured({way: steps[way] for way in (PYTORCH, DIVIDED)})
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True
        try:
            tried = self._own.copy()
            known = {BENCHMARK: self._seen(tried, None)}
            yield from self._compared({BENCHMARK: tried, DIVIDED: steps[DIVIDED]}, known)
        finally:
            torch.backends.cudnn.benchmark = before

    def _tuned(self, policy: str, path: Path, end_s: float) -> Plan:
        images = self._own._images
        with open_store(path) as store:
            return tune(
                self._own.model, images, self._limit, policy=policy, store=store, progress=Watch(end_s)
            )

    def _seen(self, step: Step, tuning_s: float | None) -> StepRow:
        """Return what the first steps show: losses and memory."""
        losses = tuple(float(step.train()) for _ in range(_LOSSES))
        allocator = self._ground.allocator
        allocator.settle()
        before = allocator.allocated_bytes()
        step()
        return dataclasses.replace(
            self._empty,
            losses=losses,
            peak_bytes=allocator.peak_bytes() - before,
            used_bytes=self._ground.used_bytes(),
            tuning_s=tuning_s,
        )

    def _compared(
        self, calls: Mapping[str, Callable[[], None]], known: Mapping[str, StepRow]
    ) -> Iterator[StepRow]:
        """Time calls in the same rounds; the first is what the others are compared with."""
        base = next(iter(calls))
        rule = dataclasses.replace(ROUNDS, min_span_ns=self._ground.backend.least_span_ns)
        times, failure = attempted(
            self._ground, lambda: compare_runs(calls, rule, self._ground.backend.clock), base
        )
        for way in calls:
            row = dataclasses.replace(known.get(way, self._empty), way=way, against=base)
            if times is None:
                yield dataclasses.replace(row, failure=failure)
            else:
                yield _timed(row, times[base], times[way])

    def _captured(self, steps: Mapping[str, Step]) -> Iterator[StepRow]:
        """Time whole steps that are captured in graphs."""
        replays: dict[str, Callable[[], None]] = {}
        for way, step in steps.items():
            name = f"{way}, in a graph"
            replay, failure = attempted(self._ground, functools.partial(self._replay, step), name)
            if replay is None:
                yield dataclasses.replace(self._empty, way=name, against=name, failure=failure)
            else:
                replays[name] = replay
        if replays:
            yield from self._compared(replays, {})

    def _replay(self, step: Step) -> Callable[[], None]:
        with self._ground.side_stream():
            for _ in range(_WARM_STEPS):
                step()
        replay, _ = self._ground.captured(step.train)
        return replay


def _timed(row: StepRow, base: Measurement, measured: Measurement) -> StepRow:
    """Return the row with its time, and what that is relative to the base of the same rounds."""
    pairs = base.samples_s, measured.samples_s
    seen = ratio(*pairs)
    return dataclasses.replace(
        row,
        time=Timing.of(measured),
        ratio=seen.median,
        ratio_low=seen.low,
        ratio_high=seen.high,
        verdict=compare(*pairs),
    )


def summary(rows: Sequence[StepRow]) -> str:
    """Return a table of all rows, network by network."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    for row in rows:
        title = f"{row.network}, {row.setting}, {format_bytes(row.limit_bytes)}"
        groups.setdefault(title, []).append(_cells(row))
    headings = ("way", "step", "95 %", "against", "time", "peak", "NVML", "losses", "tuned")
    return "\n".join(table(headings, "<>><>>>>>", list(groups.items())))


def _cells(row: StepRow) -> tuple[str, ...]:
    if row.time is None:
        return (row.way, "failed", "", row.against, row.failure or "", "", "", "", "")
    ends = f"{duration(row.time.low_us or 0)} to {duration(row.time.high_us or 0)}"
    relative = f"x{row.ratio:.3f} [{row.ratio_low:.3f}, {row.ratio_high:.3f}] {row.verdict}"
    if row.way == row.against:
        relative = ""
    sizes = ("" if each is None else format_bytes(each) for each in (row.peak_bytes, row.used_bytes))
    losses = " ".join(f"{loss:.5g}" for loss in row.losses)
    tuned = "" if row.tuning_s is None else f"{row.tuning_s:.0f} s"
    return (row.way, duration(row.time.median_us), ends, row.against, relative, *sizes, losses, tuned)


def run(
    ground: Ground,
    workloads: Sequence[Workload],
    settings: Sequence[Setting],
    limit: str,
    files: tuple[Path, Path],
    end_s: float,
) -> list[StepRow]:
    """Compare the ways of all networks as long as there is time; return the rows, which are kept one by one.

    Args:
        ground: the card.
        workloads: networks.
        settings: types and layouts.
        limit: of workspace.
        files: of the profiles, and of the rows, to which they are appended as JSON, one a line.
        end_s: of `time.monotonic`, after which nothing new is begun.
    """
    store, lines = files
    rows: list[StepRow] = []
    try:
        for setting in settings:
            for workload in workloads:
                if time.monotonic() > end_s:
                    raise TimeIsUpError
                with ground.precision(setting.allow_tf32), ground.current():
                    for row in _rows_of(ground, workload, setting, limit, store, end_s):
                        rows.append(row)
                        with lines.open("a", encoding="utf-8") as file:
                            file.write(json.dumps(jsonable(row)) + "\n")
                        print(" ".join([row.network, row.setting, *_cells(row)]), flush=True)
    except TimeIsUpError:
        print("The time is up.", flush=True)
    except DeviceLostError as error:
        print(f"{error} Run the same command again to go on without it.", file=sys.stderr, flush=True)
    return rows


def _rows_of(
    ground: Ground, workload: Workload, setting: Setting, limit: str, store: Path, end_s: float
) -> Iterator[StepRow]:
    try:
        yield from Comparison(ground, workload, setting, limit).rows(store, end_s)
    except DeviceLostError:
        raise
    except (MucudnnError, torch.OutOfMemoryError) as error:
        print(f"{workload.name}, {setting.name}: {error}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare what is asked for; return the exit status."""
    options = _parser().parse_args(arguments)
    reason = obstacle()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    end_s = time.monotonic() + options.seconds
    ground = CardGround(options.device)
    folder = options.output or Path("bench/results", slug(ground.name))
    folder.mkdir(parents=True, exist_ok=True)
    recorded = folder_of(ground.card.device)
    recorded.mkdir(parents=True, exist_ok=True)
    networks = [each for each in WORKLOADS if "/" not in each.name]
    rows = run(
        ground,
        chosen(options.networks, networks),
        chosen(options.settings, SETTINGS),
        options.limit,
        (recorded / STORE, folder / "steps.jsonl"),
        end_s,
    )
    print(f"\n{summary(rows)}\n\nWritten to {folder / 'steps.jsonl'}.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.gpu.steps", description=__doc__)
    parser.add_argument("--device", type=int, default=0, help="the card's number (default: %(default)s)")
    parser.add_argument("--limit", default="64MiB", help="of workspace (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="after which nothing new is begun (default: no end)"
    )
    parser.add_argument("--networks", nargs="+", default=["*"], metavar="PATTERN", help="(default: all)")
    parser.add_argument("--settings", nargs="+", default=["*"], metavar="PATTERN", help="(default: all)")
    parser.add_argument("--output", type=Path, help="folder (default: bench/results/ and the card's name)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
