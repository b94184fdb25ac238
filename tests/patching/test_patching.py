"""A patched model and its unpatched twin: the same numbers, and nothing that anyone could notice."""

import copy
import dataclasses
import gc
import io
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from mucudnn.backends import backend_of
from mucudnn.choices import Mode
from mucudnn.division import Division
from mucudnn.errors import PlanError, PlanMismatchError, UntunedWarning
from mucudnn.execution.workspace import _workspaces, release_workspaces, workspace_of
from mucudnn.patching.applying import apply, plan_of, restore
from mucudnn.plan import ConvSite, Plan
from mucudnn.problem import ConvOp
from mucudnn.profile import Candidate
from mucudnn.tuner import optimize
from tests.models import a_batch, a_chain
from tests.plans import MIXED, a_plan_for, algorithms_of

TOLERANCE = 1e-10
"""Of a largest difference, relative to the largest number: ten times an algorithm's bound in float64."""

pytestmark = pytest.mark.usefixtures("one_thread")

Build = Callable[[], nn.Module]


def _twins(build: Build, sample: Tensor, mode: Mode = Mode.REUSE) -> tuple[nn.Module, nn.Module]:
    """A patched model and an unpatched one, in float64."""
    torch.manual_seed(0)
    model = build().double()
    twin = copy.deepcopy(model)
    return apply(model, a_plan_for(model, sample, mode)), twin


def _chain_twins(samples: int = 8) -> tuple[nn.Module, nn.Module]:
    return _twins(a_chain, _images(samples))


def _images(samples: int = 8, size: int = 6) -> Tensor:
    return a_batch(samples, size=size, dtype=torch.float64)


def _assert_close(result: Tensor, expected: Tensor) -> None:
    scale = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(result, expected, rtol=0, atol=TOLERANCE * max(scale, 1.0))


def _step(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Output, the gradient of the images, the gradients of the parameters, the buffers."""
    images = images.clone().requires_grad_()
    model.zero_grad()
    result = model(images)
    (result * torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view_as(result)).sum().backward()
    gradients = [each.grad for each in (images, *model.parameters())]
    return [result.detach(), *(each for each in gradients if each is not None), *model.buffers()]


def _assert_same_step(model: nn.Module, twin: nn.Module, images: Tensor) -> None:
    results, expected = _step(model, images), _step(twin, images)
    assert len(results) == len(expected)
    for result, other in zip(results, expected, strict=True):
        _assert_close(result, other)


class BiasAfterwards(nn.Conv2d):
    """Standardises its weight, and adds its bias itself."""

    def forward(self, image: Tensor) -> Tensor:
        weight = self.weight / self.weight.std()
        return self._conv_forward(image, weight, None) + self.bias.view(-1, 1, 1)


def test_a_subclass_that_leaves_its_bias_out_is_divided(recwarn: pytest.WarningsRecorder) -> None:
    model, twin = _twins(lambda: nn.Sequential(BiasAfterwards(3, 4, 3)), _images())

    _assert_same_step(model, twin, _images())
    assert not recwarn.list


def _is_divided(model: nn.Module, images: Tensor) -> bool:
    """Whether all convolutions have our backward, and not PyTorch's own; the model is left as it was."""
    seen: list[str] = []
    was_training = model.training
    model.eval()
    hooks = [
        module.register_forward_hook(lambda *told: seen.append(type(told[-1].grad_fn).__name__))
        for module in model.modules()
        if isinstance(module, nn.Conv2d)
    ]
    model(images)
    model.train(was_training)
    for hook in hooks:
        hook.remove()
    return all(name == "_ConvolutionBackward" for name in seen)


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
    images = _images()
    model, twin = _twins(CONVOLUTIONS[name], images.clone().requires_grad_())

    assert _is_divided(model, images)
    _assert_same_step(model, twin, images)


def test_the_plans_of_these_tests_mix_algorithms() -> None:
    plan = a_plan_for(nn.Conv2d(3, 4, 3).double(), _images().requires_grad_())

    assert algorithms_of(plan) == MIXED


def test_a_chain_with_batch_normalisation_is_that_of_the_twin() -> None:
    _assert_same_step(*_chain_twins(), _images())


def test_a_filter_of_one_tap_is_served_however_its_model_was_laid_out() -> None:
    images = _images().to(memory_format=torch.channels_last)
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
    images = _images().to(memory_format=torch.channels_last)
    model, twin = _twins(lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), images)

    result = model(images)

    _assert_close(result, twin(images))
    assert result.stride() == twin(images).stride()


