"""Sharing without a solver: the fronts of all sites merged into one, exactly.

Site k offers the divisions c of its front, with times T_kc and workspaces M_kc; a selection takes one from
each site, and its workspaces may add up to W at most. The fronts are merged site by site: times and
workspaces add up, and sums that another one beats in both are dropped. What is left at the end is the
front of all selections. On the way the sums may become too many, so those that lead nowhere are dropped
too. With a price of L >= 0 ticks for each byte (Lagrangian relaxation, Fisher 1981), let

    V_k = min over c of  T_kc + L M_kc        R_kc = T_kc + L M_kc - V_k >= 0,  the regret of c

Then every selection within W takes  sum T = sum V + sum R - L sum M  >=  (sum V - L W) + sum R.  So in one
that takes no more than U, the regrets are no more than U - (sum V - L W) together.
"""

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from mucudnn.division import Division
from mucudnn.sizes import LARGEST
from mucudnn.solvers.ticks import FloatArray, IntArray, TickScale

Selection: TypeAlias = tuple[int, ...]
"""For each site, the place of a division in the site's front."""

_TICK_BITS = 52
_PRICE_STEPS = 128
_FRACTIONS = [4.0**exponent for exponent in range(-8, 0)]

MOST_SUMS = 1 << 18
"""How many sums are looked at for one site, at most: some 20 MB, and 50 ms."""

_ROUNDING = 2.0**-36
"""Far above the relative error of regrets, which are sums of some hundred float64 products."""


@dataclasses.dataclass(frozen=True)
class Choices:
    """The fronts of all sites as arrays; a row is a site, a column a place in its front.

    Attributes:
        ticks: T, whole numbers whose sums are below 2**52, exact in float64; inf beyond a front's end.
        extra_bytes: M less the least M of the site; 0 beyond a front's end.
        spare_bytes: W less the least M of every site; negative if no selection is within the limit.
    """

    ticks: FloatArray
    extra_bytes: IntArray
    spare_bytes: int

    @classmethod
    def of(cls, fronts: Sequence[Sequence[Division]], limit_bytes: int) -> "Choices":
        """Return the choices among one front or more, none of them empty.

        Raises:
            ValueError: the largest workspaces of all sites add up to more than arrays of integers hold.
        """
        largest = sum(max(division.workspace_bytes for division in front) for front in fronts)
        if largest > LARGEST:
            raise ValueError(f"Workspaces must add up to at most {LARGEST} bytes, but may to {largest}.")
        shape = len(fronts), max(len(front) for front in fronts)
        ticks, extra_bytes = np.full(shape, np.inf), np.zeros(shape, dtype=np.int64)
        longest_s = sum(max(division.time_s for division in front) for front in fronts)
        scale = TickScale.for_sums_up_to(longest_s, _TICK_BITS)
        least_bytes = [min(division.workspace_bytes for division in front) for front in fronts]
        for k, front in enumerate(fronts):
            ticks[k, : len(front)] = scale.ticks([division.time_s for division in front])
            extra_bytes[k, : len(front)] = [each.workspace_bytes - least_bytes[k] for each in front]
        return cls(ticks, extra_bytes, limit_bytes - sum(least_bytes))

    def time_of(self, selection: Selection) -> float:
        """Return the time of a selection in ticks."""
        return float(self.ticks[np.arange(len(selection)), selection].sum())

    def fits(self, selection: Selection | IntArray) -> bool:
        """Whether the workspaces of a selection are within the limit, in exact integers."""
        return int(self.extra_bytes[np.arange(len(selection)), selection].sum()) <= self.spare_bytes


