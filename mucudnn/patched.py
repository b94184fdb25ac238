"""What a patched module calls: for each shape that it meets the division that serves it, or PyTorch's own."""

import dataclasses
import enum
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mucudnn.backends import Backend
from mucudnn.calls import (
    ConvArguments,
    as_autocast,
    autocast_dtype,
    is_traced,
    own_call,
    own_gradients,
    without_autocast,
)
from mucudnn.errors import BackendError, UnmeasuredError, UntunedWarning, warn_user
from mucudnn.functional import DividedConvolution
from mucudnn.modules import Call, Kind, call_of, padded
from mucudnn.operators import announce, convolve
from mucudnn.plan import Assignment, CallEvidence, Plan
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.routing import Memory, Router, divided
from mucudnn.workspace import Owner


@dataclasses.dataclass(frozen=True)
class Variant:
    """One shape that a module was tuned for.

    Attributes:
        problem: of the forward pass, for the whole mini-batch.
        assignments: what each op runs.
        calls: what was seen of whole calls, if it was tuned when it was met.
        untouched: what of it was not tuned then, and why.
    """

    problem: ConvProblem
    assignments: Mapping[ConvOp, Assignment]
    calls: tuple[CallEvidence, ...] = ()
    untouched: tuple[tuple[str, str], ...] = ()


Learn = Callable[[torch.device, str, int, ConvProblem, tuple[ConvOp, ...]], Plan]
"""Tunes a shape that a module meets; see `mucudnn.learning`."""

_learning = threading.RLock()  # of all modules: two that measure at once would measure each other
"""Held while a shape that was met is tuned."""

_NOWHERE = object()
"""Flags that no backend has."""


class Reason(enum.Enum):
    """Why a patched module leaves a call to PyTorch's own convolution; the value says what can be done."""

    LARGER_BATCH = "optimize with the largest batch divides smaller ones too"
    """Its shape was tuned, for smaller batches only."""
    OTHER_SHAPE = "optimize with dynamic=True tunes shapes when they are met"
    """Nothing like it was tuned."""
    ELSEWHERE = "go back to that environment, or optimize again in this one"
    """The plan's times are those of another environment."""
    PARTS = "the policy 'power_of_two' measures sizes that make every smaller batch"
    """Its batch cannot be made of sizes that were measured, or its parts do not run or need too much."""


class Notice:
    """The reasons that a model has given so far, each once; its modules share one."""

    def __init__(self) -> None:
        self._given: set[Reason] = set()

    def give(self, reason: Reason, what: str) -> None:
        """Warn that `what`, a module with its verb, runs as before, unless the reason was given already."""
        if reason in self._given:
            return
        self._given.add(reason)
        warn_user(
            f"{what}; it runs PyTorch's own convolution ({reason.value}). This reason is given once for the "
            "whole model.",
            UntunedWarning,
        )


def _look_for_transforms() -> bool:
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


_is_transformed: Callable[[], bool] = torch.compiler.assume_constant_result(_look_for_transforms)
"""Whether derivatives are taken within what is compiled; a graph is used only under the same transforms."""


def _look_for_export() -> bool:
    return torch.compiler.is_exporting()


_is_exported: Callable[[], bool] = torch.compiler.assume_constant_result(_look_for_export)
"""Whether the graph is exported; asked for itself, Dynamo of torch 2.11 takes that for true everywhere."""


def _look_for_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


_has_autocast: Callable[[str], bool] = torch.compiler.assume_constant_result(_look_for_autocast)
"""Whether a kind of device has autocast; Dynamo of torch 2.11 does not look into that."""


