"""Patched modules that change, models in parts, and plans that cannot run: what happens then."""

import copy
import dataclasses
import functools
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from mucudnn.algorithms.compiled import compiler, kernels
from mucudnn.backends import backend_of
from mucudnn.backends.cpu.backend import CpuBackend
from mucudnn.division import Division
from mucudnn.errors import BackendError, PlanError, PlanMismatchError, UntunedWarning
from mucudnn.execution.workspace import workspace_of
from mucudnn.functional import divided_conv
from mucudnn.patching.applying import apply, patch, patched_modules, plan_of, restore
from mucudnn.patching.routing import NotNowError
from mucudnn.plan import Assignment, Plan
from mucudnn.profile import Candidate
from tests.plans import a_plan_for

TOLERANCE = 1e-10
"""Of a largest difference in float64: ten times an algorithm's bound."""

pytestmark = pytest.mark.usefixtures("one_thread")


def images(samples: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, 4, 8, 8, generator=generator, dtype=torch.float64)


def twins() -> tuple[nn.Conv2d, nn.Conv2d]:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 8, 3, padding=1).double()
    twin = copy.deepcopy(conv)
    apply(conv, a_plan_for(conv, images()))
    return conv, twin


def with_plan(change: Callable[[Assignment], Assignment]) -> tuple[nn.Conv2d, Plan]:
    conv = nn.Conv2d(4, 8, 3, padding=1).double()
    plan = a_plan_for(conv, images())
    return conv, dataclasses.replace(plan, assignments=tuple(map(change, plan.assignments)))


def undivided(algorithm: str, workspace_bytes: int = 2**20) -> Callable[[Assignment], Assignment]:
    division = Division((Candidate(algorithm, 8, 1.0, workspace_bytes),))
    return lambda assigned: dataclasses.replace(assigned, division=division, candidates=())


def narrow_padding(conv: nn.Conv2d) -> None:
    conv.padding = (0, 0)


def widen_dilation(conv: nn.Conv2d) -> None:
    conv.dilation, conv.padding = (2, 2), (2, 2)


def reflect(conv: nn.Conv2d) -> None:
    conv.padding_mode = "reflect"
    conv._reversed_padding_repeated_twice = [1, 1, 1, 1]


def prune(conv: nn.Conv2d) -> None:
    assert conv.bias is not None
    conv.weight, conv.bias = nn.Parameter(conv.weight[:1]), nn.Parameter(conv.bias[:1])


@pytest.mark.parametrize("change", [narrow_padding, widen_dilation, reflect, prune])
@pytest.mark.filterwarnings("ignore::mucudnn.errors.UntunedWarning")  # the changed module was not tuned
def test_a_module_that_changes_after_its_first_call_computes_what_it_says_now(
    change: Callable[[nn.Conv2d], None],
) -> None:
    conv, twin = twins()
    conv(images())

    for each in (conv, twin):
        change(each)

    torch.testing.assert_close(conv(images()), twin(images()), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("sides", [[2, 2, 2, 2], [2, 0, 2, 0], [0, 0, 0, 0]])
@pytest.mark.filterwarnings("ignore::mucudnn.errors.UntunedWarning")  # an image of another size was not tuned
def test_a_module_that_is_padded_by_other_pixels_after_its_first_call_is_not_taken_for_the_former(
    sides: list[int],
) -> None:
    """PyTorch asks a list of its own how far to pad by pixels, and not `padding`."""
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular").double()
    twin = copy.deepcopy(conv)
    apply(conv, a_plan_for(conv, images()))
    conv(images())

    for each in (conv, twin):
        each._reversed_padding_repeated_twice = sides

    torch.testing.assert_close(conv(images()), twin(images()), rtol=0, atol=TOLERANCE)


@pytest.mark.filterwarnings(
    "ignore:There is a performance drop:UserWarning"
)  # of vmap's, without a batching rule
def test_batched_gradients_are_those_of_pytorch() -> None:
    conv, twin = twins()
    x = images(2).requires_grad_()

    ours, theirs = (
        torch.autograd.functional.jacobian(
            lambda image, each=each: each(image).sum((2, 3)), x, vectorize=True
        )
        for each in (conv, twin)
    )

    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("algorithm", ["cpu:im2col", "cpu:winograd2", "cpu:winograd4", "cpu:cc_winograd4"])
def test_a_weight_that_is_not_finite_leaves_the_marks_that_pytorch_leaves(
    algorithm: str, value: float
) -> None:
    x = images().float()
    weight = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(1))
    weight[2, 1, 0, 0] = value
    division = Division((Candidate(algorithm, 4, 1.0, 0), Candidate(algorithm, 4, 1.0, 0)))

    ours = divided_conv(x, weight, None, 1, 1, fprop=division)
    theirs = torch.conv2d(x, weight, None, 1, 1)

    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.isinf(), theirs.isinf())


