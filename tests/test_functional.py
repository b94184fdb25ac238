"""The divided convolution is PyTorch's convolution: values, gradients, refusals."""

import dataclasses
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad

from mucudnn import functional
from mucudnn.backends import PartKernel, PartSumKernel
from mucudnn.backends.cpu.backend import CpuBackend
from mucudnn.convolutions.calls import ConvArguments, obstacle, problem_of
from mucudnn.division import Division
from mucudnn.errors import BackendError, OptionError, ProblemError
from mucudnn.execution.workspace import Owner, release_workspaces, workspace_of
from mucudnn.functional import DividedConvolution, divided_conv
from mucudnn.problem import ConvOp, ConvProblem, Layout
from mucudnn.profile import Candidate
from tests.divisions import a_division
from tests.functional_cases import (
    ABSOLUTE_BOUND,
    BACKEND,
    CASES,
    EVERY,
    EVERY_ALGORITHM,
    MARKS,
    OWN,
    PLAIN,
    Case,
    arranged,
    assert_close,
    channels_last,
    contiguous,
    divisions,
    gradients,
    plain_problem,
    tensors,
    torch_conv,
    uneven,
)
from tests.operands import a_convolution

pytestmark = MARKS

# Values and gradients.


@pytest.mark.parametrize(("case", "algorithm"), EVERY)
def test_the_value_is_pytorchs(case: Case, algorithm: str) -> None:
    x, w, bias = tensors(case)

    y = divided_conv(x, w, bias, **case.arguments, **uneven(algorithm))

    assert_close(y, torch_conv(x, w, bias, **case.arguments))


@pytest.mark.parametrize(("case", "algorithm"), EVERY)
def test_the_gradients_are_pytorchs(case: Case, algorithm: str) -> None:
    wanted = tensors(case)

    results = gradients(divided_conv(*wanted, **case.arguments, **uneven(algorithm)), wanted)

    for result, expected in zip(
        results, gradients(torch_conv(*wanted, **case.arguments), wanted), strict=True
    ):
        assert_close(result, expected)


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_no_bias_is_needed(algorithm: str) -> None:
    x, w, _ = tensors(PLAIN)

    y = divided_conv(x, w, padding=2, **uneven(algorithm))

    assert_close(y, torch_conv(x, w, padding=2))
    for result, expected in zip(
        gradients(y, (x, w)), gradients(torch_conv(x, w, padding=2), (x, w)), strict=True
    ):
        assert_close(result, expected)


@pytest.mark.parametrize("batches", [(5,), (1, 1, 1, 1, 1), (1, 4), (4, 1), (2, 1, 2)])
@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_any_parts_give_the_same(algorithm: str, batches: tuple[int, ...]) -> None:
    wanted = tensors(PLAIN)

    y = divided_conv(*wanted, **PLAIN.arguments, **divisions(algorithm, *batches))

    expected = torch_conv(*wanted, **PLAIN.arguments)
    assert_close(y, expected)
    for result, gradient in zip(gradients(y, wanted), gradients(expected, wanted), strict=True):
        assert_close(result, gradient)


@pytest.mark.parametrize("divided", ["fprop", "dgrad", "wgrad"])
def test_an_op_without_a_division_runs_pytorchs_own(divided: str) -> None:
    wanted = tensors(PLAIN)

    y = divided_conv(*wanted, **PLAIN.arguments, **{divided: a_division("cpu:winograd4", 3, 2)})

    expected = torch_conv(*wanted, **PLAIN.arguments)
    results = {"fprop": y} | dict(zip(("dgrad", "wgrad"), gradients(y, wanted), strict=False))
    own = {"fprop": expected} | dict(zip(("dgrad", "wgrad"), gradients(expected, wanted), strict=False))
    for op, result in results.items():
        assert_close(result, own[op])
        assert torch.equal(result, own[op]) is (op != divided)


