"""Where the values of one parameter take turns, no two values are left that never meet."""

import itertools

import pytest

from tests.breadth import in_turn


@pytest.mark.parametrize("count", [2, 3])
def test_every_two_values_meet_and_with_all_cases_every_combination_is_seen(count: int) -> None:
    factors = {"b": range(count), "c": range(4), "d": range(1)}
    names, cases = in_turn("a", range(count), **factors).mark.args

    usual = [case.values for case in cases if not case.marks]

    assert names == ("a", "b", "c", "d")
    every = [*itertools.product(range(count), *factors.values())]
    assert sorted(case.values for case in cases) == every
    assert len(usual) == len(every) / count
    for pair in itertools.combinations(range(len(names)), 2):
        assert {tuple(values[each] for each in pair) for values in usual} == {
            tuple(values[each] for each in pair) for values in every
        }


def test_where_only_one_other_parameter_varies_nothing_can_take_turns() -> None:
    with pytest.raises(ValueError, match=r"must have at least 2 values, but they have \[5, 1\]\."):
        in_turn("a", range(2), b=range(5), c=range(1))
