"""The gradient of a bias: the sum of dy over images and pixels, in little memory."""

import pytest
import torch
from torch import Tensor

from mucudnn import functional
from mucudnn.backends.cpu.backend import CpuBackend
from mucudnn.functional import DividedConvolution
from mucudnn.problem import ConvOp, ConvProblem
from tests.algorithms.allocations import allocated_bytes
from tests.divisions import a_division
from tests.operands import a_convolution, small_integers

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = ["bfloat16", "float16"]

PARTS = {ConvOp.FPROP: a_division("cpu:onednn_nhwc", 2, 1), ConvOp.WGRAD: a_division("cpu:onednn_nhwc", 2, 1)}
OWN = {ConvOp.FPROP: PARTS[ConvOp.FPROP]}


def _layer(dtype: str, size: int = 12, batch: int = 3) -> ConvProblem:
    return a_convolution(
        batch=batch, in_channels=2, out_channels=5, groups=1, input_size=(size, size), kernel_size=(3, 3),
        stride=(1, 1), padding=(1, 1), dilation=(1, 1), bias=True, dtype=dtype,
    )  # fmt: skip


def _operands(problem: ConvProblem) -> tuple[Tensor, Tensor, Tensor]:
    """dy, x and w, of numbers whose sums are exact in 32 bits."""
    generator = torch.Generator().manual_seed(0)
    shapes = problem.output_shape, problem.input_shape, problem.filter_shape
    dy, x, w = (small_integers(shape, generator).to(getattr(torch, problem.dtype)) for shape in shapes)
    return dy, x, w


@pytest.mark.parametrize("divisions", [PARTS, OWN], ids=["parts", "own"])
@pytest.mark.parametrize("at_once", [1, 4 * 144, 8 * 144, 24 * 144, 2**20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_summed_in_32_bits_and_rounded_once_in_blocks_of_any_size(
    dtype: str, at_once: int, divisions: dict[ConvOp, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functional, "_SUMMED_BYTES", at_once)
    problem = _layer(dtype)
    dy, x, w = _operands(problem)
    convolution = DividedConvolution(CpuBackend(), problem, divisions)

    _, dw, db = convolution.gradients(dy, x, w, (False, True, True))

    assert db is not None
    assert torch.equal(db, dy.double().sum((0, 2, 3)).to(dy.dtype))
    assert dw is not None


@pytest.mark.parametrize(
    "shape",
    [(3, 5, 256, 256), (16, 5, 256, 256), (2, 2, 1024, 1024), (2, 2, 64, 96, 96), (2, 3, 700_000)],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_copy_of_all_of_dy_is_made(dtype: str, shape: tuple[int, ...]) -> None:
    dy = torch.ones(shape, dtype=getattr(torch, dtype))

    assert 4 * dy.numel() > 3 * 2**20
    assert _taken(dy) <= 2**20 + 2**12


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("float32", (3, 5, 256, 256)), *(("bfloat16", shape) for shape in ((1, 5, 600, 600), (8, 1, 600, 600)))],
    ids=str,
)
def test_where_pytorch_sums_without_a_copy_it_does(dtype: str, shape: tuple[int, ...]) -> None:
    assert _taken(torch.ones(shape, dtype=getattr(torch, dtype))) <= 2**12


def _taken(dy: Tensor) -> int:
    """The bytes that the gradient of a bias takes, in a layer of one tap and one input channel."""
    batch, out_channels, *size = dy.shape
    each = (1,) * len(size)
    problem = a_convolution(
        batch=batch, in_channels=1, out_channels=out_channels, groups=1, bias=True, input_size=tuple(size),
        kernel_size=each, stride=each, dilation=each, padding=(0,) * len(size),
        dtype=str(dy.dtype).removeprefix("torch."),
    )  # fmt: skip
    x, w = dy.new_ones(problem.input_shape), dy.new_ones(problem.filter_shape)
    convolution = DividedConvolution(CpuBackend(), problem, {})
    return allocated_bytes(lambda: convolution.gradients(dy, x, w, (False, False, True)))
