"""Tensors of a class of their own, such as fastai's images: divided, after what their class has to say."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name that PyTorch's users know it by
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.overrides import TorchFunctionMode

from mucudnn import apply, autotune, tune
from mucudnn.errors import UntunedWarning
from tests.patching.twins import assert_close, images_of, twins_of
from tests.plans import a_plan_for

pytestmark = pytest.mark.usefixtures("one_thread")

CONVOLUTIONS = (torch.conv2d, torch.conv_transpose2d)

OURS, OWN = "_ConvolutionBackward", "ConvolutionBackward0"
"""Nodes of autograd's graph."""


class Marked(Tensor):
    """As plain as a class can be."""


class Noted(Tensor):
    """Tells where it comes from, as fastai's images do."""

    origin = "nowhere"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, cls):
            result.origin = next((each.origin for each in args if isinstance(each, cls)), "nowhere")
        return result


class Doubled(Tensor):
    """Of which a convolution is twice as large."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return 2 * result if func in CONVOLUTIONS else result


class Strict(Tensor):
    """Of which nothing but a convolution may be asked, not even its attributes."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in CONVOLUTIONS:
            raise RuntimeError(f"There is no {func}.")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Unwilling(Tensor):
    """Of which there are no convolutions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in CONVOLUTIONS:
            return NotImplemented
        return super().__torch_function__(func, types, args, kwargs or {})


def every_way() -> nn.Module:
    """Convolutions that pad in each way, and a transposed one."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.ReLU(),
        nn.Conv2d(4, 4, (2, 3), padding="same", bias=False),
        nn.ConvTranspose2d(4, 5, 3, stride=2, output_padding=1),
    )


