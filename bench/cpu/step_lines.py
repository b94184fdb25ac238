"""What was measured of a training step: one line of JSON each."""

import dataclasses
from collections.abc import Mapping

from bench.cpu.rounds import Rounds
from bench.differences import Differences
from mucudnn.comparing.step_comparison import break_even
from mucudnn.intervals import FEWEST_SAMPLES, Estimate, Verdict, estimate, median, verdict_of
from mucudnn.problem import OPTIONAL, ConvOp, Layout

OWN = "unpatched"
DIVIDED = "patched"
UNDIVIDED = "undivided"
"""Names of the steps in the rounds; the last is patched, too, and there where the plan has micro-batches."""


@dataclasses.dataclass(frozen=True, order=True)
class StepCase:
    """The training step of a network in one layout and thread setting.

    Attributes:
        setting: its name.
        network: its name.
        layout: of images and filters.
    """

    setting: str
    network: str
    layout: Layout

    def __str__(self) -> str:
        return f"{self.setting} {self.network} {self.layout}"


@dataclasses.dataclass(frozen=True)
class SiteTime:
    """What the tuner's confirming rounds say of one op of a convolution.

    Attributes:
        place: the module, and which of its shapes.
        op: which of the three.
        own_s: seconds of PyTorch's own, the median; None if the limit forbade to run it.
        now_s: seconds of what runs now; None if that was not timed.
    """

    place: str
    op: ConvOp
    own_s: float | None
    now_s: float | None


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What tuning cost, and what came of it.

    Attributes:
        seconds: that `mucudnn.tune` took.
        known: trials that the store had before, from a run that was interrupted; the seconds lack theirs.
        trials: that were measured in those seconds.
        grown_bytes: by how much the process's peak of resident memory rose.
        runs: what runs at each site.
        kept: sites at which PyTorch's own convolution runs undivided.
        untouched: convolutions that could not be tuned.
        seen_bytes: the most that any chosen division was seen to take beside operands and result; None if
            none was weighed.
        times: of every site; nothing in lines of older versions.
    """

    seconds: float
    known: int
    trials: int
    grown_bytes: int
    runs: Mapping[str, str]
    kept: int
    untouched: tuple[str, ...]
    seen_bytes: int | None
    times: tuple[SiteTime, ...] = dataclasses.field(default=(), metadata=OPTIONAL)


@dataclasses.dataclass(frozen=True)
class StepMeasured:
    """What was measured of a training step: reading the batch, forward, loss, backward, update.

    Of six processes and more each is one sample, as its rounds tell nothing of the others; an interval of
    fewer could not be given, and what is said is of the process that tuned.

    Attributes:
        case: which.
        batch: samples in a step.
        limit_bytes: of each convolution's workspace.
        tuned: what tuning cost.
        rounds: interleaved spans of the steps, in the process that tuned.
        convolutions: their share of a step of the unpatched model, from 0 to 1.
        reading: the share of reading the batch, from 0 to 1.
        difference: largest difference between the scores of both models with equal weights, relative to the
            largest score.
        own_bytes: peak memory of a step of the unpatched model beside weights and data; None if it could
            not be weighed.
        divided_bytes: that of the patched model.
        seconds: that all of it took.
        differences: after one pass of both models with equal weights, patched - unpatched; None, as the next
            one, in lines of older versions.
        rounding: the same of the unpatched model in float32 and in float64: what rounding alone does.
        again: rounds of the same steps by the same plans in other processes, one each; nothing in lines of
            older versions.
    """

    case: StepCase
    batch: int
    limit_bytes: int
    tuned: Tuned
    rounds: Rounds
    convolutions: float
    reading: float
    difference: float
    own_bytes: int | None
    divided_bytes: int | None
    seconds: float
    differences: Differences | None = dataclasses.field(default=None, metadata=OPTIONAL)
    rounding: Differences | None = dataclasses.field(default=None, metadata=OPTIONAL)
    again: tuple[Rounds, ...] = dataclasses.field(default=(), metadata=OPTIONAL)

    @property
    def is_of_processes(self) -> bool:
        """Whether there are enough processes for intervals of them."""
        return 1 + len(self.again) >= FEWEST_SAMPLES

    @property
    def has_undivided(self) -> bool:
        """Whether the step without micro-batches was timed as well."""
        return UNDIVIDED in self.rounds.spans_ns

    def seconds_of(self, name: str) -> Estimate:
        """Return the median time of a step with its interval; `name` is `OWN`, `DIVIDED` or `UNDIVIDED`."""
        return estimate(self._samples_s(name))

    @property
    def speedup(self) -> Estimate:
        """The unpatched step's time over the patched one's: the median of the processes' quotients."""
        return self.speedup_over(OWN)

    def speedup_over(self, name: str) -> Estimate:
        """Return the time of the step of that name over the patched one's, as `speedup` does."""
        return estimate(self._quotients(name))

    @property
    def speedups(self) -> list[float]:
        """The median of the rounds' quotients in each process; that of the one that tuned stands first."""
        return self._medians(OWN)

    @property
    def others(self) -> float | None:
        """How many processors others took on average while a process timed, the most; None if unknown."""
        counted = (self.rounds, *self.again) if self.is_of_processes else (self.rounds,)
        return max((each.others for each in counted if each.others is not None), default=None)

    @property
    def verdict(self) -> Verdict:
        """What the times say of the patched step."""
        return self.verdict_over(OWN)

    def verdict_over(self, name: str) -> Verdict:
        """Return what the times say of the patched step against the step of that name."""
        relative = estimate([1 / each for each in self._quotients(name)])
        return verdict_of(relative.low, relative.high)

    @property
    def break_even(self) -> Estimate:
        """Steps after which the time saved exceeds that of tuning; infinity where nothing is saved."""
        return break_even(self.tuned.seconds, self._samples_s(OWN), self._samples_s(DIVIDED))

    def _quotients(self, name: str) -> list[float]:
        """Return how many times as fast as that step the patched one is, in each process.

        Of too few, in each of the first one's rounds.
        """
        return self._medians(name) if self.is_of_processes else _quotients_in(self.rounds, name)

    def _medians(self, name: str) -> list[float]:
        return [median(_quotients_in(rounds, name)) for rounds in (self.rounds, *self.again)]

    def _samples_s(self, name: str) -> list[float]:
        """Return seconds of a step: each process's median, or of too few the rounds of the first."""
        if not self.is_of_processes:
            return self.rounds.samples_s(name)
        return [median(rounds.samples_s(name)) for rounds in (self.rounds, *self.again)]


def _quotients_in(rounds: Rounds, name: str) -> list[float]:
    """Return how many times as fast as the step of that name the patched one is, in each round."""
    return [other / now for other, now in zip(rounds.samples_s(name), rounds.samples_s(DIVIDED), strict=True)]


@dataclasses.dataclass(frozen=True)
class StepFailed:
    """A training step that could not be measured.

    Attributes:
        case: which.
        reason: in a sentence.
    """

    case: StepCase
    reason: str
