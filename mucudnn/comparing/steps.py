"""Timing a program's own step with its model's convolutions as they were and as a plan runs them, in turns.

A tuner times convolutions one by one. What its plan is worth within a program, where others have used the
caches and the buffer meanwhile, only the program's own step tells. Sources: Hoefler and Belli, SC15, rules 5
to 7; the sixth of Hoefler's twelve ways to fool the masses; DAWNBench, whose gains did not add up.
"""

import contextlib
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from torch import nn

from mucudnn.backends import Backend, backend_for
from mucudnn.comparing.clocks import CardClock, HostClock, ModuleClocks
from mucudnn.comparing.step_comparison import LayerComparison, PairedTimes, StepComparison
from mucudnn.comparing.taking_back import taken_back
from mucudnn.convolutions.modules import tuned_device
from mucudnn.errors import OptionError
from mucudnn.intervals import FEWEST_SAMPLES, Verdict, median
from mucudnn.objects import late_function
from mucudnn.patching.applying import applied_plan, noted, patched_modules, unpatched
from mucudnn.patching.routing import NotingRouter
from mucudnn.plan import Assignment, Plan
from mucudnn.problem import ConvProblem, problems_of
from mucudnn.progress import ProgressOption, Work, check_progress, progress_for
from mucudnn.ranks import is_distributed, of_the_first

try:
    from resource import RUSAGE_SELF, getrusage
except ImportError:  # Windows, where plans run all the same
    getrusage = None  # type: ignore[assignment]

_WARMUPS = 2
"""Steps of either kind that are run and forgotten: the first may compile and build, and fills caches."""

_ROUNDS, _MOST_ROUNDS = 20, 200

_SECONDS = 10.0
"""That more rounds of a short step may take, up to the most."""

Result = TypeVar("Result")


def compare(
    model: nn.Module,
    step: Callable[[], object],
    *,
    rounds: int | None = None,
    progress: ProgressOption = None,
) -> StepComparison:
    """Time `step` with the plan that `model` runs and without it, in turns, then its patched convolutions.

    The step is really run, 4 n + 5 times for n rounds, or 2 n + 5 where it alone is timed: parameters are
    updated, data are read, random numbers are drawn. It should do the same work each time. "Before" means
    PyTorch's own convolutions without any limit; the buffer of the plan stays allocated.
    `mucudnn.report.render_comparison` returns the result as a table, and

        mucudnn.apply(model, mucudnn.compare(model, step).settled)

    puts PyTorch's own back where the plan's convolution is slower within the step, provided that the step ran
    all that the plan has for it; compare again to see what that is worth. `apply` ends
    `optimize(dynamic=True)`: new shapes run PyTorch's own from then on.

    A convolution's time is that of its forward pass and of its node in autograd's graph, without your hooks
    on the module. In graphs of torch.compile only the whole step is timed; a graph that was captured before
    replays the same kernels both times. If the plan patches nothing, six rounds time the step, and the
    settled plan is the same plan.

    The store does not learn of this: keep the settled plan with `settled.save`, and load it at the next start
    with `Plan.load`. Under torch.distributed all ranks have to call this. They run equally many rounds, and
    where the plan is slower on the first rank, PyTorch's own is put back on all.

    Args:
        model: patched by `optimize` or `apply`; the inner model if a wrapper, such as torch.compile's or
            DDP's, calls it.
        step: runs the model, and whatever else a step of the program does.
        rounds: how many time the step, and as many again its convolutions; at least 6. None takes 20 to 200,
            as many as run in 10 s, or 6 if no module is patched.
        progress: as for `optimize`.

    Raises:
        PlanError: the model runs no plan.
        OptionError: there are too few rounds for an interval, `model` is no module, `step` no function, or
            `progress` none of the choices.
        Exception: whatever the step raises, unchanged; the model is left patched as it was.
    """
    applied_plan(model)  # which says so if there is none
    if not callable(step):
        raise OptionError(f"step must be a function that runs a step, but got {type(step).__name__}.")
    late = late_function(step)
    if late is not None:
        raise OptionError(f"step must run a step when it is called, but got {late}.")
    if rounds is not None and (type(rounds) is not int or rounds < FEWEST_SAMPLES):
        raise OptionError(
            f"rounds must be a whole number of at least {FEWEST_SAMPLES}, as an interval needs, "
            f"but got {rounds!r}."
        )
    check_progress(progress)
    return compared(model, step, rounds, progress, backend_for("auto", tuned_device(model)))