def test_without_divisions_it_is_pytorchs_own_bit_by_bit() -> None:
    wanted = tensors(PLAIN)

    y = divided_conv(*wanted, **PLAIN.arguments)

    expected = torch_conv(*wanted, **PLAIN.arguments)
    assert torch.equal(y, expected)
    for result, gradient in zip(gradients(y, wanted), gradients(expected, wanted), strict=True):
        assert torch.equal(result, gradient)


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_one_sample_without_a_batch_is_taken(algorithm: str) -> None:
    x, w, bias = tensors(PLAIN)
    sample = x[0].detach().requires_grad_()

    y = divided_conv(sample, w, bias, padding=2, **divisions(algorithm, 1))

    expected = torch_conv(sample, w, bias, padding=2)
    assert_close(y, expected)
    assert_close(gradients(y, (sample,))[0], gradients(expected, (sample,))[0])


@pytest.mark.parametrize("padding", ["same", 1])
def test_one_sound_without_a_batch_is_taken(padding: str | int) -> None:
    x, w, bias = tensors(CASES["1-D"])

    y = divided_conv(x[0], w, bias, padding=padding, **divisions("cpu:im2col", 1))

    assert_close(y, torch_conv(x[0], w, bias, padding=padding))


# Derivatives as finite differences see them.

SMALL = Case((3, 2, 4, 3), (2, 2, 3, 3), {"padding": 1})
SMALL_ALGORITHMS = (OWN, "cpu:im2col", "cpu:winograd2", "cpu:winograd4", "cpu:cc_winograd4")