def test_applying_a_plan_leaves_a_computed_weight_uncomputed() -> None:
    conv = parametrizations.spectral_norm(nn.Conv2d(4, 8, 3, padding=1).double())
    plan = a_plan_for(conv, images())
    before = {name: value.clone() for name, value in conv.state_dict().items()}

    apply(conv, plan)

    assert all(torch.equal(value, before[name]) for name, value in conv.state_dict().items())


def test_a_module_with_a_convolution_of_its_own_is_not_patched() -> None:
    conv = nn.Conv2d(4, 8, 3, padding=1).double()
    plan = a_plan_for(conv, images())
    own = lambda image, weight, bias: torch.conv2d(image, 2 * weight, bias, padding=1)  # noqa: E731
    conv.__dict__["_conv_forward"] = own

    with pytest.raises(PlanMismatchError, match="cannot be divided"):
        apply(conv, plan)

    assert restore(conv).__dict__["_conv_forward"] is own


def test_restoring_a_model_restores_a_part_that_was_patched_by_itself() -> None:
    part = nn.Conv2d(4, 8, 3, padding=1).double()
    model = nn.Sequential(part, nn.ReLU())
    apply(part, a_plan_for(part, images()))

    restore(model)

    with pytest.raises(PlanError, match="runs no plan"):
        plan_of(part)


def test_a_transposed_convolution_whose_forward_others_have_wrapped_is_restored_within_that() -> None:
    torch.manual_seed(0)
    conv = nn.ConvTranspose2d(4, 3, 3).double()
    before = dict(conv.__dict__)
    expected = conv(images())
    patched = apply(conv, a_plan_for(conv, images())).forward
    conv.__dict__["forward"] = functools.partial(patched)  # as hooks of offloading do

    assert not torch.equal(conv(images()), expected)
    restore(conv)

    assert torch.equal(conv(images()), expected)
    assert conv.__dict__.keys() - before.keys() == {"forward"}


class _Counted(nn.ConvTranspose2d):
    """One that knows how often it was replicated."""

    replicas = 0

    def _replicate_for_data_parallel(self) -> nn.Module:
        replica: nn.Module = super()._replicate_for_data_parallel()
        replica.__dict__["replicas"] = self.replicas + 1
        return replica


def test_a_patched_transposed_convolution_is_replicated_as_its_class_has_it() -> None:
    conv = _Counted(4, 3, 3).double()
    apply(conv, a_plan_for(conv, images()))

    replica = conv._replicate_for_data_parallel()

    assert replica.replicas == 1
    assert "forward" in vars(conv)
    assert "forward" not in vars(replica)


def test_what_others_have_make_replicas_stays_when_a_transposed_convolution_is_restored() -> None:
    conv = nn.ConvTranspose2d(4, 3, 3).double()
    apply(conv, a_plan_for(conv, images()))
    own = functools.partial(nn.Module._replicate_for_data_parallel, conv)
    conv.__dict__["_replicate_for_data_parallel"] = own

    assert restore(conv).__dict__["_replicate_for_data_parallel"] is own


def test_restoring_gives_the_buffer_back() -> None:
    conv, _ = twins()
    conv(images())
    held = workspace_of(backend_of("cpu:")).n_bytes

    restore(conv)

    assert held > 0
    assert workspace_of(backend_of("cpu:")).n_bytes == 0


