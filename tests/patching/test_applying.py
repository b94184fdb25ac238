"""Whoever holds, copies or restores a patched model notices nothing; plans that do not fit are refused."""

import contextlib
import copy
import dataclasses
import functools
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from mucudnn.errors import PlanError, PlanMismatchError
from mucudnn.patching.applying import apply, noted, patch, patched_modules, plan_of, restore, unpatched
from mucudnn.plan import ConvSite, Plan
from mucudnn.problem import ConvOp, ConvProblem, problems_of
from mucudnn.tuner import optimize
from tests.graphs import DYNAMOS
from tests.models import a_chain
from tests.patching.twins import Build, a_step, assert_same_step, chain_twins, images_of, is_divided, twins_of
from tests.plans import a_plan_for, a_plan_of

pytestmark = pytest.mark.usefixtures("one_thread", "few_to_collect")


def test_state_dict_and_parameters_stay_the_same() -> None:
    model = a_chain().double()
    keys, parameters = list(model.state_dict()), [id(each) for each in model.parameters()]

    apply(model, a_plan_for(model, images_of()))

    assert list(model.state_dict()) == keys
    assert [id(each) for each in model.parameters()] == parameters


def test_a_state_dict_is_loaded_and_used() -> None:
    model, _ = chain_twins()
    other = a_chain().double()

    model.load_state_dict(other.state_dict())

    assert_same_step(model, other, images_of())


def test_hooks_are_called() -> None:
    model, _ = chain_twins()
    called: list[str] = []
    conv = model.get_submodule("3")
    conv.register_forward_pre_hook(lambda *_: called.append("before"))
    conv.register_forward_hook(lambda *_: called.append("after"))
    conv.register_full_backward_hook(lambda *_: called.append("backward"))

    model(images_of()).sum().backward()

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
    model, twin = chain_twins()
    if has_run:
        a_step(model, images_of())
        a_step(twin, images_of())

    copied = COPIES[way](model)

    assert is_divided(copied.eval(), images_of())
    assert plan_of(copied) == plan_of(model)
    assert_same_step(copied, twin.eval(), images_of())


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_computes_with_its_own_weights(way: str) -> None:
    model, twin = chain_twins()
    copied = COPIES[way](model)

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()

    assert_same_step(copied, twin, images_of())


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_survives_that_the_original_is_restored(way: str) -> None:
    model, _ = chain_twins()
    copied = COPIES[way](model)

    restore(model)

    assert is_divided(copied, images_of())


def test_a_patched_model_is_collected_when_nobody_holds_it() -> None:
    model, _ = chain_twins()
    a_step(model, images_of())
    gone = weakref.ref(model)

    del model
    gc.collect()

    assert gone() is None


def test_restore_leaves_nothing_behind() -> None:
    model = a_chain().double()
    before = [dict(module.__dict__) for module in model.modules()]
    apply(model, a_plan_for(model, images_of()))
    with torch.no_grad():
        model.eval()(images_of())
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
    model, twin = chain_twins()
    whole = plan_of(model)
    part = dataclasses.replace(
        whole, assignments=tuple(each for each in whole.assignments if each.site.path == "3")
    )

    apply(model, part)

    assert plan_of(model) == part
    assert "_conv_forward" not in model.get_submodule("0").__dict__
    assert_same_step(model, twin, images_of())


def test_a_model_without_a_plan_has_none_to_tell() -> None:
    with pytest.raises(PlanError, match="must have been patched by optimize or apply, but it runs no plan"):
        plan_of(a_chain())


def test_a_model_that_is_made_of_patched_modules_says_so() -> None:
    model, _ = chain_twins()

    with pytest.raises(PlanError, match=r"runs no plan\. Its convolutions were, as those of another"):
        plan_of(torch.fx.symbolic_trace(model))


def _a_tree() -> nn.Sequential:
    body = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 3, 3))
    return nn.Sequential(nn.Conv2d(3, 4, 3), body).double()