class PatchedForward:
    """What a patched module has in the place of its method that computes the convolution."""

    is_mucudnn_patch = True

    def __init__(
        self,
        module: nn.Module,
        kind: Kind,
        path: str,
        variants: tuple[Variant, ...],
        memory: Memory,
        notice: Notice,
        home: Hashable,
        learn: Learn | None = None,
    ) -> None:
        """Bind to one module.

        Args:
            module: the convolution.
            kind: its class.
            path: its path, for messages.
            variants: the shapes that it was tuned for.
            memory: of the plan.
            notice: shared by all modules of the model.
            home: the backend's flags under which the plan's environment is that of this process.
            learn: tunes shapes that are not known; without it they run PyTorch's own convolution.
        """
        self._learn = learn
        self._notice = notice
        self._module = module
        self._kind = kind
        self._path = path
        self._variants = variants
        self._planned = len(variants)
        self._memory = memory
        self._home = home
        self._forget()

    def _forget(self) -> None:
        self._name = announce(self)
        self._router = Router((self._memory.environment.backend,), self._module)
        self._owners: dict[tuple[int, ConvOp], Owner] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Keep what was decided; what was built from it is built again."""
        built = ("_router", "_owners", "_name")
        return {name: value for name, value in self.__dict__.items() if name not in built}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._home = _NOWHERE  # perhaps another machine
        self._forget()

    @property
    def learnt(self) -> Sequence[Variant]:
        """What was tuned since the module was patched."""
        return self._variants[self._planned :]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the module's convolution, divided where the shapes were tuned."""
        call = call_of(self._kind, self._module, args, kwargs)
        if torch.compiler.is_compiling():
            result = self._compiled(call)
        elif is_traced(call.image, call.weight):
            result = None
        else:
            result = self._router.served(call, self._convolution)
        if result is not None:
            return result
        if not self._kind.is_transposed:
            return self._kind.own(self._module, *args, **kwargs)
        # The module's own method would read its weight again, which may be one that is computed.
        image, arguments = padded(self._module, call)
        return own_call(image, call.weight, call.bias, arguments)

    def _compiled(self, call: Call) -> Tensor | None:
        """Return the operator that runs the call, or None where a graph is to hold PyTorch's own.

        Graphs that are exported leave this process, in which the operator finds what is divided.
        """
        if _is_exported() or call.image.dim() != call.weight.dim() or _is_transformed():
            return None
        kind = call.image.device.type
        if _has_autocast(kind) and torch.is_autocast_enabled(kind):  # which knows nothing of the operator
            cast = as_autocast(call.image, call.weight, call.bias, torch.get_autocast_dtype(kind))
            call = Call(*cast, call.settings)
        image, arguments = padded(self._module, call)
        return convolve(image, call.weight, call.bias, arguments, self._name)

    def compute(self, image: Tensor, weight: Tensor, bias: Tensor | None, arguments: ConvArguments) -> Tensor:
        """Return the convolution for a compiled graph, outside of autograd."""
        result = self._router.served(Call.of(image, weight, bias, arguments), self._convolution)
        return own_call(image, weight, bias, arguments) if result is None else result

    def gradients(
        self,
        gradient: Tensor,
        image: Tensor,
        weight: Tensor,
        arguments: ConvArguments,
        needed: tuple[bool, bool, bool],
        has_bias: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients for a compiled graph, each None unless it is `needed`."""
        bias = gradient.new_empty(gradient.shape[1]) if has_bias else None
        with without_autocast(image.device, autocast_dtype(image.device)):  # of who calls backward in it
            route = self._router.found(Call.of(image, weight, bias, arguments), self._convolution)
            if route is None:
                return own_gradients(gradient, image, weight, arguments, needed)
            order = route.convolution.order
            image = image.contiguous(memory_format=order)
            return route.convolution.gradients(gradient, image, weight, needed)

    def _convolution(self, backend: Backend, problem: ConvProblem) -> DividedConvolution | None:
        """Return what computes a forward pass, or None for PyTorch's own, with a warning."""
        name = f"The module {self._path!r}" if self._path else "The model itself"
        differences = self._differences(backend)
        if differences:
            why = f"its plan was made in another environment: {'; '.join(differences)}"
            self._notice.give(Reason.ELSEWHERE, f"{name} cannot be divided here ({why})")
            return None
        served = self._variants_for(problem)
        try:
            if not served and self._has_learnt(backend, problem):
                served = self._variants_for(problem)
        except UnmeasuredError as error:
            warn_user(f"{name} stays as it is for {problem}: {error}", UntunedWarning)
            return None
        if not served:
            self._notice.give(*self._why_unserved(name, problem))
            return None
        _, number = min(served)
        try:
            return self._divided(backend, number, self._variants[number], problem)
        except BackendError as error:
            self._notice.give(Reason.PARTS, f"{name} cannot be divided here ({error})")
            return None

    def _why_unserved(self, name: str, problem: ConvProblem) -> tuple[Reason, str]:
        """Return why no shape serves a problem, in words too."""
        batches = [each.problem.batch for each in self._variants if _is_like(each.problem, problem)]
        if batches:
            sizes = f"batches of {max(batches)}, but meets one of {problem.batch}"
            return Reason.LARGER_BATCH, f"{name} was tuned for {sizes}: {problem}"
        tuned = "; ".join(str(variant.problem) for variant in self._variants)
        return Reason.OTHER_SHAPE, f"{name} was tuned for {tuned}, but meets {problem}"

    def _variants_for(self, problem: ConvProblem) -> list[tuple[int, int]]:
        """Return the batches and places of the shapes that serve such a problem."""
        return [
            (variant.problem.batch, number)
            for number, variant in enumerate(self._variants)
            if _is_like(variant.problem, problem) and problem.batch <= variant.problem.batch
        ]

    def _has_learnt(self, backend: Backend, problem: ConvProblem) -> bool:
        """Tune a shape that is not known, if that may be done, and remember it."""
        if self._learn is None:
            return False
        with _learning:  # the shapes of a module are numbered; who waited may find what it wants
            if not self._variants_for(problem):
                self._learn_now(self._learn, backend, problem)
        return True

    def _learn_now(self, learn: Learn, backend: Backend, problem: ConvProblem) -> None:
        ops = tuple(op for op in ConvOp if any(op in variant.assignments for variant in self._variants))
        sites = [each.site for variant in self._variants for each in variant.assignments.values()]
        number = 1 + max(site.variant for site in sites)
        plan = learn(backend.device, self._path, number, problem, ops)
        assignments = {assigned.site.op: assigned for assigned in plan.assignments}
        self._variants = (*self._variants, Variant(problem, assignments, plan.calls, plan.untouched))

    def _differences(self, backend: Backend) -> list[str]:
        """Return how the plan's environment differs from this process's, if model or flags have changed."""
        flags = backend.flags()
        if flags == self._home:
            return []
        differences = self._memory.environment.differences(backend.environment())
        if not differences:
            self._home = flags
        return differences

    def _divided(
        self, backend: Backend, number: int, variant: Variant, problem: ConvProblem
    ) -> DividedConvolution:
        owners = {}
        if self._memory.is_sharing:
            owners = {op: self._owners.setdefault((number, op), Owner()) for op in variant.assignments}
        return divided(backend, problem, variant.assignments, self._memory, owners)


def _is_like(tuned: ConvProblem, problem: ConvProblem) -> bool:
    """Return whether two problems differ in their batches at most."""
    return tuned.with_batch(problem.batch) == problem
