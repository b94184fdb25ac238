"""Rules of thumb that tiles in C and those of torch's operations share."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar


class _Form(Protocol):
    @property
    def outputs(self) -> int: ...


_Winograd = TypeVar("_Winograd", bound=_Form)


class Usual(NamedTuple):
    """The form that is always tried, and when another one is tried too.

    Attributes:
        outputs: m of the form.
        worth: share of its multiplications below which another form is tried too.
    """

    outputs: int
    worth: float


USUAL = Usual(4, 0.9)
"""Of few multiplications, and of few digits lost."""


def likely_forms(
    winograd: Sequence[_Winograd], cost: Callable[[_Winograd], float], usual: Usual = USUAL
) -> list[_Winograd]:
    """Return the usual form, and the one that costs least if that is far less; without it, that alone."""
    tried = [each for each in winograd if each.outputs == usual.outputs]
    most = cost(tried[0]) * usual.worth if tried else math.inf
    cheapest = sorted(winograd, key=cost)[:1]
    return [*tried, *(each for each in cheapest if cost(each) < most)]


def some_channels(channels: int, channel_bytes: int, some_bytes: int) -> int:
    """Return a power of two of channels that take so many bytes; 0 if it is none or all of them."""
    if channel_bytes <= some_bytes < channel_bytes * channels:
        return int(2 ** int(math.log2(some_bytes / channel_bytes)))
    return 0
