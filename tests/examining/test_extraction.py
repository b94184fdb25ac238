"""What is found of a model's convolutions, and that the model does not notice."""

import gc
import logging
import operator
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F  # noqa: N812  # the name that PyTorch's users know it by
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from mucudnn.errors import NothingToTuneError, OptionError, SampleError, ValuesWarning
from mucudnn.examining.extraction import CallArguments, Extraction, extract
from mucudnn.examining.passes import unhooked
from mucudnn.problem import ConvOp, Layout
from tests.models import a_batch, a_chain

ALL = (ConvOp.FPROP, ConvOp.DGRAD, ConvOp.WGRAD)


def _ops(extraction: Extraction) -> dict[str, tuple[ConvOp, ...]]:
    return {call.path: call.ops for call in extraction.calls}


class DependsOnValues(nn.Module):
    """Decides by what it has computed, which takes real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Conv2d(4, 4, 3)

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.first(image)))
        return self.second(hidden) if hidden.abs().sum().item() > 0 else hidden


class Remembers(nn.Module):
    """Keeps what its first call has computed, as models do with position encodings."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.offset: Tensor | None = None

    def forward(self, image: Tensor) -> Tensor:
        if self.offset is None:
            self.offset = torch.arange(image.shape[-1]).to(image)
        return self.conv(image + self.offset)


class RunningMean(nn.Module):
    """Binds its buffer to a new tensor in every pass, and needs real numbers."""

    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.register_buffer("running", torch.zeros(()))

    def forward(self, image: Tensor) -> Tensor:
        self.running = self.running + image.mean().item()
        return self.conv(image)


def test_sites_come_with_their_paths_in_the_order_in_which_they_run() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Conv2d(4, 4, 1)
            self.block = nn.Sequential(nn.Conv2d(3, 4, 1))

        def forward(self, image: Tensor) -> Tensor:
            return self.last(self.block(image))

    extraction = extract(Backwards(), a_batch())

    assert [call.path for call in extraction.calls] == ["block.0", "last"]


def test_a_problem_has_the_shapes_of_its_module_and_sample() -> None:
    conv = nn.Conv2d(4, 6, (3, 5), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2, bias=False)

    problem = extract(conv, a_batch(7, channels=4, size=12)).calls[0].problem

    assert problem.input_shape == (7, 4, 12, 12)
    assert problem.filter_shape == (6, 2, 3, 5)
    assert (problem.stride, problem.padding, problem.dilation) == ((2, 1), (1, 2), (1, 2))
    assert (problem.groups, problem.bias, problem.dtype) == (2, False, "float32")


def test_the_model_itself_may_be_the_convolution() -> None:
    assert [call.path for call in extract(nn.Conv2d(3, 4, 3), a_batch()).calls] == [""]


@pytest.mark.parametrize(
    ("padding", "size", "padded"),
    [("same", (4, 3), (7, 6)), ("valid", (4, 3), (6, 6)), ((1, 2), (4, 3), (6, 6))],
)
def test_padding_by_name_becomes_numbers_and_at_most_one_row_more(
    padding: Any, size: tuple[int, int], padded: tuple[int, int]
) -> None:
    problem = extract(nn.Conv2d(3, 4, size, padding=padding), a_batch()).calls[0].problem

    expected = {"same": (1, 1), "valid": (0, 0)}.get(padding, padding)
    assert (problem.padding, problem.input_size) == (expected, padded)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_other_padding_than_zeros_is_part_of_the_image(mode: str) -> None:
    conv = nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode=mode)

    problem = extract(conv, a_batch()).calls[0].problem

    assert (problem.padding, problem.input_size) == ((0, 0), (8, 10))


def test_a_model_in_channels_last_has_problems_in_channels_last() -> None:
    model = a_chain().to(memory_format=torch.channels_last)

    calls = extract(model, a_batch().to(memory_format=torch.channels_last)).calls

    assert {(call.problem.layout, call.problem.filter_layout) for call in calls} == {
        (Layout.CHANNELS_LAST, Layout.CHANNELS_LAST)
    }


def test_one_sample_without_a_batch_is_a_batch_of_one() -> None:
    assert extract(nn.Conv2d(3, 4, 3), a_batch()[0]).calls[0].problem.batch == 1


def test_training_takes_the_gradients_that_backward_computes() -> None:
    # Nobody asks for the gradient of the images.
    assert _ops(extract(a_chain(), a_batch())) == {"0": (ConvOp.FPROP, ConvOp.WGRAD), "3": ALL}


def test_a_sample_that_needs_a_gradient_gets_one() -> None:
    assert _ops(extract(a_chain(), a_batch().requires_grad_()))["0"] == ALL


