"""What a step takes before and now, as values."""

import math

import pytest

from mucudnn.comparing.step_comparison import PairedTimes, break_even
from mucudnn.intervals import Verdict


def test_times_are_medians_in_seconds_and_the_speedup_that_of_the_rounds() -> None:
    times = PairedTimes(before_ns=(100, 200, 300, 100, 200, 300), now_ns=(50, 50, 100, 50, 50, 100))

    assert (times.before.median, times.now.median) == pytest.approx((2e-7, 5e-8))
    assert (times.speedup.median, times.speedup.low, times.speedup.high) == (3, 2, 4)
    assert times.verdict is Verdict.FASTER


def test_what_takes_longer_than_before_is_slower() -> None:
    assert PairedTimes((100,) * 6, (110,) * 6).verdict is Verdict.SLOWER


@pytest.mark.parametrize(("before", "now"), [((), ()), ((1, 2), (1,))])
def test_rounds_come_in_pairs(before: tuple[int, ...], now: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"as many rounds .* got {len(before)} and {len(now)}"):
        PairedTimes(before, now)


def test_tuning_is_paid_back_by_what_a_step_saves() -> None:
    found = break_even(60.0, [3.0] * 10, [2.0] * 10)

    assert (found.median, found.low, found.high, found.samples) == (60, 60, 60, 10)


def test_the_interval_is_that_of_the_time_saved() -> None:
    found = break_even(12.0, [4.0] * 10, [2.0, 2.0, *[1.0] * 6, 0.0, 0.0])

    assert (found.median, found.low, found.high) == (4, 3, 6)


@pytest.mark.parametrize("now_s", [2.0, 2.5])
def test_what_saves_nothing_never_pays(now_s: float) -> None:
    found = break_even(60.0, [2.0] * 10, [now_s] * 8 + [1.0] * 2)

    assert (found.median, found.high) == (math.inf, math.inf)


def test_what_is_paid_back_is_in_seconds_of_the_same_steps() -> None:
    times = PairedTimes((3 * 10**9,) * 10, (2 * 10**9,) * 10)

    assert times.break_even(60.0) == break_even(60.0, [3.0] * 10, [2.0] * 10)