@pytest.mark.parametrize("changed", ["image", "weight"])
def test_a_model_that_has_run_contiguous_returns_channels_last_once_either_tensor_is(changed: str) -> None:
    images = _images()
    model, twin = _twins(lambda: nn.Conv2d(3, 4, 3), images)
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
    model, twin = _twins(lambda: nn.Conv2d(3, 4, 3), _images())

    _assert_same_step(model, twin, _images()[0])


@pytest.mark.parametrize("samples", [1, 2, 3, 5, 7])
def test_a_smaller_batch_is_served_without_measuring_or_warning(samples: int) -> None:
    model, twin = _chain_twins()

    assert _is_divided(model, _images(samples))
    _assert_same_step(model, twin, _images(samples))


def test_batches_may_change_from_call_to_call() -> None:
    model, twin = _chain_twins()

    for samples in (8, 3, 8, 1, 8):
        _assert_same_step(model, twin, _images(samples))


def test_a_batch_that_no_measured_sizes_make_runs_pytorchs_own_and_says_why() -> None:
    layer, images = nn.Conv2d(3, 4, 3).double(), _images()
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

    _assert_close(result, layer(images[:5]))


@pytest.mark.parametrize("images", [_images(9), _images(size=7)], ids=["larger batch", "other size"])
def test_what_was_not_tuned_runs_pytorchs_own_and_says_so_once(images: Tensor) -> None:
    model, twin = _twins(lambda: nn.Conv2d(3, 4, 3), _images())

    with pytest.warns(UntunedWarning, match=r"The model itself was tuned for .* but meets"):
        first = model(images)
    second = model(images)

    assert torch.equal(first, twin(images))
    assert torch.equal(second, twin(images))


def test_another_type_than_the_tuned_one_runs_pytorchs_own() -> None:
    model, twin = _twins(lambda: nn.Sequential(nn.Conv2d(3, 4, 3)), _images())
    images = _images().float()

    with pytest.warns(
        UntunedWarning, match="The module '0' was tuned for .* float64 .*, but meets .* float32"
    ):
        result = model.float()(images)

    assert torch.equal(result, twin.float()(images))


@pytest.mark.parametrize("is_tuned", [True, False], ids=["bias goes", "bias comes"])
def test_another_bias_than_the_tuned_one_is_told(is_tuned: bool) -> None:
    images = _images()
    model, twin = _twins(lambda: nn.Conv2d(3, 4, 3, bias=is_tuned), images)
    for each in (model, twin):
        each.bias = None if is_tuned else nn.Parameter(torch.ones(4, dtype=images.dtype))

    words = (" with a bias", "")[:: 1 if is_tuned else -1]
    told = f"float64 contiguous{words[0]}, but meets .* float64 contiguous{words[1]};"
    with pytest.warns(UntunedWarning, match=told):
        result = model(images)

    assert torch.equal(result, twin(images))


def test_a_batch_of_nothing_gives_nothing() -> None:
    model, twin = _twins(lambda: nn.Conv2d(3, 4, 3), _images())

    _assert_same_step(model, twin, _images()[:0])


def test_what_pytorch_refuses_is_refused_with_its_own_words() -> None:
    model, _ = _chain_twins()

    with pytest.raises(RuntimeError, match="to have 3 channels, but got 5 channels instead"):
        model(torch.randn(8, 5, 6, 6, dtype=torch.float64))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_output_is_that_of_the_twin(mode: Callable[[], Any]) -> None:
    model, twin = _chain_twins()

    with mode():
        result, expected = model(_images()), twin(_images())

    _assert_close(result, expected)
    assert not result.requires_grad


def test_a_model_tuned_for_training_evaluates() -> None:
    model, twin = _chain_twins()

    _assert_same_step(model.eval(), twin.eval(), _images())


def test_frozen_parameters_get_no_gradient() -> None:
    model, twin = _chain_twins()
    for each in (model, twin):
        each.get_submodule("0").requires_grad_(requires_grad=False)

    _assert_same_step(model, twin, _images())
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


# Dynamo warns of its own use of deprecated functions of torch and Python.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_compiled_model_gives_the_same_numbers() -> None:
    model, twin = _chain_twins()
    torch.compiler.reset()

    compiled = torch.compile(model, backend="eager")

    _assert_same_step(compiled, twin, _images())


def test_under_vmap_the_output_is_that_of_the_twin() -> None:
    model, twin = _twins(lambda: nn.Conv2d(3, 4, 3), _images())
    stacks = torch.stack([_images(2), 2 * _images(2)])

    _assert_close(torch.func.vmap(model)(stacks), torch.stack([twin(each) for each in stacks]))