def test_evaluation_takes_the_forward_pass_only() -> None:
    assert _ops(extract(a_chain().eval(), a_batch())) == {"0": (ConvOp.FPROP,), "3": (ConvOp.FPROP,)}


def test_training_counts_even_where_gradients_are_switched_off() -> None:
    with torch.no_grad():
        assert _ops(extract(a_chain(), a_batch()))["3"] == ALL


@pytest.mark.parametrize("looks_at_values", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_convolutions_in_checkpoints_have_all_their_gradients(
    use_reentrant: bool, looks_at_values: bool
) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 3, 1)
            self.rest = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))

        def forward(self, x: Tensor) -> Tensor:
            features = self.first(x)
            if looks_at_values and features.sum().item() > 1e9:
                return features
            result: Tensor = checkpoint(self.rest, features, use_reentrant=use_reentrant)
            return result

    found = extract(Checkpointed(), a_batch())

    assert {call.path: call.ops for call in found.calls} == {
        "first": (ConvOp.FPROP, ConvOp.WGRAD),
        "rest.0": (*ConvOp,),
        "rest.2": (*ConvOp,),
    }


def test_other_threads_compute_their_checkpoints_as_ever_meanwhile() -> None:
    def computes_again_with_the_same_random_numbers() -> bool:
        x = torch.ones(1000, requires_grad=True)
        y = checkpoint(F.dropout, x, use_reentrant=True)
        assert isinstance(y, Tensor)
        y.sum().backward()
        assert x.grad is not None
        return torch.equal(y != 0, x.grad != 0)

    class Waiting(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with ThreadPoolExecutor(1) as pool:
                found.append(pool.submit(computes_again_with_the_same_random_numbers).result())
            result: Tensor = super().forward(x)
            return result

    found: list[bool] = []
    extract(Waiting(nn.Conv2d(3, 4, 3)), a_batch())

    assert found == [True]


def test_what_is_saved_out_of_sight_of_the_callers_hooks_is_let_go() -> None:
    def identity(tensor: Tensor) -> Tensor:
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(identity, identity), unhooked():
        result = (torch.ones(3, requires_grad=True) * 2).relu()  # it saves its result
    gone = weakref.ref(result)
    (gradient,) = torch.autograd.grad(result.sum(), [result], retain_graph=True)
    del result, gradient
    gc.collect()

    assert gone() is None


def test_frozen_weights_have_no_gradient() -> None:
    model = a_chain()
    model[3].requires_grad_(requires_grad=False)

    assert _ops(extract(model, a_batch()))["3"] == (ConvOp.FPROP, ConvOp.DGRAD)


@pytest.mark.parametrize(
    ("ops", "is_training", "computed"),
    [("auto", False, 1), ("auto", True, 3), ("fprop", False, 3), ("fprop", True, 3)],
)
def test_in_eval_mode_a_model_computes_its_forward_pass_unless_ops_are_asked_for(
    ops: str, is_training: bool, computed: int
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3)).train(is_training)

    call = extract(model, a_batch(), ops).calls[-1]

    assert call.computed == tuple(ConvOp)[:computed]


def test_behind_a_frozen_beginning_no_input_gradient_is_needed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3).requires_grad_(requires_grad=False), nn.Conv2d(4, 4, 3))

    assert _ops(extract(model, a_batch())) == {"0": (ConvOp.FPROP,), "1": (ConvOp.FPROP, ConvOp.WGRAD)}


def test_only_the_ops_that_are_asked_for_are_taken() -> None:
    assert _ops(extract(a_chain(), a_batch(), ["fprop", "dgrad"])) == {
        "0": (ConvOp.FPROP,),
        "3": (ConvOp.FPROP, ConvOp.DGRAD),
    }


def test_one_op_may_be_asked_for_by_its_name() -> None:
    assert _ops(extract(a_chain(), a_batch(), "wgrad")) == {"0": (ConvOp.WGRAD,), "3": (ConvOp.WGRAD,)}


@pytest.mark.parametrize(
    "ops", ["forward", "", ["fprop", "bprop"], [], None, 5, [None], [["fprop"]], iter(["fprop"])]
)
def test_an_unknown_op_is_answered_with_those_that_there_are(ops: Any) -> None:
    with pytest.raises(
        OptionError, match=r"ops must be 'auto' or some of 'fprop', 'dgrad', 'wgrad', but got"
    ):
        extract(a_chain(), a_batch(), ops)


