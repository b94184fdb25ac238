"""What a patched module calls: for each shape that it meets the division that serves it, or PyTorch's own."""

import dataclasses
import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mucudnn.backends import Backend, backend_name, backend_of
from mucudnn.calls import (
    ConvArguments,
    as_autocast,
    autocast_dtype,
    has_its_bias,
    is_traced,
    obstacle,
    own_call,
    own_gradients,
    problem_of,
    problems_of,
    without_autocast,
)
from mucudnn.errors import BackendError, ProblemError, UntunedWarning
from mucudnn.functional import DividedConvolution
from mucudnn.modules import Call, Kind, call_of, padded
from mucudnn.operators import announce, convolve
from mucudnn.plan import Assignment, Plan
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.routing import Memory, division_for, is_own, remember
from mucudnn.workspace import Owner


@dataclasses.dataclass(frozen=True)
class Variant:
    """One shape that a module was tuned for.

    Attributes:
        problem: of the forward pass, for the whole mini-batch.
        assignments: what each op runs.
    """

    problem: ConvProblem
    assignments: Mapping[ConvOp, Assignment]


Learn = Callable[[torch.device, str, int, ConvProblem, tuple[ConvOp, ...]], Plan | None]
"""Tunes a shape that a module meets; see `mucudnn.learning`."""

_NOWHERE = object()
"""Flags that no backend has."""


class Notice:
    """Whether a model has said that it met what it was not tuned for; its modules share one."""

    def __init__(self) -> None:
        self.is_given = False


class _Route(NamedTuple):
    """What serves calls of one shape.

    Attributes:
        convolution: what runs.
        is_padded: whether the image is padded before.
        dtype: what autocast casts the tensors to; None where there is no autocast.
    """

    convolution: DividedConvolution
    is_padded: bool
    dtype: torch.dtype | None

    def run(self, module: nn.Module, call: Call) -> Tensor:
        """Return the convolution of the call."""
        image, weight, bias, settings = call
        if self.dtype is not None:
            image, weight, bias = as_autocast(image, weight, bias, self.dtype)
        with without_autocast(image.device, self.dtype):
            if self.is_padded:
                image, _ = padded(module, Call(image, weight, bias, settings))
            return self.convolution(image, weight, bias)


def _look_for_transforms() -> bool:
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


_is_transformed: Callable[[], bool] = torch.compiler.assume_constant_result(_look_for_transforms)
"""Whether derivatives are taken within what is compiled; a graph is used only under the same transforms."""