def test_all_modules_of_a_model_give_each_reason_once_together() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)).double()
    apply(model, a_plan_for(model, images()))

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for batch in (9, 10):
            model(images(batch))
            model(images(batch)[..., 1:])
        torch.set_num_threads(2)  # the fixture sets it back
        model(images())

    assert {warning.category for warning in told} == {UntunedWarning}
    reasons = [str(warning.message) for warning in told]
    assert len(reasons) == 3
    assert all("This reason is given once" in reason for reason in reasons)
    assert "in another environment: setting threads was" in reasons[-1]


def _two_convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)).double()


def test_a_weight_that_is_frozen_no_longer_has_its_gradient_from_pytorch_and_that_is_told_once() -> None:
    model = _two_convolutions()
    twin = copy.deepcopy(model)
    model[0].requires_grad_(requires_grad=False)
    apply(model, a_plan_for(model, images()))
    model.requires_grad_()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            model(images()).square().sum().backward()
            twin(images()).square().sum().backward()

    (warning,) = told
    assert warning.category is UntunedWarning
    assert "module '0' was tuned while its weight needed no gradient, and now needs it" in str(
        warning.message
    )
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_an_input_gradient_that_the_sample_did_not_need_is_told_of_once(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(kind(4, 4, 3, padding=1) for _ in range(2))).double()
    twin = copy.deepcopy(model)
    apply(model, a_plan_for(model, images()))
    mine, other = images().requires_grad_(), images().requires_grad_()
    model(images()).square().sum().backward()  # of which a warning would be an error

    with pytest.warns(UntunedWarning, match=r"'0' was tuned while its input needed no .*.autotune") as told:
        model(mine).square().sum().backward()
    model(mine).square().sum().backward()
    for _ in range(2):
        twin(other).square().sum().backward()

    assert len(told) == 1
    torch.testing.assert_close(mine.grad, other.grad)


