"""Whether a plan suits a model: its modules, the algorithms that they need here, and the environment."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from mucudnn.backends import Backend, backend_for, backend_of
from mucudnn.convolutions.modules import Kind, at_odds, kind_of, tuned_device, undividable
from mucudnn.errors import BackendError, OptionError, PlanMismatchError
from mucudnn.plan import Assignment, Plan
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.profile import Environment


def suiting_module(
    modules: Mapping[str, nn.Module],
    path: str,
    variants: Mapping[int, Mapping[ConvOp, Assignment]],
) -> tuple[nn.Module, Kind, dict[int, ConvProblem]]:
    """Return a module that a plan divides, its class, and its forward problem for each variant."""
    module = modules.get(path)
    if module is None:
        raise PlanMismatchError(
            f"The plan is for a model with a module {path!r}, but this one has none.{_wrapped(modules, path)}"
        )
    kind = kind_of(module)
    if kind is None or undividable(module):
        raise PlanMismatchError(
            f"The plan divides {path!r}, but here that is a {type(module).__name__} and cannot be divided."
            f"{_wrapped(modules, path)}"
        )
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        raise PlanMismatchError(
            f"The plan divides {path!r}, but here that is a {type(module).__name__} without parameters; call "
            "the model once, and then apply the plan."
        )
    problems = {}
    for number, assignments in variants.items():
        for assigned in assignments.values():
            _check_module(module, kind, path, assigned.problem)
        problems[number] = _forward_problem(module, kind, assignments)
    return module, kind, problems


def _wrapped(modules: Mapping[str, nn.Module], path: str) -> str:
    """Return a hint, if torch.compile or data parallelism has wrapped the model, or that of the plan."""
    for part in ("_orig_mod", "module"):
        if ".".join(filter(None, (part, path))) in modules:
            return f" Its part {part!r} has it: apply the plan to that."
        if path.partition(".")[0] == part and path.removeprefix(part).removeprefix(".") in modules:
            return (
                f" The plan was made of a wrapper of it, as its part {part!r}: apply the plan to such a one."
            )
    return ""


def _forward_problem(module: nn.Module, kind: Kind, assignments: Mapping[ConvOp, Assignment]) -> ConvProblem:
    """Return the problem of the forward pass to which those of a plan belong.

    Gradients know of no bias. What a subclass does with the one that it has, the plan's forward pass tells.
    """
    problem = next(iter(assignments.values())).problem
    if kind.is_transposed:
        return dataclasses.replace(problem, op=ConvOp.DGRAD)
    has_bias = module.bias is not None
    if type(module).forward is not kind.base.forward and ConvOp.FPROP in assignments:
        has_bias = assignments[ConvOp.FPROP].problem.bias
    return dataclasses.replace(problem, op=ConvOp.FPROP, bias=has_bias)


def _check_module(module: Any, kind: Kind, path: str, problem: ConvProblem) -> None:
    """Compare a problem with what the module says of itself.

    Where weights are equal, problems of plain and of transposed ones mostly are too, but for the bias of the
    former.
    """
    try:
        torch.empty(problem.input_shape, device="meta")  # before it is compared, and to say so
    except (RuntimeError, TypeError) as error:
        raise PlanMismatchError(
            f"The plan is for {path!r} with an input of {problem.input_shape}, but no tensor is that large."
        ) from error
    odd = at_odds(module, kind, problem)
    if odd is not None:
        planned, present = odd
        raise PlanMismatchError(f"The plan is for {path!r} with {planned}, but here it has {present}.")
    if kind.is_transposed and problem.bias:
        raise PlanMismatchError(
            f"The plan is for {path!r} as a convolution that is not transposed, but here it is a "
            f"{type(module).__name__}."
        )
    if problem.is_apart and not kind.is_transposed:
        raise PlanMismatchError(
            f"The plan is for {path!r} as a transposed convolution, but here it is a {type(module).__name__}."
        )


def check_runnable(assigned: Assignment, backend: Backend) -> None:
    """Raise unless every part's algorithm computes it here, in the workspace that the plan allots."""
    for part in assigned.division.parts:
        problem = assigned.problem.part(part.batch)
        if not backend.computes(problem, part.algorithm):
            reason = backend.refusal(problem, part.algorithm)
            refused = f"which does not compute {problem} here" + (f": {reason}" if reason else "")
            raise PlanMismatchError(
                f"The plan runs {part.algorithm} for {assigned.site}, {refused}. Tuned here, it runs another."
            )
        needed = backend.buffer_bytes(problem, part.algorithm)
        if needed > part.workspace_bytes:
            raise PlanMismatchError(
                f"The plan allots {part.workspace_bytes} bytes to {part.algorithm} for {assigned.site}, "
                f"but here it needs {needed}."
            )


def get_ready(assigned: Assignment, backend: Backend) -> None:
    """Do what would take seconds at the first call, such as to compile.

    Raises:
        PlanMismatchError: it cannot be done here.
    """
    for part in assigned.division.parts:
        try:
            backend.get_ready(assigned.problem.part(part.batch), part.algorithm)
        except BackendError as error:
            raise PlanMismatchError(
                f"The plan runs {part.algorithm} for {assigned.site}, which cannot be done here: {error}"
            ) from error


def backend_at_home(model: nn.Module, plan: Plan) -> Backend:
    """Return the backend where the model's convolutions lie, if its environment is the plan's.

    Of a model without parameters and buffers, whose weights are computed, it is the plan's, on a card the
    current one.

    Raises:
        PlanMismatchError: it is another one, or there is none.
    """
    try:
        if any(True for _ in itertools.chain(model.parameters(), model.buffers())):
            backend = backend_for("auto", tuned_device(model))
        else:
            backend = backend_of(f"{plan.environment.backend}:")
    except (BackendError, OptionError) as error:
        raise PlanMismatchError(f"The plan cannot be used here: {error}") from error
    present = backend.environment()
    differences = plan.environment.differences(present)
    if differences:
        told = f"The plan was made in another environment: {'; '.join(differences)}."
        remedies = [*_remedies(plan.environment, present)] or [" Tune here for a plan of this one."]
        raise PlanMismatchError(f"{told}{''.join(remedies)}")
    return backend


def _remedies(then: Environment, now: Environment) -> Iterator[str]:
    """Yield how the processor gets the threads and the compiler with which a plan was made."""
    if not then.backend == now.backend == "cpu":
        return
    threads = then.policy.get("threads")
    if threads is not None and threads != now.policy.get("threads"):
        yield (
            f" torch.set_num_threads({threads}), or OMP_NUM_THREADS={threads} in the environment, sets the "
            "number of threads that it was made with; another number needs another plan."
        )
    compilers = [each.software.get("C compiler") for each in (then, now)]
    if compilers[0] not in ("none", compilers[1]):
        how = (
            "Install that compiler"
            if compilers[1] == "none"
            else "Set the environment variable CC to that one"
        )
        yield f" {how}, or tune here."