def _learn(_: object, name: str, number: int, problem: ConvProblem, ops: tuple[ConvOp, ...]) -> Plan:
    return a_plan_of({ConvSite(name, op, number): problems_of(problem)[op] for op in ops})


def _of_another_plan(model: nn.Sequential) -> None:
    features = model[0](images_of()[:4])
    apply(model[1], a_plan_for(model[1], features))


def _replaced(model: nn.Sequential) -> None:
    model[1] = nn.Identity()


@pytest.mark.parametrize("copied", [lambda model: model, copy.deepcopy, _pickled])
@pytest.mark.parametrize("change", [lambda model: restore(model[1]), _of_another_plan, _replaced])
def test_what_was_patched_or_restored_apart_from_the_model_is_none_of_its_plan(
    change: Callable[[nn.Sequential], object], copied: Callable[[nn.Module], nn.Module]
) -> None:
    model = _a_tree()
    plan = dataclasses.replace(a_plan_for(model, images_of()), transposed=("1.2",))
    apply(model, plan)
    assert plan_of(copied(model)) == plan

    change(model)

    left = plan_of(copied(model))
    assert left.assignments == tuple(each for each in plan.assignments if each.site.path == "0")
    assert left.untouched == tuple(
        (
            f"1.{place}",
            "it no longer runs what the plan has there, as it was restored or replaced on its own",
        )
        for place in range(3)
    )
    assert not left.transposed
    assert Plan.from_text(left.to_text()) == left
    restore(model[0])
    with pytest.raises(PlanError, match="none of its convolutions runs its plan any more"):
        plan_of(model)


def test_what_was_wrapped_since_is_of_the_plan_still() -> None:
    model = _a_tree()
    plan = a_plan_for(model, images_of())
    apply(model, plan)

    model[1] = nn.Sequential(model[1])

    assert plan_of(model) == plan


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_patch_that_somebody_has_wrapped_runs_the_plan_until_it_is_restored(place: int) -> None:
    model = _a_tree()
    plan = a_plan_for(model, images_of())
    twin = copy.deepcopy(model)
    apply(model, plan)
    conv = model[1][place]
    method = "forward" if place == 2 else "_conv_forward"
    inner = getattr(conv, method)
    conv.__dict__[method] = lambda *args: inner(*args)

    assert plan_of(model) == plan
    with unpatched(model):
        assert plan_of(model) == plan
        assert torch.equal(model(images_of()), twin(images_of()))
    assert not torch.equal(model(images_of()), twin(images_of()))
    restore(model)
    assert torch.equal(model(images_of()), twin(images_of()))
    conv.__dict__[method] = inner  # as who takes the wrapper off
    with pytest.raises(PlanError, match="runs no plan"):
        plan_of(model)
    restore(model)
    assert method not in conv.__dict__


def test_who_has_wrapped_a_patch_is_called_again_after_a_rest() -> None:
    model = _a_tree()
    apply(model, a_plan_for(model, images_of()))
    inner, called = model[0]._conv_forward, []
    model[0].__dict__["_conv_forward"] = lambda *args: called.append(0) or inner(*args)

    with unpatched(model):
        pass
    model(images_of())

    assert called == [0]


def test_a_wrapped_patch_that_is_restored_while_it_rests_does_not_wake() -> None:
    model = _a_tree()
    expected = model(images_of())
    apply(model, a_plan_for(model, images_of()))
    model[0].__dict__["_conv_forward"] = functools.partial(model[0]._conv_forward)

    with unpatched(model):
        restore(model)

    assert torch.equal(model(images_of()), expected)


