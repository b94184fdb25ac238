"""Dividing every convolution that is called in a block of code, a module's or not: tuned when first seen."""

import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mucudnn.backends import Backend, backend_for, backend_name
from mucudnn.calls import (
    RANKS,
    ConvArguments,
    Numbers,
    as_autocast,
    autocast_dtype,
    explicit_padding,
    has_its_bias,
    is_traced,
    numbers,
    obstacle,
    op_of,
    problem_of,
    problems_of,
    without_autocast,
)
from mucudnn.choices import Mode
from mucudnn.errors import BackendError, OptionError, PlanError, ProblemError
from mucudnn.extraction import wanted_ops
from mucudnn.functional import DividedConvolution
from mucudnn.learning import Learner
from mucudnn.options import ProgressOption, Settings, StoreOption
from mucudnn.plan import Assignment, Plan
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.routing import Memory, division_for, remember


class _Call(NamedTuple):
    """A call of one of PyTorch's functions; see `own_call`."""

    image: Tensor
    weight: Tensor
    bias: Tensor | None
    arguments: ConvArguments


def _plain(
    input: Tensor,  # noqa: A002  # PyTorch's name
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers | str = 0,
    dilation: Numbers = 1,
    groups: int = 1,
) -> _Call:
    return _Call(input, weight, bias, ConvArguments.of(weight.dim() - 2, stride, padding, dilation, groups))


def _transposed(
    input: Tensor,  # noqa: A002  # PyTorch's name
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers = 0,
    output_padding: Numbers = 0,
    groups: int = 1,
    dilation: Numbers = 1,
) -> _Call:
    rank = weight.dim() - 2
    plain = ConvArguments.of(rank, stride, padding, dilation, groups)
    more = numbers(output_padding, rank)
    return _Call(
        input, weight, bias, ConvArguments(plain.stride, plain.padding, plain.dilation, groups, more)
    )


_READERS: dict[object, Callable[..., _Call]] = {
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), _plain),
    **dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), _transposed),
}
"""PyTorch's functions, under which all its modules and `torch.nn.functional` call convolutions."""


class _Route(NamedTuple):
    """What serves calls of one shape: see `mucudnn.patched`."""

    convolution: DividedConvolution
    dtype: torch.dtype | None


class _ThisThread(threading.local):
    """Whether this thread tunes or computes for an `Autotune`, so that no other one interferes."""

    is_busy = False


_this_thread = _ThisThread()
_UNSEEN = object()


class Autotune(TorchFunctionMode):
    """Tunes the convolutions that are called while it is entered, and divides them; see `autotune`.

    It may be entered again, within itself too, and by several threads; what it has learnt stays.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        self._learn = Learner(settings)
        self._routes: dict[Hashable, _Route | None] = {}
        self._known: dict[Hashable, list[Assignment]] = {}
        self._plans: list[Plan] = []
        self._tuning = threading.RLock()

    @property
    def plan(self) -> Plan:
        """What was tuned so far, each function and shape a site of its own.

        Raises:
            PlanError: nothing was, or not all in one environment.
        """
        if not self._plans:
            raise PlanError("A convolution must have been called and tuned, but none was.")
        first = self._plans[0]
        if any(first.environment.differences(plan.environment) for plan in self._plans):
            raise PlanError("A plan must be of one environment, but convolutions were tuned in several.")
        assignments = tuple(each for plan in self._plans for each in plan.assignments)
        return Plan(
            first.mode, first.policy, first.limit_bytes, first.environment, assignments, (), first.version
        )

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute `func`, divided if it is a convolution."""
        given = kwargs or {}
        read = _READERS.get(func)
        if read is None or _this_thread.is_busy:
            return func(*args, **given)
        try:
            call = read(*args, **given)
        except (TypeError, AttributeError):
            return func(*args, **given)  # it says what is wrong
        _this_thread.is_busy = True
        try:
            result = self._served(func, call)
            return func(*args, **given) if result is None else result
        finally:
            _this_thread.is_busy = False

    def _served(self, func: Callable[..., Any], call: _Call) -> Tensor | None:
        """Return the convolution, or None where PyTorch's own serves the call."""
        image, weight, bias, arguments = call
        is_strided = image.layout is torch.strided and weight.layout is torch.strided
        if is_traced(image, weight) or weight.dim() - 2 not in RANKS or not is_strided:
            return None
        served = backend_name(image.device)
        if served is None or self._settings.backend not in ("auto", served):
            return None
        if image.dim() == weight.dim() - 1:
            result = self._served(func, call._replace(image=image.unsqueeze(0)))
            return None if result is None else result.squeeze(0)
        if image.dim() != weight.dim():
            return None
        is_recorded = torch.is_grad_enabled()
        needs = (is_recorded and image.requires_grad, is_recorded and weight.requires_grad)
        dtype = autocast_dtype(image.device)
        backend = backend_for(served, image.device)
        key = (
            image.shape, image.stride(), image.dtype, image.device, weight.shape, weight.stride(),
            weight.dtype, weight.device, dtype,
            None if bias is None else (bias.shape, bias.dtype, bias.device),
            backend.flags(), needs, arguments,
        )  # fmt: skip
        route = self._routes.get(key, _UNSEEN)
        if route is _UNSEEN:
            with self._tuning:
                route = self._route(backend, func, call, dtype, needs)
                remember(self._routes, key, route)
        return None if route is None else _run(route, call)  # type: ignore[arg-type]  # it is seen now

    def _route(
        self,
        backend: Backend,
        func: Callable[..., Any],
        call: _Call,
        dtype: torch.dtype | None,
        needs: tuple[bool, bool],
    ) -> _Route | None:
        """Return what runs such calls, tuned if nothing like it was, or None for PyTorch's own."""
        image, weight, bias, arguments = call
        if dtype is not None:
            image, weight, bias = as_autocast(image, weight, bias, dtype)
        if obstacle(image, weight, bias) is not None:
            return None
        try:
            padded, arguments = explicit_padding(image, weight.shape[2:], arguments)
            problem = problem_of(padded, weight, bias is not None, arguments)
        except (OptionError, ProblemError):
            return None  # PyTorch's own says what is wrong, if anything is
        if not has_its_bias(problem, bias):
            return None
        roles = {ConvOp.FPROP: True, ConvOp.DGRAD: needs[0], ConvOp.WGRAD: needs[1]}
        wanted = wanted_ops(self._settings.ops, is_training=True)
        ops = [
            op_of(role, is_transposed=arguments.is_transposed)
            for role, is_needed in roles.items()
            if is_needed and role in wanted
        ]
        found = {op: self._found(_place(backend, problems_of(problem)[op]), problem.batch) for op in ops}
        missing = tuple(op for op, assigned in found.items() if assigned is None)
        if missing:
            tuned = self._tuned(backend, func, problem, missing)
            if tuned is None:
                return None
            found |= tuned
        memory = self._memory(backend)
        divisions = {
            op: division_for(assigned, problem.batch, backend.own)
            for op, assigned in found.items()
            if assigned is not None
        }
        bounds = {op: memory.bound(division) for op, division in divisions.items()}
        limits = {op: bound for op, bound in bounds.items() if bound is not None}
        try:
            convolution = DividedConvolution(backend, problem, divisions, limits=limits)
        except BackendError:
            return None  # a part of another size than the tuned ones is not computed by the algorithm
        fits = max(convolution.buffer_bytes.values()) <= memory.limit_bytes
        return _Route(convolution, dtype) if fits and not convolution.is_own else None

    def _found(self, place: Hashable, batch: int) -> Assignment | None:
        """Return what was tuned for such a problem there, of the least batch that is no smaller."""
        able = (each for each in self._known.get(place, ()) if each.problem.batch >= batch)
        return min(able, key=lambda each: each.problem.batch, default=None)

    def _tuned(
        self, backend: Backend, func: Callable[..., Any], problem: ConvProblem, ops: tuple[ConvOp, ...]
    ) -> dict[ConvOp, Assignment] | None:
        """Tune some ops of a convolution and remember them; None where nothing may be tuned now."""
        plan = self._learn(backend.device, func.__name__, len(self._plans), problem, ops)
        if plan is None:
            return None
        self._plans.append(plan)
        for assigned in plan.assignments:
            self._known.setdefault(_place(backend, assigned.problem), []).append(assigned)
        return {assigned.site.op: assigned for assigned in plan.assignments}

    def _memory(self, backend: Backend) -> Memory:
        """Return how memory is taken: what takes some beside the buffer must reckon with one of the limit."""
        limit_bytes = self._settings.limit_bytes
        return Memory(
            environment=backend.environment(),
            own=backend.own,
            is_sharing=False,
            limit_bytes=limit_bytes,
            buffer_bytes=limit_bytes,
            capacity_bytes=0,
        )


