"""Measuring what is not yet known: candidates of a problem, and finished divisions.

The store is asked first; what it lacks is measured and kept. Nothing whose workspace is above the limit runs.
"""

import dataclasses
import statistics
import time
import zlib
from collections.abc import Mapping, Sequence

from mucudnn.backends import Backend
from mucudnn.errors import BackendError
from mucudnn.execution import division_job
from mucudnn.plan import Division, Policy
from mucudnn.problem import ConvProblem
from mucudnn.profile import (
    Candidate,
    Comparison,
    Environment,
    Profile,
    Record,
    Refusal,
    RefusalKind,
    Trial,
)
from mucudnn.sizes import format_bytes
from mucudnn.stand import Stand, TrialRun
from mucudnn.store import Store
from mucudnn.timing import CONFIRMING, PROFILING, Clock, Entrant, SamplingRule, compare_runs, race

_WEIGHING_NOISE_BYTES = 16 * 2**10
"""How much more than it takes a finished division may be seen to take: four pages (9 KiB seen)."""


class Profiler:
    """Measures on one backend under one limit, and keeps what it measures in a store.

    Attributes:
        environment: in which it measures.
        limit_bytes: the limit, inclusive.
        policy: which micro-batch sizes are tried.
        own: id of PyTorch's own convolution on this backend.
        measured: trials and divisions that were really run, so far.
    """

    def __init__(
        self,
        backend: Backend,
        store: Store,
        limit_bytes: int,
        policy: Policy,
        profiling: SamplingRule = PROFILING,
        confirming: SamplingRule = CONFIRMING,
        clock: Clock = time.perf_counter_ns,
    ) -> None:
        """Remember what to measure with; nothing is measured yet."""
        self.environment: Environment = backend.environment()
        self.limit_bytes = limit_bytes
        self.policy = policy
        self.own = backend.own
        self.measured = 0
        self._backend = backend
        self._store = store
        self._profiling = profiling
        self._confirming = confirming
        self._clock = clock

    def profile(self, problem: ConvProblem) -> Profile:
        """Return the candidates of `problem` within the limit, at all sizes of the policy."""
        trials = self._trials(problem)
        known = self._store.records(self.environment, trials)
        missing = [trial for trial in trials if not self._is_settled(known.get(trial))]
        if missing:
            fresh = self._measure(problem, missing)
            self._store.add_records(self.environment, fresh)
            # What is kept is what another process may have written first, so that all plan from the same.
            known = {record.trial: record for record in fresh} | self._store.records(self.environment, trials)
        return _profile(problem, self.environment, [known[trial] for trial in trials], self.limit_bytes)

    def known_workspaces(self, problem: ConvProblem) -> list[Candidate]:
        """Return every algorithm at every size with the workspace that it needs, as far as known, untimed.

        It is what tells the least limit that would do when none fits. What was refused for another reason
        than its size is left out.
        """
        trials = self._trials(problem)
        known = self._store.records(self.environment, trials)
        records = [known.get(trial) or Record(trial, self._declared(trial)) for trial in trials]
        return [
            Candidate(record.trial.algorithm, record.trial.problem.batch, 0.0, record.workspace_bytes)
            for record in records
            if record.workspace_bytes is not None
            and (record.refusal is None or record.refusal.kind is RefusalKind.OVER_LIMIT)
        ]

    def compare(self, problem: ConvProblem, divisions: Sequence[Division]) -> Comparison:
        """Return the times and footprints of finished `divisions`, the base first, run as they will run.

        A division that was seen to take more than the limit has no times in the answer; what it was seen to
        take stands there if that is known.
        """
        refused = self._refused(problem, divisions)
        fitting = [division for division in divisions if division.key not in refused]
        keys = [division.key for division in fitting]
        known = self._store.comparison(self.environment, problem, keys)
        if known is None:
            known, refused = self._compare(problem, fitting, refused)
        fits = {key for key in known.times if self._fits(known.workspaces.get(key))}
        seen = {key: record.workspace_bytes for key, record in refused.items()} | dict(known.workspaces)
        return Comparison(
            problem,
            {key: times for key, times in known.times.items() if key in fits},
            {key: n_bytes for key, n_bytes in seen.items() if n_bytes is not None},
        )

    def errors(self, problem: ConvProblem) -> dict[tuple[str, int], float]:
        """Return the measured errors of the candidates of `problem`, by algorithm and size."""
        known = self._store.records(self.environment, self._trials(problem))
        return {
            (trial.algorithm, trial.problem.batch): record.error
            for trial, record in known.items()
            if record.error is not None
        }

    def _trials(self, problem: ConvProblem) -> list[Trial]:
        return [
            Trial(problem.with_batch(size), algorithm, whole=size == problem.batch)
            for size in self.policy.sizes(problem.batch)
            for algorithm in self._backend.algorithms(problem.with_batch(size))
        ]

    def _declared(self, trial: Trial) -> int | None:
        """Bytes that a trial needs as far as that is known without running anything."""
        if trial.algorithm == self._backend.own:
            return None
        return self._backend.buffer_bytes(trial.problem, trial.algorithm)

    def _is_settled(self, record: Record | None) -> bool:
        """Whether a record answers under the present limit: a refusal for size does up to its own limit."""
        if record is None:
            return False
        if record.refusal is None or record.refusal.kind is not RefusalKind.OVER_LIMIT:
            return True
        return record.limit_bytes is not None and record.limit_bytes >= self.limit_bytes

    def _measure(self, problem: ConvProblem, trials: Sequence[Trial]) -> list[Record]:
        """Weigh, check and time `trials`, as far as each earns the next step."""
        records = {trial: self._weigh(trial) for trial in trials}
        fitting = [trial for trial, record in records.items() if record.refusal is None]
        buffers = [self._backend.buffer_bytes(trial.problem, trial.algorithm) for trial in fitting]
        if fitting:
            stand = Stand(self._backend, problem, max(buffers), seed=zlib.crc32(problem.key.encode()))
            right: dict[Trial, TrialRun] = {}
            for trial in fitting:
                records[trial], run = self._check(records[trial], stand)
                if run is not None:
                    right[trial] = run
            records |= self._time(records, right)
        return list(records.values())

    def _weigh(self, trial: Trial) -> Record:
        declared = self._declared(trial)
        if declared is not None and declared > self.limit_bytes:
            return self._too_large(trial, declared)
        needed = self._backend.workspace_bytes(trial, self.limit_bytes)
        if needed is None or needed > self.limit_bytes:
            return self._too_large(trial, needed)
        return Record(trial, needed, limit_bytes=self.limit_bytes)

    def _too_large(self, trial: Trial, needed: int | None) -> Record:
        what = "more" if needed is None else format_bytes(needed)
        reason = f"it needs {what}, the limit is {format_bytes(self.limit_bytes)}"
        refusal = Refusal(trial.algorithm, trial.problem.batch, RefusalKind.OVER_LIMIT, reason)
        return Record(trial, needed, refusal=refusal, limit_bytes=self.limit_bytes)

    def _check(self, record: Record, stand: Stand) -> tuple[Record, TrialRun | None]:
        """Run once against the reference; what is wrong or breaks is refused, and has no run to be timed.

        PyTorch's own is what the model runs anyway: its error is kept, and never a reason to refuse it.
        """
        self.measured += 1
        trial = record.trial
        try:
            run = stand.run(trial)
            error = run.error()
        except Exception as failure:
            if trial.algorithm == self._backend.own or _is_lack_of_memory(failure):
                raise BackendError(f"{trial.problem} could not be measured: {failure}") from failure
            reason = str(failure) or type(failure).__name__
            refusal = Refusal(trial.algorithm, trial.problem.batch, RefusalKind.FAILED, reason)
            return dataclasses.replace(record, refusal=refusal), None
        bound = self._backend.error_bound(trial.problem, trial.algorithm)
        if trial.algorithm != self._backend.own and not error <= bound:
            reason = f"its relative error is {error:.1e}, the bound is {bound:.0e}"
            refusal = Refusal(trial.algorithm, trial.problem.batch, RefusalKind.WRONG, reason)
            return dataclasses.replace(record, error=error, refusal=refusal), None
        return dataclasses.replace(record, error=error), run

    def _time(self, records: Mapping[Trial, Record], runs: Mapping[Trial, TrialRun]) -> dict[Trial, Record]:
        """Race all runs against one another, and time each algorithm's set-up beside them.

        The set-up is the algorithm's and not the size's, so every record gets it: a profile of any sizes
        then knows it.
        """
        entrants: dict[tuple[str, Trial], Entrant] = {}
        set_ups: dict[str, Trial] = {}
        for trial, run in runs.items():
            workspace = records[trial].workspace_bytes or 0
            entrants["part", trial] = Entrant(run.part, trial.problem.batch, workspace)
            if trial.algorithm != self._backend.own:
                set_ups.setdefault(trial.algorithm, trial)
        for algorithm, trial in set_ups.items():
            entrants["setup", trial] = Entrant(runs[trial].setup, ("setup", algorithm), 0)
        times = race(entrants, self._profiling, self._clock)
        measured_set_ups = {algorithm: times["setup", trial] for algorithm, trial in set_ups.items()}
        return {
            trial: dataclasses.replace(
                records[trial], times=times["part", trial], setup=measured_set_ups.get(trial.algorithm)
            )
            for trial in runs
        }

    def _refused(self, problem: ConvProblem, divisions: Sequence[Division]) -> dict[str, Record]:
        """Return, by key, what is known of those divisions that were seen to take more than the limit."""
        trials = [_division_trial(problem, division) for division in divisions]
        known = self._store.records(self.environment, trials)
        return {
            trial.algorithm: record
            for trial, record in known.items()
            if record.refusal is not None and self._is_settled(record)
        }

    def _compare(
        self, problem: ConvProblem, divisions: Sequence[Division], refused: Mapping[str, Record]
    ) -> tuple[Comparison, dict[str, Record]]:
        """Weigh `divisions`, time those that fit, keep both; return them, and all that is refused."""
        self.measured += len(divisions)
        weights = {
            division.key: self._backend.footprint(division_job(problem, division), self.limit_bytes)
            for division in divisions
        }
        fitting = [division for division in divisions if self._fits(weights[division.key])]
        too_large = {
            division.key: self._too_large(_division_trial(problem, division), weights[division.key])
            for division in divisions
            if division not in fitting
        }
        self._store.add_records(self.environment, too_large.values())
        stand = Stand(self._backend, problem, 0, seed=zlib.crc32(problem.key.encode()))
        calls = {division.key: stand.division(division) for division in fitting}
        fresh = Comparison(
            problem,
            compare_runs(calls, self._confirming, self._clock),
            {key: weight for key in calls if (weight := weights[key]) is not None},
        )
        self._store.add_comparison(self.environment, fresh)
        kept = self._store.comparison(self.environment, problem, list(calls))
        return kept or fresh, {**refused, **too_large}

    def _fits(self, seen_bytes: int | None) -> bool:
        """Whether what a finished division was seen to take is within the limit."""
        return seen_bytes is not None and seen_bytes <= self.limit_bytes + _WEIGHING_NOISE_BYTES


