"""Which configurations of a list are measured: the first, one of every workspace size and every engine."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

_FIRST = 6
"""cuDNN's order is its prediction of the time; the fastest is rarely far down."""
_MOST = 16
_SAME_BYTES = 2**20
_SAME_SHARE = 0.02


class Sized(Protocol):
    """What pruning looks at in a configuration."""

    @property
    def engine(self) -> int:
        """Number of the engine."""

    @property
    def workspace_bytes(self) -> int:
        """What it declares."""


_Configuration = TypeVar("_Configuration", bound=Sized)


def prune(configurations: Sequence[_Configuration]) -> tuple[_Configuration, ...]:
    """Return at most 16 of the configurations, in cuDNN's order, in which they are given.

    Kept are the first 6; then one of every workspace size that is not within the larger of 1 MiB and 2 % of
    one kept; then one of every engine not yet kept; then the next in order. The least workspace always
    stays, in place of the last one chosen.
    """
    kept = list(range(min(_FIRST, len(configurations))))

    def fill(is_new: Callable[[Sized, Sized], bool]) -> None:
        for place, candidate in enumerate(configurations):
            if len(kept) == _MOST:
                return
            if place not in kept and all(is_new(candidate, configurations[other]) for other in kept):
                kept.append(place)

    fill(_is_of_another_size)
    fill(_is_of_another_engine)
    fill(_is_another)
    _keep_least(kept, configurations)
    return tuple(configurations[place] for place in sorted(kept))


def _is_of_another_size(candidate: Sized, other: Sized) -> bool:
    apart = abs(candidate.workspace_bytes - other.workspace_bytes)
    return apart > max(_SAME_BYTES, _SAME_SHARE * candidate.workspace_bytes)


def _is_of_another_engine(candidate: Sized, other: Sized) -> bool:
    return candidate.engine != other.engine


def _is_another(_candidate: Sized, _other: Sized) -> bool:
    return True


def _keep_least(kept: list[int], configurations: Sequence[Sized]) -> None:
    def workspace_bytes(place: int) -> int:
        return configurations[place].workspace_bytes

    least = min(range(len(configurations)), key=workspace_bytes, default=None)
    if least is not None and workspace_bytes(least) < min(map(workspace_bytes, kept)):
        kept[-1] = least
