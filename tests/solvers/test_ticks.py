"""Seconds as whole numbers of ticks."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mucudnn.solvers.ticks import TickScale


def test_the_longest_time_has_fewer_ticks_than_the_bits_hold() -> None:
    scale = TickScale.for_sums_up_to(5.0, bits=10)

    assert scale.ticks([5.0]).tolist() == [640]
    assert scale.ticks([5.0])[0] < 2**10


def test_no_time_at_all_has_no_ticks() -> None:
    assert TickScale.for_sums_up_to(0.0, bits=52).ticks([0.0]).tolist() == [0]


def test_a_time_between_two_ticks_becomes_the_nearer_one() -> None:
    scale = TickScale(exponent=-2)

    assert scale.ticks([0.3, 0.45]).tolist() == [1, 2]


@given(st.lists(st.integers(0, 2**30), min_size=1))
def test_dyadic_times_come_back_exactly(quarters: list[int]) -> None:
    times_s = [quarter / 4 for quarter in quarters]
    scale = TickScale.for_sums_up_to(sum(times_s), bits=52)

    assert math.ldexp(int(scale.ticks(times_s).sum()), scale.exponent) == sum(times_s)


@pytest.mark.parametrize("longest_s", [5e-324, 1e-9, 1.0, 1e300])
def test_a_tick_is_a_2_to_the_51st_of_the_longest_time_at_most(longest_s: float) -> None:
    ticks = TickScale.for_sums_up_to(longest_s, bits=52).ticks([longest_s])

    assert 2**51 <= ticks[0] <= 2**52
    assert ticks.dtype == np.int64
