"""The fastest division under a limit, by dynamic programming: reuse mode, the paper's WR.

The A algorithms are numbered from 1. t_a(s) is the time of a part of s samples by algorithm a, infinite
where no candidate fits the limit; a division pays setup_a once if a has a part in it.

    p_a(b) = min over sizes s <= b of  t_a(s) + r_a(b-s)    b samples, parts by 1 ... a and at least one
                                                            of them by a, whose set-up is left out
    f_a(b) = min{ f_{a-1}(b),  setup_a + p_a(b) }           b samples, parts by 1 ... a
    r_a(b) = min{ f_{a-1}(b),  p_a(b) }                     b samples, parts by 1 ... a, where the set-up
                                                            of a is already paid
    f_0(b) = infinite for b > 0,    f_a(0) = r_a(0) = 0,    the answer is f_A(b)

Source: Oyama et al. 2018, WR; the set-up is ours. p(b) needs r at smaller batches only, so numpy computes
it for all algorithms and sizes at once.

Of equally fast divisions the one with less workspace is best, of those one whose parts are all
deterministic, of those the one with fewer parts, of those the one whose parts, sorted by id and size, come
first. The values above are therefore pairs (time, tie), compared by time first. The recurrence is exact for
a tie that is the largest workspace, and for one that is the number of parts: parts with a worse tie never
make a better whole. It would not be exact for (workspace, parts): among equally fast groups of parts the one
with more workspace and fewer parts is the better one as soon as another part needs still more. Hence one
table finds, for every b, the least workspace of a fastest division, and a second table, limited to that
workspace, counts parts: of deterministic candidates alone or, if no division of these is as fast, of all.

A pair is one integer, time in ticks * 2**tie_bits + tie, so that the order of integers is the order of pairs.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple, TypeVar

import numpy as np

from mucudnn.division import Division
from mucudnn.errors import InfeasibleError
from mucudnn.profile import Candidate
from mucudnn.solvers.ticks import BoolArray, IntArray, TickScale

NEVER = 1 << 61
"""The pair of what does not exist. The sum of two is below 2**63; every other pair is below 2**61."""

_PAIR_BITS = 60

_MOST_COUNTS = 8
"""Tables of parts that a `Grid` keeps: each is as large as that of times."""

Value = TypeVar("Value", int, str)


def solve_reuse(candidates: Sequence[Candidate], batch: int, limit_bytes: int) -> Division:
    """Return the fastest division of `batch` samples whose every part fits `limit_bytes`.

    Of equally fast divisions it is the one with the least workspace, then one whose parts are all
    deterministic, then with the fewest parts, then the one whose parts, sorted by id and size, come first.
    The order of the candidates does not matter.

    Times are compared in ticks. With fewer than 2**19 samples, a tick is at most 2**-40 of the time that the
    slowest division might take. Each part's time and each set-up is rounded to whole ticks. Where all are
    whole ticks anyway, ties are exact; of divisions that differ by less than one tick for each part and
    set-up, any may count as the fastest.

    Raises:
        InfeasibleError: no division fits; the error holds the least limit for which one does.
        ValueError: `batch` or `limit_bytes` is negative, an algorithm has two set-up times, or times add up
            to infinity.
    """
    division = ReuseTable(candidates, batch, limit_bytes).division(batch)
    if division is None:
        raise InfeasibleError(limit_bytes, least_workspace_bytes(candidates, batch))
    return division


def best_of(candidates: Sequence[Candidate], batch: int) -> Division | None:
    """Return the division of `batch` samples that `solve_reuse` finds without a limit; None if there is none.

    Raises:
        ValueError: as of `solve_reuse`.
    """
    return ReuseTable(candidates, batch).division(batch)


def least_workspace_bytes(candidates: Sequence[Candidate], batch: int) -> int | None:
    """Return the least limit under which `batch` samples can be divided; None if no sizes add up to it.

    M(0) = 0,  M(b) = min over candidates of size s <= b of  max{ workspace, M(b-s) }.
    """
    smallest: dict[int, int] = {}
    for candidate in candidates:
        known = smallest.get(candidate.batch, candidate.workspace_bytes)
        smallest[candidate.batch] = min(known, candidate.workspace_bytes)
    least: list[int | None] = [0]
    for b in range(1, batch + 1):
        rests = ((workspace, least[b - size]) for size, workspace in smallest.items() if size <= b)
        wholes = (max(workspace, rest) for workspace, rest in rests if rest is not None)
        least.append(min(wholes, default=None))
    return least[batch]


class ReuseTable:
    """The fastest divisions of 0, 1, ... `batch` samples under one limit, from one set of candidates.

    One pass finds the times and workspaces of all; a division is put together when it is asked for, and what
    is counted for that serves other batches too.

    Attributes:
        batch: the largest number of samples that the table covers.

    Args:
        candidates: in any order.
        batch: the same.
        limit_bytes: for the workspace of each part, inclusive; None is no limit.

    Raises:
        ValueError: `batch` or `limit_bytes` is negative, an algorithm has two set-up times, or times add up
            to infinity.
    """

    def __init__(self, candidates: Sequence[Candidate], batch: int, limit_bytes: int | None = None) -> None:
        self.batch = batch
        self._grid = Grid(candidates, batch, limit_bytes)
        self._best = self._grid.best(self._grid.highest_level)

    def division(self, batch: int) -> Division | None:
        """Return the division of `batch` samples that `solve_reuse` finds; None where there is none.

        A tick is as long as the table's largest batch requires. So where divisions differ by less than one
        tick for each part, a table for `batch` alone may choose another one of them.

        Raises:
            ValueError: the table does not cover `batch`.
        """
        if not 0 <= batch <= self.batch:
            raise ValueError(f"batch must be from 0 to {self.batch}, but got {batch}.")
        best = self._best[batch]
        return None if best is None else self._grid.division(batch, best)


class Tie(Enum):
    """What decides between equal times."""

    WORKSPACE = "level of the largest workspace"
    PARTS = "number of parts"


class Counting(Enum):
    """Which candidates' parts are counted."""

    ALL = "all that run"
    STEADY = "deterministic ones alone"


