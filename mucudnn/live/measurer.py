"""Measuring on a device that is here: weigh, check against float64, race, and time finished divisions."""

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mucudnn.backends import Backend
from mucudnn.backends.failures import LastTrial, TrialError, is_lack_of_memory
from mucudnn.choices import Search
from mucudnn.division import Division
from mucudnn.errors import BackendError, UnmeasuredError
from mucudnn.evidence import WRONG_ERROR
from mucudnn.interruptions import pass_on_interruption
from mucudnn.live.judging import OF_NO_TRIAL, Judge
from mucudnn.live.stand import Stand, TrialRun
from mucudnn.live.turns import turn, turn_path
from mucudnn.live.weighing import Scales
from mucudnn.locks import cached_property
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.profile import Comparison, Environment, Measurement, Record, Refusal, RefusalKind, Trial
from mucudnn.profiling.measurer import Compared, Divisions, Limits, ModelCall
from mucudnn.profiling.outcome import Outcome
from mucudnn.profiling.trials import division_trial
from mucudnn.timing import CONFIRMING, PROFILING, Clock, Entrant, SamplingRule, compare_runs, race

Key = TypeVar("Key")
Entry = TypeVar("Entry")
Result = TypeVar("Result")

_COARSE = 5
"""How many times as short spans of set-ups are on a card, and as wide their intervals, as those of parts.

They are paid once, and most are nothing at all there; to tell that exactly took half of its time.
"""


