"""A contest for one problem: every candidate checked, timed, and the fastest confirmed."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from bench.gpu.ground import Ground
from bench.gpu.layers import Case
from bench.gpu.sections import Deadline, attempted
from bench.gpu.trials import (
    PartsCheck,
    checked_in_parts,
    host_us,
    part_size,
    seen_once,
    stand_for,
    timed,
    whole_call,
)
from bench.gpu.values import Timing
from bench.precision import benchmark
from mucudnn.backends.cudnn.backend import CudnnBackend
from mucudnn.backends.cudnn.tiles import is_id as is_tiles
from mucudnn.intervals import Estimate, Verdict, compare, ratio
from mucudnn.live.stand import Stand, TrialRun
from mucudnn.profile import Trial
from mucudnn.timing import SamplingRule, compare_runs

_SLOW_US = 30_000.0
"""A call longer than this is timed once only, if it is also ten times slower than the fastest."""
_SLOW_FACTOR = 10.0

_LAUNCHABLE_US = 500.0
"""Longer calls hide what a launch costs, and 250 of them take long."""

_CONFIRMING = SamplingRule(looks=(10, 15, 20), precision=0.01)


_SPANS = 18
"""Of a call, warm-up counted in, until the last look."""

_MOST_US = 10_000_000.0
"""Of all spans of a problem's calls together; whatever is slower than those that fill it is timed once."""


@dataclasses.dataclass(frozen=True)
class CandidateRow:
    """Candidates: PyTorch's own, up to 16 of cuDNN's list, in its order, transforms on no list, and tiles.

    Attributes:
        layer: name of the layer.
        op: which of the three.
        setting: type, layout and precision.
        batch: samples.
        algorithm: its id.
        rank: place in cuDNN's list, from 0, behind which come engines on no list; None for what is no engine.
        notes: on numerics and behaviour.
        workspace_bytes: declared, by plans with beta 0; None for PyTorch's own.
        accumulating_bytes: declared with beta 1; None where parts do not add up that way.
        error: relative to float64, of the whole at once, the result and the workspace poisoned before; for
            weight gradients the larger of a part added once and twice. Infinite if a guard was touched.
        error_in_parts: of a division into equal parts.
        part_batch: samples of such a part; None where the candidate does not compute it.
        is_guard_intact: whether nothing was written behind a workspace of exactly the declared size.
        bound: the relative error above which the tuner calls it wrong.
        time: by the clock that waits for the card.
        host_us: host's microseconds per launch, the least of five series of 50; None where one takes over
            500 µs.
        failure: why it did not run, as a whole or in parts.
    """

    layer: str
    op: str
    setting: str
    batch: int
    algorithm: str
    rank: int | None
    notes: tuple[str, ...]
    workspace_bytes: int | None
    accumulating_bytes: int | None
    error: float | None
    error_in_parts: float | None
    part_batch: int | None
    is_guard_intact: bool | None
    bound: float
    time: Timing | None
    host_us: float | None
    failure: str | None

    @property
    def is_own(self) -> bool:
        """Whether it is PyTorch's own."""
        return self.algorithm == CudnnBackend.own

    @property
    def is_right(self) -> bool:
        """Whether it ran, within the bound, as a whole and in parts."""
        seen = [self.error, *([self.error_in_parts] if self.part_batch is not None else [])]
        is_exact = all(each is not None and each <= self.bound for each in seen)
        return is_exact and self.is_guard_intact is not False and self.failure is None


@dataclasses.dataclass(frozen=True)
class CaseRow:
    """The fastest right candidate of each problem beside cuDNN's first and PyTorch's own.

    Attributes:
        layer: name of the layer.
        op: which of the three.
        setting: type, layout and precision.
        batch: samples.
        candidates: how many were tried beside PyTorch's own.
        not_reached: how many were not, because the time of the problem was up.
        wrong: how many of them failed or were wrong.
        fastest: id of the fastest right candidate but PyTorch's own.
        rank: its place in cuDNN's list, from 0, behind which come engines on no list; None if it is none.
        fastest_time: its time.
        fastest_plan_time: that of the fastest right plan of cuDNN.
        first_time: that of cuDNN's first plan.
        own_time: PyTorch's own convolution with cudnn.benchmark off.
        own_benchmark_time: the same with it on, in a thread of its own, since PyTorch keeps its choice for
            each thread; not interleaved with the others.
        ratio: fastest over own, the median of rounds that were taken after the choice.
        ratio_low: lower end of its 95 % interval.
        ratio_high: upper end of it.
        verdict: what these rounds say of the fastest against PyTorch's own.
        conditions: clocks, temperature and power right after the candidates were timed.
        failures: of whole rounds; then the times beside are of single calls, or missing.
    """

    layer: str
    op: str
    setting: str
    batch: int
    candidates: int
    not_reached: int
    wrong: int
    fastest: str | None
    rank: int | None
    fastest_time: Timing | None
    fastest_plan_time: Timing | None
    first_time: Timing | None
    own_time: Timing | None
    own_benchmark_time: Timing | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    verdict: Verdict | None
    conditions: str
    failures: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Checked:
    """What is known of a candidate before it is timed."""

    run: TrialRun | None
    error: float | None
    in_parts: PartsCheck | None
    once: Timing | None
    failure: str | None