def test_a_convolution_that_needs_none_of_the_ops_asked_for_is_listed_with_the_reason() -> None:
    # Nobody asks for the gradient of the images.
    extraction = extract(a_chain(), a_batch(), "dgrad")

    assert _ops(extraction) == {"3": (ConvOp.DGRAD,)}
    assert extraction.untouched == (("0", "it needs no dgrad"),)


def test_a_model_that_needs_none_of_the_ops_asked_for_is_refused() -> None:
    conv = nn.Conv2d(3, 4, 3).requires_grad_(requires_grad=False)

    with pytest.raises(NothingToTuneError, match="0: it needs no dgrad or wgrad"):
        extract(nn.Sequential(conv), a_batch(), ["wgrad", "dgrad"])


def test_a_shape_that_needs_none_of_the_ops_asked_for_leaves_the_other_its_number() -> None:
    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 4, 3)

        def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
            return self.head(image), self.head(self.body(image[..., ::2, ::2].contiguous()))

    extraction = extract(Pyramid(), a_batch(), "dgrad")

    assert [(call.path, call.variant, call.ops) for call in extraction.calls] == [
        ("head", 1, (ConvOp.DGRAD,))
    ]
    assert extraction.untouched == (("body", "it needs no dgrad"),)


def test_a_shared_module_is_one_site() -> None:
    conv = nn.Conv2d(3, 3, 3, padding=1)

    extraction = extract(nn.Sequential(conv, nn.ReLU(), conv), a_batch())

    assert [(call.path, call.variant) for call in extraction.calls] == [("0", 0)]


def test_an_op_that_any_call_of_a_shared_module_needs_is_taken() -> None:
    # The first call's input needs no gradient, the second's does.
    conv = nn.Conv2d(3, 3, 3, padding=1)

    assert _ops(extract(nn.Sequential(conv, nn.ReLU(), conv), a_batch())) == {"0": ALL}


def test_an_op_is_taken_even_if_a_later_call_does_not_need_it() -> None:
    class HeadOnBoth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

        def forward(self, image: Tensor) -> Tensor:
            return self.head(self.body(image)) + self.head(image)

    assert _ops(extract(HeadOnBoth(), a_batch()))["head"] == ALL


def test_every_shape_that_a_module_meets_is_a_variant() -> None:
    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Conv2d(3, 4, 3)

        def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
            return self.head(image), self.head(image[..., ::2, ::2].contiguous())

    calls = extract(Pyramid(), a_batch()).calls

    assert [(call.path, call.variant, call.problem.input_size) for call in calls] == [
        ("head", 0, (6, 6)),
        ("head", 1, (3, 3)),
    ]


def test_parametrised_weights_are_divided_as_others_are() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 4, 3)))

    assert _ops(extract(model, a_batch())) == {"0": (ConvOp.FPROP, ConvOp.WGRAD)}


def _samples() -> dict[str, Callable[[Tensor, Tensor], object]]:
    return {
        "tuple": lambda image, scale: (image, scale),
        "list": lambda image, scale: [image, scale],
        "dict": lambda image, scale: {"scale": scale, "image": image},
        "both": lambda image, scale: CallArguments((image,), {"scale": scale}),
    }


@pytest.mark.parametrize("kind", _samples())
def test_a_sample_may_be_arguments_by_position_or_by_name(kind: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, image: Tensor, scale: Tensor) -> Tensor:
            return self.conv(image) * scale

    sample = _samples()[kind](a_batch(5), torch.tensor(2.0))

    assert extract(Scaled(), sample).calls[0].problem.batch == 5


class Looks(nn.Module):
    """Decides by what it is given."""

    def forward(self, image: Tensor) -> Tensor:
        return image if image.sum().item() > 0 else -image


