"""The targets of `make bench-cpu`, and how far what was measured is from them."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from bench.cpu.choice import EIGHTH, HIDDEN_BYTES
from bench.cpu.layers import Layer
from bench.cpu.lines import Case, Measured, Recording
from bench.cpu.markdown import spread
from bench.cpu.means import Pair, geometric_mean, pair
from bench.cpu.settings import ONE, TWO, TWO_SPINNING_LESS, Setting
from mucudnn.intervals import Estimate
from mucudnn.problem import ConvOp, ConvProblem, Layout
from mucudnn.sizes import format_bytes

_MIB = 2**20

_CHANNELS = 64
"""Least channels, in and out, of the layers that the targets of dense filters are about."""

LEAST_SPEEDUP = 0.98
"""What the upper end of no layer's interval may lie below."""

_MOST_TIME = 1.03
"""What an eighth of the workspace may cost, relative to PyTorch's own."""

_FORWARD = (ConvOp.FPROP,)
_STEP = tuple(ConvOp)

Group = Callable[[ConvProblem], bool]


class Mean(Enum):
    """What stands for several layers."""

    GEOMETRIC = "geometric mean"
    BEST = "best layer"


@dataclasses.dataclass(frozen=True)
class Aim:
    """A speed-up of some layers that is wanted, or merely shown.

    Attributes:
        layers: what they are called.
        group: which they are.
        setting: threads.
        layout: of the tensors.
        limit_bytes: the limit.
        ops: whose times are added up.
        wanted: the least speed-up that reaches the target; None where there is no target.
        mean: what stands for all of them.
    """

    layers: str
    group: Group
    setting: Setting
    layout: Layout
    limit_bytes: int
    ops: tuple[ConvOp, ...]
    wanted: float | None
    mean: Mean = Mean.GEOMETRIC

    @property
    def text(self) -> str:
        """The aim in words."""
        what = "forward" if self.ops == _FORWARD else "forward + backward"
        return (
            f"{self.layers}, {what}, {format_bytes(self.limit_bytes)}, {self.layout}, {self.setting.text}: "
            f"{self.mean.value}"
        )


class Row(NamedTuple):
    """A line of the table of targets."""

    target: str
    wanted: str
    found: str
    verdict: str


def dense(taps: int) -> Group:
    """Return whether a problem is 2-D, dense, of stride 1, with r x r taps and 64 channels at least."""

    def is_dense(problem: ConvProblem) -> bool:
        return (
            problem.kernel_size == (taps, taps)
            and problem.stride == (1, 1)
            and problem.groups == 1
            and min(problem.in_channels, problem.out_channels) >= _CHANNELS
        )

    return is_dense


def _both(
    taps: int,
    setting: Setting,
    limit_mib: int,
    ops: tuple[ConvOp, ...],
    wanted: tuple[float | None, float | None],
    mean: Mean = Mean.GEOMETRIC,
) -> Iterator[Aim]:
    """Yield the aim in both layouts; `wanted` of channels_last stands first."""
    name = f"{taps}x{taps} stride 1, {_CHANNELS} channels and more"
    for layout, least in zip((Layout.CHANNELS_LAST, Layout.CONTIGUOUS), wanted, strict=True):
        yield Aim(name, dense(taps), setting, layout, limit_mib * _MIB, ops, least, mean)


AIMS: tuple[Aim, ...] = (
    *_both(3, ONE, 16, _FORWARD, (1.5, 1.4)),
    *_both(3, TWO_SPINNING_LESS, 16, _FORWARD, (1.4, 1.25)),
    *_both(3, TWO, 16, _FORWARD, (None, None)),
    *_both(3, ONE, 16, _STEP, (1.5, 1.35)),
    *_both(3, ONE, 64, _FORWARD, (1.7, 1.5)),
    *_both(3, ONE, 64, _STEP, (None, None)),
    *_both(3, ONE, 64, _FORWARD, (2.2, None), Mean.BEST),
    *_both(5, ONE, 16, _FORWARD, (2.0, 2.0)),
    *_both(11, ONE, 64, _FORWARD, (1.9, 1.9)),
    *_both(11, ONE, 16, _FORWARD, (None, None)),
    *_both(15, ONE, 64, _FORWARD, (None, 5.0)),
    *_both(15, ONE, 16, _FORWARD, (None, None)),
)
"""A tile's spectrum of 64 x 64 filters takes 17 MiB at t = 32, so large taps have their target at 64 MiB."""