@pytest.mark.parametrize("algorithm", SMALL_ALGORITHMS)
def test_the_gradients_are_those_of_finite_differences(algorithm: str) -> None:
    def call(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return divided_conv(x, w, bias, **SMALL.arguments, **divisions(algorithm, 2, 1))

    assert torch.autograd.gradcheck(call, tensors(SMALL))


@pytest.mark.parametrize("algorithm", SMALL_ALGORITHMS)
def test_the_second_derivatives_are_those_of_finite_differences(algorithm: str) -> None:
    def call(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return divided_conv(x, w, bias, **SMALL.arguments, **divisions(algorithm, 2, 1))

    assert torch.autograd.gradgradcheck(call, tensors(SMALL), fast_mode=True)


@pytest.mark.parametrize("name", ["2-D, same, even", "2-D, groups", "1-D", "3-D"])
def test_a_penalty_on_a_gradient_can_be_trained(name: str) -> None:
    case = CASES[name]
    x, w, bias = tensors(case)

    def penalty_gradients(y: Tensor) -> tuple[Tensor, ...]:
        (dx,) = gradients(y.square(), (x,), create_graph=True)
        return torch.autograd.grad(dx.square().sum(), (x, w, bias))

    results = penalty_gradients(divided_conv(x, w, bias, **case.arguments, **uneven("cpu:im2col")))

    expected = penalty_gradients(torch_conv(x, w, bias, **case.arguments))
    for result, gradient in zip(results, expected, strict=True):
        assert_close(result, gradient)


# What wants a gradient.


@pytest.mark.parametrize("wanting", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_only_what_wants_a_gradient_gets_one(wanting: tuple[int, ...]) -> None:
    given = [tensor.requires_grad_(place in wanting) for place, tensor in enumerate(tensors(PLAIN))]
    wanted = [given[place] for place in wanting]

    divided_conv(*given, **PLAIN.arguments, **uneven("cpu:winograd4")).sum().backward()

    expected = torch.autograd.grad(torch_conv(*given, **PLAIN.arguments).sum(), wanted)
    assert [tensor.grad is not None for tensor in given] == [place in wanting for place in range(3)]
    for tensor, gradient in zip(wanted, expected, strict=True):
        assert tensor.grad is not None
        assert_close(tensor.grad, gradient)


class CountingBackend(CpuBackend):
    """The processor, which notes the ops for which kernels were made."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[ConvOp] = set()

    def slice_kernel(self, problem: ConvProblem, algorithm: str, buffer: Tensor) -> PartKernel:
        self.ops.add(problem.op)
        return super().slice_kernel(problem, algorithm, buffer)

    def sum_kernel(self, problem: ConvProblem, algorithm: str, buffer: Tensor) -> PartSumKernel:
        self.ops.add(problem.op)
        return super().sum_kernel(problem, algorithm, buffer)


@pytest.mark.parametrize(
    ("wanting", "ops"),
    [
        ((0,), {ConvOp.FPROP, ConvOp.DGRAD}),
        ((1,), {ConvOp.FPROP, ConvOp.WGRAD}),
        ((2,), {ConvOp.FPROP}),
        ((0, 1, 2), set(ConvOp)),
    ],
)
def test_a_gradient_that_nobody_wants_is_not_computed(wanting: tuple[int, ...], ops: set[ConvOp]) -> None:
    given = [tensor.requires_grad_(place in wanting) for place, tensor in enumerate(tensors(PLAIN))]
    backend = CountingBackend()
    convolution = DividedConvolution(
        backend, plain_problem(), dict.fromkeys(ConvOp, a_division("cpu:im2col", 3, 2))
    )

    convolution(*given).sum().backward()

    assert backend.ops == ops


def counting_convolution(backend: CountingBackend, *, bias: bool = True) -> DividedConvolution:
    problem = dataclasses.replace(plain_problem(), bias=bias)
    return DividedConvolution(backend, problem, dict.fromkeys(ConvOp, a_division("cpu:im2col", 3, 2)))


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("wanted", "op"), [((0,), {ConvOp.DGRAD}), ((1,), {ConvOp.WGRAD}), ((0, 1), {ConvOp.DGRAD, ConvOp.WGRAD})]
)
def test_a_gradient_that_a_pass_does_not_use_is_not_computed(
    wanted: tuple[int, ...], op: set[ConvOp], bias: bool, is_leaf: bool
) -> None:
    given = [tensor if is_leaf else tensor.clone() for tensor in tensors(PLAIN)][: 2 + bias]
    used = [given[place] for place in wanted]
    backend = CountingBackend()
    convolution = counting_convolution(backend, bias=bias)

    results = torch.autograd.grad(convolution(*given, *(() if bias else (None,))).square().sum(), used)

    expected = torch.autograd.grad(torch_conv(*given, **PLAIN.arguments).square().sum(), used)
    assert backend.ops == {ConvOp.FPROP} | op
    for result, gradient in zip(results, expected, strict=True):
        assert_close(result, gradient)


def test_a_pass_into_some_tensors_computes_what_leads_to_them() -> None:
    x, w, bias = tensors(PLAIN)
    image = x * 2
    backend = CountingBackend()

    counting_convolution(backend)(image, w, bias).sum().backward(inputs=[x])

    assert backend.ops == {ConvOp.FPROP, ConvOp.DGRAD}
    assert [tensor.grad is None for tensor in (x, w, bias)] == [False, True, True]


class Ended(torch.autograd.Function):
    """The identity, through which no gradient flows."""

    @staticmethod
    def forward(_ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> None:
        return None


def test_where_no_gradient_comes_none_is_made_of_it() -> None:
    given = tensors(PLAIN)
    backend = CountingBackend()

    Ended.apply(counting_convolution(backend)(*given)).sum().backward()

    assert backend.ops == {ConvOp.FPROP}
    assert [tensor.grad for tensor in given] == [None, None, None]


def test_every_op_works_in_the_workspace_of_its_owner() -> None:
    release_workspaces()
    owners = {op: Owner() for op in ConvOp}
    given = dict.fromkeys(ConvOp, a_division("cpu:winograd4", 3, 2))

    DividedConvolution(BACKEND, plain_problem(), given, owners)(*tensors(PLAIN)).sum().backward()

    for op, owner in owners.items():
        part = dataclasses.replace(plain_problem(), op=op, batch=3)
        assert workspace_of(BACKEND, owner).n_bytes == BACKEND.buffer_bytes(part, "cpu:winograd4")
    assert workspace_of(BACKEND).n_bytes == 0


def test_nothing_is_recorded_where_nothing_wants_a_gradient() -> None:
    given = [tensor.requires_grad_(False) for tensor in tensors(PLAIN)]  # noqa: FBT003  # torch's own

    y = divided_conv(*given, **PLAIN.arguments, **uneven("cpu:winograd4"))

    assert not y.requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_nothing_is_recorded_where_gradients_are_off(algorithm: str, mode: Callable[[], Any]) -> None:
    given = tensors(PLAIN)

    with mode():
        y = divided_conv(*given, **PLAIN.arguments, **uneven(algorithm))
        expected = torch_conv(*given, **PLAIN.arguments)

    assert not y.requires_grad
    assert y.is_inference() is expected.is_inference()
    assert_close(y, expected)


def test_gradients_add_up_over_two_passes() -> None:
    x, w, bias = tensors(PLAIN)

    for _ in range(2):
        divided_conv(x, w, bias, **PLAIN.arguments, **uneven("cpu:im2col")).sum().backward()

    (expected,) = torch.autograd.grad(torch_conv(x, w, bias, **PLAIN.arguments).sum(), (w,))
    assert w.grad is not None
    assert_close(w.grad, 2 * expected)


def test_one_graph_can_be_run_backward_twice() -> None:
    wanted = tensors(PLAIN)
    y = divided_conv(*wanted, **PLAIN.arguments, **uneven("cpu:winograd4"))

    first, second = (gradients(y, wanted, retain_graph=True) for _ in range(2))

    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_weight_that_was_changed_before_backward_is_noticed() -> None:
    wanted = tensors(PLAIN)
    y = divided_conv(*wanted, **PLAIN.arguments, **uneven("cpu:winograd4"))

    with torch.no_grad():
        wanted[1].add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# What is left to PyTorch.


def test_a_batch_of_nothing_is_pytorchs() -> None:
    x, w, bias = tensors(PLAIN)
    nothing = x[:0]

    y = divided_conv(nothing, w, bias, **PLAIN.arguments)
    y.sum().backward()

    assert y.shape == (0, 4, 7, 8)
    assert w.grad is not None
    assert not w.grad.any()


def test_under_autocast_the_result_and_the_gradients_are_those_of_its_type() -> None:
    given, wanted = (tensors(PLAIN, torch.float32) for _ in range(2))

    with torch.autocast("cpu", torch.bfloat16):
        y = divided_conv(*given, **PLAIN.arguments, **uneven("cpu:aten"))
        expected = torch_conv(*wanted, **PLAIN.arguments)

    assert y.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    for result, own in zip(gradients(y, given), gradients(expected, wanted), strict=True):
        assert result.dtype is own.dtype is torch.float32
        torch.testing.assert_close(result, own, rtol=3e-2, atol=3e-2 * own.abs().max().item())


def test_types_that_differ_are_refused_as_pytorch_refuses_them() -> None:
    x, w, bias = tensors(PLAIN)

    with pytest.raises(RuntimeError, match="should be the same"):
        divided_conv(x.float(), w, bias, **PLAIN.arguments, **uneven("cpu:im2col"))


def test_a_bias_of_another_type_is_refused_as_pytorch_refuses_it() -> None:
    x, w, bias = tensors(PLAIN)

    with pytest.raises(RuntimeError, match="should be the same"):
        divided_conv(x, w, bias.float(), **PLAIN.arguments, **uneven("cpu:im2col"))


def test_a_transformed_function_is_left_to_pytorch() -> None:
    x, w, bias = tensors(PLAIN)
    weights = torch.stack([w, 2 * w]).detach()

    y = torch.func.vmap(
        lambda one: divided_conv(x.detach(), one, bias.detach(), padding=2, **uneven("cpu:im2col"))
    )(weights)

    assert_close(y[1], torch_conv(x, 2 * w, bias, padding=2))


# PyTorch itself calls what it deprecates when a first forward derivative is taken.
@pytest.mark.filterwarnings("ignore:.torch.jit.")
def test_forward_derivatives_are_left_to_pytorch() -> None:
    x, w, bias = (tensor.detach() for tensor in tensors(PLAIN))

    with forward_ad.dual_level():
        y = divided_conv(forward_ad.make_dual(x, x), w, bias, padding=2, **uneven("cpu:im2col"))
        derivative = forward_ad.unpack_dual(y).tangent

    assert derivative is not None
    assert_close(derivative, torch_conv(x, w, padding=2))


class Hidden(Tensor):
    """A tensor that has no memory: its numbers are another's."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Hidden":
        wrapped: Hidden = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]  # PyTorch has no hints of it
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype
        )
        wrapped.inner = inner
        return wrapped

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*(each.inner if isinstance(each, Hidden) else each for each in args), **(kwargs or {}))


