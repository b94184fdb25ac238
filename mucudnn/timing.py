"""Times calls until they are known well enough; the clock is an argument.

Whatever competes is timed in rounds, each call once a round and in an order drawn anew, so that a drift of
the machine meets all alike: never all of A, then all of B. Sampling stops at fixed looks, where intervals
are narrow or a verdict is reached. Source: Hoefler and Belli, SC15, rules 5 to 7 and 9.

What ran before a span may last beyond its end, as threads that wait for more to do and take processors
from whatever runs next. Left alone, each call would be timed after whichever was drawn before it; a call
`before` every span, outside of it, has all of them timed after the same thing.
"""

import dataclasses
import itertools
import math
import random
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TypeVar

from mucudnn.intervals import CONFIDENCE, Estimate, Verdict, compare, estimate, ratio
from mucudnn.profile import Measurement

Clock = Callable[[], int]
"""Nanoseconds since some moment; on a device that runs behind the host, it waits for the device first."""

Key = TypeVar("Key", bound=Hashable)

HOPELESS = {1: 8.0, 3: 2.0}
"""When an entrant leaves the race long before there is any interval: after so many rounds, if its fastest
sample is this many times as long as a rival's slowest one."""

_HOPELESS_THOUGH_SMALL = 8.0
"""An entrant that needs less workspace than the rival only leaves if it is slower by this factor besides."""

_EARLY_CONFIDENCE = 0.99
"""Of the interval by which a verdict is reached at a look that is not the last.

Whoever may stop at each of several looks errs more often than at one: five looks by 95 % each missed the
true quotient in up to 9 % of thousands of simulated comparisons.
"""

_MOST_CALLS = 2**16
"""The most calls in a span: with a clock that stands still no span would ever be long enough."""

_MOST_MORE_CALLS = 64
"""After a span that was too short, the next one has at most this many times as many calls."""


_MOST_SPANS_AT_ONCE = 8
"""Rivals run equally many calls in a span, as many as the shortest needs; a long one at most this many times
as many as would fill its own span."""


@dataclasses.dataclass(frozen=True)
class SamplingRule:
    """When sampling looks at its samples, and what satisfies it.

    Attributes:
        looks: numbers of samples, rising, after which to look; the last one ends sampling in any case.
            With fewer than 6 samples no interval exists, so such a look ends nothing.
        precision: half-width of the 95 % interval of the median, relative to the median, that suffices.
        min_span_ns: least nanoseconds of a timed span; shorter calls are repeated within it.
        warmups: spans that are run and forgotten after the first run, at least 1.

    Raises:
        ValueError: looks that do not rise from at least 1, or a precision, span or number out of range.
    """

    looks: tuple[int, ...]
    precision: float
    min_span_ns: int = 50_000
    warmups: int = 2

    def __post_init__(self) -> None:
        if not self.looks or any(look <= last for last, look in itertools.pairwise((0, *self.looks))):
            raise ValueError(f"looks must rise from at least 1, but got {self.looks}.")
        if not self.precision > 0:
            raise ValueError(f"precision must be above 0, but got {self.precision}.")
        if self.min_span_ns < 0:
            raise ValueError(f"min_span_ns must not be negative, but got {self.min_span_ns}.")
        if self.warmups < 1:
            raise ValueError(f"warmups must be at least 1, but got {self.warmups}.")


PROFILING = SamplingRule(looks=(6, 10, 15), precision=0.02)
"""For candidates: many of them, and whatever they win is confirmed as a finished division."""

CONFIRMING = SamplingRule(looks=(10, 15, 20, 30, 45), precision=0.01)
"""For finished divisions: few of them, and this decides."""


def nothing() -> None:
    """Do nothing."""


@dataclasses.dataclass(frozen=True)
class Entrant:
    """What takes part in a race.

    Attributes:
        call: what is timed.
        rivals: entrants with an equal value here do the same work, so that one can make another needless.
        workspace_bytes: bytes that the call needs; only a rival with no more can make it needless.
        ready: runs before warming up and before every sample, and is not in its time. It makes anew what the
            call takes for granted, and other entrants may have overwritten.
    """

    call: Callable[[], None]
    rivals: Hashable
    workspace_bytes: int
    ready: Callable[[], None] = nothing


@dataclasses.dataclass(frozen=True)
class _Stopwatch:
    """Times spans, each after the same thing."""

    clock: Clock
    before: Callable[[], None]

    def span_ns(self, call: Callable[[], None], calls: int, ready: Callable[[], None] = nothing) -> int:
        """Return the nanoseconds of `calls` calls; at least 1, so that ratios exist."""
        ready()
        self.before()
        start = self.clock()
        for _ in range(calls):
            call()
        return max(self.clock() - start, 1)


