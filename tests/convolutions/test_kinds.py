"""Every kind of convolution module, divided by a plan made by hand, beside its unpatched twin."""

import copy
import itertools
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradgradcheck
from torch.nn.utils import parametrizations

from mucudnn.errors import UntunedWarning
from mucudnn.patching.applying import patched_modules, plan_of, restore
from mucudnn.problem import ConvOp
from tests.convolutions.kinds import (
    BATCH,
    CONVOLUTIONS,
    TRANSPOSED,
    a_module,
    divided,
    every_kind,
    images_for,
    rank_of,
)
from tests.plans import algorithms_of

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-10
"""Of a largest difference in float64, relative to the largest number: ten times an algorithm's bound."""

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"padding": 1},
    "stride": {"stride": 2, "padding": 1},
    "dilation": {"dilation": 2, "padding": 2},
    "groups": {"groups": 2},
    "depthwise": {"groups": 4, "padding": 1},
    "no bias": {"bias": False},
}

OF_CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "same": {"padding": "same"},
    "same, even filter": {"padding": "same", "kernel_size": 2},
    "valid": {"padding": "valid"},
    "reflected": {"padding": 1, "padding_mode": "reflect"},
    "replicated": {"padding": 1, "padding_mode": "replicate"},
    "circular": {"padding": 1, "padding_mode": "circular"},
}

OF_TRANSPOSED: dict[str, dict[str, Any]] = {
    "output padding": {"stride": 3, "output_padding": 2},
    "output padding and padding": {"stride": 2, "output_padding": 1, "padding": 2},
}


def cases() -> Iterator[Any]:
    for kinds, own in ((CONVOLUTIONS, OF_CONVOLUTIONS), (TRANSPOSED, OF_TRANSPOSED)):
        for (name, kind), (what, settings) in itertools.product(kinds.items(), {**SETTINGS, **own}.items()):
            yield pytest.param(kind, settings, id=f"{name}-{what}")


every_case = pytest.mark.parametrize(("kind", "settings"), list(cases()))
every_kind_with_layouts = pytest.mark.parametrize(
    "kind", [nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d]
)


def assert_close(result: Tensor, expected: Tensor) -> None:
    scale = max(expected.abs().max().item(), 1.0)
    torch.testing.assert_close(result, expected, rtol=0, atol=TOLERANCE * scale)


def results_of(module: nn.Module, images: Tensor, *args: Any) -> list[Tensor]:
    """The output, and the gradients of the input and of the parameters."""
    y = module(images, *args)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return [y, *torch.autograd.grad((y * weights).sum(), [images, *module.parameters()])]


def assert_same(module: nn.Module, twin: nn.Module, images: Tensor, *args: Any) -> None:
    found, expected = (results_of(each, images, *args) for each in (module, twin))
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)
    # Gradients of parameters take the strides of these where they are accumulated.
    assert [each.stride() for each in found[:2]] == [each.stride() for each in expected[:2]]


@every_case
def test_outputs_and_gradients_are_those_of_the_twin(kind: type[Any], settings: dict[str, Any]) -> None:
    twin, images = a_module(kind, **settings), images_for(kind)
    module = divided(twin, images)

    assert_same(module, twin, images)
    assert {site.op for site in plan_of(module).sites} == {*ConvOp}
    assert len(algorithms_of(plan_of(module))) > 1