@pytest.mark.parametrize("algorithm", ["cpu:winograd4", "cpu:cc_winograd4"])
def test_a_bias_without_memory_is_left_to_pytorch(algorithm: str) -> None:
    x, w, bias = (tensor.detach() for tensor in tensors(PLAIN))

    y = divided_conv(x, w, Hidden(bias), **PLAIN.arguments, **uneven(algorithm))

    assert_close(y, torch_conv(x, w, bias, **PLAIN.arguments))


@pytest.mark.parametrize("algorithm", ["cpu:winograd4", "cpu:cc_winograd4"])
def test_saved_tensors_that_come_back_without_memory_are_left_to_pytorch(algorithm: str) -> None:
    wanted = tensors(PLAIN)
    with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Hidden):
        y = divided_conv(*wanted, **PLAIN.arguments, **uneven(algorithm))

    results = gradients(y, wanted)

    expected = gradients(torch_conv(*wanted, **PLAIN.arguments), wanted)
    for result, gradient in zip(results, expected, strict=True):
        assert_close(result, gradient)


def _laid_out_otherwise(tensor: Tensor) -> Tensor:
    """The same values, of which neither rows nor channels lie next to each other."""
    return tensor.permute(*reversed(range(tensor.dim()))).contiguous().permute(*reversed(range(tensor.dim())))


