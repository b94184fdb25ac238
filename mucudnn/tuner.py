"""Tuning: from a model and a limit to a plan, and from there to a patched model."""

import dataclasses
import os
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from mucudnn import patching
from mucudnn.backends import BACKENDS, Backend, backend_for
from mucudnn.errors import (
    BackendError,
    InfeasibleError,
    NothingToTuneError,
    OptionError,
    SampleError,
    UntunedWarning,
)
from mucudnn.extraction import CallArguments, Extraction, extract, wanted_ops
from mucudnn.functional import problems_of, undivided
from mucudnn.intervals import Verdict, compare
from mucudnn.plan import Assignment, ConvSite, Division, Evidence, Mode, Plan, Policy, choice
from mucudnn.problem import ConvProblem
from mucudnn.profile import Candidate, Comparison, Profile
from mucudnn.profiler import Profiler
from mucudnn.progress import Progress, progress_for
from mucudnn.sizes import parse_bytes
from mucudnn.solvers import (
    division_front,
    least_workspace_bytes,
    solve_reuse,
    solve_sharing,
)
from mucudnn.store import Store, open_store
from mucudnn.version import __version__

ProgressOption = bool | Progress | None


def optimize(
    model: nn.Module,
    workspace_limit: int | str,
    sample: object = None,
    *,
    mode: str = "reuse",
    policy: str = "power_of_two",
    ops: str | Collection[str] = "auto",
    backend: str = "auto",
    store: Store | str | os.PathLike[str] | None = None,
    progress: ProgressOption = None,
) -> nn.Module:
    """Tune `model`, patch it in place so that its convolutions run divided, and return it.

    Args:
        model: in the mode, training or eval, in which it will run, on the device where it will run.
        workspace_limit: an int of bytes, or a string with a unit ("64MiB"). In reuse mode each convolution
            may take that much, in sharing mode all together.
        sample: a tensor, a tuple of arguments, or a dict of keyword arguments, with the batch that the model
            will meet. Without one the model is armed: the first call that reaches it is the sample. Where
            that has nothing to tune, an UntunedWarning says so and the model runs as before.
        mode: "reuse" (one buffer serves all convolutions in turn) or "sharing" (each owns its part).
        policy: which micro-batch sizes are tried: "undivided", "power_of_two" or "all".
        ops: "auto" (all three in training mode, fprop alone in eval mode), or some of "fprop", "dgrad" and
            "wgrad".
        backend: "auto", or a backend's name.
        store: where profiles are kept: a file, a Store, or None for the default file.
        progress: None shows a bar on a terminal, True always, False never; or a `Progress` to be told.

    Raises:
        SizeError, OptionError: an argument cannot be read, or is none of the choices.
        SampleError: the model cannot be run on the sample, or has nothing to tune.
        InfeasibleError: nothing fits the limit; it names the convolution and a limit that would do.
        BackendError: nothing tunes on the model's device, or `backend` does not.
        StoreError: the store is damaged or newer than this version.
    """
    options: dict[str, Any] = {
        "mode": mode, "policy": policy, "ops": ops, "backend": backend, "store": store, "progress": progress
    }  # fmt: skip
    if sample is not None:
        return patching.apply(model, tune(model, sample, workspace_limit, **options))
    _Settings.of(workspace_limit, **options)
    return patching.arm(model, _FirstCall(workspace_limit, options))


def tune(
    model: nn.Module,
    sample: object,
    workspace_limit: int | str,
    *,
    mode: str = "reuse",
    policy: str = "power_of_two",
    ops: str | Collection[str] = "auto",
    backend: str = "auto",
    store: Store | str | os.PathLike[str] | None = None,
    progress: ProgressOption = None,
) -> Plan:
    """Return the plan for `model` on `sample`; the model is left untouched. For the rest see `optimize`."""
    settings = _Settings.of(
        workspace_limit, mode, policy, ops=ops, backend=backend, store=store, progress=progress
    )
    chosen = _backend_at(backend, _device_of(model))
    extraction = extract(model, sample, ops)
    own_store = not (store is None or isinstance(store, str | os.PathLike))
    opened = open_store(store)
    try:
        with progress_for(progress) as shown:
            profiler = Profiler(chosen, opened, settings.limit_bytes, settings.policy)
            return Tuning(profiler, settings.mode, extraction, shown).plan()
    finally:
        if not own_store:
            opened.close()