def _is_lack_of_memory(failure: Exception) -> bool:
    """Whether a run failed for a reason that may be gone tomorrow, and so says nothing of the algorithm."""
    return isinstance(failure, MemoryError) or "alloc" in str(failure)


def _division_trial(problem: ConvProblem, division: Division) -> Trial:
    """Return the trial as which a finished division that is too large is kept."""
    return Trial(problem, division.key, whole=True)


def _profile(
    problem: ConvProblem, environment: Environment, records: Sequence[Record], limit_bytes: int
) -> Profile:
    """Join the records of one problem's trials: medians as times, one set-up time for each algorithm."""
    set_ups: dict[str, list[float]] = {}
    for record in records:
        if record.setup is not None:
            set_ups.setdefault(record.trial.algorithm, []).append(record.setup.estimate.median)
    candidates = [
        Candidate(
            record.trial.algorithm,
            record.trial.problem.batch,
            record.times.estimate.median,
            record.workspace_bytes,
            statistics.median(set_ups.get(record.trial.algorithm, [0.0])),
        )
        for record in records
        if record.times is not None
        and record.workspace_bytes is not None
        and record.workspace_bytes <= limit_bytes
    ]
    refusals = [record.refusal for record in records if record.refusal is not None]
    return Profile(problem, environment, tuple(candidates), tuple(refusals))
