"""Means of speed-ups over layers, and speed-ups of sums of times; intervals come from drawing rounds anew.

A speed-up is the time of PyTorch's own over that of what was chosen. A geometric mean of ratios says nothing
about any sum of times: it is there to be compared with publications, beside the quotient of the sums.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.cpu.lines import Measured
from mucudnn.intervals import CONFIDENCE, Estimate

Floats = NDArray[np.float64]
Places = NDArray[np.intp]
"""Numbers of rounds; shape (rounds,) for the rounds as they were, (draws, rounds) for many draws of them."""

_DRAWS = 1000
_SEED = 0
"""Of the draws: the same lines give the same summary."""


class Pair(NamedTuple):
    """Seconds of PyTorch's own and of what was chosen; sample i of both comes from round i."""

    own: Sequence[float]
    chosen: Sequence[float]


def pair(line: Measured, key: str) -> Pair:
    """Return the proving rounds of PyTorch's own and of the division with that key."""
    return Pair(line.proving.samples_s(line.own), line.proving.samples_s(key))


def geometric_mean(items: Sequence[Sequence[Pair]]) -> Estimate:
    """Return the geometric mean of the items' speed-ups.

    Args:
        items: at least one; a layer each: one pair, or one for each op whose times are added up.
    """
    found, draws = (
        np.exp(
            np.mean([np.log(_speedup(item, places)) for item, places in zip(items, rounds, strict=True)], 0)
        )
        for rounds in (_as_they_were(items), _drawn(items))
    )
    return _estimate(found, draws, len(items))


def total(pairs: Sequence[Pair]) -> Estimate:
    """Return the sum of the medians of PyTorch's own over the sum of the medians of what was chosen."""
    (were,), (drawn,) = _as_they_were([pairs]), _drawn([pairs])
    return _estimate(_quotient_of_sums(pairs, were), _quotient_of_sums(pairs, drawn), len(pairs))


def sum_of_medians(samples: Sequence[Sequence[float]]) -> Estimate:
    """Return the sum of the medians, with its interval; what is drawn for one is not drawn for another.

    Where some rounds were disturbed, the median of few lies above the true one more often than below it, and
    that of what is drawn of them likewise lies above theirs. Such errors do not cancel in a sum over many
    layers: the interval reaches as far below the sum as the draws lie above it, and the other way round. Of
    150 simulated sums over 27 layers, of ten rounds of which a fifth took 1.3 to 2 times as long, the draws
    alone covered 44 %, and what lies opposite to them 95 %.
    """
    pairs = [Pair(each, each) for each in samples]
    (were,), (drawn,) = _as_they_were([pairs]), _drawn([pairs])
    found = _sum_of_medians(samples, were)
    draws = _sum_of_medians(samples, drawn)
    there, opposite = (_estimate(found, each, len(samples)) for each in (draws, 2 * found - draws))
    low, high = min(there.low, opposite.low), max(there.high, opposite.high)
    return Estimate(there.median, low, high, len(samples))


def _estimate(found: Floats, draws: Floats, samples: int) -> Estimate:
    outside = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(draws, [outside, 100 - outside])
    return Estimate(float(found), float(low), float(high), samples)


def _as_they_were(items: Sequence[Sequence[Pair]]) -> list[list[Places]]:
    return [[np.arange(len(each.own)) for each in item] for item in items]


def _drawn(items: Sequence[Sequence[Pair]]) -> list[list[Places]]:
    generator = np.random.default_rng(_SEED)
    return [
        [generator.integers(0, len(each.own), size=(_DRAWS, len(each.own))) for each in item]
        for item in items
    ]


def _speedup(item: Sequence[Pair], places: Sequence[Places]) -> Floats:
    """Return the median of the quotients of one pair, or the quotient of the sums of several."""
    if len(item) > 1:
        return _quotient_of_sums(item, places)
    own, chosen = np.asarray(item[0].own), np.asarray(item[0].chosen)
    return _medians((own / chosen)[places[0]])


def _quotient_of_sums(item: Sequence[Pair], places: Sequence[Places]) -> Floats:
    own = _sum_of_medians([each.own for each in item], places)
    return own / _sum_of_medians([each.chosen for each in item], places)


def _sum_of_medians(samples: Sequence[Sequence[float]], places: Sequence[Places]) -> Floats:
    medians = [_medians(np.asarray(some)[where]) for some, where in zip(samples, places, strict=True)]
    return np.asarray(np.sum(medians, axis=0))


def _medians(values: Floats) -> Floats:
    """Return the medians along the last axis: to sort rows so short takes a third of `np.median`'s time."""
    ordered, most = np.sort(values, axis=-1), values.shape[-1] - 1
    return np.asarray((ordered[..., most // 2] + ordered[..., (most + 1) // 2]) / 2)
