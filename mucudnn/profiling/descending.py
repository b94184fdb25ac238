"""Which trials a profile needs: smaller and smaller micro-batches, until these promise nothing.

A smaller micro-batch serves where a larger one does not fit the limit, or where it takes less time a sample,
which is rare: kernels are made to be busy. So sizes are tried from the whole mini-batch down, all algorithms
at each, until all fit. Below that only what is likely is tried: what was fastest at the larger sizes, and
PyTorch's own. A smaller mini-batch is made of these, and a lower limit looks at them. Where they take less
time a sample than the larger size did, all algorithms are tried again.

By the recordings of a card, 559 problems, that leaves out 9 to 25 % of the trials within 8 MiB, 14 to 53 %
within 64, 52 to 64 % within 512; the best division of what is left is as fast as the best of all, to 0.1 %.
By those of two processors, 192 problems, it is 0.04 % slower in the sum at most, 2.2 % at worst.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from mucudnn.profile import Record, RefusalKind, Trial

Trials = Mapping[int, Sequence[Trial]]
"""All that there are for a mini-batch, by the size of the micro-batch, in the order of their list."""

_WORTH_IT = 0.98
"""Of the time a sample that a larger micro-batch takes: who takes less has all algorithms tried."""


def every(trials: Trials) -> list[Trial]:
    """Return the trials of all sizes, the smallest first."""
    return [trial for size in sorted(trials) for trial in trials[size]]


def wanted(trials: Trials, known: Mapping[Trial, Record], limit_bytes: int, own: str) -> list[Trial]:
    """Return the trials that are needed as far as is known: to be asked again until all of them are known.

    Args:
        trials: of the mini-batch.
        known: what is known of them, settled under the limit.
        limit_bytes: of workspace, inclusive.
        own: id of PyTorch's own convolution.
    """
    sizes = sorted(trials, reverse=True)
    needed: list[Trial] = []
    larger: _Seen | None = None
    likely = {own}
    for place, size in enumerate(sizes):
        if larger is not None and larger.all_fit:
            below = [_likely(trials[each], likely, own) for each in sizes[place:]]
            first = _seen(size, below[0], known, limit_bytes)
            if first is None or first.sample_s > _WORTH_IT * larger.sample_s:
                return [*needed, *(trial for each in below for trial in each)]
        needed += trials[size]
        larger = _seen(size, trials[size], known, limit_bytes)
        if larger is None:
            return needed
        likely |= larger.fastest
    return needed


class _Seen(NamedTuple):
    """What trials of one size have shown.

    Attributes:
        all_fit: whether none needs more than the limit.
        sample_s: least seconds for a sample; infinite where nothing fits.
        fastest: the algorithm that takes them, if there is one.
    """

    all_fit: bool
    sample_s: float
    fastest: frozenset[str]


def _likely(listed: Sequence[Trial], likely: Collection[str], own: str) -> list[Trial]:
    """Return the likely ones of a list; beside PyTorch's own the first, where none of the others is listed.

    A library may list other variants for other sizes.
    """
    found = [trial for trial in listed if trial.algorithm in likely]
    if all(trial.algorithm == own for trial in found) and len(likely) > 1:
        found += [trial for trial in listed if trial.algorithm != own][:1]
    return found


def _seen(
    size: int, listed: Sequence[Trial], known: Mapping[Trial, Record], limit_bytes: int
) -> _Seen | None:
    """Return what trials of a size have shown; None if one of them is not known."""
    if any(trial not in known for trial in listed):
        return None
    records = [known[trial] for trial in listed]
    times = dict(_times(records, limit_bytes))
    best = min(times, key=lambda name: (times[name], name), default=None)
    return _Seen(
        all_fit=not any(_is_too_large(record, limit_bytes) for record in records),
        sample_s=math.inf if best is None else times[best] / size,
        fastest=frozenset() if best is None else frozenset({best}),
    )


def _times(records: Iterable[Record], limit_bytes: int) -> Iterator[tuple[str, float]]:
    for record in records:
        if record.times is not None and record.refusal is None and not _is_too_large(record, limit_bytes):
            yield record.trial.algorithm, record.times.estimate.median


def _is_too_large(record: Record, limit_bytes: int) -> bool:
    if record.refusal is not None:
        return record.refusal.kind is RefusalKind.OVER_LIMIT
    return record.workspace_bytes is not None and record.workspace_bytes > limit_bytes
