"""Measuring a network in every way that PyTorch has, and patched: the fastest of both decide.

Choosing rounds of all ways name the fastest patched one and the fastest of PyTorch's own. Fresh rounds of
these, of PyTorch as it comes and of the patched one's unpatched twin prove: the base is the fastest of the
last three in these rounds, which favours it. Layouts, torch.compile and division are measured together, since
gains that are measured apart do not add up.
"""

import copy
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bench.cpu.rounds import Rounds
from bench.cpu.step_cases import LIMIT_BYTES
from bench.cpu.step_lines import Tuned
from bench.cpu.step_models import FORMATS, ReadingStep, Recipe, prepared
from bench.cpu.steps import tuned
from bench.cpu.way_cases import AS_IT_COMES, Form, Use, WayCase, ways_of
from bench.cpu.way_lines import WayMeasured, is_patched, unpatched
from bench.differences import largest
from mucudnn import Plan, apply
from mucudnn.backends import Backend, backend_of
from mucudnn.problem import Layout
from mucudnn.timing import SamplingRule

CHOOSING = SamplingRule(looks=(7,), precision=0.01, warmups=1)

_FEWEST_ROUNDS, _MOST_ROUNDS = 15, 300
"""Of proving: with 300 a 99th percentile can be told."""

_PROVING_S = 150.0
"""Seconds that proving rounds may take, as long as there are not too few."""

_RECOMPILE_LIMIT = 64
"""Graphs that Dynamo may make of one code: each way is a model of its own."""

_FREEZING: dict[str, str | int | bool | Callable[..., Any]] = {"freezing": True}

Result = TypeVar("Result")


class Scoring:
    """The forward pass of a model in evaluation mode, on the first images, without gradients."""

    def __init__(self, recipe: Recipe, batch: int, layout: Layout) -> None:
        """Take a recipe whose model is in that layout."""
        self.model = recipe.model.eval().requires_grad_(requires_grad=False)
        self.images = recipe.images[:batch].contiguous(memory_format=FORMATS[layout])

    def result(self) -> Tensor:
        """Return the scores, shape (n, classes[, h, w])."""
        with torch.no_grad():
            scores: Tensor = self.model(self.images)
        return scores

    def __call__(self) -> None:
        """Run it."""
        self.result()


class Training:
    """A training step, with its loss as the result."""

    def __init__(self, step: ReadingStep) -> None:
        self.step = step

    @property
    def model(self) -> nn.Module:
        """What is trained."""
        return self.step.model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self.step.model = model

    def result(self) -> Tensor:
        """Run the step; return the mean cross-entropy before it, in nats, shape ()."""
        self.step()
        return torch.tensor(self.step.loss, dtype=torch.float64)

    def __call__(self) -> None:
        """Run the step."""
        self.step()


Runner = Scoring | Training


@dataclasses.dataclass(frozen=True)
class _Subject:
    """A network in one layout.

    Attributes:
        recipe: its model in that layout.
        layout: of images and filters.
        case: what it is run for.
    """

    recipe: Recipe
    layout: Layout
    case: WayCase

    @classmethod
    def of(cls, recipe: str, layout: Layout, case: WayCase) -> "_Subject":
        return cls(prepared(recipe, layout).recipe, layout, case)

    def runner(self, plan: Plan | None = None, *, is_double: bool = False) -> Runner:
        """Return what runs a copy of the model, patched by `plan` if there is one."""
        model, images = copy.deepcopy(self.recipe.model), self.recipe.images
        if is_double:
            model, images = model.double(), images.double()
        recipe = dataclasses.replace(self.recipe, model=model, images=images, batch=self.case.batch)
        is_training = self.case.use is Use.TRAINING
        runner = (
            Training(ReadingStep(recipe, self.layout))
            if is_training
            else Scoring(recipe, self.case.batch, self.layout)
        )
        if plan is not None:
            apply(model, plan)
        return runner

    def sample(self) -> tuple[nn.Module, Tensor]:
        """Return the model as it is to be tuned, and a batch for it."""
        runner = self.runner()
        return runner.model, runner.images if isinstance(runner, Scoring) else runner.step.read()[0]


