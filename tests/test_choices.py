"""The words among which a user chooses."""

from pathlib import Path
from typing import Any

import pytest

from mucudnn.choices import Policy, choice
from mucudnn.errors import OptionError


@pytest.mark.parametrize(
    ("policy", "batch", "sizes"),
    [
        (Policy.UNDIVIDED, 12, (12,)),
        (Policy.POWER_OF_TWO, 12, (1, 2, 4, 8, 12)),
        (Policy.POWER_OF_TWO, 16, (1, 2, 4, 8, 16)),
        (Policy.POWER_OF_TWO, 1, (1,)),
        (Policy.ALL, 4, (1, 2, 3, 4)),
    ],
)
def test_policy_tries_its_sizes(policy: Policy, batch: int, sizes: tuple[int, ...]) -> None:
    assert policy.sizes(batch) == sizes


@pytest.mark.parametrize("policy", Policy)
def test_a_batch_of_none_has_no_sizes(policy: Policy) -> None:
    assert policy.sizes(0) == ()


@pytest.mark.parametrize("name", ["power_of_two", "power-of-two"])
def test_a_choice_may_be_spelt_with_hyphens(name: str) -> None:
    assert choice(Policy, name) is Policy.POWER_OF_TWO


@pytest.mark.parametrize("name", ["powers", "", None, 3, b"all", Path("all")])
def test_an_unknown_choice_lists_all(name: Any) -> None:
    with pytest.raises(
        OptionError, match="policy must be one of 'undivided', 'power_of_two', 'all', but got"
    ):
        choice(Policy, name)
