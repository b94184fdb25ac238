"""Whole training steps on a card: as PyTorch comes, with `cudnn.benchmark`, undivided and divided in a limit.

All ways begin with the same weights, train on the same batch, and run in the same rounds and in one thread,
the backward pass too; but with `cudnn.benchmark` in another one, as PyTorch keeps for every thread which of
cuDNN's plans it has found. Two controls tell what is only noise: PyTorch as it comes once more, in the thread
of the others and in one of its own. Dropout is off, so that losses can be compared. Profiles are those that
`make record` has made, if any.
"""

import argparse
import dataclasses
import datetime
import functools
import gc
import itertools
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.arguments import seconds
from bench.commit import commit
from bench.gpu.available import obstacle
from bench.gpu.ground import CardGround, Ground, is_alive
from bench.gpu.results import slug
from bench.gpu.sections import attempted, sentence
from bench.gpu.step_lines import LINES, known, retell
from bench.gpu.step_rows import (
    APART,
    BENCHMARK,
    DIVIDED,
    EQUAL,
    IN_GRAPH,
    PYTORCH,
    UNDIVIDED,
    PairRow,
    StepRow,
    network_of,
    paid_back,
    summary,
    told,
)
from bench.gpu.step_ways import Step, Way, rooms_seen, step_of
from bench.gpu.values import Timing, jsonable
from bench.record import TimeIsUpError, Watch, folder_of, keep_cost, recording, seconds_of
from bench.workloads import NETWORKS, SETTINGS, Setting, Workload, chosen
from mucudnn import tune
from mucudnn.errors import MucudnnError
from mucudnn.execution.workspace import release_workspaces
from mucudnn.intervals import compare, ratio
from mucudnn.plan import Plan
from mucudnn.profile import Measurement
from mucudnn.report.totals import Totals
from mucudnn.sizes import parse_bytes
from mucudnn.timing import SamplingRule, compare_runs
from mucudnn.version import __version__

_PAIRS = (
    (PYTORCH, EQUAL),
    (PYTORCH, APART),
    (PYTORCH, BENCHMARK),
    (PYTORCH, UNDIVIDED),
    (PYTORCH, DIVIDED),
    (UNDIVIDED, DIVIDED),
)
"""What is compared: the first of a pair is the base."""

ROUNDS = SamplingRule(looks=(10, 15, 20, 30), precision=0.01)

_WARM_STEPS = 3
"""Before a step is captured, or weighed."""

_LEAST_LOSS = 1e-30
"""By which differences are divided where a loss is nothing."""

_LOSSES = 6
"""Steps whose losses are compared; those of a captured step are three eager ones and three replays."""


