"""Divisions: what they add up to, and their standard order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mucudnn.division import Division, Room, is_of_one_part
from mucudnn.profile import Candidate
from tests.examples import a_candidate


def test_a_division_adds_batches_and_times_and_takes_the_largest_workspace() -> None:
    division = Division((a_candidate(), a_candidate(batch=8, time_s=0.003, workspace_bytes=512)))

    assert (division.batch, division.workspace_bytes) == (24, 1024)
    assert division.time_s == pytest.approx(0.005)


def test_a_division_pays_set_up_once_per_algorithm() -> None:
    winograd = Candidate("cpu:winograd4", 8, 0.5, 0, setup_s=0.25)
    direct = Candidate("cpu:direct", 8, 1.0, 0)

    assert Division((winograd, winograd, direct)).time_s == 0.5 + 0.5 + 0.25 + 1.0


def test_a_division_of_nothing_costs_nothing() -> None:
    empty = Division(())

    assert (empty.batch, empty.time_s, empty.workspace_bytes, empty.key) == (0, 0.0, 0, "")


def test_a_division_of_one_part_is_undivided() -> None:
    assert Division((a_candidate(),)).is_undivided
    assert not Division((a_candidate(), a_candidate())).is_undivided


def test_the_key_of_a_division_counts_equal_parts() -> None:
    division = Division.of(
        [a_candidate(), a_candidate(batch=8), a_candidate(), a_candidate(algorithm="cpu:fft")]
    )

    assert division.key == "cpu:direct@16*2+cpu:direct@8*1+cpu:fft@16*1"


@pytest.mark.parametrize(
    "parts",
    [
        [a_candidate(batch=64)],
        [a_candidate()] * 2,
        [a_candidate(), a_candidate(batch=8)],
        [a_candidate(), a_candidate(algorithm="cpu:fft")],
    ],
)
def test_the_key_tells_whether_there_is_one_part(parts: list[Candidate]) -> None:
    division = Division.of(parts)

    assert is_of_one_part(division.key) is division.is_undivided


def test_parts_of_one_algorithm_must_not_be_torn_apart() -> None:
    parts = (a_candidate(), a_candidate(algorithm="cpu:fft"), a_candidate())

    with pytest.raises(ValueError, match="must stand next to each other"):
        Division(parts)


def test_an_algorithm_must_have_one_set_up_time() -> None:
    with pytest.raises(ValueError, match="must have one set-up time"):
        Division((a_candidate(), a_candidate(setup_s=0.1)))


def test_standard_order_puts_large_parts_first_and_keeps_algorithms_together() -> None:
    parts = [
        a_candidate(algorithm="b", batch=2),
        a_candidate(algorithm="a", batch=4),
        a_candidate(algorithm="b", batch=8),
        a_candidate(algorithm="c", batch=8),
    ]

    ordered = Division.of(parts).parts

    assert [(part.algorithm, part.batch) for part in ordered] == [("b", 8), ("b", 2), ("c", 8), ("a", 4)]


@given(
    st.lists(
        st.builds(
            Candidate,
            algorithm=st.sampled_from("abc"),
            batch=st.integers(1, 4),
            time_s=st.sampled_from([0.5, 1.0]),
            workspace_bytes=st.integers(0, 2),
        )
    ).flatmap(lambda parts: st.tuples(st.just(parts), st.permutations(parts)))
)
def test_standard_order_does_not_depend_on_the_given_one(
    orders: tuple[list[Candidate], list[Candidate]],
) -> None:
    given_order, other_order = orders

    assert Division.of(given_order) == Division.of(other_order)


def test_a_division_is_pytorchs_own_where_that_runs_the_batch_at_once_on_any_backend() -> None:
    whole, half, other = (Candidate(name, 8, 1.0, 0) for name in ("cpu:aten", "cudnn:aten", "cpu:attention"))

    assert [each.is_own for each in (whole, half, other)] == [True, True, False]
    assert [Division(parts).is_own for parts in ((whole,), (half, half), (other,))] == [True, False, False]


REUSE, SHARING = Room(100, 60), Room(100, None)


def test_what_takes_memory_beside_the_buffer_shares_the_limit_with_it() -> None:
    division = Division((a_candidate(workspace_bytes=30),))
    own = Division((a_candidate(algorithm="cpu:aten", workspace_bytes=30),))

    assert [REUSE.suffices(n_bytes, division) for n_bytes in (40, 41)] == [True, False]
    assert [SHARING.suffices(n_bytes, division) for n_bytes in (0, 1)] == [True, False]
    assert [SHARING.suffices(n_bytes, own) for n_bytes in (30, 31)] == [True, False]


def test_pytorchs_own_runs_as_it_would_anyway_where_it_fits_beside_the_buffer_undivided() -> None:
    fits, does_not = (Division((Candidate("cpu:aten", 8, 1.0, n_bytes),)) for n_bytes in (40, 41))
    parts = Division((Candidate("cpu:aten", 4, 1.0, 40),) * 2)

    assert [REUSE.is_unpatched(each) for each in (fits, does_not, parts)] == [True, False, False]


def test_the_sum_of_parts_takes_of_what_a_site_owns() -> None:
    division = Division((Candidate("cpu:aten", 4, 1.0, 30),) * 2)

    assert [SHARING.bound(division, sum_bytes) for sum_bytes in (0, 1)] == [None, 30]
