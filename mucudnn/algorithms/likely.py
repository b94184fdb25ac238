"""Rules of thumb that tiles in C and those of torch's operations share."""

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar


class _Form(Protocol):
    @property
    def outputs(self) -> int: ...


_Winograd = TypeVar("_Winograd", bound=_Form)

_USUAL_OUTPUTS = 4
"""m of the form that is always tried: of few multiplications, and of few digits lost."""

_WORTH_OF_ANOTHER = 0.9
"""Share of its multiplications below which another form is tried too."""


def likely_forms(winograd: Sequence[_Winograd], cost: Callable[[_Winograd], float]) -> list[_Winograd]:
    """Return F(4), and the form that costs least if that is far less; where there is no F(4), that alone."""
    usual = [each for each in winograd if each.outputs == _USUAL_OUTPUTS]
    worth = cost(usual[0]) * _WORTH_OF_ANOTHER if usual else math.inf
    cheapest = sorted(winograd, key=cost)[:1]
    return [*usual, *(each for each in cheapest if cost(each) < worth)]


def some_channels(channels: int, channel_bytes: int, some_bytes: int) -> int:
    """Return a power of two of channels that take so many bytes; 0 if it is none or all of them."""
    if channel_bytes <= some_bytes < channel_bytes * channels:
        return int(2 ** int(math.log2(some_bytes / channel_bytes)))
    return 0
