"""What was found of layers on a card as pairs of times, and what these come to together."""

import dataclasses
import math
from collections.abc import Sequence

from bench.cpu.choice import HIDDEN_BYTES
from bench.cpu.lines import BENCHMARK, Choice, Measured
from bench.cpu.means import Pair, geometric_mean, total
from bench.gpu.layer_kinds import UNDIVIDED
from mucudnn.intervals import TOLERANCE, Estimate, Verdict, compare, compare_intervals, estimate, ratio


@dataclasses.dataclass(frozen=True)
class Unpaired:
    """Seconds of a base and of what runs from rounds of different times, of which nothing is a pair."""

    own: Sequence[float]
    chosen: Sequence[float]

    @property
    def quotient(self) -> Estimate:
        """Base over what runs, from the ends of both intervals."""
        base, other = estimate(self.own), estimate(self.chosen)
        samples = min(base.samples, other.samples)
        return Estimate(base.median / other.median, base.low / other.high, base.high / other.low, samples)

    def verdict(self, tolerance: float = TOLERANCE) -> Verdict:
        """Return whether what runs is faster, from the intervals."""
        return compare_intervals(estimate(self.own), estimate(self.chosen), tolerance)


@dataclasses.dataclass(frozen=True)
class Compared:
    """One case under one limit: what runs strictly within it, beside three bases.

    Attributes:
        line: of the case.
        own: PyTorch's own as it comes, in whatever memory.
        benchmark: the same with `torch.backends.cudnn.benchmark`; not paired where PyTorch's own as it comes
            is what runs.
        undivided: the best undivided algorithm within the same limit.
    """

    line: Measured
    own: Pair
    benchmark: Pair | Unpaired
    undivided: Pair


@dataclasses.dataclass(frozen=True)
class Gain:
    """How several cases compare with one base.

    Attributes:
        cases: how many there are in pairs, of which all means are made.
        unpaired: how many more there are that are judged by their intervals alone.
        sums: the quotient of the sums of medians, base over what runs; None without pairs.
        geometric: the geometric mean of the cases' quotients; None without pairs.
        largest: the largest quotient of cases that are FASTER; None if none is.
        where: the case that has it; empty if none does.
        faster: in how many the base is beaten, beyond the tolerance and the interval, paired or not.
        slower: in how many it is not reached, likewise.
    """

    cases: int
    unpaired: int
    sums: Estimate | None
    geometric: Estimate | None
    largest: Estimate | None
    where: str
    faster: int
    slower: int

    @classmethod
    def of(cls, lines: Sequence[Measured], both: Sequence[Pair | Unpaired]) -> "Gain":
        """Return that of some cases; the pairs have the base first."""
        pairs = [each for each in both if isinstance(each, Pair)]
        verdicts = [
            compare(each.own, each.chosen) if isinstance(each, Pair) else each.verdict() for each in both
        ]
        quotients = [
            (ratio(each.chosen, each.own), str(line.case))
            for line, each, verdict in zip(lines, both, verdicts, strict=True)
            if isinstance(each, Pair) and verdict is Verdict.FASTER
        ]
        largest, where = max(quotients, key=lambda each: each[0].median, default=(None, ""))
        return cls(
            cases=len(pairs),
            unpaired=len(both) - len(pairs),
            sums=total(pairs) if pairs else None,
            geometric=geometric_mean([[each] for each in pairs]) if pairs else None,
            largest=largest,
            where=where,
            faster=verdicts.count(Verdict.FASTER),
            slower=verdicts.count(Verdict.SLOWER),
        )


def compared(line: Measured, limit_bytes: int) -> Compared | None:
    """Return a case under a limit beside all bases; None where one is missing, or nothing fits.

    What is PyTorch's own as it comes was not timed beside `benchmark`: one thread finds one plan. Its time
    then is that of the proving rounds, which are no pairs of those.
    """
    choice = line.choice(limit_bytes)
    if choice is None or choice.strict_key is None:
        return None
    undivided, benchmark = choice.of_family(UNDIVIDED), against_benchmark(line, choice)
    if undivided is None or benchmark is None:
        return None
    proving, chosen = line.proving, line.proving.samples_s(choice.strict_key)
    return Compared(
        line=line,
        own=Pair(proving.samples_s(line.own), chosen),
        benchmark=benchmark,
        undivided=Pair(proving.samples_s(undivided), chosen),
    )


def against_benchmark(line: Measured, choice: Choice) -> Pair | Unpaired | None:
    """Return what runs strictly beside PyTorch's own with `cudnn.benchmark`; None where either is missing."""
    if choice.strict_key is None or line.benchmark is None:
        return None
    own = line.benchmark.samples_s(BENCHMARK)
    if choice.strict_key in line.benchmark.spans_ns:
        return Pair(own, line.benchmark.samples_s(choice.strict_key))
    return Unpaired(own, line.proving.samples_s(choice.strict_key))


def quotient(each: Pair | Unpaired) -> Estimate:
    """Return the base's time over that of what runs, with its interval."""
    return each.quotient if isinstance(each, Unpaired) else ratio(each.chosen, each.own)


def of_family(line: Measured, choice: Choice, name: str) -> Pair | None:
    """Return the best of a family as the base of what runs strictly; None where either is missing."""
    key = choice.of_family(name)
    if key is None or choice.strict_key is None:
        return None
    return Pair(line.proving.samples_s(key), line.proving.samples_s(choice.strict_key))


def hides_much(line: Measured) -> bool:
    """Whether PyTorch's own takes so much that a part of it was one more limit."""
    return line.own_bytes > HIDDEN_BYTES


def workspace_saving(line: Measured) -> float:
    """Return how many times less than PyTorch's own is taken in no more than 2 % more time.

    It is that under the least limit where what runs strictly takes no longer, with the whole interval; 1
    where there is none, and infinity where nothing at all is taken.
    """
    own_s = line.proving.samples_s(line.own)
    for choice in sorted(line.choices, key=lambda each: each.limit_bytes):
        if choice.strict_key is None:
            continue
        if ratio(own_s, line.proving.samples_s(choice.strict_key)).high <= 1 + TOLERANCE:
            taken = line.bytes_of(choice.strict_key)
            return line.own_bytes / taken if taken else math.inf
    return 1.0