def _call(image: Tensor, weight: Tensor, bias: Tensor | None, arguments: ConvArguments) -> Call:
    """Return a call with explicit padding."""
    stride, padding, dilation = arguments.stride, arguments.padding, arguments.dilation
    more = () if arguments.output_padding is None else (arguments.output_padding,)
    return Call(image, weight, bias, (stride, padding, dilation, arguments.groups, "zeros", *more))


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
        self._memory = memory
        self._home = home
        self._is_own = learn is None and all(
            is_own(assigned.division, memory)
            for variant in variants
            for assigned in variant.assignments.values()
        )
        self._forget()

    def _forget(self) -> None:
        self._name = announce(self)
        self._routes: dict[object, _Route | None] = {}
        self._owners: dict[tuple[int, ConvOp], Owner] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Keep what was decided; what was built from it is built again."""
        built = ("_routes", "_owners", "_name")
        return {name: value for name, value in self.__dict__.items() if name not in built}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._home = _NOWHERE  # perhaps another machine
        self._forget()

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the module's convolution, divided where the shapes were tuned."""
        call = call_of(self._kind, self._module, args, kwargs)
        if torch.compiler.is_compiling():
            result = self._compiled(call)
        else:
            result = None if is_traced(call.image, call.weight) else self._served(call)
        if result is not None:
            return result
        if not self._kind.is_transposed:
            return self._kind.own(self._module, *args, **kwargs)
        image, arguments = padded(
            self._module, call
        )  # the weight may be one that is computed when it is read
        return own_call(image, call.weight, call.bias, arguments)

    def _compiled(self, call: Call) -> Tensor | None:
        """Return the operator that runs the call, or None where a graph is to hold PyTorch's own.

        Graphs that are exported leave this process, in which the operator finds what is divided.
        """
        if torch.compiler.is_exporting() or autocast_dtype(call.image.device) is not None:
            return None
        if call.image.dim() != call.weight.dim() or self._is_own or _is_transformed():
            return None
        image, arguments = padded(self._module, call)
        return convolve(image, call.weight, call.bias, arguments, self._name)

    def compute(self, image: Tensor, weight: Tensor, bias: Tensor | None, arguments: ConvArguments) -> Tensor:
        """Return the convolution for a compiled graph, outside of autograd."""
        result = self._served(_call(image, weight, bias, arguments))
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
        route = self._found(_call(image, weight, bias, arguments))
        if route is None:
            return own_gradients(gradient, image, weight, arguments, needed)
        order = route.convolution.order
        return route.convolution.gradients(gradient, image.contiguous(memory_format=order), weight, needed)

    def _served(self, call: Call) -> Tensor | None:
        """Return the convolution, or None where PyTorch's own serves the call."""
        if call.image.dim() == call.weight.dim() - 1:
            result = self._served(call._replace(image=call.image.unsqueeze(0)))
            return None if result is None else result.squeeze(0)
        route = self._found(call)
        return None if route is None else route.run(self._module, call)

    def _found(self, call: Call) -> _Route | None:
        """Return what runs the call, or None for PyTorch's own; that is worked out once for each shape."""
        image, weight, bias, settings = call
        device = image.device
        if image.dim() != weight.dim() or image.layout is not torch.strided:
            return None
        if weight.layout is not torch.strided or backend_name(device) != self._memory.environment.backend:
            return None
        dtype = autocast_dtype(device)
        flags = backend_of(self._memory.own, device).flags()
        key = (
            image.shape, image.stride(), image.dtype, device, weight.shape, weight.stride(), weight.dtype,
            weight.device, None if bias is None else (bias.shape, bias.dtype, bias.device), dtype, flags,
            settings,
        )  # fmt: skip
        try:
            return self._routes[key]
        except KeyError:
            route = self._route(call, dtype, flags)
            remember(self._routes, key, route)
            return route

    def _route(self, call: Call, dtype: torch.dtype | None, flags: Hashable) -> _Route | None:
        """Return what runs such calls, or None for PyTorch's own, which is said once."""
        image, weight, bias, settings = call
        if dtype is not None:
            image, weight, bias = as_autocast(image, weight, bias, dtype)
        if obstacle(image, weight, bias) is not None:
            return None
        plain = Call(image, weight, bias, settings)
        image, arguments = padded(self._module, plain)
        try:
            problem = problem_of(image, weight, bias is not None, arguments)
        except ProblemError:
            return None  # PyTorch's own says what is wrong, if anything is
        if not has_its_bias(problem, bias):
            return None
        backend = backend_of(self._memory.own, image.device)
        convolution = self._convolution(backend, flags, problem)
        if convolution is None or convolution.is_own:
            return None
        return _Route(convolution, image is not plain.image, dtype)

    def _convolution(
        self, backend: Backend, flags: Hashable, problem: ConvProblem
    ) -> DividedConvolution | None:
        """Return what computes a forward pass, or None for PyTorch's own, which is said once."""
        served = self._variants_for(problem)
        if not served and self._has_learnt(backend, problem):
            served = self._variants_for(problem)
        if not served:
            tuned = "; ".join(str(variant.problem) for variant in self._variants)
            self._warn_once(f"was tuned for {tuned}, but meets {problem}")
            return None
        try:
            self._check_home(backend, flags)
            _, number = min(served)
            return self._divided(backend, number, self._variants[number], problem)
        except BackendError as error:
            self._warn_once(f"cannot be divided here ({error})")
            return None

    def _variants_for(self, problem: ConvProblem) -> list[tuple[int, int]]:
        """Return the batches and places of the shapes that serve such a problem."""
        return [
            (variant.problem.batch, number)
            for number, variant in enumerate(self._variants)
            if variant.problem.with_batch(problem.batch) == problem and problem.batch <= variant.problem.batch
        ]

    def _has_learnt(self, backend: Backend, problem: ConvProblem) -> bool:
        """Tune a shape that is not known, if that may be done, and remember it."""
        if self._learn is None:
            return False
        ops = tuple(op for op in ConvOp if any(op in variant.assignments for variant in self._variants))
        plan = self._learn(backend.device, self._path, len(self._variants), problem, ops)
        if plan is None:
            return False
        assignments = {assigned.site.op: assigned for assigned in plan.assignments}
        self._variants = (*self._variants, Variant(problem, assignments))
        return True

    def _check_home(self, backend: Backend, flags: Hashable) -> None:
        """Compare the plan's environment with this process's, if model or flags are not as they were.

        Raises:
            BackendError: they differ.
        """
        if flags == self._home:
            return
        differences = self._memory.environment.differences(backend.environment())
        if differences:
            raise BackendError(f"Its plan was made in another environment: {'; '.join(differences)}.")
        self._home = flags

    def _warn_once(self, what: str) -> None:
        if self._notice.is_given:
            return
        self._notice.is_given = True
        warnings.warn(
            f"{self._path or 'The model itself'} {what}; it runs PyTorch's own convolution. "
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
        capacity_bytes = self._memory.capacity_bytes
        divided = DividedConvolution(backend, problem, divisions, owners, limits, capacity_bytes)
        problems = problems_of(problem)
        for op, assigned in variant.assignments.items():
            self._check_share(problems[op], divided.buffer_bytes[op], assigned)
        return divided

    def _check_share(self, problem: ConvProblem, needed_bytes: int, assigned: Assignment) -> None:
        """Compare what a division needs with what its site may take: it may have parts never measured.

        Raises:
            BackendError: it needs more.
        """
        division = assigned.division
        share_bytes = division.workspace_bytes if self._memory.is_sharing else self._memory.limit_bytes
        if needed_bytes > share_bytes:
            raise BackendError(f"{problem} needs {needed_bytes} bytes in parts, and may take {share_bytes}.")
