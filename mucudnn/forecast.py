"""What a library's plans would take as workspace, for every convolution at every micro-batch size.

Arithmetic over lists that somebody else makes: it runs nothing, measures nothing and knows no times.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from mucudnn.choices import Policy
from mucudnn.locks import cached_property
from mucudnn.plan import ConvSite
from mucudnn.problem import ConvProblem
from mucudnn.progress import Progress, Silence

_TENSOR_CORE = "TENSOR_CORE"
"""cuDNN's note on a plan that computes on tensor cores."""


class Listed(Protocol):
    """One plan of a library for a problem."""

    @property
    def overwriting_bytes(self) -> int:
        """Workspace that it takes when it overwrites its result, as the whole mini-batch does."""

    @property
    def workspace_bytes(self) -> int:
        """Workspace that it takes whether it overwrites its result or adds to it, as parts do."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the library says of how it computes."""


class Lister(Protocol):
    """Whoever knows a library's plans."""

    def listed(self, problem: ConvProblem) -> Sequence[Listed]:
        """Return the plans for `problem`, the one first that the library predicts to be the fastest."""


@dataclasses.dataclass(frozen=True)
class Occurrence:
    """One op of a convolution, where a model computes it.

    Attributes:
        site: where; its op is that of the problem.
        problem: what; of a transposed convolution the forward pass is dgrad.
        is_transposed: whether the convolution is a transposed one.
    """

    site: ConvSite
    problem: ConvProblem
    is_transposed: bool = False


class Fit(StrEnum):
    """What of a problem fits a workspace limit."""

    UNDIVIDED = "undivided"
    """The first-ranked plan of the whole mini-batch."""
    DIVIDED = "divided"
    """A first-ranked plan, but of a micro-batch only."""
    LOWER_RANKED = "lower_ranked"
    """No first-ranked plan at any size, but another plan."""
    NEVER = "never"
    """No plan at any size, or none at sizes that add up to the mini-batch."""
    NO_PLAN = "no_plan"
    """There are no plans at all."""


@dataclasses.dataclass(frozen=True)
class Need:
    """Workspaces of the plans for one micro-batch.

    A part of a weight gradient in 16 bits counts the float32 sum, too, in which the parts add up.

    Attributes:
        batch: its samples.
        plans: how many plans there are, at least one.
        first_bytes: workspace of the first-ranked plan.
        least_bytes: the least workspace of any plan.
        on_tensor_cores: whether the first-ranked plan computes on tensor cores.
        least_on_tensor_cores: whether a plan with the least workspace does.
    """

    batch: int
    plans: int
    first_bytes: int
    least_bytes: int
    on_tensor_cores: bool = False
    least_on_tensor_cores: bool = False