class _FirstCall:
    """What an armed model does on its first call: tune on its arguments and be patched.

    Where the call has nothing to tune, the model is disarmed, with a warning, and runs as before. Where
    tuning fails the model stays armed; arguments that the model rejects are left to its own error.
    """

    def __init__(self, workspace_limit: int | str, options: Mapping[str, Any]) -> None:
        self._workspace_limit = workspace_limit
        self._options = options

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        patching.restore(model)
        try:
            plan = tune(model, CallArguments(args, kwargs), self._workspace_limit, **self._options)
        except NothingToTuneError as error:
            warnings.warn(f"The model runs as before, untuned. {error}", UntunedWarning, stacklevel=2)
            return
        except SampleError:
            patching.arm(model, self)
            return
        except BaseException:
            patching.arm(model, self)
            raise
        patching.apply(model, plan)


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What the user asked for, read and checked."""

    limit_bytes: int
    mode: Mode
    policy: Policy

    @classmethod
    def of(
        cls,
        workspace_limit: int | str,
        mode: str,
        policy: str,
        *,
        ops: str | Collection[str],
        backend: str,
        store: object,
        progress: object,
    ) -> "_Settings":
        """Read and check all options, before any work is done.

        Raises:
            SizeError, OptionError: one of them cannot be read, or is none of the choices.
        """
        settings = cls(parse_bytes(workspace_limit), choice(Mode, mode), choice(Policy, policy))
        wanted_ops(ops, is_training=True)
        names = ("auto", *BACKENDS)
        if not isinstance(backend, str) or backend not in names:
            raise OptionError(f"backend must be one of {', '.join(map(repr, names))}, but got {backend!r}.")
        if not (store is None or isinstance(store, str | os.PathLike) or _offers(store, Store)):
            raise OptionError(f"store must be a path, a Store or None, but got {store!r}.")
        if not (progress is None or isinstance(progress, bool) or _offers(progress, Progress)):
            raise OptionError(f"progress must be True, False, None or a Progress, but got {progress!r}.")
        return settings


def _offers(value: object, protocol: type) -> bool:
    """Return whether `value` is an instance with all methods of `protocol`."""
    names = [name for name in vars(protocol) if not name.startswith("_")]
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in names)


def _backend_at(name: str, device: torch.device) -> Backend:
    chosen = backend_for(name, device)
    if device.type != chosen.device.type:
        raise BackendError(
            f"The backend {name!r} tunes models on {chosen.device.type}, but the model lies on {device}."
        )
    return chosen


def _device_of(model: nn.Module) -> torch.device:
    tensor = next(iter([*model.parameters(), *model.buffers()]), None)
    return torch.device("cpu") if tensor is None else tensor.device


class _Solution(NamedTuple):
    """What a solver chose for a site, and the candidates that fit into the same workspace."""

    division: Division
    fitting: Sequence[Candidate]


class Tuning:
    """One run of the tuner: what a model computes, and a profiler that measures it under a limit."""

    def __init__(self, profiler: Profiler, mode: Mode, extraction: Extraction, progress: Progress) -> None:
        """Collect the sites and their problems.

        Args:
            profiler: it has the limit and the policy.
            mode: whose the limit is.
            extraction: what the model computes.
            progress: who is told.
        """
        self._profiler = profiler
        self._mode = mode
        self._extraction = extraction
        self._progress = progress
        self._problems = {
            ConvSite(call.path, op, call.variant): problems_of(call.problem)[op]
            for call in extraction.calls
            for op in call.ops
        }
        self._done = 0

    def plan(self) -> Plan:
        """Profile, solve, confirm; return the checked plan."""
        distinct = list(dict.fromkeys(self._problems.values()))
        confirming = self._problems.values()
        self._progress.begin(sum(problem.flops for problem in (*distinct, *confirming)))
        profiles = {problem: self._profile(problem) for problem in distinct}
        solution = self._solve(profiles)
        confirmed: dict[tuple[ConvProblem, str], tuple[Division, Evidence]] = {}
        assignments = []
        for site, problem in self._problems.items():
            division, fitting = solution[site]
            key = (problem, division.key)
            if key not in confirmed:
                confirmed[key] = self._confirm(site, division, fitting, self._base(profiles[problem]))
            self._done += problem.flops
            chosen, evidence = confirmed[key]
            assignments.append(Assignment(site, problem, chosen, tuple(sorted(fitting)), evidence))
        plan = Plan(
            mode=self._mode,
            policy=self._profiler.policy,
            limit_bytes=self._profiler.limit_bytes,
            environment=dataclasses.replace(self._profiler.environment, soft={}),
            assignments=tuple(assignments),
            untouched=self._extraction.untouched,
            version=__version__,
        )
        plan.check()
        self._progress.end(self._profiler.measured)
        return plan

    def _profile(self, problem: ConvProblem) -> Profile:
        self._progress.at(f"profiling {problem}", self._done)
        profile = self._profiler.profile(problem)
        self._done += problem.flops
        return profile

    def _solve(self, profiles: Mapping[ConvProblem, Profile]) -> dict[ConvSite, _Solution]:
        """Return a division for every site, and the candidates that fit where it does."""
        self._check_feasible(profiles)
        if self._mode is Mode.SHARING:
            return self._solve_sharing(profiles)
        limit_bytes = self._profiler.limit_bytes
        solved = {
            problem: _Solution(
                solve_reuse(profile.candidates, problem.batch, limit_bytes), profile.candidates
            )
            for problem, profile in profiles.items()
        }
        return {site: solved[problem] for site, problem in self._problems.items()}

    def _solve_sharing(self, profiles: Mapping[ConvProblem, Profile]) -> dict[ConvSite, _Solution]:
        limit_bytes = self._profiler.limit_bytes
        fronts = {
            problem: division_front(profile.candidates, problem.batch, limit_bytes)
            for problem, profile in profiles.items()
        }
        divisions = solve_sharing(
            {site: fronts[problem] for site, problem in self._problems.items()}, limit_bytes
        )
        return {
            site: _Solution(division, _within(profiles[self._problems[site]].candidates, division))
            for site, division in divisions.items()
        }

    def _check_feasible(self, profiles: Mapping[ConvProblem, Profile]) -> None:
        """Raise an InfeasibleError if some batch has no division, or all divisions share too little.

        It names the site that needs most, and a limit with which all sites would do.
        """
        limit_bytes, is_sharing = self._profiler.limit_bytes, self._mode is Mode.SHARING
        leasts = {
            problem: least_workspace_bytes(profile.candidates, problem.batch)
            for problem, profile in profiles.items()
        }
        known = [least for problem in self._problems.values() if (least := leasts[problem]) is not None]
        if len(known) == len(self._problems) and (not is_sharing or sum(known) <= limit_bytes):
            return
        needs: dict[ConvSite, int] = {}
        for site, problem in self._problems.items():
            least = least_workspace_bytes(self._profiler.known_workspaces(problem), problem.batch)
            if least is None:
                raise InfeasibleError(limit_bytes, None, str(site))
            needs[site] = least
        neediest = max(needs, key=needs.__getitem__)
        least_bytes = sum(needs.values()) if is_sharing else needs[neediest]
        raise InfeasibleError(limit_bytes, least_bytes, str(neediest), is_sharing)

    def _base(self, profile: Profile) -> Division | None:
        """PyTorch's own convolution, undivided, if the limit allows to run it."""
        own = (each for each in profile.candidates if each.algorithm == self._profiler.own)
        return next((Division((each,)) for each in own if each.batch == profile.problem.batch), None)

    def _confirm(
        self, site: ConvSite, division: Division, fitting: Sequence[Candidate], base: Division | None
    ) -> tuple[Division, Evidence]:
        """Return what runs after all: PyTorch's own if it fits, unless something was seen to be faster.

        The rivals, in the order in which each must beat the best before it: PyTorch's own undivided, the
        best undivided candidate, the best division without PyTorch's own, the division. A base that does
        not fit the site's share is timed for comparison only. If all were seen to take more than the limit,
        whatever they declared, the best division with less workspace takes their place.
        """
        problem = self._problems[site]
        own = undivided(self._profiler.own, problem.batch).key
        self._progress.at(f"confirming {problem}", self._done)
        rivals = _rivals(problem, division, fitting, self._profiler.own)
        if base is not None:
            rivals = {base.key: base} | rivals
        comparison = self._profiler.compare(problem, list(rivals.values()))
        fits = base is None or base.parts[0] in fitting
        seen = {
            key: rival
            for key, rival in rivals.items()
            if key in comparison.times and (fits or rival is not base)
        }
        if not seen:
            less = [each for each in fitting if each.workspace_bytes < division.workspace_bytes]
            if least_workspace_bytes(less, problem.batch) is None:
                # In sharing mode that one would do says nothing about what all would need.
                seen_bytes = comparison.workspaces.values() if self._mode is Mode.REUSE else ()
                raise InfeasibleError(self._profiler.limit_bytes, min(seen_bytes, default=None), str(site))
            smaller = solve_reuse(less, problem.batch, division.workspace_bytes)
            return self._confirm(site, smaller, less, base)
        chosen = _winner(seen, comparison)
        errors = self._profiler.errors(problem)
        worst = max((errors.get((part.algorithm, part.batch), 0.0) for part in chosen.parts), default=0.0)
        return chosen, _evidence(chosen, comparison, own, worst)


