"""Times as whole numbers of ticks, so that sums do not depend on the order of their terms."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

BoolArray: TypeAlias = NDArray[np.bool_]
FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class TickScale:
    """Seconds in ticks of 2**exponent seconds.

    A sum of seconds in floating point depends on the order of its terms, so two divisions that are equally
    fast may differ in the last bit, and the tie goes unseen. Whole numbers have no such trouble. Where all
    times are whole ticks, sums are equal exactly where times are. Any other time is rounded for itself, to
    the nearest: sums whose times differ by less than a tick for each term may come out equal, or either way.

    Attributes:
        exponent: logarithm to base 2 of the tick in seconds.
    """

    exponent: int

    @classmethod
    def for_sums_up_to(cls, longest_s: float, bits: int) -> "TickScale":
        """Return the finest scale on which `longest_s` seconds are at most 2**bits ticks.

        Raises:
            ValueError: `longest_s` is not finite, as the sum of times may be that are.
        """
        if not math.isfinite(longest_s):
            raise ValueError(f"Times must add up to a finite number of seconds, but got {longest_s}.")
        return cls(math.frexp(longest_s)[1] - bits)

    def ticks(self, times_s: Sequence[float]) -> IntArray:
        """Return the times in whole ticks; shape (len(times_s),)."""
        return np.rint(np.ldexp(np.array(times_s, dtype=np.float64), -self.exponent)).astype(np.int64)
