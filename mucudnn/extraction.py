"""Finding the convolutions of a model: one forward pass under recorders, without arithmetic if possible."""

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name that PyTorch's users know it by

from mucudnn.errors import NothingToTuneError, OptionError, ProblemError, SampleError
from mucudnn.functional import ConvArguments, explicit_padding, obstacle, problem_of
from mucudnn.passes import CallArguments, run_in_earnest, run_without_arithmetic
from mucudnn.problem import ConvOp, ConvProblem

__all__ = [
    "CallArguments",
    "Extraction",
    "SiteCall",
    "convolution_of",
    "convolutions",
    "extract",
    "undividable",
    "wanted_ops",
]

_OTHER_KINDS = (nn.Conv1d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclasses.dataclass(frozen=True)
class SiteCall:
    """A convolution that the model computes.

    Attributes:
        path: the module's path.
        variant: 0 for the first shape that the module meets, 1 for the second, and so on.
        problem: of fprop.
        ops: which of the three are needed.
    """

    path: str
    variant: int
    problem: ConvProblem
    ops: tuple[ConvOp, ...]


@dataclasses.dataclass(frozen=True)
class Extraction:
    """What a model computes on a sample.

    Attributes:
        calls: its convolutions that can be divided, in the order in which they run.
        untouched: the paths of the others, each with the reason.
    """

    calls: tuple[SiteCall, ...]
    untouched: tuple[tuple[str, str], ...]


def undividable(module: nn.Module) -> str | None:
    """Return why a convolution module cannot be divided, or None if it can."""
    if isinstance(module, _OTHER_KINDS):
        return f"{type(module).__name__} is not divided, only Conv2d is"
    kind = type(module)
    if (
        not isinstance(module, nn.Conv2d)
        or getattr(kind, "_conv_forward", None) is not nn.Conv2d._conv_forward
    ):
        return f"{kind.__name__} computes its convolution itself"
    replaced = module.__dict__.get("_conv_forward")
    if replaced is not None and not getattr(type(replaced), "is_mucudnn_patch", False):
        return "its _conv_forward has been replaced by something else"
    return None


def convolutions(model: nn.Module) -> dict[str, nn.Module]:
    """Return the convolution modules of a model by path, each shared one once."""
    kinds = (nn.Conv2d, *_OTHER_KINDS)
    return {path: module for path, module in model.named_modules() if isinstance(module, kinds)}


def convolution_of(conv: nn.Conv2d, image: Tensor, weight: Tensor) -> tuple[Tensor, ConvArguments]:
    """Return the image, padded where equal zeros on both sides cannot say it, and the remaining arguments."""
    arguments = ConvArguments(conv.stride, conv.padding, conv.dilation, conv.groups)
    if conv.padding_mode != "zeros":
        image = F.pad(image, conv._reversed_padding_repeated_twice, mode=conv.padding_mode)
        arguments = dataclasses.replace(arguments, padding=(0, 0))
    return explicit_padding(image, weight.shape[2:], arguments)


def wanted_ops(ops: str | Collection[str], *, is_training: bool) -> frozenset[ConvOp]:
    """Return the ops that `ops` names; "auto" names all in training mode, and else fprop.

    Raises:
        OptionError: `ops` names none, or one that there is not.
    """
    if isinstance(ops, str) and ops == "auto":
        return frozenset(ConvOp) if is_training else frozenset({ConvOp.FPROP})
    names = [ops] if isinstance(ops, str) or not isinstance(ops, Collection) else list(ops)
    try:
        return frozenset(ConvOp(name) for name in names or [""])
    except ValueError:
        choices = ", ".join(repr(str(op)) for op in ConvOp)
        raise OptionError(f"ops must be 'auto' or some of {choices}, but got {ops!r}.") from None


def extract(model: nn.Module, sample: object, ops: str | Collection[str] = "auto") -> Extraction:
    """Return the convolutions that `model` computes on `sample`; the model is left as it was.

    Args:
        model: in the mode, training or eval, in which it is to be tuned.
        sample: a tensor, a tuple of arguments, a dict of keyword arguments, or both as `CallArguments`.
        ops: "auto", or the ops that are wanted, of those that the pass needs.

    Raises:
        SampleError: the model cannot be run on the sample.
        NothingToTuneError: it can, but has no convolution that can be divided, or none that needs the ops.
        OptionError: `ops` is none of the choices.
    """
    wanted = wanted_ops(ops, is_training=model.training)
    modules = convolutions(model)
    refused = {path: undividable(module) for path, module in modules.items()}
    recorders = {
        path: _Recorder(module, wanted)
        for path, module in modules.items()
        if refused[path] is None and isinstance(module, nn.Conv2d)
    }
    _run(model, recorders, CallArguments.of(sample))
    reasons = {**refused, **{path: recorder.verdict() for path, recorder in recorders.items()}}
    order = sorted(recorders.items(), key=lambda named: named[1].turn)
    calls = tuple(
        SiteCall(path, variant, problem, needed)
        for path, recorder in order
        for variant, (problem, needed) in enumerate(recorder.calls.items())
        if needed
    )
    untouched = tuple((path, reason) for path, reason in reasons.items() if reason is not None)
    if not calls:
        why = "; ".join(f"{path}: {reason}" for path, reason in untouched) or "it has none"
        raise NothingToTuneError(f"The model must have a convolution that can be divided, but {why}.")
    return Extraction(calls, untouched)


class _Recorder:
    """Stands in for a module's `_conv_forward` during the pass and notes what it is asked for."""

    def __init__(self, conv: nn.Conv2d, wanted: frozenset[ConvOp]) -> None:
        self.conv = conv
        self.calls: dict[ConvProblem, tuple[ConvOp, ...]] = {}
        self.turn = 0
        self._obstacle: str | None = "the sample does not reach its convolution"
        self._wanted = wanted

    def start(self, turns: Iterator[int]) -> None:
        self._next_turn = turns
        self.calls.clear()

    def verdict(self) -> str | None:
        """Return why nothing of this module is to be tuned, or None if something is."""
        if self._obstacle is None and not any(self.calls.values()):
            return f"it needs no {' or '.join(op for op in ConvOp if op in self._wanted)}"
        return self._obstacle

    def __call__(self, image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self._note(image, weight, bias)
        result: Tensor = nn.Conv2d._conv_forward(self.conv, image, weight, bias)
        return result

    def _note(self, image: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        reason = obstacle(image, weight, bias)
        if reason is not None:
            self._obstacle = reason
            return
        batched = image if image.dim() == 4 else image.unsqueeze(0)
        padded, arguments = convolution_of(self.conv, batched, weight)
        try:
            problem = problem_of(padded, weight, bias is not None, arguments)
        except ProblemError:
            return  # PyTorch's own says what is wrong, right after this
        self._obstacle = None
        if not self.calls:
            self.turn = next(self._next_turn)
        needs = {ConvOp.FPROP: True, ConvOp.DGRAD: image.requires_grad, ConvOp.WGRAD: weight.requires_grad}
        former = self.calls.get(problem, ())  # of a shared module any call may need an op
        self.calls[problem] = tuple(op for op in ConvOp if op in former or (op in self._wanted and needs[op]))


def _run(model: nn.Module, recorders: Mapping[str, _Recorder], sample: CallArguments) -> None:
    """Run the model once: with tensors that have shapes only, or if that fails, in earnest."""
    with _recording(recorders):
        try:
            run_without_arithmetic(model, sample)
            return
        except Exception:  # noqa: BLE001  # whatever a model cannot do without values, it may do with them
            for recorder in recorders.values():
                recorder.calls.clear()
        try:
            run_in_earnest(model, sample)
        except Exception as error:
            raise SampleError(f"The model must run on the sample, but it raised {error!r}.") from error


@contextlib.contextmanager
def _recording(recorders: Mapping[str, _Recorder]) -> Iterator[None]:
    """Put the recorders in place, and afterwards what was there before."""
    turns = iter(range(1 << 62))
    former = {path: recorder.conv.__dict__.get("_conv_forward") for path, recorder in recorders.items()}
    for recorder in recorders.values():
        recorder.start(turns)
        recorder.conv.__dict__["_conv_forward"] = recorder
    try:
        yield
    finally:
        for path, recorder in recorders.items():
            del recorder.conv.__dict__["_conv_forward"]
            if former[path] is not None:
                recorder.conv.__dict__["_conv_forward"] = former[path]