def test_gradients_by_torch_func_are_those_of_the_twin() -> None:
    model, twin = _twins(lambda: nn.Conv2d(3, 4, 3), _images())
    images = _images()

    def slopes(module: nn.Module) -> dict[str, Tensor]:
        def loss(parameters: dict[str, Tensor]) -> Tensor:
            result: Tensor = torch.func.functional_call(module, parameters, images)
            return result.square().sum()

        found: dict[str, Tensor] = torch.func.grad(loss)(dict(module.named_parameters()))
        return found

    _assert_close(slopes(model)["weight"], slopes(twin)["weight"])


def test_second_derivatives_are_those_of_the_twin() -> None:
    model, twin = _twins(lambda: nn.Conv2d(3, 4, 3, padding=1), _images().requires_grad_())

    def penalty_slope(module: nn.Module) -> Tensor:
        images = _images().requires_grad_()
        slope = torch.autograd.grad(module(images).pow(3).sum(), images, create_graph=True)[0]
        return torch.autograd.grad(slope.square().sum(), next(iter(module.parameters())))[0]

    _assert_close(penalty_slope(model), penalty_slope(twin))


def test_gradients_accumulate_over_backward_passes() -> None:
    model, twin = _chain_twins()

    for module in (model, twin):
        for samples in (8, 5):
            module(_images(samples)).square().sum().backward()

    for ours, others in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert others.grad is not None
        _assert_close(ours.grad, others.grad)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_comes_out_as_from_pytorchs_own(value: float) -> None:
    images = _images()
    model, twin = _twins(lambda: nn.Conv2d(3, 4, 3), images)
    images[4, 1, 2, 3] = value

    result, expected = model(images), twin(images)

    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.isposinf(), expected.isposinf())
    assert torch.equal(result.isneginf(), expected.isneginf())
    finite = expected.isfinite()
    _assert_close(result[finite], expected[finite])


def test_a_weight_gradient_that_is_not_finite_is_that_of_the_twin() -> None:
    images = _images()
    model, twin = _twins(lambda: nn.Conv2d(3, 4, 3), images)
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
    model, twin = _chain_twins()
    model.eval(), twin.eval()
    inputs = [_images() * factor for factor in range(1, 9)]
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
        _assert_close(results[number], images)


def test_in_sharing_mode_the_numbers_are_those_of_the_twin() -> None:
    model, twin = _twins(a_chain, _images(), Mode.SHARING)

    _assert_same_step(model, twin, _images())


def test_in_sharing_mode_the_common_workspace_stays_empty() -> None:
    release_workspaces()
    model, _ = _twins(a_chain, _images(), Mode.SHARING)

    with torch.no_grad():
        model(_images())

    assert workspace_of(backend_of("cpu:")).n_bytes == 0


def test_in_sharing_mode_every_site_has_a_workspace_of_what_its_division_needs() -> None:
    release_workspaces()
    model, _ = _twins(a_chain, _images(), Mode.SHARING)

    with torch.no_grad():
        model(_images())

    fprops = [division for site, division in plan_of(model).sites.items() if site.op is ConvOp.FPROP]
    owned = _workspaces[backend_of("cpu:").queue()].owned
    assert sorted(each.n_bytes for each in owned.values()) == sorted(
        division.workspace_bytes for division in fprops
    )


def test_in_reuse_mode_one_workspace_is_as_large_as_the_largest_part_needs() -> None:
    release_workspaces()
    model, _ = _chain_twins()

    with torch.no_grad():
        model(_images())

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

    model, twin = _twins(Pyramid, _images())

    assert _is_divided(model, _images())
    _assert_same_step(model, twin, _images())


def test_state_dict_and_parameters_stay_the_same() -> None:
    model = a_chain().double()
    keys, parameters = list(model.state_dict()), [id(each) for each in model.parameters()]

    apply(model, a_plan_for(model, _images()))

    assert list(model.state_dict()) == keys
    assert [id(each) for each in model.parameters()] == parameters


def test_a_state_dict_is_loaded_and_used() -> None:
    model, _ = _chain_twins()
    other = a_chain().double()

    model.load_state_dict(other.state_dict())

    _assert_same_step(model, other, _images())


def test_hooks_are_called() -> None:
    model, _ = _chain_twins()
    called: list[str] = []
    conv = model.get_submodule("3")
    conv.register_forward_pre_hook(lambda *_: called.append("before"))
    conv.register_forward_hook(lambda *_: called.append("after"))
    conv.register_full_backward_hook(lambda *_: called.append("backward"))

    model(_images()).sum().backward()

    assert called == ["before", "after", "backward"]