def _within(candidates: Iterable[Candidate], division: Division) -> list[Candidate]:
    return [each for each in candidates if each.workspace_bytes <= division.workspace_bytes]


def _rivals(
    problem: ConvProblem, division: Division, fitting: Sequence[Candidate], own: str
) -> dict[str, Division]:
    """The best undivided candidate, the best division without PyTorch's own, and the division, by key.

    The second is there because profiles are quick and noisy: what was measured slow by chance gets a
    second chance.
    """
    rivals = []
    wholes = [each for each in fitting if each.batch == problem.batch]
    others = [each for each in fitting if each.algorithm != own]
    for candidates in (wholes, others):
        if least_workspace_bytes(candidates, problem.batch) is not None:
            most_bytes = max(each.workspace_bytes for each in candidates)
            rivals.append(solve_reuse(candidates, problem.batch, most_bytes))
    return {rival.key: rival for rival in (*rivals, division)}


def _winner(rivals: Mapping[str, Division], comparison: Comparison) -> Division:
    """The first rival, unless a later one is FASTER than the best before it."""
    best, *others = rivals
    for key in others:
        verdict = compare(comparison.times[best].samples_s, comparison.times[key].samples_s)
        if verdict is Verdict.FASTER:
            best = key
    return rivals[best]


def _evidence(chosen: Division, comparison: Comparison, own: str, error: float) -> Evidence:
    times = comparison.times
    reference = times.get(own)
    weights = comparison.workspaces
    return Evidence(
        reference=None if reference is None else reference.estimate,
        chosen=times[chosen.key].estimate,
        verdict=None if reference is None else compare(reference.samples_s, times[chosen.key].samples_s),
        reference_workspace_bytes=None if reference is None else weights.get(own),
        workspace_bytes=weights.get(chosen.key),
        error=error,
        rejected=tuple((key, times[key].estimate) for key in sorted(times) if key not in (own, chosen.key)),
    )