@every_kind
def test_something_other_than_pytorchs_own_runs(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    twin, images = a_module(kind), images_for(kind)
    module = divided(twin, images)

    def own(*_: Any) -> Tensor:
        raise AssertionError

    base, method = kind, "forward" if kind in TRANSPOSED.values() else "_conv_forward"
    with monkeypatch.context() as patched:
        patched.setattr(base, method, own)
        result = module(images)

    assert_close(result, twin(images))


@every_kind
def test_one_sample_without_a_batch_is_a_batch_of_one(kind: type[Any]) -> None:
    twin, images = a_module(kind), images_for(kind, samples=1)
    module = divided(twin, images)

    assert_same(module, twin, images[0].detach().requires_grad_())


@every_kind
@pytest.mark.parametrize("samples", [1, 3, BATCH - 1])
def test_smaller_batches_run_by_the_same_plan(kind: type[Any], samples: int) -> None:
    twin = a_module(kind, padding=1)
    module = divided(twin, images_for(kind))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(module, twin, images_for(kind, samples))


@every_kind
def test_a_larger_batch_runs_pytorchs_own_and_says_so_once(kind: type[Any]) -> None:
    twin = a_module(kind)
    module = divided(twin, images_for(kind))

    with pytest.warns(UntunedWarning, match="was tuned for") as told:
        results = [module(images_for(kind, 9)) for _ in range(2)]

    assert all(torch.equal(result, twin(images_for(kind, 9))) for result in results)
    assert len(told) == 1


@every_kind_with_layouts
def test_channels_last_comes_out_as_pytorch_gives_it(kind: type[Any]) -> None:
    order = torch.channels_last if rank_of(kind) == 2 else torch.channels_last_3d
    twin = a_module(kind, padding=1).to(memory_format=order)
    images = images_for(kind).detach().contiguous(memory_format=order).requires_grad_()

    assert_same(divided(twin, images), twin, images)


@every_kind
def test_second_derivatives_are_pytorchs(kind: type[Any]) -> None:
    twin = a_module(kind)
    images = images_for(kind, samples=3)[..., :4].detach().requires_grad_()
    module = divided(twin, images)

    assert gradgradcheck(module, (images,), nondet_tol=1e-10, fast_mode=rank_of(kind) == 3)


@every_kind
def test_frozen_weights_and_inputs_need_no_gradient(kind: type[Any]) -> None:
    twin = a_module(kind)
    images = images_for(kind).detach()
    module = divided(twin, images)
    forward = ConvOp.FPROP if kind in CONVOLUTIONS.values() else ConvOp.DGRAD
    assert {site.op for site in plan_of(module).sites} == {forward, ConvOp.WGRAD}
    for each in (module, twin):
        each.get_parameter("weight").requires_grad_(requires_grad=False)

    (result,) = torch.autograd.grad(module(images).sum(), [module.get_parameter("bias")])
    (expected,) = torch.autograd.grad(twin(images).sum(), [twin.get_parameter("bias")])
    assert_close(result, expected)


@every_kind
def test_computed_weights_are_divided_too(kind: type[Any]) -> None:
    twin = parametrizations.weight_norm(a_module(kind))
    images = images_for(kind)

    assert_same(divided(twin, images), twin, images)


@every_kind_with_layouts
def test_computed_weights_of_one_channel_are_divided_in_channels_last(kind: type[Any]) -> None:
    # Lengths of 1 leave it open whether they are contiguous; computing them settles it.
    order = torch.channels_last if rank_of(kind) == 2 else torch.channels_last_3d
    twin = parametrizations.weight_norm(a_module(kind, groups=4)).to(memory_format=order)
    images = images_for(kind).detach().contiguous(memory_format=order).requires_grad_()
    module = divided(twin, images)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UntunedWarning)
        assert_same(module, twin, images)


@every_kind
def test_copies_and_pickles_run_divided_and_restoring_leaves_nothing(kind: type[Any]) -> None:
    twin, images = a_module(kind), images_for(kind)
    module = divided(twin, images)

    for each in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_same(each, twin, images)
        assert plan_of(each) == plan_of(module)
    before = {*twin.__dict__}
    assert {*restore(module).__dict__} == before
    assert torch.equal(module(images), twin(images))


@every_kind
def test_under_autocast_types_are_those_of_the_twin(kind: type[Any]) -> None:
    twin = a_module(kind).float()
    images = images_for(kind).detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        module = divided(twin, images)
        found, expected = (results_of(each, images) for each in (module, twin))

    assert {assigned.problem.dtype for assigned in plan_of(module).assignments} == {"bfloat16"}
    for result, own in zip(found, expected, strict=True):
        assert result.dtype is own.dtype
        torch.testing.assert_close(result, own, rtol=3e-2, atol=3e-2 * own.abs().max().item())


