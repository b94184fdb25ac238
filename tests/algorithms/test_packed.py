"""PyTorch's own convolution with a filter packed beforehand, as graphs compute it that are frozen."""

import dataclasses

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from mucudnn.algorithms.own import operands, recorded_convolution
from mucudnn.algorithms.packed import image_order, packing
from mucudnn.backends import backend_of
from mucudnn.backends.own import own_job, packed_job, prepare_packed
from mucudnn.errors import BackendError
from mucudnn.live.reference import relative_error
from mucudnn.problem import ConvOp, ConvProblem
from tests.graphs import DYNAMOS
from tests.operands import a_convolution

pytestmark = pytest.mark.usefixtures("one_thread")

TRANSPOSED = a_convolution(op=ConvOp.DGRAD, stride=(2, 2), padding=(1, 1), input_size=(8, 8))

PACKED = {
    "plain": a_convolution(bias=True),
    "strided": a_convolution(stride=(2, 1), padding=(0, 2)),
    "dilated groups": a_convolution(in_channels=4, out_channels=6, groups=2, dilation=(2, 2)),
    "depthwise": a_convolution(in_channels=6, out_channels=6, groups=6),
    "1x1": a_convolution(kernel_size=(1, 1), padding=(0, 0)),
    "3-D": a_convolution(
        input_size=(4, 5, 6), kernel_size=(3, 1, 3), stride=(1, 2, 1), padding=(1, 0, 1), dilation=(1, 1, 1)
    ),
    "transposed": TRANSPOSED,
    "transposed groups": dataclasses.replace(TRANSPOSED, in_channels=4, out_channels=4, groups=2),
}

ONE_DIMENSION = a_convolution(input_size=(9,), kernel_size=(3,), stride=(1,), padding=(1,), dilation=(1,))

NOT_PACKED = {
    "1-D": ONE_DIMENSION,
    "float64": a_convolution(dtype="float64"),
    "nothing": a_convolution(batch=0),
    "wgrad": a_convolution(op=ConvOp.WGRAD),
    "transposed depthwise": dataclasses.replace(TRANSPOSED, in_channels=6, out_channels=6, groups=6),
}


def error_of(problem: ConvProblem) -> float:
    """Of the packed convolution, relative to PyTorch's own in float64."""
    image, weight, bias = operands(problem, torch.Generator().manual_seed(0))
    if problem.op is ConvOp.DGRAD:
        bias = torch.randn(problem.in_channels, dtype=image.dtype)
    pack = packing(problem)
    assert pack is not None
    doubles = [None if each is None else each.double() for each in (image, weight, bias)]
    expected = recorded_convolution(problem, *doubles)

    packed = pack(weight, bias)
    del weight
    result = packed(image.contiguous(memory_format=image_order(problem)))

    assert result.is_contiguous(memory_format=image_order(problem))
    return relative_error(result, expected)


@pytest.mark.parametrize("problem", PACKED.values(), ids=PACKED)
def test_it_is_the_same_convolution(problem: ConvProblem) -> None:
    assert error_of(problem) <= 1e-6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_are_packed_where_the_processor_computes_in_them(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = a_convolution(dtype=dtype)
    is_able = {
        "bfloat16": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        "float16": torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }

    assert (packing(problem) is not None) == is_able[dtype]
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", value=False)
    assert packing(problem) is None


@pytest.mark.parametrize("problem", NOT_PACKED.values(), ids=NOT_PACKED)
def test_some_convolutions_are_not_packed(problem: ConvProblem) -> None:
    assert packing(problem) is None


def test_nothing_is_packed_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", value=False)

    assert packing(a_convolution()) is None


def module_for(problem: ConvProblem) -> nn.Module:
    rank, is_transposed = len(problem.input_size), problem.op is ConvOp.DGRAD
    kinds = [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]
    channels = (problem.in_channels, problem.out_channels)
    made = kinds[3 * is_transposed + rank - 1](
        *(reversed(channels) if is_transposed else channels),
        problem.kernel_size,
        problem.stride,
        problem.padding,
        dilation=problem.dilation,
        groups=problem.groups,
        dtype=getattr(torch, problem.dtype),
        **({"output_padding": problem.output_padding} if is_transposed else {}),
    )
    return made.eval()


LIKE_GRAPHS = {
    name: {**PACKED, **NOT_PACKED}[name]
    for name in ("plain", "3-D", "transposed", "1-D", "transposed depthwise")
}


@DYNAMOS
@pytest.mark.parametrize("problem", LIKE_GRAPHS.values(), ids=LIKE_GRAPHS)
def test_graphs_that_torch_compile_freezes_pack_the_same(problem: ConvProblem) -> None:
    torch.compiler.reset()
    counters.clear()
    shape = problem.output_shape if problem.op is ConvOp.DGRAD else problem.input_shape
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        compiled = torch.compile(module_for(problem), dynamic=False)
        compiled(torch.randn(shape, dtype=getattr(torch, problem.dtype)))

    packed = counters["inductor"]["mkldnn_conv_weight_pack_matcher_count"]

    assert packed == (packing(problem) is not None)


def test_a_packed_filter_is_no_workspace() -> None:
    problem = a_convolution(batch=1, in_channels=512, out_channels=512, input_size=(7, 7), padding=(1, 1))
    cpu = backend_of("cpu:")
    own, packed = (cpu.footprint(job(problem), 2**30) for job in (own_job, packed_job))

    assert own is not None
    assert packed is not None
    assert packed < 2**20 < problem.filter_bytes <= own


def test_what_is_not_packed_has_no_such_footprint() -> None:
    with pytest.raises(BackendError, match="No filter is packed"):
        prepare_packed(packed_job(ONE_DIMENSION).payload)
