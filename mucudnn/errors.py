"""The errors that mucudnn raises on purpose, its warnings, and how it warns.

MucudnnError
├── SizeError (ValueError)            an amount of memory that cannot be read
├── ProblemError (ValueError)         shapes that no convolution has
├── OptionError (ValueError)          an option that is none of the choices
├── InfeasibleError                   no division fits the workspace limit
├── SampleError                       the model cannot be run on the sample, or has nothing to tune
│   └── NothingToTuneError            the model runs on the sample, but has nothing to tune
├── BackendError                      a backend or an algorithm cannot be used here
│   ├── CompilationError              an algorithm's code could not be compiled, now
│   ├── DeviceLostError               an algorithm has broken the device for this process
│   ├── UnmeasuredError               a convolution cannot be measured now, whatever computes it
│   └── UnweighableError              no workspace can be measured here, whatever takes it
├── StoreError                        a store that is damaged or newer than this version
└── PlanError
    ├── PlanFormatError               a plan that is damaged or newer than this version
    └── PlanMismatchError             a plan made for another model or another environment

MucudnnWarning (UserWarning)
├── StoreWarning                      what is measured now is not kept
├── ValuesWarning                     a model looks at values, or tensors without any are kept somewhere
├── AccuracyWarning                   PyTorch's own convolution, which runs as before, is wrong
├── BusyWarning                       others used the device while times were measured on it
├── BackendWarning                    a backend works, but not with all that it could offer
├── SolverWarning                     sharing mode's selection may not be the fastest
└── UntunedWarning                    a shape or a state that was not tuned runs PyTorch's own convolution
"""

import sys
import warnings

from mucudnn.units import format_exactly

_PASSED_THROUGH = {"mucudnn", "torch", "contextlib"}
"""Packages whose lines are not what a warning is about; code that torch makes has no name of its own."""


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn in the name of the nearest line that is neither ours nor PyTorch's: that is the user's call.

    In a thread without a line of the user's that is the outermost one, which began the thread.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "torch").partition(".")[0] in _PASSED_THROUGH:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


class MucudnnError(Exception):
    """The base of every error that mucudnn raises on purpose."""


class SizeError(MucudnnError, ValueError):
    """An amount of memory that cannot be read."""


class ProblemError(MucudnnError, ValueError):
    """Shapes that no convolution has."""


class OptionError(MucudnnError, ValueError):
    """An option that is none of the choices; the message lists them."""


class InfeasibleError(MucudnnError):
    """No division fits the workspace limit.

    Attributes:
        limit_bytes: the limit that was asked for, in bytes.
        least_bytes: the least limit, in bytes, that may do, by what algorithms declare and what was seen. It
            is no promise: algorithms that run first under that limit may be wrong or take more, and those
            that could not be weighed may need less. None if no candidates' sizes add up to the batch, if
            their workspaces are not known, or if what fits was seen to break.
        site: where in the model, as text; None if it concerns no single site.
        is_total: whether the limit is for all convolutions together. Then `least_bytes` is their sum, and the
            site is the one that needs most. If the sum is not known, the site was seen to take more than it
            declares, and more than the others leave.
        problem: what the site computes, as text: one module may meet many shapes. None where it is not known.
    """

    def __init__(
        self,
        limit_bytes: int,
        least_bytes: int | None,
        site: str | None = None,
        is_total: bool = False,
        problem: str | None = None,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.least_bytes = least_bytes
        self.site = site
        self.is_total = is_total
        self.problem = problem
        super().__init__(limit_bytes, least_bytes, site, is_total, problem)

    def __str__(self) -> str:
        computed = f" It computes {self.problem}." if self.site and self.problem else ""
        return self._sentence() + computed

    def _sentence(self) -> str:
        limit = f"the workspace limit of {format_exactly(self.limit_bytes)}"
        if self.is_total:
            what = f"No divisions of all convolutions together fit {limit}"
        else:
            where = f" for {self.site!r}" if self.site else ""
            what = f"No division{where} fits {limit}"
        if self.least_bytes is None:
            found = (
                f": {self.site!r} found no room for what it was seen to take"
                if self.is_total and self.site
                else ""
            )
            return f"{what}{found}, and it is not known which limit would be enough."
        most = f", of which {self.site!r} needs most" if self.is_total and self.site else ""
        least = format_exactly(self.least_bytes)
        return f"{what}; a limit of {least} may be enough{most}. A larger one gives more algorithms a chance."


class SampleError(MucudnnError):
    """The model cannot be run on the sample, or it has nothing to tune."""


class NothingToTuneError(SampleError):
    """The model runs on the sample, but has nothing to tune; the message gives the reasons."""


class BackendError(MucudnnError):
    """A backend or an algorithm cannot be used here."""


class UnmeasuredError(BackendError):
    """A convolution cannot be measured here and now, which says nothing of any algorithm.

    Memory is lacking for its operands, PyTorch's own convolution fails, or nobody counts what that takes.
    """


class UnweighableError(BackendError):
    """No workspace can be measured here, whatever takes it, as where the system is not Linux."""


class CompilationError(BackendError):
    """An algorithm's code could not be compiled for want of room or time: later it may be."""


class DeviceLostError(BackendError):
    """An algorithm has broken the device for this process: nothing can be measured before another one.

    Attributes:
        algorithm: id of the algorithm.
        batch: micro-batch size with which it ran.
        reason: the device's words.
    """

    def __init__(self, algorithm: str, batch: int, reason: str) -> None:
        self.algorithm = algorithm
        self.batch = batch
        self.reason = reason
        super().__init__(algorithm, batch, reason)

    def __str__(self) -> str:
        return (
            f"{self.algorithm} with {self.batch} samples has broken the device for this process: "
            f"{self.reason} It is not tried again for this convolution. What was measured before is kept: "
            "run once more, in a new process."
        )


class StoreError(MucudnnError):
    """A store that is damaged or newer than this version; it is left as it is."""


class PlanError(MucudnnError):
    """A plan that cannot be used."""


class PlanFormatError(PlanError):
    """A plan that is damaged or newer than this version."""


class PlanMismatchError(PlanError):
    """A plan made for another model or another environment."""


class MucudnnWarning(UserWarning):
    """The base of every warning of mucudnn's own."""


class StoreWarning(MucudnnWarning):
    """What is measured now is not kept, because the store cannot be written."""


class ValuesWarning(MucudnnWarning):
    """A model had to be run in earnest, because it looks at values, or somebody keeps tensors without any."""


class BackendWarning(MucudnnWarning):
    """A backend works, but not with all that it could offer."""


class SolverWarning(MucudnnWarning):
    """Sharing mode's selection may not be the fastest within the limit; the message says by how much."""


class AccuracyWarning(MucudnnWarning):
    """PyTorch's own convolution, which runs as before, was found to be wrong."""


class BusyWarning(MucudnnWarning):
    """Others used the device while times were measured on it."""


class UntunedWarning(MucudnnWarning):
    """Something met a shape or a state that was not tuned and runs PyTorch's own convolution."""
