"""Making a model's convolutions run divided, and giving the model back as it was.

A module is patched by one attribute of the instance, `_conv_forward`, which `nn.Conv2d.forward` calls;
modules, parameters, hooks and the state_dict stay what they are. The patch and the plan are ordinary values,
so that copying and pickling a model takes them along.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mucudnn.backends import Backend, backend_for, backend_name, backend_of
from mucudnn.errors import BackendError, PlanError, PlanMismatchError, ProblemError, UntunedWarning
from mucudnn.extraction import convolution_of, undividable
from mucudnn.functional import DividedConvolution, is_traced, obstacle, problem_of
from mucudnn.plan import Assignment, Division, Mode, Plan
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.profile import Candidate
from mucudnn.solvers import ReuseTable
from mucudnn.workspace import Owner, release_workspaces

_PATCH = "_conv_forward"
_PLAN = "_mucudnn_plan"
_ARMED = "_mucudnn_armed"

FirstCall = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


@dataclasses.dataclass(frozen=True)
class Variant:
    """One shape that a module was tuned for.

    Attributes:
        problem: of fprop, for the whole mini-batch.
        assignments: what each op runs.
    """

    problem: ConvProblem
    assignments: Mapping[ConvOp, Assignment]


@dataclasses.dataclass(frozen=True)
class Memory:
    """How a plan's sites take memory.

    Attributes:
        backend: name of the plan's backend.
        own: id of PyTorch's own convolution, which takes its workspace outside of the buffer.
        is_sharing: whether each site owns a buffer, rather than all one in common.
        limit_bytes: of the plan.
        buffer_bytes: what the common buffer comes to.
    """

    backend: str
    own: str
    is_sharing: bool
    limit_bytes: int
    buffer_bytes: int

    @classmethod
    def of(cls, plan: Plan) -> "Memory":
        """Return what `plan` says of memory."""
        name = plan.environment.backend
        own = backend_of(f"{name}:").own
        buffers = (_buffer_bytes(assigned.division, own) for assigned in plan.assignments)
        return cls(name, own, plan.mode is Mode.SHARING, plan.limit_bytes, max(buffers, default=0))

    def bound(self, division: Division) -> int | None:
        """Return what buffer and PyTorch's own workspace may take together, or None if they always fit."""
        limit_bytes, buffer_bytes = self.limit_bytes, self.buffer_bytes
        if self.is_sharing:
            limit_bytes, buffer_bytes = division.workspace_bytes, _buffer_bytes(division, self.own)
        elsewhere = [part.workspace_bytes for part in division.parts if part.algorithm == self.own]
        return limit_bytes if max(elsewhere, default=0) + buffer_bytes > limit_bytes else None


def _buffer_bytes(division: Division, own: str) -> int:
    return max((part.workspace_bytes for part in division.parts if part.algorithm != own), default=0)


class _Notice:
    """Whether a model has said that it met what it was not tuned for; its modules share one."""

    def __init__(self) -> None:
        self.is_given = False


def _settings(conv: nn.Conv2d) -> tuple[object, ...]:
    """What decides the module's convolution beside its tensors; a user may change it at any time."""
    return (conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode)


