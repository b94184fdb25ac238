"""How far a result is from its reference, by all of its values and by the worst of them."""

import math

import pytest
import torch

from mucudnn.live.reference import relative_error


def test_an_error_is_relative_to_the_reference() -> None:
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]).double()) == pytest.approx(0.1)


def test_an_error_is_absolute_where_the_reference_is_nothing() -> None:
    assert relative_error(torch.tensor([0.0, 0.5]), torch.zeros(2).double()) == 0.5


def test_an_error_of_few_values_is_relative_to_what_values_are_usual() -> None:
    reference = torch.randn(16, 8, 56, 56, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lost = reference.clone()
    lost[..., 0, 0] = 0  # one pixel of each image and channel: 0.018 in the 2-norm

    assert 0.1 < relative_error(lost, reference) < 0.5


def test_nothing_has_no_error() -> None:
    assert relative_error(torch.ones(0, 3), torch.ones(0, 3).double()) == 0.0


@pytest.mark.parametrize("zeros", [0, 48], ids=["of few zeros", "mostly zeros"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_error_of_rounding_is_that_of_all_values(dtype: torch.dtype, zeros: int) -> None:
    reference = torch.randn(16, 8, 49, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    reference[:, :, :zeros] = 0.0  # as in a filter's gradient of which most taps meet padding alone
    rounded = reference.to(dtype)

    expected = ((rounded.double() - reference).norm() / reference.norm()).item()
    assert relative_error(rounded, reference) == pytest.approx(expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_error_is_not_finite_where_a_result_is_not(value: float) -> None:
    assert not math.isfinite(relative_error(torch.tensor([1.0, value]), torch.ones(2).double()))
