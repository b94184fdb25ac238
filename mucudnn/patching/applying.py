"""Making a model's convolutions run divided, and giving the model back as it was.

A module is patched by one attribute of the instance, which hides the method that computes its convolution:
`_conv_forward`, which `forward` calls, or `forward` itself of transposed ones. Another one knows the patch,
which somebody may have wrapped. Modules, parameters, hooks and the state_dict stay what they are. The patch
and the plan are ordinary values, so that copying and pickling a model takes them along.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from mucudnn.convolutions.modules import check_is_module, kind_of
from mucudnn.convolutions.notices import Notice
from mucudnn.errors import OptionError, PlanError
from mucudnn.evidence import FrozenEvidence
from mucudnn.execution.workspace import release_workspaces
from mucudnn.patching.fitting import Memory, is_unpatched
from mucudnn.patching.patched import GraphServers, PatchedForward
from mucudnn.patching.routing import NotingRouter
from mucudnn.patching.shapes import Learn, TunedShapes, Variant, gradient_ops, told_after_all
from mucudnn.patching.suiting import backend_at_home, check_runnable, get_ready, suiting_module
from mucudnn.plan import Assignment, ConvSite, Plan
from mucudnn.problem import ConvOp, ConvProblem

_PLAN = "_mucudnn_plan"
_ARMED = "_mucudnn_armed"
_PATCH = "_mucudnn_patch"

_REPLICATE = "_replicate_for_data_parallel"
"""What `nn.DataParallel` calls of every module."""

_MOST_SHOWN = 200
"""Characters of what an error shows of a value that is none of the right kind."""

_TAKEN_BACK = "it no longer runs what the plan has there, as it was restored or replaced on its own"
"""Why a site of a plan is none any more."""

FirstCall = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """Patch `model` in place so that it runs `plan`, and return it; a former plan is replaced as a whole.

    Algorithms in C and our own kernels are compiled now, which takes seconds unless the user's cache folder
    has them, and cuDNN's execution plans are built. Batch sizes that the plan does not run are made ready
    when a call needs them.

    Raises:
        PlanMismatchError: the plan was made for another model or in another environment, or something that it
            runs cannot be compiled or built; the model is left as it was.
        PlanError: the plan contradicts itself.
        OptionError: either is something else.
    """
    return patch(model, plan)


def patch(
    model: nn.Module, plan: Plan, learn: Learn | None = None, *, is_for_inference: bool = False
) -> nn.Module:
    """Do what `apply` does.

    Args:
        model: to patch.
        plan: that it is to run.
        learn: tunes shapes that the plan does not know, if there is one.
        is_for_inference: whether gradients were left out since the model was in eval mode: then one that is
            needed after all is told of. Elsewhere an op that no module's plan has was not asked for.
    """
    check_is_module(model)
    if not isinstance(plan, Plan):
        got = repr(plan)
        if len(got) > _MOST_SHOWN:  # a plan's text, say
            got = f"{got[:_MOST_SHOWN]} ..."
        has_one = isinstance(getattr(plan, "settled", None), Plan)  # what compare has found
        hint = "its attribute settled is one" if has_one else "Plan.load(path) reads one from a file"
        raise OptionError(f"A plan must be a Plan, but got {got}; {hint}.")
    plan.check()
    backend = backend_at_home(model, plan)
    modules = dict(model.named_modules())
    grouped: dict[str, dict[int, dict[ConvOp, Assignment]]] = {}
    for each in plan.assignments:
        grouped.setdefault(each.site.path, {}).setdefault(each.site.variant, {})[each.site.op] = each
    suiting = {path: suiting_module(modules, path, variants) for path, variants in grouped.items()}
    for each in plan.assignments:  # whose shapes are known to be the modules' now
        check_runnable(each, backend)
    notice, servers = Notice(), GraphServers()
    by_pages, home = backend.takes_memory_by_pages, backend.flags()
    memory = Memory.of(plan, is_growing=learn is not None, by_pages=by_pages)
    frozen = {(seen.path, seen.variant): seen for seen in plan.frozen}
    asked = {
        role
        for path, variants in grouped.items()
        for role, op in gradient_ops(is_transposed=suiting[path][1].is_transposed).items()
        if any(op in assigned for assigned in variants.values())
    }
    after_all = told_after_all(asked, is_for_inference=is_for_inference)
    patches = {}
    for path, variants in grouped.items():
        if learn is None and not _changes(variants, memory):
            continue  # what computes as before in any case costs nothing
        module, kind, problems = suiting[path]
        shapes = _variants(path, variants, problems, frozen, memory)
        tuned = TunedShapes(path, shapes, memory, notice, home, learn, after_all=after_all)
        patches[path] = PatchedForward(module, kind, tuned, servers)
    for each in plan.assignments:
        get_ready(each, backend)
    restore(model)
    for path, patched in patches.items():
        attributes = modules[path].__dict__
        attributes[patched.method] = attributes[_PATCH] = patched
        if patched.method == "forward":  # which takes the weight from its module: a replica's is another one
            attributes[_REPLICATE] = _Replicating(modules[path])
    model.__dict__[_PLAN] = _Patched(plan, frozenset(patches))
    return model


def arm(model: nn.Module, first_call: FirstCall) -> nn.Module:
    """Have `first_call` told of the first call of `model`, before it runs; return the model."""
    restore(model)  # which says so if it is none
    model.__dict__[_ARMED] = model.register_forward_pre_hook(first_call, with_kwargs=True)
    return model


def is_armed(model: nn.Module) -> bool:
    """Return whether `model` waits for its first call."""
    return _ARMED in model.__dict__


def restore(model: nn.Module) -> nn.Module:
    """Take all patches off `model`, in place, and return it; nothing is left behind.

    The buffers go back to the system too; other patched models allocate theirs again. A model that waits to
    be tuned in its first call waits no longer.

    Raises:
        OptionError: it is no module.
    """
    check_is_module(model)
    for module in model.modules():
        _take_off(module)
        module.__dict__.pop(_PLAN, None)
        hook = module.__dict__.pop(_ARMED, None)
        if hook is not None:
            hook.remove()
    release_workspaces()
    return model


def _take_off(module: nn.Module) -> None:
    """Take a module's patch off, if it has one."""
    attributes, kind = module.__dict__, kind_of(module)
    patched = attributes.pop(_PATCH, None)
    if patched is not None:
        patched.retire(module)  # somebody may have wrapped it
    if kind is not None and isinstance(attributes.get(kind.method), PatchedForward):  # or put it back
        del attributes[kind.method]
    if isinstance(attributes.get(_REPLICATE), _Replicating):
        del attributes[_REPLICATE]


