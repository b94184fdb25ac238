"""Which finished divisions of a case compete, and which of them runs under a limit: pure arithmetic."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from bench.cpu.lines import Choice
from mucudnn.division import Division
from mucudnn.evidence import fits_as_seen
from mucudnn.intervals import Verdict, compare, median
from mucudnn.profile import Candidate
from mucudnn.solvers import least_workspace_bytes, solve_reuse

HIDDEN_BYTES = 40 * 2**20
"""What PyTorch's own takes above which a part of it, such as an eighth, is one more limit."""

EIGHTH = 8


@dataclasses.dataclass(frozen=True)
class Family:
    """Divisions of one kind, the best of which competes under every limit.

    Attributes:
        name: of the kind.
        has: whether a candidate may be part of such a division of a mini-batch of so many samples.
        is_base: whether others are compared with the best one, so that it competes however slow it is.
    """

    name: str
    has: Callable[[Candidate, int], bool]
    is_base: bool = False

    def __contains__(self, division: Division) -> bool:
        return all(self.has(part, division.batch) for part in division.parts)


@dataclasses.dataclass(frozen=True)
class Contest:
    """The divisions of one case that compete.

    Attributes:
        own: PyTorch's own convolution, undivided, with what it takes.
        rivals: all others, by key.
        undivided: key of the best undivided candidate within the largest limit; None if there is none.
        limits: in bytes.
        families: kinds of divisions of which the fastest is told as well.
    """

    own: Division
    rivals: Mapping[str, Division]
    undivided: str | None
    limits: tuple[int, ...]
    families: tuple[Family, ...] = ()

    def choose(
        self, samples_s: Mapping[str, Sequence[float]], seen_bytes: Mapping[str, int]
    ) -> tuple[Choice, ...]:
        """Return what runs under each limit.

        It is the division with the least median of those that fit and are FASTER than PyTorch's own, which
        else stays where it may run. Fresh rounds have to prove it: the least of several is too low.

        Args:
            samples_s: seconds of all divisions, from the same rounds.
            seen_bytes: what rivals were seen to take; one that took more than the limit does not fit.
        """
        return tuple(self._choice(limit, samples_s, seen_bytes) for limit in self.limits)

    def _choice(
        self, limit_bytes: int, samples_s: Mapping[str, Sequence[float]], seen_bytes: Mapping[str, int]
    ) -> Choice:
        fitting = [
            rival
            for key, rival in self.rivals.items()
            if rival.workspace_bytes <= limit_bytes and fits_as_seen(seen_bytes.get(key, 0), limit_bytes)
        ]
        own_s = samples_s[self.own.key]
        faster = [rival for rival in fitting if compare(own_s, samples_s[rival.key]) is Verdict.FASTER]
        best, only = _quickest(faster, samples_s), _quickest(fitting, samples_s)
        key = self.own.key if best is None else best.key
        has_own = self.own.workspace_bytes <= limit_bytes
        of_families = self._best_of_families([*fitting, *([self.own] * has_own)], samples_s)
        if best is not None or has_own:
            return Choice(limit_bytes, key, key, of_families)
        return Choice(limit_bytes, key, None if only is None else only.key, of_families)

    def _best_of_families(
        self, fitting: Sequence[Division], samples_s: Mapping[str, Sequence[float]]
    ) -> dict[str, str] | None:
        """Return the key of the quickest of each family; None if there are no families."""
        if not self.families:
            return None
        found = {
            family.name: _quickest([each for each in fitting if each in family], samples_s)
            for family in self.families
        }
        return {name: division.key for name, division in found.items() if division is not None}


def _quickest(divisions: Sequence[Division], samples_s: Mapping[str, Sequence[float]]) -> Division | None:
    return min(
        divisions, key=lambda one: (median(samples_s[one.key]), one.workspace_bytes, one.key), default=None
    )


def limits_of(limits: Sequence[int], own_bytes: int, divisor: int = EIGHTH) -> tuple[int, ...]:
    """Return the limits asked for, and what PyTorch's own takes over `divisor` where that is much."""
    if own_bytes <= HIDDEN_BYTES:
        return tuple(limits)
    return tuple(sorted({*limits, min(own_bytes // divisor, max(limits))}))


def contest(
    candidates: Sequence[Candidate],
    own: Division,
    limits: Sequence[int],
    families: Sequence[Family] = (),
    hopeless: float = math.inf,
) -> Contest:
    """Return the divisions that compete in a case.

    Under each limit the best division, the best one without PyTorch's own, and the best one of each family;
    under the largest one also the best undivided candidate; where there are families, under each the two
    quickest undivided ones but PyTorch's own. The second is there because profiles are short
    and noisy: what was measured slow by chance gets a second chance.

    Args:
        candidates: within the largest limit.
        own: PyTorch's own convolution, undivided, whatever it takes.
        limits: in bytes.
        families: kinds of divisions.
        hopeless: what is predicted to take so many times as long as a rival under every limit that it fits
            does not compete, unless it is the best of a base's family.
    """
    others = [each for each in candidates if each.algorithm != own.parts[0].algorithm]
    wholes = [each for each in candidates if each.batch == own.batch]
    undivided = _best(wholes, own.batch, max(limits))
    kinds = [[each for each in candidates if family.has(each, own.batch)] for family in families]
    pools = (others, candidates, *kinds)
    found = [undivided, *(_best(pool, own.batch, limit) for limit in limits for pool in pools)]
    if families:
        found += [Division((each,)) for limit in limits for each in _quickest_two(wholes, own, limit)]
    bases = [kind for kind, family in zip(kinds, families, strict=True) if family.is_base]
    kept = [undivided, *(_best(base, own.batch, limit) for limit in limits for base in bases)]
    rivals = {each.key: each for each in found if each is not None and each.key != own.key}
    lasting = _not_hopeless(rivals, limits, hopeless) | {each.key for each in kept if each is not None}
    competing = {key: each for key, each in rivals.items() if key in lasting}
    key = None if undivided is None else undivided.key
    return Contest(own, competing, key, tuple(limits), tuple(families))


def _quickest_two(wholes: Sequence[Candidate], own: Division, limit_bytes: int) -> list[Candidate]:
    """Return two undivided candidates at most: what is compared with has a second chance as well."""
    algorithm = own.parts[0].algorithm
    fitting = [each for each in wholes if each.workspace_bytes <= limit_bytes and each.algorithm != algorithm]
    return sorted(fitting, key=lambda each: (each.time_s, each.workspace_bytes, each.algorithm))[:2]


def _not_hopeless(rivals: Mapping[str, Division], limits: Sequence[int], hopeless: float) -> set[str]:
    """Return the keys of those that come close enough to the quickest under some limit that they fit."""
    found: set[str] = set()
    if math.isinf(hopeless):
        return {*rivals}
    for limit in limits:
        fitting = [each for each in rivals.values() if each.workspace_bytes <= limit]
        least_s = min((each.time_s for each in fitting), default=0.0)
        found |= {each.key for each in fitting if each.time_s <= hopeless * least_s}
    return found


def _best(candidates: Sequence[Candidate], batch: int, limit_bytes: int) -> Division | None:
    fitting = [each for each in candidates if each.workspace_bytes <= limit_bytes]
    if least_workspace_bytes(fitting, batch) is None:
        return None
    return solve_reuse(fitting, batch, limit_bytes)
