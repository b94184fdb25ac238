"""What of a long list is measured."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mucudnn.backends.cudnn.pruning import prune

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Configuration:
    rank: int
    engine: int
    workspace_bytes: int


def _list(*pairs: tuple[int, int]) -> tuple[Configuration, ...]:
    """Return configurations of (engine, MiB of workspace)."""
    return tuple(Configuration(rank, engine, mib * MIB) for rank, (engine, mib) in enumerate(pairs))


def _ranks(configurations: tuple[Configuration, ...]) -> list[int]:
    return [configuration.rank for configuration in configurations]


lists = st.lists(
    st.tuples(
        st.integers(0, 9), st.sampled_from([0, 1, 8, 8 * MIB, 100 * MIB, 101 * MIB, 103 * MIB, 900 * MIB])
    ),
    max_size=60,
).map(lambda pairs: tuple(Configuration(rank, *pair) for rank, pair in enumerate(pairs)))


def test_a_short_list_stays_as_it_is() -> None:
    short = _list(*[(1, 0)] * 16)

    assert prune(short) == short


def test_of_equal_ones_the_first_16_stay() -> None:
    assert _ranks(prune(_list(*[(1, 0)] * 40))) == list(range(16))


def test_a_workspace_size_of_its_own_goes_before_the_order() -> None:
    pairs = [(1, 64)] * 40
    pairs[30] = (1, 32)

    assert _ranks(prune(_list(*pairs))) == [*range(15), 30]


def test_an_engine_of_its_own_goes_before_the_order() -> None:
    pairs = [(1, 64)] * 40
    pairs[30] = (2, 64)

    assert _ranks(prune(_list(*pairs))) == [*range(15), 30]


def test_workspace_sizes_go_before_engines() -> None:
    pairs = [(1, 1000 + 100 * place) for place in range(20)]
    pairs[7] = (2, 1000)

    assert 7 not in _ranks(prune(_list(*pairs)))


@pytest.mark.parametrize(
    ("other_mib", "is_another"), [(100, False), (102, False), (103, True), (98, True), (99, False)]
)
def test_sizes_within_2_percent_count_as_one(other_mib: int, is_another: bool) -> None:
    pairs = [(1, 100)] * 40
    pairs[30] = (1, other_mib)
    pairs[31] = (1, 0)  # the least, which stays anyhow

    assert (30 in _ranks(prune(_list(*pairs)))) is is_another


def test_sizes_within_1_mib_count_as_one() -> None:
    equal = [Configuration(rank, 1, 0) for rank in range(40)]
    within = [*equal[:30], Configuration(30, 1, MIB), *equal[31:]]
    beyond = [*equal[:30], Configuration(30, 1, MIB + 1), *equal[31:]]

    assert 30 not in _ranks(prune(within))
    assert 30 in _ranks(prune(beyond))


def test_the_least_workspace_takes_the_place_of_the_last_one_chosen() -> None:
    pairs = [(1, 1000)] * 40
    pairs[39] = (1, 999)

    assert _ranks(prune(_list(*pairs))) == [*range(15), 39]


@given(lists)
def test_there_are_at_most_16_in_their_order(configurations: tuple[Configuration, ...]) -> None:
    kept = prune(configurations)

    assert len(kept) == min(16, len(configurations))
    assert _ranks(kept) == sorted(set(_ranks(kept)))


@given(lists)
def test_the_first_six_stay(configurations: tuple[Configuration, ...]) -> None:
    assert prune(configurations)[:6] == configurations[:6]


@given(lists.filter(len))
def test_the_least_workspace_stays(configurations: tuple[Configuration, ...]) -> None:
    least = min(configuration.workspace_bytes for configuration in configurations)

    assert min(configuration.workspace_bytes for configuration in prune(configurations)) == least


@given(lists)
def test_every_workspace_size_stays_where_there_is_room(configurations: tuple[Configuration, ...]) -> None:
    kept = prune(configurations)

    # At most five of the eight sizes are apart from one another: beside the first six there is room for all.
    assert all(
        any(
            abs(one.workspace_bytes - other.workspace_bytes) <= max(MIB, 0.02 * one.workspace_bytes)
            for other in kept
        )
        for one in configurations
    )