def plan_of(model: nn.Module) -> Plan:
    """Return the plan that `model` runs, with shapes that were tuned since.

    Parts of the model that were since restored, or patched with another plan, are among its `untouched`.

    Raises:
        PlanError: it runs none.
        OptionError: it is no module.
    """
    found = _found(model)
    running = _running(model, found)
    return _with_learnt(_without(found.plan, found.paths - set(running)), running.values())


def applied_plan(model: nn.Module) -> Plan:
    """Return the plan that `model` was patched with, and what was tuned since, whatever parts of it run now.

    Raises:
        PlanError, OptionError: as of `plan_of`.
    """
    return _with_learnt(_found(model).plan, (patched for _, patched in _patches(model).values()))


@dataclasses.dataclass(frozen=True)
class _Patched:
    """What a model was patched with, and the paths of the modules that were."""

    plan: Plan
    paths: frozenset[str]


def _found(model: nn.Module) -> _Patched:
    """Return what a model was patched with; the errors are those of `plan_of`."""
    check_is_module(model)
    found = model.__dict__.get(_PLAN)
    if is_armed(model):
        raise PlanError(
            "The model must have been called, which tunes it, but it still waits for its first call that can "
            "be examined. Graphs that torch.compile has of a model like it, from before, run no such call: "
            "torch.compiler.reset() drops them."
        )
    if not isinstance(found, _Patched):
        raise PlanError(
            f"The model must have been patched by optimize or apply, but it runs no plan.{_inner(model)}"
        )
    return found


def _with_learnt(plan: Plan, patches: Iterable[PatchedForward]) -> Plan:
    learnt = [each for patched in patches for each in patched.learnt]
    return plan.joined(learnt) if learnt else plan


def _running(model: nn.Module, found: _Patched) -> dict[str, PatchedForward]:
    """Return what computes the modules that run what they were patched with, by their paths in the plan.

    They may have others by now, where something has wrapped parts of the model; and of several that have the
    same one, as copies within a model, that which has it still counts, or else the first.
    """
    planned: dict[str, dict[ConvSite, Assignment]] = {path: {} for path in found.paths}
    for each in found.plan.assignments:
        planned.get(each.site.path, {})[each.site] = each
    running = {}
    for here, (_, patched) in _patches(model).items():
        runs = {each.site: each for each in patched.planned}
        path = next(iter(runs)).path
        is_known = path in running and here != path
        if planned.get(path) == runs and not patched.is_retired and not is_known:
            running[path] = patched
    return running


def _without(plan: Plan, paths: Collection[str]) -> Plan:
    """Return the plan without the sites of some modules.

    Raises:
        PlanError: there are no others.
    """
    if not paths:
        return plan
    assignments = tuple(each for each in plan.assignments if each.site.path not in paths)
    if not assignments:
        raise PlanError("The model must run a plan, but none of its convolutions runs its plan any more.")
    return dataclasses.replace(
        plan,
        assignments=assignments,
        calls=tuple(each for each in plan.calls if each.path not in paths),
        frozen=tuple(each for each in plan.frozen if each.path not in paths),
        untouched=(*plan.untouched, *((path, _TAKEN_BACK) for path in sorted(paths))),
        transposed=tuple(path for path in plan.transposed if path not in paths),
    )


