"""The words among which a user chooses how to tune."""

from enum import StrEnum
from typing import TypeVar

from mucudnn.errors import OptionError

Choice = TypeVar("Choice", bound=StrEnum)

PREFIX = "replay:"
"""What the name of a backend begins with that is a recording."""


class Mode(StrEnum):
    """Whose the workspace limit is."""

    REUSE = "reuse"
    """One buffer serves all sites in turn: the limit holds for each site (WR of the paper)."""
    SHARING = "sharing"
    """Each site owns its part: the limit holds for their sum (WD of the paper)."""


class Policy(StrEnum):
    """Which micro-batch sizes are tried."""

    UNDIVIDED = "undivided"
    POWER_OF_TWO = "power_of_two"
    ALL = "all"

    def sizes(self, batch: int) -> tuple[int, ...]:
        """Return the micro-batch sizes of this policy for a mini-batch of `batch` samples, rising."""
        if batch < 1:
            return ()
        if self is Policy.UNDIVIDED:
            return (batch,)
        if self is Policy.ALL:
            return tuple(range(1, batch + 1))
        powers = [1 << exponent for exponent in range(batch.bit_length()) if 1 << exponent < batch]
        return (*powers, batch)


class Search(StrEnum):
    """Which of a backend's algorithms are tried."""

    HEURISTIC = "heuristic"
    """Those that usually win (of cuDNN's, that it recommends), with some for every class of workspace."""
    EXHAUSTIVE = "exhaustive"
    """All that may."""


def choice(kind: type[Choice], value: str) -> Choice:
    """Return the member of `kind` that `value` names; hyphens stand for underscores.

    Raises:
        OptionError: there is no such member; the message lists them all.
    """
    if isinstance(value, str):  # bytes and paths have a replace of their own
        for member in kind:
            if member == value.replace("-", "_"):
                return member
    names = ", ".join(repr(str(member)) for member in kind)
    raise OptionError(f"{kind.__name__.lower()} must be one of {names}, but got {value!r}.")
