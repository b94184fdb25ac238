"""A patched model and its unpatched twin: the same numbers, whatever they are computed in."""

import copy
import dataclasses
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.fusion import fuse_conv_bn_eval

from mucudnn.backends import backend_of
from mucudnn.choices import Mode
from mucudnn.division import Division
from mucudnn.errors import UntunedWarning
from mucudnn.execution.workspace import _workspaces, release_workspaces, workspace_of
from mucudnn.patching.applying import apply, plan_of
from mucudnn.problem import ConvOp
from mucudnn.profile import Candidate
from tests.graphs import DYNAMOS
from tests.models import a_batch, a_chain
from tests.patching.twins import (
    TOLERANCE,
    Build,
    assert_close,
    assert_same_step,
    chain_twins,
    images_of,
    is_divided,
    twins_of,
)
from tests.plans import MIXED, a_plan_for, algorithms_of

pytestmark = pytest.mark.usefixtures("one_thread")


class BiasAfterwards(nn.Conv2d):
    """Standardises its weight, and adds its bias itself."""

    def forward(self, image: Tensor) -> Tensor:
        weight = self.weight / self.weight.std()
        return self._conv_forward(image, weight, None) + self.bias.view(-1, 1, 1)


def test_a_subclass_that_leaves_its_bias_out_is_divided(recwarn: pytest.WarningsRecorder) -> None:
    model, twin = twins_of(lambda: nn.Sequential(BiasAfterwards(3, 4, 3)), images_of())

    assert_same_step(model, twin, images_of())
    assert not recwarn.list


CONVOLUTIONS: dict[str, Build] = {
    "plain": lambda: nn.Conv2d(3, 4, 3),
    "without bias": lambda: nn.Conv2d(3, 4, 3, bias=False),
    "number of padding": lambda: nn.Conv2d(3, 4, 3, padding=1),
    "two numbers of padding": lambda: nn.Conv2d(3, 4, 3, padding=(2, 1)),
    "same, odd filter": lambda: nn.Conv2d(3, 4, 3, padding="same"),
    "same, even filter": lambda: nn.Conv2d(3, 4, 4, padding="same"),
    "same, even and odd filter": lambda: nn.Conv2d(3, 4, (2, 3), padding="same", dilation=(1, 2)),
    "valid": lambda: nn.Conv2d(3, 4, 3, padding="valid"),
    "reflect": lambda: nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode="reflect"),
    "replicate": lambda: nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode="replicate"),
    "circular": lambda: nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode="circular"),
    "same and circular": lambda: nn.Conv2d(3, 4, 4, padding="same", padding_mode="circular"),
    "stride": lambda: nn.Conv2d(3, 4, 3, stride=(2, 1), padding=1),
    "dilation": lambda: nn.Conv2d(3, 4, 3, dilation=(2, 1), padding=2),
    "groups": lambda: nn.Conv2d(3, 6, 3, groups=3, padding=1),
    "depthwise": lambda: nn.Conv2d(3, 3, 3, groups=3),
    "pointwise": lambda: nn.Conv2d(3, 4, 1),
    "large filter": lambda: nn.Conv2d(3, 4, 5, padding=2),
    "weight norm": lambda: parametrizations.weight_norm(nn.Conv2d(3, 4, 3)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_outputs_and_gradients_are_those_of_the_twin(name: str) -> None:
    images = images_of()
    model, twin = twins_of(CONVOLUTIONS[name], images.clone().requires_grad_())

    assert is_divided(model, images)
    assert_same_step(model, twin, images)


def test_the_plans_of_these_tests_mix_algorithms() -> None:
    plan = a_plan_for(nn.Conv2d(3, 4, 3).double(), images_of().requires_grad_())

    assert algorithms_of(plan) == MIXED


def test_a_chain_with_batch_normalisation_is_that_of_the_twin() -> None:
    assert_same_step(*chain_twins(), images_of())


def test_a_filter_of_one_tap_is_served_however_its_model_was_laid_out() -> None:
    images = images_of().to(memory_format=torch.channels_last)
    model = nn.Conv2d(3, 4, 1).double()  # of whose strides `Module.to` changes those of length 1
    plan = a_plan_for(copy.deepcopy(model), images)

    for each in (copy.deepcopy(model), copy.deepcopy(model).to(memory_format=torch.channels_last)):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UntunedWarning)
            apply(each, plan)(images).sum().backward()


