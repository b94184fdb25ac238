"""Kept results are those of equal operands of the same kind, and of no others."""

import pytest
import torch
from torch import Tensor

from tests.kept import KeptResults


@pytest.fixture
def sums() -> KeptResults[Tensor]:
    return KeptResults(most_kinds=2, most_results=2)


def unreached() -> Tensor:
    raise AssertionError("It must be kept.")


def test_a_result_is_computed_once_for_equal_operands(sums: KeptResults[Tensor]) -> None:
    first = sums.of("sum", [torch.ones(2)], lambda: torch.tensor(2.0))
    assert sums.of("sum", [torch.ones(2)], unreached) is first


def test_operands_that_change_in_place_are_computed_again(sums: KeptResults[Tensor]) -> None:
    operand = torch.ones(2)
    sums.of("sum", [operand], operand.sum)
    operand[1] = 5.0
    assert sums.of("sum", [operand], operand.sum) == 6.0


def test_another_kind_is_computed_for_itself(sums: KeptResults[Tensor]) -> None:
    operand = torch.full((2,), 3.0)
    assert sums.of("sum", [operand], operand.sum) == 6.0
    assert sums.of("product", [operand], operand.prod) == 9.0


def test_the_last_results_of_a_kind_are_kept(sums: KeptResults[Tensor]) -> None:
    made = [sums.of("sum", [torch.full((2,), float(each))], lambda: torch.ones(())) for each in range(3)]
    assert sums.of("sum", [torch.full((2,), 2.0)], unreached) is made[2]
    assert sums.of("sum", [torch.full((2,), 1.0)], unreached) is made[1]
    assert sums.of("sum", [torch.zeros(2)], lambda: torch.ones(())) is not made[0]


def test_the_kinds_asked_for_last_are_kept(sums: KeptResults[Tensor]) -> None:
    operand = torch.full((2,), 3.0)
    first = sums.of("sum", [operand], operand.sum)
    sums.of("product", [operand], operand.prod)
    assert sums.of("sum", [operand], unreached) is first
    sums.of("mean", [operand], operand.mean)
    assert sums.of("sum", [operand], unreached) is first
    assert sums.of("product", [operand], lambda: torch.tensor(7.0)) == 7.0