class _Twice(nn.Module):
    """A convolution of what it has computed, in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.conv(torch.cat([self.conv(x), self.conv(x)]))
        return result


def test_a_gradient_that_was_tuned_of_a_larger_batch_is_not_told_of() -> None:
    torch.manual_seed(0)
    model = _Twice().double()
    twin = copy.deepcopy(model)
    apply(model, a_plan_for(model, images()))
    half = images()[: len(images()) // 2]  # whose features are as many as the images were

    for each in (model, twin):
        each(half).square().sum().backward()  # of which a warning would be an error

    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("is_frozen", [True, False])
def test_gradients_that_are_as_they_were_tuned_are_not_told_of(*, is_frozen: bool) -> None:
    """The other model was tuned for inference, where no gradient is missed."""
    model = _two_convolutions().train(is_frozen)
    model[0].requires_grad_(requires_grad=not is_frozen)
    apply(model, a_plan_for(model, images()))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(images()).square().sum().backward()

    assert (model.get_parameter("0.weight").grad is None) == is_frozen


def test_a_module_that_its_plan_leaves_undivided_is_left_alone() -> None:
    conv, plan = with_plan(undivided("cpu:aten"))
    before = dict(conv.__dict__)

    apply(conv, plan)

    assert plan_of(conv) == plan
    assert {name for name in conv.__dict__ if name not in before} == {"_mucudnn_plan"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        conv(images(9))
    restore(conv)
    assert conv.__dict__.keys() == before.keys()


def test_what_is_tuned_later_takes_no_number_of_the_plans() -> None:
    conv, plan = with_plan(
        lambda assigned: dataclasses.replace(assigned, site=dataclasses.replace(assigned.site, variant=1))
    )
    numbers: list[int] = []

    def learn(*given: Any) -> Plan:
        numbers.append(given[2])
        raise NotNowError

    patch(conv, plan, learn)
    conv(images(9))

    assert numbers == [2]


def test_a_shape_with_a_plan_of_its_own_runs_that_and_not_part_of_a_larger_one() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 8, 3, padding=1).double().eval()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = conv

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.conv(x), self.conv(x[:2])

    model = Twice().eval()
    plan = a_plan_for(model, images())
    small = next(each for each in plan.assignments if each.problem.batch == 2)
    chosen = Division((Candidate("cpu:winograd2", 2, 1.0, 2**20),))
    plan = dataclasses.replace(
        plan,
        assignments=tuple(
            dataclasses.replace(each, division=chosen) if each is small else each for each in plan.assignments
        ),
    )
    apply(model, plan)

    result = conv(images(2))

    exactly = divided_conv(images(2), conv.weight, conv.bias, 1, 1, fprop=chosen)
    assert torch.equal(result, exactly)


def test_a_plan_with_an_unknown_algorithm_is_refused() -> None:
    conv, plan = with_plan(undivided("cpu:nope"))
    with pytest.raises(PlanMismatchError, match="cpu:nope"):
        apply(conv, plan)


def test_a_plan_that_allots_too_little_workspace_is_refused() -> None:
    conv, plan = with_plan(undivided("cpu:im2col", workspace_bytes=0))
    with pytest.raises(PlanMismatchError, match="allots 0 bytes"):
        apply(conv, plan)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """A process that has compiled nothing, with an empty cache folder; afterwards it has compiled nothing."""

    def forget() -> None:
        kernels.functions.cache_clear()
        compiler._known.clear()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield monkeypatch
    forget()


def test_what_a_plan_runs_in_c_is_compiled_when_it_is_applied(
    compiling: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    conv, plan = with_plan(undivided("cpu:cc_winograd4", workspace_bytes=2**20))

    apply(conv, plan)

    (compiled,) = (tmp_path / "mucudnn" / "compiled").iterdir()  # for the forward pass and both gradients
    assert compiled.suffix == ".so"


def fail_to_compile(*_: object) -> None:
    raise BackendError("gcc could not compile a convolution: no space left.")


def test_a_plan_whose_c_cannot_be_compiled_is_refused_before_it_runs(compiling: pytest.MonkeyPatch) -> None:
    conv, plan = with_plan(undivided("cpu:cc_winograd4", workspace_bytes=2**20))
    compiling.setattr(compiler, "_compile", fail_to_compile)

    with pytest.raises(PlanMismatchError, match=r"runs cpu:cc_winograd4 for .*, which .* no space left\."):
        apply(conv, plan)
    assert patched_modules(conv) == {}


def test_what_cannot_be_compiled_later_runs_as_before_with_a_warning(
    compiling: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    conv, plan = with_plan(undivided("cpu:cc_winograd4", workspace_bytes=2**20))
    expected = conv(images())
    apply(conv, plan)
    shutil.rmtree(tmp_path / "mucudnn")
    kernels.functions.cache_clear()  # as in another process, or for another form
    compiler._known.clear()
    compiling.setattr(compiler, "_compile", fail_to_compile)

    with pytest.warns(UntunedWarning, match="cannot be divided here .*no space left"):
        result = conv(images())

    assert torch.equal(result, expected)


def test_a_plan_for_another_type_is_refused() -> None:
    conv, plan = with_plan(undivided(backend_of("cpu:").own))
    with pytest.raises(PlanMismatchError, match="with type float64, but here it has type float32"):
        apply(conv.float(), plan)


@pytest.mark.parametrize("size", [2**62, 2**64], ids=["too many elements", "no size at all"])
def test_a_plan_for_more_than_a_tensor_holds_is_refused(size: int) -> None:
    def enlarged(assigned: Assignment) -> Assignment:
        problem = dataclasses.replace(assigned.problem, input_size=(9, size))
        return dataclasses.replace(undivided(backend_of("cpu:").own)(assigned), problem=problem)

    conv, plan = with_plan(enlarged)
    with pytest.raises(
        PlanMismatchError, match=rf"with an input of .*, {size}\), but no tensor is that large"
    ):
        apply(conv, plan)


def test_a_plan_with_a_stride_that_no_module_has_is_refused_before_matrices_of_its_size_are_made() -> None:
    def stepping(assigned: Assignment) -> Assignment:
        problem = dataclasses.replace(assigned.problem, stride=(2**40, 1))
        chosen = undivided("cpu:cc_winograd4", workspace_bytes=2**20)(assigned)
        return dataclasses.replace(chosen, problem=problem)

    conv, _ = with_plan(stepping)
    plan = a_plan_for(conv, images().requires_grad_())  # with a gradient of the image, which has them
    plan = dataclasses.replace(plan, assignments=tuple(map(stepping, plan.assignments)))
    with pytest.raises(PlanMismatchError, match=str(2**40)):
        apply(conv, plan)


def test_a_plan_of_a_backend_that_is_not_here_is_refused_for_that() -> None:
    conv, plan = with_plan(lambda assigned: assigned)
    elsewhere = dataclasses.replace(plan.environment, backend="cudnn")
    with pytest.raises(PlanMismatchError, match="backend was cudnn"):
        apply(conv, dataclasses.replace(plan, environment=elsewhere))


@pytest.mark.parametrize(
    ("here", "advice"),
    [("none", "Install that compiler"), ("gcc 12.2.0", "Set the environment variable CC to that one")],
)
def test_a_plan_by_another_compiler_is_refused_with_how_to_have_that_one(
    here: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    conv, plan = with_plan(lambda assigned: assigned)
    software = dict(plan.environment.software)
    elsewhere = dataclasses.replace(plan.environment, software={**software, "C compiler": "gcc 99.1"})
    monkeypatch.setattr("mucudnn.backends.cpu.environment.description", lambda: here)

    told = re.escape(f"C compiler was gcc 99.1, is {here}. {advice}, or tune here.")
    with pytest.raises(PlanMismatchError, match=f"{told}$"):
        apply(conv, dataclasses.replace(plan, environment=elsewhere))


def test_a_plan_of_another_number_of_threads_is_refused_with_how_to_have_that_number() -> None:
    conv, plan = with_plan(lambda assigned: assigned)
    torch.set_num_threads(2)  # the fixture sets it back

    with pytest.raises(PlanMismatchError, match=r"set_num_threads\(1\), or OMP_NUM_THREADS"):
        apply(conv, plan)


def test_a_model_unpickled_where_times_are_others_says_so_and_runs_pytorchs_own() -> None:
    conv, plan = with_plan(undivided("cpu:im2col"))
    apply(conv, plan)
    arrived = pickle.loads(pickle.dumps(conv))
    torch.set_num_threads(2)  # the fixture sets it back

    with pytest.warns(UntunedWarning, match="setting threads was 1, is 2"):
        result = arrived(images())

    torch.testing.assert_close(result, restore(conv)(images()), rtol=0, atol=TOLERANCE)


def test_a_model_unpickled_under_another_pytorch_says_so_though_all_flags_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conv, plan = with_plan(undivided("cpu:im2col"))
    apply(conv, plan)
    arrived = pickle.loads(pickle.dumps(conv))
    other = dataclasses.replace(plan.environment, software={**plan.environment.software, "torch": "1.0"})
    monkeypatch.setattr(CpuBackend, "environment", lambda _: other)

    with pytest.warns(UntunedWarning, match=r"software torch was .+, is 1\.0"):
        result = arrived(images())

    assert torch.equal(result, restore(conv)(images()))


def test_a_model_unpickled_at_home_runs_divided_without_a_word() -> None:
    conv, plan = with_plan(undivided("cpu:im2col"))
    apply(conv, plan)
    arrived = pickle.loads(pickle.dumps(conv))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = arrived(images())

    assert torch.equal(result, conv(images()))


def test_a_module_remembers_a_bounded_number_of_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mucudnn.patching.routing._MOST_ROUTES", 3)
    conv, plan = with_plan(undivided("cpu:im2col"))
    apply(conv, plan)
    patch = conv.__dict__["_conv_forward"]

    for batch in (1, 2, 3, 4, 4, 1):
        conv(images()[:batch])

    assert len(patch._router._routes) == 3