@pytest.mark.parametrize("kind", TRANSPOSED.values())
def test_a_size_that_is_asked_for_is_given(kind: type[Any]) -> None:
    twin, images = a_module(kind, stride=2), images_for(kind)
    module = divided(twin, images)
    sizes = [[2 * size + 1 + more for size in images.shape[2:]] for more in (0, 1)]

    assert_same(module, twin, images, sizes[0])
    with pytest.warns(UntunedWarning, match="was tuned for"):
        assert_same(module, twin, images, sizes[1])


@every_kind
def test_replicas_compute_with_their_own_weights(kind: type[Any]) -> None:
    twin, images = a_module(kind), images_for(kind)
    replica = divided(twin, images)._replicate_for_data_parallel()
    for name, parameter in twin.named_parameters():
        setattr(replica, name, 2 * parameter.detach())

    assert_close(replica(images), 2 * twin(images))


@pytest.mark.parametrize("kind", TRANSPOSED.values())
def test_replicas_of_transposed_ones_run_undivided_and_may_be_replicated_themselves(kind: type[Any]) -> None:
    twin, images = a_module(kind), images_for(kind)
    replica = divided(twin, images)._replicate_for_data_parallel()
    for name, parameter in twin.named_parameters():
        setattr(replica, name, 2 * parameter.detach())

    assert patched_modules(replica) == {}
    assert_close(replica._replicate_for_data_parallel()(images), 2 * twin(images))


@every_kind
@pytest.mark.parametrize("samples", [BATCH, BATCH + 1])
@pytest.mark.filterwarnings("ignore:.*it runs PyTorch's own convolution")
def test_weights_are_computed_once_a_call(kind: type[Any], samples: int) -> None:
    twin = parametrizations.spectral_norm(a_module(kind))
    images = images_for(kind)
    module = divided(twin, images)
    given = images_for(kind, samples)

    for _ in range(3):
        assert_close(module(given), twin(given))


@every_kind
def test_settings_may_be_numbers_lists_and_tensors_of_one_number(kind: type[Any]) -> None:
    twin, images = a_module(kind), images_for(kind)
    twin.stride = 2  # type: ignore[assignment]  # PyTorch takes it
    if kind in CONVOLUTIONS.values():
        twin.padding = 1  # type: ignore[assignment]
    module = divided(twin, images)

    assert_same(module, twin, images)
    for stride in ([2] * rank_of(kind), torch.tensor(2)):
        module.stride = stride  # type: ignore[assignment]
        assert_same(module, twin, images)


@every_kind
def test_a_bias_of_another_shape_is_pytorchs_matter(kind: type[Any]) -> None:
    twin, images = a_module(kind), images_for(kind)
    module = divided(twin, images)
    for each in (module, twin):
        each.bias = nn.Parameter(torch.ones(1, dtype=torch.float64))

    with pytest.raises(RuntimeError) as expected:
        twin(images)
    with pytest.raises(RuntimeError) as raised:
        module(images)
    assert str(raised.value) == str(expected.value)


@every_kind
@pytest.mark.parametrize("lacking", ["image", "weight"])
def test_a_call_that_lacks_a_tensor_is_refused_with_the_words_of_the_twin(
    kind: type[Any], lacking: str
) -> None:
    twin, images = a_module(kind), images_for(kind)
    module = divided(twin, images)
    if lacking == "weight":
        for each in (module, twin):
            each.weight = None

    given = None if lacking == "image" else images
    with pytest.raises((TypeError, AttributeError)) as expected:
        twin(given)
    with pytest.raises(expected.type) as raised:
        module(given)
    assert str(raised.value) == str(expected.value)


@pytest.mark.parametrize("kind", TRANSPOSED.values())
def test_what_pytorch_refuses_is_refused_with_its_words(kind: type[Any]) -> None:
    twin, images = a_module(kind, stride=2), images_for(kind)
    module = divided(twin, images)

    with pytest.raises(ValueError, match="requested an output size"):
        module(images, [99] * rank_of(kind))
    with pytest.raises(TypeError):
        module(images, wrong=1)
