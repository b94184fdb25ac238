"""The fastest division under a limit, against tables by hand and against trying every division."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mucudnn.choices import Policy
from mucudnn.division import Division
from mucudnn.errors import InfeasibleError
from mucudnn.profile import Candidate
from mucudnn.solvers import ReuseTable, best_of, least_workspace_bytes, solve_reuse
from mucudnn.solvers.dynamic import Grid, Table
from mucudnn.solvers.exhaustive import fastest_division
from tests.breadth import examples
from tests.solvers.cases import MIB, candidates, known

BATCHES = st.integers(0, 8)
LIMITS = st.integers(0, 6)


def _solved(offered: Sequence[Candidate], batch: int, limit_bytes: int) -> Division | None:
    try:
        return solve_reuse(offered, batch, limit_bytes)
    except InfeasibleError:
        return None


@examples(1500)
@given(candidates(), BATCHES, LIMITS)
def test_reuse_is_what_trying_every_division_finds(
    offered: list[Candidate], batch: int, limit_bytes: int
) -> None:
    assert _solved(offered, batch, limit_bytes) == fastest_division(offered, batch, limit_bytes)


@examples(400)
@given(candidates(), BATCHES, LIMITS)
def test_the_table_holds_the_answer_of_every_smaller_batch(
    offered: list[Candidate], batch: int, limit_bytes: int
) -> None:
    table = ReuseTable(offered, batch, limit_bytes)

    for b in range(batch + 1):
        assert table.division(b) == _solved(offered, b, limit_bytes)


@given(candidates(), BATCHES)
def test_the_best_division_needs_no_limit(offered: list[Candidate], batch: int) -> None:
    most_bytes = max((each.workspace_bytes for each in offered), default=0)

    assert best_of(offered, batch) == _solved(offered, batch, most_bytes)


def test_a_table_counts_once_for_all_batches_that_need_the_same_workspace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offered = [Candidate("x", 1, 2.0, 10), Candidate("x", 4, 4.0, 40), Candidate("y", 2, 3.0, 10)]
    seen: list[int] = []
    evaluate = Grid._table

    def noted(grid: Grid, *rest: Any) -> Table:
        seen.append(grid.batch)
        return evaluate(grid, *rest)

    monkeypatch.setattr(Grid, "_table", noted)
    table = ReuseTable(offered, 64, 40)

    found = [table.division(batch) for batch in range(4, 65)]

    assert seen == [64, 64]  # the times, and the parts within 40 bytes
    assert found == [solve_reuse(offered, batch, 40) for batch in range(4, 65)]


@examples(400)
@given(candidates(), BATCHES, LIMITS, st.randoms(use_true_random=False))
def test_the_order_of_the_candidates_does_not_matter(
    offered: list[Candidate], batch: int, limit_bytes: int, dice: random.Random
) -> None:
    shuffled = dice.sample(offered, len(offered))

    assert _solved(shuffled, batch, limit_bytes) == _solved(offered, batch, limit_bytes)


@examples(400)
@given(candidates(), st.integers(1, 8))
def test_the_least_workspace_of_an_infeasible_problem_is_exact(offered: list[Candidate], batch: int) -> None:
    least_bytes = least_workspace_bytes(offered, batch)

    if least_bytes is None:
        assert _solved(offered, batch, 10**9) is None
    else:
        assert solve_reuse(offered, batch, least_bytes).workspace_bytes == least_bytes
        assert least_bytes == 0 or _solved(offered, batch, least_bytes - 1) is None


@examples(300)
@given(candidates(), st.integers(1, 8), st.integers(1, 10**6))
def test_times_that_are_not_dyadic_lose_no_more_than_rounding(
    offered: list[Candidate], batch: int, divisor: int
) -> None:
    scaled = [
        Candidate(each.algorithm, each.batch, each.time_s / divisor, 0, each.setup_s / divisor)
        for each in offered
    ]
    best = fastest_division(scaled, batch, 0)
    found = _solved(scaled, batch, 0)

    assert (found is None) == (best is None)
    if best is not None and found is not None:
        # Each of at most 11 terms is off by half a tick, 2**-50 of the slowest division at most.
        assert found.time_s <= best.time_s + 11 * 2.0**-45 * 40 / divisor


@pytest.mark.parametrize(
    ("limit_bytes", "time_s", "key"),
    [
        (64 * MIB, 2564, "x@64*4"),
        (64 * MIB - 1, 2568, "x@32*8"),
        (MIB, 2816, "x@1*256"),
        (MIB - 1, 256010, "y@256*1"),
        (256, 256010, "y@256*1"),
        (255, 256020, "y@128*2"),
        (1, 258560, "y@1*256"),
    ],
)
def test_the_case_with_a_known_answer(limit_bytes: int, time_s: float, key: str) -> None:
    division = solve_reuse(known(Policy.POWER_OF_TWO.sizes(256)), 256, limit_bytes)

    assert division.time_s == time_s
    assert division.key == key


@pytest.mark.parametrize(
    ("batch", "time_s", "key"),
    [
        (3, 9, "plain@1*3"),  # the set-up of 10 does not pay yet
        (5, 15, "plain@1*5"),  # 15 either way; the plain one needs less workspace
        (6, 16, "prepared@1*6"),
        (20, 30, "prepared@1*20"),
    ],
)
def test_a_set_up_is_paid_once(batch: int, time_s: float, key: str) -> None:
    offered = [Candidate("plain", 1, 3, 0), Candidate("prepared", 1, 1, 1, setup_s=10)]

    division = solve_reuse(offered, batch, 1)

    assert (division.time_s, division.key) == (time_s, key)


def test_two_set_ups_may_be_worth_their_price() -> None:
    offered = [
        Candidate("x", 4, 1, 0, setup_s=2),
        Candidate("y", 1, 1, 0, setup_s=1),
        Candidate("z", 1, 4, 0),
    ]

    assert solve_reuse(offered, 6, 0).key == "x@4*1+y@1*2"  # 1 + 2 + 2 + 1 = 6
    assert solve_reuse(offered, 5, 0).key == "x@4*1+y@1*1"  # 1 + 2 + 1 + 1 = 5


def test_of_equally_fast_divisions_the_one_with_less_workspace_is_taken() -> None:
    assert solve_reuse([Candidate("x", 4, 4, 9), Candidate("x", 1, 1, 1)], 4, 9).key == "x@1*4"


def test_of_equally_large_ones_the_deterministic_one_is_taken() -> None:
    whole = Candidate("a", 4, 4, 1, is_deterministic=False)

    assert solve_reuse([whole, Candidate("b", 2, 2, 1)], 4, 9).key == "b@2*2"
    assert solve_reuse([whole, Candidate("b", 2, 2, 2)], 4, 9).key == "a@4*1"  # which takes less
    assert solve_reuse([whole, Candidate("b", 2, 2.5, 1)], 4, 9).key == "a@4*1"  # which is faster


def test_of_what_is_as_deterministic_the_one_with_fewer_parts_is_taken() -> None:
    assert solve_reuse([Candidate("y", 4, 4, 1), Candidate("x", 1, 1, 1)], 4, 9).key == "y@4*1"


def test_fewer_parts_count_only_among_divisions_of_the_least_workspace() -> None:
    offered = [Candidate("x", 2, 2, 3), Candidate("y", 1, 1, 1), Candidate("z", 3, 3, 2)]

    assert solve_reuse(offered, 5, 9).key == "y@1*5"
    assert solve_reuse([*offered, Candidate("w", 6, 0, 3)], 8, 9).key == "w@6*1+x@2*1"


def test_of_divisions_alike_in_all_that_the_first_id_is_taken() -> None:
    assert solve_reuse([Candidate("b", 2, 2, 1), Candidate("a", 2, 2, 1)], 4, 1).key == "a@2*2"


def test_of_divisions_of_one_algorithm_the_smallest_part_decides() -> None:
    offered = [Candidate("x", size, size, 1) for size in (1, 2, 3)]

    assert solve_reuse(offered, 4, 1).key == "x@3*1+x@1*1"


def test_of_what_is_alike_but_for_ids_and_sizes_all_find_the_same() -> None:
    of_another = [Candidate("y", 2, 2, 1)]
    for n in range(6):
        for sizes in itertools.combinations(range(1, 6), n):
            offered = [Candidate("x", size, size, 1) for size in sizes] + of_another
            for batch in range(9):
                assert _solved(offered, batch, 1) == fastest_division(offered, batch, 1)


def test_of_two_measurements_of_one_candidate_the_faster_that_fits_is_taken() -> None:
    offered = [Candidate("x", 2, 3, 10), Candidate("x", 2, 5, 4), Candidate("x", 2, 3, 20)]

    assert solve_reuse(offered, 2, 20).parts == (offered[0],)
    assert solve_reuse(offered, 2, 9).parts == (offered[1],)


def test_no_samples_need_no_division() -> None:
    assert solve_reuse([], 0, 0) == Division(())


def test_only_algorithms_without_workspace_run_under_a_limit_of_zero() -> None:
    assert solve_reuse([Candidate("x", 2, 1, 1), Candidate("y", 1, 9, 0)], 2, 0).key == "y@1*2"


def test_an_infeasible_limit_is_told_with_the_least_that_would_do() -> None:
    with pytest.raises(InfeasibleError, match="a limit of 7 bytes") as caught:
        solve_reuse([Candidate("x", 2, 1, 7), Candidate("x", 1, 1, 8)], 4, 6)

    assert (caught.value.limit_bytes, caught.value.least_bytes) == (6, 7)


def test_sizes_that_do_not_add_up_are_told() -> None:
    with pytest.raises(InfeasibleError, match="it is not known which limit would be enough") as caught:
        solve_reuse([Candidate("x", 2, 1, 0)], 3, 100)

    assert caught.value.least_bytes is None


def test_an_algorithm_with_two_set_up_times_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one set-up time, but 'x' got 0\.0 s and 1\.5 s"):
        solve_reuse([Candidate("x", 1, 1, 0), Candidate("x", 2, 1, 0, setup_s=1.5)], 2, 0)


def test_a_negative_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="batch must not be negative, but got -1"):
        solve_reuse([], -1, 0)


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="limit_bytes must not be negative, but got -1"):
        solve_reuse([], 0, -1)


@pytest.mark.parametrize(
    "offered",
    [
        [Candidate("x", 1, 1e308, 0), Candidate("y", 3, 1, 0)],
        [Candidate("x", 3, 1, 0, setup_s=1e308), Candidate("y", 3, 1, 0, setup_s=1e308)],
    ],
)
def test_times_that_add_up_to_infinity_are_refused(offered: list[Candidate]) -> None:
    with pytest.raises(ValueError, match="add up to a finite number of seconds, but got inf"):
        solve_reuse(offered, 3, 0)


@pytest.mark.parametrize("batch", [-1, 5])
def test_a_table_refuses_a_batch_that_it_does_not_cover(batch: int) -> None:
    table = ReuseTable([Candidate("x", 1, 1, 0)], 4, 0)

    with pytest.raises(ValueError, match=f"batch must be from 0 to 4, but got {batch}"):
        table.division(batch)


def test_a_set_up_of_what_does_not_fit_changes_nothing() -> None:
    faster, slower = Candidate("b", 1, 1.0, 0), Candidate("a", 1, 2.0, 0)
    too_large = Candidate("c", 1, 1.0, 10**9, setup_s=1e30)

    assert solve_reuse([faster, slower, too_large], 1, 0) == Division((faster,))
