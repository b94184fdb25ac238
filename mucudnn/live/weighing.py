"""Weighing what trials and whole divisions take, and refusing what takes more than it may."""

from mucudnn.backends import Backend
from mucudnn.backends.failures import REFUSING
from mucudnn.backends.own import packed_job
from mucudnn.division import Division
from mucudnn.evidence import fits_as_seen
from mucudnn.execution.weighing import division_job
from mucudnn.live.judging import Judge
from mucudnn.problem import ConvProblem
from mucudnn.profile import Record, Refusal, RefusalKind, Trial
from mucudnn.profiling.measurer import Limits
from mucudnn.profiling.trials import division_trial, packed_trial
from mucudnn.sizes import format_exactly


class Scales:
    """Weighs on the device of a backend; what refuses to be weighed goes to the judge, who may raise."""

    def __init__(self, backend: Backend, judge: Judge) -> None:
        self._backend = backend
        self._judge = judge

    def declared_bytes(self, trial: Trial) -> int | None:
        """Return the workspace that `trial` needs; None for what must be weighed, such as PyTorch's own."""
        if not self._backend.declares(trial.algorithm):
            return None
        sum_bytes = 0 if trial.whole else trial.problem.running_sum_bytes
        return self._backend.buffer_bytes(trial.problem, trial.algorithm) + sum_bytes

    def weigh(self, trial: Trial, limit_bytes: int) -> Record:
        """Return what a trial takes, or that it takes more than it may, or breaks."""
        try:
            declared = self.declared_bytes(trial)
            if declared is not None and declared > limit_bytes:
                return _too_large(trial, declared, limit_bytes)
            needed = self._backend.workspace_bytes(trial, limit_bytes)
        except REFUSING as failure:
            return self._judge.failed(Record(trial), failure)
        return _limited(trial, needed, limit_bytes)

    def weigh_division(self, problem: ConvProblem, division: Division, limits: Limits) -> Record:
        """Return what a whole division takes, or that it takes more than it may, or breaks."""
        trial, limit_bytes = division_trial(problem, division), limits.of(division)
        job = division_job(problem, division, self._backend.device)
        try:
            weight = self._backend.footprint(job, limit_bytes)
        except REFUSING as failure:
            return self._judge.failed(Record(trial), failure)
        if not fits_as_seen(weight, limit_bytes):
            return _too_large(trial, weight, limit_bytes, limits.bound_of(division))
        return Record(trial, weight)

    def weigh_packed(self, problem: ConvProblem, limit_bytes: int) -> Record:
        """Return the same of PyTorch's own with its filter packed."""
        trial = packed_trial(problem, self._backend.own)
        try:
            needed = self._backend.footprint(packed_job(problem), limit_bytes)
        except REFUSING as failure:
            return self._judge.failed(Record(trial), failure, is_own=True)
        return _limited(trial, needed, limit_bytes)


def _limited(trial: Trial, needed: int | None, limit_bytes: int) -> Record:
    """Return the record of what was weighed; None is more than the limit, which is refused."""
    if needed is None or needed > limit_bytes:
        return _too_large(trial, needed, limit_bytes)
    return Record(trial, needed, limit_bytes=limit_bytes)


def _too_large(trial: Trial, needed: int | None, limit_bytes: int, bound: str = "limit") -> Record:
    what = "more" if needed is None else format_exactly(needed)
    reason = f"it needs {what}, the {bound} is {format_exactly(limit_bytes)}"
    refusal = Refusal(trial.algorithm, trial.problem.batch, RefusalKind.OVER_LIMIT, reason)
    return Record(trial, needed, refusal=refusal, limit_bytes=limit_bytes)
