"""The tables of the summary, in Markdown: layers by setting, layout and op, and what they show together."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from bench.cpu.bounds import saving
from bench.cpu.lines import Case, Choice, Measured, Recording
from bench.cpu.markdown import markdown, milliseconds, spread
from bench.cpu.means import geometric_mean, pair, total
from bench.cpu.settings import SETTINGS
from mucudnn.division import is_of_one_part
from mucudnn.intervals import estimate
from mucudnn.problem import ConvOp, Layout
from mucudnn.sizes import format_bytes

_DETAILED_BYTES = 16 * 2**20
"""The limit under which tables tell what runs; the largest where it was not asked for."""

_MS = 1e3


_TITLES: Mapping[str, str] = {setting.name: setting.text for setting in SETTINGS.values()}
"""Of the processor's settings, by name."""


class Named(Protocol):
    """A layer, of which tables need no more."""

    @property
    def name(self) -> str:
        """As in the lines."""


def groups(
    recording: Recording, layers: Sequence[Named], settings: Mapping[str, str] = _TITLES
) -> Iterator[tuple[str, list[Measured]]]:
    """Yield a title and the measured layers, in their order, for each setting, layout and op.

    Args:
        recording: what was measured.
        layers: in their order.
        settings: titles by name, in their order.
    """
    for setting, title in settings.items():
        for layout in Layout:
            for op in ConvOp:
                cases = (Case(setting, layer.name, layout, op) for layer in layers)
                found = [recording.measured[case] for case in cases if case in recording.measured]
                if found:
                    yield f"{title}, {layout}, {op}", found


def layer_tables(recording: Recording, layers: Sequence[Named]) -> Iterator[str]:
    """Yield a table for each setting, layout and op: PyTorch's own first, then every limit."""
    for title, lines in groups(recording, layers):
        limits, detailed = common_limits(lines), detailed_limit(lines)
        rate = _rate(recording, lines[0].case.setting)
        yield from (f"### {title}", "")
        headings = (
            *("layer", "batch", "PyTorch's own, ms", "of GEMM", "hides"),
            *(f"x at {format_bytes(limit)}" for limit in limits),
            *(f"runs at {format_bytes(detailed)}", "takes", "ms", "of GEMM", "bound"),
        )
        yield from markdown(headings, [_cells(line, limits, detailed, rate) for line in lines])
        yield ""


def common_limits(lines: Sequence[Measured]) -> list[int]:
    """Return the limits that all lines have, so without the one that is a part of what a layer hides."""
    return sorted(set.intersection(*({each.limit_bytes for each in line.choices} for line in lines)))


def detailed_limit(lines: Sequence[Measured]) -> int:
    """Return the limit under which it is told what runs, in bytes."""
    limits = common_limits(lines)
    return _DETAILED_BYTES if _DETAILED_BYTES in limits else limits[-1]


def _rate(recording: Recording, setting: str) -> float | None:
    rates = recording.rates.get(setting)
    return statistics.median(rates) if rates else None


def _cells(line: Measured, limits: Sequence[int], detailed: int, rate: float | None) -> tuple[str, ...]:
    choice = line.choice(detailed)
    key = line.own if choice is None else choice.key
    own, chosen = line.seconds_of(line.own), line.seconds_of(key)
    return (
        line.case.layer,
        str(line.problem.batch),
        milliseconds(own),
        _share(line, own.median, rate),
        format_bytes(line.own_bytes),
        *(_at(line, line.choice(limit)) for limit in limits),
        short(key),
        format_bytes(line.bytes_of(key)),
        milliseconds(chosen),
        _share(line, chosen.median, rate),
        _bound(line, key),
    )


def _at(line: Measured, choice: Choice | None) -> str:
    """Return the speed-up under a limit; where PyTorch's own exceeds it, also that of what keeps to it."""
    if choice is None:
        return "–"
    text = "own" if choice.key == line.own else spread(line.speedup(choice.key))
    if choice.strict_key == choice.key:
        return text
    if choice.strict_key is None:
        return f"{text}; strict: nothing fits"
    return f"{text}; strict: {spread(line.speedup(choice.strict_key))}"


def short(key: str) -> str:
    """Return a key without the backends that its algorithms are named by."""
    return key.replace("cpu:", "").replace("cudnn:", "")


def _share(line: Measured, seconds: float, rate: float | None) -> str:
    """Return the rate of nominal operations relative to that of matrix products."""
    return "–" if rate is None else f"{line.problem.flops / seconds / rate:.0%}"


def _bound(line: Measured, key: str) -> str:
    factor = saving(line.problem, key)
    return "–" if factor is None else f"{float(factor):.0%}"