@dataclasses.dataclass(frozen=True)
class ProblemForecast:
    """Workspaces of a problem, undivided and in micro-batches.

    Attributes:
        problem: of the whole mini-batch.
        needs: at each micro-batch size for which there is a plan, rising.
    """

    problem: ConvProblem
    needs: tuple[Need, ...]

    @cached_property
    def by_size(self) -> Mapping[int, Need]:
        """The needs by the size of the micro-batch."""
        return {need.batch: need for need in self.needs}

    @property
    def undivided(self) -> Need | None:
        """What the whole mini-batch needs, or None if there is no plan for it."""
        return self.by_size.get(self.problem.batch)

    @cached_property
    def best(self) -> Need | None:
        """The neediest size of a division into first-ranked plans that needs least; None if there is none."""
        return self._neediest(lambda need: need.first_bytes)

    @cached_property
    def least(self) -> Need | None:
        """The neediest size of a division that needs least, whatever its plans; None if there is none."""
        return self._neediest(lambda need: need.least_bytes)

    def _neediest(self, n_bytes: Callable[[Need], int]) -> Need | None:
        """Return the largest size that needs most in a division of the whole mini-batch that needs least."""
        for limit_bytes in sorted({n_bytes(need) for need in self.needs}):
            completed = self._completed([need for need in self.needs if n_bytes(need) <= limit_bytes])
            neediest = [need for need in completed if n_bytes(need) == limit_bytes]
            if neediest:
                return neediest[-1]
        return None

    def _completed(self, needs: Sequence[Need]) -> list[Need]:
        """Return those sizes of which one, and others of these as often as one likes, are the mini-batch."""
        sums = _sums(self.problem.batch, (need.batch for need in needs))
        return [need for need in needs if sums[self.problem.batch - need.batch]]

    @property
    def undivided_bytes(self) -> int | None:
        """Workspace of the first-ranked plan of the whole mini-batch, if there is one."""
        return None if self.undivided is None else self.undivided.first_bytes

    @property
    def best_bytes(self) -> int | None:
        """The least workspace of a first-ranked plan, if there is one."""
        return None if self.best is None else self.best.first_bytes

    @property
    def least_bytes(self) -> int | None:
        """The least workspace of any plan, if there is one."""
        return None if self.least is None else self.least.least_bytes

    def bytes_at_most(self, size: int) -> int | None:
        """Return what the first-ranked plan of the largest micro-batch of at most `size` samples needs."""
        return next((need.first_bytes for need in reversed(self.needs) if need.batch <= size), None)

    def largest_within(self, limit_bytes: int) -> Need | None:
        """Return the largest micro-batch of a division into first-ranked plans within a limit, if any."""
        completed = self._completed([need for need in self.needs if need.first_bytes <= limit_bytes])
        return completed[-1] if completed else None

    def fit(self, limit_bytes: int) -> Fit:
        """Return what of it fits a workspace limit of `limit_bytes`."""
        if not self.needs:
            return Fit.NO_PLAN
        largest = self.largest_within(limit_bytes)
        if largest is not None:
            return Fit.UNDIVIDED if largest.batch == self.problem.batch else Fit.DIVIDED
        fits = self.least_bytes is not None and self.least_bytes <= limit_bytes
        return Fit.LOWER_RANKED if fits else Fit.NEVER


def _sums(batch: int, sizes: Iterable[int]) -> list[bool]:
    """Return, for 0 to `batch`, whether some of `sizes`, each as often as one likes, add up to it."""
    reached = [True, *[False] * batch]
    for size in sizes:
        for total in range(size, batch + 1):
            reached[total] |= reached[total - size]
    return reached


@dataclasses.dataclass(frozen=True)
class SiteForecast:
    """A convolution's op in a model, and its workspaces.

    Attributes:
        occurrence: where and what.
        forecast: its workspaces; equal problems share one.
    """

    occurrence: Occurrence
    forecast: ProblemForecast


