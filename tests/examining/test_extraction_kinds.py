"""Which convolutions are found, which are left to PyTorch, and which samples and models are refused."""

import logging
import operator
import re
import threading
import unittest
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name that PyTorch's users know it by

from mucudnn.errors import NothingToTuneError, SampleError, ValuesWarning
from mucudnn.examining.extraction import extract
from mucudnn.problem import ConvOp
from tests.examining.models import DependsOnValues
from tests.models import a_batch, a_chain


def test_a_sample_of_the_wrong_size_is_told_by_us_alone() -> None:
    log = "torch._subclasses.fake_tensor"
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(7, 2))

    with unittest.TestCase().assertNoLogs(log), pytest.raises(SampleError, match="it raised RuntimeError"):
        extract(model, a_batch())

    assert not logging.getLogger(log).disabled


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
        "ours": "it calls a convolution as a function, and only mucudnn.autotune divides such calls",
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


class Dilated(nn.Conv2d):
    """The same filter with two dilations, of which its attributes say one between calls."""

    def forward(self, image: Tensor) -> Tensor:
        near = self._conv_forward(image, self.weight, self.bias)
        self.padding, self.dilation = (2, 2), (2, 2)
        try:
            return near + self._conv_forward(image, self.weight, self.bias)
        finally:
            self.padding, self.dilation = (1, 1), (1, 1)


class Slim(nn.Conv2d):
    """A part of the filters."""

    def forward(self, image: Tensor) -> Tensor:
        return self._conv_forward(image, self.weight[:2], None)


class Precise(nn.Conv2d):
    """In a wider type than that of its weight."""

    def forward(self, image: Tensor) -> Tensor:
        return self._conv_forward(image.double(), self.weight.double(), None).to(image.dtype)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (
            Dilated,
            r"with padding \(2, 2\), dilation \(2, 2\), but its attributes say "
            r"padding \(1, 1\), dilation \(1, 1\)",
        ),
        (Slim, r"with weight \(2, 4, 3, 3\), but its attributes say weight \(4, 4, 3, 3\)$"),
        (Precise, "with type float64, but its attributes say type float32"),
    ],
)
def test_a_convolution_that_computes_otherwise_than_it_says_is_left_alone(
    kind: type[nn.Conv2d], reason: str
) -> None:
    """No plan suits such a module."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), kind(4, 4, 3, padding=1))

    extraction = extract(model, a_batch())

    assert {site.path for site in extraction.problems} == {"0"}
    ((path, told),) = extraction.untouched
    assert path == "1"
    assert re.search(reason, told)


def test_a_convolution_whose_attributes_do_not_describe_it_is_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3))
    del model[1].in_channels

    extraction = extract(model, a_batch())

    assert {site.path for site in extraction.problems} == {"0"}
    ((path, told),) = extraction.untouched
    assert path == "1"
    assert told.startswith("it computes with weight (4, 4, 3, 3), stride (1, 1), ")
    assert "but its attributes say nothing that describes a convolution (" in told


def test_half_a_model_that_autocast_casts_to_another_type_is_divided_in_that() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1)).half()

    with torch.autocast("cpu", torch.bfloat16):
        extraction = extract(model, a_batch().half())

    assert {problem.dtype for problem in extraction.problems.values()} == {"bfloat16"}


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


def test_complex_numbers_are_left_to_pytorch() -> None:
    model = nn.Conv2d(3, 4, 3, dtype=torch.complex64)

    with pytest.raises(SampleError, match="complex64 has PyTorch's own convolution only"):
        extract(model, a_batch().to(torch.complex64))


@pytest.mark.usefixtures("two_threads")  # one alone refuses it
def test_a_transposed_convolution_without_a_result_is_left_to_pytorch() -> None:
    with pytest.raises(SampleError, match=r"must have pixels, but got none\.$"):
        extract(nn.ConvTranspose2d(3, 4, 1, padding=1), a_batch()[..., :2, :2])


def test_a_batch_of_nothing_is_left_to_pytorch() -> None:
    with pytest.raises(SampleError, match="its tensors are empty"):
        extract(nn.Conv2d(3, 4, 3), a_batch()[:0])


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
    assert all("only mucudnn.autotune divides such calls" in reason for _, reason in found.untouched)


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
    assert reason.startswith("besides its own convolution it calls one as a function, and only mucudnn")


def test_a_model_of_functions_alone_is_pointed_to_autotune() -> None:
    class Function(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.conv2d(x, x[:1])

    with pytest.raises(
        NothingToTuneError, match=r"the model itself: it calls .* as a function, and only mucudnn"
    ):
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
