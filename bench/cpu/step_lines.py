"""What was measured of a training step: one line of JSON each."""

import dataclasses
from collections.abc import Mapping

from bench.cpu.rounds import Rounds
from bench.differences import Differences
from mucudnn.comparing.step_comparison import break_even
from mucudnn.intervals import Estimate, Verdict, compare, estimate, ratio
from mucudnn.plan_file import OPTIONAL
from mucudnn.problem import ConvOp, Layout

OWN = "unpatched"
DIVIDED = "patched"
"""Names of the two steps in the rounds."""


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

    Attributes:
        case: which.
        batch: samples in a step.
        limit_bytes: of each convolution's workspace.
        tuned: what tuning cost.
        rounds: interleaved spans of both steps.
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
        again: rounds of both steps by the same plan in other processes, one each; nothing in lines of older
            versions.
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

    def seconds_of(self, name: str) -> Estimate:
        """Return the median time of a step with its interval; `name` is `OWN` or `DIVIDED`."""
        return estimate(self.rounds.samples_s(name))

    @property
    def speedup(self) -> Estimate:
        """The unpatched step's time over the patched one's: the median of the rounds' quotients."""
        return speedup_in(self.rounds)

    @property
    def speedups_elsewhere(self) -> list[float]:
        """The same quotient in each of the other processes, in rising order."""
        return sorted(speedup_in(rounds).median for rounds in self.again)

    @property
    def verdict(self) -> Verdict:
        """What the rounds say of the patched step."""
        return compare(self.rounds.samples_s(OWN), self.rounds.samples_s(DIVIDED))

    @property
    def break_even(self) -> Estimate:
        """Steps after which the time saved exceeds that of tuning; infinity where nothing is saved."""
        before_s, now_s = (self.rounds.samples_s(name) for name in (OWN, DIVIDED))
        return break_even(self.tuned.seconds, before_s, now_s)


def speedup_in(rounds: Rounds) -> Estimate:
    """Return how many times as fast the patched step is in the rounds of a process."""
    return ratio(rounds.samples_s(DIVIDED), rounds.samples_s(OWN))


@dataclasses.dataclass(frozen=True)
class StepFailed:
    """A training step that could not be measured.

    Attributes:
        case: which.
        reason: in a sentence.
    """

    case: StepCase
    reason: str
