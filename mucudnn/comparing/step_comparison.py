"""What a plan is worth within a program's own step: times before and now, of the step and of its layers."""

import dataclasses
import math
from collections.abc import Sequence

from mucudnn.intervals import Estimate, Verdict, compare, estimate, ratio
from mucudnn.locks import cached_property
from mucudnn.plan import Plan


@dataclasses.dataclass(frozen=True)
class PairedTimes:
    """What the same work took before and now: number i of each comes from round i.

    Attributes:
        before_ns: nanoseconds with PyTorch's own convolutions.
        now_ns: nanoseconds with those of a plan.

    Raises:
        ValueError: the numbers of rounds differ, or there is none.
    """

    before_ns: tuple[int, ...]
    now_ns: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.before_ns or len(self.before_ns) != len(self.now_ns):
            raise ValueError(
                "There must be as many rounds before as now, and one at least, but got "
                f"{len(self.before_ns)} and {len(self.now_ns)}."
            )

    @cached_property
    def before(self) -> Estimate:
        """Seconds before: the median with its interval."""
        return estimate(_seconds(self.before_ns))

    @cached_property
    def now(self) -> Estimate:
        """Seconds now."""
        return estimate(_seconds(self.now_ns))

    @cached_property
    def speedup(self) -> Estimate:
        """How many times as fast as before it is now: the median of the rounds' quotients."""
        return ratio(self.now_ns, self.before_ns)

    @cached_property
    def saved(self) -> Estimate:
        """Seconds less than before: the median of the rounds' differences."""
        return _saved(_seconds(self.before_ns), _seconds(self.now_ns))

    @property
    def verdict(self) -> Verdict:
        """What the rounds say of now against before."""
        return compare(self.before_ns, self.now_ns)

    def break_even(self, cost_s: float) -> Estimate:
        """Return after how many times the time saved exceeds `cost_s`, such as that of tuning."""
        return break_even(cost_s, _seconds(self.before_ns), _seconds(self.now_ns))


@dataclasses.dataclass(frozen=True)
class LayerComparison:
    """A patched convolution within the step.

    Attributes:
        path: the module's, as in `ConvSite`.
        times: of all its calls in a step together: forward passes, and what autograd computes of them.
    """

    path: str
    times: PairedTimes


@dataclasses.dataclass(frozen=True)
class StepComparison:
    """A step of a program, with the model's convolutions as they were before and as its plan runs them.

    `mucudnn.report.render_comparison` returns it as a table.

    Attributes:
        step: the whole step.
        layers: each patched convolution that every step was seen to call, from further rounds, in the model's
            order.
        unseen: paths of the other patched ones: the step does not reach them, or not each time, or they run
            in a compiled or captured graph.
        others: how many processors others took on average meanwhile; None if that is not known.
        pages: how many pages of memory a step took anew from the system, before and now, as medians; None if
            that is not known.
        plan: the model's, as it was applied; of `unpatched` ones nothing ran.
        slower: paths of the layers that are SLOWER than before, though they run what the plan has for them;
            of several ranks, the first one's.
        settled: the same plan with these as they were before, where PyTorch's own may run at all of their
            sites. It was not timed itself, and is `plan` where nothing was taken back.
        unplanned: paths of the layers that were not seen to run all that the plan has for them: the step has
            other shapes, types or batches, or not all, or no gradients. Of several ranks, this one's.
        unpatched: paths of the modules that the plan changes, and that are not patched (any more), as where
            they were replaced since.
    """

    step: PairedTimes
    layers: tuple[LayerComparison, ...]
    unseen: tuple[str, ...]
    others: float | None
    pages: tuple[float, float] | None
    plan: Plan
    slower: tuple[str, ...]
    settled: Plan
    unplanned: tuple[str, ...] = ()
    unpatched: tuple[str, ...] = ()

    def __repr__(self) -> str:
        found, verdict = self.step.speedup, self.step.verdict
        return (
            f"<A step, {found.median:.2f} [{found.low:.2f}, {found.high:.2f}] times as fast, {verdict}, "
            f"{len(self.slower)} of {len(self.layers)} layers slower; "
            "`mucudnn.report.render_comparison` returns it as a table>"
        )


def break_even(cost_s: float, before_s: Sequence[float], now_s: Sequence[float]) -> Estimate:
    """Return after how many steps the time saved exceeds a cost; infinity where nothing is saved.

    Source: the fourth of Hoefler's twelve ways to fool the masses, its cure.

    Args:
        cost_s: seconds, such as those that tuning took.
        before_s: seconds of a step before, one for each round, or each process.
        now_s: seconds of a step now, from the same ones.
    """
    saved = _saved(before_s, now_s)
    median, low, high = (
        cost_s / each if each > 0 else math.inf for each in (saved.median, saved.high, saved.low)
    )
    return Estimate(median, low, high, saved.samples)


def _saved(before_s: Sequence[float], now_s: Sequence[float]) -> Estimate:
    return estimate([before - now for before, now in zip(before_s, now_s, strict=True)])


def _seconds(spans_ns: Sequence[int]) -> list[float]:
    return [span * 1e-9 for span in spans_ns]