@pytest.mark.parametrize("fails", [False, True])
def test_calls_are_noted_during_the_block_alone(*, fails: bool) -> None:
    model = _a_tree()
    apply(model, a_plan_for(model, images_of()))

    with contextlib.suppress(ZeroDivisionError), noted(model) as during:
        assert 1 / (not fails)
    model(images_of())
    with noted(model) as later:
        model(images_of())

    assert [router.is_asked for router in during.values()] == [False] * 4
    assert [router.is_asked for router in later.values()] == [True] * 4


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled])
def test_a_copy_of_a_model_that_rests_runs_no_plan(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = _a_tree()
    apply(model, a_plan_for(model, images_of()))
    inner = model[0]._conv_forward
    model[0].__dict__["_conv_forward"] = functools.partial(inner)

    with unpatched(model):
        copies = [copied(model)]
        expected = model(images_of())

    assert torch.equal(copies[0](images_of()), expected)
    with pytest.raises(PlanError, match="none of its convolutions runs its plan any more"):
        plan_of(copies[0])
    assert not torch.equal(model(images_of()), expected)


def test_a_wrapped_patch_rests_until_the_outermost_rest_ends() -> None:
    model = _a_tree()
    apply(model, a_plan_for(model, images_of()))
    for conv, method in ((model[0], "_conv_forward"), (model[1][2], "forward")):
        conv.__dict__[method] = functools.partial(getattr(conv, method))

    with unpatched(model):
        expected = model(images_of())
        with unpatched(model):
            pass
        assert torch.equal(model(images_of()), expected)

    assert not torch.equal(model(images_of()), expected)


def test_a_method_that_a_module_is_given_while_it_rests_stays() -> None:
    model = _a_tree()
    apply(model, a_plan_for(model, images_of()))
    called = []

    with unpatched(model):
        own = model[0]._conv_forward
        model[0].__dict__["_conv_forward"] = lambda *args: called.append(0) or own(*args)
    model(images_of())

    assert called == [0]
    assert {each.site.path for each in plan_of(model).assignments} == {"1.0", "1.1", "1.2"}


def test_who_calls_a_patch_as_its_own_method_computes_as_before_once_it_is_restored() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.ConvTranspose2d(3, 4, 3).double()

    model = Wrapper()
    expected = model.conv(images_of())
    apply(model.conv, a_plan_for(model.conv, images_of()))
    model.forward = model.conv.forward
    assert not torch.equal(model(images_of()), expected)

    restore(model)

    assert torch.equal(model(images_of()), expected)


def test_what_is_done_to_a_model_that_rests_is_not_undone_when_it_wakes() -> None:
    model = _a_tree()
    plan = a_plan_for(model, images_of())
    keys = [module.__dict__.keys() for module in copy.deepcopy(model).modules()]
    apply(model, plan)
    divided = model(images_of())

    with unpatched(model):
        apply(model, plan)
    assert torch.equal(model(images_of()), divided)
    with unpatched(model):
        restore(model)

    assert not torch.equal(model(images_of()), divided)
    assert [module.__dict__.keys() for module in model.modules()] == keys


def test_who_put_a_shallow_copy_in_the_place_of_a_module_that_is_restored_has_no_plan_there() -> None:
    model = _a_tree()
    apply(model, a_plan_for(model, images_of()))
    first = model[0]
    model[0] = copy.copy(first)

    restore(first)

    assert {each.site.path for each in plan_of(model).assignments} == {"1.0", "1.1", "1.2"}


@pytest.mark.parametrize("place", [0, 2])
def test_a_copy_of_what_has_the_attributes_of_a_patch_is_one_of_the_model(place: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 3, 3)).double()
    twin = copy.deepcopy(model)
    apply(model, a_plan_for(model, images_of()))
    conv = model[place]
    method = "forward" if place else "_conv_forward"
    inner = getattr(conv, method)
    conv.__dict__[method] = functools.update_wrapper(functools.partial(inner), inner)  # as accelerate does
    model(images_of())

    for copied in (copy.deepcopy, _pickled):
        torch.testing.assert_close(copied(model)(images_of()), twin(images_of()))


@DYNAMOS
def test_a_graph_of_a_patched_model_serves_before_and_after_it_rested() -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).double()
    apply(model, a_plan_for(model, images_of()))
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)

    for _ in range(2):
        compiled(images_of())
        with unpatched(model):
            compiled(images_of())

    assert counter.frame_count == 2