class Trial:
    """One network in one setting, trained in all ways.

    Args:
        ground: the card.
        workload: the network.
        setting: its type and layout.
        limit: of workspace.
        folder: of the recording.
        watch: which ends it.
    """

    def __init__(
        self, ground: Ground, workload: Workload, setting: Setting, limit: str, folder: Path, watch: Watch
    ) -> None:
        self._ground = ground
        self._workload = workload
        self._setting = setting
        self._limit = limit
        self._folder = folder
        self._watch = watch
        self._empty = StepRow(network_of(workload), setting.name, parse_bytes(limit), "")
        self._losses: tuple[float, ...] = ()
        self._own: Step | None = None

    def rows(self) -> Iterator[StepRow | PairRow]:
        """Yield a row for every way and every pair, each as soon as its rounds are over.

        Raises:
            TimeIsUpError: the watch says so.
            MucudnnError: the network cannot be tuned.
        """
        own = step_of(self._workload, self._setting, self._ground.card.device)
        plans = {UNDIVIDED: self._tuned(own, "undivided"), DIVIDED: self._tuned(own, "power_of_two")}
        known = {
            name: dataclasses.replace(self._empty, way=name, divided=_parted(plan), tuning_s=round(cost_s, 1))
            for name, (plan, cost_s) in plans.items()
        }
        with ThreadPoolExecutor(1) as common, ThreadPoolExecutor(1) as third, ThreadPoolExecutor(1) as apart:
            ways = {
                PYTORCH: Way(self._ground, own.copy(), common),
                EQUAL: Way(self._ground, own.copy(), common),
                APART: Way(self._ground, own.copy(), third),
                BENCHMARK: Way(self._ground, own.copy(), apart, has_benchmark=True),
                **{name: Way(self._ground, own.copy(plan), common) for name, (plan, _) in plans.items()},
            }
            seen = {
                name: self._seen(way, known.get(name, dataclasses.replace(self._empty, way=name)))
                for name, way in ways.items()
            }
            spread = self._spread(Way(self._ground, own.perturbed(), common))
            seen = {name: dataclasses.replace(row, spread=spread) for name, row in seen.items()}
            yield from self._timed(ways, seen)
            copies = {name: own.copy(plan) for name, plan in ((PYTORCH, None), (DIVIDED, plans[DIVIDED][0]))}
            yield from self._captured({name: ways[name] for name in copies}, copies)

    def _tuned(self, own: Step, policy: str) -> tuple[Plan, float]:
        """Return a plan, and what all tuning of this network in this setting has taken so far."""
        start = time.monotonic()
        with recording(self._folder) as store:
            known = store.count()
            try:
                plan = tune(
                    own.model, own.images, self._limit, policy=policy, store=store, progress=self._watch
                )
            finally:
                seconds, measured = time.monotonic() - start, store.count() - known
                aim = f"{self._limit}-{policy}"
                keep_cost(self._folder, self._workload, self._setting, aim, seconds, measured)
        return plan, seconds_of(self._folder, self._workload.name, self._setting.name)

    def _seen(self, way: Way, row: StepRow) -> StepRow:
        """Return what the first steps show: losses, weights, the room of each op, all memory."""
        self._watch.check()
        losses = tuple(float(way.run(way.step.train)) for _ in range(_LOSSES))
        self._own = self._own or way.step.copy()  # the first way is PyTorch's
        row = dataclasses.replace(row, weights=way.step.differs(self._own))
        with rooms_seen(self._ground) as rooms:
            way()
        row = dataclasses.replace(
            row,
            room_bytes=max((room.allocated for room in rooms), default=None),
            room_used_bytes=max((room.used for room in rooms if room.used is not None), default=None),
        )
        release_workspaces()
        gc.collect()
        self._ground.allocator.settle()
        held_bytes, used_bytes = self._ground.allocator.allocated_bytes(), self._ground.used_bytes()
        way()
        peak_bytes, present_bytes = self._ground.allocator.peak_bytes(), self._ground.used_bytes()
        grown = None if None in (used_bytes, present_bytes) else (present_bytes or 0) - (used_bytes or 0)
        return self._with_losses(
            dataclasses.replace(row, peak_bytes=peak_bytes - held_bytes, used_bytes=grown), losses
        )

    def _spread(self, twin: Way) -> float | None:
        """Return how far from PyTorch as it comes a twin ends whose weights are off by a rounding."""
        if self._own is None:
            return None
        for _ in range(_LOSSES):
            twin()
        return twin.step.differs(self._own)

    def _with_losses(self, row: StepRow, losses: tuple[float, ...]) -> StepRow:
        self._losses = self._losses or losses
        pairs = zip(self._losses, losses, strict=True)
        difference = max(abs(loss - base) / max(abs(base), _LEAST_LOSS) for base, loss in pairs)
        return dataclasses.replace(row, losses=losses, difference=difference)

    def _timed(
        self, calls: Mapping[str, Callable[[], None]], rows: Mapping[str, StepRow], suffix: str = ""
    ) -> Iterator[StepRow | PairRow]:
        """Time calls in the same rounds."""
        self._watch.check()
        rule = dataclasses.replace(ROUNDS, min_span_ns=self._ground.backend.least_span_ns)
        times, failure = attempted(
            self._ground, lambda: compare_runs(calls, rule, self._ground.backend.clock), "a step"
        )
        conditions = dict(self._ground.conditions())
        if times is None:
            yield from (dataclasses.replace(row, failure=failure) for row in rows.values())
            return
        base_s = times[next(iter(calls))].samples_s
        for name, row in rows.items():
            paid = None
            if row.tuning_s is not None:
                paid = paid_back(row.tuning_s, base_s, times[name].samples_s)
            yield dataclasses.replace(
                row, time=Timing.of(times[name]), break_even=paid, conditions=conditions
            )
        for base, name in _PAIRS:
            if {base + suffix, name + suffix} <= times.keys():
                yield self._pair(base + suffix, name + suffix, times)

    def _pair(self, base: str, name: str, times: Mapping[str, Measurement]) -> PairRow:
        samples = times[base].samples_s, times[name].samples_s
        seen = ratio(*samples)
        return PairRow(
            self._empty.network, self._setting.name, self._empty.limit_bytes, base, name,
            seen.median, seen.low, seen.high, compare(*samples),
        )  # fmt: skip

    def _captured(self, ways: Mapping[str, Way], steps: Mapping[str, Step]) -> Iterator[StepRow | PairRow]:
        """Capture whole steps in graphs, from the first weights on, see that they learn alike, time them."""
        suffix = IN_GRAPH
        replays: dict[str, Callable[[], None]] = {}
        rows: dict[str, StepRow] = {}
        for name, step in steps.items():
            self._watch.check()
            row = dataclasses.replace(self._empty, way=name + suffix)
            call = functools.partial(ways[name].run, functools.partial(self._replay, step))
            found, failure = attempted(self._ground, call, row.way)
            if found is None:
                yield dataclasses.replace(row, failure=failure)
            else:
                replays[row.way], losses = found
                rows[row.way] = self._with_losses(row, losses)
        if replays:
            yield from self._timed(replays, rows, suffix)

    def _replay(self, step: Step) -> tuple[Callable[[], None], tuple[float, ...]]:
        """Return the replay of a step, and the losses of warm steps and first replays."""
        with self._ground.side_stream():
            warm = [float(step.train()) for _ in range(_WARM_STEPS)]
        replay, loss = self._ground.captured(step.train)
        losses = list(warm)
        for _ in range(_LOSSES - _WARM_STEPS):
            replay()
            losses.append(float(loss))
        return replay, tuple(losses)


