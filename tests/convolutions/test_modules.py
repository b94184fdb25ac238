"""What convolution modules say of themselves, and where models lie."""

from typing import Any

import pytest
import torch
from torch import nn

from mucudnn.convolutions.calls import ConvArguments
from mucudnn.convolutions.modules import arguments_of, home_of, undividable


@pytest.mark.parametrize(
    ("parameter", "buffer", "home"),
    [("meta", "cpu", "meta"), ("cpu", "meta", "cpu"), (None, "meta", "meta"), (None, None, "cpu")],
)
def test_a_model_lies_where_its_first_parameter_does_else_its_first_buffer(
    parameter: str | None, buffer: str | None, home: str
) -> None:
    model = nn.Module()
    if buffer is not None:
        model.register_buffer("buffer", torch.zeros(1, device=buffer))
    if parameter is not None:
        model.weight = nn.Parameter(torch.zeros(1, device=parameter))

    assert home_of(model) == torch.device(home)


@pytest.mark.parametrize("name", ["stride", "padding", "dilation", "output_padding"])
@pytest.mark.parametrize("value", [1, [1, 1]])
def test_each_setting_may_be_a_number_or_a_list_by_itself(name: str, value: Any) -> None:
    module = nn.ConvTranspose2d(3, 4, 3, stride=2)
    usual = ConvArguments((2, 2), (0, 0), (1, 1), 1, (0, 0))

    setattr(module, name, value)

    assert arguments_of(module) == usual._replace(**{name: (1, 1)})


def test_what_imitates_a_quantised_convolution_is_not_divided() -> None:
    module = nn.Conv2d(3, 4, 3)
    assert undividable(module) is None

    module.weight_fake_quant = nn.Identity()

    assert undividable(module) == "Conv2d imitates a quantised convolution"
