"""Tuning: from a model and a limit to a plan, and from there to a patched model."""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from mucudnn.backends import Backend, backend_for
from mucudnn.choices import Mode
from mucudnn.convolutions.modules import check_is_module, tuned_device
from mucudnn.convolutions.surroundings import autocast_dtype, is_traced, watcher, without_autocast
from mucudnn.errors import (
    BackendError,
    InfeasibleError,
    NothingToTuneError,
    OptionError,
    SampleError,
    UntunedWarning,
    warn_user,
)
from mucudnn.examining.arguments import CallArguments
from mucudnn.examining.extraction import Extraction, extract
from mucudnn.examining.foreign import check_unscripted
from mucudnn.examining.passes import is_examining
from mucudnn.live.measurer import LiveMeasurer
from mucudnn.locks import ForkSafeLock
from mucudnn.patching import applying
from mucudnn.plan import Plan
from mucudnn.profiling.measurer import Measurer
from mucudnn.profiling.replay import replaying
from mucudnn.progress import ProgressOption, progress_for
from mucudnn.ranks import Picture, agreed, is_distributed
from mucudnn.store import MemoryStore, StoreOption, opened
from mucudnn.tuning.learning import Learner
from mucudnn.tuning.options import Settings
from mucudnn.tuning.run import Tuning


def optimize(
    model: nn.Module,
    workspace_limit: int | str,
    sample: object = None,
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
    dynamic: bool = False,
) -> nn.Module:
    """Tune `model`, patch it in place so that its convolutions run divided, and return it.

    Args:
        model: in the mode, training or eval, in which it will run, on the device where it will run.
        workspace_limit: an int of bytes, or a string with a unit ("64MiB"). In reuse mode each convolution
            may take that much, in sharing mode all together.
        sample: a tensor, a tuple or list of arguments, or a dict of keyword arguments, with the batch that
            the model will meet. Without one the model is armed: its first call is the sample. If that call
            has nothing to tune, the model runs as before, with an UntunedWarning. There is one, too, if the
            model was in training mode and its first call comes in eval mode, as in a validation. Where
            torch.compile has compiled a model like it before, that graph may run and tune nothing, without a
            word: give a sample then, or call torch.compiler.reset() before.
        mode: "reuse" (one buffer serves all convolutions in turn) or "sharing" (each owns its part).
        policy: which micro-batch sizes are tried: "undivided", "power_of_two" or "all".
        search: which algorithms are tried: "heuristic" (those that the device's library recommends, and
            enough others) or "exhaustive" (all that may win).
        max_error: the largest measured error of an algorithm that may be chosen, against a convolution in
            float64 of normal random values: relative, in the 2-norm, or more if few values are far off. In
            float32 it is some 2e-7 for PyTorch's own, which may always be chosen, and 3e-7 to 4e-6 for
            Winograd's. None leaves the backend's bound alone.
        ops: "auto" (all three in training mode, fprop alone in eval mode), or some of "fprop", "dgrad" and
            "wgrad". Gradients that the sample does not need, such as dgrad of the first layer where it does
            not require one, are left out in any case.
        backend: "auto", or a backend's name, but no recording: the patched model runs here.
        store: where profiles are kept: a file, a Store, or None for the default file.
        again: whether to forget what the store knows of these convolutions and measure them anew, for example
            because the machine was busy then.
        progress: None shows a bar on a terminal, and writes lines in a notebook; True does so too, and writes
            lines to standard error elsewhere; False shows nothing. Or a `Progress` to be told, which copies
            of the model leave out.
        dynamic: whether new shapes, and batches larger than the sample's, are tuned too when first met (in
            reuse mode, on one rank). Otherwise they run PyTorch's own convolution, with one warning.

    Raises:
        SizeError, OptionError: an argument cannot be read, or is none of the choices.
        SampleError: the model cannot be run on the sample, or has nothing to tune.
        InfeasibleError: nothing fits the limit; the error names the convolution and a limit that may do. An
            armed model raises it in its first call, a dynamic one in any call that meets a new shape.
        BackendError: no backend, or not the one that was asked for, tunes on the model's device.
        PlanMismatchError: ranks compute different things or in different environments (all of them raise it),
            or something that the plan runs cannot be compiled on this rank.
        StoreError: the store is damaged or newer than this version.
    """
    settings = Settings.of(
        workspace_limit, mode=mode, policy=policy, search=search, max_error=max_error, ops=ops,
        backend=backend, store=store, again=again, progress=progress,
    )  # fmt: skip
    settings.refuse_recording("optimize")
    learn = _learner(settings, dynamic)
    if sample is not None:
        plan = _plan(model, sample, settings)
        return applying.patch(model, plan, learn, is_for_inference=_is_for_inference(model, settings))
    check_is_module(model)
    check_unscripted(model)
    return applying.arm(model, _FirstCall(settings, learn, model.training))


