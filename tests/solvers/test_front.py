"""The divisions that no other beats, against tables by hand and against the definition."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mucudnn.choices import Policy
from mucudnn.division import Division
from mucudnn.errors import InfeasibleError
from mucudnn.profile import Candidate
from mucudnn.solvers import division_front, pareto, solve_reuse
from mucudnn.solvers.exhaustive import every_front_point
from tests.breadth import examples
from tests.solvers.cases import MIB, candidates, known, whole


def _front(offered: list[Candidate], batch: int, limit_bytes: int | None = None) -> tuple[Division, ...]:
    try:
        return division_front(offered, batch, limit_bytes)
    except InfeasibleError:
        return ()


def _reuse(offered: list[Candidate], batch: int, limit_bytes: int) -> list[Division]:
    try:
        return [solve_reuse(offered, batch, limit_bytes)]
    except InfeasibleError:
        return []


@examples(600)
@given(candidates(), st.integers(1, 7))
def test_a_front_is_what_the_definition_says(offered: list[Candidate], batch: int) -> None:
    front = _front(offered, batch)

    assert [(each.workspace_bytes, each.time_s) for each in front] == every_front_point(offered, batch)


@examples(300)
@given(candidates(), st.integers(1, 7), st.integers(0, 6))
def test_a_front_holds_what_reuse_finds_at_every_limit(
    offered: list[Candidate], batch: int, limit_bytes: int
) -> None:
    front = _front(offered, batch, limit_bytes)

    for limit in range(limit_bytes + 1):
        fitting = [division for division in front if division.workspace_bytes <= limit]
        assert fitting[-1:] == _reuse(offered, batch, limit)


@examples(200)
@given(candidates(), st.integers(1, 7), st.randoms(use_true_random=False))
def test_a_front_does_not_depend_on_the_order_of_the_candidates(
    offered: list[Candidate], batch: int, dice: random.Random
) -> None:
    assert _front(dice.sample(offered, len(offered)), batch) == _front(offered, batch)


def test_the_known_front_of_powers_of_two_has_16_points() -> None:
    front = division_front(known(Policy.POWER_OF_TWO.sizes(256)), 256, 64 * MIB)

    small = [(2**k, 256000 + 2560 / 2**k) for k in range(9)]
    large = [(2**k * MIB, 2560 + 256 / 2**k) for k in range(7)]
    assert [(each.workspace_bytes, each.time_s) for each in front] == small + large


def test_the_parts_of_the_known_front_are_equal() -> None:
    front = division_front(known(Policy.POWER_OF_TWO.sizes(256)), 256, 64 * MIB)

    assert all(len(set(division.parts)) == 1 for division in front)


@pytest.mark.parametrize(("limit_bytes", "points"), [(64 * MIB, 59), (64 * MIB - 1, 58)])
def test_the_known_front_of_all_sizes_includes_the_limit(limit_bytes: int, points: int) -> None:
    assert len(division_front(known(Policy.ALL.sizes(256)), 256, limit_bytes)) == points


def test_the_times_of_the_paper_in_seconds_give_the_same_front() -> None:
    sizes = Policy.ALL.sizes(256)
    quick = [Candidate("x", b, 0.1 * b + 0.01, b * MIB) for b in sizes]
    front = division_front(quick + [Candidate("y", b, 10 * b + 0.1, b) for b in sizes], 256, 64 * MIB)

    assert len(front) == 59
    assert all(slow.time_s > fast.time_s for slow, fast in itertools.pairwise(front))


def test_set_ups_make_a_front_of_their_own() -> None:
    offered = [
        Candidate("x", 1, 4, 0),
        Candidate("y", 1, 1, 5, setup_s=4),
        Candidate("z", 2, 1, 9, setup_s=2),
    ]

    front = division_front(offered, 2)

    assert [(each.key, each.time_s) for each in front] == [("x@1*2", 8), ("y@1*2", 6), ("z@2*1", 3)]


def test_no_samples_have_a_front_of_one_empty_division() -> None:
    assert division_front([], 0) == (Division(()),)


@pytest.mark.parametrize(("limit_bytes", "least_bytes"), [(2, 3), (0, 3)])
def test_a_front_without_points_is_infeasible(limit_bytes: int, least_bytes: int) -> None:
    with pytest.raises(InfeasibleError, match="a limit of 3 bytes") as caught:
        division_front([Candidate("x", 1, 1, 3)], 2, limit_bytes)

    assert (caught.value.limit_bytes, caught.value.least_bytes) == (limit_bytes, least_bytes)


def test_sizes_that_do_not_add_up_make_no_front() -> None:
    with pytest.raises(InfeasibleError, match="it is not known which limit would be enough") as caught:
        division_front([Candidate("x", 2, 1, 0), Candidate("y", 2, 1, 9)], 3)

    assert caught.value.limit_bytes == 9  # without a limit: what all of them fit


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="limit_bytes must not be negative, but got -1"):
        division_front([], 0, -1)


def test_pareto_keeps_what_is_faster_than_all_that_is_smaller() -> None:
    divisions = [whole(4, 5), whole(3, 5), whole(9, 0), whole(3, 6), whole(9, 1), whole(4, 5), whole(1, 9)]

    kept = [(each.workspace_bytes, each.time_s) for each in pareto(divisions)]

    assert kept == [(0, 9), (5, 3), (9, 1)]
