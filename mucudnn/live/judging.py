"""What the failure of a run says: of its algorithm, of its problem, or of the device."""

import dataclasses

from mucudnn.backends import Backend
from mucudnn.backends.failures import is_lack_of_memory
from mucudnn.division import undivided
from mucudnn.errors import (
    BackendWarning,
    CompilationError,
    DeviceLostError,
    UnmeasuredError,
    UnweighableError,
    warn_user,
)
from mucudnn.interruptions import pass_on_interruption
from mucudnn.profile import Record, Refusal, RefusalKind

OF_NO_TRIAL = (UnmeasuredError, DeviceLostError, UnweighableError)
"""Errors of a backend that say nothing of the algorithm that was asked for."""


class Judge:
    """Judges failures on the device of a backend; of what cannot be compiled it warns once."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._own = backend.own
        self._has_told_of_compiler = False

    def failed(self, record: Record, failure: Exception, *, is_own: bool | None = None) -> Record:
        """Return the record of a trial whose run has failed, refused for that.

        Args:
            record: of the trial.
            failure: what its run has raised.
            is_own: whether it was PyTorch's own; None asks its name.

        Raises:
            DeviceLostError: the device works no more.
            UnmeasuredError: the failure says nothing of the algorithm.
            UnweighableError: nor does it say anything of this problem.
            Exception: what a signal handler has raised, unchanged.
        """
        pass_on_interruption(failure)
        if isinstance(failure, OF_NO_TRIAL):
            raise failure
        trial = record.trial
        reason = str(failure) or type(failure).__name__
        if is_own is None:
            is_own = trial.algorithm in (self._own, undivided(self._own, trial.problem.batch).key)
        if not is_own and not self._is_alive():  # whatever it says: traces of it may name an allocator
            raise DeviceLostError(trial.algorithm, trial.problem.batch, reason) from failure
        if is_own or is_lack_of_memory(failure):
            raise UnmeasuredError(f"{trial.problem} could not be measured: {failure}") from failure
        kind = RefusalKind.NOT_COMPILED if isinstance(failure, CompilationError) else RefusalKind.FAILED
        if kind is RefusalKind.NOT_COMPILED and not self._has_told_of_compiler:
            self._has_told_of_compiler = True
            warn_user(
                f"Algorithms that cannot be compiled are left out, and tried again later: {reason}",
                BackendWarning,
            )
        refusal = Refusal(trial.algorithm, trial.problem.batch, kind, reason)
        return dataclasses.replace(record, times=None, setup=None, refusal=refusal)

    def _is_alive(self) -> bool:
        """Return whether the device still works: after a fault in its memory, every later call fails too."""
        try:
            self._backend.clock()
        except Exception as failure:  # noqa: BLE001  # whatever it is, but an interruption
            pass_on_interruption(failure)
            return False  # whatever it says, it does not work
        return True
