"""Medians, their intervals, and verdicts."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mucudnn.intervals import (
    Estimate,
    Verdict,
    compare,
    compare_intervals,
    estimate,
    median,
    rank_of_lower_end,
    ratio,
)


@pytest.mark.parametrize(
    ("n", "low", "high", "coverage_percent"),
    [
        (6, 1, 6, 96.9),
        (8, 1, 8, 99.2),
        (10, 2, 9, 97.9),
        (15, 4, 12, 96.5),
        (20, 6, 15, 95.9),
        (30, 10, 21, 95.7),
        (40, 14, 27, 96.2),
        (60, 22, 39, 97.3),
        (80, 31, 50, 96.7),
        (100, 40, 61, 96.5),
    ],
)
def test_ranks_are_those_of_the_table(n: int, low: int, high: int, coverage_percent: float) -> None:
    k = rank_of_lower_end(n)

    assert (k, n + 1 - k) == (low, high)
    assert round(100 * _coverage(n, k), 1) == coverage_percent


def _coverage(n: int, k: int) -> float:
    """Probability that the k-th and the (n + 1 - k)-th sample enclose the median: the binomial formula."""
    return float(1 - 2 * sum(math.comb(n, below) for below in range(k)) / 2**n)


@pytest.mark.parametrize("n", range(6))
def test_fewer_than_six_samples_have_no_interval(n: int) -> None:
    assert rank_of_lower_end(n) == 0


@given(st.integers(6, 900))
def test_ranks_are_the_innermost_that_cover(n: int) -> None:
    k = rank_of_lower_end(n)

    assert _coverage(n, k) >= 0.95 > _coverage(n, k + 1)


def test_thousands_of_samples_have_an_interval() -> None:
    # The normal approximation: n/2 - 1.96 sqrt(n)/2 = 4902 for n = 10,000.
    assert rank_of_lower_end(10_000) == 4902


def test_median_of_an_odd_number_is_the_middle_one() -> None:
    assert median([5, 1, 4]) == 4


def test_median_of_an_even_number_is_between_the_middle_ones() -> None:
    assert median([5, 1, 4, 2]) == 3


def test_median_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="needs at least one sample, but got none"):
        median([])


def test_estimate_holds_median_and_order_statistics() -> None:
    assert estimate([10, 9, 8, 7, 6, 5, 4, 3, 2, 1]) == Estimate(5.5, low=2, high=9, samples=10)


def test_estimate_of_few_samples_knows_no_ends() -> None:
    assert estimate([3, 1, 2]) == Estimate(2, low=-math.inf, high=math.inf, samples=3)


@pytest.mark.parametrize("n", [6, 10, 15, 30])
def test_interval_covers_the_median_of_a_skewed_distribution(n: int) -> None:
    noise = random.Random(n)
    trials = 2_000
    estimates = [estimate([noise.lognormvariate(0, 1) for _ in range(n)]) for _ in range(trials)]

    covered = sum(one.low <= 1.0 <= one.high for one in estimates)  # exp(0) is the true median

    # 95 % less four standard deviations of a count of 2,000.
    assert covered / trials > 0.95 - 4 * math.sqrt(0.95 * 0.05 / trials)


def test_half_width_is_the_larger_side_relative_to_the_median() -> None:
    assert Estimate(10.0, low=9.5, high=12.0, samples=10).relative_half_width == pytest.approx(0.2)


def test_half_width_of_too_few_samples_is_infinite() -> None:
    assert estimate([1.0, 1.0]).relative_half_width == math.inf


@pytest.mark.parametrize(("high", "width"), [(0.0, 0.0), (1.0, math.inf)])
def test_half_width_about_zero_is_nothing_or_everything(high: float, width: float) -> None:
    assert Estimate(0.0, low=0.0, high=high, samples=6).relative_half_width == width


def test_ratio_is_that_of_the_rounds_not_of_the_medians() -> None:
    base, other = [1.0, 10.0, 100.0], [2.0, 20.0, 50.0]

    assert ratio(base, other).median == 2.0


def test_unpaired_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        ratio([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.90, 0.97, Verdict.FASTER),
        (0.90, 0.98, Verdict.AMBIGUOUS),
        (0.98, 1.02, Verdict.SAME),
        (0.97, 1.02, Verdict.AMBIGUOUS),
        (0.98, 1.03, Verdict.AMBIGUOUS),
        (0.90, 1.10, Verdict.AMBIGUOUS),
        (1.02, 1.10, Verdict.AMBIGUOUS),
        (1.03, 1.10, Verdict.SLOWER),
    ],
)
def test_verdict_follows_the_ends_of_the_interval(low: float, high: float, verdict: Verdict) -> None:
    others = [low, high, low, high, low, high]  # of six samples the ends are the least and the greatest

    assert compare([1.0] * 6, others) is verdict


def test_fewer_than_six_rounds_are_always_ambiguous() -> None:
    assert compare([1.0] * 5, [0.1] * 5) is Verdict.AMBIGUOUS


def test_tolerance_can_be_chosen() -> None:
    assert compare([1.0] * 6, [0.95] * 6, tolerance=0.1) is Verdict.SAME


def test_noise_common_to_a_round_cancels() -> None:
    base = [1.0, 3.0, 2.0, 5.0, 4.0, 1.5]

    assert compare(base, [0.9 * sample for sample in base]) is Verdict.FASTER


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [
        ((0.80, 0.87), Verdict.FASTER),
        ((0.80, 0.89), Verdict.AMBIGUOUS),  # 0.89 / 0.9 is above 0.98
        ((1.13, 1.20), Verdict.SLOWER),
        ((1.12, 1.20), Verdict.AMBIGUOUS),  # 1.12 / 1.1 is below 1.02
        ((1.00, 1.00), Verdict.AMBIGUOUS),
        ((0.80, math.inf), Verdict.AMBIGUOUS),
        ((-math.inf, math.inf), Verdict.AMBIGUOUS),
    ],
)
def test_the_nearest_ends_decide(ends: tuple[float, float], verdict: Verdict) -> None:
    base = Estimate(1e-3, 0.9e-3, 1.1e-3, 10)
    other = Estimate(1e-3, *(1e-3 * end for end in ends), 10)

    assert compare_intervals(base, other) is verdict


def test_narrow_intervals_close_by_are_the_same() -> None:
    base, other = Estimate(1.0, 0.999, 1.001, 10), Estimate(1.01, 1.009, 1.011, 10)

    assert compare_intervals(base, other) is Verdict.SAME


@pytest.mark.parametrize("base", [Estimate(1.0, -math.inf, 1.1, 3), Estimate(0.0, 0.0, 0.0, 6)])
def test_a_base_without_a_lower_end_above_zero_is_beaten_by_nothing(base: Estimate) -> None:
    assert compare_intervals(base, Estimate(0.5, 0.5, 0.5, 10)) is Verdict.AMBIGUOUS


def test_a_base_without_an_upper_end_can_be_beaten() -> None:
    base = Estimate(1.0, 0.9, math.inf, 3)

    assert compare_intervals(base, Estimate(0.5, 0.5, 0.5, 10)) is Verdict.FASTER


def test_a_base_without_an_upper_end_is_the_same_as_nothing() -> None:
    base = Estimate(1.0, 1.0, math.inf, 3)

    assert compare_intervals(base, Estimate(1.0, 1.0, 1.0, 10)) is Verdict.AMBIGUOUS


def test_equal_things_are_seldom_told_apart() -> None:
    noise = random.Random(0)
    pairs = [[[noise.gauss(1, 0.05) for _ in range(15)] for _ in range(2)] for _ in range(1_000)]

    verdicts = [compare(base, other) for base, other in pairs]

    # Each side errs in less than 2.5 % even without the tolerance.
    assert verdicts.count(Verdict.FASTER) < 25
    assert verdicts.count(Verdict.SLOWER) < 25