def _parted(plan: Plan) -> str:
    totals = Totals.of(plan)
    return f"{totals.divided} of {totals.sites}"


def run(
    ground: Ground,
    workloads: Sequence[Workload],
    settings: Sequence[Setting],
    limits: Sequence[str],
    folders: tuple[Path, Path],
    watch: Watch,
    again: bool = False,
) -> tuple[list[StepRow | PairRow], bool]:
    """Compare the ways of all networks as long as there is time; return the rows, and whether all went well.

    Args:
        ground: the card.
        workloads: networks.
        settings: types and layouts.
        limits: of workspace.
        folders: of the recording, and of the rows, which are appended to steps.jsonl one by one, after a
            line that says under which conditions they were measured.
        watch: which ends it.
        again: whether to measure what the lines hold already.
    """
    recorded, results = folders
    rows: list[StepRow | PairRow] = []
    is_well = True
    done = set() if again else known(results)
    with (results / LINES).open("a", encoding="utf-8") as file:
        try:
            for workload, setting, limit in itertools.product(workloads, settings, limits):
                if (network_of(workload), setting.name, parse_bytes(limit)) in done:
                    print(f"{network_of(workload)}, {setting.name}, {limit}: known, see --again.", flush=True)
                    continue
                watch.check()
                with ground.precision(setting.allow_tf32), ground.current():
                    _write(file.write, _header(ground))
                    trial = Trial(ground, workload, setting, limit, recorded, watch)
                    for row in _rows_of(trial, ground, workload, setting, limit):
                        rows.append(row)
                        is_well = is_well and not (isinstance(row, StepRow) and row.is_ill)
                        _write(file.write, row)
                        file.flush()
                        print(told(row), flush=True)
        except TimeIsUpError as error:
            print(error, flush=True)
    return rows, is_well