def measure(case: WayCase, recipe: str, folder: Path) -> WayMeasured:
    """Return what is found of a network in all ways.

    Args:
        case: which.
        recipe: `module:function` that returns a `bench.cpu.step_models.Recipe`.
        folder: where profiles and plans are kept; profiles of an earlier run are used.

    Raises:
        MucudnnError: the network cannot be tuned.
        RuntimeError: it cannot be run as it comes, or in no patched way.
    """
    start = time.perf_counter()
    torch._dynamo.config.recompile_limit = _RECOMPILE_LIMIT
    backend = backend_of("cpu:")
    subjects = {layout: _Subject.of(recipe, layout, case) for layout in Layout}
    plans, known = _plans(subjects, backend, folder / str(case).replace(" ", "_"))
    exact = subjects[AS_IT_COMES.layout].runner(is_double=True).result()
    calls, ready_s, errors, failed = _made(subjects, plans, exact)
    shape = tuple(subjects[AS_IT_COMES.layout].sample()[1].shape)
    choosing = Rounds.timed(calls, CHOOSING, backend.neighbours())
    own, divided = (_fastest(choosing, calls, is_divided=flag) for flag in (False, True))
    proven = dict.fromkeys((str(AS_IT_COMES), own, unpatched(divided), divided))
    rivals = {way: calls[way] for way in proven if way in calls}
    calls.clear()
    rule = _proving_rule(sum(statistics.median(choosing.samples_s(way)) for way in rivals))
    return WayMeasured(
        case=case,
        shape=shape,
        limit_bytes=LIMIT_BYTES,
        tuned=known,
        ready_s=ready_s,
        errors=errors,
        choosing=choosing,
        divided=divided,
        proving=Rounds.timed(rivals, rule, backend.neighbours()),
        failed=failed,
        seconds=time.perf_counter() - start,
    )


def _plans(
    subjects: Mapping[Layout, _Subject], backend: Backend, path: Path
) -> tuple[dict[Layout, Plan], dict[str, Tuned]]:
    """Tune a network in each layout; return the plans, and what they cost."""
    plans, costs = {}, {}
    for layout, subject in subjects.items():
        model, sample = subject.sample()
        beside = path.with_name(f"{path.name}_{layout}")
        plans[layout], costs[str(layout)] = tuned(model, sample, backend, beside)
    return plans, costs


def _made(
    subjects: Mapping[Layout, _Subject], plans: Mapping[Layout, Plan], exact: Tensor
) -> tuple[dict[str, Callable[[], None]], dict[str, float], dict[str, float], dict[str, str]]:
    """Make all ways; return their calls, the seconds of the first, its error, and why others failed."""
    (case,) = {subject.case for subject in subjects.values()}
    calls: dict[str, Callable[[], None]] = {}
    ready_s: dict[str, float] = {}
    errors: dict[str, float] = {}
    failed: dict[str, str] = {}
    for way in ways_of(case.use):
        runner = subjects[way.layout].runner(plans[way.layout] if way.is_divided else None)
        _prepare(runner, way.form)
        start = time.perf_counter()
        try:
            result = _within(way.form, runner.result)
        except Exception as error:  # whatever a compiler raises
            if way == AS_IT_COMES:
                raise
            failed[str(way)] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            continue
        ready_s[str(way)] = time.perf_counter() - start
        errors[str(way)] = _distance(result, exact)
        calls[str(way)] = functools.partial(_within, way.form, runner)
        print(f"  {way}: ready in {ready_s[str(way)]:.0f} s", flush=True)
    return calls, ready_s, errors, failed


def _prepare(runner: Runner, form: Form) -> None:
    if form in (Form.COMPILED, Form.FROZEN):
        compiled = torch.compile(runner.model, options=_FREEZING if form is Form.FROZEN else None)
        assert isinstance(compiled, nn.Module)
        runner.model = compiled


def _within(form: Form, call: Callable[[], Result]) -> Result:
    if form is not Form.WITHOUT_ONEDNN:
        return call()
    switch: Any = torch.backends.mkldnn  # whose own context warns of graphics cards
    switch.enabled = False
    try:
        return call()
    finally:
        switch.enabled = True


def _distance(result: Tensor, exact: Tensor) -> float:
    """Return how far a result is from the exact one, relative to the largest value of that."""
    return largest([((result.double() - exact).abs().max() / exact.abs().max()).item()])


def _fastest(rounds: Rounds, ways: Iterable[str], *, is_divided: bool) -> str:
    """Return the way of the least median among the patched ones, or among the others.

    Raises:
        RuntimeError: there is none.
    """
    able = [way for way in ways if is_patched(way) is is_divided]
    if not able:
        raise RuntimeError("A network must run in some patched way, but it runs in none.")
    return min(able, key=lambda way: statistics.median(rounds.samples_s(way)))


def _proving_rule(round_s: float) -> SamplingRule:
    """Return how many rounds there are, none of which is left out because the others agree."""
    rounds = math.floor(_PROVING_S / max(round_s, 1e-9))
    return SamplingRule((min(max(rounds, _FEWEST_ROUNDS), _MOST_ROUNDS),), precision=0.01, warmups=1)
