"""What timing and weighing has shown: of a site's division, of whole calls, of graphs that are frozen."""

import dataclasses

from mucudnn.intervals import Estimate, Verdict
from mucudnn.problem import OPTIONAL

WRONG_ERROR = 0.1
"""Relative error above which a result is wrong, in any type: bfloat16 rounds by 0.004, sums hardly more."""


_WEIGHING_NOISE_BYTES = 32 * 2**10
"""By how much the weighing of a finished division may exceed what it takes: eight pages of small objects, as
the heap grows by pages (five seen, in a process that had weighed much before)."""


def fits_as_seen(seen_bytes: int | None, limit_bytes: int) -> bool:
    """Return whether what a finished division was seen to take is within the limit; None is not."""
    return seen_bytes is not None and seen_bytes <= limit_bytes + _WEIGHING_NOISE_BYTES


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What timing and weighing the finished division, as it runs, has shown.

    Attributes:
        reference: seconds of PyTorch's own convolution, undivided; None if the limit forbids to run it.
        chosen: seconds of the division, from the same rounds.
        verdict: the division against the reference; None without one.
        reference_workspace_bytes: what PyTorch's own takes beside its operands; None without one.
        workspace_bytes: what the division was seen to take, at most.
        error: largest relative error of its algorithms against float64; `plan_file.LARGEST_NUMBER` if that is
            no number.
        rejected: keys of the divisions that were timed too and not chosen, with their estimates.
        speedups: keys of all but the reference, with how many times as fast as that they are: the median of
            the rounds' quotients, which decides, with its interval. Empty without a reference, or predicted.
        is_predicted: whether no whole division was run: the times are sums of recorded parts' times, the
            workspaces those of the largest parts.
        others: how many processors others took in these rounds, where that may have moved the times.
    """

    reference: Estimate | None = None
    chosen: Estimate | None = None
    verdict: Verdict | None = None
    reference_workspace_bytes: int | None = None
    workspace_bytes: int | None = None
    error: float | None = None
    rejected: tuple[tuple[str, Estimate], ...] = ()
    speedups: tuple[tuple[str, Estimate], ...] = dataclasses.field(default=(), metadata=OPTIONAL)
    is_predicted: bool = dataclasses.field(default=False, metadata=OPTIONAL)
    others: float = dataclasses.field(default=0.0, metadata=OPTIONAL)

    @property
    def is_wrong(self) -> bool:
        """Whether what runs is wrong, as PyTorch's own alone may be, which no bound refuses."""
        return self.error is not None and self.error > WRONG_ERROR


@dataclasses.dataclass(frozen=True)
class CallTimes:
    """What rounds have shown of a convolution as it is called, by what is undivided and by divisions.

    What was FASTER in some rounds was timed in others later, if that could be had: these count then.

    Attributes:
        reference: seconds with PyTorch's own, or where that may not run with what else is undivided.
        divided: seconds with the divisions, from the same rounds.
        speedup: how many times as fast as the first the second is: the median of the rounds' quotients.
        verdict: the second against the first.
        others: how many processors others took in these rounds, where that may have moved the times.
    """

    reference: Estimate
    divided: Estimate
    speedup: Estimate
    verdict: Verdict
    others: float = dataclasses.field(default=0.0, metadata=OPTIONAL, kw_only=True)

    @property
    def is_faster(self) -> bool:
        """Whether the divisions run."""
        return self.verdict is Verdict.FASTER


@dataclasses.dataclass(frozen=True)
class CallEvidence(CallTimes):
    """What timing a whole convolution has shown: its forward pass and gradients, as the model calls it.

    Two calls were timed in turn. The second one runs what was confirmed op by op. The reference runs
    PyTorch's own for every op for which the limit lets it, and the same as the second for the other ops.
    If that is the same for all ops, the reference runs the best undivided algorithm for those other ops
    instead. The plan has what the second one runs if it is FASTER, else what the reference runs.

    Attributes:
        path: the module's, as in `ConvSite`.
        variant: which of its shapes, likewise.
    """

    path: str
    variant: int


@dataclasses.dataclass(frozen=True)
class FrozenEvidence:
    """What a forward pass is in graphs that torch.compile freezes for inference.

    PyTorch's own convolution has its filter packed beforehand there: it takes less workspace than elsewhere,
    and less time.

    Attributes:
        path: the module's, as in `ConvSite`.
        variant: which of its shapes, likewise.
        workspace_bytes: what PyTorch's own takes there, beside its operands and the packed filter. That fits
            beside the buffer.
        times: of whole calls there; None where PyTorch's own is planned anyway, or the division could not be
            timed. Unless it is FASTER, such graphs hold PyTorch's own.
    """

    path: str
    variant: int
    workspace_bytes: int
    times: CallTimes | None = None

    @property
    def is_own(self) -> bool:
        """Whether such graphs hold PyTorch's own."""
        return self.times is None or not self.times.is_faster
