"""What was found of layers on a card as pairs of times, and what these come to together."""

import dataclasses
import statistics
from collections.abc import Sequence

from bench.cpu.choice import HIDDEN_BYTES
from bench.cpu.lines import BENCHMARK, Choice, Measured
from bench.cpu.means import Pair, total
from bench.gpu.layer_kinds import UNDIVIDED
from mucudnn.intervals import TOLERANCE, Estimate, Verdict, compare, estimate, ratio


@dataclasses.dataclass(frozen=True)
class Compared:
    """One case under one limit: what runs strictly within it, beside three bases.

    Attributes:
        line: of the case.
        own: PyTorch's own as it comes, in whatever memory.
        benchmark: the same with `torch.backends.cudnn.benchmark`.
        undivided: the best undivided algorithm within the same limit.
    """

    line: Measured
    own: Pair
    benchmark: Pair
    undivided: Pair


@dataclasses.dataclass(frozen=True)
class Gain:
    """How several cases compare with one base.

    Attributes:
        cases: how many there are.
        sums: the quotient of the sums of medians, base over what runs.
        geometric: the geometric mean of the cases' quotients.
        largest: the largest of these.
        where: the case that has it.
        faster: in how many the base is beaten, beyond the tolerance and the interval.
        slower: in how many it is not reached, likewise.
    """

    cases: int
    sums: Estimate
    geometric: float
    largest: Estimate
    where: str
    faster: int
    slower: int

    @classmethod
    def of(cls, lines: Sequence[Measured], pairs: Sequence[Pair]) -> "Gain":
        """Return that of at least one case; the pairs have the base first."""
        quotients = [ratio(each.chosen, each.own) for each in pairs]
        largest, where = max(
            ((seen, str(line.case)) for seen, line in zip(quotients, lines, strict=True)),
            key=lambda each: each[0].median,
        )
        verdicts = [compare(each.own, each.chosen) for each in pairs]
        return cls(
            cases=len(pairs),
            sums=total(pairs),
            geometric=statistics.geometric_mean(each.median for each in quotients),
            largest=largest,
            where=where,
            faster=verdicts.count(Verdict.FASTER),
            slower=verdicts.count(Verdict.SLOWER),
        )


def compared(line: Measured, limit_bytes: int) -> Compared | None:
    """Return a case under a limit beside all bases; None where one is missing, or nothing fits.

    What is PyTorch's own as it comes was not timed beside `benchmark`: one thread finds one plan. Its time
    then is that of the proving rounds.
    """
    choice = line.choice(limit_bytes)
    if choice is None or choice.strict_key is None or line.benchmark is None:
        return None
    undivided = choice.of_family(UNDIVIDED)
    if undivided is None:
        return None
    proving, chosen = line.proving, line.proving.samples_s(choice.strict_key)
    has_both = choice.strict_key in line.benchmark.spans_ns
    beside = line.benchmark.samples_s(choice.strict_key) if has_both else chosen
    return Compared(
        line=line,
        own=Pair(proving.samples_s(line.own), chosen),
        benchmark=_as_many(line.benchmark.samples_s(BENCHMARK), beside),
        undivided=Pair(proving.samples_s(undivided), chosen),
    )


def _as_many(own: Sequence[float], chosen: Sequence[float]) -> Pair:
    """Return as many samples of both; they differ in number only if they are of different rounds."""
    rounds = min(len(own), len(chosen))
    return Pair(own[:rounds], chosen[:rounds])


def sum_of_medians_s(samples: Sequence[Sequence[float]]) -> float:
    """Return seconds."""
    return sum(estimate(each).median for each in samples)


def of_family(line: Measured, choice: Choice, name: str) -> Pair | None:
    """Return the best of a family as the base of what runs strictly; None where either is missing."""
    key = choice.of_family(name)
    if key is None or choice.strict_key is None:
        return None
    return Pair(line.proving.samples_s(key), line.proving.samples_s(choice.strict_key))


def hides_much(line: Measured) -> bool:
    """Whether PyTorch's own takes so much that a part of it was one more limit."""
    return line.own_bytes > HIDDEN_BYTES


def saving(line: Measured) -> float:
    """Return how many times less than PyTorch's own is taken in no more than 2 % more time.

    It is that under the least limit where what runs strictly takes no longer; 1 where there is none.
    """
    own_s = line.proving.samples_s(line.own)
    for choice in sorted(line.choices, key=lambda each: each.limit_bytes):
        if choice.strict_key is None:
            continue
        if ratio(own_s, line.proving.samples_s(choice.strict_key)).median <= 1 + TOLERANCE:
            return line.own_bytes / max(line.bytes_of(choice.strict_key), 1)
    return 1.0