@dataclasses.dataclass(frozen=True)
class Prices:
    """Choices at a price for each byte; the symbols are those of the module's docstring.

    Attributes:
        cheapest: the selection without regrets; it is within the limit.
        regrets: R in ticks, inf beyond a front's end.
        lower: sum V - L W in ticks; no selection within the limit takes less.
        rounding: more than the floating-point error of regrets and `lower`, in ticks.
    """

    cheapest: Selection
    regrets: FloatArray
    lower: float
    rounding: float

    @classmethod
    def of(cls, choices: Choices) -> "Prices":
        """Return the prices at the least L at which the cheapest selection is within the limit."""
        price = _price(choices)
        costs = choices.ticks + price * choices.extra_bytes
        least = costs.min(axis=1)
        limit_costs = price * choices.spare_bytes
        return cls(
            cheapest=tuple(costs.argmin(axis=1).tolist()),
            regrets=costs - least[:, np.newaxis],
            lower=float(least.sum()) - limit_costs,
            rounding=_ROUNDING * (float(least.sum()) + limit_costs),
        )

    def most_regret(self, upper: float) -> float:
        """Return a bound for the regrets of a selection within the limit that takes `upper` ticks at most."""
        return upper - self.lower + self.rounding


class TooManySumsError(Exception):
    """Merging would have to hold more sums than memory should be spent on."""


def best_selection(choices: Choices, prices: Prices, upper: float) -> Selection:
    """Return the best selection within the limit, given that one takes `upper` ticks at most.

    It takes the least time; of equally fast ones, it has the least workspace; of those, the first site in
    which they differ has less. The tighter a bound is, the fewer sums there are. So bounds near
    `prices.lower` are tried first; a result that is within its bound is the best of all.

    Raises:
        TooManySumsError: one site would make more than `MOST_SUMS` sums.
    """
    bounds = [prices.lower + (upper - prices.lower) * fraction for fraction in _FRACTIONS]
    return next(
        selection
        for bound in (*bounds, upper)
        if choices.time_of(selection := _merged(choices, prices, bound)) <= bound
    )


def _merged(choices: Choices, prices: Prices, bound: float) -> Selection:
    """Return the best selection of at most `bound` ticks; if there is none, a slower one.

    There is always one: the cheapest is within the limit, without regrets.
    """
    most_regret = prices.most_regret(bound)
    ticks, extra, regrets = np.zeros(1), np.zeros(1, dtype=np.int64), np.zeros(1)
    steps: list[tuple[IntArray, IntArray]] = []
    for k in reversed(range(len(choices.ticks))):
        allowed = np.flatnonzero(prices.regrets[k] <= most_regret)
        if len(allowed) * len(ticks) > MOST_SUMS:
            raise TooManySumsError
        column, former = np.tile(allowed, len(ticks)), np.repeat(np.arange(len(ticks)), len(allowed))
        ticks = ticks[former] + choices.ticks[k, column]
        extra = extra[former] + choices.extra_bytes[k, column]
        regrets = regrets[former] + prices.regrets[k, column]
        useful = np.flatnonzero((extra <= choices.spare_bytes) & (regrets <= most_regret))
        kept = useful[_front(extra[useful], ticks[useful], column[useful])]
        ticks, extra, regrets = ticks[kept], extra[kept], regrets[kept]
        steps.append((column[kept], former[kept]))
    return _traced(steps)


def _front(extra: IntArray, ticks: FloatArray, column: IntArray) -> IntArray:
    """Return the places of the sums that no other beats; extra bytes rise and ticks strictly fall.

    Of sums that are equal in both, the one with the least column is kept.
    """
    order = np.lexsort((column, ticks, extra))
    least_before = np.minimum.accumulate(np.concatenate(([np.inf], ticks[order])))[:-1]
    return order[ticks[order] < least_before]


def _traced(steps: Sequence[tuple[IntArray, IntArray]]) -> Selection:
    """Return the selection that the fastest sum is made of: columns and former sums, the last site first."""
    place = -1
    selection = []
    for column, former in reversed(steps):
        selection.append(int(column[place]))
        place = former[place]
    return tuple(selection)


def _price(choices: Choices) -> float:
    """Return, by bisection, the least price per byte at which the cheapest selection is within the limit."""
    low, high = 0.0, 2.0**_TICK_BITS  # at which one byte costs more than any time
    for _ in range(_PRICE_STEPS):
        middle = (low + high) / 2
        if middle in (low, high):
            break  # no number lies between them
        cheapest = (choices.ticks + middle * choices.extra_bytes).argmin(axis=1)
        if choices.fits(cheapest):
            high = middle
        else:
            low = middle
    return high