class PatchedForward:
    """What a patched module calls instead of its own `_conv_forward`."""

    is_mucudnn_patch = True

    def __init__(
        self,
        conv: nn.Conv2d,
        path: str,
        variants: tuple[Variant, ...],
        memory: Memory,
        notice: _Notice,
    ) -> None:
        """Bind to one module.

        Args:
            conv: the module.
            path: its path, for messages.
            variants: the shapes that it was tuned for.
            memory: of the plan.
            notice: shared by all modules of the model.
        """
        self._notice = notice
        self._conv = conv
        self._path = path
        self._variants = variants
        self._memory = memory
        self._forget()

    def _forget(self) -> None:
        self._routes: dict[object, DividedConvolution | None] = {}
        self._owners: dict[tuple[int, ConvOp], Owner] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Keep what was decided; what was built from it is built again."""
        built = ("_routes", "_owners")
        return {name: value for name, value in self.__dict__.items() if name not in built}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __call__(self, image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the module's convolution, divided where the shapes were tuned."""
        if is_traced(image, weight):
            return self._own(image, weight, bias)
        is_served = backend_name(image.device) == self._memory.backend
        if not is_served or obstacle(image, weight, bias) is not None:
            return self._own(image, weight, bias)
        if image.dim() == 3:
            batch: Tensor = self(image.unsqueeze(0), weight, bias)
            return batch.squeeze(0)
        if image.dim() != 4:
            return self._own(image, weight, bias)
        tensors = (image.shape, image.stride(), image.dtype, weight.shape, weight.stride(), bias is None)
        key: tuple[object, ...] = (*tensors, image.device, *_settings(self._conv))
        if key not in self._routes:
            backend = backend_of(self._memory.own, image.device)
            self._routes[key] = self._route(backend, image, weight, bias)
        route = self._routes[key]
        if route is None:
            return self._own(image, weight, bias)
        padded, _ = convolution_of(self._conv, image, weight)
        return route(padded, weight, bias)

    def _own(self, image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = nn.Conv2d._conv_forward(self._conv, image, weight, bias)
        return result

    def _route(
        self, backend: Backend, image: Tensor, weight: Tensor, bias: Tensor | None
    ) -> DividedConvolution | None:
        """Return what runs images of this shape, or None for PyTorch's own."""
        padded, arguments = convolution_of(self._conv, image, weight)
        try:
            problem = problem_of(padded, weight, bias is not None, arguments)
        except ProblemError:
            return None  # PyTorch's own says what is wrong
        served = [
            (variant.problem.batch, number)
            for number, variant in enumerate(self._variants)
            if variant.problem.with_batch(problem.batch) == problem and problem.batch <= variant.problem.batch
        ]
        if served:
            _, number = min(served)
            return self._divided(backend, number, self._variants[number], problem)
        self._warn_once(problem)
        return None

    def _warn_once(self, problem: ConvProblem) -> None:
        if self._notice.is_given:
            return
        self._notice.is_given = True
        name = self._path or "The model itself"
        tuned = "; ".join(str(variant.problem) for variant in self._variants)
        warnings.warn(
            f"{name} was tuned for {tuned}, but meets {problem}, which runs PyTorch's own convolution. "
            "This is said once for the whole model.",
            UntunedWarning,
            stacklevel=2,
        )

    def _divided(
        self, backend: Backend, number: int, variant: Variant, problem: ConvProblem
    ) -> DividedConvolution:
        divisions = {
            op: division_for(assigned, problem.batch, backend.own)
            for op, assigned in variant.assignments.items()
        }
        owners = {}
        if self._memory.is_sharing:
            owners = {op: self._owners.setdefault((number, op), Owner()) for op in divisions}
        bounds = {op: self._memory.bound(division) for op, division in divisions.items()}
        limits = {op: bound for op, bound in bounds.items() if bound is not None}
        capacity_bytes = 0 if self._memory.is_sharing else self._memory.buffer_bytes
        return DividedConvolution(backend, problem, divisions, owners, limits, capacity_bytes)


def division_for(assigned: Assignment, batch: int, own: str) -> Division:
    """Return what a site runs for a mini-batch of at most the tuned size, without measuring.

    The tuned size runs its division. A smaller one gets the best division by the same profile, within the
    site's own workspace; where PyTorch's own convolution has won undivided it stays, since it was confirmed
    and takes less the smaller the batch. Where the profile's sizes do not add up to the batch, the tuned
    division is cut off at its end.
    """
    division = assigned.division
    if batch == division.batch:
        return division
    if division.is_undivided and division.parts[0].algorithm == own:
        return _cut(division, batch)
    limit_bytes = division.workspace_bytes
    fitting = [each for each in assigned.candidates if each.workspace_bytes <= limit_bytes]
    return ReuseTable(fitting, batch, limit_bytes).division(batch) or _cut(division, batch)


def _cut(division: Division, batch: int) -> Division:
    """Return the first `batch` samples of a division; its last part may become smaller."""
    parts: list[Candidate] = []
    left = batch
    for part in division.parts:
        if left:
            parts.append(dataclasses.replace(part, batch=min(part.batch, left)))
            left -= parts[-1].batch
    return Division(tuple(parts))


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """Patch `model` in place so that it runs `plan`, and return it; a former plan is replaced as a whole.

    Raises:
        PlanMismatchError: the plan was made for another model or in another environment; the model is
            left as it was.
        PlanError: the plan contradicts itself.
    """
    plan.check()
    _check_environment(model, plan)
    modules = dict(model.named_modules())
    grouped: dict[str, dict[int, dict[ConvOp, Assignment]]] = {}
    for assigned in plan.assignments:
        _check_runnable(assigned, plan)
        site = assigned.site
        grouped.setdefault(site.path, {}).setdefault(site.variant, {})[site.op] = assigned
    notice = _Notice()
    patches = {
        path: _patch(modules.get(path), path, variants, plan, notice) for path, variants in grouped.items()
    }
    restore(model)
    for path, patch in patches.items():
        modules[path].__dict__[_PATCH] = patch
    model.__dict__[_PLAN] = plan
    return model


def arm(model: nn.Module, first_call: FirstCall) -> nn.Module:
    """Have `first_call` told of the first call of `model`, before it runs; return the model."""
    restore(model)
    model.__dict__[_ARMED] = model.register_forward_pre_hook(first_call, with_kwargs=True)
    return model


def restore(model: nn.Module) -> nn.Module:
    """Take all patches off `model`, in place, and return it; nothing is left behind.

    The buffers go back to the system too; another patched model makes its own anew.
    """
    for module in model.modules():
        if isinstance(module.__dict__.get(_PATCH), PatchedForward):
            del module.__dict__[_PATCH]
        module.__dict__.pop(_PLAN, None)
        hook = module.__dict__.pop(_ARMED, None)
        if hook is not None:
            hook.remove()
    release_workspaces()
    return model


def plan_of(model: nn.Module) -> Plan:
    """Return the plan that `model` runs.

    Raises:
        PlanError: it runs none.
    """
    plan = model.__dict__.get(_PLAN)
    if not isinstance(plan, Plan):
        raise PlanError("The model must have been patched by optimize or apply, but it runs no plan.")
    return plan


def _patch(
    module: nn.Module | None,
    path: str,
    variants: Mapping[int, Mapping[ConvOp, Assignment]],
    plan: Plan,
    notice: _Notice,
) -> PatchedForward:
    if module is None:
        raise PlanMismatchError(f"The plan is for a model with a module {path!r}, but this one has none.")
    if not isinstance(module, nn.Conv2d) or undividable(module):
        raise PlanMismatchError(
            f"The plan divides {path}, but here that is a {type(module).__name__} and cannot be divided."
        )
    shapes = []
    for assignments in variants.values():
        for assigned in assignments.values():
            _check_module(module, path, assigned.problem)
        problem = next(iter(assignments.values())).problem
        has_bias = module.bias is not None
        shapes.append(
            Variant(dataclasses.replace(problem, op=ConvOp.FPROP, bias=has_bias), dict(assignments))
        )
    return PatchedForward(module, path, tuple(shapes), Memory.of(plan), notice)


def _check_module(conv: nn.Conv2d, path: str, problem: ConvProblem) -> None:
    """Compare a problem with what the module says of itself; computed weights are not asked for."""
    weight = torch.empty(
        (conv.out_channels, conv.in_channels // conv.groups, *conv.kernel_size), device="meta"
    )
    _, arguments = convolution_of(conv, torch.empty(problem.input_shape, device="meta"), weight)
    planned = (problem.filter_shape, problem.stride, problem.padding, problem.dilation, problem.groups)
    present = (
        tuple(weight.shape),
        arguments.stride,
        arguments.padding,
        arguments.dilation,
        arguments.groups,
    )
    if planned != present:
        raise PlanMismatchError(
            f"The plan is for {path} with (weight, stride, padding, dilation, groups) {planned}, "
            f"but here it has {present}."
        )
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in conv.parameters()}
    if dtypes and problem.dtype not in dtypes:
        raise PlanMismatchError(
            f"The plan is for {path} in {problem.dtype}, but here it is in {', '.join(sorted(dtypes))}."
        )


def _check_runnable(assigned: Assignment, plan: Plan) -> None:
    """Raise unless every part's algorithm computes it here, in the workspace that the plan allots."""
    backend = backend_of(f"{plan.environment.backend}:")
    for part in assigned.division.parts:
        problem = assigned.problem.part(part.batch)
        if not backend.computes(problem, part.algorithm):
            raise PlanMismatchError(
                f"The plan runs {part.algorithm} for {assigned.site}, which does not compute {problem} here."
            )
        needed = backend.buffer_bytes(problem, part.algorithm)
        if needed > part.workspace_bytes:
            raise PlanMismatchError(
                f"The plan allots {part.workspace_bytes} bytes to {part.algorithm} for {assigned.site}, "
                f"but here it needs {needed}."
            )


def _check_environment(model: nn.Module, plan: Plan) -> None:
    tensor = next(model.parameters(), None)
    if tensor is None:
        return
    try:
        present = backend_for("auto", tensor.device).environment()
    except BackendError as error:
        raise PlanMismatchError(f"The plan cannot be used here: {error}") from error
    differences = plan.environment.differences(present)
    if differences:
        raise PlanMismatchError(f"The plan was made in another environment: {'; '.join(differences)}.")
