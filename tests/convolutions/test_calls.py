"""What of PyTorch's calls is left to PyTorch as it is, and why."""

import pytest
import torch
from torch import Tensor

from mucudnn.convolutions.calls import obstacle

IMAGE, WEIGHT, BIAS = torch.zeros(2, 3, 5, 5), torch.zeros(4, 3, 3, 3), torch.zeros(4)


@pytest.mark.parametrize(
    ("image", "weight", "bias", "why"),
    [
        (IMAGE, WEIGHT, None, None),
        (IMAGE, WEIGHT, BIAS, None),
        (IMAGE, WEIGHT, BIAS.double(), "its weight and bias differ in type or device"),
        (IMAGE, WEIGHT, BIAS.to("meta"), "its weight and bias differ in type or device"),
        (IMAGE.double(), WEIGHT, BIAS, "its input and weight differ in type or device"),
        (IMAGE.to("meta"), WEIGHT, BIAS, "its input and weight differ in type or device"),
        (IMAGE.to_sparse(), WEIGHT, BIAS, "its tensors are not dense"),
        (IMAGE, WEIGHT.to_sparse(), BIAS, "its tensors are not dense"),
        (IMAGE.int(), WEIGHT.int(), None, "int32 has PyTorch's own convolution only"),
        (IMAGE[:0], WEIGHT, BIAS, "its tensors are empty"),
        (IMAGE, WEIGHT[:0], None, "its tensors are empty"),
    ],
)
def test_an_obstacle_is_named(image: Tensor, weight: Tensor, bias: Tensor | None, why: str | None) -> None:
    assert obstacle(image, weight, bias) == why