def _pickled(model: nn.Module) -> nn.Module:
    loaded: nn.Module = pickle.loads(pickle.dumps(model))
    return loaded


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy, "pickle": _pickled, "save": _saved
}  # fmt: skip


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("has_run", [False, True])
def test_a_copy_is_divided_as_the_original(way: str, has_run: bool) -> None:
    model, twin = _chain_twins()
    if has_run:
        _step(model, _images())
        _step(twin, _images())

    copied = COPIES[way](model)

    assert _is_divided(copied.eval(), _images())
    assert plan_of(copied) == plan_of(model)
    _assert_same_step(copied, twin.eval(), _images())


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_computes_with_its_own_weights(way: str) -> None:
    model, twin = _chain_twins()
    copied = COPIES[way](model)

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()

    _assert_same_step(copied, twin, _images())


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_survives_that_the_original_is_restored(way: str) -> None:
    model, _ = _chain_twins()
    copied = COPIES[way](model)

    restore(model)

    assert _is_divided(copied, _images())


def test_a_patched_model_is_collected_when_nobody_holds_it() -> None:
    model, _ = _chain_twins()
    _step(model, _images())
    gone = weakref.ref(model)

    del model
    gc.collect()

    assert gone() is None


def test_restore_leaves_nothing_behind() -> None:
    model = a_chain().double()
    before = [dict(module.__dict__) for module in model.modules()]
    apply(model, a_plan_for(model, _images()))
    with torch.no_grad():
        model.eval()(_images())
    model.train()

    restored = restore(model)

    assert restored is model
    assert [dict(module.__dict__) for module in model.modules()] == before


def test_restore_of_a_model_that_is_not_patched_does_nothing() -> None:
    model = a_chain()
    before = [dict(module.__dict__) for module in model.modules()]

    restore(model)

    assert [dict(module.__dict__) for module in model.modules()] == before


def test_a_second_plan_replaces_the_first_as_a_whole() -> None:
    model, twin = _chain_twins()
    whole = plan_of(model)
    part = dataclasses.replace(
        whole, assignments=tuple(each for each in whole.assignments if each.site.path == "3")
    )

    apply(model, part)

    assert plan_of(model) == part
    assert "_conv_forward" not in model.get_submodule("0").__dict__
    _assert_same_step(model, twin, _images())


def test_a_model_without_a_plan_has_none_to_tell() -> None:
    with pytest.raises(PlanError, match="must have been patched by optimize or apply, but it runs no plan"):
        plan_of(a_chain())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # Dynamo's, of its own
@pytest.mark.parametrize(
    ("wrap", "path"), [(nn.DataParallel, "module"), (lambda model: torch.compile(model), "_orig_mod")]
)
@pytest.mark.parametrize("make", [lambda: _chain_twins()[0], lambda: optimize(a_chain(), "64MiB")])
def test_what_wraps_a_model_says_whose_plan_there_is(
    wrap: Callable[[nn.Module], nn.Module], path: str, make: Callable[[], nn.Module]
) -> None:
    wrapped = wrap(make())

    with pytest.raises(PlanError, match=f"runs no plan. Its part '{path}' was: ask for the plan of that"):
        plan_of(wrapped)


def _renamed(plan: Plan) -> Plan:
    first, *others = plan.assignments
    return dataclasses.replace(
        plan, assignments=(dataclasses.replace(first, site=ConvSite("body.0", first.site.op)), *others)
    )


def _elsewhere(plan: Plan) -> Plan:
    environment = dataclasses.replace(
        plan.environment, software={**plan.environment.software, "torch": "1.0"}
    )
    return dataclasses.replace(plan, environment=environment)


def _model_with(conv: nn.Module) -> nn.Module:
    model = a_chain().double()
    model[0] = conv.double()
    return model