class Best(NamedTuple):
    """Time and workspace of the best division of some batch."""

    ticks: int
    level: int


@dataclasses.dataclass(frozen=True)
class Table:
    """The recurrence, evaluated; its symbols are those of the module's docstring.

    Attributes:
        t: t_a(s) is in [row of s, a - 1]; shape (sizes, A).
        f: f_a(b) is in [b, a]; shape (batch + 1, A + 1).
        r: r_a(b) is in [b, a - 1]; shape (batch + 1, A).
        chosen: number of the candidate that each t belongs to, -1 for none; shape (sizes, A).
    """

    t: IntArray
    f: IntArray
    r: IntArray
    chosen: IntArray


class Grid:
    """Candidates as arrays, to evaluate the recurrence under every limit up to a given one.

    A limit is stated as a level, a place in the rising list of the candidates' distinct workspaces; at
    level -1 no candidate runs. Algorithms are numbered by falling ids: the last column of a table belongs
    to the id that comes first.

    Attributes:
        batch: the largest number of samples that is looked at.
        highest_level: the level at which all candidates run that fit the given limit; None is no limit.

    Raises:
        ValueError: `batch` or `limit_bytes` is negative, an algorithm has two set-up times, or times add up
            to infinity.
    """

    def __init__(self, candidates: Sequence[Candidate], batch: int, limit_bytes: int | None) -> None:
        if batch < 0:
            raise ValueError(f"batch must not be negative, but got {batch}.")
        self.batch = batch
        self._counts: dict[tuple[int, Counting], Table] = {}
        setups_s = _setups_s(candidates)
        fitting = _fitting(candidates, batch, limit_bytes)
        ids, numbers = _numbered([candidate.algorithm for candidate in fitting])
        sizes, rows = _numbered([candidate.batch for candidate in fitting])
        workspaces, levels = _numbered([candidate.workspace_bytes for candidate in fitting])
        self.highest_level = len(workspaces) - 1
        self._tie_bits = max(len(workspaces), batch).bit_length()
        longest_s = _longest_s(fitting, {name: setups_s[name] for name in ids}, batch)
        scale = TickScale.for_sums_up_to(longest_s, _PAIR_BITS - self._tie_bits)
        self._setups = scale.ticks([setups_s[name] for name in reversed(ids)]) << self._tie_bits
        self._sizes = np.array(sizes, dtype=np.int64)
        times_s = [candidate.time_s for candidate in fitting]
        ticks = scale.ticks(times_s)
        is_deterministic = np.array([candidate.is_deterministic for candidate in fitting], dtype=bool)
        # Of several candidates of one algorithm and size the best comes last: it overwrites the others.
        order = np.lexsort((is_deterministic, np.array(times_s), levels, ticks))[::-1]
        self._candidates = [fitting[number] for number in order]
        self._is_deterministic = is_deterministic[order]
        self._rows, self._columns = rows[order], len(ids) - 1 - numbers[order]
        self._ticks, self._levels = ticks[order], levels[order]

    def best(self, level: int) -> list[Best | None]:
        """Return time and workspace of the best division of 0, 1, ... `batch` samples, None for none."""
        pairs = self._table(self._levels <= level, Tie.WORKSPACE).f[:, -1].tolist()
        mask = (1 << self._tie_bits) - 1
        return [Best(pair >> self._tie_bits, pair & mask) if pair < NEVER else None for pair in pairs]

    def division(self, batch: int, best: Best) -> Division:
        """Return the best division of `batch` samples, whose time and workspace are `best`.

        Whichever part comes first by id and size in any of the best divisions is taken, and the samples
        that are left are divided likewise.
        """
        table = self._chosen(batch, best)
        parts: list[Candidate] = []
        left = batch
        goals = table.f[left, 1:] - self._setups
        while (found := self._first_part(table, left, goals)) is not None:
            row, a = found
            parts.append(self._candidates[table.chosen[row, a]])
            left -= parts[-1].batch
            goals = table.f[left, 1 : a + 2] - self._setups[: a + 1]
            goals[a] = table.r[left, a]  # its set-up is paid
        return Division.of(parts)

    def _chosen(self, batch: int, best: Best) -> Table:
        """Return the table that counts parts, of deterministic candidates alone if they are as fast."""
        if not self._is_deterministic[self._levels <= best.level].all():
            table = self._counted(best.level, Counting.STEADY)
            if table.f[batch, -1] >> self._tie_bits == best.ticks:
                return table
        return self._counted(best.level, Counting.ALL)

    def _counted(self, level: int, which: Counting) -> Table:
        """Return the table that counts parts: it is made once for all batches that need the same."""
        found = self._counts.get((level, which))
        if found is None:
            fits = self._levels <= level
            admitted = fits & self._is_deterministic if which is Counting.STEADY else fits
            found = self._table(admitted, Tie.PARTS)
            if len(self._counts) >= _MOST_COUNTS:
                self._counts.clear()
            self._counts[level, which] = found
        return found

    def _first_part(self, table: Table, left: int, goals: IntArray) -> tuple[int, int] | None:
        """Return row and column of the next part, by id and then by size; None once no samples are left.

        A part by a leads to a best division if p_a is its goal: f_a less the set-up or, once that is paid,
        r_a. If several do, the last column has the first id, and its first row the smallest size.
        """
        rows = np.searchsorted(self._sizes, left, side="right")
        p = table.t[:rows, : len(goals)] + table.r[left - self._sizes[:rows], : len(goals)]
        matches = p == goals
        columns = np.flatnonzero(matches.any(axis=0))
        return (int(matches[:, columns[-1]].argmax()), int(columns[-1])) if columns.size else None

    def _table(self, admitted: BoolArray, tie: Tie) -> Table:
        """Evaluate the recurrence for the `admitted` candidates, batch by batch."""
        t, chosen = self._parts(admitted, tie)
        f = np.full((self.batch + 1, len(self._setups) + 1), NEVER)
        r = np.full((self.batch + 1, len(self._setups)), NEVER)
        f[0] = r[0] = 0
        rows = np.searchsorted(self._sizes, np.arange(self.batch + 1), side="right")
        mask = (1 << self._tie_bits) - 1
        levels = t & mask
        first = int(self._sizes[0]) if len(self._sizes) else self.batch + 1  # fewer samples are never divided
        for b, count in enumerate(rows.tolist()[first:], start=first):
            rest = r[b - self._sizes[:count]]
            pairs = t[:count] + rest
            if tie is Tie.WORKSPACE:  # which do not add up, as parts do: max(a, b) = a + b - min(a, b)
                rest &= mask
                pairs -= np.minimum(levels[:count], rest, out=rest)
            p = np.minimum.reduce(pairs, axis=0, initial=NEVER)
            np.add(self._setups, p, out=f[b, 1:])
            np.minimum.accumulate(f[b], out=f[b])
            np.minimum(p, f[b, :-1], out=r[b])
        return Table(t, f, r, chosen)

    def _parts(self, admitted: BoolArray, tie: Tie) -> tuple[IntArray, IntArray]:
        """Return t of the `admitted` candidates, and which of them each t belongs to."""
        numbers = np.flatnonzero(admitted)
        cells = self._rows[numbers], self._columns[numbers]
        t = np.full((len(self._sizes), len(self._setups)), NEVER)
        ties = self._levels[numbers] if tie is Tie.WORKSPACE else 1
        t[cells] = (self._ticks[numbers] << self._tie_bits) + ties
        chosen = np.full(t.shape, -1)
        chosen[cells] = numbers
        return t, chosen


