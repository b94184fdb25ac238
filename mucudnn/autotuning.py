"""Dividing every convolution that is called in a block of code, a module's or not: tuned when first seen."""

import contextlib
import dataclasses
import functools
import os
import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from mucudnn.backends import BACKENDS, Backend
from mucudnn.choices import Mode
from mucudnn.convolutions.functions import ConvolutionMode
from mucudnn.convolutions.modules import Call
from mucudnn.convolutions.notices import Notice, Reason
from mucudnn.convolutions.surroundings import is_traced, overriding_mode, watcher
from mucudnn.errors import (
    BackendError,
    OptionError,
    PlanError,
    UnmeasuredError,
    UntunedWarning,
    UnweighableError,
    warn_user,
)
from mucudnn.examining.extraction import wanted_ops
from mucudnn.examining.passes import is_examining
from mucudnn.functional import DividedConvolution
from mucudnn.locks import ForkSafeLock
from mucudnn.objects import late_function, name_of
from mucudnn.patching.compiling import GraphServer, in_graph
from mucudnn.patching.fitting import Memory, divided
from mucudnn.patching.routing import NotNowError, Router
from mucudnn.plan import Assignment, Plan
from mucudnn.problem import ConvOp, ConvProblem, op_of, problems_of
from mucudnn.progress import ProgressOption
from mucudnn.store import StoreOption
from mucudnn.tuning.learning import Learner
from mucudnn.tuning.options import Settings

_Function = TypeVar("_Function", bound=Callable[..., Any])

_NEEDS = ((False, False), (False, True), (True, False), (True, True))
"""Which gradients a call may need: of the image, and of the filter."""


class _ThisThread(threading.local):
    """How deep this thread is in what it computes for an `Autotune`, in which none interferes."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


_this_thread = _ThisThread()


class Autotune(contextlib.ContextDecorator, ConvolutionMode):
    """Tunes the convolutions that are called while it is entered, and divides them; see `autotune`.

    It may be entered again, within itself too, and by several threads; what it has learnt stays. As a
    decorator it is entered for every call of the function. Copies and pickles begin anew.
    """

    _within = _this_thread

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        self._learn = Learner(settings)
        served = BACKENDS if settings.backend == "auto" else (settings.backend,)
        self._router = Router(served, None)
        self._known: dict[Hashable, list[Assignment]] = {}
        self._plans: list[Plan] = []
        self._notice = Notice("for this autotune")
        self._tuning = ForkSafeLock()
        self._process = os.getpid()
        self._servers = {needs: self._server(needs) for needs in _NEEDS}
        self._names = {needs: server.name for needs, server in self._servers.items()}

    def __reduce__(self) -> tuple[type["Autotune"], tuple[Settings]]:
        """Have copies and pickles know the same settings; they have learnt nothing and are not entered."""
        return type(self), (self._settings,)

    def __call__(self, function: _Function) -> _Function:
        """Return a function that computes in this context.

        Raises:
            OptionError: it computes when the call has returned, and the context is left: in silence it would
                do so as before.
        """
        is_class = isinstance(function, type)
        late = f"the class {name_of(function)!r}" if is_class else late_function(function)
        if late is not None:
            raise OptionError(
                f"What autotune decorates must compute while it is called, but got {late}; "
                "enter the context where it computes, and leave it before it waits."
            )
        return super().__call__(function)

    def _server(self, needs: tuple[bool, bool]) -> GraphServer:
        """Return who serves graphs that were compiled in this context.

        It does not keep the context alive, which keeps it: both go at once. Its own convolutions pass by
        what is entered, and gradients that were not tuned with the forward pass never are.
        """
        kept = weakref.ref(self)

        def decide(
            backend: Backend, problem: ConvProblem, *, may_tune: bool = True
        ) -> DividedConvolution | None:
            """Ask the context; without one a call is PyTorch's own."""
            context = kept()
            if context is None:
                raise NotNowError
            return context._convolution(backend, problem, needs, may_tune=may_tune)

        recall = functools.partial(decide, may_tune=False)
        return GraphServer(self._router, decide, needs, recall=recall, within=_this_thread)

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
        return first.joined(self._plans[1:])

    def _passes_by(self) -> bool:
        return bool(_this_thread.depth)

    def _compiled(self, call: Call) -> Tensor | None:
        return in_graph(call, None, self._names[_needs_of(call)])

    def _computed(self, call: Call) -> Tensor | None:
        """Return the convolution, or None where PyTorch's own serves the call."""
        image, weight, bias, *_ = call
        if self._is_elsewhere():
            return None
        if is_traced(image, weight, bias) or overriding_mode() is not None:
            seen = None if is_examining() else watcher(image, weight, bias)
            if seen is not None:
                reason, words = seen
                self._notice.give(reason, f"A convolution is called {words}")
            return None
        needs = _needs_of(call)
        return self._router.served(
            call, lambda backend, problem: self._convolution(backend, problem, needs), needs
        )

    def _convolution(
        self, backend: Backend, problem: ConvProblem, needs: tuple[bool, bool], *, may_tune: bool = True
    ) -> DividedConvolution | None:
        """Return what computes a forward pass, tuned if nothing like it was, or None for PyTorch's own.

        Raises:
            NotNowError: nothing like it was, and it may not be tuned now, or not in this process.
        """
        if self._is_elsewhere():
            raise NotNowError
        roles = {ConvOp.FPROP: True, ConvOp.DGRAD: needs[0], ConvOp.WGRAD: needs[1]}
        wanted = wanted_ops(self._settings.ops, is_training=True)
        ops = [
            op_of(role, is_transposed=problem.op is ConvOp.DGRAD)
            for role, is_needed in roles.items()
            if is_needed and role in wanted
        ]
        try:
            with self._tuning:
                assignments = self._assignments(backend, problem, ops, may_tune)
        except (UnmeasuredError, UnweighableError) as error:
            warn_user(f"A convolution runs PyTorch's own, untuned: {error}", UntunedWarning)
            return None
        try:
            return divided(backend, problem, assignments, self._memory(backend))
        except BackendError as error:
            self._notice.give(Reason.PARTS, f"A call cannot be divided here ({error})")
            return None

    def _is_elsewhere(self) -> bool:
        """Return whether this is a process that was forked meanwhile; one that is no worker is told so."""
        if self._process == os.getpid():
            return False
        if get_worker_info() is None:
            self._notice.give(Reason.FORKED, "A convolution is called in a forked process")
        return True

    def _assignments(
        self, backend: Backend, problem: ConvProblem, ops: Iterable[ConvOp], may_tune: bool
    ) -> dict[ConvOp, Assignment]:
        """Return what some ops of a convolution run, tuned if need be."""
        problems = problems_of(problem)
        found = {op: self._found(_place(backend, problems[op]), problem.batch) for op in ops}
        known = {op: assigned for op, assigned in found.items() if assigned is not None}
        missing = tuple(op for op in found if op not in known)
        if missing and not may_tune:
            raise NotNowError
        return known | self._tuned(backend, problem, missing) if missing else known

    def _found(self, place: Hashable, batch: int) -> Assignment | None:
        """Return what was tuned for such a problem there, of the least batch that is no smaller."""
        able = (each for each in self._known.get(place, ()) if each.problem.batch >= batch)
        return min(able, key=lambda each: each.problem.batch, default=None)

    def _tuned(
        self, backend: Backend, problem: ConvProblem, ops: tuple[ConvOp, ...]
    ) -> dict[ConvOp, Assignment]:
        """Tune some ops of a convolution and remember them."""
        name = f"conv{'_transpose' * (problem.op is ConvOp.DGRAD)}{len(problem.kernel_size)}d"
        plan = self._learn(backend.device, name, len(self._plans), problem, ops)
        self._plans.append(plan)
        for assigned in plan.assignments:
            self._known.setdefault(_place(backend, assigned.problem), []).append(assigned)
        return {assigned.site.op: assigned for assigned in plan.assignments}

    def _memory(self, backend: Backend) -> Memory:
        """Return how memory is taken: what takes some beside the buffer must reckon with one of the limit."""
        limit_bytes = self._settings.limit_bytes
        return Memory(
            environment=backend.environment(),
            is_sharing=False,
            limit_bytes=limit_bytes,
            buffer_bytes=limit_bytes,
            capacity_bytes=0,
        )


