"""What a patched module calls: for each shape that it meets the division that serves it, or PyTorch's own."""

import dataclasses
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mucudnn.backends import Backend, backend_name
from mucudnn.calls import ConvArguments, is_traced, own_call, watcher
from mucudnn.compiling import GraphServer, in_graph
from mucudnn.errors import BackendError, UnmeasuredError, UntunedWarning, warn_user
from mucudnn.functional import DividedConvolution
from mucudnn.modules import Call, Kind, call_of, padded
from mucudnn.notices import Notice, Reason
from mucudnn.operators import announce
from mucudnn.passes import is_examining
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
        self._router = Router((self._memory.environment.backend,), self._module)
        self._name = announce(self)
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
            result = in_graph(call, self._module, self._name)
        elif is_traced(call.image, call.weight):
            result = None
            self._tell_watcher(call)
        else:
            result = self._router.served(call, self._convolution)
            if result is None:
                self._tell_device(call.image.device)
        if result is not None:
            return result
        if not self._kind.is_transposed:
            return self._kind.own(self._module, *args, **kwargs)
        # The module's own method would read its weight again, which may be one that is computed.
        image, arguments = padded(self._module, call)
        return own_call(image, call.weight, call.bias, arguments)

    @property
    def _whose(self) -> str:
        return f"The module {self._path!r}" if self._path else "The model itself"

    def _tell_watcher(self, call: Call) -> None:
        """Warn if PyTorch's own computes a call only because somebody watches."""
        found = None if is_examining() else watcher(call.image, call.weight)
        if found is not None:
            reason, words = found
            self._notice.give(reason, f"{self._whose} is called {words}")

    def _tell_device(self, device: torch.device) -> None:
        """Warn if PyTorch's own computes a call because it came to another kind of device."""
        tuned = self._memory.environment.backend
        if device.type != "meta" and backend_name(device) != tuned:
            self._notice.give(
                Reason.MOVED, f"{self._whose} was tuned for the backend {tuned!r}, but computes on {device}"
            )

    def compute(self, image: Tensor, weight: Tensor, bias: Tensor | None, arguments: ConvArguments) -> Tensor:
        """Return the convolution for a compiled graph, outside of autograd."""
        self._tell_device(image.device)
        return self._in_graph.compute(image, weight, bias, arguments)

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
        return self._in_graph.gradients(gradient, image, weight, arguments, needed, has_bias)

    @property
    def _in_graph(self) -> GraphServer:
        """Made for each call: kept here, it would keep this one from going when its model is restored."""
        return GraphServer(self._router, self._convolution)

    def _convolution(self, backend: Backend, problem: ConvProblem) -> DividedConvolution | None:
        """Return what computes a forward pass, or None for PyTorch's own, with a warning."""
        name = self._whose
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
