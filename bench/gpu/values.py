"""What sections find, as values: answers, times, and their form in a file."""

import dataclasses
import math
from collections.abc import Mapping
from enum import Enum

from mucudnn.profile import Measurement


@dataclasses.dataclass(frozen=True)
class Answer:
    """A question and what one line can say to it."""

    question: str
    text: str


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of one call.

    Attributes:
        median_us: the median of the samples.
        low_us: lower end of its 95 % interval; None with fewer than 6 samples.
        high_us: upper end of it.
        samples: how many samples there are.
        calls: how many calls each sample holds.
        converged: whether the interval became as narrow as was asked for.
        spans_ns: the samples, raw.
    """

    median_us: float
    low_us: float | None
    high_us: float | None
    samples: int
    calls: int
    converged: bool
    spans_ns: tuple[int, ...]

    @property
    def samples_s(self) -> list[float]:
        """Seconds of one call, one for each sample, in the order in which they were taken."""
        return [span * 1e-9 / self.calls for span in self.spans_ns]

    @classmethod
    def of(cls, measured: Measurement) -> "Timing":
        """Return the times of a measurement."""
        seen = measured.estimate
        return cls(
            median_us=seen.median * 1e6,
            low_us=_finite(seen.low * 1e6),
            high_us=_finite(seen.high * 1e6),
            samples=seen.samples,
            calls=measured.calls,
            converged=measured.converged,
            spans_ns=measured.spans_ns,
        )

    def __str__(self) -> str:
        return f"{duration(self.median_us)} [{_ends(self)}]" if self.low_us else duration(self.median_us)


def _ends(timing: Timing) -> str:
    return f"{duration(timing.low_us or 0.0)}, {duration(timing.high_us or 0.0)}"


def duration(microseconds: float) -> str:
    """Return a time for people to read: 12.3 µs, 1.23 ms, 4.56 s."""
    for unit, factor in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= factor:
            return f"{microseconds / factor:.3g} {unit}"
    return f"{microseconds:.3g} µs"


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def jsonable(value: object) -> object:
    """Return the value as JSON has it: records as objects, numbers that are none as texts.

    Raises:
        TypeError: a value of a type for which there is no rule.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: jsonable(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return jsonable(value.value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): jsonable(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [jsonable(each) for each in value]
    raise TypeError(f"A value must be a record, number, text, list or mapping, but got {type(value)}.")