def sums(recording: Recording, layers: Sequence[Named]) -> Iterator[str]:
    """Yield for each group and limit the quotient of the sums of times, and the geometric mean beside it."""
    headings = ("group", "layers", "limit", "PyTorch's own, sum", "sum / sum", "geometric mean")
    rows = []
    for title, lines in groups(recording, layers):
        seconds = sum(line.seconds_of(line.own).median for line in lines)
        for limit in common_limits(lines):
            pairs = [pair(line, choice.key) for line in lines if (choice := line.choice(limit)) is not None]
            mean = geometric_mean([[each] for each in pairs])
            texts = (format_bytes(limit), f"{seconds * _MS:.4g} ms", spread(total(pairs)), spread(mean))
            rows.append((title, str(len(lines)), *texts))
    yield from markdown(headings, rows)


def losses(recording: Recording) -> Iterator[str]:
    """Yield whatever is slower than PyTorch's own with its whole interval, strict or not."""
    headings = ("case", "limit", "x", "runs", "PyTorch's own hides")
    rows = []
    for line in recording.measured.values():
        for choice in line.choices:
            for key in dict.fromkeys((choice.key, choice.strict_key)):
                if key is not None and line.speedup(key).high < 1:
                    cells = (format_bytes(choice.limit_bytes), spread(line.speedup(key)), short(key))
                    rows.append((str(line.case), *cells, format_bytes(line.own_bytes)))
    if rows:
        yield from markdown(headings, rows)
    else:
        yield "None."


def without_gain(
    recording: Recording, layers: Sequence[Named], settings: Mapping[str, str] = _TITLES
) -> Iterator[str]:
    """Yield the layers of each group where PyTorch's own runs under every limit."""
    for title, lines in groups(recording, layers, settings):
        names = [line.case.layer for line in lines if all(choice.key == line.own for choice in line.choices)]
        yield f"* {title}: {len(names)} of {len(lines)}" + (f": {', '.join(names)}" if names else "")


def dividing(recording: Recording, layers: Sequence[Named]) -> Iterator[str]:
    """Yield what micro-batches add: the best undivided candidate against the fastest division."""
    headings = ("group", "layers", "best undivided candidate / what runs under the largest limit")
    rows = []
    for title, lines in groups(recording, layers):
        quotients = [each for line in lines if (each := _against_undivided(line)) is not None]
        if quotients:
            rows.append((title, str(len(quotients)), _quartiles(quotients)))
    yield from markdown(headings, rows)


def what_runs(
    recording: Recording, layers: Sequence[Named], settings: Mapping[str, str] = _TITLES
) -> Iterator[str]:
    """Yield under each limit how many layers stay PyTorch's own, and how the others are faster.

    Whoever gains by another algorithm gains nothing by dividing.
    """
    headings = ("group", "limit", "layers", "PyTorch's own", "another algorithm, undivided", "micro-batches")
    rows = []
    for title, lines in groups(recording, layers, settings):
        for limit in common_limits(lines):
            keys = [choice.key for line in lines if (choice := line.choice(limit)) is not None]
            own = sum(key == line.own for key, line in zip(keys, lines, strict=True))
            divided = sum(not is_of_one_part(key) for key in keys)
            counts = (own, len(keys) - own - divided, divided)
            rows.append((title, format_bytes(limit), str(len(keys)), *map(str, counts)))
    yield from markdown(headings, rows)


def _against_undivided(line: Measured) -> float | None:
    if line.undivided is None:
        return None
    key = max(line.choices, key=lambda each: each.limit_bytes).key
    best, present = (estimate(line.deciding.samples_s(each)).median for each in (line.undivided, key))
    return best / present


def predictions(recording: Recording, layers: Sequence[Named]) -> Iterator[str]:
    """Yield how far finished divisions lie from the sums of their parts' times."""
    rows = []
    for title, lines in groups(recording, layers):
        errors = [
            estimate(line.deciding.samples_s(rival.key)).median / rival.predicted_s
            for line in lines
            for rival in line.rivals
            if rival.predicted_s > 0
        ]
        if errors:
            rows.append((title, str(len(errors)), _quartiles(errors)))
    yield from markdown(("group", "divisions", "measured / predicted"), rows)


def errors(recording: Recording) -> Iterator[str]:
    """Yield the largest error of each algorithm, and where it occurred."""
    largest: dict[str, tuple[float, str]] = {}
    counts: dict[str, int] = {}
    for line in recording.measured.values():
        for algorithm, error in line.errors.items():
            counts[algorithm] = counts.get(algorithm, 0) + 1
            largest[algorithm] = max(largest.get(algorithm, (0.0, "")), (error, str(line.case)))
    rows = [
        (short(algorithm), str(counts[algorithm]), f"{error:.1e}", case)
        for algorithm, (error, case) in sorted(largest.items())
    ]
    yield from markdown(("algorithm", "cases", "largest error", "where"), rows)


def _quartiles(values: Sequence[float]) -> str:
    """Return the median with the quartiles and the ends."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.2f}, quartiles {low:.2f} and {high:.2f}, ends {min(values):.2f} and {max(values):.2f}"


def facts(values: Mapping[str, str]) -> str:
    """Return facts in a line."""
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "none"
