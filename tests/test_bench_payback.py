"""After how many steps tuning has paid for itself."""

import math

from bench.payback import break_even


def test_tuning_is_paid_back_by_what_a_step_saves() -> None:
    found = break_even(60.0, [3.0] * 10, [2.0] * 10)

    assert (found.median, found.low, found.high, found.samples) == (60, 60, 60, 10)


def test_the_interval_is_that_of_the_time_saved() -> None:
    found = break_even(12.0, [4.0] * 10, [2.0, 2.0, *[1.0] * 6, 0.0, 0.0])

    assert (found.median, found.low, found.high) == (4, 3, 6)


def test_what_saves_nothing_never_pays() -> None:
    found = break_even(60.0, [2.0] * 10, [2.5] * 8 + [1.0] * 2)

    assert (found.median, found.high) == (math.inf, math.inf)
