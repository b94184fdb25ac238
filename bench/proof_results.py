"""What training with and without division has shown: verdicts, words and a picture, made of losses alone."""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bench.differences import largest
from mucudnn.report.drawing import BLUE, GREY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BOUND = 1e-8
"""Largest relative difference of a loss in float64."""

_ACCURACY_BOUND = 0.01
"""Largest difference of the accuracy that counts as the same: 1 percent of the held-out images."""

_SIZE = (10.0, 4.0)
"""Of the picture, in inches."""

_FLOOR = 1e-9
"""Where the axis of distances ends: the losses are of float32."""


@dataclasses.dataclass(frozen=True)
class Exact:
    """Losses of two runs in float64, one a step.

    Attributes:
        unpatched: mean cross-entropy in nats.
        divided: the same of the patched model.
    """

    unpatched: tuple[float, ...]
    divided: tuple[float, ...]

    @property
    def worst(self) -> float:
        """The largest relative difference."""
        return largest(abs(a - b) / abs(a) for a, b in zip(self.unpatched, self.divided, strict=True))

    @property
    def holds(self) -> bool:
        """Whether the losses agree to 1e-8."""
        return self.worst <= _BOUND

    def told(self) -> Iterator[str]:
        """Yield it in words."""
        steps = len(self.unpatched)
        yield f"float64, {steps} steps: losses differ by at most {self.worst:.1e}, bound {_BOUND:.0e}"


@dataclasses.dataclass(frozen=True)
class Near:
    """Losses of runs in float32, one a step.

    Attributes:
        unpatched: mean cross-entropy in nats.
        divided: the same of the patched model.
        perturbed: of unpatched models whose weights were perturbed by 1e-7 before the first step.
    """

    unpatched: tuple[float, ...]
    divided: tuple[float, ...]
    perturbed: tuple[tuple[float, ...], ...]

    @property
    def distances(self) -> list[float]:
        """How far the divided run is from the unpatched one, at each step."""
        return self._from_unpatched(self.divided)

    @property
    def spreads(self) -> list[float]:
        """How far the furthest perturbed run is from it, at each step; one that diverged bounds nothing."""
        return [max(apart, default=0.0) for apart in self._apart]

    @property
    def within(self) -> list[bool]:
        """At which steps the divided run lies no further off than perturbed ones."""
        return [ours <= spread for ours, spread in zip(self.distances, self.spreads, strict=True)]

    @property
    def excess(self) -> float:
        """How far off the divided run is where it is furthest: over the median of perturbed runs there."""
        return self._excess_of(self.divided)

    @property
    def excesses(self) -> list[float]:
        """The same of each perturbed run that has not diverged, the least first."""
        return sorted(self._excess_of(each) for each in self._whole)

    @property
    def holds(self) -> bool:
        """Whether some perturbed run is as far off where it is furthest.

        Were the divided one nothing but another of them, it would be the furthest of 21 once in 21 times. To
        ask that it be so at no single step would fail far more often, however right it is: of twenty
        perturbed runs of ResNet-18 seven would not pass beside the nineteen others.
        """
        return self.excess <= max(self.excesses, default=0.0)

    @property
    def _whole(self) -> list[tuple[float, ...]]:
        return [each for each in self.perturbed if all(map(math.isfinite, each))]

    @property
    def _apart(self) -> list[list[float]]:
        """The distances of perturbed runs, at each step."""
        return [[*step] for step in zip(*map(self._from_unpatched, self._whole), strict=True)] or [
            [] for _ in self.unpatched
        ]

    def _from_unpatched(self, losses: Sequence[float]) -> list[float]:
        return [abs(loss - base) for loss, base in zip(losses, self.unpatched, strict=True)]

    def _excess_of(self, losses: Sequence[float]) -> float:
        medians = [statistics.median(apart) if apart else 0.0 for apart in self._apart]
        pairs = zip(self._from_unpatched(losses), medians, strict=True)
        return largest(_over(distance, median) for distance, median in pairs)

    def told(self) -> Iterator[str]:
        """Yield it in words."""
        steps, heading = len(self.unpatched), f"largest of {len(self.perturbed)} perturbed"
        yield f"float32, {steps} steps: distance of the loss from the unpatched run's"
        yield f"  {'step':>4}  {'loss':>8}  {'divided':>9}  {heading:>24}"
        for step, (loss, ours, spread) in enumerate(
            zip(self.unpatched, self.distances, self.spreads, strict=True)
        ):
            yield f"  {step:4}  {loss:8.5f}  {ours:9.1e}  {spread:24.1e}"
        excesses = self.excesses or [0.0]
        further = sum(each >= self.excess for each in excesses)
        yield f"  within the spread at {sum(self.within)} of {steps} steps"
        yield (
            f"  where it is furthest: {self.excess:.1f} times the median of perturbed runs; these "
            f"{excesses[0]:.1f} to {excesses[-1]:.1f}, {further} of {len(excesses)} as far or further"
        )


def _over(distance: float, median: float) -> float:
    """Return the quotient; where no perturbed run is off at all, 0 for one that is not, else infinity."""
    if median:
        return distance / median
    return 0.0 if distance == 0.0 else math.inf