@pytest.mark.parametrize("first", [contiguous, channels_last])
@pytest.mark.parametrize("back", [contiguous, channels_last, _laid_out_otherwise])
@pytest.mark.parametrize(
    ("name", "algorithm"), [(name, each) for name in ("2-D", "2-D, 1x1") for each in CASES[name].algorithms]
)
def test_saved_tensors_that_come_back_in_another_layout_do(
    name: str, algorithm: str, back: Callable[[Tensor], Tensor], first: Callable[[Tensor], Tensor]
) -> None:
    case, wanted = CASES[name], tensors(CASES[name])
    with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, back):
        y = divided_conv(first(wanted[0]), *wanted[1:], **case.arguments, **uneven(algorithm))

    results = gradients(y, wanted)

    expected = gradients(torch_conv(*wanted, **case.arguments), wanted)
    for result, gradient in zip(results, expected, strict=True):
        assert_close(result, gradient)


@pytest.mark.parametrize("algorithm", [OWN, "cpu:im2col", "cpu:winograd4", "cpu:cc_winograd4"])
@pytest.mark.parametrize(
    "pack",
    [Tensor.bfloat16, lambda tensor: tensor[: len(tensor) // 2], lambda tensor: torch.cat([tensor, tensor])],
    ids=["another type", "half", "twice"],
)
def test_saved_tensors_of_which_others_come_back_are_refused_as_pytorch_does(
    pack: Callable[[Tensor], Tensor], algorithm: str
) -> None:
    wanted = tensors(PLAIN)
    with torch.autograd.graph.saved_tensors_hooks(pack, Tensor.detach):
        y = divided_conv(*wanted, **PLAIN.arguments, **uneven(algorithm))
        expected = torch_conv(*wanted, **PLAIN.arguments)

    with pytest.raises(RuntimeError) as told:
        gradients(expected, wanted)
    with pytest.raises(RuntimeError, match=f"^{re.escape(str(told.value))}$"):
        gradients(y, wanted)


@pytest.mark.parametrize("algorithm", ["cpu:winograd4", "cpu:cc_winograd4"])
def test_saved_tensors_that_come_back_without_values_end_no_process(algorithm: str) -> None:
    wanted = tensors(PLAIN)
    with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor.to("meta")):
        y = divided_conv(*wanted, **PLAIN.arguments, **uneven(algorithm))

    dx, dw, _ = gradients(y, wanted)  # whatever they hold, as PyTorch's own

    assert (dx.shape, dw.shape) == (wanted[0].shape, wanted[1].shape)


# Refusals.


@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
def test_a_division_of_another_batch_is_refused(op: str) -> None:
    with pytest.raises(ValueError, match=r"The division must be of 5 samples, but got 4\."):
        divided_conv(*tensors(PLAIN), **PLAIN.arguments, **{op: a_division("cpu:im2col", 2, 2)})


def test_divisions_of_two_backends_are_refused() -> None:
    with pytest.raises(OptionError, match=r"All divisions must belong to one backend, but got cpu, gpu\."):
        divided_conv(*tensors(PLAIN), fprop=a_division(OWN, 5), dgrad=a_division("gpu:direct", 5))


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(OptionError, match=r"backend must be one of .*, but got 'gpu'\."):
        divided_conv(*tensors(PLAIN), fprop=a_division("gpu:direct", 5))


def test_divisions_of_another_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="cudnn", device=torch.device("cuda", 0))
    monkeypatch.setattr(functional, "backend_for", lambda *_: card)
    x, w = torch.zeros(2, 3, 8, 8), torch.zeros(4, 3, 3, 3)

    with pytest.raises(
        OptionError, match=r"^Divisions of the backend 'cudnn' must run on cuda, but .* cpu\.$"
    ):
        divided_conv(x, w, fprop=a_division("cudnn:eng1", 2))