@pytest.mark.parametrize("taps", [1, 3])
def test_single_pixels_are_served_whatever_layout_their_strides_say(taps: int) -> None:
    model = nn.Conv2d(6, 4, taps, padding=taps // 2, dtype=torch.float64)
    images = torch.randn(4, 6, 1, 1, dtype=torch.float64)
    as_channels_last = images.as_strided(images.shape, (6, 1, 6, 6))
    expected = model(as_channels_last)
    apply(model, a_plan_for(model, images))

    with warnings.catch_warnings():
        warnings.simplefilter("error", UntunedWarning)
        result = model(as_channels_last)

    assert torch.allclose(result, expected, rtol=0, atol=1e-12)
    assert result.stride() == expected.stride()


def test_channels_last_stays_channels_last() -> None:
    images = images_of().to(memory_format=torch.channels_last)
    model, twin = twins_of(lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), images)

    result = model(images)

    assert_close(result, twin(images))
    assert result.stride() == twin(images).stride()


@pytest.mark.parametrize("changed", ["image", "weight"])
def test_a_model_that_has_run_contiguous_returns_channels_last_once_either_tensor_is(changed: str) -> None:
    images = images_of()
    model, twin = twins_of(lambda: nn.Conv2d(3, 4, 3), images)
    model(images)
    if changed == "image":
        images = images.to(memory_format=torch.channels_last)
    else:
        model, twin = (each.to(memory_format=torch.channels_last) for each in (model, twin))

    with pytest.warns(UntunedWarning, match="was tuned for .* but meets .* channels_last"):
        result = model(images)

    assert result.stride() == twin(images).stride() != result.contiguous().stride()
    assert torch.equal(result, twin(images))


def test_an_image_without_a_batch_is_divided() -> None:
    model, twin = twins_of(lambda: nn.Conv2d(3, 4, 3), images_of())

    assert_same_step(model, twin, images_of()[0])


@pytest.mark.parametrize("samples", [1, 2, 3, 5, 7])
def test_a_smaller_batch_is_served_without_measuring_or_warning(samples: int) -> None:
    model, twin = chain_twins()

    assert is_divided(model, images_of(samples))
    assert_same_step(model, twin, images_of(samples))


def test_batches_may_change_from_call_to_call() -> None:
    model, twin = chain_twins()

    for samples in (8, 3, 8, 1, 8):
        assert_same_step(model, twin, images_of(samples))


def test_a_batch_that_no_measured_sizes_make_runs_pytorchs_own_and_says_why() -> None:
    layer, images = nn.Conv2d(3, 4, 3).double(), images_of()
    plan = a_plan_for(layer, images)
    four = [
        dataclasses.replace(each, division=Division((part,) * 2), candidates=(part,))
        for each in plan.assignments
        for part in [Candidate("cpu:im2col", 4, 1.0, 2**20)]
    ]
    model = apply(copy.deepcopy(layer), dataclasses.replace(plan, assignments=tuple(four)))

    with pytest.warns(
        UntunedWarning, match="5 samples cannot be made of the sizes that were measured and fit: 4"
    ):
        result = model(images[:5])

    assert_close(result, layer(images[:5]))


@pytest.mark.parametrize("images", [images_of(9), images_of(size=7)], ids=["larger batch", "other size"])
def test_what_was_not_tuned_runs_pytorchs_own_and_says_so_once(images: Tensor) -> None:
    model, twin = twins_of(lambda: nn.Conv2d(3, 4, 3), images_of())

    with pytest.warns(UntunedWarning, match=r"The model itself was tuned for .* but meets"):
        first = model(images)
    second = model(images)

    assert torch.equal(first, twin(images))
    assert torch.equal(second, twin(images))


