"""What PyTorch's calls ask for, what of them is left to PyTorch as it is, and why."""

import contextlib

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812  # the name that PyTorch's users know it by

from mucudnn.convolutions.calls import (
    ConvArguments,
    Numbers,
    are_apart,
    explicit_padding,
    has_its_bias,
    numbers,
    obstacle,
    problem_of,
)
from mucudnn.errors import OptionError, ProblemError
from mucudnn.problem import ConvOp

IMAGE, WEIGHT, BIAS = torch.zeros(2, 3, 5, 5), torch.zeros(4, 3, 3, 3), torch.zeros(4)

PLAIN = ConvArguments((1, 1), (0, 0), (1, 1), 1)
TURNED = ConvArguments((2, 2), (1, 1), (1, 1), 2, (1, 1))


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


@pytest.mark.parametrize("given", [2, np.int64(2), torch.tensor(2), [2], torch.tensor([2]), (2, 2)])
def test_one_number_stands_for_all_dimensions(given: Numbers) -> None:
    assert numbers(given, 2) == (2, 2)


@pytest.mark.parametrize("given", [torch.tensor([2, 1]), (torch.tensor(2), np.int64(1)), [2, 1]])
def test_several_numbers_are_pythons_wherever_they_come_from(given: Numbers) -> None:
    found = numbers(given, 2)

    assert found == (2, 1)
    assert [type(each) for each in found] == [int, int]


def test_a_problem_has_numbers_of_python() -> None:
    stride = torch.tensor(2), torch.tensor(1)

    assert problem_of(IMAGE, WEIGHT, False, PLAIN._replace(stride=stride)).stride == (2, 1)  # noqa: FBT003


@pytest.mark.parametrize(("taps", "is_padded"), [(3, False), (2, True)])
def test_an_image_is_copied_only_where_it_needs_more_zeros_on_one_side(taps: int, *, is_padded: bool) -> None:
    image, _ = explicit_padding(IMAGE, (taps, taps), PLAIN._replace(padding="same"))

    assert (image is not IMAGE) == is_padded


def test_a_transposed_convolution_is_the_gradient_of_the_one_that_leads_back() -> None:
    image, weight = torch.zeros(2, 6, 5, 4), torch.zeros(6, 2, 3, 3)

    problem = problem_of(image, weight, has_bias=True, arguments=TURNED)

    expected = F.conv_transpose2d(image, weight, None, 2, 1, 1, 2)
    assert (problem.op, problem.groups, problem.bias) == (ConvOp.DGRAD, 2, False)
    assert problem.input_shape == tuple(expected.shape)
    assert problem.output_shape == tuple(image.shape)
    assert has_its_bias(problem, torch.zeros(4))
    assert not has_its_bias(problem, torch.zeros(6))


@pytest.mark.parametrize(
    ("dtype", "samples", "is_told"),
    [
        (torch.float32, 2, False),
        (torch.float64, 2, True),
        (torch.complex64, 2, True),
        (torch.float32, 1, True),
    ],
)
@pytest.mark.parametrize("is_fake", [False, True])
def test_a_transposed_convolution_is_told_where_pytorch_computes_it_by_other_kernels(
    dtype: torch.dtype, samples: int, *, is_told: bool, is_fake: bool
) -> None:
    """Of a single image oneDNN computes what is large: here what is given, and not the result."""
    plain = PLAIN._replace(padding=(1, 1))
    with FakeTensorMode() if is_fake else contextlib.nullcontext():
        image, weight = torch.zeros(samples, 64, 32, 32, dtype=dtype), torch.zeros(64, 3, 3, 3, dtype=dtype)
        turned = problem_of(image, weight, False, plain._replace(output_padding=(0, 0)))  # noqa: FBT003

        assert turned.is_apart == is_told
        assert not problem_of(image[:, :3], weight, False, plain).is_apart  # noqa: FBT003


@pytest.mark.parametrize(
    ("transposed", "plain", "is_told"),
    [
        ("CudnnTranspose", "Cudnn", False),
        ("CudnnTranspose", "CudaDepthwise2d", True),
        ("???", "Mkldnn", False),  # as PyTorch calls oneDNN's
        ("MkldnnTranspose", "Slow2d", True),
        ("SlowTranspose3d", "Mkldnn", True),
    ],
)
def test_only_libraries_compute_both_alike(transposed: str, plain: str, *, is_told: bool) -> None:
    assert are_apart(transposed, plain) == is_told


@pytest.mark.parametrize(
    ("shape", "changes", "words"),
    [
        ((2, 4, 5, 5), {}, "must have the filter's 6 channels, but got 4"),
        ((2, 6, 1, 1), {"padding": (2, 2)}, "must have pixels, but got none"),
        ((2, 6, 5, 5), {"output_padding": (2, 2)}, "output padding .* must be smaller than its stride"),
        ((2, 6, 5, 5), {"stride": (2,)}, "There must be 2 numbers for 2 dimensions"),
        ((2, 6, 5), {}, "There must be 2 numbers for 2 dimensions"),
    ],
)
def test_what_is_no_transposed_convolution_is_no_problem(
    shape: tuple[int, ...], changes: dict[str, tuple[int, ...]], words: str
) -> None:
    with pytest.raises(ProblemError, match=words):
        problem_of(torch.zeros(shape), torch.zeros(6, 2, 3, 3), False, TURNED._replace(**changes))  # noqa: FBT003


def test_a_problem_has_its_padding_in_numbers() -> None:
    with pytest.raises(OptionError, match="in numbers here, but got 'same'"):
        problem_of(IMAGE, WEIGHT, False, PLAIN._replace(padding="same"))  # noqa: FBT003  # without a bias
