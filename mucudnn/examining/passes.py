"""One pass of a model over a sample, without arithmetic if possible, that leaves both as they were."""

import contextlib
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from mucudnn.convolutions.modules import home_of
from mucudnn.examining.arguments import CallArguments
from mucudnn.examining.standins import StandIns, in_mode_of, out_of_inference_mode
from mucudnn.examining.undoing import clear_caches, forget, left_as_they_were, random_state_kept
from mucudnn.examining.writes import Writes, is_plain, tensors_in
from mucudnn.interruptions import interruption_of
from mucudnn.locks import ForkSafeLock

_NOTHING = contextlib.nullcontext()


_examining = ForkSafeLock()
"""Held by the one thread that examines a model: it changes what all share, such as filters of warnings."""

_PATIENCE_S = 60.0
"""Seconds after which a thread enters a model that is still being examined, which may wait for it."""


class _ThisThread(threading.local):
    examines = 0


_this_thread = _ThisThread()


def is_examining() -> bool:
    """Return whether this thread examines a model now: its calls compute nothing that counts."""
    return _this_thread.examines > 0


@contextlib.contextmanager
def examined(model: nn.Module) -> Iterator[None]:
    """Have this thread alone examine a model, and others that call it meanwhile wait before they enter it.

    It computes with stand-ins now, which would come out as their results. Who is inside already is not kept
    from anything, nor who calls a module of it. A model that `compile` has compiled has no door to wait at.
    """
    here = threading.get_ident()

    def wait(_module: nn.Module, _args: tuple[Any, ...]) -> None:
        if threading.get_ident() != here and _examining.acquire(timeout_s=_PATIENCE_S):
            _examining.release()

    is_closed = getattr(model, "_compiled_call_impl", None) is None and not isinstance(
        model, torch.jit.ScriptModule
    )
    with _examining, contextlib.ExitStack() as door:
        if is_closed:
            door.callback(model.register_forward_pre_hook(wait, prepend=True).remove)
        _this_thread.examines += 1
        try:
            yield
        finally:
            _this_thread.examines -= 1


def run_without_arithmetic(
    model: nn.Module,
    sample: CallArguments,
    stand_ins: StandIns,
    under: contextlib.AbstractContextManager[object] = _NOTHING,
) -> None:
    """Run the model on stand-ins for all tensors, its own parameters and buffers included.

    A tensor on the device "meta" stands for one where the model's first parameter lies. If the model raises
    an exception, that holds stand-ins, and so may functions' caches: whoever catches it has to `forget` them.

    Args:
        model: that is to run.
        sample: what it takes.
        stand_ins: none yet; those of this pass are made of it.
        under: a context for the model alone, such as a dispatcher, which sees stand-ins only.
    """
    try:
        with left_as_they_were(model.modules(), stand_ins.alive), random_state_kept(model):
            try:
                _run_on(stand_ins, model, sample, under)
            finally:
                stand_ins.put_back()
    except BaseException as error:
        if not isinstance(error, Exception) or interruption_of(error) is not None:
            clear_caches(stand_ins.alive())  # nobody goes on who would forget them
        raise
    forget(stand_ins.alive)


def _run_on(
    stand_ins: StandIns,
    model: nn.Module,
    sample: CallArguments,
    under: contextlib.AbstractContextManager[object],
) -> None:
    """Run the model in the mode of `stand_ins`, and leave what it has changed to the caller."""
    with (
        _disable_current_modes(),  # the caller's, which would count or replace what runs
        _uncompiled(),
        _quietly(),
        _uncached(),
        in_mode_of(model) as is_differentiated,
        out_of_inference_mode(model),
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
    ):
        home = home_of(model)
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        fakes: dict[str, Tensor] = {name: mode.from_tensor(tensor) for name, tensor in state.items()}
        made: dict[int, Tensor] = {}

        def stand_in(tensor: Tensor) -> Tensor:
            """Return the stand-in of a tensor; of one of inference mode, one as if it was made outside."""
            if tensor.is_meta:
                return _empty_like(tensor, home)
            if torch.is_inference_mode_enabled() or not (tensor.is_inference() and is_plain(tensor)):
                return mode.from_tensor(tensor)
            if id(tensor) not in made:  # a tensor that is passed twice stays one
                made[id(tensor)] = _empty_like(tensor, tensor.device)
            return made[id(tensor)]

        args, kwargs = tree_map_only(Tensor, stand_in, (sample.args, sample.kwargs))
        stand_ins.watch((fakes, args, kwargs))
        with (
            torch.set_grad_enabled(is_differentiated),
            unhooked(),
            _with_gradients_seen(),
            stand_ins,
            under,
        ):
            functional_call(model, fakes, args, kwargs)


