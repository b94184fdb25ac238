"""One network in one setting, trained in all ways: what each takes, learns and costs, and pairs of them."""

import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.gpu.ground import Ground
from bench.gpu.sections import attempted
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
)
from bench.gpu.step_ways import Step, Way, rooms_seen, step_of
from bench.gpu.values import Timing
from bench.record import Watch, keep_cost, recording, seconds_of
from bench.workloads import Setting, Workload
from mucudnn import tune
from mucudnn.execution.workspace import release_workspaces
from mucudnn.intervals import compare, ratio
from mucudnn.plan import Plan
from mucudnn.profile import Measurement
from mucudnn.report.totals import Totals
from mucudnn.sizes import parse_bytes
from mucudnn.timing import SamplingRule, compare_runs

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