def nodes_of(result: Tensor) -> set[str]:
    """Names of all nodes of autograd's graph of a result."""
    waiting, names = [result.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None:
            names.add(type(node).__name__)
            waiting += [each for each, _ in node.next_functions]
    return names


def gradients_of(result: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    loss = (result * torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view(result.shape)).sum()
    return torch.autograd.grad(loss, leaves)


def assert_divided_as_its_twin(model: nn.Module, twin: nn.Module, images: Tensor) -> Tensor:
    given = images.requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = model(given)
    expected = twin(given)
    assert type(result) is type(expected)
    assert result.stride() == expected.stride()
    assert_close(result.as_subclass(Tensor), expected.as_subclass(Tensor))
    assert OURS in (nodes := nodes_of(result))
    assert OWN not in nodes
    found = gradients_of(result, given, *model.parameters())
    wanted = gradients_of(expected, given, *twin.parameters())
    for one, other in zip(found, wanted, strict=True):
        assert type(one) is type(other)
        assert_close(one.as_subclass(Tensor), other.as_subclass(Tensor))
    return result


@pytest.mark.parametrize("kind", [Marked, Noted, Doubled])
def test_images_of_a_class_are_divided_as_their_class_wants(kind: type[Tensor]) -> None:
    model, twin = twins_of(every_way, images_of().requires_grad_())

    assert_divided_as_its_twin(model, twin, images_of().as_subclass(kind))
    assert_divided_as_its_twin(model, twin, images_of(3).as_subclass(kind))  # a smaller batch
    assert_divided_as_its_twin(model, twin, images_of()[0].as_subclass(kind))  # one sample


def test_what_a_class_hands_on_is_handed_on() -> None:
    model, _ = twins_of(every_way, images_of().requires_grad_())
    images = images_of().as_subclass(Noted)
    images.origin = "here"

    assert assert_divided_as_its_twin(model, copy.deepcopy(model), images).origin == "here"


@pytest.mark.parametrize("build", [lambda: nn.Conv2d(3, 4, 3), lambda: nn.ConvTranspose2d(3, 4, 3)])
def test_nothing_but_the_convolution_is_asked_of_a_class(build: Any) -> None:
    model, twin = twins_of(build, images_of())
    expected = twin(images_of())

    result = model(images_of().as_subclass(Strict))
    of_weight = torch.func.functional_call(
        model, {"weight": model.weight.detach().as_subclass(Strict)}, (images_of(),)
    )

    for each in (result, of_weight):
        assert type(each) is Tensor
        assert OURS in nodes_of(each)
        assert_close(each, expected)


def test_parameters_of_a_class_are_differentiated() -> None:
    class Named(nn.Parameter):
        """Of a class that has nothing to say."""

    model, twin = twins_of(lambda: nn.Conv2d(3, 4, 3), images_of())
    for each in (model, twin):
        each.weight = Named(each.weight.detach())

    assert_divided_as_its_twin(model, twin, images_of())


def test_a_class_may_refuse() -> None:
    model, twin = twins_of(lambda: nn.Conv2d(3, 4, 3), images_of())
    images = images_of().as_subclass(Unwilling)

    with pytest.raises(TypeError) as expected:
        twin(images)
    with pytest.raises(TypeError) as told:
        model(images)

    assert str(told.value) == str(expected.value)


def test_of_two_classes_pytorchs_order_holds() -> None:
    model, twin = twins_of(lambda: nn.Conv2d(3, 4, 3), images_of())
    weight = model.weight.detach().as_subclass(Strict)

    result, expected = (
        torch.func.functional_call(each, {"weight": weight}, (images_of().as_subclass(Unwilling),))
        for each in (model, twin)
    )

    assert type(result) is type(expected) is Tensor
    assert_close(result, expected)
    assert OURS in nodes_of(result)


class Watching(TorchFunctionMode):
    """Notes what it is asked, and of which classes."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, Any, type]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in CONVOLUTIONS:
            self.asked.append((func.__name__, [*types], type(result)))
        return result


@pytest.mark.parametrize("build", [lambda: nn.Conv2d(3, 4, 3), lambda: nn.ConvTranspose2d(3, 4, 3)])
def test_a_mode_of_functions_sees_what_it_sees_of_the_twin(build: Any) -> None:
    model, twin = twins_of(build, images_of())
    images = images_of().as_subclass(Noted)
    with Watching() as expected:
        twin(images)

    with Watching() as seen, pytest.warns(UntunedWarning, match="is called in a Watching"):
        model(images)
    with Watching() as outside, autotune("1MiB", progress=False), pytest.warns(UntunedWarning):
        twin(images)

    assert seen.asked == outside.asked == expected.asked
    assert len(seen.asked) == 1


def test_per_sample_gradients_are_those_of_the_twin() -> None:
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, 2))
    images = torch.randn(4, 3, 16, 16)
    model = apply(copy.deepcopy(twin), a_plan_for(copy.deepcopy(twin), images))

    for each in (model, twin):
        call_for_per_sample_grads(each)(images).sum().backward()

    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad_sample, other.grad_sample)


@pytest.mark.usefixtures("divided_by_hand")
def test_autotune_asks_classes_in_pytorchs_order_too(tmp_path: Path) -> None:
    image = images_of().as_subclass(Unwilling)
    weight = nn.Conv2d(3, 4, 3).double().weight.detach().as_subclass(Strict)
    expected = F.conv2d(image, weight)

    with autotune("1MiB", store=tmp_path / "store", progress=False) as tuned:
        result = F.conv2d(weight=weight, input=image)
        with pytest.raises(TypeError, match=r"conv2d"):
            F.conv2d(image, images_of().as_subclass(Unwilling))

    assert_close(result, expected)
    assert len(tuned.plan.sites) == 1


@pytest.mark.usefixtures("divided_by_hand")
@pytest.mark.parametrize("kind", [Marked, Noted, Doubled])
def test_autotune_divides_them_too(kind: type[Tensor], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = every_way().double()
    images = images_of().as_subclass(kind).requires_grad_()
    expected = model(images)

    with autotune("1MiB", store=tmp_path / "store", progress=False):
        result = model(images)

    assert type(result) is type(expected)
    assert_close(result.as_subclass(Tensor), expected.as_subclass(Tensor))
    assert OWN not in nodes_of(result)
    for one, other in zip(gradients_of(result, images), gradients_of(expected, images), strict=True):
        assert_close(one.as_subclass(Tensor), other.as_subclass(Tensor))


def test_a_sample_of_a_class_is_tuned_as_a_plain_one(tmp_path: Path) -> None:
    model, store = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), tmp_path / "store"

    plans = [
        tune(model, images, "1MiB", store=store, progress=False)
        for images in (images_of().float(), images_of().float().as_subclass(Noted))
    ]

    assert plans[0] == plans[1]