def rows(recording: Recording, layers: Sequence[Layer]) -> Iterator[Row]:
    """Yield what became of each target."""
    core = [layer for layer in layers if layer.is_core]
    for aim in AIMS:
        yield _row(aim, recording, core)
    yield _no_loss(recording)
    yield _an_eighth(recording)


def _row(aim: Aim, recording: Recording, layers: Sequence[Layer]) -> Row:
    named = {
        layer.name: _pairs(aim, recording, layer.name)
        for layer in layers
        if aim.group(layer.problem(ConvOp.FPROP, aim.layout))
    }
    items = {name: found for name, found in named.items() if found is not None}
    wanted = "–" if aim.wanted is None else f"{aim.wanted:.2f}"
    if not items:
        return Row(aim.text, wanted, "–", "not measured")
    if aim.mean is Mean.GEOMETRIC:
        found, which = geometric_mean(list(items.values())), f"{len(items)} layers"
    else:
        which, found = max(
            ((name, geometric_mean([item])) for name, item in items.items()), key=lambda one: one[1].median
        )
    missing = len(named) - len(items)
    verdict = judged(aim.wanted, found) + (f"; {missing} of {len(named)} layers missing" if missing else "")
    return Row(aim.text, wanted, f"{spread(found)} ({which})", verdict)


def _pairs(aim: Aim, recording: Recording, layer: str) -> list[Pair] | None:
    """Return the times of a layer under the aim's limit, an op each; None if one is not measured."""
    pairs = []
    for op in aim.ops:
        line = recording.measured.get(Case(aim.setting.name, layer, aim.layout, op))
        choice = None if line is None else line.choice(aim.limit_bytes)
        if line is None or choice is None:
            return None
        pairs.append(pair(line, choice.key))
    return pairs


def judged(wanted: float | None, found: Estimate) -> str:
    """Return whether a speed-up reaches the least that is wanted, and how far it lies from it."""
    if wanted is None:
        return "no target"
    if found.median >= wanted:
        return f"reached, {found.median / wanted - 1:.1%} above"
    return f"not reached, {1 - found.median / wanted:.1%} below"


def _no_loss(recording: Recording) -> Row:
    """Whether any layer is proven slower than PyTorch's own, which is always a candidate."""
    speedups = {
        f"{line.case} at {format_bytes(choice.limit_bytes)}": line.speedup(choice.key)
        for line in recording.measured.values()
        for choice in line.choices
    }
    slow = {name: seen for name, seen in speedups.items() if seen.high < LEAST_SPEEDUP}
    return counted(
        "every layer, op, layout, setting and limit: upper end of the interval of the speed-up",
        f"{LEAST_SPEEDUP:.2f}",
        len(speedups),
        [f"{name} {spread(seen)}" for name, seen in slow.items()],
    )


def _an_eighth(recording: Recording) -> Row:
    """Whether an eighth of PyTorch's own workspace costs at most 3 % of time wherever that takes much."""
    hiding = [line for line in recording.measured.values() if line.own_bytes > HIDDEN_BYTES]
    return counted(
        f"where PyTorch's own hides more than {format_bytes(HIDDEN_BYTES)}: time with an {EIGHTH}th of that",
        f"at most x{_MOST_TIME:.2f}",
        len(hiding),
        [text for line in hiding if (text := _shortfall(line)) is not None],
    )


def _shortfall(line: Measured) -> str | None:
    """Return how much too slow the fastest division with an eighth of the workspace is; None if it is not."""
    keys = {each.strict_key for each in line.choices if each.strict_key is not None}
    small = [key for key in keys if line.bytes_of(key) * EIGHTH <= line.own_bytes]
    if not small:
        return f"{line.case}: nothing takes so little"
    speedup = max((line.speedup(key) for key in small), key=lambda seen: seen.median)
    slowdown = 1 / speedup.median
    return None if slowdown <= _MOST_TIME else f"{line.case}: time x{slowdown:.2f}"


_SHOWN = 5
"""Exceptions that a row names; the tables have all of them."""


def counted(target: str, wanted: str, n: int, exceptions: Sequence[str]) -> Row:
    """Return the row of a target that `n` things have to meet.

    Args:
        target: what is wanted, in words.
        wanted: the number.
        n: how many things were measured.
        exceptions: those of them that do not meet it.
    """
    if n == 0:
        return Row(target, wanted, "–", "not measured")
    found = f"{n - len(exceptions)} of {n}"
    if not exceptions:
        return Row(target, wanted, found, "reached")
    more = f"; and {len(exceptions) - _SHOWN} more" if len(exceptions) > _SHOWN else ""
    return Row(target, wanted, found, f"not reached: {'; '.join(exceptions[:_SHOWN])}{more}")
