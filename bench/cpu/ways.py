"""Measuring a network in several ways of PyTorch's own, and patched: the fastest of both decide.

Choosing rounds of all ways name the fastest patched one. Fresh rounds of it, of its unpatched twin, of
PyTorch as it comes and of those of PyTorch's own that choosing did not tell apart from their fastest prove:
the base is the fastest of PyTorch's own in these rounds, which favours it. A copy of the fastest runs
beside them, since copies differ too: by where their weights lie. Layouts, torch.compile and division are
measured together, since gains that are measured apart do not add up. Whether what a tuner found of single
convolutions comes true within their model is told of each by `bench.cpu.within`, for inference.
"""

import copy
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bench.cpu.process import reason_of
from bench.cpu.rounds import Rounds
from bench.cpu.step_cases import LIMIT_BYTES
from bench.cpu.step_lines import Tuned
from bench.cpu.step_models import ReadingStep, Recipe, prepared
from bench.cpu.steps import tuned
from bench.cpu.way_cases import AS_IT_COMES, Form, Use, Way, WayCase, ways_of
from bench.cpu.way_lines import COPY, OWN, PATCHED, WayMeasured, Within
from bench.cpu.within import within
from bench.differences import largest
from mucudnn import Plan, apply
from mucudnn.algorithms.base import memory_format
from mucudnn.backends import Backend, backend_of
from mucudnn.intervals import Estimate, estimate
from mucudnn.problem import Layout
from mucudnn.timing import SamplingRule

CHOOSING = SamplingRule(looks=(10,), precision=0.01, warmups=1)

_FEWEST_ROUNDS, _MOST_ROUNDS = 15, 400
"""Of proving: with 400 a 99th percentile can be told."""

_PROVING_S = 150.0
"""Seconds that proving rounds may take, as long as there are not too few."""

_MOST_RIVALS = 3
"""Of PyTorch's own that are proven, beside PyTorch as it comes and the twin."""

_LARGEST_ERROR = 1e-3
"""Beyond this a way is wrong: rounding of float32 comes to 1e-5 or so in scores, to more in a second loss."""

_LARGEST_ERROR_OF_OWN = 1e-2
"""The same of PyTorch as it comes in training: ResNet-50's first step on eight images makes a rounding 2e-3
of a loss."""

_TIMES_OWN = 10.0
"""Others may be so many times as far where that is more: inductor's own is 7e-3 off there. Such a loss tells
little: with the gradient of one of ResNet-50's layers doubled it is 1e-3 to 1e-2 off. That single gradients
are right, tuning and the tests see."""

_STEPS = 2
"""Whose losses are compared: wrong gradients show in the second one. Rounding grows from step to step."""

_RECOMPILE_LIMIT = 64
"""Graphs that Dynamo may make of one code: each way is a model of its own."""

Result = TypeVar("Result")


class Scoring:
    """The forward pass of a model in evaluation mode, on the first images, without gradients."""

    def __init__(self, recipe: Recipe, batch: int, layout: Layout) -> None:
        """Take a recipe whose model is in that layout."""
        self.model = recipe.model.eval().requires_grad_(requires_grad=False)
        self.images = recipe.images[:batch].contiguous(
            memory_format=memory_format(layout, recipe.images.dim())
        )

    def result(self) -> Tensor:
        """Return the scores, shape (n, classes[, h, w])."""
        with torch.no_grad():
            scores: Tensor = self.model(self.images)
        return scores

    def __call__(self) -> None:
        """Run it."""
        self.result()


class Training:
    """A training step, with the losses of the first ones as the result."""

    def __init__(self, step: ReadingStep) -> None:
        self.step = step

    @property
    def model(self) -> nn.Module:
        """What is trained."""
        return self.step.model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self.step.model = model

    @property
    def images(self) -> Tensor:
        """The next batch."""
        return self.step.read()[0]

    def result(self) -> Tensor:
        """Run the first steps; return the mean cross-entropy before each, in nats, shape (steps,)."""
        losses = []
        for _ in range(_STEPS):
            self.step()
            losses.append(self.step.loss)
        return torch.tensor(losses, dtype=torch.float64)

    def __call__(self) -> None:
        """Run the step.

        Raises:
            ValueError: the loss is no number or infinite, so that times would tell nothing.
        """
        self.step()
        if not math.isfinite(self.step.loss):
            raise ValueError(f"The loss must be finite, but got {self.step.loss}.")


