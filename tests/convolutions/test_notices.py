"""Patched modules that are watched, or lie elsewhere: PyTorch's own computes, and one warning says so."""

import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812  # the name that PyTorch's users know it by
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from mucudnn import apply, autotune
from mucudnn.convolutions.surroundings import overriding_mode
from mucudnn.errors import UntunedWarning
from mucudnn.examining.extraction import extract
from mucudnn.examining.tracing import trace
from tests.graphs import DYNAMOS
from tests.models import a_batch, a_chain
from tests.plans import a_plan_for

pytestmark = pytest.mark.usefixtures("one_thread")


class Doubling(TorchFunctionMode):
    """Doubles what convolutions give."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result if func in (torch.conv2d, torch.conv_transpose2d) else result


class Subclassed(nn.Module):
    """What torch.fx looks into: it is none of PyTorch's own modules, but calls the patched method of one."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self._conv_forward = conv._conv_forward
        self.weight = conv.weight

    def forward(self, images: Tensor) -> Any:
        """Return what the patched method does."""
        return self._conv_forward(images, self.weight, None)


def twins() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    twin = a_chain()
    model = copy.deepcopy(twin)
    return apply(model, a_plan_for(copy.deepcopy(model), a_batch())), twin


def the_only(told: pytest.WarningsRecorder) -> str:
    (warning,) = (each for each in told.list if each.category is UntunedWarning)  # PyTorch may warn, too
    return str(warning.message)


def test_who_counts_operations_sees_pytorchs_own_and_one_warning_says_so(
    recwarn: pytest.WarningsRecorder,
) -> None:
    model, twin = twins()
    with FlopCounterMode(display=False) as expected:
        twin(a_batch())

    for _ in range(2):
        with FlopCounterMode(display=False) as counted:
            model(a_batch())

    assert counted.get_total_flops() == expected.get_total_flops() > 0
    assert the_only(recwarn) == (
        "The module '0' is called in a FlopCounterMode; it runs PyTorch's own convolution (elsewhere it is "
        "divided). This reason is given once for the whole model."
    )


def test_a_mode_of_functions_sees_pytorchs_own_and_one_warning_says_so(
    recwarn: pytest.WarningsRecorder,
) -> None:
    twin = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 3, 3))
    model = copy.deepcopy(twin)
    apply(model, a_plan_for(copy.deepcopy(model), a_batch()))

    with Doubling():
        result = model(a_batch())
        expected = twin(a_batch())

    assert torch.equal(result, expected)
    assert "'0' is called in a Doubling; it runs PyTorch's own" in the_only(recwarn)


@DYNAMOS
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's, too
def test_a_mode_of_functions_sees_pytorchs_own_in_graphs_too() -> None:
    model, twin = (torch.compile(each, backend="aot_eager", fullgraph=True) for each in twins())
    torch.testing.assert_close(model(a_batch()), twin(a_batch()))

    with Doubling():
        result = model(a_batch())
        expected = twin(a_batch())

    assert torch.equal(result, expected)


@pytest.mark.parametrize("mode", [lambda: torch.device("cpu"), lambda: autotune("1MiB"), nullcontext])
def test_modes_without_convolutions_of_their_own_override_none(mode: Callable[[], Any]) -> None:
    with mode():
        assert overriding_mode() is None
        with Doubling():
            assert overriding_mode() is Doubling


def test_selective_checkpoints_have_the_twin_s_gradients_and_one_warning(
    recwarn: pytest.WarningsRecorder,
) -> None:
    model, twin = twins()
    policy = functools.partial(
        create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE
    )
    for each in (model, twin):
        given = a_batch().requires_grad_()
        checkpoint(each, given, use_reentrant=False, context_fn=policy).square().mean().backward()

    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert "'0' is called in a CachingTorchDispatchMode; it runs PyTorch's own" in the_only(recwarn)


