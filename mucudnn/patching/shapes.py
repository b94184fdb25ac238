"""The shapes that a module was tuned for: which of them serves a call, or why none does."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import torch

from mucudnn.backends import Backend, backend_name
from mucudnn.convolutions.notices import Notice, Reason
from mucudnn.errors import BackendError, UnmeasuredError, UntunedWarning, UnweighableError, warn_user
from mucudnn.execution.workspace import Owner
from mucudnn.functional import DividedConvolution
from mucudnn.locks import ForkSafeLock
from mucudnn.patching.fitting import Memory, divided
from mucudnn.plan import Assignment, Plan
from mucudnn.problem import ConvOp, ConvProblem, Layout, op_of


@dataclasses.dataclass(frozen=True)
class Variant:
    """One shape that a module was tuned for.

    Attributes:
        problem: of the forward pass, for the whole mini-batch.
        assignments: what each op runs.
        learnt: the plan of it alone, if it was tuned when it was met.
        own_when_frozen: samples up to which graphs that are frozen for inference hold PyTorch's own; 0 if
            they never do.
    """

    problem: ConvProblem
    assignments: Mapping[ConvOp, Assignment]
    learnt: Plan | None = None
    own_when_frozen: int = 0


Learn = Callable[[torch.device, str, int, ConvProblem, tuple[ConvOp, ...]], Plan]
"""Tunes a shape that a module meets; see `mucudnn.tuning.learning`."""

AfterAll = Mapping[ConvOp, tuple[Reason, str]]
"""Why a gradient was not tuned, and what the module "was ..." then; an input's is dgrad, a weight's wgrad."""

_NOT_NEEDED: AfterAll = {
    role: (reason, f"was tuned while its {what} needed no gradient, and now needs it")
    for role, reason, what in (
        (ConvOp.DGRAD, Reason.INPUT_AFTER_ALL, "input"),
        (ConvOp.WGRAD, Reason.TRAINED_AFTER_ALL, "weight"),
    )
}

_FOR_INFERENCE: AfterAll = dict.fromkeys(
    _NOT_NEEDED,
    (Reason.FOR_INFERENCE, "was tuned in eval mode, for inference, and now a gradient is needed"),
)

_learning = ForkSafeLock()  # of all modules: two that measure at once would measure each other
"""Held while a shape that was met is tuned."""

_NOWHERE = object()
"""Flags that no backend has."""


class TunedShapes:
    """What a module was tuned for; it knows its path, but not the module."""

    def __init__(
        self,
        path: str,
        variants: tuple[Variant, ...],
        memory: Memory,
        notice: Notice,
        home: Hashable,
        learn: Learn | None = None,
        *,
        after_all: AfterAll | None = None,
    ) -> None:
        """Remember what was tuned.

        Args:
            path: of the module, for messages.
            variants: the shapes that it was tuned for.
            memory: of the plan.
            notice: shared by all modules of the model.
            home: the backend's flags under which the plan's environment is that of this process.
            learn: tunes shapes that are not known; without it they run PyTorch's own convolution.
            after_all: see `told_after_all`.
        """
        self._path = path
        self._variants = variants
        self._memory = memory
        self._notice = notice
        self._home = home
        self._learn = learn
        self._after_all = after_all or {}
        self._serves_others = False
        self._owners: dict[tuple[int, ConvOp], Owner] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Keep what was decided; workspaces are made anew."""
        return {name: value for name, value in self.__dict__.items() if name != "_owners"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._home = _NOWHERE  # perhaps another machine
        self._owners = {}

    @property
    def backend(self) -> str:
        """The name of the backend that they were tuned for."""
        return self._memory.environment.backend

    @property
    def planned(self) -> Sequence[Variant]:
        """What was tuned before the module was patched."""
        return [variant for variant in self._variants if variant.learnt is None]

    @property
    def learnt(self) -> Sequence[Plan]:
        """What was tuned since the module was patched."""
        return [variant.learnt for variant in self._variants if variant.learnt is not None]

    @property
    def content(self) -> Hashable | None:
        """A key that is equal for modules that may share one server; None for a module that may not.

        A module in sharing mode owns its workspaces, and one that learns has shapes of its own.
        """
        if self._memory.is_sharing or self._learn is not None:
            return None
        tuned = (
            (variant.problem, variant.own_when_frozen, each.problem, each.division, each.candidates)
            for variant in self._variants
            for each in variant.assignments.values()
        )
        return (self._memory, *tuned)

    def tell(self, reason: Reason, how: str) -> None:
        """Warn that the module "is called ...", or was tuned for something else, unless that was told."""
        self._notice.give(reason, f"{self._whose} {how}")

    def tell_device(self, device: torch.device) -> None:
        """Warn if a call came to another kind of device, where no backend serves it."""
        if device.type != "meta" and backend_name(device) != self.backend:
            self.tell(Reason.MOVED, f"was tuned for the backend {self.backend!r}, but computes on {device}")

    def for_others(self) -> "TunedShapes":
        """Return the same for all modules of equal content, of which warnings name this one."""
        twin = TunedShapes(
            self._path,
            self._variants,
            self._memory,
            self._notice,
            self._home,
            after_all=self._after_all,
        )
        twin._serves_others = True
        return twin

    @property
    def _whose(self) -> str:
        if self._serves_others:
            return f"A module like {self._path!r}"
        return f"The module {self._path!r}" if self._path else "The model itself"

    def convolution(self, backend: Backend, problem: ConvProblem) -> DividedConvolution | None:
        """Return what computes a forward pass, or None for PyTorch's own, with a warning."""
        differences = self._differences(backend)
        if differences:
            why = f"its plan was made in another environment: {'; '.join(differences)}"
            self.tell(Reason.ELSEWHERE, f"cannot be divided here ({why})")
            return None
        served = self._variants_for(problem)
        try:
            if not served and self._has_learnt(backend, problem):
                served = self._variants_for(problem)
        except (UnmeasuredError, UnweighableError) as error:
            warn_user(f"{self._whose} stays as it is for {problem}: {error}", UntunedWarning)
            return None
        if not served:
            self.tell(*self._why_unserved(problem))
            return None
        number = min(served)[-1]
        variant = self._variants[number]
        failures = []  # in words: an error would keep alive whatever its callers have held
        for form in dict.fromkeys((problem, _as_tuned(problem, variant))):
            try:
                return self._divided(backend, number, variant, form)
            except BackendError as error:
                failures.append(str(error))
        self.tell(Reason.PARTS, f"cannot be divided here ({failures[0]})")
        return None

    def is_own_when_frozen(self, problem: ConvProblem) -> bool:
        """Return whether graphs that are frozen hold PyTorch's own convolution of a problem.

        Shapes that were not tuned are not decided here: they are told of when they come.
        """
        served = self._variants_for(problem)
        return bool(served) and problem.batch <= self._variants[min(served)[-1]].own_when_frozen

    def _why_unserved(self, problem: ConvProblem) -> tuple[Reason, str]:
        """Return why no shape serves a problem, in words too."""
        batches = [each.problem.batch for each in self._variants if _is_like(each.problem, problem)]
        if batches:
            sizes = f"batches of {max(batches)}, but meets one of {problem.batch}"
            return Reason.LARGER_BATCH, f"was tuned for {sizes}: {problem}"
        tuned = "; ".join(_with_its_bias(variant.problem) for variant in self._variants)
        return self._what_differs(problem), f"was tuned for {tuned}, but meets {_with_its_bias(problem)}"

    def _what_differs(self, problem: ConvProblem) -> Reason:
        """Return in what a problem differs from the shape that is most like it."""
        problems = [each.problem for each in self._variants]
        if any(_is_like(dataclasses.replace(each, bias=problem.bias), problem) for each in problems):
            return Reason.OTHER_BIAS
        if problem.batch == 1 and problem.layout is Layout.CONTIGUOUS and len(problem.input_size) == 3:
            alone = (dataclasses.replace(each, layout=problem.layout) for each in problems)
            if any(_is_like(each, problem) for each in alone):
                return Reason.SINGLE_VOLUME
        if any(_is_like(_in_form_of(problem, each), problem) for each in problems):
            return Reason.OTHER_FORM
        return Reason.OTHER_SHAPE

    def _variants_for(self, problem: ConvProblem) -> list[tuple[bool, int, int]]:
        """Return a triple for each shape that serves such a problem; the least triple is the best shape.

        It tells whether the layout is another one, the batch, and the shape's place among the variants.
        """
        return [
            (variant.problem.layout is not problem.layout, variant.problem.batch, number)
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
        self._variants = (*self._variants, Variant(problem, assignments, learnt=plan))

    def _differences(self, backend: Backend) -> list[str]:
        """Return how the plan's environment differs from a call's, if model, card or flags have changed."""
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
        ops = gradient_ops(is_transposed=variant.problem.op is ConvOp.DGRAD)
        like = [each for each in self._variants if _is_like(each.problem, variant.problem)]
        untuned = {  # of no batch: the largest of several may have needed more than the others
            role: functools.partial(self._tell_after_all, role)
            for role in self._after_all
            if not any(ops[role] in each.assignments for each in like)
        }
        return divided(backend, problem, variant.assignments, self._memory, owners, untuned)

    def _tell_after_all(self, role: ConvOp) -> None:
        """Warn that a gradient is needed which was not when the module was tuned."""
        reason, how = self._after_all[role]
        self._notice.give(reason, f"{self._whose} {how}", "PyTorch's own convolution computes that")


def told_after_all(asked: Collection[ConvOp], *, is_for_inference: bool) -> AfterAll:
    """Return what is told when a gradient is needed that was not tuned.

    Args:
        asked: gradients that were tuned of some module: then one that was not was not needed. Which was tuned
            of none was not asked for, and is not told of.
        is_for_inference: whether none was looked for, since the model was in eval mode.
    """
    if is_for_inference:
        return _FOR_INFERENCE
    return {role: words for role, words in _NOT_NEEDED.items() if role in asked}


def gradient_ops(*, is_transposed: bool) -> dict[ConvOp, ConvOp]:
    """Return the ops of a layer's gradients: of its input's, as dgrad, and of its weight's, as wgrad."""
    return {role: op_of(role, is_transposed=is_transposed) for role in (ConvOp.DGRAD, ConvOp.WGRAD)}


def _is_like(tuned: ConvProblem, problem: ConvProblem) -> bool:
    """Return whether two problems are equal but for the batch, and for the layout of single pixels.

    In memory a single pixel is the same in both layouts. Which one PyTorch takes depends on strides of axes
    of length 1, and so on what made the tensor: with dropout or without, in training or not.
    """
    has_layout = math.prod(problem.input_size) > 1 or math.prod(problem.output_size) > 1
    layout = tuned.layout if has_layout else problem.layout
    return (
        dataclasses.replace(tuned, batch=problem.batch, layout=layout, is_apart=problem.is_apart) == problem
    )


def _as_tuned(problem: ConvProblem, variant: Variant) -> ConvProblem:
    """Return a problem in the tuned layout, where it has another one: of single pixels both are the same.

    An algorithm may compute that only, as im2col does of several groups. Results then have its strides, of
    lengths of 1.
    """
    return dataclasses.replace(problem, layout=variant.problem.layout)


def _in_form_of(pattern: ConvProblem, problem: ConvProblem) -> ConvProblem:
    """Return a problem in the type and layouts of another one."""
    return dataclasses.replace(
        problem, dtype=pattern.dtype, layout=pattern.layout, filter_layout=pattern.filter_layout
    )


def _with_its_bias(problem: ConvProblem) -> str:
    """Return a problem in words, with its bias, which may be all in which it differs from another."""
    return f"{problem} with a bias" if problem.bias else str(problem)