Runner = Scoring | Training


@dataclasses.dataclass(frozen=True)
class Subject:
    """A network in one layout.

    Attributes:
        case: what it is run for.
        layout: of images and filters.
        recipe: its model in that layout.
    """

    case: WayCase
    layout: Layout
    recipe: Recipe

    def runner(self, plan: Plan | None = None, *, is_double: bool = False) -> Runner:
        """Return what runs a copy of the model, patched by `plan` if there is one."""
        model, images, batch = copy.deepcopy(self.recipe.model), self.recipe.images, self.case.batch
        if is_double:
            model, images = model.double(), images.double()
        recipe = Recipe(model, images, self.recipe.targets, batch)
        is_training = self.case.use is Use.TRAINING
        runner = (
            Training(ReadingStep(recipe, self.layout)) if is_training else Scoring(recipe, batch, self.layout)
        )
        if plan is not None:
            apply(model, plan)
        return runner


def measure(case: WayCase, recipe: str, folder: Path) -> WayMeasured:
    """Return what is found of a network in all ways.

    Args:
        case: which.
        recipe: `module:function` that returns a `bench.cpu.step_models.Recipe`.
        folder: where profiles and plans are kept; profiles of an earlier run are used.

    Raises:
        MucudnnError: the network cannot be tuned.
        RuntimeError: it cannot be run as it comes.
        ValueError: as it comes its results are wrong, or no numbers; or a loss is, later.
    """
    start = time.perf_counter()
    torch._dynamo.config.recompile_limit = _RECOMPILE_LIMIT
    backend = backend_of("cpu:")
    subjects = {layout: Subject(case, layout, prepared(recipe, layout).recipe) for layout in Layout}
    shape, plans, costs = _tuned(subjects, folder / str(case).replace(" ", "_"))
    runs = Runs(subjects, plans)
    choosing = Rounds.timed(
        {str(way): call for way, call in runs.calls.items()}, CHOOSING, backend.neighbours()
    )
    times = {way: estimate(choosing.samples_s(str(way))) for way in runs.calls}
    divided = min((way for way in times if way.is_divided), key=lambda way: times[way].median, default=None)
    owns = _not_told_apart({way: seen for way, seen in times.items() if not way.is_divided})
    rivals = dict.fromkeys((*owns, AS_IT_COMES, *(() if divided is None else (divided.unpatched, divided))))
    calls = {str(way): runs.calls[way] for way in rivals if way in runs.calls}
    calls[COPY] = runs.made(owns[0])
    runs.calls.clear()
    rule = _proving_rule(sum(times[way].median for way in (*rivals, owns[0]) if way in times))
    proving = Rounds.timed(calls, rule, backend.neighbours())
    calls.clear()
    return WayMeasured(
        case=case,
        shape=shape,
        limit_bytes=LIMIT_BYTES,
        tuned=costs,
        errors={str(way): error for way, error in runs.errors.items()},
        choosing=choosing,
        divided=None if divided is None else str(divided),
        proving=proving,
        copied=str(owns[0]),
        failed={str(way): why for way, why in runs.failed.items()},
        within=tuple(_within_models(subjects, plans, backend)),
        seconds=time.perf_counter() - start,
    )


def _within_models(
    subjects: Mapping[Layout, Subject], plans: Mapping[Layout, Plan], backend: Backend
) -> Iterator[Within]:
    """Yield each convolution that a plan patches for inference, within the models of its layout."""
    for layout, plan in plans.items():
        if subjects[layout].case.use is Use.INFERENCE:
            runners = {OWN: subjects[layout].runner(), PATCHED: subjects[layout].runner(plan)}
            models = {name: runner.model for name, runner in runners.items()}
            yield from within(runners, models, plan, str(layout), backend)


def _tuned(
    subjects: Mapping[Layout, Subject], path: Path
) -> tuple[tuple[int, ...], dict[Layout, Plan], dict[str, Tuned]]:
    """Tune a network in each layout; return the shape of its images, plans that patch it, and all costs."""
    shape: tuple[int, ...] = ()
    plans, costs = {}, {}
    for layout, subject in subjects.items():
        runner = subject.runner()
        images = runner.images
        plan, cost = tuned(runner.model, images, path.with_name(f"{path.name}_{layout}"))
        shape, costs[str(layout)] = tuple(images.shape), cost
        if cost.kept < len(cost.runs):
            plans[layout] = plan
    return shape, plans, costs


