"""Convolutions as users call them, and what the tests of divided ones compare."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mucudnn.backends import backend_of
from mucudnn.division import Division
from mucudnn.problem import ConvProblem
from tests.divisions import a_division
from tests.operands import CONVOLUTIONS, a_convolution, relative_error

FLOAT64_BOUND = 1e-12
"""Anything wrong is off by far more; the worst form loses three of 16 digits."""

ABSOLUTE_BOUND = 1e-10
"""The same for values of up to a hundred, which in sum may be small."""

MARKS = [
    pytest.mark.usefixtures("one_thread"),
    # PyTorch's own says once per process that it copies the image.
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]
"""Of every module that runs these."""

CPU = torch.device("cpu")
BACKEND = backend_of("cpu:")
OWN = "cpu:aten"
EVERY_ALGORITHM = (OWN, "cpu:im2col", "cpu:winograd4", "cpu:cc_winograd4", "cpu:fft16")
BATCH = 5
Arrangement = Callable[[Tensor], Tensor]
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes of x and w, the other arguments as a user writes them, and the algorithms that compute it."""

    image: tuple[int, ...]
    weight: tuple[int, ...]
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    algorithms: tuple[str, ...] = (OWN, "cpu:im2col")


CASES = {
    "2-D": Case((BATCH, 3, 7, 8), (4, 3, 5, 5), {"padding": 2}, EVERY_ALGORITHM),
    "2-D, no padding": Case((BATCH, 3, 7, 8), (4, 3, 5, 5), {}, EVERY_ALGORITHM),
    "2-D, same": Case((BATCH, 3, 7, 8), (4, 3, 5, 3), {"padding": "same"}, EVERY_ALGORITHM),
    "2-D, same, even": Case((BATCH, 3, 7, 8), (4, 3, 4, 5), {"padding": "same"}, EVERY_ALGORITHM),
    "2-D, same, even, dilated": Case((BATCH, 3, 7, 8), (4, 3, 2, 3), {"padding": "same", "dilation": (3, 2)}),
    "2-D, valid": Case((BATCH, 3, 7, 8), (4, 3, 5, 5), {"padding": "valid"}, EVERY_ALGORITHM),
    "2-D, numbers": Case(
        (BATCH, 3, 9, 8), (4, 3, 3, 2), {"stride": (2, 1), "padding": [1, 0], "dilation": (1, 2)}
    ),
    "2-D, one number in a tuple": Case((BATCH, 3, 9, 8), (4, 3, 3, 3), {"stride": (2,), "padding": (1,)}),
    "2-D, groups": Case((BATCH, 4, 7, 8), (6, 2, 3, 3), {"padding": 1, "groups": 2}),
    "2-D, depthwise": Case((BATCH, 4, 7, 8), (8, 1, 3, 3), {"groups": 4}),
    "2-D, 1x1": Case((BATCH, 3, 7, 8), (4, 3, 1, 1), algorithms=(OWN, "cpu:im2col", "cpu:gemm")),
    "1-D": Case((BATCH, 3, 11), (4, 3, 3), {"stride": 2, "padding": 1}),
    "1-D, same, even": Case((BATCH, 3, 11), (4, 3, 4), {"padding": "same"}),
    "1-D, groups": Case((BATCH, 4, 11), (4, 2, 3), {"groups": 2, "dilation": 2}),
    "3-D": Case((BATCH, 2, 4, 5, 6), (3, 2, 3, 3, 3), {"padding": 1}),
    "3-D, same, even": Case((BATCH, 2, 4, 5, 6), (3, 2, 2, 3, 2), {"padding": "same"}),
    "3-D, numbers": Case((BATCH, 2, 4, 5, 6), (3, 2, 2, 3, 1), {"stride": (1, 2, 2), "padding": (0, 1, 0)}),
}
EVERY = [
    pytest.param(case, algorithm, id=f"{name}-{algorithm}")
    for name, case in CASES.items()
    for algorithm in case.algorithms
]
PLAIN = CASES["2-D"]


def plain_problem() -> ConvProblem:
    return a_convolution(
        batch=BATCH,
        out_channels=4,
        input_size=(7, 8),
        kernel_size=(5, 5),
        padding=(2, 2),
        dtype="float64",
        bias=True,
    )


def divisions(algorithm: str, *batches: int) -> dict[str, Division]:
    """The same division for all three ops."""
    return dict.fromkeys(("fprop", "dgrad", "wgrad"), a_division(algorithm, *batches))


def uneven(algorithm: str) -> dict[str, Division]:
    return divisions(algorithm, 2, 2, 1)


def tensors(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x, w and bias, all of which want gradients."""
    generator = torch.Generator().manual_seed(0)
    x, w, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in (case.image, case.weight, case.weight[:1])
    )
    return x, w, bias


def torch_conv(x: Tensor, w: Tensor, bias: Tensor | None = None, **arguments: Any) -> Tensor:
    return CONVOLUTIONS[w.dim() - 2](x, w, bias, **arguments)


def gradients(y: Tensor, wanted: Sequence[Tensor], **options: Any) -> tuple[Tensor, ...]:
    """The gradients of a weighted sum of y: a dy that differs from place to place."""
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.dtype)
    return torch.autograd.grad(y, wanted, dy, **options)


def assert_close(result: Tensor, expected: Tensor) -> None:
    assert result.shape == expected.shape
    assert relative_error(result, expected.double()) <= FLOAT64_BOUND


def assert_lies_alike(result: Tensor, expected: Tensor) -> None:
    assert (result.shape, result.stride(), result.dtype) == (
        expected.shape,
        expected.stride(),
        expected.dtype,
    )


def contiguous(tensor: Tensor) -> Tensor:
    return tensor


def channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=CHANNELS_LAST[tensor.dim()])


def arranged(
    case: Case,
    arrangement: Arrangement,
    filter_arrangement: Arrangement,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """Leaves: x and w in their arrangements, and a bias."""
    x, w, bias = (tensor.detach() for tensor in tensors(case, dtype))
    return [tensor.requires_grad_() for tensor in (arrangement(x), filter_arrangement(w), bias)]