def _fitting(candidates: Sequence[Candidate], batch: int, limit_bytes: int | None) -> list[Candidate]:
    if limit_bytes is not None and limit_bytes < 0:
        raise ValueError(f"limit_bytes must not be negative, but got {limit_bytes}.")
    return [
        candidate
        for candidate in candidates
        if candidate.batch <= batch and (limit_bytes is None or candidate.workspace_bytes <= limit_bytes)
    ]


def _setups_s(candidates: Sequence[Candidate]) -> dict[str, float]:
    """Return the set-up time of each algorithm in seconds.

    Raises:
        ValueError: an algorithm has two.
    """
    setups_s: dict[str, float] = {}
    for candidate in candidates:
        known = setups_s.setdefault(candidate.algorithm, candidate.setup_s)
        if known != candidate.setup_s:
            raise ValueError(
                f"An algorithm must have one set-up time, but {candidate.algorithm!r} got {known} s "
                f"and {candidate.setup_s} s."
            )
    return setups_s


def _longest_s(candidates: Sequence[Candidate], setups_s: Mapping[str, float], batch: int) -> float:
    """Return an upper bound, in seconds, for the time of every division of at most `batch` samples."""
    slowest = max((candidate.time_s / candidate.batch for candidate in candidates), default=0.0)
    return slowest * batch + sum(setups_s.values())


def _numbered(values: Sequence[Value]) -> tuple[list[Value], IntArray]:
    """Return the distinct values, rising, and the place of each value among them."""
    distinct = sorted(set(values))
    places = {value: place for place, value in enumerate(distinct)}
    return distinct, np.array([places[value] for value in values], dtype=np.int64)
