"""What convolution modules say of themselves, and where models lie."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, in_kernel_invocation_manager
from torch.nn.utils import parametrizations

from mucudnn.convolutions.calls import ConvArguments
from mucudnn.convolutions.modules import (
    Call,
    arguments_of,
    elsewhere,
    home_of,
    problem_of_call,
    tuned_device,
    undividable,
)
from mucudnn.errors import ProblemError


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


class _Own(nn.Conv2d):
    def _conv_forward(self, *args: Any) -> Any:
        return super()._conv_forward(*args)


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([nn.Conv2d(3, 3, 3, device="meta")], id="one without values"),
        pytest.param([_Own(3, 3, 3, device="meta")], id="one that computes itself"),
        pytest.param([nn.Embedding(8, 3, device="meta")], id="another parameter"),
    ],
)
def test_a_model_is_tuned_where_the_first_convolution_lies_that_can_be_divided(
    others: list[nn.Module],
) -> None:
    assert tuned_device(nn.Sequential(*others, nn.Conv2d(3, 4, 3))) == torch.device("cpu")


def test_a_model_without_such_a_convolution_is_tuned_where_it_lies() -> None:
    assert tuned_device(nn.Sequential(nn.Embedding(8, 3, device="meta"))) == torch.device("meta")
    assert tuned_device(nn.Conv2d(3, 4, 3, device="meta")) == torch.device("meta")
    assert tuned_device(nn.ReLU()) == torch.device("cpu")


def test_what_lies_on_another_kind_of_device_says_so() -> None:
    module = nn.Conv2d(3, 4, 3, device="meta")

    assert elsewhere(module, torch.device("meta")) is None
    assert elsewhere(module, torch.device("cpu")) == "it lies on meta, and those that are tuned on cpu"
    assert elsewhere(nn.ReLU(), torch.device("meta")) is None


def test_to_ask_where_a_convolution_lies_computes_no_weight() -> None:
    model = nn.Sequential(parametrizations.spectral_norm(nn.Conv2d(3, 4, 3)))
    before = copy.deepcopy(model.state_dict())  # computing it in training mode would iterate once more

    assert tuned_device(model) == torch.device("cpu")
    assert elsewhere(model[0], torch.device("cpu")) is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_whose_parameters_are_stand_ins_lies_where_they_stand_for_while_they_are_computed_with() -> (
    None
):
    with FakeTensorMode() as mode:
        model = nn.Conv2d(3, 4, 3)

    with in_kernel_invocation_manager(mode):
        assert model.weight.device == torch.device("meta")
        assert home_of(model) == tuned_device(model) == torch.device("cpu")


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


@pytest.mark.parametrize(
    ("padding_mode", "image_size", "padding", "is_padded"),
    [("zeros", (8, 8), (1, 1), False), ("reflect", (10, 10), (0, 0), True)],
)
def test_a_call_with_pixels_beside_zeros_has_the_problem_of_what_is_padded_before(
    padding_mode: Any, image_size: tuple[int, ...], padding: tuple[int, ...], is_padded: bool
) -> None:
    conv = nn.Conv2d(3, 4, 3, padding=1, padding_mode=padding_mode)
    call = Call(torch.ones(2, 3, 8, 8), conv.weight, conv.bias, arguments_of(conv), padding_mode)

    problem, found = problem_of_call(conv, call, None)

    assert (problem.input_size, problem.padding, found) == (image_size, padding, is_padded)


def test_one_sample_has_the_problem_of_a_batch_of_one_and_autocast_decides_its_type() -> None:
    conv = nn.Conv2d(3, 4, 3)
    call = Call(torch.ones(3, 8, 8), conv.weight, conv.bias, arguments_of(conv))

    problem, is_padded = problem_of_call(conv, call, torch.bfloat16)

    assert (problem.batch, problem.dtype, is_padded) == (1, "bfloat16", False)


def test_a_call_that_must_be_left_to_pytorch_has_no_problem_but_the_reason() -> None:
    conv = nn.Conv2d(3, 4, 3)
    call = Call(torch.ones(0, 3, 8, 8), conv.weight, conv.bias, arguments_of(conv))

    with pytest.raises(ProblemError, match=r"^its tensors are empty$"):
        problem_of_call(conv, call, None)
