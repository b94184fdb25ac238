"""Tensors with the strides that PyTorch's convolutions expect, and gradients with those of their weights."""

import pytest
import torch

from mucudnn.convolutions.strides import in_order, strided_as

LAST = torch.channels_last


@pytest.mark.parametrize("order", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (1, 3, 4, 5)])
@pytest.mark.parametrize("given", [torch.contiguous_format, LAST])
def test_what_is_put_in_order_has_the_strides_of_a_new_tensor(
    shape: tuple[int, ...], given: torch.memory_format, order: torch.memory_format
) -> None:
    tensor = torch.randn(shape).contiguous(memory_format=given)

    result = in_order(tensor, order)

    assert result.stride() == torch.empty(shape, memory_format=order).stride()
    assert torch.equal(result, tensor)


def test_a_gradient_has_the_strides_of_its_weight_where_only_lengths_of_one_tell_both_apart() -> None:
    weight = torch.empty(4, 1, 3, 3).to(memory_format=LAST)
    gradient = torch.randn(4, 1, 3, 3)
    assert weight.stride() != gradient.stride()

    result = strided_as(weight, gradient.clone())

    assert result.stride() == weight.stride()
    assert torch.equal(result, gradient)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(LAST, torch.contiguous_format), (torch.contiguous_format, LAST)]
)
def test_a_gradient_that_lies_otherwise_in_memory_stays_as_it_is(
    ours: torch.memory_format, theirs: torch.memory_format
) -> None:
    weight, values = torch.empty(4, 2, 3, 3).to(memory_format=ours), torch.randn(4, 2, 3, 3)
    gradient = values.clone().to(memory_format=theirs)
    before = gradient.stride()

    result = strided_as(weight, gradient)

    assert result.stride() == before
    assert torch.equal(result, values)