@dataclasses.dataclass(frozen=True)
class Learnt:
    """A run over whole epochs.

    Attributes:
        losses: mean cross-entropy in nats, one a step.
        accuracy: share of the held-out images named rightly, 0 to 1.
        seconds: of all steps, reading the data included.
    """

    losses: tuple[float, ...]
    accuracy: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Pair:
    """Both runs of one random state, of the weights and of the order of the data.

    Attributes:
        seed: the state.
        unpatched: as PyTorch comes.
        divided: the patched model.
    """

    seed: int
    unpatched: Learnt
    divided: Learnt

    @property
    def gain(self) -> float:
        """Accuracy of the divided run over the unpatched one's; negative for a loss."""
        return self.divided.accuracy - self.unpatched.accuracy


@dataclasses.dataclass(frozen=True)
class Epochs:
    """Pairs of runs over whole epochs.

    Attributes:
        epochs: of each run.
        held_out: images of the test.
        pairs: one for each random state.
    """

    epochs: int
    held_out: int
    pairs: tuple[Pair, ...]

    @property
    def worst(self) -> float:
        """The largest difference of accuracy in any pair."""
        return largest(abs(pair.gain) for pair in self.pairs)

    @property
    def holds(self) -> bool:
        """Whether no pair differs by more than one percent, and all losses are numbers."""
        losses = (
            loss for pair in self.pairs for run in (pair.unpatched, pair.divided) for loss in run.losses
        )
        return all(math.isfinite(loss) for loss in losses) and self.worst <= _ACCURACY_BOUND

    @property
    def speedups(self) -> list[float]:
        """Seconds of each unpatched run over those of the divided one."""
        return [pair.unpatched.seconds / pair.divided.seconds for pair in self.pairs]

    def told(self) -> Iterator[str]:
        """Yield it in words."""
        yield (
            f"{self.epochs} epochs, {self.held_out} held-out images: share named rightly, last loss, seconds "
            "of all steps with reading; x is unpatched / divided"
        )
        yield f"  {'state':>5}  {'unpatched':>26}  {'divided':>26}  {'difference':>10}  {'x':>5}"
        for pair, speedup in zip(self.pairs, self.speedups, strict=True):
            runs = "  ".join(
                f"{run.accuracy:8.2%}  {run.losses[-1]:6.4f}  {run.seconds:6.1f} s"
                for run in (pair.unpatched, pair.divided)
            )
            yield f"  {pair.seed:5}  {runs}  {pair.gain:+10.2%}  {speedup:5.2f}"
        times = self.speedups
        yield (
            f"  accuracies differ by at most {self.worst:.2%}, bound {_ACCURACY_BOUND:.0%}; "
            f"x {statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"
        )


@dataclasses.dataclass(frozen=True)
class Proof:
    """All of it."""

    exact: Exact
    near: Near
    epochs: Epochs

    @property
    def holds(self) -> bool:
        """Whether every comparison holds."""
        return self.exact.holds and self.near.holds and self.epochs.holds

    def told(self) -> str:
        """Return it in words."""
        return "\n".join([*self.exact.told(), *self.near.told(), *self.epochs.told()]) + "\n"


def figure(proof: Proof) -> "Figure":
    """Return the losses of whole epochs over iterations, and how far the first steps' losses are apart."""
    from matplotlib.figure import Figure

    found = Figure(figsize=_SIZE, layout="constrained")
    learning, distance = found.subplots(1, 2)
    _draw_losses(learning, proof.epochs.pairs)
    _draw_distances(distance, proof.near)
    return found


def _draw_losses(axes: "Axes", pairs: Sequence[Pair]) -> None:
    for pair in pairs:
        first = pair is pairs[0]
        axes.plot(
            pair.unpatched.losses, color=GREY, linewidth=1.6, label="unpatched" if first else "_unpatched"
        )
        axes.plot(pair.divided.losses, color=BLUE, linewidth=0.7, label="divided" if first else "_divided")
    axes.set_title(f"Loss of each step over iterations, {len(pairs)} random states", loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel("mean cross-entropy, nats")
    axes.grid()
    axes.legend()


def _draw_distances(axes: "Axes", near: Near) -> None:
    """Draw points, since what lies between two steps means nothing."""
    steps = range(len(near.unpatched))
    for number, run in enumerate(near.perturbed):
        apart = [abs(one - loss) for one, loss in zip(run, near.unpatched, strict=True)]
        label = "_perturbed" if number else "perturbed by 1e-7"
        axes.plot(steps, _shown(apart), ".", color=GREY, markersize=4, label=label)
    axes.plot(steps, _shown(near.distances), "o", color=BLUE, markersize=5, label="divided")
    axes.set_yscale("log")
    axes.set_title("Distance from the unpatched run's loss, float32", loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel(f"nats (less than {_FLOOR:g} stands there)")
    axes.grid()
    axes.legend()


def _shown(apart: Sequence[float]) -> list[float]:
    return [max(each, _FLOOR) for each in apart]