class Compiled(nn.Module):
    """Whose code is compiled nowhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, image: Tensor) -> Tensor:
        return self.conv(image).relu()


@pytest.mark.parametrize("looks_at_values", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # Dynamo's, of its own
def test_what_is_examined_is_compiled_afterwards(looks_at_values: bool) -> None:
    compiled = torch.compile(Compiled(), backend="eager", fullgraph=True)
    model = nn.Sequential(compiled, Looks()) if looks_at_values else compiled

    assert extract(model, a_batch()).calls

    with torch.no_grad():
        compiled(a_batch())  # raises unless it is


def test_a_model_that_is_to_be_compiled_is_examined_without_a_warning() -> None:
    compiled = torch.compile(nn.Sequential(nn.Conv2d(3, 4, 3)), backend="eager")

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        extraction = extract(compiled, a_batch())

    assert [call.path for call in extraction.calls] == ["_orig_mod.0"]


def test_a_sample_of_the_wrong_size_is_told_by_us_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(7, 2))

    with pytest.raises(SampleError, match="it raised RuntimeError"):
        extract(model, a_batch())

    assert caplog.records == []
    assert not logging.getLogger("torch._subclasses.fake_tensor").disabled


def test_nothing_is_computed() -> None:
    # An image of 2^34 numbers would take 64 GiB.
    image = torch.zeros(1).expand(2**8, 3, 2**12, 2**12)

    assert extract(a_chain(), image).calls[0].problem.batch == 256


def test_what_flows_through_the_model_has_no_values() -> None:
    seen: list[type] = []
    model = a_chain()
    model[0].register_forward_hook(lambda *told: seen.append(type(told[-1])))

    extract(model, a_batch())

    assert [kind.__name__ for kind in seen] == ["FakeTensor"]


class TakesAnotherWay(nn.Module):
    """Computes other convolutions without values than with them."""

    def __init__(self) -> None:
        super().__init__()
        self.shown, self.hidden = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)

    def forward(self, image: Tensor) -> Tensor:
        if isinstance(image, FakeTensor):
            self.shown(image)
            F.conv2d(image, self.shown.weight)
            raise RuntimeError("there are no values")
        return self.hidden(image)


def test_what_a_pass_that_failed_has_shown_is_forgotten() -> None:
    extraction = extract(TakesAnotherWay(), a_batch())

    assert [call.path for call in extraction.calls] == ["hidden"]
    assert extraction.untouched == (("shown", "the sample does not reach its convolution"),)


def test_a_pass_that_fails_leaves_statistics_as_they_were() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(7, 2))
    before = [buffer.clone() for buffer in model.buffers()]

    with pytest.raises(SampleError):
        extract(model, a_batch())

    assert all(map(torch.equal, model.buffers(), before))


def test_a_pass_touches_the_random_state_of_no_card_on_which_the_model_does_not_lie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[object] = []
    fork = torch.random.fork_rng

    def noting(devices: object = None) -> object:
        kept.append(devices)
        return fork(devices)

    monkeypatch.setattr(torch.random, "fork_rng", noting)

    extract(nn.Sequential(nn.LazyConv2d(3, 1), DependsOnValues()), a_batch())

    assert kept == [[], [], []]  # for parameters, without arithmetic, and in earnest


def test_a_model_that_needs_values_runs_in_earnest() -> None:
    calls = extract(DependsOnValues(), a_batch()).calls

    assert [(call.path, call.variant) for call in calls] == [("first", 0), ("second", 0)]


class ChangesItsInput(nn.Module):
    """Adds to its input in place, and needs real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.seen: list[Tensor] = []

    def forward(self, image: Tensor, other: Tensor | None = None) -> Tensor:
        self.seen.append(image)
        if image.requires_grad and image.is_leaf:
            return self.conv(image * image.sum().item())
        image.add_(1 if image.sum().item() else 2)
        if other is not None and other is not image:
            raise ValueError("image and other must be one")
        return self.conv(image)


@pytest.mark.parametrize("dim", [3, 4])
def test_the_sample_stays_as_it_was(dim: int) -> None:
    image = a_batch() if dim == 4 else a_batch()[0]
    before, version = image.clone(), image._version

    extract(ChangesItsInput(), {"image": image})

    assert torch.equal(image, before)
    assert image._version == version


@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_sample_for_a_run_in_earnest_keeps_its_gradient(is_leaf: bool) -> None:
    image = a_batch().requires_grad_()
    if not is_leaf:
        image = image * 2

    assert _ops(extract(ChangesItsInput(), image)) == {"conv": ALL}


def test_a_sample_for_a_run_in_earnest_keeps_its_memory_format() -> None:
    model, strides = ChangesItsInput(), []
    model.register_forward_pre_hook(lambda _module, args: strides.append(args[0].stride()))
    image = a_batch().to(memory_format=torch.channels_last)

    (call,) = extract(model, image).calls

    assert call.problem.layout is Layout.CHANNELS_LAST
    assert strides[-1] == image.stride()
    assert model.seen == []


def test_a_tensor_that_a_sample_holds_twice_stays_one() -> None:
    image = a_batch()

    assert _ops(extract(ChangesItsInput(), (image, image)))["conv"] == (ConvOp.FPROP, ConvOp.WGRAD)