def test_another_type_than_the_tuned_one_runs_pytorchs_own() -> None:
    model, twin = twins_of(lambda: nn.Sequential(nn.Conv2d(3, 4, 3)), images_of())
    images = images_of().float()

    with pytest.warns(
        UntunedWarning, match="The module '0' was tuned for .* float64 .*, but meets .* float32"
    ):
        result = model.float()(images)

    assert torch.equal(result, twin.float()(images))


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        (lambda images: images.float(), "optimize in the type and layout in which it runs"),
        (lambda images: images[:3].to(memory_format=torch.channels_last), "optimize in the type and layout"),
        (lambda images: images[:3, ..., 1:].float(), "optimize with dynamic=True"),
        (lambda images: images[..., 1:], "optimize with dynamic=True"),
        (lambda images: torch.cat([images, images]), "optimize with the largest batch"),
    ],
    ids=["type", "layout", "type and size", "size", "batch"],
)
def test_the_advice_is_about_what_differs(change: Callable[[Tensor], Tensor], advice: str) -> None:
    model, _ = twins_of(lambda: nn.Conv2d(3, 4, 3), images_of())
    images = change(images_of())

    with pytest.warns(UntunedWarning, match=rf"convolution \({advice}"):
        model.to(images.dtype)(images)


@pytest.mark.parametrize("is_tuned", [True, False], ids=["bias goes", "bias comes"])
def test_another_bias_than_the_tuned_one_is_told(is_tuned: bool) -> None:
    images = images_of()
    model, twin = twins_of(lambda: nn.Conv2d(3, 4, 3, bias=is_tuned), images)
    for each in (model, twin):
        each.bias = None if is_tuned else nn.Parameter(torch.ones(4, dtype=images.dtype))

    words = (" with a bias", "")[:: 1 if is_tuned else -1]
    told = f"float64 contiguous{words[0]}, but meets .* float64 contiguous{words[1]}; .* .optimize it as"
    with pytest.warns(UntunedWarning, match=told):
        result = model(images)

    assert torch.equal(result, twin(images))


def test_single_pixels_are_divided_in_either_layout_by_what_was_tuned_in_one() -> None:
    pixels = torch.randn(8, 6, 1, 1, dtype=torch.float64)
    model, twin = twins_of(lambda: nn.Sequential(nn.Conv2d(6, 6, 1, groups=6)), pixels)  # im2col has one only

    with warnings.catch_warnings():
        warnings.simplefilter("error", UntunedWarning)
        result = model(pixels.as_strided(pixels.shape, (6, 1, 6, 6)))
        result.sum().backward()

    assert "cpu:im2col" in algorithms_of(plan_of(model))
    torch.testing.assert_close(result, twin(pixels))


def test_copies_of_single_modules_tell_once_for_all_of_them() -> None:
    images, layers = images_of(), [nn.Conv2d(3, 3, 3, bias=False), nn.BatchNorm2d(3)]
    model, twin = twins_of(lambda: nn.Sequential(*copy.deepcopy(layers), *copy.deepcopy(layers)), images)
    for each in (model, twin):
        each.eval()
    fused = nn.Sequential(fuse_conv_bn_eval(model[0], model[1]), fuse_conv_bn_eval(model[2], model[3]))

    with pytest.warns(UntunedWarning) as told:
        result = fused(images)

    torch.testing.assert_close(result, twin(images))
    assert [str(each.message).count("so fold before). This reason is given once") for each in told] == [1]


def test_a_batch_of_nothing_gives_nothing() -> None:
    model, twin = twins_of(lambda: nn.Conv2d(3, 4, 3), images_of())

    assert_same_step(model, twin, images_of()[:0])


def test_what_pytorch_refuses_is_refused_with_its_own_words() -> None:
    model, _ = chain_twins()

    with pytest.raises(RuntimeError, match="to have 3 channels, but got 5 channels instead"):
        model(torch.randn(8, 5, 6, 6, dtype=torch.float64))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_output_is_that_of_the_twin(mode: Callable[[], Any]) -> None:
    model, twin = chain_twins()

    with mode():
        result, expected = model(images_of()), twin(images_of())

    assert_close(result, expected)
    assert not result.requires_grad


def test_a_model_tuned_for_training_evaluates() -> None:
    model, twin = chain_twins()

    assert_same_step(model.eval(), twin.eval(), images_of())


def test_frozen_parameters_get_no_gradient() -> None:
    model, twin = chain_twins()
    for each in (model, twin):
        each.get_submodule("0").requires_grad_(requires_grad=False)

    assert_same_step(model, twin, images_of())
    assert model.get_parameter("0.weight").grad is None


