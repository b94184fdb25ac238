"""What a patched module calls: for each shape that it meets the division that serves it, or PyTorch's own."""

import dataclasses
import warnings
from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor, nn

from mucudnn.backends import Backend, backend_name, backend_of
from mucudnn.errors import BackendError, ProblemError, UntunedWarning
from mucudnn.extraction import convolution_of
from mucudnn.functional import DividedConvolution, is_traced, obstacle, problem_of
from mucudnn.plan import Assignment, Division, Mode, Plan
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.profile import Candidate, Environment
from mucudnn.solvers import ReuseTable
from mucudnn.workspace import Owner

_MOST_ROUTES = 256
"""Shapes of which a module remembers what runs them; of more, it works that out again and again."""


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
        environment: for which the plan was made.
        own: id of PyTorch's own convolution, which takes its workspace outside of the buffer.
        is_sharing: whether each site owns a buffer, rather than all one in common.
        limit_bytes: of the plan.
        buffer_bytes: what the common buffer comes to.
    """

    environment: Environment
    own: str
    is_sharing: bool
    limit_bytes: int
    buffer_bytes: int

    @classmethod
    def of(cls, plan: Plan, own: str) -> "Memory":
        """Return what `plan` says of memory."""
        buffers = (_buffer_bytes(assigned.division, own) for assigned in plan.assignments)
        return cls(
            plan.environment, own, plan.mode is Mode.SHARING, plan.limit_bytes, max(buffers, default=0)
        )

    def bound(self, division: Division) -> int | None:
        """Return what buffer and PyTorch's own workspace may take together, or None if they always fit."""
        limit_bytes, buffer_bytes = self.limit_bytes, self.buffer_bytes
        if self.is_sharing:
            limit_bytes, buffer_bytes = division.workspace_bytes, _buffer_bytes(division, self.own)
        elsewhere = [part.workspace_bytes for part in division.parts]  # at most: how much, the runner knows
        return limit_bytes if max(elsewhere, default=0) + buffer_bytes > limit_bytes else None


def _buffer_bytes(division: Division, own: str) -> int:
    return max((part.workspace_bytes for part in division.parts if part.algorithm != own), default=0)


_NOWHERE = object()
"""Flags that no backend has."""


class Notice:
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
        notice: Notice,
        home: Hashable,
    ) -> None:
        """Bind to one module.

        Args:
            conv: the module.
            path: its path, for messages.
            variants: the shapes that it was tuned for.
            memory: of the plan.
            notice: shared by all modules of the model.
            home: the backend's flags under which the plan's environment is that of this process.
        """
        self._notice = notice
        self._conv = conv
        self._path = path
        self._variants = variants
        self._memory = memory
        self._home = home
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
        self._home = _NOWHERE  # perhaps another machine
        self._forget()

    def __call__(self, image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the module's convolution, divided where the shapes were tuned."""
        if is_traced(image, weight):
            return self._own(image, weight, bias)
        is_served = backend_name(image.device) == self._memory.environment.backend
        if not is_served or obstacle(image, weight, bias) is not None:
            return self._own(image, weight, bias)
        if image.dim() == 3:
            batch: Tensor = self(image.unsqueeze(0), weight, bias)
            return batch.squeeze(0)
        if image.dim() != 4:
            return self._own(image, weight, bias)
        tensors = (image.shape, image.stride(), image.dtype, weight.shape, weight.stride(), bias is None)
        backend = backend_of(self._memory.own, image.device)
        flags = backend.flags()
        key: tuple[object, ...] = (*tensors, image.device, flags, *_settings(self._conv))
        if key not in self._routes:
            if len(self._routes) == _MOST_ROUTES:
                del self._routes[next(iter(self._routes))]
            self._routes[key] = self._route(backend, flags, image, weight, bias)
        route = self._routes[key]
        if route is None:
            return self._own(image, weight, bias)
        padded, _ = convolution_of(self._conv, image, weight)
        return route(padded, weight, bias)

    def _own(self, image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = nn.Conv2d._conv_forward(self._conv, image, weight, bias)
        return result

    def _route(
        self, backend: Backend, flags: Hashable, image: Tensor, weight: Tensor, bias: Tensor | None
    ) -> DividedConvolution | None:
        """Return what runs images of this shape, or None for PyTorch's own, which is said once."""
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
        capacity_bytes = 0 if self._memory.is_sharing else self._memory.buffer_bytes
        divided = DividedConvolution(backend, problem, divisions, owners, limits, capacity_bytes)
        for op, assigned in variant.assignments.items():
            self._check_share(problem.with_op(op), divided.buffer_bytes[op], assigned)
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
