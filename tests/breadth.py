"""How much is tried of products of parameters and of random examples: with --thorough more of them."""

import itertools
from collections.abc import Callable, Iterable

import pytest
from hypothesis import settings

_LESS = 3

_is_thorough = False


def be_thorough() -> None:
    """Have tests that are collected from now on try more."""
    global _is_thorough
    _is_thorough = True


def is_thorough() -> bool:
    return _is_thorough


def examples(number: int) -> settings:
    """So many random examples with --thorough, and a third without."""
    return settings(max_examples=number if _is_thorough else -(-number // _LESS))


def in_turn(
    name: str,
    values: Iterable[object],
    *,
    ids: Callable[[object], str | None] = lambda _: None,
    **others: Iterable[object],
) -> pytest.MarkDecorator:
    """Have a test see all combinations of the others' values, each with one of `values`, in turn.

    So every two values of any two parameters meet. With --thorough all combinations are seen.

    Raises:
        ValueError: fewer than two others have as many values, so that some would not meet.
    """
    of_name, of_others = [*values], [[*each] for each in others.values()]
    counts = [len(each) for each in of_others]
    if sum(count >= len(of_name) for count in counts) < 2:
        raise ValueError(f"Two others must have at least {len(of_name)} values, but they have {counts}.")
    cases = []
    for combination in itertools.product(*map(enumerate, of_others)):
        turn = sum(place for place, _ in combination) % len(of_name)
        for place, value in enumerate(of_name):
            marks = () if place == turn else (pytest.mark.thorough,)
            cases.append(pytest.param(value, *(each for _, each in combination), marks=marks))
    return pytest.mark.parametrize((name, *others), cases, ids=ids)