@pytest.mark.parametrize("kind", [a_chain, DependsOnValues, RunningMean])
def test_buffers_stay_as_they_were(kind: Callable[[], nn.Module]) -> None:
    model = kind()
    identities = {name: id(buffer) for name, buffer in model.named_buffers()}
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    extract(model, a_batch())

    assert {name: id(buffer) for name, buffer in model.named_buffers()} == identities
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("kind", [a_chain, DependsOnValues])
def test_the_random_state_stays_as_it_was(kind: Callable[[], nn.Module]) -> None:
    model = kind()
    before = torch.get_rng_state()

    extract(model, a_batch())

    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_inference_mode_has_made_runs_in_earnest_too() -> None:
    with torch.inference_mode():
        model = DependsOnValues().eval()

    with torch.no_grad():
        calls = extract(model, a_batch()).calls

    assert [call.path for call in calls] == ["first", "second"]


@pytest.mark.parametrize("kind", [a_chain, DependsOnValues])
def test_no_parameter_gets_a_gradient(kind: Callable[[], nn.Module]) -> None:
    model = kind()

    extract(model, a_batch())

    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", [a_chain, DependsOnValues, Remembers])
def test_attributes_stay_as_they_were(kind: Callable[[], nn.Module]) -> None:
    model = kind()
    before = [dict(module.__dict__) for module in model.modules()]

    extract(model, a_batch())

    assert [dict(module.__dict__) for module in model.modules()] == before


@pytest.mark.parametrize("model", [a_chain(), DependsOnValues()], ids=["without", "in earnest"])
def test_the_caller_s_modes_do_not_see_the_pass(model: nn.Module) -> None:
    with FlopCounterMode(display=False) as counted:
        extract(model, a_batch())
        assert counted.get_total_flops() == 0
        model(a_batch())
    assert counted.get_total_flops() > 0


def test_what_a_model_remembers_of_the_pass_is_forgotten() -> None:
    model = Remembers()
    extract(model, a_batch())

    assert type(model(a_batch())) is Tensor


def test_a_model_that_raises_is_left_as_it_was() -> None:
    model = a_chain()
    before = [dict(module.__dict__) for module in model.modules()]

    with pytest.raises(SampleError, match="must run on the sample"):
        extract(model, a_batch(channels=5))

    assert [dict(module.__dict__) for module in model.modules()] == before


def test_a_sample_that_the_model_rejects_is_refused_with_the_models_own_words() -> None:
    with pytest.raises(SampleError, match=r"it raised RuntimeError\('.*expected input.* to have 3 channels"):
        extract(a_chain(), a_batch(channels=5))


def test_a_sample_that_is_none_is_refused_with_pytorchs_own_words() -> None:
    with pytest.raises(
        SampleError, match=r"it raised TypeError\('conv2d\(\) received an invalid combination"
    ):
        extract(a_chain(), None)


def test_too_few_arguments_are_refused() -> None:
    with pytest.raises(SampleError, match="missing 1 required positional argument"):
        extract(DependsOnValues(), ())


def test_a_model_without_convolutions_is_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 2))

    with pytest.raises(SampleError, match="must have a convolution that can be divided, but it has none"):
        extract(model, a_batch())


class Doubled(nn.Conv2d):
    def _conv_forward(self, image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(image, 2 * weight, bias)


class Halved(nn.ConvTranspose2d):
    def forward(self, image: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(image) / 2


def test_a_model_whose_convolutions_cannot_be_divided_is_refused_with_the_reasons() -> None:
    with pytest.raises(SampleError, match="0: Doubled computes its convolution itself"):
        extract(nn.Sequential(Doubled(3, 4, 3)), a_batch())


class Standardised(nn.Conv2d):
    def forward(self, image: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        return nn.functional.conv2d(image, weight, self.bias)


@pytest.mark.parametrize("makes_values", [False, True])
def test_a_convolution_that_calls_a_function_instead_is_named_with_that_reason(makes_values: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ours = Standardised(3, 4, 3)
            self.plain = nn.Conv2d(4, 4, 3)
            self.idle = Standardised(3, 4, 3)

        def forward(self, image: Tensor) -> Tensor:
            y = self.plain(self.ours(image))
            return y * y.sum().item() if makes_values else y

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ValuesWarning)
        extraction = extract(Net(), a_batch())

    assert [call.path for call in extraction.calls] == ["plain"]
    assert dict(extraction.untouched) == {
        "ours": "it calls a convolution as a function, and mucudnn.autotune alone divides such calls",
        "idle": "the sample does not reach its convolution",
    }


def test_every_kind_of_convolution_is_found() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 4, 3), nn.Flatten(2), nn.Conv1d(4, 4, 3),
        nn.ConvTranspose1d(4, 8, 3), nn.Unflatten(2, (2, 3, 6)), nn.Conv3d(8, 4, 1),
        nn.ConvTranspose3d(4, 4, 2),
    )  # fmt: skip

    extraction = extract(model, a_batch())

    assert [call.path for call in extraction.calls] == ["0", "1", "3", "4", "6", "7"]
    assert extraction.untouched == ()


def test_a_transposed_convolution_is_the_gradient_of_another() -> None:
    model = nn.ConvTranspose2d(3, 5, 3, stride=2, output_padding=1)
    call = extract(model, a_batch(samples=4, size=6)).calls[0]

    assert (call.problem.op, call.problem.bias) == (ConvOp.DGRAD, False)
    assert (call.problem.in_channels, call.problem.out_channels) == (5, 3)
    assert (call.problem.input_size, call.problem.output_size) == ((14, 14), (6, 6))
    assert call.ops == (ConvOp.DGRAD, ConvOp.WGRAD)


def test_the_forward_pass_of_a_transposed_convolution_is_its_dgrad_and_its_input_gradient_is_fprop() -> None:
    images = a_batch().requires_grad_()

    assert extract(nn.ConvTranspose2d(3, 4, 3).eval(), images).calls[0].ops == (ConvOp.DGRAD,)
    assert extract(nn.ConvTranspose2d(3, 4, 3), images, ["dgrad"]).calls[0].ops == (ConvOp.FPROP,)
    assert extract(nn.ConvTranspose2d(3, 4, 3), images).calls[0].ops == tuple(ConvOp)


def test_an_output_padding_that_no_gradient_has_is_left_to_pytorch() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ConvTranspose2d(3, 4, 3, dilation=2, output_padding=1))

    ((path, reason),) = extract(model, a_batch()).untouched
    assert path == "1"
    assert "output padding of a transposed convolution must be smaller than its stride" in reason