def _is_for_inference(model: nn.Module, settings: Settings) -> bool:
    """Return whether gradients were not looked for, though nobody has said so."""
    return settings.ops == "auto" and not model.training


def _learner(settings: Settings, dynamic: bool) -> Learner | None:
    """Return what tunes shapes that are met later, if they are to be."""
    if not isinstance(dynamic, bool):
        raise OptionError(f"dynamic must be True or False, but got {dynamic!r}.")
    if not dynamic:
        return None
    if settings.mode is not Mode.REUSE:
        raise OptionError(
            f"dynamic must come with mode 'reuse', but got {settings.mode.value!r}: "
            "what is met later has no share of a total."
        )
    if is_distributed():
        raise OptionError(
            "dynamic must run on one rank, but there are several, which may meet different shapes."
        )
    return Learner(settings)


def tune(
    model: nn.Module,
    sample: object,
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
) -> Plan:
    """Return the plan for `model` on `sample`; the model is left untouched. For the rest see `optimize`.

    At the beginning the model is examined: other threads that call it wait, and none should be inside it.

    The backend "replay:FILE" measures nothing: a store that another machine has filled answers instead, and
    the plan is for that machine. "replay:FILE#2" takes the second of several environments in the store,
    "replay:NAME" a recording that comes with the package (`mucudnn info` lists them). All recorded algorithms
    are tried, whatever `search` says, and `store` is neither read nor written. Times of divisions that were
    never run as a whole are marked as predicted.

    Under torch.distributed all ranks have to call this: the first one tunes, and all get its plan.

    Raises:
        PlanMismatchError: some rank computes something else than the first one, or in another environment.
        BackendError: the recording never saw a problem or a size, or not under this limit.
        StoreError: the recording cannot be read.
    """
    settings = Settings.of(
        workspace_limit, mode=mode, policy=policy, search=search, max_error=max_error, ops=ops,
        backend=backend, store=store, again=again, progress=progress,
    )  # fmt: skip
    return _plan(model, sample, settings)


def _plan(model: nn.Module, sample: object, settings: Settings) -> Plan:
    """Return the plan for `model` on `sample`, as `tune` does."""
    check_is_module(model)
    # What a recording says stands there already, and predictions must not be taken for measurements.
    kept = opened(settings.store) if settings.recording is None else MemoryStore()
    # Whoever tunes under autocast wants problems in its type, and measurements of just these.
    device = tuned_device(model)
    plain = without_autocast(autocast_dtype(device))

    def make(measurer: Measurer, extraction: Extraction) -> Plan:
        """Return the plan for what was found, tuned in this process."""
        with plain, kept as found, progress_for(settings.progress) as shown:
            profiler = settings.profiler(measurer, found)
            tuning = Tuning(profiler, settings.mode, extraction, shown, may_be_frozen=True)
            if settings.again:
                tuning.forget()
            return tuning.plan()

    with contextlib.ExitStack() as stack:

        def look() -> tuple[Picture, Callable[[], Plan]]:
            """Return what there is to tune, and what tunes it; where that fails on one rank, all raise."""
            measurer = stack.enter_context(_measurer(settings, model))
            extraction = extract(model, sample, settings.ops).known_as(measurer.known_as)
            seen = Picture(extraction.problems, measurer.environment(), settings.asked)
            return seen, functools.partial(make, measurer, extraction)

        return agreed(look)


_IN_EVAL_MODE = (
    "The model was in training mode when optimize got it, but its first call came in eval mode: it is now "
    "tuned for forward passes only, and for batches no larger than that call's. To train it, optimize it "
    "with a sample, or call it in training mode first; for inference, call model.eval() before optimize."
)


_STAYS_ARMED = (
    "Each further call of the model tries to tune it again; mucudnn.restore(model) lets it run as before."
)

