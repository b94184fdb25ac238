"""Measuring a training step: tune the network, patch copies of it, and time all in the same rounds.

What proves is the whole step alone: reading the batch, forward, loss, backward and update. Its rounds are
none of those in which the tuner chose.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bench.cpu.rounds import Rounds
from bench.cpu.settings import SETTINGS
from bench.cpu.step_again import AgainTask, rounds_again
from bench.cpu.step_cases import LIMIT_BYTES, Network
from bench.cpu.step_lines import DIVIDED, OWN, UNDIVIDED, SiteTime, StepCase, StepMeasured, Tuned
from bench.cpu.step_models import ReadingStep, prepared
from bench.cpu.step_rounds import timed
from bench.cpu.using import casting_in
from bench.steps import TrainingStep, copy_of, differences, double
from mucudnn import apply, tune
from mucudnn.backends import Backend, Job, backend_of
from mucudnn.errors import BackendError, InfeasibleError
from mucudnn.plan import Assignment, Plan
from mucudnn.store import Store, open_store

_UNCAPPED = 1 << 50


def measure(case: StepCase, network: Network, folder: Path, processes: int) -> StepMeasured:
    """Return what is found of a training step.

    Args:
        case: its layout counts, and its name for files.
        network: of the case.
        folder: where profiles and plan are kept; profiles of an earlier run are used.
        processes: in how many the steps are timed, this one among them.

    Raises:
        MucudnnError: the network cannot be tuned.
        RuntimeError: a call has failed, for example for want of memory.
        ValueError: a loss is no number or infinite, so that times would tell nothing.
    """
    start = time.perf_counter()
    backend = backend_of("cpu:")
    casting = casting_in(case.setting)
    own = prepared(network.recipe, case.layout, casting)
    sample, targets = own.copy().read()
    place = folder / str(case).replace(" ", "_")
    limit_bytes = SETTINGS[case.setting].limit_bytes or network.limit_bytes
    with casting:
        plan, cost = tuned(own.model, sample, place, limit_bytes)
        plans = {DIVIDED: plan, **_undivided(own.model, sample, place, plan)}
    steps = {OWN: own, **{name: own.copy() for name in plans}}
    for name, each in plans.items():
        apply(steps[name].model, each)
    single, present = (TrainingStep(steps[name].copy().model, sample, targets) for name in (OWN, DIVIDED))
    with casting:
        changed, rounding = differences(present, copy_of(single)), differences(single, double(single))
    rounds = timed(steps, backend.neighbours())
    shares = _shares(own)
    files = {name: str(_plan_file(place, name)) for name in plans}
    again = _again(case, network, files, place.with_name(f"{place.name}.rounds.json"), processes)
    payload = {"recipe": network.recipe, "layout": str(case.layout), "setting": case.setting}
    return StepMeasured(
        case=case,
        batch=own.batch,
        limit_bytes=limit_bytes,
        tuned=cost,
        rounds=rounds,
        convolutions=shares.convolutions,
        reading=shares.reading,
        difference=changed.outputs,
        own_bytes=_weight(backend, {**payload, "plan": None}),
        divided_bytes=_weight(backend, {**payload, "plan": plan.to_text()}),
        seconds=time.perf_counter() - start,
        differences=changed,
        rounding=rounding,
        again=again,
    )


def _undivided(model: nn.Module, sample: torch.Tensor, path: Path, plan: Plan) -> dict[str, Plan]:
    """Return the plan without micro-batches, by its name; none if `plan` has none or nothing else fits."""
    if all(each.division.is_undivided for each in plan.assignments):
        return {}
    try:
        with _opened(path) as store:
            found = tune(model, sample, plan.limit_bytes, policy="undivided", store=store, progress=False)
    except InfeasibleError as error:
        print(f"not timed undivided: {error}", flush=True)
        return {}
    found.save(_plan_file(path, UNDIVIDED))
    return {UNDIVIDED: found}


def _again(
    case: StepCase, network: Network, plans: Mapping[str, str], answer: Path, processes: int
) -> tuple[Rounds, ...]:
    """Return the rounds of the other processes but those that failed; models change places in turn."""
    found = (
        rounds_again(AgainTask(case, network, plans, patches_first=number % 2 == 1, rounds=str(answer)))
        for number in range(1, processes)
    )
    return tuple(rounds for rounds in found if rounds is not None)


def tuned(
    model: nn.Module, sample: torch.Tensor, path: Path, limit_bytes: int = LIMIT_BYTES
) -> tuple[Plan, Tuned]:
    """Tune a model; `path` is where to keep profiles and plan, without the files' endings."""
    with _opened(path) as store:
        known, peak, start = store.count(), _peak_bytes(), time.perf_counter()
        plan = tune(model, sample, limit_bytes, store=store, progress=False)
        seconds = time.perf_counter() - start
        trials = store.count() - known
    plan.save(_plan_file(path, DIVIDED))
    seen = [each.evidence.workspace_bytes for each in plan.assignments if each.evidence is not None]
    return plan, Tuned(
        seconds=seconds,
        known=known,
        trials=trials,
        grown_bytes=_peak_bytes() - peak,
        runs={str(site): division.key for site, division in plan.sites.items()},
        kept=_kept(plan),
        untouched=tuple(f"{path}: {reason}" for path, reason in plan.untouched),
        seen_bytes=max((n_bytes for n_bytes in seen if n_bytes is not None), default=None),
        times=tuple(_time_of(assigned) for assigned in plan.assignments),
    )


def _opened(path: Path) -> Store:
    """Open the profiles of a case."""
    return open_store(path.with_name(f"{path.name}.sqlite3"))


def _plan_file(path: Path, name: str) -> Path:
    """Return where the plan of the step of that name is kept."""
    return path.with_name(f"{path.name}.{name}.json")


def _time_of(assigned: Assignment) -> SiteTime:
    seen = assigned.evidence
    before, now = (None, None) if seen is None else (seen.reference, seen.chosen)
    return SiteTime(
        assigned.site.place,
        assigned.site.op,
        None if before is None else before.median,
        None if now is None else now.median,
    )


def _kept(plan: Plan) -> int:
    """Return at how many sites PyTorch's own convolution runs as it did before."""
    return sum(each.division.is_own for each in plan.assignments)


def _peak_bytes() -> int:
    """Return the most resident memory that this process has had, as the kernel tells it."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 2**10 for line in lines if line.startswith("VmHWM"))


class _Shares(NamedTuple):
    """Shares of one step, from 0 to 1."""

    convolutions: float
    reading: float


def _shares(step: ReadingStep) -> _Shares:
    """Run a step, with a clock at each convolution and at reading the batch."""
    start = time.perf_counter()
    batch = step.read()
    reading = time.perf_counter() - start
    with _ConvolutionClock() as clock:
        step.train(*batch)
    whole = time.perf_counter() - start
    return _Shares(clock.seconds / whole, reading / whole)


class _ConvolutionClock(TorchDispatchMode):
    """Adds up the seconds of PyTorch's convolutions, forward and backward."""

    _WATCHED = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.seconds = 0.0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        if func in self._WATCHED:
            self.seconds += time.perf_counter() - start
        return result


def _weight(backend: Backend, payload: dict[str, object]) -> int | None:
    """Return the peak memory of a step in a process of its own; None, and the reason told, if unknown."""
    try:
        return backend.footprint(Job("bench.cpu.step_models:WeighedStep", payload), _UNCAPPED)
    except BackendError as error:
        print(f"not weighed: {error}", flush=True)
        return None
