"""What is found of training steps: a row for each way to train, one for each pair of ways, and tables."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from bench.gpu.values import Timing, duration
from bench.workloads import Workload
from mucudnn.comparing.step_comparison import break_even
from mucudnn.evidence import fits_as_seen
from mucudnn.intervals import Estimate, Verdict, compare
from mucudnn.report.table import table
from mucudnn.sizes import format_bytes

PYTORCH, EQUAL, APART = "as it comes", "its equal", "its equal, in another thread"
"""PyTorch as it comes, and its controls: between the first and the second there is only noise, and between
the first and the third what it costs to be alone in a thread."""

BENCHMARK = "benchmark"
"""PyTorch with `cudnn.benchmark`, alone in a thread too; like those above in whatever memory."""

UNDIVIDED, DIVIDED = "undivided", "divided"
"""Ways to train within the limit."""

IN_GRAPH = ", in a graph"
"""How ways are called whose whole steps are captured."""

_FAR = 3.0
"""Times the distance of a twin; one twin may happen to lie near."""


@dataclasses.dataclass(frozen=True)
class StepRow:
    """One way to train one network.

    Attributes:
        network: its name, with the mini-batch's shape.
        setting: type, layout and precision.
        limit_bytes: of workspace.
        way: `PYTORCH` or another one, and whether captured in a graph.
        time: of a step.
        losses: of the first steps.
        difference: the largest from the losses of PyTorch as it comes, relative.
        weights: the largest difference of a parameter or buffer after these steps from those of PyTorch as it
            comes, relative, in the 2-norm.
        spread: `weights` of a twin of PyTorch as it comes, whose own are each off by a rounding at first.
        room_bytes: the most that an op of a patched module took beside operands and result, its buffer
            included and copies of operands in another layout, by the allocator; None where none is patched.
        room_used_bytes: what `room_bytes` tells, by NVML: in the allocator's blocks of 2 MiB and more.
        peak_bytes: that the allocator held at most in a step beside what it held before, workspace included.
        used_bytes: the same of the card's memory, by NVML.
        divided: sites that run in several parts, of all; None of PyTorch's own.
        tuning_s: seconds that tuning the network in this setting has taken so far, for all limits, as far as
            that is recorded.
        break_even: steps after which these are paid back; None unless steps are FASTER than PyTorch's as it
            comes.
        failure: why there is nothing of it.
        conditions: clocks, temperature and power after it.
    """

    network: str
    setting: str
    limit_bytes: int
    way: str
    time: Timing | None = None
    losses: tuple[float, ...] = ()
    difference: float | None = None
    weights: float | None = None
    spread: float | None = None
    room_bytes: int | None = None
    room_used_bytes: int | None = None
    peak_bytes: int | None = None
    used_bytes: int | None = None
    divided: str | None = None
    tuning_s: float | None = None
    break_even: Estimate | None = None
    failure: str | None = None
    conditions: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_ill(self) -> bool:
        """Whether the way fails, takes more than it may, or learns something else."""
        return bool(self.failure) or self.is_over or self.is_far

    @property
    def is_far(self) -> bool:
        """Whether it ends much farther away than rounding alone takes a twin."""
        return self.spread is not None and self.weights is not None and self.weights > _FAR * self.spread

    @property
    def is_over(self) -> bool:
        """Whether an op took more than the limit, and than the noise of weighing."""
        return self.room_bytes is not None and not fits_as_seen(self.room_bytes, self.limit_bytes)


@dataclasses.dataclass(frozen=True)
class PairRow:
    """Two ways from the same rounds.

    Attributes:
        network: see `StepRow`.
        setting: see `StepRow`.
        limit_bytes: see `StepRow`.
        base: a way.
        way: the other.
        ratio: of its time to the base's, the median of the rounds.
        low: lower end of its 95 % interval.
        high: upper end of it.
        verdict: what the rounds say.
    """

    network: str
    setting: str
    limit_bytes: int
    base: str
    way: str
    ratio: float
    low: float
    high: float
    verdict: Verdict


def network_of(workload: Workload) -> str:
    """Return what a network is called in rows: its name, with the mini-batch's shape."""
    return f"{workload.name} {'x'.join(map(str, workload.shape))}"


def summary(rows: Sequence[StepRow | PairRow]) -> str:
    """Return two tables of all rows, network by network: what each way takes, and pairs of ways.

    Rows have quotients of times, the table of pairs how many times as fast a way is.
    """
    steps: dict[str, list[tuple[str, ...]]] = {}
    pairs: dict[str, list[tuple[str, ...]]] = {}
    for row in rows:
        title = ", ".join(_title(row))
        if isinstance(row, StepRow):
            steps.setdefault(title, []).append(_cells(row))
        else:
            pairs.setdefault(title, []).append(_pair_cells(row))
    headings = (
        "way", "step", "95 %", "room", "by NVML", "peak", "by NVML", "losses off", "weights off", "a twin's",
        "divided", "tuned", "paid back after",
    )  # fmt: skip
    return "\n".join(
        [
            *table(headings, "<" + ">" * (len(headings) - 1), list(steps.items())),
            "",
            *table(("way", "against", "times as fast", "verdict"), "<<>>", list(pairs.items())),
        ]
    )


def told(row: StepRow | PairRow) -> str:
    """Return a row in a line, to be printed as soon as it is known."""
    if isinstance(row, StepRow):
        return "  ".join([*_title(row), *filter(None, _cells(row))])
    return "  ".join([*_title(row), *_pair_cells(row)])


def _title(row: StepRow | PairRow) -> tuple[str, str, str]:
    return row.network, row.setting, format_bytes(row.limit_bytes)


def _pair_cells(row: PairRow) -> tuple[str, ...]:
    median, low, high = (1 / time if time > 0 else math.inf for time in (row.ratio, row.high, row.low))
    speedup = f"{median:.3f} [{low:.3f}, {high:.3f}]"
    return (row.way, row.base, speedup, str(row.verdict))


def _cells(row: StepRow) -> tuple[str, ...]:
    if row.time is None:
        return (row.way, "failed", row.failure or "", *("",) * 10)
    ends = f"{duration(row.time.low_us or 0)} to {duration(row.time.high_us or 0)}"
    rooms = (row.room_bytes, row.room_used_bytes, row.peak_bytes, row.used_bytes)
    sizes = ("" if each is None else format_bytes(each) for each in rooms)
    off = ("" if each is None else f"{each:.1e}" for each in (row.difference, row.weights, row.spread))
    tuned = "" if row.tuning_s is None else f"{row.tuning_s:.0f} s"
    divided, paid = row.divided or "", _told_steps(row)
    return (row.way, duration(row.time.median_us), ends, *sizes, *off, divided, tuned, paid)


def _told_steps(row: StepRow) -> str:
    if row.tuning_s is None:
        return ""
    found = row.break_even
    return "not seen" if found is None else f"{found.median:.0f} [{found.low:.0f}, {found.high:.0f}] steps"


def paid_back(tuning_s: float, before_s: Sequence[float], now_s: Sequence[float]) -> Estimate | None:
    """Return after how many steps tuning is paid back; None unless steps are FASTER now.

    Two that are the same differ by some noise, by which tuning would be paid back after millions of steps.

    Args:
        tuning_s: seconds that tuning took.
        before_s: seconds of a step before, one for each round.
        now_s: seconds of a step now, from the same rounds.
    """
    is_faster = compare(before_s, now_s) is Verdict.FASTER
    return break_even(tuning_s, before_s, now_s) if is_faster else None