def test_lazy_modules_make_their_parameters_first() -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.LazyConvTranspose2d(4, 3))

    extraction = extract(model, a_batch())

    assert [call.path for call in extraction.calls] == ["0", "2"]
    assert type(model[0]) is nn.Conv2d
    assert model(a_batch()).shape[1:] == (4, 6, 6)


def test_statistics_of_lazy_modules_are_those_of_new_ones() -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d())

    extract(model, a_batch())

    norm = model[1]
    assert not norm.running_mean.any()
    assert bool((norm.running_var == 1).all())
    assert norm.num_batches_tracked == 0


@pytest.mark.filterwarnings("ignore:.torch.jit.")
def test_a_part_in_torchscript_is_no_obstacle() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), torch.jit.script(nn.ReLU()))

    assert [call.path for call in extract(model, a_batch()).calls] == ["0"]


@pytest.mark.filterwarnings("ignore:.torch.jit.")
@pytest.mark.parametrize("way", [torch.jit.script, lambda model: torch.jit.freeze(torch.jit.script(model))])
def test_convolutions_in_torchscript_are_told_of(way: Callable[[nn.Module], nn.Module]) -> None:
    script = way(nn.Sequential(nn.ReLU(), nn.Sequential(nn.Conv2d(4, 4, 3))).eval())

    extraction = extract(nn.Sequential(nn.Conv2d(3, 4, 3), script, torch.jit.script(nn.ReLU())), a_batch())

    assert [call.path for call in extraction.calls] == ["0"]
    assert extraction.untouched == (("1", "it is scripted or traced, and such modules run as they are"),)


def test_a_convolution_that_is_also_called_on_nothing_is_divided() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, images: Tensor) -> Tensor:
            return self.conv(images).sum() + self.conv(images[:0]).sum()

    extraction = extract(Twice(), a_batch())

    assert [call.path for call in extraction.calls] == ["conv"]
    assert extraction.untouched == ()


def test_parameters_within_shared_modules_stay_what_they_are() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Sequential(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1)))
            self.first = nn.ModuleDict({"body": shared})
            self.second = nn.ModuleDict({"body": shared, "head": nn.Conv2d(3, 4, 3)})

        def forward(self, images: Tensor) -> Tensor:
            return self.second["head"](self.second["body"](self.first["body"](images)))

    model = Twice()
    before = [*model.parameters()]

    extract(model, a_batch())

    assert all(map(operator.is_, model.parameters(), before))
    assert type(model(a_batch())) is Tensor


def test_imitations_of_quantised_convolutions_are_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    model[1].weight_fake_quant = nn.Identity()

    assert extract(model, a_batch()).untouched == (("1", "Conv2d imitates a quantised convolution"),)


def test_a_transposed_subclass_that_computes_differently_is_listed_with_the_reason() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Halved(4, 4, 3))

    assert extract(model, a_batch()).untouched == (("1", "Halved computes its convolution itself"),)