@dataclasses.dataclass
class _Timed:
    """An entrant on its way, with the samples that it has so far."""

    entrant: Entrant
    calls: int
    warm_ns: float = math.inf
    spans_ns: list[int] = dataclasses.field(default_factory=list)
    is_dropped: bool = False

    @property
    def samples_ns(self) -> list[float]:
        return [span / self.calls for span in self.spans_ns]

    def measurement(self, converged: bool) -> Measurement:
        return Measurement(tuple(self.spans_ns), self.calls, converged)


def race(
    entrants: Mapping[Key, Entrant],
    rule: SamplingRule = PROFILING,
    clock: Clock = time.perf_counter_ns,
    seed: int = 0,
    before: Callable[[], None] = nothing,
) -> dict[Key, Measurement]:
    """Return the times of all entrants, with few samples of those that cannot win.

    Every entrant is warmed up, then timed once a round while it is in the race. It leaves

    * after 1 round, if it is more than 8 times as slow as a rival with no more workspace, and after 3 rounds
      if more than twice: its fastest span, warm-up counted in, against the slowest sample of the rival. Such
      entrants may take seconds a call;
    * likewise if it is more than 64 and 16 times as slow as a rival with more workspace: it runs only where
      nothing else fits, and its time need not be known well;
    * at a look, if its interval lies above that of a rival with no more workspace;
    * at a look, together with all its rivals still in the race, if the intervals of all of them are within
      the precision. Rivals stay together so that sample i of each comes from round i.

    Any other slow entrant with less workspace than its rivals stays: it belongs to the front. Whoever is
    dropped keeps its samples. `converged` is true of those that were not dropped and whose last interval is
    within the precision.

    Args:
        entrants: by any key; the answer has the same keys in the same order.
        rule: when to look, and what suffices.
        clock: nanoseconds.
        seed: of the order within each round.
        before: runs before every span, warm-up too, and is not in its time.

    Raises:
        Exception: whatever an entrant or `before` raises, unchanged; the samples of the others are lost.
    """
    order = random.Random(seed)
    stopwatch = _Stopwatch(clock, before)
    timed = {key: _warmed_up(entrant, rule, stopwatch) for key, entrant in entrants.items()}
    racing = _by_rivals(timed.values())
    for rounds in range(1, rule.looks[-1] + 1):
        _time_once(itertools.chain.from_iterable(racing), order, stopwatch)
        if rounds in HOPELESS:
            racing = [_without_hopeless(group, HOPELESS[rounds]) for group in racing]
        if rounds in rule.looks:
            racing = [_without_beaten(group) for group in racing]
            racing = [group for group in racing if not all(_is_narrow(one, rule) for one in group)]
        if not racing:
            break
    return {
        key: each.measurement(converged=not each.is_dropped and _is_narrow(each, rule))
        for key, each in timed.items()
    }


def compare_runs(
    calls: Mapping[str, Callable[[], None]],
    rule: SamplingRule = CONFIRMING,
    clock: Clock = time.perf_counter_ns,
    before: Callable[[], None] = nothing,
) -> dict[str, Measurement]:
    """Return the times of finished divisions: sample i of every call comes from round i, none is dropped.

    The first call is the base. A pair of another call with it is settled when the interval of the ratio of
    their times is within the precision, or when its verdict is other than AMBIGUOUS; before the last look, by
    the interval of 99 %, as looks add up their errors. Sampling stops at the first look at which all pairs
    are settled. `converged` of a call says whether its pair is settled in the end; that of the base, whether
    all are.

    Args:
        calls: by name, the base first; each span holds the same number of calls for all: as many as fill a
            span of the shortest, unless that were more than eight spans of the longest.
        rule: when to look, and what suffices.
        clock: nanoseconds.
        before: runs before every span, warm-up too, and is not in its time.

    Raises:
        Exception: whatever a call or `before` raises, unchanged.
    """
    if not calls:
        return {}
    order = random.Random(0)
    stopwatch = _Stopwatch(clock, before)
    fills = [_calls_per_span(call, rule, stopwatch)[0] for call in calls.values()]
    repeats = min(max(fills), _MOST_SPANS_AT_ONCE * min(fills))
    timed = {name: _Timed(Entrant(call, None, 0), repeats) for name, call in calls.items()}
    base, *others = timed.values()
    for rounds in range(1, rule.looks[-1] + 1):
        _time_once(timed.values(), order, stopwatch)
        confidence = CONFIDENCE if rounds == rule.looks[-1] else _EARLY_CONFIDENCE
        if rounds in rule.looks and all(_is_settled(base, other, rule, confidence) for other in others):
            break
    settled = [_is_settled(base, other, rule, CONFIDENCE) for other in others]
    flags = zip(timed.items(), [all(settled), *settled], strict=True)
    return {name: each.measurement(is_settled) for (name, each), is_settled in flags}