def test_a_user_may_change_the_arguments_of_a_patched_module() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 3, 3)).double()
    twin = copy.deepcopy(model)
    apply(model, a_plan_for(model, images_of()))

    for conv in (*model, *twin):
        conv.stride = (2,)  # which PyTorch allows

    assert_same_step(model, twin, images_of())


def test_what_a_shallow_copy_of_a_module_restores_stays_patched() -> None:
    model = _a_tree()
    plan = a_plan_for(model, images_of())
    apply(model, plan)
    before = model(images_of())

    restore(copy.copy(model[0]))

    assert plan_of(model) == plan
    assert torch.equal(model(images_of()), before)


def test_of_copies_within_a_model_the_one_that_was_tuned_counts() -> None:
    model = _a_tree()
    patch(model, a_plan_for(model, images_of()), _learn)
    model.add_module("copy", copy.deepcopy(model[1]))

    model[1](model[0](images_of()).repeat(1, 1, 2, 2))  # of a size that was not met

    learnt = {each.site.path for each in plan_of(model).assignments if each.site.variant}
    assert learnt == {"1.0", "1.1", "1.2"}


def test_what_was_not_tuned_of_a_shape_that_was_met_is_told() -> None:
    def learn(*given: Any) -> Plan:
        return dataclasses.replace(_learn(*given), untouched=(("0", "nobody wants that"),))

    model = _a_tree()
    patch(model, a_plan_for(model, images_of()), learn)

    model[0](images_of(size=7))

    assert plan_of(model).untouched == (("0", "nobody wants that"),)


def test_no_module_is_patched_while_a_model_rests() -> None:
    model = _a_tree()
    apply(model, a_plan_for(model, images_of()))

    with unpatched(model):
        assert patched_modules(model) == {}
    assert list(patched_modules(model)) == ["0", "1.0", "1.1", "1.2"]


def test_it_counts_though_a_copy_comes_before_it() -> None:
    model = _a_tree()
    patch(model, a_plan_for(model, images_of()), _learn)
    body = model[1]
    features = model[0](images_of())
    model._modules = {"copy": copy.deepcopy(body), **model._modules}

    body(features.repeat(1, 1, 2, 2))  # of a size that was not met

    learnt = {each.site.path for each in plan_of(model).assignments if each.site.variant}
    assert learnt == {"1.0", "1.1", "1.2"}


def test_a_part_of_a_patched_model_says_whose_plan_there_is() -> None:
    model = _a_tree()
    apply(model, a_plan_for(model, images_of()))

    with pytest.raises(PlanError, match=r"runs no plan\. Its convolutions were, as those of another"):
        plan_of(model[1])


def test_what_a_part_learns_by_a_plan_of_its_own_is_none_of_the_model_s() -> None:
    model = _a_tree()
    apply(model, a_plan_for(model, images_of()))
    features = model[0](images_of())
    patch(model[1], a_plan_for(model[1], features), _learn)

    model[1](features.repeat(1, 1, 2, 2))  # of a size that the part has not met

    assert {each.site.variant for each in plan_of(model[1]).assignments} == {0, 1}
    assert {(each.site.path, each.site.variant) for each in plan_of(model).assignments} == {("0", 0)}


@DYNAMOS
@pytest.mark.parametrize(
    ("wrap", "path"), [(nn.DataParallel, "module"), (lambda model: torch.compile(model), "_orig_mod")]
)
@pytest.mark.parametrize("make", [lambda: chain_twins()[0], lambda: optimize(a_chain(), "64MiB")])
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


def _told_apart(plan: Plan) -> Plan:
    assignments = tuple(
        dataclasses.replace(each, problem=dataclasses.replace(each.problem, bias=False, is_apart=True))
        for each in plan.assignments
    )
    return dataclasses.replace(plan, assignments=assignments)