@dataclasses.dataclass(frozen=True)
class Total:
    """What workspaces of several sites come to, in bytes.

    Attributes:
        sum_bytes: all together, each site with a workspace of its own.
        largest_bytes: the largest, which one buffer needs that all sites reuse.
        largest: the site that needs it; None where there are no sites.
        unknown: number of sites for which there is no plan; they count for nothing.
    """

    sum_bytes: int
    largest_bytes: int
    largest: ConvSite | None
    unknown: int = 0

    @classmethod
    def of(cls, needs: Mapping[ConvSite, int | None]) -> "Total":
        """Return the total of what each site needs; of several largest sites the first is named."""
        known = {site: n_bytes for site, n_bytes in needs.items() if n_bytes is not None}
        largest = max(known, key=known.__getitem__, default=None)
        unknown = len(needs) - len(known)
        return cls(sum(known.values()), max(known.values(), default=0), largest, unknown)


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Workspaces of all convolutions of a model.

    Attributes:
        device: the device's name.
        library: the library's name and version.
        settings: which plans are allowed, in words.
        policy: which micro-batch sizes were looked at.
        sites: in the order in which the model computes them.
    """

    device: str
    library: str
    settings: tuple[str, ...]
    policy: Policy
    sites: tuple[SiteForecast, ...]

    @property
    def forecasts(self) -> tuple[ProblemForecast, ...]:
        """The forecasts of the distinct problems."""
        return tuple(dict.fromkeys(site.forecast for site in self.sites))

    def total(self, need: Callable[[ProblemForecast], int | None]) -> Total:
        """Return the total of `need` over the sites for which it is known."""
        return Total.of({site.occurrence.site: need(site.forecast) for site in self.sites})

    @property
    def undivided(self) -> Total:
        """What the first-ranked plans of the whole mini-batch need."""
        return self.total(lambda each: each.undivided_bytes)

    @property
    def best(self) -> Total:
        """What the first-ranked plans need, each problem at the size at which that is least."""
        return self.total(lambda each: each.best_bytes)

    @property
    def least(self) -> Total:
        """What is needed at least, whatever plan and size."""
        return self.total(lambda each: each.least_bytes)

    def at_most(self, size: int) -> Total:
        """What first-ranked plans need in the largest micro-batches of at most `size` samples."""
        return self.total(lambda each: each.bytes_at_most(size))


def forecast(
    occurrences: Sequence[Occurrence],
    lister: Lister,
    *,
    device: str,
    library: str,
    settings: tuple[str, ...] = (),
    policy: Policy = Policy.POWER_OF_TWO,
    progress: Progress | None = None,
) -> Forecast:
    """Return the workspaces of every occurrence; equal problems are looked at once.

    Args:
        occurrences: what a model computes.
        lister: the library's plans on the device.
        device: the device's name.
        library: the library's name and version.
        settings: which plans are allowed, in words.
        policy: which micro-batch sizes are looked at.
        progress: who is told.
    """
    problems = [_without_bias(each.problem) for each in occurrences]
    forecasts = _forecasts(lister, list(dict.fromkeys(problems)), policy, progress or Silence())
    sites = [
        SiteForecast(each, forecasts[problem]) for each, problem in zip(occurrences, problems, strict=True)
    ]
    return Forecast(device, library, settings, policy, tuple(sites))


def _without_bias(problem: ConvProblem) -> ConvProblem:
    """The bias is added by another kernel: it changes no plan."""
    return dataclasses.replace(problem, bias=False)


def _forecasts(
    lister: Lister, problems: Sequence[ConvProblem], policy: Policy, progress: Progress
) -> dict[ConvProblem, ProblemForecast]:
    # One after another: two threads take longer, because most of the time is many short calls into the
    # library, and each of them hands over the interpreter's lock (ResNet-50: 3.0 s against 2.7 s).
    progress.begin(len(problems))
    forecasts = {}
    for done, problem in enumerate(problems):
        progress.at(str(problem), done)
        needs = (_need(lister, problem, size) for size in policy.sizes(problem.batch))
        forecasts[problem] = ProblemForecast(problem, tuple(need for need in needs if need is not None))
    progress.end(len(problems))
    return forecasts


def _need(lister: Lister, problem: ConvProblem, size: int) -> Need | None:
    """Return what a part of `size` samples needs, or None if there is no plan for it."""
    plans = lister.listed(problem.part(size))
    if not plans:
        return None
    is_part = size < problem.batch
    workspaces = [plan.workspace_bytes if is_part else plan.overwriting_bytes for plan in plans]
    least_bytes = min(workspaces)
    sum_bytes = problem.running_sum_bytes if is_part else 0
    return Need(
        batch=size,
        plans=len(plans),
        first_bytes=workspaces[0] + sum_bytes,
        least_bytes=least_bytes + sum_bytes,
        on_tensor_cores=_TENSOR_CORE in plans[0].notes,
        least_on_tensor_cores=any(
            _TENSOR_CORE in plan.notes
            for plan, n_bytes in zip(plans, workspaces, strict=True)
            if n_bytes == least_bytes
        ),
    )