def _place(backend: Backend, problem: ConvProblem) -> Hashable:
    """Return what a problem of any batch is known by: times hold for one device and its flags."""
    return (backend.name, backend.device, backend.flags(), problem.with_batch(0))


def _run(route: _Route, call: _Call) -> Tensor:
    image, weight, bias, arguments = call
    if route.dtype is not None:
        image, weight, bias = as_autocast(image, weight, bias, route.dtype)
    with without_autocast(image.device, route.dtype):
        image, _ = explicit_padding(image, weight.shape[2:], arguments)
        return route.convolution(image, weight, bias)


def autotune(
    workspace_limit: int | str,
    *,
    mode: str = "reuse",
    policy: str = "power_of_two",
    search: str = "heuristic",
    ops: str | Collection[str] = "auto",
    backend: str = "auto",
    store: StoreOption = None,
    progress: ProgressOption = None,
) -> Autotune:
    """Return a context in which every convolution of PyTorch is tuned when it is first seen, and divided.

        with mucudnn.autotune("64MiB"):
            y = torch.nn.functional.conv2d(x, w)

    It need not be a module's. What was tuned serves every smaller batch of the same shapes without measuring.
    Outside of the context nothing is changed; of contexts within one another the innermost counts. Threads
    enter it for themselves, and ranks of a distributed run tune for themselves (`optimize` has one plan).

    Args:
        workspace_limit: an int of bytes, or a string with a unit ("64MiB"), for each convolution.
        mode: "reuse"; whose parts of a common total is known only when all convolutions are.
        policy: see `optimize`, as for all that follows.
        search: which algorithms are tried.
        ops: "auto" tunes those that a call needs: the forward pass, and the gradients that are recorded.
        backend: "auto", or a backend's name.
        store: where profiles are kept.
        progress: who is told.

    Raises:
        SizeError, OptionError: an argument cannot be read, or is none of the choices.
        InfeasibleError: (from a call inside) nothing fits the limit.
    """
    settings = Settings.of(
        workspace_limit, mode=mode, policy=policy, search=search, ops=ops, backend=backend, store=store,
        progress=progress,
    )  # fmt: skip
    if settings.mode is not Mode.REUSE:
        raise OptionError(
            "autotune must have the mode 'reuse', since it meets convolutions one by one, "
            f"but got {mode!r}; optimize shares a total among all."
        )
    if settings.recording is not None:
        raise OptionError(f"autotune must measure where the code runs, but got {backend!r}, a recording.")
    return Autotune(settings)