class Runs:
    """A network made to run in all ways, each a model of its own.

    Attributes:
        calls: what is to be timed, of ways that run and are right.
        errors: how far their results are from float64, relative to the largest.
        failed: why others do not run, or are wrong.
    """

    def __init__(self, subjects: Mapping[Layout, Subject], plans: Mapping[Layout, Plan]) -> None:
        """Make all ways; those of a patched model where there is a plan.

        Args:
            subjects: the network in each layout.
            plans: by layout.
        """
        self._subjects = subjects
        self._plans = plans
        base = subjects[AS_IT_COMES.layout]
        self._exact = base.runner(is_double=True).result()
        self.calls: dict[Way, Callable[[], None]] = {}
        self.errors: dict[Way, float] = {}
        self.failed: dict[Way, str] = {}
        for way in ways_of(base.case.use):
            if not way.is_divided or way.layout in plans:
                self._add(way)

    def _add(self, way: Way) -> None:
        start = time.perf_counter()
        try:
            self.calls[way] = self.made(way)
        except Exception as error:  # whatever a compiler raises
            if way == AS_IT_COMES:
                raise
            self.failed[way] = reason_of(error)
        print(f"  {way}: {self.failed.get(way, f'ready in {time.perf_counter() - start:.0f} s')}", flush=True)

    def made(self, way: Way) -> Callable[[], None]:
        """Return the call of a way in a model of its own, which has run.

        Raises:
            ValueError: its results are wrong.
            Exception: whatever a compiler raises.
        """
        runner = self._subjects[way.layout].runner(self._plans[way.layout] if way.is_divided else None)
        result = _first(runner, way.form)
        error = largest([((result.double() - self._exact).abs().max() / self._exact.abs().max()).item()])
        own = None if way == AS_IT_COMES else self.errors[AS_IT_COMES]
        if error > largest_error(self._subjects[way.layout].case.use, own):
            raise ValueError(f"Its results must be those of float64, but are {error:.0e} off.")
        self.errors.setdefault(way, error)
        return functools.partial(_within, way.form, runner)


def largest_error(use: Use, own: float | None) -> float:
    """Return how far from float64 results may be, relative to the largest.

    Args:
        use: what the network is run for; scores multiply no rounding.
        own: how far those of PyTorch as it comes are; None for these themselves.
    """
    if use is Use.INFERENCE:
        return _LARGEST_ERROR
    return _LARGEST_ERROR_OF_OWN if own is None else max(_LARGEST_ERROR, _TIMES_OWN * own)


def _first(runner: Runner, form: Form) -> Tensor:
    """Run for the first time, compiled if it is to be; return the result.

    Dynamo asks the global setting whether parameters are constants; by options alone nothing is frozen. The
    options are there all the same: who has others shares no graph. Shapes are what they are, as for a user
    who compiles one model, though ways before have had other strides.
    """
    if form not in (Form.COMPILED, Form.FROZEN):
        return _within(form, runner.result)
    is_frozen = form is Form.FROZEN
    compiled = torch.compile(runner.model, dynamic=False, options={"freezing": is_frozen})
    assert isinstance(compiled, nn.Module)
    runner.model = compiled
    with torch._inductor.config.patch(freezing=is_frozen):
        return runner.result()


def _within(form: Form, call: Callable[[], Result]) -> Result:
    if form is not Form.WITHOUT_ONEDNN:
        return call()
    switch: Any = torch.backends.mkldnn  # whose own context warns of graphics cards
    switch.enabled = False
    try:
        return call()
    finally:
        switch.enabled = True


def _not_told_apart(times: Mapping[Way, Estimate]) -> list[Way]:
    """Return the fastest way, and the next ones whose intervals reach down to its own."""
    ordered = sorted(times, key=lambda way: times[way].median)
    return [way for way in ordered if times[way].low <= times[ordered[0]].high][:_MOST_RIVALS]


def _proving_rule(round_s: float) -> SamplingRule:
    """Return a rule of as many rounds as there is time for, none left out because the others agree."""
    rounds = math.floor(_PROVING_S / max(round_s, 1e-9))
    return SamplingRule((min(max(rounds, _FEWEST_ROUNDS), _MOST_ROUNDS),), precision=0.01, warmups=1)