def _model_with(conv: nn.Module) -> nn.Module:
    model = a_chain().double()
    model[0] = conv.double()
    return model


def _without(model: nn.Module, name: str) -> nn.Module:
    delattr(model[0], name)
    return model


MISMATCHES: dict[str, tuple[Build, Callable[[Plan], Plan], str]] = {
    "no such module": (a_chain, _renamed, r"with a module 'body.0', but this one has none\.$"),
    "no convolution": (
        lambda: _model_with(nn.Identity()), lambda plan: plan, r"is a Identity and cannot be divided\.$"
    ),
    "transposed": (
        lambda: _model_with(nn.ConvTranspose2d(3, 4, 3)), lambda plan: plan,
        r"here it has weight \(3, 4, 3, 3\)"
    ),
    "transposed, with such a weight": (
        lambda: _model_with(nn.ConvTranspose2d(4, 3, 3, padding=1)), lambda plan: plan,
        "'0' as a convolution that is not transposed, but here it is a ConvTranspose2d",
    ),
    "told to be a transposed one": (
        lambda: a_chain().double(), _told_apart,
        "'0' as a transposed convolution, but here it is a Conv2d",
    ),
    "other weight": (
        lambda: _model_with(nn.Conv2d(3, 4, 5, padding=1)), lambda plan: plan,
        r"here it has weight \(4, 3, 5, 5\)"
    ),
    "other stride": (
        lambda: _model_with(nn.Conv2d(3, 4, 3, stride=2)), lambda plan: plan,
        r"has stride \(2, 2\), padding \(0, 0\)\."
    ),
    "other padding": (
        lambda: _model_with(nn.Conv2d(3, 4, 3, padding="valid")), lambda plan: plan,
        r"with padding \(1, 1\), but here it has padding \(0, 0\)\."
    ),
    "attributes that are none": (
        lambda: _without(a_chain(), "in_channels"), lambda plan: plan,
        "but here it has nothing that describes a convolution ",
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
    "other environment": (
        a_chain, _elsewhere, r"software torch was 1\.0, is .*\. Tune here for a plan of this one\.$",
    ),
    "other device": (lambda: a_chain().to("meta"), lambda plan: plan, "but the model lies on meta"),
}  # fmt: skip


@DYNAMOS
@pytest.mark.parametrize("name", MISMATCHES)
def test_a_plan_that_does_not_fit_is_refused_and_the_model_stays_as_it_was(name: str) -> None:
    build, change, message = MISMATCHES[name]
    plan = change(a_plan_for(a_chain().double(), images_of()))
    model = build()
    before = [dict(module.__dict__) for module in model.modules()]

    with pytest.raises(PlanMismatchError, match=message):
        apply(model, plan)

    assert [dict(module.__dict__) for module in model.modules()] == before


def test_a_plan_from_elsewhere_is_refused_where_weights_are_no_parameters() -> None:
    conv = nn.Conv2d(3, 4, 3, bias=False).double()
    plan = _elsewhere(a_plan_for(conv, images_of()))
    weight = conv.weight.detach()
    del conv.weight
    conv.weight = weight  # type: ignore[assignment]  # as of a network that computes another's weights

    with pytest.raises(PlanMismatchError, match=r"software torch was 1\.0, is "):
        apply(conv, plan)


@pytest.mark.parametrize("make", [lambda: nn.Conv2d(3, 4, 3).double(), lambda: a_chain().double()])
def test_a_plan_of_a_wrapped_model_says_so_to_the_model_alone(make: Build) -> None:
    plan = a_plan_for(nn.DataParallel(make()), images_of())

    with pytest.raises(
        PlanMismatchError, match="made of a wrapper of it, as its part 'module': apply the plan"
    ):
        apply(make(), plan)


@DYNAMOS
def test_a_single_convolution_that_is_compiled_is_told_of_its_original() -> None:
    plan = a_plan_for(nn.Conv2d(3, 4, 3).double(), images_of())

    with pytest.raises(
        PlanMismatchError, match=r"is a OptimizedModule .* Its part '_orig_mod' has it: apply"
    ):
        apply(torch.compile(nn.Conv2d(3, 4, 3).double()), plan)


def test_a_plan_that_does_not_fit_leaves_the_former_plan_in_place() -> None:
    model, _ = chain_twins()
    former = plan_of(model)

    with pytest.raises(PlanMismatchError, match="with a module"):
        apply(model, _renamed(former))

    assert plan_of(model) is former
    assert is_divided(model, images_of())


def test_a_plan_that_contradicts_itself_is_refused() -> None:
    model = a_chain().double()
    plan = dataclasses.replace(a_plan_for(model, images_of()), limit_bytes=0)

    with pytest.raises(PlanError, match="The workspace must be at most 0 bytes"):
        apply(model, plan)


@pytest.mark.filterwarnings("ignore:.torch.jit.")
def test_who_scripts_a_patched_model_is_told_to_restore_it() -> None:
    model, twin = twins_of(lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3)), images_of())

    with pytest.raises(AttributeError, match=r"takes no patched .*: mucudnn\.restore\(model\) before"):
        torch.jit.script(model)

    assert torch.equal(torch.jit.script(restore(model))(images_of()), twin(images_of()))


