"""Finding the convolutions of a model: one forward pass under recorders, without arithmetic if possible."""

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mucudnn.convolutions.calls import FUNCTIONS
from mucudnn.convolutions.modules import (
    Call,
    Kind,
    at_odds,
    call_of,
    convolutions,
    elsewhere,
    kind_of,
    problem_of_call,
    tuned_device,
    undividable,
)
from mucudnn.convolutions.surroundings import autocast_dtype
from mucudnn.errors import NothingToTuneError, OptionError, ProblemError
from mucudnn.examining.arguments import CallArguments, rejected
from mucudnn.examining.foreign import SCRIPTED, check_unscripted, check_unsharded, scripted_paths
from mucudnn.examining.passes import examined, make_parameters, run_in_earnest, run_without_arithmetic
from mucudnn.examining.standins import StandIns
from mucudnn.examining.undoing import forget
from mucudnn.interruptions import pass_on_interruption
from mucudnn.plan import ConvSite
from mucudnn.problem import ConvOp, ConvProblem, op_of, problems_of

_HOOKS_OF_A_COMPILED_MODEL = r"Using `torch\.compile\(module\)` when there are global hooks"

_UNREACHED = "the sample does not reach its convolution"

_NAMED = 5
"""Paths that an error names; a long list says no more."""

_BESIDES_ITS_OWN = (
    "besides its own convolution it calls one as a function, and only mucudnn.autotune divides such calls"
)
"""Why a module is among the untouched though all sites of its own are measured."""

_AS_FUNCTION = "it calls a convolution as a function, and only mucudnn.autotune divides such calls"


@dataclasses.dataclass(frozen=True)
class SiteCall:
    """A convolution that the model computes.

    Attributes:
        path: the module's path.
        variant: 0 for the first shape that the module meets, 1 for the second, and so on.
        problem: of the forward pass: fprop, or dgrad of a transposed convolution.
        ops: which of the three are to be tuned, by the problem's names.
        computed: which the model computes. In eval mode, unless ops are asked for, that is the forward pass
            alone, whatever records gradients.
    """

    path: str
    variant: int
    problem: ConvProblem
    ops: tuple[ConvOp, ...]
    computed: tuple[ConvOp, ...]


@dataclasses.dataclass(frozen=True)
class Extraction:
    """What a model computes on a sample.

    Attributes:
        calls: its convolutions that can be divided, in the order in which they run.
        untouched: the paths of what runs as before, each with the reason; of some a part is divided.
    """

    calls: tuple[SiteCall, ...]
    untouched: tuple[tuple[str, str], ...]

    @property
    def problems(self) -> Mapping[ConvSite, ConvProblem]:
        """The problem of every site that is to be tuned, in the order in which the model meets them."""
        return {
            ConvSite(call.path, op, call.variant): problems_of(call.problem)[op]
            for call in self.calls
            for op in call.ops
        }

    def known_as(self, name: Callable[[ConvProblem, Collection[ConvOp]], ConvProblem]) -> "Extraction":
        """Return the same by the problems that `name` returns for those of forward passes and for ops."""
        calls = (dataclasses.replace(call, problem=name(call.problem, call.ops)) for call in self.calls)
        return dataclasses.replace(self, calls=tuple(calls))

    @property
    def transposed(self) -> tuple[str, ...]:
        """The paths of transposed convolutions, of which dgrad is the forward pass."""
        return tuple(dict.fromkeys(call.path for call in self.calls if call.problem.op is ConvOp.DGRAD))


def wanted_ops(ops: str | Collection[str], *, is_training: bool) -> frozenset[ConvOp]:
    """Return the ops of a layer that `ops` names; "auto" names all in training mode, and else fprop.

    fprop is the forward pass, dgrad the input's gradient, wgrad the weight's, of transposed ones as well.

    Raises:
        OptionError: `ops` names none, or one that there is not.
    """
    if isinstance(ops, str) and ops == "auto":
        return frozenset(ConvOp) if is_training else frozenset({ConvOp.FPROP})
    names = [ops] if isinstance(ops, str) or not isinstance(ops, Collection) else list(ops)
    if not names or any(name not in [*ConvOp] for name in names):
        choices = ", ".join(repr(str(op)) for op in ConvOp)
        raise OptionError(f"ops must be 'auto' or some of {choices}, but got {ops!r}.")
    return frozenset(map(ConvOp, names))


