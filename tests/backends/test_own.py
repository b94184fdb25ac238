"""PyTorch's own convolution, against autograd."""

import dataclasses

import pytest
import torch
from torch import Tensor

from mucudnn.algorithms.own import operands, own_convolution, unread_operand
from mucudnn.backends.own import own_job, prepare
from mucudnn.problem import ConvOp, ConvProblem, Layout

_CONVOLUTIONS = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
_TRANSPOSED = {1: torch.conv_transpose1d, 2: torch.conv_transpose2d, 3: torch.conv_transpose3d}

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

_TURNED = [
    dataclasses.replace(_PLAIN, op=op, dtype="float64", is_apart=True) for op in (ConvOp.FPROP, ConvOp.WGRAD)
]
"""Gradients of a transposed convolution."""

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


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("name", PROBLEMS)
def test_those_of_transposed_convolutions_are_autograds_too(
    name: str, op: ConvOp, layout: Layout, dtype: str
) -> None:
    forward = dataclasses.replace(
        PROBLEMS[name].with_op(ConvOp.DGRAD),
        layout=layout,
        filter_layout=layout,
        dtype=dtype,
        bias=False,
        is_apart=True,
    )
    generator = torch.Generator().manual_seed(0)
    (image, weight, _), (gradient, _, _) = (
        operands(forward.with_op(each), generator) for each in (ConvOp.DGRAD, ConvOp.FPROP)
    )
    result = _TRANSPOSED[len(forward.input_size)](
        image.requires_grad_(),
        weight.requires_grad_(),
        None,
        forward.stride,
        forward.padding,
        forward.output_padding,
        forward.groups,
        forward.dilation,
    )
    dx, dw = torch.autograd.grad(result, (image, weight), gradient)
    expected, first, second = {
        ConvOp.DGRAD: (result, image, weight),
        ConvOp.FPROP: (dx, gradient, weight),
        ConvOp.WGRAD: (dw, gradient, image),
    }[op]

    found = own_convolution(forward.with_op(op), first.detach(), second.detach())

    torch.testing.assert_close(found, expected.detach(), check_stride=True, rtol=0, atol=0)


@pytest.mark.parametrize("problem", [_PLAIN.with_op(op) for op in (ConvOp.DGRAD, ConvOp.WGRAD)] + _TURNED)
def test_what_a_gradient_does_not_read_may_hold_nan(problem: ConvProblem) -> None:
    first, second, _ = operands(problem, torch.Generator().manual_seed(0))
    unread = unread_operand(problem)
    assert unread is not None

    result = own_convolution(problem, first, second, unread=unread.fill_(torch.nan))

    torch.testing.assert_close(result, own_convolution(problem, first, second))


def test_a_forward_pass_reads_all_its_operands() -> None:
    assert unread_operand(_PLAIN) is None
    assert unread_operand(_TURNED[0].with_op(ConvOp.DGRAD)) is None


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


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_job_runs_the_problem_and_knows_its_result(name: str, op: ConvOp, *, is_apart: bool) -> None:
    given = PROBLEMS[name]
    problem = dataclasses.replace(given, op=op, bias=given.bias and not is_apart, is_apart=is_apart)

    prepared = prepare(own_job(problem).payload)
    result = prepared.run()

    assert prepared.problem == problem
    assert prepared.result_bytes == result.numel() * result.element_size()