def _warmed_up(entrant: Entrant, rule: SamplingRule, stopwatch: _Stopwatch) -> _Timed:
    entrant.ready()
    calls, span_ns = _calls_per_span(entrant.call, rule, stopwatch)
    return _Timed(entrant, calls, span_ns / calls)


def _calls_per_span(call: Callable[[], None], rule: SamplingRule, stopwatch: _Stopwatch) -> tuple[int, int]:
    """Warm `call` up; return the least power of two of calls that fills a span, and the fastest such span.

    The first run, which may build or load what it needs, is no span. The fastest of the spans decides, so
    that one disturbance does not make all later spans too short. From a span that is too short follows how
    many calls would do if all of it were calls. Waiting for a device is in it too, so they may not yet do;
    and a coarse clock may see nothing of it, so at most 64 times as many are next.
    """
    call()
    calls = 1
    while True:
        fastest_ns = min(stopwatch.span_ns(call, calls) for _ in range(rule.warmups))
        if fastest_ns >= rule.min_span_ns or calls >= _MOST_CALLS:
            return calls, fastest_ns
        lacking = min(math.ceil(rule.min_span_ns / fastest_ns), _MOST_MORE_CALLS)  # at least 2
        calls = min(calls * 2 ** (lacking - 1).bit_length(), _MOST_CALLS)


def _time_once(every: Iterable[_Timed], order: random.Random, stopwatch: _Stopwatch) -> None:
    """Time each once, in an order drawn from `order`."""
    drawn = list(every)
    order.shuffle(drawn)
    for each in drawn:
        each.spans_ns.append(stopwatch.span_ns(each.entrant.call, each.calls, each.entrant.ready))


def _by_rivals(every: Iterable[_Timed]) -> list[list[_Timed]]:
    groups: dict[Hashable, list[_Timed]] = {}
    for each in every:
        groups.setdefault(each.entrant.rivals, []).append(each)
    return list(groups.values())


def _without_hopeless(group: list[_Timed], factor: float) -> list[_Timed]:
    """Drop from `group` whose fastest span is `factor` times above all samples of a rival, or farther."""
    fastest = [min(each.warm_ns, *each.samples_ns) for each in group]
    slowest = [factor * max(each.samples_ns) for each in group]
    return _without_higher(group, fastest, slowest, _HOPELESS_THOUGH_SMALL)


def _without_beaten(group: list[_Timed]) -> list[_Timed]:
    """Drop from `group` whose interval lies above that of a rival with no more workspace."""
    intervals = [_interval(each) for each in group]
    return _without_higher(group, [one.low for one in intervals], [one.high for one in intervals])


def _without_higher(
    group: list[_Timed], lows: list[float], highs: list[float], though_small: float = math.inf
) -> list[_Timed]:
    """Drop from `group` whose low lies above the high of a rival with no more workspace.

    Of a rival with more workspace, `though_small` times its high counts. All are judged before any is
    dropped. The lowest high always stays.
    """
    bars = [(rival.entrant.workspace_bytes, high) for rival, high in zip(group, highs, strict=True)]
    for each, low in zip(group, lows, strict=True):
        each.is_dropped = any(
            high * (1 if n_bytes <= each.entrant.workspace_bytes else though_small) < low
            for n_bytes, high in bars
        )
    return [each for each in group if not each.is_dropped]


def _interval(timed: _Timed) -> Estimate:
    return estimate(timed.samples_ns)


def _is_narrow(timed: _Timed, rule: SamplingRule) -> bool:
    return _interval(timed).relative_half_width <= rule.precision


def _is_settled(base: _Timed, other: _Timed, rule: SamplingRule, confidence: float) -> bool:
    times = base.samples_ns, other.samples_ns
    is_precise = ratio(*times, confidence).relative_half_width <= rule.precision
    return is_precise or compare(*times, confidence=confidence) is not Verdict.AMBIGUOUS