def test_a_subclass_that_computes_differently_is_listed_with_the_reason() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Doubled(4, 4, 3))

    assert extract(model, a_batch()).untouched == (("1", "Doubled computes its convolution itself"),)


def test_a_convolution_whose_instance_computes_differently_is_listed_with_the_reason() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))

    def doubled(image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return nn.Conv2d._conv_forward(model[1], image, 2 * weight, bias)

    model[1].__dict__["_conv_forward"] = doubled

    assert extract(model, a_batch()).untouched == (
        ("1", "its _conv_forward has been replaced by something else"),
    )
    assert model[1].__dict__["_conv_forward"] is doubled


def test_a_convolution_that_carries_our_own_patch_is_divided() -> None:
    class Patch:
        is_mucudnn_patch = True

    conv, patch = nn.Conv2d(3, 4, 3), Patch()
    conv.__dict__["_conv_forward"] = patch

    assert [call.path for call in extract(nn.Sequential(conv), a_batch()).calls] == ["0"]
    assert conv.__dict__["_conv_forward"] is patch


def test_a_subclass_that_only_initialises_differently_is_divided() -> None:
    class Wide(nn.Conv2d):
        def __init__(self, channels: int) -> None:
            super().__init__(channels, 4 * channels, 3)

    assert [call.path for call in extract(nn.Sequential(Wide(3)), a_batch()).calls] == ["0"]


def test_a_convolution_that_is_never_called_is_listed() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)

        def forward(self, image: Tensor) -> Tensor:
            return self.used(image)

    assert extract(Spare(), a_batch()).untouched == (("spare", "the sample does not reach its convolution"),)


def test_under_autocast_a_convolution_has_its_type() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        extraction = extract(a_chain(), a_batch())

    assert {call.problem.dtype for call in extraction.calls} == {"bfloat16"}


def test_complex_numbers_are_left_to_pytorch() -> None:
    model = nn.Conv2d(3, 4, 3, dtype=torch.complex64)

    with pytest.raises(SampleError, match="complex64 has PyTorch's own convolution only"):
        extract(model, a_batch().to(torch.complex64))


def test_numbers_of_numpy_are_numbers() -> None:
    two, one = np.int64(2), np.int64(1)
    model = nn.Conv2d(4, 4, np.int64(3), stride=two, padding=one, dilation=one, groups=two)  # type: ignore[arg-type]

    (call,) = extract(model, a_batch(channels=4)).calls

    assert call.problem.stride == (2, 2)
    assert call.problem == extract(nn.Conv2d(4, 4, 3, 2, 1, 1, 2), a_batch(channels=4)).calls[0].problem
    assert {type(each) for each in (*call.problem.stride, call.problem.groups)} == {int}


def test_a_transposed_convolution_without_a_result_is_left_to_pytorch() -> None:
    with pytest.raises(SampleError, match=r"must have pixels, but got none\.$"):
        extract(nn.ConvTranspose2d(3, 4, 1, padding=1), a_batch()[..., :2, :2])


def test_a_batch_of_nothing_is_left_to_pytorch() -> None:
    with pytest.raises(SampleError, match="its tensors are empty"):
        extract(nn.Conv2d(3, 4, 3), a_batch()[:0])


class _Calls(nn.Module):
    """A function, as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, image: Tensor) -> Tensor:
        return self.function(image)


@pytest.mark.parametrize(
    ("rank", "before"),
    [
        (2, nn.ChannelShuffle(2)),
        (2, nn.LogSigmoid()),
        (2, nn.ReLU()),
        (2, nn.RReLU()),
        (2, _Calls(lambda image: image.roll(1, -1))),
        (2, _Calls(lambda image: F.max_unpool2d(*F.max_pool2d(image, 2, return_indices=True), 2))),
        (3, nn.ReflectionPad3d(1)),
        (3, nn.ReplicationPad3d(1)),
    ],
)
def test_the_layout_is_that_of_what_comes_before(rank: int, before: nn.Module) -> None:
    kind, order = ((nn.Conv2d, torch.channels_last), (nn.Conv3d, torch.channels_last_3d))[rank - 2]
    images = torch.randn(2, 4, *(4,) * rank).contiguous(memory_format=order)
    hidden = before(images)
    assert hidden.is_contiguous() != hidden.is_contiguous(memory_format=order)

    (call,) = extract(nn.Sequential(before, kind(4, 4, 3)), images).calls

    expected = Layout.CONTIGUOUS if hidden.is_contiguous() else Layout.CHANNELS_LAST
    assert call.problem.layout is expected


class _Beside(nn.Module):
    """What becomes of an image's mean, and the image, into a convolution that tells the strides it meets."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.mean = nn.Conv2d(4, 1, 1)
        self.between = between
        self.conv = nn.Conv2d(5, 4, 3)

    def joined(self, image: Tensor) -> Tensor:
        return torch.cat([self.between(self.mean(image)), image], 1)

    def forward(self, image: Tensor) -> Tensor:
        result: Tensor = self.conv(self.joined(image))
        return result