def test_a_plan_from_a_file_runs() -> None:
    torch.manual_seed(0)
    model = a_chain().double()
    twin = copy.deepcopy(model)

    apply(model, Plan.from_text(a_plan_for(model, images_of().requires_grad_()).to_text()))

    assert is_divided(model, images_of())
    assert_same_step(model, twin, images_of())


@pytest.mark.parametrize("conv", [nn.Conv2d, nn.ConvTranspose2d])
def test_the_sites_of_a_plan_may_come_in_any_order(conv: type[nn.Module]) -> None:
    model = conv(3, 4, 3).double()
    twin, plan = copy.deepcopy(model), a_plan_for(model, images_of())

    apply(model, dataclasses.replace(plan, assignments=plan.assignments[::-1]))

    assert is_divided(model, images_of())
    assert_same_step(model, twin, images_of())


@pytest.mark.parametrize("bias", [True, False])
def test_a_plan_serves_a_module_whose_bias_came_or_went(*, bias: bool) -> None:
    plan = a_plan_for(nn.Conv2d(3, 4, 3, bias=not bias).double(), images_of())
    model = nn.Conv2d(3, 4, 3, bias=bias).double()
    twin = copy.deepcopy(model)

    apply(model, plan)

    assert is_divided(model, images_of())
    assert_same_step(model, twin, images_of())


class _Scaled(nn.Conv2d):
    """Has a forward pass of its own."""

    def forward(self, image: Tensor) -> Tensor:
        return self._conv_forward(image, 2 * self.weight, self.bias)


def test_a_plan_of_gradients_alone_serves_a_subclass() -> None:
    model = _Scaled(3, 4, 3).double()
    twin, plan = copy.deepcopy(model), a_plan_for(model, images_of())
    gradients = tuple(each for each in plan.assignments if each.site.op is not ConvOp.FPROP)

    apply(model, dataclasses.replace(plan, assignments=gradients))

    assert is_divided(model, images_of())
    assert_same_step(model, twin, images_of())


class _IntoModules(torch.fx.Tracer):
    """Traces what PyTorch's own modules do, too."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False


@pytest.mark.parametrize("conv", [nn.Conv2d, nn.ConvTranspose2d])
def test_graphs_are_traced_as_before(conv: type[nn.Module]) -> None:
    model, twin = twins_of(lambda: nn.Sequential(conv(3, 4, 3)), images_of())

    kinds = [[(node.op, node.target) for node in _IntoModules().trace(each).nodes] for each in (model, twin)]

    assert kinds[0] == kinds[1]
    assert len(kinds[0]) == 5  # an image, a weight, a bias, a convolution, an output