def _inner(model: nn.Module) -> str:
    """Return a hint, if a part of the model runs a plan, or waits to, such as what a wrapper has wrapped.

    Or if it is a part of a patched model, or was made of its modules, as torch.fx makes one.
    """
    for path, module in model.named_modules():
        if _PLAN in module.__dict__ or is_armed(module):
            return f" Its part {path!r} was: ask for the plan of that."
    if patched_modules(model):
        return " Its convolutions were, as those of another model: ask for the plan of that."
    return ""


def patched_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model that are patched now, not `unpatched` for a while, by their paths."""
    return {path: module for path, (module, patched) in _patches(model).items() if not patched.is_resting}


@contextlib.contextmanager
def unpatched(model: nn.Module) -> Iterator[None]:
    """Take all patches off for a while, as if there were none, and put the same ones back; buffers stay."""
    with contextlib.ExitStack() as stack:
        for module, patched in _patches(model).values():
            attributes, method = module.__dict__, patched.method
            if attributes.get(method) is patched:  # else somebody has wrapped it
                del attributes[method]
                stack.callback(_put_back, module, patched)
            stack.enter_context(patched.resting())
        yield


def _put_back(module: nn.Module, patched: PatchedForward) -> None:
    """Put a patch back, unless the module was restored meanwhile, patched anew, or given another method."""
    if module.__dict__.get(_PATCH) is not patched:
        return
    if patched.method in module.__dict__:
        _take_off(module)
    else:
        module.__dict__[patched.method] = patched


@contextlib.contextmanager
def noted(model: nn.Module) -> Iterator[dict[str, NotingRouter]]:
    """Yield, of each patched module, what knows of its calls during the block, but for those in graphs."""
    with contextlib.ExitStack() as stack:
        yield {path: stack.enter_context(patched.noted()) for path, (_, patched) in _patches(model).items()}


def _patches(model: nn.Module) -> dict[str, tuple[nn.Module, PatchedForward]]:
    """Return the modules of a model that are patched, and what computes them, by their paths."""
    return {
        path: (module, module.__dict__[_PATCH])
        for path, module in model.named_modules()
        if _PATCH in module.__dict__
    }


class _Replicating:
    """Makes replicas of a patched transposed convolution, which run as before: the patch is bound to it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self) -> nn.Module:
        replica: nn.Module = type(self._module)._replicate_for_data_parallel(self._module)
        for name in ("forward", _PATCH, _REPLICATE):
            replica.__dict__.pop(name, None)
        return replica


def _changes(variants: Mapping[int, Mapping[ConvOp, Assignment]], memory: Memory) -> bool:
    """Return whether anything at a module's sites is other than PyTorch's own convolution as it comes."""
    assigned = (each for assignments in variants.values() for each in assignments.values())
    return not all(is_unpatched(each, memory) for each in assigned)


def _variants(
    path: str,
    assigned: Mapping[int, Mapping[ConvOp, Assignment]],
    problems: Mapping[int, ConvProblem],
    frozen: Mapping[tuple[str, int], FrozenEvidence],
    memory: Memory,
) -> tuple[Variant, ...]:
    """Return what a module was tuned for.

    Args:
        path: of the module.
        assigned: what each op of each variant runs.
        problems: of its forward passes, by the variant.
        frozen: what is known of frozen graphs, by path and variant.
        memory: of the plan.
    """
    return tuple(
        Variant(
            problem,
            dict(assigned[number]),
            own_when_frozen=_own_when_frozen(
                problem, assigned[number].get(problem.op), frozen.get((path, number)), memory
            ),
        )
        for number, problem in problems.items()
    )


def _own_when_frozen(
    problem: ConvProblem, assigned: Assignment | None, seen: FrozenEvidence | None, memory: Memory
) -> int:
    """Return the samples up to which frozen graphs hold PyTorch's own forward pass; 0 if they never do.

    They do in any case where it runs as it comes: with its filter packed it takes less. Else it must fit
    beside the buffer, since nobody gives memory back before it runs. Fewer samples than were tuned gain more
    by a packed filter, and nothing says that a division is faster for them too.

    Args:
        problem: of the forward pass.
        assigned: what that runs; None if it was not tuned.
        seen: what is known of such graphs.
        memory: of the plan.
    """
    if assigned is None or memory.room_as_tuned.is_unpatched(assigned.division):
        return problem.batch
    if seen is None or not memory.room.suffices(seen.workspace_bytes, assigned.division):
        return 0
    return problem.batch if seen.is_own else problem.batch - 1  # the tuned batch was timed to be faster