def extract(model: nn.Module, sample: object, ops: str | Collection[str] = "auto") -> Extraction:
    """Return the convolutions that `model` computes on `sample`; the model is left as it was.

    Parameters of lazy modules, though, are made by a first pass, as they would be anyway.

    Args:
        model: in the mode, training or eval, in which it is to be tuned.
        sample: a tensor, a tuple of arguments, a dict of keyword arguments, or both as `CallArguments`.
        ops: "auto", or the ops that are wanted, of those that the pass needs.

    Raises:
        SampleError: the model cannot be run on the sample, or not twice, or is sharded by FSDP.
        NothingToTuneError: it can, but has no convolution that can be divided, or none that needs the ops; or
            it is TorchScript's.
        OptionError: `ops` is none of the choices.
    """
    wanted = wanted_ops(ops, is_training=model.training)
    check_unscripted(model)
    check_unsharded(model)
    with examined(model):
        return _extracted(
            model, CallArguments.of(sample), wanted, is_inference=ops == "auto" and not model.training
        )


def _extracted(
    model: nn.Module, arguments: CallArguments, wanted: frozenset[ConvOp], *, is_inference: bool
) -> Extraction:
    _make_parameters(model, arguments)
    modules, device = convolutions(model), tuned_device(model)
    refused = {path: undividable(module) or elsewhere(module, device) for path, module in modules.items()}
    met: dict[str, None] = {}
    recorders = {
        path: _Recorder(path, module, kind, wanted, met, is_inference=is_inference)
        for path, module in modules.items()
        if refused[path] is None and (kind := kind_of(module)) is not None
    }
    functions = _Functions(model)
    with functions, warnings.catch_warnings():
        warnings.filterwarnings("ignore", _HOOKS_OF_A_COMPILED_MODEL)  # these are ours, and soon gone
        _run(model, recorders, functions, arguments)
    reasons = {**refused, **{path: recorder.verdict() for path, recorder in recorders.items()}}
    reasons |= {
        path: _AS_FUNCTION
        for path, recorder in recorders.items()
        if reasons[path] == _UNREACHED and id(recorder.module) in functions.calling
    }
    calls = tuple(
        SiteCall(path, variant, problem, ops, recorders[path].needed[problem])
        for path in met
        if reasons[path] is None
        for variant, (problem, ops) in enumerate(recorders[path].calls.items())
        if ops
    )
    refusals = {path: reason for path, reason in reasons.items() if reason is not None}
    besides = {
        path: _BESIDES_ITS_OWN
        for path, recorder in recorders.items()
        if path not in refusals and id(recorder.module) in functions.calling
    }
    callers = dict.fromkeys(functions.callers, _AS_FUNCTION)
    scripted = dict.fromkeys(scripted_paths(model), SCRIPTED)
    untouched = (*refusals.items(), *besides.items(), *callers.items(), *scripted.items())
    if not calls:
        why = "it has none" if not untouched else f"none of it can: {_named(untouched)}"
        raise NothingToTuneError(f"The model must have a convolution that can be divided, but {why}.")
    return Extraction(calls, untouched)


def _named(untouched: Sequence[tuple[str, str]]) -> str:
    """Return the first paths with their reasons, and how many more there are."""
    named = [f"{path or 'the model itself'}: {reason}" for path, reason in untouched[:_NAMED]]
    more = [f"and {len(untouched) - _NAMED} more"] if len(untouched) > _NAMED else []
    return "; ".join([*named, *more])


class _Here(threading.local):
    """How many recorders this thread is inside of."""

    recorded = 0


_here = _Here()


class _Functions(TorchFunctionMode):
    """Finds the modules that call convolutions as functions.

    Attributes:
        callers: the paths of those that are no convolutions, in the order in which they were met.
        calling: the ids of convolutions that do, such as one whose `forward` standardises its weight first.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.callers: dict[str, None] = {}
        self.calling: set[int] = set()
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._running: list[nn.Module] = []

    def __enter__(self) -> Self:
        hooks = torch.nn.modules.module
        self._thread = threading.get_ident()
        self._handles = (
            hooks.register_module_forward_pre_hook(lambda module, _: self._enter(module)),
            hooks.register_module_forward_hook(lambda module, *_: self._leave(module), always_call=True),
        )
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module) -> None:
        if threading.get_ident() == self._thread:  # others run modules of their own
            self._running.append(module)

    def _leave(self, module: nn.Module) -> None:
        if threading.get_ident() != self._thread:
            return
        while self._running and self._running.pop() is not module:
            pass  # it has left by an exception

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute `func`, and remember who has called it if it is a convolution."""
        if func in FUNCTIONS and not _here.recorded:
            self._note_caller()
        return func(*args, **(kwargs or {}))

    def _note_caller(self) -> None:
        """Remember whom a call is of: the innermost convolution around it, or else the innermost module."""
        inside = [*reversed(self._running)]
        convolution = next((module for module in inside if kind_of(module) is not None), None)
        if convolution is not None:
            self.calling.add(id(convolution))
            return
        known = (self._paths.get(id(module)) for module in inside)
        self.callers.setdefault(next((path for path in known if path is not None), ""))

    def forget(self) -> None:
        """Forget what an earlier pass has shown."""
        self.callers.clear()
        self.calling.clear()


