"""Finding every convolution that a model computes, of any kind and however it is called.

One pass of the model, without arithmetic if possible, under a dispatcher that sees each convolution as
PyTorch hands it to a kernel: functional calls, transposed ones and those of any rank included.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from mucudnn.algorithms.base import memory_format
from mucudnn.convolutions.calls import ConvArguments, numbers, problem_of
from mucudnn.convolutions.strides import layout_of
from mucudnn.errors import NothingToTuneError, ValuesWarning, warn_user
from mucudnn.examining.arguments import CallArguments, rejected
from mucudnn.examining.extraction import wanted_ops
from mucudnn.examining.passes import examined, run_in_earnest, run_without_arithmetic
from mucudnn.examining.standins import StandIns, in_pieces
from mucudnn.examining.undoing import clear_caches, forget
from mucudnn.forecast import Occurrence
from mucudnn.interruptions import pass_on_interruption
from mucudnn.plan import ConvSite
from mucudnn.problem import ConvOp, ConvProblem, cudnn_layout, op_of, problems_of

_CONVOLUTION = torch.ops.aten.convolution.default

_VALUE_ERRORS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
_IN_EARNEST = (
    "The model looks at values of its tensors, so it is run in earnest on the sample, which may take long; "
    "on other values it may compute other convolutions."
)
_VALUE_WORDS = ("FakeTensor", "not supported for tensor subclasses")


def trace(model: nn.Module, sample: object, ops: str | Collection[str] = "auto") -> tuple[Occurrence, ...]:
    """Return the convolutions that `model` computes on `sample`, in their order; the model is left as it was.

    Layouts are those in which cuDNN would compute: a convolution in channels_last gives a result in
    channels_last, whatever the device on which the model lies. A module that computes several equal
    convolutions is one site. What runs under `torch.no_grad` needs no gradients; what runs in a checkpoint
    does, since the backward pass computes it once more.

    Args:
        model: in the mode, training or eval, in which it will run.
        sample: a tensor, a tuple of arguments, a dict of keyword arguments, or both as `CallArguments`.
            Tensors on the device "meta" stand for tensors of their shapes, and take no memory.
        ops: "auto", or the ops of a layer that are wanted, of those that the pass needs.

    Raises:
        SampleError: the model cannot be run on the sample.
        NothingToTuneError: it can, but computes no convolution that needs the ops.
        OptionError: `ops` is none of the choices.
    """
    recorder = _Recorder(wanted_ops(ops, is_training=model.training))
    arguments = CallArguments.of(sample)
    with examined(model):
        _run(model, arguments, recorder)
    occurrences = recorder.occurrences()
    if not occurrences:
        raise NothingToTuneError("The model must compute a convolution on the sample, but it computes none.")
    return occurrences


def _run(model: nn.Module, sample: CallArguments, recorder: "_Recorder") -> None:
    """Run the model without arithmetic, or in earnest if it cannot do without values.

    Only then: for a large sample that may take hours, and would find the same mistake again.
    """
    try:
        with _following(model, recorder.paths):
            stand_ins = StandIns()
            try:
                run_without_arithmetic(model, sample, stand_ins, under=recorder)
                return
            except Exception as error:
                if not _wants_values(error):
                    clear_caches(stand_ins.alive())  # which the exception keeps alive
                    raise
            recorder.found.clear()
            forget(stand_ins.alive)
            warn_user(_IN_EARNEST, ValuesWarning)
            run_in_earnest(model, sample, under=recorder)
    except Exception as error:
        pass_on_interruption(error)
        raise rejected(model, sample, error) from error


def _wants_values(error: Exception) -> bool:
    """Return whether a model has asked for what a tensor without values does not have."""
    return isinstance(error, _VALUE_ERRORS) or any(word in str(error) for word in _VALUE_WORDS)


@contextlib.contextmanager
def _following(model: nn.Module, paths: list[str]) -> Iterator[None]:
    """Keep the path of the module that is running at the end of `paths`."""
    handles = []
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # it takes no hooks; what it computes counts for the module around it
        handles += [
            module.register_forward_pre_hook(_entering(paths, path), prepend=True),
            module.register_forward_hook(_leaving(paths), always_call=True),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _entering(paths: list[str], path: str) -> Callable[..., None]:
    return lambda *_: paths.append(path)


def _leaving(paths: list[str]) -> Callable[..., None]:
    def leave(*_: object) -> None:
        paths.pop()

    return leave


class _Recorder(TorchDispatchMode):
    """Notes every convolution that reaches PyTorch's dispatcher while it is active.

    Autograd lies above: a tensor that arrives here still knows whether it requires a gradient.
    """

    def __init__(self, wanted: frozenset[ConvOp]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not in torch's hints
        self.paths: list[str] = []
        self.found: dict[tuple[str, ConvProblem], frozenset[ConvOp]] = {}
        self._wanted = wanted

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Compute `func`, and note it if it is a convolution."""
        if func is _CONVOLUTION:
            return self._convolution(*args, **(kwargs or {}))
        result = in_pieces(self, func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if result is NotImplemented else result

    def occurrences(self) -> tuple[Occurrence, ...]:
        """Return what was found: first the forward pass of a convolution, then its gradients."""
        variants: dict[str, int] = {}
        occurrences: list[Occurrence] = []
        for (path, problem), needed in self.found.items():
            is_transposed = problem.op is ConvOp.DGRAD
            variant = variants[path] = variants.get(path, -1) + 1
            for op in ConvOp:
                if op in needed:
                    part = problems_of(problem)[op_of(op, is_transposed=is_transposed)]
                    occurrences.append(Occurrence(ConvSite(path, part.op, variant), part, is_transposed))
        return tuple(occurrences)

    def _convolution(
        self,
        image: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        is_transposed: bool,
        output_padding: Sequence[int],
        groups: int,
    ) -> Tensor:
        result: Tensor = _CONVOLUTION(
            image, weight, bias, stride, padding, dilation, is_transposed, output_padding, groups
        )
        layout = cudnn_layout(layout_of(image, weight), str(image.dtype).removeprefix("torch."))
        arguments = ConvArguments.of(image.dim() - 2, stride, padding, dilation, groups)
        if is_transposed:
            arguments = arguments._replace(output_padding=numbers(tuple(output_padding), image.dim() - 2))
        problem = problem_of(image, weight, bias is not None, arguments)
        # cuDNN gets the filter in the layout of the others, and computes transposed ones like gradients.
        asked = dataclasses.replace(problem, layout=layout, filter_layout=layout, is_apart=False)
        self._note(asked, image, weight)
        return result.contiguous(memory_format=memory_format(layout, result.dim()))

    def _note(self, problem: ConvProblem, image: Tensor, weight: Tensor) -> None:
        needed = {ConvOp.FPROP}
        if torch.is_grad_enabled():
            needed |= {ConvOp.DGRAD} if image.requires_grad else set()
            needed |= {ConvOp.WGRAD} if weight.requires_grad else set()
        key = (self.paths[-1] if self.paths else "", problem)
        self.found[key] = self.found.get(key, frozenset()) | (needed & self._wanted)
