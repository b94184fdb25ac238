"""Fronts merged exactly, against trying every selection."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mucudnn.division import Division
from mucudnn.solvers import merging, pareto
from mucudnn.solvers.exhaustive import fastest_selection
from mucudnn.solvers.merging import Choices, Prices, TooManySumsError, best_selection
from tests.breadth import examples
from tests.solvers.cases import fronts, whole


def _least_bytes(offers: dict[str, list[Division]]) -> int:
    return sum(min(each.workspace_bytes for each in offer) for offer in offers.values())


@examples(1500)
@given(fronts(), st.integers(0, 25))
def test_merging_finds_what_trying_every_selection_finds(
    offers: dict[str, list[Division]], spare_bytes: int
) -> None:
    limit_bytes = _least_bytes(offers) + spare_bytes
    thinned = {key: pareto(offer) for key, offer in offers.items()}
    choices = Choices.of(list(thinned.values()), limit_bytes)
    prices = Prices.of(choices)

    places = best_selection(choices, prices, choices.time_of(prices.cheapest))

    found = {key: front[place] for (key, front), place in zip(thinned.items(), places, strict=True)}
    assert found == fastest_selection(offers, limit_bytes)


@examples(500)
@given(fronts(), st.integers(0, 25))
def test_the_cheapest_selection_fits_and_nothing_is_below_the_lower_bound(
    offers: dict[str, list[Division]], spare_bytes: int
) -> None:
    choices = Choices.of([pareto(offer) for offer in offers.values()], _least_bytes(offers) + spare_bytes)
    prices = Prices.of(choices)

    best = best_selection(choices, prices, choices.time_of(prices.cheapest))

    assert choices.fits(prices.cheapest)
    assert choices.fits(best)
    assert prices.lower - prices.rounding <= choices.time_of(best) <= choices.time_of(prices.cheapest)


def test_sums_that_lead_to_no_better_selection_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "MOST_SUMS", 400)
    dice = random.Random(0)
    fronts = [
        pareto([whole(dice.randint(1, 2000) / 4, dice.randint(0, 1000)) for _ in range(30)])
        for _ in range(60)
    ]
    least, most = (sum(front[end].workspace_bytes for front in fronts) for end in (0, -1))
    choices = Choices.of(fronts, (2 * least + most) // 3)
    prices = Prices.of(choices)

    # By all that the cheapest selection admits there would be more than a thousand for some site.
    best = best_selection(choices, prices, choices.time_of(prices.cheapest))

    assert choices.time_of(best) < choices.time_of(prices.cheapest)


def test_too_many_sums_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "MOST_SUMS", 1)
    choices = Choices.of([[whole(4, 0), whole(1, 3)], [whole(4, 0), whole(1, 3)]], 3)
    prices = Prices.of(choices)

    with pytest.raises(TooManySumsError, match=r"^$"):
        best_selection(choices, prices, choices.time_of(prices.cheapest))


def test_workspaces_may_add_up_to_all_that_arrays_hold() -> None:
    choices = Choices.of([[whole(2, 0), whole(1, 2**63 - 1)]], 2**63 - 1)

    assert choices.fits((1,))


def test_workspaces_that_add_up_beyond_what_arrays_hold_are_refused() -> None:
    fronts = [[whole(2, 0), whole(1, 2**61)]] * 4

    with pytest.raises(ValueError, match="must add up to at most 9223372036854775807 bytes"):
        Choices.of(fronts, 2**63 - 1)