class _Recorder:
    """Stands in for the method of a module that computes its convolution, and notes what it is asked for.

    All recorders of a pass have `met` in common: the paths of those with calls, in the order of the first.
    """

    def __init__(
        self,
        path: str,
        module: nn.Module,
        kind: Kind,
        wanted: frozenset[ConvOp],
        met: dict[str, None],
        *,
        is_inference: bool,
    ) -> None:
        self.module = module
        self.kind = kind
        self.calls: dict[ConvProblem, tuple[ConvOp, ...]] = {}
        self.needed: dict[ConvProblem, tuple[ConvOp, ...]] = {}
        self._path = path
        self._met = met
        self._obstacle: str | None = _UNREACHED
        self._wanted = wanted
        self._is_inference = is_inference

    def forget(self) -> None:
        """Forget what an earlier pass has shown."""
        self._obstacle = _UNREACHED
        self._met.pop(self._path, None)
        self.calls.clear()
        self.needed.clear()

    def verdict(self) -> str | None:
        """Return why nothing of this module is to be tuned, or None if something is.

        The pass is over, and the module is again as a plan will find it.
        """
        tuned = [problem for problem, ops in self.calls.items() if ops]
        if not tuned:
            return self._obstacle or f"it needs no {' or '.join(op for op in ConvOp if op in self._wanted)}"
        odd = next(filter(None, (at_odds(self.module, self.kind, problem) for problem in tuned)), None)
        return None if odd is None else "it computes with {}, but its attributes say {}".format(*odd)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self._note(call_of(self.kind, self.module, args, kwargs))
        _here.recorded += 1
        try:
            return self.kind.own(self.module, *args, **kwargs)
        finally:
            _here.recorded -= 1

    def _note(self, call: Call) -> None:
        image, weight = call.image, call.weight
        are_tensors = isinstance(image, Tensor) and isinstance(weight, Tensor)
        if not are_tensors:  # PyTorch's own says what is wrong, right after this
            return
        try:
            problem, _ = problem_of_call(self.module, call, autocast_dtype(image.device))
        except (OptionError, ProblemError) as error:  # unless PyTorch's own says so, right after this
            self._obstacle = str(error).removesuffix(".")
            return
        self._obstacle = None
        self._met.setdefault(self._path)
        has_gradients = not self._is_inference  # those under no_grad may be computed again with gradients
        needs = {
            ConvOp.FPROP: True,
            ConvOp.DGRAD: call.image.requires_grad and has_gradients,
            ConvOp.WGRAD: call.weight.requires_grad and has_gradients,
        }
        needed = {role for role, is_needed in needs.items() if is_needed}
        for known, roles in ((self.needed, needed), (self.calls, needed & self._wanted)):
            ops = {op_of(role, is_transposed=self.kind.is_transposed) for role in roles}
            ops |= {*known.get(problem, ())}  # of a shared module any call may need an op
            known[problem] = tuple(op for op in ConvOp if op in ops)


def _make_parameters(model: nn.Module, sample: CallArguments) -> None:
    """Have lazy modules make their parameters.

    Raises:
        SampleError: the model cannot be run on the sample.
    """
    try:
        make_parameters(model, sample)
    except Exception as error:
        pass_on_interruption(error)
        raise rejected(model, sample, error) from error


def _run(
    model: nn.Module, recorders: Mapping[str, _Recorder], functions: _Functions, sample: CallArguments
) -> None:
    """Run the model once: with tensors that have shapes only, or if that fails, in earnest."""
    with _recording(recorders):
        stand_ins = StandIns()
        try:
            run_without_arithmetic(model, sample, stand_ins)
            return
        except Exception as error:  # noqa: BLE001  # whatever it is, but an interruption
            pass_on_interruption(error)
            functions.forget()  # whatever a model cannot do without values, it may do with them
            for recorder in recorders.values():
                recorder.forget()
        forget(stand_ins.alive)
        try:
            run_in_earnest(model, sample)
        except Exception as error:
            pass_on_interruption(error)
            raise rejected(model, sample, error) from error


@contextlib.contextmanager
def _recording(recorders: Mapping[str, _Recorder]) -> Iterator[None]:
    """Put the recorders in place, and afterwards what was there before."""
    former = {
        path: recorder.module.__dict__.get(recorder.kind.method) for path, recorder in recorders.items()
    }
    for recorder in recorders.values():
        recorder.module.__dict__[recorder.kind.method] = recorder
    try:
        yield
    finally:
        for path, recorder in recorders.items():
            del recorder.module.__dict__[recorder.kind.method]
            if former[path] is not None:
                recorder.module.__dict__[recorder.kind.method] = former[path]
