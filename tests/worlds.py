"""A machine whose time is scripted: its clock moves when a call runs, and only then."""

import random
from collections.abc import Callable, Iterator

Cost = Callable[[], float]
"""Nanoseconds of the next run of a call."""


class World:
    """A machine with a clock, noise, and a log of what ran.

    Attributes:
        now_ns: what the clock shows.
        ran: names of the calls that ran, in order.
    """

    def __init__(self, seed: int = 0) -> None:
        self.now_ns = 0
        self.ran: list[str] = []
        self._noise = random.Random(seed)

    def clock(self) -> int:
        return self.now_ns

    def call(self, name: str, cost: float | Cost) -> Callable[[], None]:
        """Return a call that takes `cost`: always the same nanoseconds, or what the function says."""

        def run() -> None:
            self.ran.append(name)
            self.now_ns += round(cost() if callable(cost) else cost)

        return run

    def noisy(self, ns: float, spread: float) -> Cost:
        """A normal distribution whose standard deviation is `spread` times its mean `ns`."""
        return lambda: ns * max(0.01, self._noise.gauss(1, spread))

    def spiky(self, ns: float) -> Cost:
        """Mostly `ns`, in one of ten cases twenty times as much."""
        return lambda: ns * (20 if self._noise.random() < 0.1 else 1)

    def two_modes(self, fast: float, slow: float) -> Cost:
        """Half of the time `fast`, the other half `slow`."""
        return lambda: fast if self._noise.random() < 0.5 else slow

    def drifting(self, ns: float, per_call: float) -> Cost:
        """A machine that slows by `per_call` of `ns` with every call, of whatever, that has run."""
        return lambda: ns * (1 + per_call * len(self.ran))


def scripted(*costs: float) -> Cost:
    """The given nanoseconds one after the other; the last ones for ever."""
    left: Iterator[float] = iter(costs)
    return lambda: next(left, costs[-1])
