"""That every convolution of a model is found, with what it needs, and that the model does not notice."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name that PyTorch's users know it by
from torch.nn.utils import parametrizations

from mucudnn.errors import NothingToTuneError, OptionError, SampleError, ValuesWarning
from mucudnn.examining.extraction import extract
from mucudnn.examining.passes import is_examining
from mucudnn.examining.tracing import trace
from mucudnn.forecast import Occurrence
from mucudnn.plan import ConvSite
from mucudnn.problem import ConvOp, Layout
from tests.examining.models import ChangesItsInput, DependsOnValues, Remembers, RunningMean
from tests.models import a_batch, a_chain

pytestmark = pytest.mark.filterwarnings("ignore::mucudnn.errors.ValuesWarning")

FPROP, DGRAD, WGRAD = ConvOp
ALL = [FPROP, DGRAD, WGRAD]

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class Calls(nn.Module):
    """A model that is one function of its input."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, image: Tensor) -> Tensor:
        return self._function(image)


def shape_of(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without values."""
    return torch.empty(sizes, dtype=dtype, device="meta")


def ops_by_path(occurrences: tuple[Occurrence, ...]) -> dict[str, list[ConvOp]]:
    ops: dict[str, list[ConvOp]] = {}
    for each in occurrences:
        ops.setdefault(each.site.path, []).append(each.problem.op)
    return ops


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_convolutions_of_every_rank_are_found(rank: int) -> None:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    model = nn.Sequential(kind(4, 6, 3, stride=2, padding=1, dilation=2, groups=2))

    found = trace(model, shape_of(5, 4, *[12] * rank))

    problem = found[0].problem
    assert [each.site for each in found] == [ConvSite("0", FPROP), ConvSite("0", WGRAD)]
    assert (problem.input_shape, problem.filter_shape) == ((5, 4, *[12] * rank), (6, 2, *[3] * rank))
    assert (problem.stride, problem.padding, problem.dilation) == ((2,) * rank, (1,) * rank, (2,) * rank)
    assert (problem.groups, problem.bias, problem.output_size) == (2, True, (5,) * rank)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_transposed_convolution_is_the_gradient_of_another(rank: int) -> None:
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 1]
    model = kind(6, 4, 3, stride=2, padding=1, output_padding=1, groups=2)

    found = trace(model, shape_of(5, 6, *[7] * rank).requires_grad_())

    problem = found[0].problem
    assert [each.problem.op for each in found] == [DGRAD, FPROP, WGRAD]
    assert all(each.is_transposed and each.site.op is each.problem.op for each in found)
    assert (problem.input_shape, problem.output_shape) == ((5, 4, *[14] * rank), (5, 6, *[7] * rank))
    assert problem.filter_shape == (6, 2, *[3] * rank) == tuple(model.weight.shape)
    assert problem.bias is False


def test_a_transposed_convolution_whose_output_no_convolution_has_is_refused() -> None:
    model = nn.ConvTranspose2d(3, 4, 3, stride=1, dilation=2, output_padding=1)

    with pytest.raises(SampleError, match=r"output padding .* must be smaller than its stride, but got"):
        trace(model, shape_of(2, 3, 8, 8))


def test_functional_calls_belong_to_the_module_that_makes_them() -> None:
    weight = torch.ones(4, 3, 3, 3)
    model = nn.Sequential(nn.Identity(), Calls(lambda image: F.conv2d(image, weight)))

    (found,) = trace(model, shape_of(2, 3, 8, 8))

    assert found.site == ConvSite("1", FPROP)


def test_a_call_outside_of_all_modules_belongs_to_the_model_itself() -> None:
    model = Calls(lambda image: F.conv_transpose1d(image, torch.ones(3, 2, 3)))

    (found,) = trace(model, shape_of(2, 3, 8))

    assert (found.site, found.is_transposed) == (ConvSite("", DGRAD), True)


def test_after_a_module_its_parent_goes_on() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Conv2d(3, 3, 1)

        def forward(self, image: Tensor) -> Tensor:
            return F.conv2d(self.child(image), torch.ones(4, 3, 3, 3))

    found = trace(nn.Sequential(Parent()).eval(), shape_of(2, 3, 8, 8))

    assert [each.site.path for each in found] == ["0.child", "0"]


def test_a_module_that_raised_and_was_caught_is_left_behind() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = Calls(lambda image: image.reshape(7, 7, 7))

        def forward(self, image: Tensor) -> Tensor:
            try:
                return self.child(image)
            except RuntimeError:
                return F.conv2d(image, torch.ones(4, 3, 3, 3))

    (found,) = trace(nn.Sequential(Parent()), shape_of(2, 3, 8, 8))

    assert found.site.path == "0"


@pytest.mark.parametrize(
    ("padding", "kernel", "input_size", "pads"),
    [("same", (3, 5), (8, 8), (1, 2)), ("same", (4, 3), (9, 8), (1, 1)), ("valid", (3, 3), (8, 8), (0, 0))],
)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_padding_by_name_is_what_pytorch_makes_of_it(
    padding: str, kernel: tuple[int, int], input_size: tuple[int, int], pads: tuple[int, int]
) -> None:
    problem = trace(nn.Conv2d(3, 4, kernel, padding=padding), shape_of(2, 3, 8, 8))[0].problem

    assert (problem.input_size, problem.padding) == (input_size, pads)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_other_padding_than_zeros_is_part_of_the_image(mode: str) -> None:
    conv = nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode=mode)

    problem = trace(conv, shape_of(2, 3, 6, 6))[0].problem

    assert (problem.input_size, problem.padding) == ((8, 10), (0, 0))


def test_one_sample_without_a_batch_is_a_batch_of_one() -> None:
    assert trace(nn.Conv2d(3, 4, 3), shape_of(3, 8, 8))[0].problem.batch == 1


# Which gradients are needed


def test_the_first_layer_needs_no_gradient_of_its_input() -> None:
    assert ops_by_path(trace(a_chain(), a_batch())) == {"0": [FPROP, WGRAD], "3": ALL}


def test_a_sample_that_needs_a_gradient_gets_one() -> None:
    assert ops_by_path(trace(a_chain(), shape_of(8, 3, 6, 6).requires_grad_()))["0"] == ALL


def test_frozen_weights_have_no_gradient() -> None:
    model = a_chain()
    model[3].requires_grad_(requires_grad=False)

    assert ops_by_path(trace(model, a_batch()))["3"] == [FPROP, DGRAD]


def test_behind_a_frozen_beginning_no_input_gradient_is_needed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3).requires_grad_(requires_grad=False), nn.Conv2d(4, 4, 3))

    assert ops_by_path(trace(model, a_batch())) == {"0": [FPROP], "1": [FPROP, WGRAD]}


def test_a_part_that_runs_without_gradients_has_none() -> None:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)

        def forward(self, image: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.teacher(image)
            return self.student(image) - target

    assert ops_by_path(trace(Teacher(), a_batch())) == {"teacher": [FPROP], "student": [FPROP, WGRAD]}


def test_evaluation_takes_the_forward_pass_only() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 4, 3)).eval()

    assert ops_by_path(trace(model, a_batch())) == {"0": [FPROP], "1": [DGRAD]}


def test_training_counts_even_where_gradients_are_switched_off() -> None:
    with torch.no_grad():
        assert ops_by_path(trace(a_chain(), a_batch()))["3"] == ALL


@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_in_inference_mode_convolutions_are_found_too() -> None:
    model = nn.Sequential(nn.Conv1d(3, 4, 4, padding="same"), nn.ConvTranspose1d(4, 2, 3))
    model.forward = torch.inference_mode()(model.forward)

    found = trace(model, shape_of(2, 3, 8))

    assert ops_by_path(found) == {"0": [FPROP], "1": [DGRAD]}
    assert found[0].problem.input_size == (9,)


@pytest.mark.parametrize("is_inference", [False, True])
def test_convolutions_inside_of_composed_operators_are_found(*, is_inference: bool) -> None:
    class Composed(nn.Module):
        def forward(self, image: Tensor) -> Tensor:
            result: Tensor = torch.ops.mucudnn_tests.convolve(image, torch.zeros(4, 3, 3, 3))
            return result

    with torch.library._scoped_library("mucudnn_tests", "DEF") as library:
        library.define("convolve(Tensor image, Tensor weight) -> Tensor")
        library.impl("convolve", torch.conv2d, "CompositeImplicitAutograd")
        with torch.inference_mode(is_inference):
            (found,) = trace(Composed().eval(), a_batch())

    assert found.problem.filter_shape == (4, 3, 3, 3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_convolutions_have_their_gradients(reentrant: bool) -> None:
    model = a_chain()
    inner = nn.Sequential(*model)
    checkpointed = Calls(functools.partial(torch.utils.checkpoint.checkpoint, inner, use_reentrant=reentrant))
    checkpointed.inner = inner

    assert ops_by_path(trace(checkpointed, a_batch())) == {"inner.0": [FPROP, WGRAD], "inner.3": ALL}


def test_parametrised_weights_are_convolved_by_their_module() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 4, 3)))

    assert ops_by_path(trace(model, a_batch())) == {"0": [FPROP, WGRAD]}


def test_only_the_ops_of_a_layer_that_are_asked_for_are_taken() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 4, 3))

    # The gradient of a transposed convolution's input is fprop.
    assert ops_by_path(trace(model, a_batch(), "dgrad")) == {"1": [FPROP]}


def test_an_unknown_op_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(OptionError, match="ops must be 'auto' or some of 'fprop', 'dgrad', 'wgrad', but got"):
        trace(a_chain(), a_batch(), "forward")


# Sites


def test_a_shared_module_is_one_site_with_all_that_any_call_needs() -> None:
    conv = nn.Conv2d(3, 3, 3, padding=1)

    found = trace(nn.Sequential(conv, nn.ReLU(), conv), a_batch())

    assert [each.site for each in found] == [ConvSite("0", op) for op in ALL]


def test_every_shape_that_a_module_meets_is_a_variant() -> None:
    conv = nn.Conv2d(3, 3, 3)

    found = trace(nn.Sequential(conv, conv).eval(), shape_of(2, 3, 8, 8))

    assert [(each.site, each.problem.input_size) for each in found] == [
        (ConvSite("0", FPROP), (8, 8)),
        (ConvSite("0", FPROP, 1), (6, 6)),
    ]


# Layouts and types


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("of_model", [True, False])
def test_channels_last_goes_through_the_model_from_its_weights_or_its_input(
    dtype: torch.dtype, rank: int, of_model: bool
) -> None:
    conv, transposed = ((nn.Conv2d, nn.ConvTranspose2d), (nn.Conv3d, nn.ConvTranspose3d))[rank - 2]
    model = nn.Sequential(conv(3, 4, 3), nn.ReLU(), transposed(4, 4, 2, stride=2), conv(4, 4, 3)).to(dtype)
    sample = shape_of(2, 3, *[8] * rank, dtype=dtype)
    if of_model:
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.data = weight.data.contiguous(memory_format=CHANNELS_LAST[weight.dim()])
    else:
        sample = sample.contiguous(memory_format=CHANNELS_LAST[rank + 2])

    problems = [each.problem for each in trace(model, sample)]

    assert {each.dtype for each in problems} == {str(dtype).removeprefix("torch.")}
    assert {(each.layout, each.filter_layout) for each in problems} == {(Layout.CHANNELS_LAST,) * 2}


@pytest.mark.parametrize("rank", [2, 3])
def test_float64_is_computed_with_channels_before_space_whatever_the_layout(rank: int) -> None:
    model = nn.Sequential((nn.Conv2d, nn.Conv3d)[rank - 2](3, 4, 3)).double()
    sample = shape_of(2, 3, *[8] * rank, dtype=torch.float64)

    problem = trace(model, sample.contiguous(memory_format=CHANNELS_LAST[rank + 2]))[0].problem

    assert (problem.layout, problem.filter_layout) == (Layout.CONTIGUOUS, Layout.CONTIGUOUS)


def test_what_a_convolution_gives_has_its_layout() -> None:
    seen: list[tuple[int, ...]] = []
    model = nn.Sequential(nn.Conv3d(3, 4, 3))
    model[0].register_forward_hook(lambda *told: seen.append(told[-1].stride()))

    trace(model, shape_of(2, 3, 8, 8, 8).contiguous(memory_format=torch.channels_last_3d))

    assert seen == [(864, 1, 144, 24, 4)]


# The pass


def test_nothing_is_computed_and_nothing_is_allocated() -> None:
    # An image of 2^34 numbers would take 64 GiB.
    assert trace(a_chain(), shape_of(2**8, 3, 2**12, 2**12))[0].problem.batch == 256


def test_a_model_without_memory_of_its_own_can_be_traced() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(2**16, 2**16, 3))

    assert trace(model, shape_of(2, 2**16, 8, 8))[0].problem.filter_bytes == 9 * 2**34


@pytest.mark.parametrize("has_values", [True, False])
def test_a_model_that_needs_values_runs_in_earnest(has_values: bool) -> None:
    sample = a_batch() if has_values else shape_of(8, 3, 6, 6)

    assert ops_by_path(trace(DependsOnValues(), sample)) == {"first": [FPROP, WGRAD], "second": ALL}


@pytest.mark.parametrize(
    "look",
    [
        Tensor.tolist,
        torch.nonzero,
        lambda hidden: hidden.detach().numpy(),
        lambda hidden: f"{hidden.sum():.2f}",
    ],
)
def test_however_a_model_looks_at_values_it_then_runs_in_earnest(look: Callable[[Tensor], object]) -> None:
    def call(image: Tensor) -> Tensor:
        hidden = F.conv2d(image, torch.ones(4, 3, 3, 3))
        look(hidden)
        return F.conv2d(hidden, torch.ones(5, 4, 3, 3))

    found = trace(Calls(call), shape_of(2, 3, 8, 8))

    assert [each.problem.out_channels for each in found] == [4, 5]


class Scaled(nn.Module):
    """Divides an image by the size of its filter, which a function's cache keeps."""

    def __init__(self, use: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.use = use
        self.size_of_filter = functools.cache(lambda: self.conv.weight.abs().sum())

    def forward(self, image: Tensor) -> Any:
        return self.conv(image / self.use(self.size_of_filter()))


def test_a_function_s_cache_keeps_nothing_for_the_run_in_earnest() -> None:
    model = Scaled(Tensor.item).eval()

    assert ops_by_path(trace(model, torch.randn(2, 3, 8, 8))) == {"conv": [FPROP]}
    assert type(model(torch.randn(2, 3, 8, 8))) is Tensor


def test_a_function_s_cache_keeps_nothing_of_a_pass_that_fails() -> None:
    model = Scaled(Tensor.clone).eval()

    with pytest.raises(SampleError, match="must run on the sample"):
        trace(model, torch.randn(2, 5, 8, 8))
    assert type(model(torch.randn(2, 3, 8, 8))) is Tensor


@pytest.mark.parametrize("examine", [trace, extract])
def test_a_function_s_cache_keeps_nothing_of_a_pass_that_is_interrupted(examine: Callable[..., Any]) -> None:
    def interrupt(_: Tensor) -> None:
        raise KeyboardInterrupt

    model = Scaled(interrupt).eval()

    with pytest.raises(KeyboardInterrupt):
        examine(model, torch.randn(2, 3, 8, 8))
    assert type(model.size_of_filter()) is Tensor


@pytest.mark.parametrize("kind", [a_chain, DependsOnValues, Remembers, RunningMean, ChangesItsInput])
def test_the_model_stays_as_it_was(kind: Callable[[], nn.Module]) -> None:
    model = kind()
    attributes = [dict(module.__dict__) for module in model.modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    values = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()

    trace(model, a_batch())

    assert [dict(module.__dict__) for module in model.modules()] == attributes
    assert [
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    ] == hooks
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("examine", [trace, extract], ids=["trace", "extract"])
def test_a_sample_with_labels_is_told_to_be_several_arguments(
    examine: Callable[[nn.Module, object], object],
) -> None:
    labels = torch.zeros(4)

    class Wrapper(nn.Sequential):
        def forward(self, *images: Tensor) -> Any:
            return self[0](*images)

    for model in (a_chain(), Wrapper(a_chain())):
        with pytest.raises(SampleError, match=r"with 2 arguments, .*: leave out labels, and give a list"):
            examine(model, [a_batch(), labels])
    with pytest.raises(SampleError, match=r"raised RuntimeError\(.*\)\.$"):
        examine(a_chain(), a_batch(channels=5))


@pytest.mark.parametrize("examine", [trace, extract], ids=["trace", "extract"])
def test_a_sample_that_has_the_arguments_that_a_model_takes_is_not_told_to_leave_some_out(
    examine: Callable[[nn.Module, object], object],
) -> None:
    class Detector(nn.Conv2d):
        def forward(self, images: Tensor, targets: Tensor) -> Tensor:
            if targets.dtype is not torch.float32:
                raise TypeError("The targets must be float32.")
            return super().forward(images)

    with pytest.raises(
        SampleError, match=r"must be float32\.'\)\. It was called with 2 arguments, .*: give a list"
    ):
        examine(Detector(3, 4, 3), (a_batch(), torch.zeros(4, dtype=torch.float64)))


def test_a_model_that_raises_is_left_without_hooks() -> None:
    model = a_chain()

    with pytest.raises(SampleError, match="must run on the sample"):
        trace(model, a_batch(channels=5))

    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_sample_that_the_model_rejects_is_not_tried_in_earnest() -> None:
    seen: list[type] = []
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(5, 5, 3))
    model[0].register_forward_hook(lambda *told: seen.append(type(told[-1])))

    with pytest.raises(SampleError, match=r"it raised RuntimeError\('.*to have 5 channels, but got 4"):
        trace(model, a_batch())

    assert [kind.__name__ for kind in seen] == ["FakeTensor"]


def test_a_model_without_convolutions_is_refused() -> None:
    with pytest.raises(NothingToTuneError, match="must compute a convolution on the sample"):
        trace(nn.Sequential(nn.Flatten(), nn.Linear(108, 2)), a_batch())


def test_a_model_that_needs_values_is_told_of() -> None:
    with pytest.warns(ValuesWarning, match="looks at values of its tensors, so it is run in earnest"):
        trace(DependsOnValues(), a_batch())


@pytest.mark.filterwarnings("ignore:.torch.jit.")
def test_a_convolution_in_torchscript_counts_for_the_module_around_it() -> None:
    model = nn.Sequential(torch.jit.script(nn.Conv2d(3, 4, 3)), nn.Conv2d(4, 4, 3))
    before = [*model.parameters()]

    found = trace(model, a_batch(), ["fprop"])

    assert [each.site.path for each in found] == ["", "1"]
    assert all(map(operator.is_, model.parameters(), before))
    assert type(model(a_batch())) is Tensor


@pytest.mark.filterwarnings("ignore:.torch.jit.")
def test_a_model_in_torchscript_is_refused_in_a_sentence() -> None:
    with pytest.raises(SampleError, match="The model must run on the sample, but it raised"):
        trace(torch.jit.script(nn.Conv2d(3, 4, 3)), a_batch())


def test_checkpointing_is_as_before_afterwards() -> None:
    before = torch.utils.checkpoint.CheckpointFunction.apply

    trace(a_chain(), a_batch())

    assert torch.utils.checkpoint.CheckpointFunction.apply == before


def test_a_model_that_is_traced_is_examined_by_one_thread_alone() -> None:
    seen = []
    conv = nn.Conv2d(3, 4, 3)

    def compute(image: Tensor) -> Tensor:
        seen.append(is_examining())
        return conv(image)

    trace(Calls(compute), a_batch())

    assert seen == [True]
    assert not is_examining()