def _header(ground: Ground) -> dict[str, object]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "commit": commit(),
        "command": shlex.join(["python", "-m", "bench.gpu.steps", *sys.argv[1:]]),
        "environment": ground.backend.environment().to_json(),
    }


def _write(write: Callable[[str], object], value: object) -> None:
    write(json.dumps(jsonable(value)) + "\n")


def _rows_of(
    trial: Trial, ground: Ground, workload: Workload, setting: Setting, limit: str
) -> Iterator[StepRow | PairRow]:
    """Yield the rows of a trial, and why it ended if it did; only a broken card ends the others too."""
    gc.collect()
    try:
        yield from trial.rows()
    except TimeIsUpError:
        raise
    except Exception as error:  # whatever one trial dies of, the others are to be had
        yield StepRow(network_of(workload), setting.name, parse_bytes(limit), "all", failure=sentence(error))
        if not is_alive(ground):
            raise TimeIsUpError("The card works no more; run the same command again.") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare what is asked for; return the exit status."""
    options = _parser().parse_args(arguments)
    if options.retell is not None:
        return _retold(options.retell)
    reason = obstacle()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    networks, settings = chosen(options.networks, NETWORKS), chosen(options.settings, SETTINGS)
    if not (networks and settings):
        print("bench.gpu.steps: no network or no setting has such a name.", file=sys.stderr)
        return 2
    try:
        return _compare(options, networks, settings)
    except MucudnnError as error:
        print(f"bench.gpu.steps: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench.gpu.steps: interrupted; what was measured is kept.", file=sys.stderr)
        return 130


def _compare(options: argparse.Namespace, networks: Sequence[Workload], settings: Sequence[Setting]) -> int:
    # Before hours of work; what a large limit has raced serves the smaller ones.
    limits = sorted(options.limit, key=parse_bytes, reverse=True)
    watch = Watch(time.monotonic() + options.seconds)
    ground = CardGround(options.device)
    results = options.output or Path("bench/results", slug(ground.name))
    recorded = options.recording or folder_of(ground.card.device)
    if not recorded.is_dir():
        print(f"There is no recording {recorded}: what is needed is measured first, and kept there.")
    for folder in (results, recorded):
        folder.mkdir(parents=True, exist_ok=True)
    rows, is_well = run(ground, networks, settings, limits, (recorded, results), watch, options.again)
    print(f"\n{summary(rows)}\n\nWritten to {results / LINES}.")
    return _retold(results) or (0 if is_well else 1)


def _retold(folder: Path) -> int:
    try:
        print(f"Written to {retell(folder)}.")
    except (OSError, ValueError) as error:
        print(f"bench.gpu.steps: {folder} cannot be told anew: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.gpu.steps", description=__doc__)
    parser.add_argument("--device", type=int, default=0, help="the card's number (default: %(default)s)")
    parser.add_argument(
        "--limit", nargs="+", default=["64MiB"], help="of workspace, one or several (default: 64MiB)"
    )
    parser.add_argument(
        "--seconds", type=seconds, default=math.inf, help="after which nothing new is begun (default: no end)"
    )
    parser.add_argument("--networks", nargs="+", default=["*"], metavar="PATTERN", help="(default: all)")
    parser.add_argument("--settings", nargs="+", default=["*"], metavar="PATTERN", help="(default: all)")
    parser.add_argument("--again", action="store_true", help="measure what is known anew")
    parser.add_argument(
        "--recording", type=Path, help="folder of make record (default: build/record/ and the card's name)"
    )
    parser.add_argument("--output", type=Path, help="folder (default: bench/results/ and the card's name)")
    parser.add_argument(
        "--retell", type=Path, metavar="FOLDER",
        help="write the tables of a folder of results anew, from its lines; measure nothing",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