def compared(
    model: nn.Module,
    step: Callable[[], object],
    rounds: int | None,
    progress: ProgressOption,
    backend: Backend,
) -> StepComparison:
    """Return what `compare` does of a patched model, by the clock of a backend."""
    neighbours, turns = backend.neighbours(), _Turns(model)
    on_host = backend.device.type == "cpu"
    clocks = ModuleClocks(HostClock(backend.clock) if on_host else CardClock(backend.device))

    def run() -> _Run:
        """Return what a step takes."""
        pages, start = _pages(), backend.clock()
        step()
        return _Run(max(backend.clock() - start, 1), _pages() - pages)

    with progress_for(progress) as shown, neighbours.watched():
        warm = turns.take(run, range(_WARMUPS))  # in which shapes may be tuned when they are met
        plan, layers = applied_plan(model), patched_modules(model)
        if rounds is None:
            rounds = _rounds_for(warm.before[-1].span_ns + warm.now[-1].span_ns) if layers else FEWEST_SAMPLES
        work = Work(shown, dict.fromkeys(range(2 * rounds), 1.0))
        whole = turns.take(run, _told(work, "timing the step", range(rounds)))
        with clocks.watching(layers):
            with noted(model) as ran:
                is_seen = of_the_first(bool(clocks.taken_by(step)))
            differentiated = clocks.differentiated
            further = range(rounds, 2 * rounds) if is_seen else range(0)
            parts = turns.take(lambda: clocks.taken_by(step), _told(work, "timing its convolutions", further))
        work.end(len(whole.now) + len(parts.now))
    within = tuple(_layers(layers, parts))
    known = [each.path for each in within]
    unplanned = _unplanned(plan, {path: ran[path] for path in known if path in ran}, differentiated)
    slower = of_the_first(
        [each for each in within if each.times.verdict is Verdict.SLOWER and each.path not in unplanned]
    )
    return StepComparison(
        step=PairedTimes(*(tuple(each.span_ns for each in runs) for runs in (whole.before, whole.now))),
        layers=within,
        unseen=tuple(path for path in layers if path not in known),
        others=neighbours.taken,
        pages=None if getrusage is None else (_median_pages(whole.before), _median_pages(whole.now)),
        plan=plan,
        slower=tuple(each.path for each in slower),
        settled=taken_back(plan, slower),
        unplanned=unplanned,
        unpatched=tuple(path for path in _changed_paths(plan) if path not in layers),
    )


def _changed_paths(plan: Plan) -> list[str]:
    """Return the paths of the modules of which a plan has something else run than before."""
    return list(dict.fromkeys(each.site.path for each in plan.assignments if _changes(each)))


def _changes(assigned: Assignment) -> bool:
    return not assigned.is_kept and not assigned.division.is_own


def _unplanned(
    plan: Plan, ran: Mapping[str, NotingRouter], differentiated: Collection[str]
) -> tuple[str, ...]:
    """Return the modules that were asked, not in graphs or restored, and do not run all that a plan changes.

    Args:
        plan: of the model.
        ran: what was seen of each module's calls.
        differentiated: modules of which autograd computed something.
    """
    return tuple(
        path
        for path, seen in ran.items()
        if seen.is_asked
        and not _is_planned(plan, path, seen.served_problems, is_differentiated=path in differentiated)
    )


def _is_planned(plan: Plan, path: str, ran: Collection[ConvProblem], *, is_differentiated: bool) -> bool:
    """Return whether a step runs all that a plan changes at a module.

    Args:
        plan: of the model.
        path: of the module.
        ran: the problems of its forward passes that the plan served.
        is_differentiated: whether autograd computed something of it.
    """
    served, forward = {each for one in ran for each in problems_of(one).values()}, {one.op for one in ran}
    return all(
        each.problem in served and (is_differentiated or each.site.op in forward)
        for each in plan.assignments
        if each.site.path == path and _changes(each)
    )


class _Run(NamedTuple):
    """What a step has taken: nanoseconds, and pages of memory anew from the system."""

    span_ns: int
    pages: int


def _pages() -> int:
    """Return how many pages this process has taken from the system so far; 0 where nobody counts."""
    return 0 if getrusage is None else getrusage(RUSAGE_SELF).ru_minflt


def _median_pages(runs: Sequence[_Run]) -> float:
    return median([each.pages for each in runs])


class _Taken(NamedTuple, Generic[Result]):
    """What was taken of rounds: number i of each comes from round i."""

    before: list[Result]
    now: list[Result]


class _Turns:
    """Runs something with a model's plan and without it, in turns, in an order that each round draws anew."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._order = random.Random(0)

    def take(self, run: Callable[[], Result], rounds: Iterable[object]) -> _Taken[Result]:
        """Return what each run returns, in so many rounds."""
        taken = _Taken[Result]([], [])
        for _ in rounds:
            for is_now in self._order.sample((False, True), 2):
                with contextlib.ExitStack() as without:
                    without.enter_context(unpatched(self._model))
                    if is_now:  # the way here was as long, which short steps feel in their caches
                        without.close()
                    (taken.now if is_now else taken.before).append(run())
        return taken


def _rounds_for(round_ns: int) -> int:
    """Return how many rounds there are of so many nanoseconds; as many in all ranks."""
    if is_distributed():
        return _ROUNDS
    return min(max(int(_SECONDS * 1e9 / round_ns), _ROUNDS), _MOST_ROUNDS)


def _told(work: Work, what: str, rounds: Iterable[int]) -> Iterator[None]:
    """Yield for each round, and have those told who watch."""
    for each in rounds:
        work.at(what)
        yield
        work.finish(each)


def _layers(paths: Iterable[str], taken: _Taken[dict[str, int]]) -> Iterator[LayerComparison]:
    """Yield the times of those layers that every run has called."""
    for path in paths:
        before, now = (
            tuple(each[path] for each in runs if path in each) for runs in (taken.before, taken.now)
        )
        if now and len(before) == len(now) == len(taken.now):
            yield LayerComparison(path, PairedTimes(before, now))