def _needs_of(call: Call) -> tuple[bool, bool]:
    """Return whether gradients of the image, and of the filter, are recorded."""
    is_recorded = torch.is_grad_enabled()
    return is_recorded and call.image.requires_grad, is_recorded and call.weight.requires_grad


def _place(backend: Backend, problem: ConvProblem) -> Hashable:
    """Return what a problem of any batch is known by: times hold for one device and its flags."""
    of_any_batch = dataclasses.replace(problem, batch=0, is_apart=False)
    return (backend.name, backend.device, backend.flags(), of_any_batch)


def autotune(
    workspace_limit: int | str,
    *,
    mode: str = "reuse",
    policy: str = "power_of_two",
    search: str = "heuristic",
    max_error: float | None = None,
    ops: str | Collection[str] = "auto",
    backend: str = "auto",
    store: StoreOption = None,
    again: bool = False,
    progress: ProgressOption = None,
) -> Autotune:
    """Return a context in which every convolution of PyTorch is tuned when it is first seen, and divided.

        with mucudnn.autotune("64MiB"):
            y = torch.nn.functional.conv2d(x, w)

    The convolution need not belong to a module. A function can be decorated with the context instead, but no
    generator and no coroutine: while those wait, the convolutions of others would be tuned. What was tuned
    serves every smaller batch of the same shapes without measuring. Outside of the context nothing changes;
    of nested contexts the innermost counts. Each thread enters it for itself. In a forked process, such as a
    data loader's worker, it does nothing: make one there. Ranks of a distributed run tune each for
    themselves, while `optimize` has one plan for all.

    What torch.compile compiles in the context is tuned when its graph first runs, except inside a checkpoint
    (`torch.utils.checkpoint`), which Dynamo traces without the context: that stays as it is. A graph belongs
    to one context, and another context compiles anew: keep one and enter it again in each step.

    Args:
        workspace_limit: an int of bytes, or a string with a unit ("64MiB"), for each convolution.
        mode: "reuse"; to share out a total, all convolutions would have to be known beforehand.
        policy: see `optimize`, as for all that follows.
        search: which algorithms are tried.
        max_error: the largest error of an algorithm that may be chosen.
        ops: "auto" tunes those that a call needs: the forward pass, and the gradients that are recorded.
        backend: "auto", or a backend's name.
        store: where profiles are kept.
        again: whether each is measured anew when it is first seen in this context, whatever the store knows.
        progress: who is told.

    Raises:
        SizeError, OptionError: an argument cannot be read, or is none of the choices.
        InfeasibleError: (from a call inside) nothing fits the limit.
    """
    settings = Settings.of(
        workspace_limit, mode=mode, policy=policy, search=search, max_error=max_error, ops=ops,
        backend=backend, store=store, again=again, progress=progress,
    )  # fmt: skip
    if settings.mode is not Mode.REUSE:
        raise OptionError(
            "autotune must have the mode 'reuse', since it meets convolutions one by one, "
            f"but got {mode!r}; optimize shares a total among all."
        )
    settings.refuse_recording("autotune")
    return Autotune(settings)