def test_under_autocast_what_was_tuned_without_runs_pytorchs_own() -> None:
    torch.manual_seed(0)
    model = a_chain()
    twin = copy.deepcopy(model)
    apply(model, a_plan_for(model, a_batch()))

    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.warns(UntunedWarning, match="bfloat16"):
        result, expected = model(a_batch()), twin(a_batch())

    assert result.dtype is torch.bfloat16
    assert torch.equal(result, expected)


def test_under_autocast_what_was_tuned_under_it_runs_divided() -> None:
    torch.manual_seed(0)
    model = a_chain()
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        apply(model, a_plan_for(model, a_batch()))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result, expected = model(a_batch()), twin(a_batch())

    assert {assigned.problem.dtype for assigned in plan_of(model).assignments} == {"bfloat16"}
    assert result.dtype is expected.dtype
    torch.testing.assert_close(result, expected, rtol=5e-2, atol=5e-2 * expected.abs().max().item())


@pytest.mark.parametrize(
    ("kind", "size"), [(nn.Conv1d, (8,)), (nn.Conv2d, (8, 6)), (nn.Conv3d, (3, 8, 6))], ids=["1d", "2d", "3d"]
)
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("is_tuned_so", [True, False])
def test_what_is_padded_by_pixels_obeys_autocast(
    kind: Any, size: tuple[int, ...], mode: str, is_tuned_so: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind(3, 4, 3, padding=1, padding_mode=mode), kind(4, 4, 3, padding=1))
    twin, images = copy.deepcopy(model), torch.randn(4, 3, *size, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_tuned_so):
        plan = a_plan_for(model, images)
    apply(model, plan)

    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error" if is_tuned_so else "ignore")
        result, expected = model(images), twin(images)
    gradient, expected_gradient = (
        torch.autograd.grad(each.float().square().mean(), images)[0] for each in (result, expected)
    )

    assert {str(each.problem.dtype) for each in plan.assignments} == {("float32", "bfloat16")[is_tuned_so]}
    for found, wanted in ((result, expected), (gradient, expected_gradient)):
        assert found.dtype is wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=0, atol=0.02 * wanted.abs().max().item())


def test_a_model_that_has_run_without_autocast_obeys_it_afterwards() -> None:
    torch.manual_seed(0)
    model = a_chain().eval()
    twin = copy.deepcopy(model)
    apply(model, a_plan_for(model, a_batch()))
    model(a_batch())

    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.warns(UntunedWarning, match="bfloat16"):
        result, expected = model(a_batch()), twin(a_batch())

    assert result.dtype is torch.bfloat16
    assert torch.equal(result, expected)


@DYNAMOS
def test_a_compiled_model_gives_the_same_numbers() -> None:
    model, twin = chain_twins()
    torch.compiler.reset()

    compiled = torch.compile(model, backend="eager")

    assert_same_step(compiled, twin, images_of())


def test_under_vmap_the_output_is_that_of_the_twin() -> None:
    model, twin = twins_of(lambda: nn.Conv2d(3, 4, 3), images_of())
    stacks = torch.stack([images_of(2), 2 * images_of(2)])

    assert_close(torch.func.vmap(model)(stacks), torch.stack([twin(each) for each in stacks]))


def test_gradients_by_torch_func_are_those_of_the_twin() -> None:
    model, twin = twins_of(lambda: nn.Conv2d(3, 4, 3), images_of())
    images = images_of()

    def slopes(module: nn.Module) -> dict[str, Tensor]:
        def loss(parameters: dict[str, Tensor]) -> Tensor:
            result: Tensor = torch.func.functional_call(module, parameters, images)
            return result.square().sum()

        found: dict[str, Tensor] = torch.func.grad(loss)(dict(module.named_parameters()))
        return found

    assert_close(slopes(model)["weight"], slopes(twin)["weight"])


def test_second_derivatives_are_those_of_the_twin() -> None:
    model, twin = twins_of(lambda: nn.Conv2d(3, 4, 3, padding=1), images_of().requires_grad_())

    def penalty_slope(module: nn.Module) -> Tensor:
        images = images_of().requires_grad_()
        slope = torch.autograd.grad(module(images).pow(3).sum(), images, create_graph=True)[0]
        return torch.autograd.grad(slope.square().sum(), next(iter(module.parameters())))[0]

    assert_close(penalty_slope(model), penalty_slope(twin))


