"""The divided convolution takes and gives tensors in any arrangement and type, as PyTorch's does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mucudnn.division import Division
from mucudnn.functional import DividedConvolution, divided_conv
from mucudnn.problem import ConvOp
from mucudnn.profile import Candidate
from tests.functional_cases import (
    BACKEND,
    BATCH,
    CASES,
    CHANNELS_LAST,
    EVERY_ALGORITHM,
    MARKS,
    OWN,
    PLAIN,
    Arrangement,
    Case,
    arranged,
    assert_close,
    assert_lies_alike,
    channels_last,
    contiguous,
    divisions,
    gradients,
    tensors,
    torch_conv,
    uneven,
)
from tests.operands import a_convolution, relative_error

pytestmark = MARKS


def expanded(tensor: Tensor) -> Tensor:
    return tensor[:1].expand(tensor.shape)


def turned(tensor: Tensor) -> Tensor:
    """The last two axes change places in memory."""
    return tensor.mT.contiguous().mT


def to_channels_last(tensor: Tensor) -> Tensor:
    """As `Module.to` lays parameters out: strides of length 1 change too, which `contiguous` leaves."""
    return tensor.to(memory_format=CHANNELS_LAST[tensor.dim()], copy=True)


def half_of_the_channels(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor], 1)[:, : tensor.shape[1]]


def half_of_the_channels_last(tensor: Tensor) -> Tensor:
    return half_of_the_channels(channels_last(tensor))


def every_second_pixel(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2, -1)[..., ::2]


def every_second_pixel_channels_last(tensor: Tensor) -> Tensor:
    return channels_last(tensor.repeat_interleave(2, -1))[..., ::2]


ARRANGEMENTS = (
    contiguous,
    channels_last,
    to_channels_last,
    expanded,
    turned,
    half_of_the_channels,
    half_of_the_channels_last,
    every_second_pixel,
    every_second_pixel_channels_last,
)
DENSE = (contiguous, channels_last, to_channels_last, turned)
"""Arrangements that parameters have."""

SHAPES = {
    "2-D": Case((BATCH, 3, 7, 8), (4, 3, 3, 3)),
    "one channel in": Case((BATCH, 1, 7, 8), (4, 1, 3, 3)),
    "one channel out": Case((BATCH, 3, 7, 8), (1, 3, 3, 3)),
    "1x1": Case((BATCH, 3, 7, 8), (4, 3, 1, 1)),
    "one pixel": Case((BATCH, 3, 1, 1), (4, 3, 1, 1)),
    "one pixel out": Case((BATCH, 3, 3, 3), (4, 3, 3, 3)),
    "one sample": Case((1, 3, 7, 8), (4, 3, 3, 3)),
    "3-D": Case((BATCH, 3, 4, 4, 3), (4, 3, 2, 2, 2)),
}
AS_PARAMETERS_LIE = [
    pytest.param(case, image, weight, id=f"{name}-{image.__name__}-{weight.__name__}")
    for name, case in SHAPES.items()
    for image in ARRANGEMENTS
    for weight in DENSE
]


@pytest.mark.parametrize("filter_arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_tensors_in_any_arrangement_are_taken(
    arrangement: Arrangement, filter_arrangement: Arrangement
) -> None:
    wanted = arranged(PLAIN, arrangement, filter_arrangement)

    y = divided_conv(*wanted, **PLAIN.arguments, **uneven("cpu:winograd4"))

    expected = torch_conv(*wanted, **PLAIN.arguments)
    assert_close(y, expected)
    for result, gradient in zip(gradients(y, wanted), gradients(expected, wanted), strict=True):
        assert_close(result, gradient)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_what_is_kept_for_the_gradients_is_the_callers_and_no_copy(arrangement: Arrangement) -> None:
    given = arranged(PLAIN, arrangement, contiguous)
    kept: list[tuple[int, tuple[int, ...]]] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append((tensor.data_ptr(), tensor.stride()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        divided_conv(*given, **PLAIN.arguments, **uneven("cpu:winograd4"))

    assert kept == [(each.data_ptr(), each.stride()) for each in given[:2]]


class Copied(TorchDispatchMode):
    """Notes what is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            self.seen.append(args[0].data_ptr())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("algorithm", ["cpu:im2col", "cpu:aten"])