class LiveMeasurer:
    """Measures on the device of a backend.

    Every span that is timed follows an ordinary operation, as a convolution does in a model: on the
    processor its idle threads take cores for a while, which costs some algorithms more than others.

    Attributes:
        own: id of PyTorch's own convolution on this backend.
        measured: trials, divisions and pairs of whole calls that were begun, so far.
    """

    def __init__(
        self,
        backend: Backend,
        profiling: SamplingRule = PROFILING,
        confirming: SamplingRule = CONFIRMING,
        clock: Clock | None = None,
    ) -> None:
        """Remember what to measure with; nothing is measured yet.

        Args:
            backend: that computes.
            profiling: how candidates are sampled.
            confirming: how finished divisions are sampled.
            clock: nanoseconds; None takes the backend's.
        """
        self.own = backend.own
        self.measured = 0
        self._backend = backend
        self._profiling = _with_span(profiling, backend.least_span_ns // 2)  # what wins is confirmed
        coarse = _COARSE if self._profiling.min_span_ns > profiling.min_span_ns else 1
        self._setting_up = dataclasses.replace(
            self._profiling,
            precision=coarse * self._profiling.precision,
            min_span_ns=max(self._profiling.min_span_ns // coarse, profiling.min_span_ns),
        )
        self._confirming = _with_span(confirming, backend.least_span_ns)
        self._clock = backend.clock if clock is None else clock
        self._neighbours = backend.neighbours()
        self._judge = Judge(backend)
        self._scales = Scales(backend, self._judge)

    def environment(self) -> Environment:
        """Return all that a time measured now depends on."""
        return self._backend.environment()

    def alone(self, on_wait: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """Return a context in which nobody else measures on this device."""
        return turn(self._turn_path, on_wait)

    @cached_property
    def _turn_path(self) -> Path:
        """Of the device, which no setting changes."""
        return turn_path(self.environment())

    def complaint(self) -> str | None:
        """Return what others did on the device while times were measured, if that may have moved them."""
        return self._neighbours.complaint()

    def known_as(self, problem: ConvProblem, ops: Collection[ConvOp]) -> ConvProblem:  # noqa: ARG002  # all alike
        """Return the problem itself: it is what this machine computes."""
        return problem

    def algorithms(self, problem: ConvProblem, search: Search, whole: bool) -> tuple[str, ...]:
        """Return the ids of the backend's algorithms for `problem` in that role, PyTorch's own first.

        Raises:
            UnmeasuredError: the backend cannot list them.
        """
        try:
            return self._backend.algorithms(problem, search, whole)
        except OF_NO_TRIAL:
            raise
        except BackendError as error:
            pass_on_interruption(error)
            raise UnmeasuredError(f"{problem} could not be measured: {error}") from error

    def declared_bytes(self, trial: Trial) -> int | None:
        """Return the workspace that `trial` needs; None for what must be weighed, such as PyTorch's own."""
        return self._scales.declared_bytes(trial)

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Measure on the device, in none of the caller's modes, which would see, time or replace what runs.

        `autotune` divides what it sees, FlopCounterMode counts it, FakeTensorMode only pretends to compute.
        """
        with (
            _disable_current_modes(),
            self._backend.current(),
            torch.inference_mode(mode=False),
            torch._C.DisableTorchFunction(),
        ):
            yield

    def measure(self, problem: ConvProblem, trials: Sequence[Trial], limit_bytes: int) -> list[Record]:
        """Weigh, check and time `trials`, as far as each earns the next step; return their records.

        Raises:
            UnmeasuredError: PyTorch's own fails, or memory is lacking, which says nothing of an algorithm.
        """
        with self._apart():
            records = {trial: self._scales.weigh(trial, limit_bytes) for trial in trials}
            fitting = [trial for trial, record in records.items() if record.refusal is None]
            if fitting:
                buffers = [self._backend.buffer_bytes(trial.problem, trial.algorithm) for trial in fitting]
                stand = self._stand(problem, max(buffers))
                right: dict[Trial, TrialRun] = {}
                for trial in fitting:
                    records[trial], run = self._check(records[trial], stand)
                    if run is not None:
                        right[trial] = run
                records |= self._time(records, right, stand.ordinary_operation)
        return list(records.values())

    def compare(self, problem: ConvProblem, divisions: Sequence[Division], limits: Limits) -> Compared:
        """Weigh `divisions`, time those that fit in the same rounds; return both.

        One that breaks, though its parts did not, is refused, and the others are timed without it.

        Raises:
            DeviceLostError: one of them has broken the device; its key stands for the algorithm.
            UnmeasuredError: PyTorch's own fails, or memory is lacking, which says nothing of a division.
        """
        self.measured += len(divisions)
        with self._apart():
            records = {
                division_trial(problem, division): self._scales.weigh_division(problem, division, limits)
                for division in divisions
            }
            times, failed = self._timed(problem, divisions, records)
        records |= failed
        weights = {
            trial.algorithm: record.workspace_bytes
            for trial, record in records.items()
            if trial.algorithm in times and record.workspace_bytes is not None
        }
        refusals = tuple(record for record in records.values() if record.refusal is not None)
        return Compared(Outcome.of(Comparison(problem, times, weights)), refusals)

    def compare_calls(self, call: ModelCall, base: Divisions, divisions: Divisions) -> Comparison | Record:
        """Time a convolution as a model calls it, by a base and by other divisions, or tell how these break.

        Raises:
            UnmeasuredError: the base fails, or memory is lacking.
            DeviceLostError: one of them has broken the device; its key stands for the algorithm.
        """
        self.measured += 1
        last = LastTrial()
        trials = [call.trial(each) for each in (base, divisions)]
        with self._apart():
            stand = self._stand(call.problem, 0)
            try:
                calls = {
                    trial.algorithm: last.made(trial, functools.partial(stand.call, call, each))
                    for trial, each in zip(trials, (base, divisions), strict=True)
                }
                with last.blamed():
                    times = self._compared(calls, stand)
            except TrialError as error:
                record = self._judge.failed(Record(error.trial), error.failure)
                if error.trial == trials[0]:
                    reason = f"{call.problem} could not be measured: {error.failure}"
                    raise UnmeasuredError(reason) from error
                return record
        return Comparison(call.problem, times, {})

    def packs(self, problem: ConvProblem) -> bool:
        """Return whether frozen graphs pack the filter of PyTorch's own."""
        return self._backend.packing(problem) is not None

    def weigh_packed(self, problem: ConvProblem, limit_bytes: int) -> Record:
        """Weigh PyTorch's own with its filter packed beforehand.

        Raises:
            UnmeasuredError: it fails, or memory is lacking.
        """
        with self._apart():
            return self._scales.weigh_packed(problem, limit_bytes)

    def _timed(
        self, problem: ConvProblem, divisions: Sequence[Division], records: Mapping[Trial, Record]
    ) -> tuple[Mapping[str, Measurement], dict[Trial, Record]]:
        """Time those finished divisions that are not refused; one that breaks is, and others begin anew."""
        fitting = [each for each in divisions if records[division_trial(problem, each)].refusal is None]
        if not fitting:
            return {}, {}
        stand, last = self._stand(problem, 0), LastTrial()
        calls: dict[Trial, Callable[[], None]] = {}
        failed: dict[Trial, Record] = {}
        for division in fitting:
            trial = division_trial(problem, division)
            try:
                calls[trial] = last.made(trial, functools.partial(stand.division, division))
            except TrialError as error:
                failed[trial] = self._judge.failed(records[trial], error.failure)

        def contest(left: Mapping[Trial, Callable[[], None]]) -> Mapping[str, Measurement]:
            with last.blamed():
                return self._compared({trial.algorithm: call for trial, call in left.items()}, stand)

        times, broken = self._of_survivors(calls, records, contest)
        return times, failed | broken

    def _of_survivors(
        self,
        entries: Mapping[Trial, Entry],
        records: Mapping[Trial, Record],
        contest: Callable[[Mapping[Trial, Entry]], Result],
    ) -> tuple[Result, dict[Trial, Record]]:
        """Return what a contest comes to, and the records of those that broke: it begins anew without them.

        Args:
            entries: of all who take part.
            records: of each so far.
            contest: of those that are left; whom it blames for an error has broken.

        Raises:
            DeviceLostError, UnmeasuredError, UnweighableError: what the judge makes of a failure.
        """
        broken: dict[Trial, Record] = {}
        while True:
            left = {trial: entry for trial, entry in entries.items() if trial not in broken}
            try:
                return contest(left), broken
            except TrialError as error:
                broken[error.trial] = self._judge.failed(records[error.trial], error.failure)

    def _compared(self, calls: Mapping[str, Callable[[], None]], stand: Stand) -> Mapping[str, Measurement]:
        before = stand.ordinary_operation
        times, others = self._neighbours.undisturbed(
            lambda: compare_runs(calls, self._confirming, self._clock, before=before)
        )
        return _beside(times, others)

    def _stand(self, problem: ConvProblem, buffer_bytes: int) -> Stand:
        """Return operands and calls of a whole mini-batch.

        Raises:
            UnmeasuredError: memory is lacking for them.
        """
        with _memory_for(problem):
            return Stand(self._backend, problem, buffer_bytes, seed=zlib.crc32(problem.key.encode()))

    def _check(self, record: Record, stand: Stand) -> tuple[Record, TrialRun | None]:
        """Run once against the reference; what is wrong or breaks is refused, and has no run to be timed.

        PyTorch's own undivided is what the model runs anyway: its error is kept, and never a reason to refuse
        it; a part of it is refused if it is wrong.
        """
        self.measured += 1
        trial = record.trial
        try:
            run = stand.run(trial)
            error = run.error()
        except Exception as failure:  # noqa: BLE001  # it is judged there
            record = self._judge.failed(record, failure)
            with _memory_for(stand.problem):
                stand.mend()
            return record, None
        with _memory_for(stand.problem):
            is_harmful = stand.mend()
        wrong = self._wrong(trial, error, is_harmful=is_harmful)
        if wrong is not None:
            refusal = Refusal(trial.algorithm, trial.problem.batch, RefusalKind.WRONG, wrong)
            return dataclasses.replace(record, error=error, refusal=refusal), None
        return dataclasses.replace(record, error=error), run

    def _wrong(self, trial: Trial, error: float, *, is_harmful: bool) -> str | None:
        """Return why the result of a trial is refused, or what it does to its operands; None if it is not."""
        is_own = trial.algorithm == self.own
        if is_own and trial.whole:
            return None
        bound = WRONG_ERROR if is_own else self._backend.error_bound(trial.problem, trial.algorithm)
        if not error <= min(bound, WRONG_ERROR):
            return f"its relative error is {error:.2e}, the bound is {min(bound, WRONG_ERROR):.2g}"
        return "it writes to its operands" if is_harmful else None

    def _time(
        self, records: Mapping[Trial, Record], runs: Mapping[Trial, TrialRun], before: Callable[[], None]
    ) -> dict[Trial, Record]:
        """Race all runs against one another; whoever breaks is refused, and the race starts anew."""
        raced, broken = self._of_survivors(runs, records, lambda left: self._raced(records, left, before))
        return raced | broken

    def _raced(
        self, records: Mapping[Trial, Record], runs: Mapping[Trial, TrialRun], before: Callable[[], None]
    ) -> dict[Trial, Record]:
        """Race all runs against one another, then time each algorithm's set-up.

        The set-up is the algorithm's and not the size's, so every record gets it: a profile of any sizes
        then knows it. PyTorch's own alone has none.
        """
        last = LastTrial()
        parts: dict[Trial, Entrant] = {}
        set_ups: dict[str, Entrant] = {}
        for trial, run in runs.items():
            workspace = records[trial].workspace_bytes or 0
            part, ready = (last.remembered(trial, each) for each in (run.part, run.ready_for_parts))
            parts[trial] = Entrant(part, trial.problem.batch, workspace, ready)
            if trial.algorithm != self.own and trial.algorithm not in set_ups:
                set_up, ready = (last.remembered(trial, each) for each in (run.setup, run.ready_for_setup))
                set_ups[trial.algorithm] = Entrant(set_up, trial.algorithm, 0, ready)
        with last.blamed():
            raced, others = self._neighbours.undisturbed(
                lambda: (
                    race(parts, self._profiling, self._clock, before=before),
                    race(set_ups, self._setting_up, self._clock, before=before),
                )
            )
        times, set_up_times = _beside(raced[0], others), _beside(raced[1], others)
        return {
            trial: dataclasses.replace(
                records[trial],
                times=times[trial],
                setup=set_up_times.get(trial.algorithm),
                is_deterministic=self._backend.is_deterministic(trial.problem, trial.algorithm),
            )
            for trial in runs
        }


def _beside(times: Mapping[Key, Measurement], others: float) -> dict[Key, Measurement]:
    """Return times with how many processors others took meanwhile."""
    return {key: dataclasses.replace(each, others=others) for key, each in times.items()}


@contextlib.contextmanager
def _memory_for(problem: ConvProblem) -> Iterator[None]:
    """Have operands of a problem made.

    Raises:
        UnmeasuredError: memory is lacking for them.
    """
    try:
        yield
    except Exception as failure:
        pass_on_interruption(failure)
        if not is_lack_of_memory(failure):
            raise
        raise UnmeasuredError(f"{problem} could not be measured: {failure}") from failure


def _with_span(rule: SamplingRule, least_span_ns: int) -> SamplingRule:
    return dataclasses.replace(rule, min_span_ns=max(rule.min_span_ns, least_span_ns))