_CALL_FIRST = (
    "mucudnn.optimize without a sample tunes the model in its first call: call it once before exporting it "
    "or compiling it with fullgraph=True, or give optimize a sample"
)


class _FirstCall:
    """What an armed model does on its first call: tune on its arguments and be patched.

    If the call has nothing to tune, the model is disarmed, with a warning, and runs as before. If tuning
    fails, it stays armed. Arguments that the model rejects are left to its own error; if it rejects them only
    while it is examined, the second such call warns. Other threads that call the model meanwhile wait, and
    find it patched. On the meta device, and where it is captured, traced, transformed or seen by a dispatch
    mode, it stays armed; the second such call warns, since there may be no other kind.
    """

    def __init__(self, settings: Settings, learn: Learner | None, is_training: bool) -> None:
        _keep_uncompiled()
        self._settings = settings
        self._learn = learn
        self._is_training = is_training
        self._failures = 0
        self._watched = 0
        self._turn = ForkSafeLock()

    def __reduce__(self) -> tuple[type["_FirstCall"], tuple[Settings, Learner | None, bool]]:
        """Have copies and pickles begin anew."""
        return type(self), (self._settings, self._learn, self._is_training)

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_examining():
            return
        home = tuned_device(model)
        if home.type == "meta":  # where there are shapes alone
            self._stay_armed("while it lies on the meta device")
            return
        if is_traced():
            watched = watcher()
            self._stay_armed(None if watched is None else watched[1])
            return
        if self._is_captured(home):
            self._stay_armed("while it is captured in a CUDA graph")
            return
        with self._turn:
            if applying.is_armed(model):  # else it has waited until it was tuned
                self._tune(model, CallArguments(args, kwargs))

    def _is_captured(self, device: torch.device) -> bool:
        """Return whether the call is captured in a CUDA graph; that nobody serves the device tuning says."""
        try:
            return _backend_at(self._settings.backend, device).is_capturing
        except (BackendError, OptionError):
            return False

    def _stay_armed(self, where: str | None) -> None:
        """Wait for a call elsewhere; the second one of those that say where they are is told."""
        if where is None:
            return
        self._watched += 1
        if self._watched == 2:
            warn_user(
                f"The model runs as before, untuned, because it is called {where}; the first call elsewhere "
                "tunes it.",
                UntunedWarning,
            )

    def _tune(self, model: nn.Module, sample: CallArguments) -> None:
        try:
            plan = _plan(model, sample, self._settings)
        except NothingToTuneError as error:
            applying.restore(model)
            warn_user(f"The model runs as before, untuned. {error}", UntunedWarning)
        except SampleError as error:  # the model says so itself, right after this, or it is examined in vain
            self._failures += 1
            if self._failures == 2:
                warn_user(
                    f"The model runs as before, untuned, and each call tries to tune it again. {error}",
                    UntunedWarning,
                )
        except InfeasibleError as error:
            error.add_note(_STAYS_ARMED)
            raise
        else:
            is_for_inference = _is_for_inference(model, self._settings)
            is_surprise = is_for_inference and self._is_training
            applying.patch(model, plan, self._learn, is_for_inference=is_for_inference and not is_surprise)
            if is_surprise:
                warn_user(_IN_EVAL_MODE, UntunedWarning)


@functools.cache
def _keep_uncompiled() -> None:
    """Have the tuner not be compiled with the models whose first calls run it.

    That loads Dynamo, which takes a second: not for those who only apply plans.
    """
    _FirstCall.__call__ = torch.compiler.disable(_FirstCall.__call__, reason=_CALL_FIRST)  # type: ignore[method-assign]


@contextlib.contextmanager
def _measurer(settings: Settings, model: nn.Module) -> Iterator[Measurer]:
    """Yield who measures: the recording that is named, or the device where the model lies."""
    if settings.recording is None:
        yield LiveMeasurer(_backend_at(settings.backend, tuned_device(model)))
    else:
        with replaying(settings.recording) as replay:
            yield replay


def _backend_at(name: str, device: torch.device) -> Backend:
    chosen = backend_for(name, device)
    if device.type != chosen.device.type:
        raise BackendError(
            f"The backend {name!r} tunes models on {chosen.device.type}, but the model lies on {device}."
        )
    return chosen
