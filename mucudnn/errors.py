"""All errors that mucudnn raises on purpose.

MucudnnError
├── SizeError (ValueError)            an amount of memory that cannot be read
├── ProblemError (ValueError)         shapes that no convolution has
├── OptionError (ValueError)          an unknown mode, policy, op or backend
├── InfeasibleError                   no division fits the workspace limit
├── SolverError                       a solver stopped without an answer
├── SampleError                       the model cannot be run on the sample, or has nothing to tune
├── BackendError                      a backend or an algorithm cannot be used here
├── StoreError                        a store that is damaged or newer than this version
└── PlanError
    ├── PlanFormatError               a plan that is damaged or newer than this version
    └── PlanMismatchError             a plan made for another model or another environment
"""


class MucudnnError(Exception):
    """The base of every error that mucudnn raises on purpose."""


class SizeError(MucudnnError, ValueError):
    """An amount of memory that cannot be read."""


class ProblemError(MucudnnError, ValueError):
    """Shapes that no convolution has."""


class OptionError(MucudnnError, ValueError):
    """An unknown mode, policy, op or backend; the message lists the choices."""


class InfeasibleError(MucudnnError):
    """No division fits the workspace limit.

    Attributes:
        limit_bytes: the limit that was asked for, in bytes.
        least_bytes: the least limit for which there is an answer, in bytes; None where no candidates' sizes
            add up to the batch, or where their workspaces are not known.
        site: where in the model, as text; None if it concerns no single site.
    """

    def __init__(self, limit_bytes: int, least_bytes: int | None, site: str | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.least_bytes = least_bytes
        self.site = site
        super().__init__(limit_bytes, least_bytes, site)

    def __str__(self) -> str:
        where = f" for {self.site!r}" if self.site else ""
        if self.least_bytes is None:
            return (
                f"No division{where} fits the workspace limit of {_in_both_units(self.limit_bytes)}, "
                "and it is not known what would do."
            )
        return (
            f"No division{where} fits the workspace limit of {_in_both_units(self.limit_bytes)}; "
            f"the least workspace that would do is {_in_both_units(self.least_bytes)}."
        )

    def at(self, site: str) -> "InfeasibleError":
        """Return the same error, naming the site in the model that it concerns."""
        return InfeasibleError(self.limit_bytes, self.least_bytes, site)


class SolverError(MucudnnError):
    """A solver stopped without an answer; the message names the limit that stopped it."""


class SampleError(MucudnnError):
    """The model cannot be run on the sample, or it has nothing to tune."""


class BackendError(MucudnnError):
    """A backend or an algorithm cannot be used here."""


class StoreError(MucudnnError):
    """A store that is damaged or newer than this version; it is left as it is."""


class UntunedWarning(UserWarning):
    """Something met a shape or a state that was not tuned and runs PyTorch's own convolution."""


class PlanError(MucudnnError):
    """A plan that cannot be used."""


class PlanFormatError(PlanError):
    """A plan that is damaged or newer than this version."""


class PlanMismatchError(PlanError):
    """A plan made for another model or another environment."""


def _in_both_units(n_bytes: int) -> str:
    return f"{n_bytes} bytes ({n_bytes / 2**20:.4g} MiB)"