@pytest.mark.parametrize(
    "between",
    [
        nn.Identity(),
        nn.BatchNorm2d(1),
        nn.BatchNorm2d(1).eval(),
        nn.Dropout(),
        nn.GELU(),
        nn.Hardswish(),
        nn.LeakyReLU(),
        nn.ReLU(),
        nn.SELU(),
        nn.SiLU(),
        nn.Sigmoid(),
        nn.Tanh(),
        _Calls(lambda image: image + image),
        _Calls(lambda image: image - 2),
        _Calls(lambda image: image * image.mean()),
    ],
)
def test_the_layout_after_one_channel_is_that_of_its_strides(between: nn.Module) -> None:
    # One channel in channels last is contiguous, too; whether it stays in channels last its strides decide.
    model = _Beside(between)
    images = a_batch(channels=4).contiguous(memory_format=torch.channels_last)
    joined = model.joined(images)
    assert joined.is_contiguous() != joined.is_contiguous(memory_format=torch.channels_last)

    *_, call = extract(model, images).calls

    assert call.path == "conv"
    assert call.problem.layout is (Layout.CONTIGUOUS if joined.is_contiguous() else Layout.CHANNELS_LAST)


class ByHand(nn.Module):
    """Calls convolutions as functions: its own, and one within a module of its own."""

    def __init__(self, inner: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 3, 3, 3))
        self.conv = nn.Conv2d(3, 3, 3)
        self.inner = ByHand(inner=False) if inner else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(self.inner(F.conv2d(x, self.weight)))
        return y


def test_convolutions_that_are_called_as_functions_are_told_of_with_their_module() -> None:
    found = extract(nn.Sequential(ByHand(), nn.Conv2d(3, 3, 1)), a_batch(size=20))

    assert [call.path for call in found.calls] == ["0.inner.conv", "0.conv", "1"]
    assert [path for path, _ in found.untouched] == ["0", "0.inner"]
    assert all("mucudnn.autotune alone divides such calls" in reason for _, reason in found.untouched)


class Adapted(nn.Conv2d):
    """A convolution with another one of low rank beside it, as a function."""

    def __init__(self) -> None:
        super().__init__(4, 4, 3, padding=1)
        self.down = nn.Parameter(torch.randn(1, 4, 1, 1))
        self.up = nn.Parameter(torch.randn(4, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.conv2d(F.conv2d(x, self.down), self.up)


def test_a_convolution_that_calls_functions_beside_its_own_is_extracted_and_told_of() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), Adapted())

    extraction = extract(model, torch.randn(2, 3, 8, 8))

    assert [call.path for call in extraction.calls] == ["0", "1"]
    ((path, reason),) = extraction.untouched
    assert path == "1"
    assert reason.startswith("beside its own convolution it calls one as a function, and mucudnn.autotune")


def test_a_model_of_functions_alone_is_pointed_to_autotune() -> None:
    class Function(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.conv2d(x, x[:1])

    with pytest.raises(NothingToTuneError, match=r"the model itself: it calls .* as a function, and mucudnn"):
        extract(Function(), a_batch())


def test_a_module_s_method_that_is_called_by_hand_is_no_function() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv.forward(x)

    found = extract(Parent(), a_batch())

    assert [call.path for call in found.calls] == ["conv"]
    assert found.untouched == ()


def test_modules_of_other_threads_are_none_of_its_business() -> None:
    model, other = ByHand(inner=False), nn.Conv2d(3, 3, 1)

    def run_another(module: nn.Module, args: object) -> None:
        thread = threading.Thread(target=other, args=(torch.zeros(1, 3, 2, 2),))
        thread.start()
        thread.join()

    model.inner.register_forward_pre_hook(run_another)

    assert [path for path, _ in extract(model, a_batch()).untouched] == [""]


def test_looking_for_functions_leaves_no_hook_behind() -> None:
    hooks = torch.nn.modules.module
    before = len(hooks._global_forward_pre_hooks), len(hooks._global_forward_hooks)

    extract(ByHand(), a_batch(size=20))
    with pytest.raises(SampleError):
        extract(ByHand(), a_batch(size=1))

    assert (len(hooks._global_forward_pre_hooks), len(hooks._global_forward_hooks)) == before