@pytest.mark.parametrize("divided", [{}, {"fprop": a_division("cpu:winograd4", 2)}])
def test_tensors_without_values_have_results_without_values(divided: dict[str, Division]) -> None:
    x, w = torch.zeros(2, 3, 8, 8, device="meta"), torch.zeros(4, 3, 3, 3, device="meta")

    y = divided_conv(x, w, **divided)

    assert (y.device.type, y.shape) == ("meta", (2, 4, 6, 6))


def test_what_ran_before_is_refused_once_the_users_flags_forbid_it(monkeypatch: pytest.MonkeyPatch) -> None:
    image, weight = torch.ones(2, 3, 6, 6), torch.ones(4, 3, 3, 3)
    division = Division((Candidate("cpu:im2col", 2, 0.0, 0),))
    divided_conv(image, weight, fprop=division)
    monkeypatch.setattr(CpuBackend, "flags", lambda _: "others")
    monkeypatch.setattr(CpuBackend, "computes", lambda *_: False)

    with pytest.raises(BackendError, match="but got 'cpu:im2col'"):
        divided_conv(image, weight, fprop=division)


@pytest.mark.parametrize("algorithm", ["cpu:winograd4", "cpu:unknown"])
def test_an_algorithm_that_cannot_compute_it_is_refused(algorithm: str) -> None:
    with pytest.raises(BackendError, match=f"the algorithm must be one of .*, but got '{algorithm}'"):
        divided_conv(*tensors(PLAIN), stride=2, fprop=a_division(algorithm, 5))


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_a_filter_for_other_channels_is_refused(channels: int) -> None:
    x, w, bias = tensors(dataclasses.replace(PLAIN, weight=(4, channels, 5, 5)))

    with pytest.raises(ProblemError, match=rf"must have the filter's {channels} channels, but got 3 for"):
        divided_conv(x, w, bias, **uneven("cpu:im2col"))


@pytest.mark.parametrize("shape", [(1,), (3,), (4, 1), ()])
def test_a_bias_for_other_channels_is_refused(shape: tuple[int, ...]) -> None:
    x, w, _ = tensors(PLAIN)

    with pytest.raises(ProblemError, match=r"The bias must have shape \(4,\), but got "):
        divided_conv(x, w, torch.zeros(shape, dtype=torch.float64), **uneven("cpu:im2col"))


def test_an_image_that_is_too_small_is_refused() -> None:
    x, w, bias = tensors(PLAIN)

    with pytest.raises(ProblemError, match="The filter must fit into the padded image"):
        divided_conv(x[..., :3], w, bias, **uneven("cpu:im2col"))


