"""What is found of a model's convolutions: their sites, shapes, layouts, and the ops that they need."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name that PyTorch's users know it by
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from mucudnn.errors import NothingToTuneError, OptionError, SampleError
from mucudnn.examining.arguments import CallArguments
from mucudnn.examining.extraction import extract
from mucudnn.problem import ConvOp, Layout
from tests.examining.models import ALL, ops_of
from tests.models import a_batch, a_chain


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
    assert ops_of(extract(a_chain(), a_batch())) == {"0": (ConvOp.FPROP, ConvOp.WGRAD), "3": ALL}


def test_a_sample_that_needs_a_gradient_gets_one() -> None:
    assert ops_of(extract(a_chain(), a_batch().requires_grad_()))["0"] == ALL


def test_evaluation_takes_the_forward_pass_only() -> None:
    assert ops_of(extract(a_chain().eval(), a_batch())) == {"0": (ConvOp.FPROP,), "3": (ConvOp.FPROP,)}


def test_training_counts_even_where_gradients_are_switched_off() -> None:
    with torch.no_grad():
        assert ops_of(extract(a_chain(), a_batch()))["3"] == ALL


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


def test_frozen_weights_have_no_gradient() -> None:
    model = a_chain()
    model[3].requires_grad_(requires_grad=False)

    assert ops_of(extract(model, a_batch()))["3"] == (ConvOp.FPROP, ConvOp.DGRAD)


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

    assert ops_of(extract(model, a_batch())) == {"0": (ConvOp.FPROP,), "1": (ConvOp.FPROP, ConvOp.WGRAD)}


def test_only_the_ops_that_are_asked_for_are_taken() -> None:
    assert ops_of(extract(a_chain(), a_batch(), ["fprop", "dgrad"])) == {
        "0": (ConvOp.FPROP,),
        "3": (ConvOp.FPROP, ConvOp.DGRAD),
    }


def test_one_op_may_be_asked_for_by_its_name() -> None:
    assert ops_of(extract(a_chain(), a_batch(), "wgrad")) == {"0": (ConvOp.WGRAD,), "3": (ConvOp.WGRAD,)}


@pytest.mark.parametrize(
    "ops", ["forward", "", ["fprop", "bprop"], [], None, 5, [None], [["fprop"]], iter(["fprop"])]
)
def test_an_unknown_op_is_answered_with_those_that_there_are(ops: Any) -> None:
    with pytest.raises(
        OptionError, match=r"ops must be 'auto' or some of 'fprop', 'dgrad', 'wgrad', but got"
    ):
        extract(a_chain(), a_batch(), ops)


def test_what_no_convolution_allows_is_told_in_pytorchs_words() -> None:
    conv = nn.Conv2d(3, 4, 3, padding="same")
    conv.stride = (2, 2)

    with pytest.raises(SampleError, match=r"raised RuntimeError\(.*padding='same' is not supported"):
        extract(conv, a_batch())


def test_a_convolution_that_needs_none_of_the_ops_asked_for_is_listed_with_the_reason() -> None:
    # Nobody asks for the gradient of the images.
    extraction = extract(a_chain(), a_batch(), "dgrad")

    assert ops_of(extraction) == {"3": (ConvOp.DGRAD,)}
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

    assert ops_of(extract(nn.Sequential(conv, nn.ReLU(), conv), a_batch())) == {"0": ALL}


def test_an_op_is_taken_even_if_a_later_call_does_not_need_it() -> None:
    class HeadOnBoth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

        def forward(self, image: Tensor) -> Tensor:
            return self.head(self.body(image)) + self.head(image)

    assert ops_of(extract(HeadOnBoth(), a_batch()))["head"] == ALL


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


def test_what_lies_on_another_kind_of_device_is_left_out_with_the_reason() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.here, self.there = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, device="meta")

        def forward(self, images: Tensor) -> Tensor:
            result = self.here(images)
            self.there(result.to("meta"))
            return result

    extraction = extract(Split(), torch.randn(2, 3, 8, 8))

    assert {site.path for site in extraction.problems} == {"here"}
    assert extraction.untouched == (("there", "it lies on meta, and those that are tuned on cpu"),)


def test_parametrised_weights_are_divided_as_others_are() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 4, 3)))

    assert ops_of(extract(model, a_batch())) == {"0": (ConvOp.FPROP, ConvOp.WGRAD)}


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


def test_under_autocast_a_convolution_has_its_type() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        extraction = extract(a_chain(), a_batch())

    assert {call.problem.dtype for call in extraction.calls} == {"bfloat16"}


def test_numbers_of_numpy_are_numbers() -> None:
    two, one = np.int64(2), np.int64(1)
    model = nn.Conv2d(4, 4, np.int64(3), stride=two, padding=one, dilation=one, groups=two)  # type: ignore[arg-type]

    (call,) = extract(model, a_batch(channels=4)).calls

    assert call.problem.stride == (2, 2)
    assert call.problem == extract(nn.Conv2d(4, 4, 3, 2, 1, 1, 2), a_batch(channels=4)).calls[0].problem
    assert {type(each) for each in (*call.problem.stride, call.problem.groups)} == {int}


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