@pytest.mark.parametrize("forward", [ConvOp.FPROP, ConvOp.DGRAD])
def test_a_slice_is_copied_for_the_gradients_where_the_filters_reads_it_alone(
    forward: ConvOp, algorithm: str
) -> None:
    problem = a_convolution(op=forward, batch=BATCH)
    divided = {op: Division((Candidate(algorithm, 1, 0.0, 0),) * BATCH) for op in ConvOp}
    convolution = DividedConvolution(BACKEND, problem, divided)
    x, w, y = (
        torch.randn(each) for each in (problem.input_shape, problem.filter_shape, problem.output_shape)
    )
    given, gradient = (x, y) if forward is ConvOp.FPROP else (y, x)
    image, copied = half_of_the_channels(given), list[bool]()
    for needed in ((True, False, True), (True, True, True)):
        with Copied() as mode:
            convolution.gradients(gradient, image, w, needed)
        copied.append(image.data_ptr() in mode.seen)

    assert copied == [False, True]


@pytest.mark.parametrize(("case", "arrangement", "filter_arrangement"), AS_PARAMETERS_LIE)
def test_the_output_lies_in_memory_as_pytorchs(
    case: Case, arrangement: Arrangement, filter_arrangement: Arrangement
) -> None:
    given = arranged(case, arrangement, filter_arrangement, torch.float32)

    y = divided_conv(*given, **case.arguments, **divisions("cpu:im2col", case.image[0]))

    assert_lies_alike(y, torch_conv(*given, **case.arguments))


@pytest.mark.parametrize(("case", "arrangement", "filter_arrangement"), AS_PARAMETERS_LIE)
def test_the_gradients_of_leaves_lie_in_memory_as_pytorchs(
    case: Case, arrangement: Arrangement, filter_arrangement: Arrangement
) -> None:
    given, twins = (arranged(case, arrangement, filter_arrangement, torch.float32) for _ in range(2))

    divided_conv(*given, **case.arguments, **divisions("cpu:im2col", case.image[0])).sum().backward()
    torch_conv(*twins, **case.arguments).sum().backward()

    for tensor, twin in zip(given, twins, strict=True):
        assert tensor.grad is not None
        assert twin.grad is not None
        is_filter = tensor is given[1]
        if not (is_filter and tensor.grad.stride() == tensor.stride() and tensor.grad.is_contiguous()):
            assert_lies_alike(tensor.grad, twin.grad)  # else PyTorch's may have other strides of length 1


GRADIENT_MAKERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda y: y.sum(),
    "mean of a mean": lambda y: y.mean((2, 3)).mean(),
    "one channel": lambda y: y[:, 1].square().sum(),
    "every second pixel": lambda y: y[..., ::2].square().sum(),
    "turned": lambda y: (y.mT.contiguous() * torch.arange(float(y.numel())).view_as(y.mT)).sum(),
    "channels last": lambda y: channels_last(y).square().sum(),
    "one sample": lambda y: y[3].square().sum(),
}


@pytest.mark.parametrize("maker", GRADIENT_MAKERS.values(), ids=GRADIENT_MAKERS)
@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_gradients_in_any_arrangement_are_taken(algorithm: str, maker: Callable[[Tensor], Tensor]) -> None:
    wanted = tensors(PLAIN)

    results = torch.autograd.grad(
        maker(divided_conv(*wanted, **PLAIN.arguments, **uneven(algorithm))), wanted
    )

    expected = torch.autograd.grad(maker(torch_conv(*wanted, **PLAIN.arguments)), wanted)
    for result, gradient in zip(results, expected, strict=True):
        assert_close(result, gradient)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["2-D", "1-D", "3-D", "2-D, groups"])
def test_every_type_is_kept_and_as_exact_as_pytorchs(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    wanted = tensors(case, dtype)
    doubles = [tensor.detach().double().requires_grad_() for tensor in wanted]

    y = divided_conv(*wanted, **case.arguments, **uneven(OWN))

    own, exact = (torch_conv(*given, **case.arguments) for given in (wanted, doubles))
    rounding = torch.finfo(dtype).eps / 2
    results, owns = (y, *gradients(y, wanted)), (own, *gradients(own, wanted))
    for result, one, expected in zip(results, owns, (exact, *gradients(exact, doubles)), strict=True):
        assert result.dtype is dtype
        # A weight gradient's parts are rounded once more; float32 is added up in another order.
        assert relative_error(result, expected) <= 2 * (relative_error(one, expected) + rounding)