@pytest.mark.parametrize("examine", [trace, extract])
def test_who_examines_a_patched_model_is_not_told_that_it_is_watched(
    examine: Callable[[nn.Module, Tensor], object],
) -> None:
    model, _ = twins()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        examine(model, a_batch())


def test_tensors_that_compute_by_a_class_of_their_own_are_told() -> None:
    model, twin = twins()
    images = TwoTensor(a_batch(), a_batch())

    with pytest.warns(UntunedWarning) as told:
        result = model(images)

    assert torch.equal(result.a, twin(images).a)
    assert the_only(told) == (
        "The module '0' is called with a TwoTensor; it runs PyTorch's own convolution (convolutions of "
        "tensors that hold numbers themselves are divided). This reason is given once for the whole model."
    )


def pretended(model: nn.Module) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(a_batch()))


def counted_on_paper(model: nn.Module) -> None:
    with FlopCounterMode(display=False):
        model.to("meta")(a_batch().to("meta"))


@pytest.mark.parametrize(
    "run",
    [
        pretended,
        counted_on_paper,
        lambda model: torch.fx.Tracer().trace(Subclassed(model[0])),
        lambda model: model.to("meta")(a_batch().to("meta")),
        lambda model: torch.func.vmap(model.eval())(a_batch()[None]),
        lambda model: torch.func.jvp(model.eval(), (a_batch(),), (a_batch(),)),
    ],
)
def test_what_only_pretends_or_transforms_is_none_of_that(run: Callable[[nn.Module], Any]) -> None:
    model, _ = twins()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, of itself
        warnings.simplefilter("error", UntunedWarning)
        run(model)


@pytest.mark.parametrize(
    ("run", "whose"),
    [
        (lambda model, images: model(images), "The module '0'"),
        (
            lambda model, images: torch.compile(model, backend="eager", fullgraph=True)(images),
            "A module like '0'",
        ),
    ],
)
@DYNAMOS
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's, too
def test_a_model_that_came_to_another_kind_of_device_says_so_once(
    run: Callable[[nn.Module, Tensor], Tensor], whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twin = twins()
    for module in (model[0], model[3]):  # as after model.cpu(), of a plan that was made on a GPU
        shapes = module._conv_forward._shapes
        elsewhere = dataclasses.replace(shapes._memory.environment, backend="cudnn")
        monkeypatch.setattr(shapes, "_memory", dataclasses.replace(shapes._memory, environment=elsewhere))
    moved = copy.deepcopy(model)

    with pytest.warns(UntunedWarning) as told:
        result = run(moved, a_batch())

    assert torch.equal(result, twin(a_batch()))
    assert the_only(told) == (
        f"{whose} was tuned for the backend 'cudnn', but computes on cpu; it runs PyTorch's own "
        "convolution (move it back, or optimize again where it is now). This reason is given once for the "
        "whole model."
    )


def test_autotune_leaves_convolutions_to_a_mode_of_functions_around_it(
    recwarn: pytest.WarningsRecorder,
) -> None:
    images, weight = a_batch(), torch.randn(4, 3, 3, 3)
    with Doubling(), autotune("1MiB"):
        result = F.conv2d(images, weight)

    assert torch.equal(result, 2 * F.conv2d(images, weight))
    assert "A convolution is called in a Doubling; it runs PyTorch's own" in the_only(recwarn)


def test_within_autotune_who_watches_is_told_once_for_all_convolutions(
    recwarn: pytest.WarningsRecorder,
) -> None:
    images, weight = a_batch(), torch.randn(4, 3, 3, 3)
    with autotune("1MiB"), FlopCounterMode(display=False):
        for _ in range(2):
            result = F.conv2d(images, weight)

    assert torch.equal(result, F.conv2d(images, weight))
    assert the_only(recwarn) == (
        "A convolution is called in a FlopCounterMode; it runs PyTorch's own convolution (elsewhere it is "
        "divided). This reason is given once for this autotune."
    )