@pytest.mark.parametrize("dimensions", [2, 5])
def test_an_image_of_other_dimensions_is_refused(dimensions: int) -> None:
    _, w, bias = tensors(PLAIN)

    with pytest.raises(ProblemError, match=rf"the input as many or one less, but got 4 and {dimensions}\."):
        divided_conv(torch.zeros((3,) * dimensions, dtype=torch.float64), w, bias)


def test_a_padding_of_another_name_is_refused() -> None:
    with pytest.raises(OptionError, match="padding must be numbers, 'same' or 'valid', but got 'full'"):
        divided_conv(*tensors(PLAIN), padding="full")


def test_strides_are_refused_with_the_same_size() -> None:
    with pytest.raises(OptionError, match=r"padding 'same' needs stride 1, but got \(2, 1\)"):
        divided_conv(*tensors(PLAIN), stride=(2, 1), padding="same")


# Any division of any batch.


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rank = draw(st.integers(1, 3))
    each = st.integers(1, 3)

    def one_for_each(numbers: st.SearchStrategy[int]) -> tuple[int, ...]:
        return tuple(draw(st.lists(numbers, min_size=rank, max_size=rank)))

    groups = draw(st.sampled_from([1, 1, 2]))
    c, k = groups * draw(each), groups * draw(each)
    taps, dilation, stride = (
        one_for_each(st.integers(1, 5 if rank < 3 else 3)),
        one_for_each(each),
        one_for_each(each),
    )
    if draw(st.booleans()):
        dilation = stride = (1,) * rank
    padding = one_for_each(st.integers(0, 4))
    size = tuple(
        max(1, d * (r - 1) + 1 - 2 * p) + extra
        for d, r, p, extra in zip(dilation, taps, padding, one_for_each(st.integers(0, 6)), strict=True)
    )
    arguments = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return Case((draw(st.integers(1, 6)), c, *size), (k, c // groups, *taps), arguments)


def algorithms_for(case: Case, op: ConvOp, layout: Layout) -> tuple[str, ...]:
    n, c, *size = case.image
    problem = a_convolution(
        op=op,
        batch=n,
        in_channels=c,
        out_channels=case.weight[0],
        input_size=tuple(size),
        kernel_size=case.weight[2:],
        dtype="float64",
        layout=layout,
        **case.arguments,
    )
    return BACKEND.algorithms(problem)


@st.composite
def some_division(draw: st.DrawFn, case: Case, op: ConvOp, layout: Layout) -> Division:
    algorithms = st.sampled_from(algorithms_for(case, op, layout))
    parts, left = [], case.image[0]
    while left:
        parts.append(Candidate(draw(algorithms), draw(st.integers(1, left)), 0.0, 0))
        left -= parts[-1].batch
    return Division.of(parts)


@given(data=st.data(), case=cases(), is_channels_last=st.booleans())
@settings(max_examples=150)
def test_any_division_of_any_batch_gives_what_is_undivided(
    data: st.DataObject, case: Case, is_channels_last: bool
) -> None:
    is_channels_last = is_channels_last and len(case.image) > 3
    arrangement = channels_last if is_channels_last else contiguous
    wanted = arranged(case, arrangement, arrangement)
    layout = problem_of(*wanted[:2], has_bias=True, arguments=ConvArguments(**case.arguments)).layout
    given = {str(op): data.draw(some_division(case, op, layout), label=str(op)) for op in ConvOp}

    y = divided_conv(*wanted, **case.arguments, **given)

    expected = torch_conv(*wanted, **case.arguments)
    for result, own in zip((y, *gradients(y, wanted)), (expected, *gradients(expected, wanted)), strict=True):
        torch.testing.assert_close(result, own, rtol=0, atol=ABSOLUTE_BOUND)


def test_a_device_that_knows_no_autocast_is_no_obstacle() -> None:
    image, weight = (tensor.to("meta") for tensor in tensors(PLAIN)[:2])

    assert obstacle(image, weight) is None


def test_what_has_no_values_goes_through_the_autocast_of_a_device() -> None:
    x, w = torch.zeros(2, 3, 8, 8, device="meta"), torch.zeros(4, 3, 3, 3, device="meta")

    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = divided_conv(x, w)

    assert (y.dtype, y.shape) == (torch.float32, (2, 4, 6, 6))
