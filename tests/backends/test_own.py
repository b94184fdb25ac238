"""PyTorch's own convolution, against autograd."""

import dataclasses

import pytest
import torch
from torch import Tensor

from mucudnn.algorithms.own import operands, own_convolution, unread_operand
from mucudnn.backends.own import own_job, prepare
from mucudnn.problem import ConvOp, ConvProblem, Layout

_CONVOLUTIONS = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}

_PLAIN = ConvProblem(
    op=ConvOp.FPROP,
    batch=3,
    in_channels=8,
    out_channels=12,
    input_size=(9, 11),
    kernel_size=(3, 3),
    stride=(1, 1),
    padding=(1, 1),
    dilation=(1, 1),
)

PROBLEMS = {
    "plain": _PLAIN,
    "one sample": _PLAIN.with_batch(1),
    "no sample": _PLAIN.with_batch(0),
    "bias": dataclasses.replace(_PLAIN, bias=True),
    "stride": dataclasses.replace(_PLAIN, stride=(2, 3)),
    "dilation": dataclasses.replace(_PLAIN, dilation=(2, 1)),
    "groups": dataclasses.replace(_PLAIN, groups=4),
    "depthwise": dataclasses.replace(_PLAIN, out_channels=8, groups=8),
    "pointwise": dataclasses.replace(_PLAIN, kernel_size=(1, 1), padding=(0, 0)),
    "sound": dataclasses.replace(
        _PLAIN, input_size=(40,), kernel_size=(5,), stride=(2,), padding=(2,), dilation=(1,)
    ),
    "volume": dataclasses.replace(
        _PLAIN,
        input_size=(4, 5, 6),
        kernel_size=(3, 3, 3),
        stride=(1, 2, 1),
        padding=(1, 1, 1),
        dilation=(1, 1, 2),
    ),
}


def _autograd(problem: ConvProblem, first: Tensor, second: Tensor, bias: Tensor | None) -> Tensor:
    """Return what PyTorch gives a user, through a real forward pass where the op is a gradient."""
    convolve = _CONVOLUTIONS[len(problem.input_size)]
    options = (problem.stride, problem.padding, problem.dilation, problem.groups)
    if problem.op is ConvOp.FPROP:
        return convolve(first, second, bias, *options)
    generator = torch.Generator().manual_seed(1)
    if problem.op is ConvOp.DGRAD:
        x, _, _ = operands(problem.with_op(ConvOp.FPROP), generator)
        y = convolve(x.requires_grad_(), second, None, *options)
        return torch.autograd.grad(y, x, first)[0]
    _, w, _ = operands(problem.with_op(ConvOp.FPROP), generator)
    y = convolve(first, w.requires_grad_(), None, *options)
    return torch.autograd.grad(y, w, second)[0]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("name", PROBLEMS)
def test_values_type_and_strides_are_those_of_autograd(
    name: str, op: ConvOp, layout: Layout, dtype: str
) -> None:
    problem = dataclasses.replace(
        PROBLEMS[name].with_op(op), layout=layout, filter_layout=layout, dtype=dtype
    )
    first, second, bias = operands(problem, torch.Generator().manual_seed(0))

    result = own_convolution(problem, first, second, bias)

    torch.testing.assert_close(result, _autograd(problem, first, second, bias), check_stride=True)


@pytest.mark.parametrize("op", [ConvOp.DGRAD, ConvOp.WGRAD])
def test_what_a_gradient_does_not_read_may_hold_nan(op: ConvOp) -> None:
    problem = _PLAIN.with_op(op)
    first, second, _ = operands(problem, torch.Generator().manual_seed(0))
    unread = unread_operand(problem).fill_(torch.nan)

    result = own_convolution(problem, first, second, unread=unread)

    torch.testing.assert_close(result, own_convolution(problem, first, second))


def test_fprop_reads_all_its_operands() -> None:
    with pytest.raises(ValueError, match="Only dgrad and wgrad take an operand that they do not read"):
        unread_operand(_PLAIN)


@pytest.mark.parametrize(
    ("spatial", "memory_format"), [(2, torch.channels_last), (3, torch.channels_last_3d)]
)
def test_channels_last_operands_have_the_strides_of_pytorch(
    spatial: int, memory_format: torch.memory_format
) -> None:
    problem = dataclasses.replace(
        PROBLEMS["plain" if spatial == 2 else "volume"],
        layout=Layout.CHANNELS_LAST,
        filter_layout=Layout.CHANNELS_LAST,
    )

    for tensor in operands(problem, torch.Generator())[:2]:
        assert tensor is not None
        assert tensor.stride() == torch.empty(tensor.shape, memory_format=memory_format).stride()


def test_one_seed_gives_the_same_operands() -> None:
    problem = dataclasses.replace(_PLAIN, bias=True)
    once, again = (operands(problem, torch.Generator().manual_seed(7)) for _ in range(2))

    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True) if a is not None and b is not None)


@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_job_runs_the_problem_and_knows_its_result(name: str, op: ConvOp) -> None:
    problem = PROBLEMS[name].with_op(op)

    prepared = prepare(own_job(problem).payload)
    result = prepared.run()

    assert prepared.problem == problem
    assert prepared.result_bytes == result.numel() * result.element_size()