MISMATCHES: dict[str, tuple[Build, Callable[[Plan], Plan], str]] = {
    "no such module": (a_chain, _renamed, "with a module 'body.0', but this one has none"),
    "no convolution": (lambda: _model_with(nn.Identity()), lambda plan: plan, "is a Identity and cannot be"),
    "transposed": (
        lambda: _model_with(nn.ConvTranspose2d(3, 4, 3)), lambda plan: plan, r"here it has \(\(3, 4, 3, 3\)"
    ),
    "transposed, with such a weight": (
        lambda: _model_with(nn.ConvTranspose2d(4, 3, 3, padding=1)), lambda plan: plan,
        "'0' as a convolution that is not transposed, but here it is a ConvTranspose2d",
    ),
    "other weight": (
        lambda: _model_with(nn.Conv2d(3, 4, 5, padding=1)), lambda plan: plan, r"here it has \(\(4, 3, 5, 5\)"
    ),
    "other stride": (
        lambda: _model_with(nn.Conv2d(3, 4, 3, stride=2)), lambda plan: plan, r"3\), \(2, 2\), \(0, 0\), "
    ),
    "other padding": (
        lambda: _model_with(nn.Conv2d(3, 4, 3, padding="valid")), lambda plan: plan, r"\(0, 0\), \(1, 1\), 1"
    ),
    "lazy": (
        lambda: _model_with(nn.LazyConv2d(4, 3, padding=1)), lambda plan: plan,
        "is a LazyConv2d without parameters; call the model once, and then apply",
    ),
    "compiled": (
        lambda: torch.compile(a_chain()), lambda plan: plan, "has none. Its part '_orig_mod' has it: apply",
    ),
    "data parallel": (
        lambda: nn.DataParallel(a_chain()), lambda plan: plan, "has none. Its part 'module' has it: apply",
    ),
    "other environment": (a_chain, _elsewhere, r"software torch was 1\.0, is "),
    "other device": (lambda: a_chain().to("meta"), lambda plan: plan, "but the model lies on meta"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # Dynamo's, of its own
@pytest.mark.parametrize("name", MISMATCHES)
def test_a_plan_that_does_not_fit_is_refused_and_the_model_stays_as_it_was(name: str) -> None:
    build, change, message = MISMATCHES[name]
    plan = change(a_plan_for(a_chain().double(), _images()))
    model = build()
    before = [dict(module.__dict__) for module in model.modules()]

    with pytest.raises(PlanMismatchError, match=message):
        apply(model, plan)

    assert [dict(module.__dict__) for module in model.modules()] == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # Dynamo's, of its own
def test_a_single_convolution_that_is_compiled_is_told_of_its_original() -> None:
    plan = a_plan_for(nn.Conv2d(3, 4, 3).double(), _images())

    with pytest.raises(
        PlanMismatchError, match=r"is a OptimizedModule .* Its part '_orig_mod' has it: apply"
    ):
        apply(torch.compile(nn.Conv2d(3, 4, 3).double()), plan)


def test_a_plan_that_does_not_fit_leaves_the_former_plan_in_place() -> None:
    model, _ = _chain_twins()
    former = plan_of(model)

    with pytest.raises(PlanMismatchError, match="with a module"):
        apply(model, _renamed(former))

    assert plan_of(model) is former
    assert _is_divided(model, _images())


def test_a_plan_that_contradicts_itself_is_refused() -> None:
    model = a_chain().double()
    plan = dataclasses.replace(a_plan_for(model, _images()), limit_bytes=0)

    with pytest.raises(PlanError, match="The workspace must be at most 0 bytes"):
        apply(model, plan)


@pytest.mark.filterwarnings("ignore:.torch.jit.")
def test_who_scripts_a_patched_model_is_told_to_restore_it() -> None:
    model, twin = _twins(lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3)), _images())

    with pytest.raises(AttributeError, match=r"takes no patched .*: mucudnn\.restore\(model\) before"):
        torch.jit.script(model)

    assert torch.equal(torch.jit.script(restore(model))(_images()), twin(_images()))


def test_a_plan_from_a_file_runs() -> None:
    torch.manual_seed(0)
    model = a_chain().double()
    twin = copy.deepcopy(model)

    apply(model, Plan.from_text(a_plan_for(model, _images()).to_text()))

    assert _is_divided(model, _images())
    _assert_same_step(model, twin, _images())


def test_a_model_that_moves_to_another_device_runs_pytorchs_own() -> None:
    model, _ = _chain_twins()
    model(_images())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = model.to("meta")(_images().to("meta"))

    assert (result.device.type, result.shape) == ("meta", (8, 5, 2, 2))


class _IntoModules(torch.fx.Tracer):
    """Traces what PyTorch's own modules do, too."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False


@pytest.mark.parametrize("conv", [nn.Conv2d, nn.ConvTranspose2d])
def test_graphs_are_traced_as_before(conv: type[nn.Module]) -> None:
    model, twin = _twins(lambda: nn.Sequential(conv(3, 4, 3)), _images())

    kinds = [[(node.op, node.target) for node in _IntoModules().trace(each).nodes] for each in (model, twin)]

    assert kinds[0] == kinds[1]
    assert len(kinds[0]) == 5  # an image, a weight, a bias, a convolution, an output


def test_what_is_no_tensor_meets_the_error_of_pytorch() -> None:
    model, twin = _twins(lambda: nn.Sequential(nn.Conv2d(3, 4, 3)), _images())
    for each in (model, twin):
        with pytest.raises(TypeError, match=r"conv2d\(\) received an invalid combination of arguments"):
            each(None)