def test_gradients_accumulate_over_backward_passes() -> None:
    model, twin = chain_twins()

    for module in (model, twin):
        for samples in (8, 5):
            module(images_of(samples)).square().sum().backward()

    for ours, others in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert others.grad is not None
        assert_close(ours.grad, others.grad)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_comes_out_as_from_pytorchs_own(value: float) -> None:
    images = images_of()
    model, twin = twins_of(lambda: nn.Conv2d(3, 4, 3), images)
    images[4, 1, 2, 3] = value

    result, expected = model(images), twin(images)

    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.isposinf(), expected.isposinf())
    assert torch.equal(result.isneginf(), expected.isneginf())
    finite = expected.isfinite()
    assert_close(result[finite], expected[finite])


def test_a_weight_gradient_that_is_not_finite_is_that_of_the_twin() -> None:
    images = images_of()
    model, twin = twins_of(lambda: nn.Conv2d(3, 4, 3), images)
    images[4, 1, 2, 3] = float("inf")

    for module in (model, twin):
        module(images).nan_to_num(posinf=1.0, neginf=1.0).sum().backward()

    torch.testing.assert_close(
        model.get_parameter("weight").grad,
        twin.get_parameter("weight").grad,
        rtol=TOLERANCE,
        atol=TOLERANCE,
        equal_nan=True,
    )


def test_two_threads_do_not_disturb_each_other() -> None:
    model, twin = chain_twins()
    model.eval(), twin.eval()
    inputs = [images_of() * factor for factor in range(1, 9)]
    expected = [twin(images) for images in inputs]
    results: dict[int, Tensor] = {}

    def work(numbers: range) -> None:
        for number in numbers:
            results[number] = model(inputs[number])

    threads = [threading.Thread(target=work, args=(range(first, 8, 2),)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for number, images in enumerate(expected):
        assert_close(results[number], images)


def test_in_sharing_mode_the_numbers_are_those_of_the_twin() -> None:
    model, twin = twins_of(a_chain, images_of().requires_grad_(), Mode.SHARING)

    assert_same_step(model, twin, images_of())


def test_in_sharing_mode_the_common_workspace_stays_empty() -> None:
    release_workspaces()
    model, _ = twins_of(a_chain, images_of(), Mode.SHARING)

    with torch.no_grad():
        model(images_of())

    assert workspace_of(backend_of("cpu:")).n_bytes == 0


def test_in_sharing_mode_every_site_has_a_workspace_of_what_its_division_needs() -> None:
    release_workspaces()
    model, _ = twins_of(a_chain, images_of(), Mode.SHARING)

    with torch.no_grad():
        model(images_of())

    fprops = [division for site, division in plan_of(model).sites.items() if site.op is ConvOp.FPROP]
    owned = _workspaces[backend_of("cpu:").queue()].owned
    assert sorted(each.n_bytes for each in owned.values()) == sorted(
        division.workspace_bytes for division in fprops
    )


def test_in_reuse_mode_one_workspace_is_as_large_as_the_largest_part_needs() -> None:
    release_workspaces()
    model, _ = chain_twins()

    with torch.no_grad():
        model(images_of())

    # The first pass already makes room for the gradients: the buffer never grows afterwards.
    divisions = plan_of(model).sites.values()
    assert workspace_of(backend_of("cpu:")).n_bytes == max(each.workspace_bytes for each in divisions)


def test_a_module_that_meets_two_shapes_is_divided_at_both() -> None:
    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, images: Tensor) -> Tensor:
            return self.head(images).sum() + self.head(images[..., ::2, ::2].contiguous()).sum()

    model, twin = twins_of(Pyramid, images_of())

    assert is_divided(model, images_of())
    assert_same_step(model, twin, images_of())


def test_a_model_that_moves_to_another_device_runs_pytorchs_own() -> None:
    model, _ = chain_twins()
    model(images_of())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = model.to("meta")(images_of().to("meta"))

    assert (result.device.type, result.shape) == ("meta", (8, 5, 2, 2))


def test_what_is_no_tensor_meets_the_error_of_pytorch() -> None:
    model, twin = twins_of(lambda: nn.Sequential(nn.Conv2d(3, 4, 3)), images_of())
    for each in (model, twin):
        with pytest.raises(TypeError, match=r"conv2d\(\) received an invalid combination of arguments"):
            each(None)