def in_time(once_us: Mapping[str, float], own: str) -> list[str]:
    """Return which calls are timed in rounds, the fastest first: PyTorch's own, and what is fast enough.

    Args:
        once_us: microseconds that each took once.
        own: name of PyTorch's own.
    """
    bar = max(_SLOW_US, _SLOW_FACTOR * min(once_us.values(), default=0.0))
    left_us = _MOST_US - _SPANS * once_us.get(own, 0.0)
    chosen = [own] * (own in once_us)
    for name in sorted(once_us.keys() - {own}, key=lambda name: (once_us[name], name)):
        left_us -= _SPANS * once_us[name]
        if once_us[name] <= bar and left_us >= 0:
            chosen.append(name)
    return chosen


class Contest:
    """One problem with operands in place.

    Args:
        ground: the card.
        case: the problem; its precision must be in force.
        deadline: after which no candidate is begun.
    """

    def __init__(self, ground: Ground, case: Case, deadline: Deadline) -> None:
        self._ground = ground
        self._case = case
        self._deadline = deadline
        self._backend = ground.backend
        self._own = self._backend.own
        allowed = self._backend.algorithms(case.problem)
        listed = ground.enumerator().candidates(case.problem)
        self._plans = {each.id: each for each in listed if each.id in allowed}
        self._others = [*filter(is_tiles, allowed), *self._plans]  # the time of a problem may end before
        self._stand = stand_for(self._backend, case.problem, self._others)

    def rows(self) -> Iterator[object]:
        """Yield a row for every candidate and one for the problem."""
        checked = {self._own: self._check(self._own)}
        for name in self._others:
            if self._deadline.is_over:
                break
            checked[name] = self._check(name)
        times, failure = self._times(checked)
        found = [self._row(name, seen, times.get(name)) for name, seen in checked.items()]
        yield from found
        yield self._case_row(found, checked, failure)

    def _check(self, name: str) -> _Checked:
        """Run the candidate as a whole, once more for a first look at its time, and in parts."""
        seen, failure = attempted(self._ground, lambda: self._first_run(name), name)
        if seen is None:
            return _Checked(None, None, None, None, failure)
        run, error, once = seen
        in_parts, failure = attempted(self._ground, lambda: self._in_parts(name), name)
        return _Checked(run, error, in_parts, once, failure)

    def _first_run(self, name: str) -> tuple[TrialRun, float, Timing]:
        run = self._stand.run(Trial(self._case.problem, name, whole=True))
        error = run.error()
        return run, error, seen_once(self._backend, whole_call(run))

    def _in_parts(self, name: str) -> PartsCheck | None:
        part = self._case.problem.part(part_size(self._case.problem))
        if name == self._own or not self._backend.computes(part, name):
            return None
        return checked_in_parts(self._stand, name)

    def _times(self, checked: Mapping[str, _Checked]) -> tuple[dict[str, Timing], str | None]:
        """Time what runs; what is hopelessly slow, or would take too long, keeps the one time that was seen.

        If one fails meanwhile, all keep theirs, and what it said is returned as well.
        """
        once = {name: each.once for name, each in checked.items() if each.once is not None}
        chosen = in_time({name: each.median_us for name, each in once.items()}, self._own)
        calls = {name: whole_call(run) for name in chosen if (run := checked[name].run) is not None}
        times, failure = attempted(self._ground, lambda: timed(self._backend, calls))
        return {**once, **(times or {})}, failure

    def _row(self, name: str, seen: _Checked, timing: Timing | None) -> CandidateRow:
        problem, plan = self._case.problem, self._plans.get(name)
        return CandidateRow(
            layer=self._case.layer,
            op=problem.op,
            setting=self._case.setting,
            batch=problem.batch,
            algorithm=name,
            rank=None if plan is None else plan.rank,
            notes=() if plan is None else plan.notes,
            workspace_bytes=self._declared_bytes(name),
            accumulating_bytes=None if plan is None else plan.accumulating_bytes,
            error=seen.error,
            error_in_parts=None if seen.in_parts is None else seen.in_parts.error,
            part_batch=None if seen.in_parts is None else part_size(problem),
            is_guard_intact=None if seen.in_parts is None else seen.in_parts.is_guard_intact,
            bound=self._backend.error_bound(problem, name),
            time=timing,
            host_us=self._host_us(seen, timing),
            failure=seen.failure,
        )

    def _declared_bytes(self, name: str) -> int | None:
        if name in self._plans:
            return self._plans[name].overwriting_bytes
        return None if name == self._own else self._backend.buffer_bytes(self._case.problem, name)

    def _host_us(self, seen: _Checked, timing: Timing | None) -> float | None:
        run = seen.run
        if run is None or timing is None or timing.median_us > _LAUNCHABLE_US:
            return None
        return attempted(self._ground, lambda: host_us(self._backend, run.part))[0]

    def _case_row(
        self, found: Sequence[CandidateRow], checked: Mapping[str, _Checked], untimed: str | None
    ) -> CaseRow:
        conditions = ", ".join(f"{name} {value}" for name, value in self._ground.conditions().items())
        own, *others = found
        others.sort(key=lambda row: row.rank is None)  # of equals, cuDNN's
        right = [(row, row.time) for row in others if row.is_right and row.time is not None]
        fastest, fastest_plan = (
            min(rows, key=lambda each: each[1].median_us, default=(None, None))
            for rows in (right, [each for each in right if each[0].rank is not None])
        )
        confirmed, unconfirmed = attempted(self._ground, lambda: self._confirmed(fastest[0], checked))
        seen, verdict = confirmed or (None, None)
        benchmarked, failure = attempted(self._ground, lambda: by_benchmark(self._ground, self._stand))
        failures = {"timing": untimed, "confirming": unconfirmed, "benchmark": failure}
        return CaseRow(
            layer=self._case.layer,
            op=self._case.problem.op,
            setting=self._case.setting,
            batch=self._case.problem.batch,
            candidates=len(others),
            not_reached=len(self._others) - len(others),
            wrong=sum(not row.is_right for row in others),
            fastest=None if fastest[0] is None else fastest[0].algorithm,
            rank=None if fastest[0] is None else fastest[0].rank,
            fastest_time=fastest[1],
            fastest_plan_time=fastest_plan[1],
            first_time=next((row.time for row in others if row.rank is not None), None),
            own_time=own.time,
            own_benchmark_time=benchmarked,
            ratio=None if seen is None else seen.median,
            ratio_low=None if seen is None else seen.low,
            ratio_high=None if seen is None else seen.high,
            verdict=verdict,
            conditions=conditions,
            failures=tuple(f"{when}: {told}" for when, told in failures.items() if told is not None),
        )

    def _confirmed(
        self, fastest: CandidateRow | None, checked: Mapping[str, _Checked]
    ) -> tuple[Estimate | None, Verdict | None]:
        """Time the fastest and PyTorch's own anew: the samples that chose a winner do not prove it."""
        own = checked[self._own].run
        other = None if fastest is None else checked[fastest.algorithm].run
        if own is None or other is None:
            return None, None
        rule = dataclasses.replace(_CONFIRMING, min_span_ns=self._backend.least_span_ns)
        calls = {"own": whole_call(own), "fastest": whole_call(other)}
        times = compare_runs(calls, rule, self._backend.clock)
        pairs = times["own"].samples_s, times["fastest"].samples_s
        return ratio(*pairs), compare(*pairs)


def by_benchmark(ground: Ground, stand: Stand) -> Timing:
    """Time PyTorch's own with cudnn.benchmark on, in a thread that has not chosen yet."""
    own = stand.backend.own

    def measure() -> Timing:
        with ground.current():
            run = stand.run(Trial(stand.problem, own, whole=True))
            return timed(stand.backend, {own: whole_call(run)})[own]

    with benchmark(), ThreadPoolExecutor(1) as thread:
        return thread.submit(measure).result()