def unhooked() -> contextlib.AbstractContextManager[object]:
    """Return a context in which no hook of the caller's sees what autograd saves.

    Checkpoints have such hooks: they would count what is saved here, and compute their block again.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:  # noqa: FBT003
        return _NOTHING
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, _as_it_is)  # a result would hold itself


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


@contextlib.contextmanager
def _with_gradients_seen() -> Iterator[None]:
    """Have reentrant checkpoints of this thread run as the others do, with gradients.

    Under no_grad, as they run else, nothing would show which gradients their backward pass computes.
    """
    here = threading.get_ident()
    function: type[Any] = CheckpointFunction
    former, apply = function.__dict__.get("apply"), function.apply

    def run_or_apply(run: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if threading.get_ident() != here:
            return apply(run, preserve_rng_state, *args)
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)

    function.apply = staticmethod(run_or_apply)
    try:
        yield
    finally:
        if former is None:
            del function.apply  # there is the inherited one again
        else:
            function.apply = former


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Have PyTorch log nothing of what stand-ins cannot compute: whoever runs it says what is wrong."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Have nothing compiled, in any thread: where Dynamo meets a mode it never compiles that code again.

    Importing it takes seconds, so that is left to those who need it, such as `torch.cond`; if a model does
    within the pass, what Dynamo has learnt there is forgotten.
    """
    if "torch._dynamo" not in sys.modules:
        try:
            yield
        finally:
            if "torch._dynamo" in sys.modules:
                torch.compiler.reset()
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(RuntimeError):  # this is called from what is being compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextlib.contextmanager
def _uncached() -> Iterator[None]:
    """Have autocast keep no weight in another type: it would keep stand-ins until its region ends."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()  # of what an autocast of the model's own has kept


def run_in_earnest(
    model: nn.Module,
    sample: CallArguments,
    under: contextlib.AbstractContextManager[object] = _NOTHING,
) -> None:
    """Run the model on a copy of the sample; what it writes to and keeps, and the random state, are put back.

    A tensor on the device "meta" stands for one of ones.

    Args:
        model: that is to run.
        sample: what it takes.
        under: a context for the model alone, such as a dispatcher.
    """
    with (
        _disable_current_modes(),
        _uncompiled(),
        _written_to(model.modules()) as writes,
        random_state_kept(model),
        in_mode_of(model) as is_differentiated,
        torch.set_grad_enabled(is_differentiated),
        unhooked(),
        _with_gradients_seen(),
    ):
        args, kwargs = _copied(sample, home_of(model))
        writes.own(_copies_in((args, kwargs), sample))
        with writes, under:
            model(*args, **kwargs)


@contextlib.contextmanager
def _written_to(modules: Iterable[nn.Module], changing: Iterable[nn.Module] = ()) -> Iterator[Writes]:
    """Yield a mode in which modules are to run; what they have written to and kept is put back.

    Args:
        modules: which are left as they were.
        changing: what these are made of in the end stays.
    """
    modules = [*modules]
    writes = Writes(modules)

    def alive() -> list[Tensor]:
        parts = (part for each in changing for part in each.modules())
        staying = {id(tensor) for part in parts for tensor in _own_tensors(part)}
        return [each for each in writes.alive() if id(each) not in staying]

    with left_as_they_were(modules, alive):
        try:
            yield writes
        finally:
            writes.put_back()


def make_parameters(model: nn.Module, sample: CallArguments) -> None:
    """Have lazy modules make their parameters by a pass over a copy of the sample, if there are any.

    What the others write to and keep, and the random state, are put back.
    """
    lazy = [each for each in model.modules() if any(map(is_lazy, _own_tensors(each)))]
    if not lazy:
        return
    changing = {part for each in lazy for part in each.modules()}
    others = [each for each in model.modules() if each not in changing]
    with (
        _disable_current_modes(),
        _uncompiled(),
        _written_to(others, lazy) as writes,
        random_state_kept(model),
        torch.no_grad(),
        unhooked(),
    ):
        args, kwargs = _copied(sample, home_of(model))
        writes.own(_copies_in((args, kwargs), sample))
        writes.leave(each for module in changing for each in _own_tensors(module) if not is_lazy(each))
        with writes:
            model(*args, **kwargs)
    for module in lazy:
        if isinstance(module, _NormBase):
            module.reset_running_stats()


def _copies_in(copied: object, sample: CallArguments) -> list[Tensor]:
    """Return the tensors in copied arguments that are not the sample's own."""
    given = {id(each) for each in tensors_in((sample.args, sample.kwargs))}
    return [each for each in tensors_in(copied) if id(each) not in given]


def _own_tensors(module: nn.Module) -> Iterable[Tensor]:
    return itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad
    )


def _copied(sample: CallArguments, home: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with a copy of every tensor: what a model changes in place is the user's."""
    copies: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:  # a tensor that is passed twice stays one: models may ask
            copies[id(tensor)] = _copy_of(tensor, home)
        return copies[id(tensor)]

    copied: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(Tensor, copy, (sample.args, sample.kwargs))
    return copied


def _copy_of(tensor: Tensor, home: torch.device) -> Tensor:
    if tensor.is_meta:
        with torch.no_grad():
            return _empty_like(tensor, home).fill_(1)
    if tensor.is_leaf:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    with torch.enable_grad():
        return tensor.clone()  # no leaf either: only then may it be changed in place
