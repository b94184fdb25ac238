"""The tables of the summary of layers on a card, in Markdown, made of the lines alone."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from bench.cpu.lines import BENCHMARK, Choice, Measured, Recording
from bench.cpu.markdown import markdown, milliseconds, spread
from bench.cpu.means import Pair, sum_of_medians
from bench.cpu.tables import common_limits, short
from bench.gpu.layer_kinds import CLIFFS, IN_PARTS, UNDIVIDED, UNTILED
from bench.gpu.layer_means import (
    Compared,
    Gain,
    Unpaired,
    against_benchmark,
    compared,
    hides_much,
    of_family,
    quotient,
    workspace_saving,
)
from mucudnn.intervals import Estimate, Verdict, compare, estimate
from mucudnn.problem import ConvProblem
from mucudnn.sizes import format_bytes

DEEPBENCH = "deepbench/"
_VGG = ("vgg16/",)
_VGG_LARGE = ("vgg16_b",)
_RESNET_LARGE = ("resnet18_b",)
_RESNET = ("resnet18/", "resnet50/")

_WANTED_SAVING = 10.0

_BASES: Mapping[str, Callable[[Compared], Pair | Unpaired]] = {
    "the undivided best in the same limit": lambda each: each.undivided,
    "PyTorch as it comes": lambda each: each.own,
    "PyTorch with `cudnn.benchmark`": lambda each: each.benchmark,
}


def by_setting(recording: Recording) -> dict[str, list[Measured]]:
    """Return what was measured, by the names of settings, all in the order of the lines."""
    found: dict[str, list[Measured]] = {}
    for line in recording.measured.values():
        found.setdefault(line.case.setting, []).append(line)
    return found


def _of_networks(recording: Recording) -> dict[str, list[Measured]]:
    """Return the same without cliffs: the network's own layer stands there if any has it."""
    return {
        setting: some
        for setting, lines in by_setting(recording).items()
        if (some := [line for line in lines if not line.case.layer.startswith(CLIFFS)])
    }


def networks(recording: Recording) -> list[str]:
    """Return the names of networks of which layers were measured, but for DeepBench and cliffs."""
    layers = (case.layer for case in recording.measured if not case.layer.startswith((DEEPBENCH, CLIFFS)))
    return list(dict.fromkeys(map(_network, layers)))


def _network(layer: str) -> str:
    return layer.partition("/")[0]


def _groups(recording: Recording, prefix: str) -> Iterator[tuple[str, int, int, list[Compared]]]:
    """Yield for each setting and limit how many cases there are, and those with all bases."""
    for setting, lines in _of_networks(recording).items():
        some = [line for line in lines if line.case.layer.startswith(prefix)]
        for limit in common_limits(some) if some else ():
            found = [each for line in some if (each := compared(line, limit)) is not None]
            yield setting, limit, len(some), found


def sums(recording: Recording, prefix: str) -> Iterator[str]:
    """Yield the sums of the medians of cases whose layers' names begin so, by setting and limit."""
    headings = (
        "setting", "limit", "cases", "not compared", "as it comes, ms", "`benchmark`, ms", "undivided, ms",
        "ours, ms",
    )  # fmt: skip
    rows = []
    for setting, limit, cases, found in _groups(recording, prefix):
        samples = (
            [each.own.own for each in found],
            [each.benchmark.own for each in found],
            [each.undivided.own for each in found],
            [each.own.chosen for each in found],
        )
        seconds = (milliseconds(sum_of_medians(some)) if some else "–" for some in samples)
        rows.append((setting, format_bytes(limit), str(cases), str(cases - len(found)), *seconds))
    yield from markdown(headings, rows)


def gains(recording: Recording, prefix: str) -> Iterator[str]:
    """Yield how ours compares with each base over the same cases."""
    headings = ("setting", "limit", "against", *_GAIN_HEADINGS)
    rows = []
    for setting, limit, _, found in _groups(recording, prefix):
        if not found:
            continue
        for base, pair_of in _BASES.items():
            gain = Gain.of([each.line for each in found], [pair_of(each) for each in found])
            rows.append((setting, format_bytes(limit), base, *_cells(gain)))
    yield from markdown(headings, rows)


_GAIN_HEADINGS = (
    "pairs", "not paired", "sum / sum", "geometric mean", "largest FASTER", "where", "FASTER", "SLOWER",
)  # fmt: skip


def _cells(gain: Gain) -> tuple[str, ...]:
    return (
        str(gain.cases),
        str(gain.unpaired),
        *("–" if each is None else spread(each) for each in (gain.sums, gain.geometric, gain.largest)),
        gain.where or "–",
        str(gain.faster),
        str(gain.slower),
    )


def savings(recording: Recording) -> Iterator[str]:
    """Yield how much less workspace does as well, of layers of which PyTorch's own hides much."""
    headings = ("setting", "layers", "cases", "median saving", f"{_WANTED_SAVING:.0f}x and more", "none")
    rows = []
    for setting, lines in _of_networks(recording).items():
        hiding = [line for line in lines if hides_much(line)]
        for title, prefixes in (
            ("all", ("",)),
            ("VGG", _VGG),
            ("VGG, large batches", _VGG_LARGE),
            ("ResNet", _RESNET),
            ("ResNet, large batches", _RESNET_LARGE),
        ):
            factors = [workspace_saving(line) for line in hiding if line.case.layer.startswith(prefixes)]
            if factors:
                reached = sum(factor >= _WANTED_SAVING for factor in factors)
                counts = (str(len(factors)), _times_less(statistics.median(factors)), str(reached))
                rows.append((setting, title, *counts, str(sum(factor <= 1 for factor in factors))))
    yield from markdown(headings, rows)


def _times_less(factor: float) -> str:
    return "to nothing" if math.isinf(factor) else f"{factor:.3g}x"


def tiles(recording: Recording) -> Iterator[str]:
    """Yield what runs of strict float32 3x3 layers against the best without tiles in the same limit."""
    rows = []
    for setting, lines in _of_networks(recording).items():
        some = [line for line in lines if _is_for_tiles(line.problem)]
        if not setting.startswith("float32") or not some:
            continue
        for limit in common_limits(some):
            found = [
                (line, pair)
                for line, choice in _choices(some, limit)
                if (pair := of_family(line, choice, UNTILED)) is not None
            ]
            if found:
                gain = Gain.of([line for line, _ in found], [pair for _, pair in found])
                rows.append((setting, format_bytes(limit), *_cells(gain)))
    yield from markdown(("setting", "limit", *_GAIN_HEADINGS), rows)


def _is_for_tiles(problem: ConvProblem) -> bool:
    """Whether tiles can compute a layer of 3x3: its filter neither skips pixels nor is spread."""
    return problem.kernel_size == (3, 3) and {*problem.stride, *problem.dilation} == {1}


def _choices(lines: Sequence[Measured], limit: int) -> list[tuple[Measured, Choice]]:
    return [(line, choice) for line in lines if (choice := line.choice(limit)) is not None]


def in_parts(recording: Recording) -> Iterator[str]:
    """Yield where PyTorch's own in parts is FASTER than PyTorch's own, under the least limit where it is."""
    counts, rows = [], []
    for setting, lines in by_setting(recording).items():
        found = [row for line in lines if (row := _in_parts(line)) is not None]
        counts.append(f"* {setting}: {len(found)} of {len(lines)}")
        rows += found
    yield from counts
    if rows:
        yield ""
        yield from markdown(("case", "limit", "x", "runs", "takes", "PyTorch's own hides"), rows)


def _in_parts(line: Measured) -> tuple[str, ...] | None:
    own_s = line.proving.samples_s(line.own)
    for choice in sorted(line.choices, key=lambda each: each.limit_bytes):
        key = choice.of_family(IN_PARTS)
        if key is not None and compare(own_s, line.proving.samples_s(key)) is Verdict.FASTER:
            sizes = (format_bytes(line.bytes_of(key)), format_bytes(line.own_bytes))
            gain = spread(line.speedup(key))
            return (str(line.case), format_bytes(choice.limit_bytes), gain, short(key), *sizes)
    return None


def cliffs(recording: Recording) -> Iterator[str]:
    """Yield times per sample of layers of which it was reported that PyTorch is slow, with ours."""
    headings = ("case", "batch", "own a sample", "`benchmark` a sample", "limit", "ours a sample", "x")
    rows = []
    for line in recording.measured.values():
        if line.case.layer.startswith(CLIFFS) and line.choices:
            choice = max(line.choices, key=lambda each: each.limit_bytes)
            benchmark = None if line.benchmark is None else line.benchmark.samples_s(BENCHMARK)
            ours = None if choice.strict_key is None else line.proving.samples_s(choice.strict_key)
            rows.append((
                str(line.case), str(line.problem.batch),
                *_a_sample(line, line.proving.samples_s(line.own), benchmark),
                format_bytes(choice.limit_bytes), *_a_sample(line, ours),
                "–" if choice.strict_key is None else spread(line.speedup(choice.strict_key)),
            ))  # fmt: skip
    if rows:
        yield from markdown(headings, rows)
    else:
        yield "None was measured."


def _a_sample(line: Measured, *samples: Sequence[float] | None) -> Iterator[str]:
    for some in samples:
        yield "–" if some is None else milliseconds(estimate([each / line.problem.batch for each in some]))


def behind_benchmark(recording: Recording) -> Iterator[str]:
    """Yield what is slower than PyTorch's own with `cudnn.benchmark` with its whole interval."""
    headings = ("case", "limit", "x", "rounds", "runs", "PyTorch's own hides")
    rows = []
    for line in recording.measured.values():
        for choice in line.choices:
            pair = against_benchmark(line, choice)
            if pair is not None and choice.strict_key is not None and (seen := quotient(pair)).high < 1:
                rounds = "the same" if isinstance(pair, Pair) else "others"
                cells = (format_bytes(choice.limit_bytes), spread(seen), rounds, short(choice.strict_key))
                rows.append((str(line.case), *cells, format_bytes(line.own_bytes)))
    if rows:
        yield from markdown(headings, rows)
    else:
        yield "None."


def failures(recording: Recording) -> Iterator[str]:
    """Yield the cases that failed, and why."""
    rows = [(str(case), line.reason) for case, line in recording.failed.items()]
    if rows:
        yield from markdown(("case", "reason"), rows)
    else:
        yield "None."


def times(recording: Recording) -> Iterator[str]:
    """Yield the times of every case: all bases, and ours at each limit that all cases of its table have.

    Each setting has a table for each network, whose cases were asked for with the same limits.
    """
    for setting, lines in by_setting(recording).items():
        for network in dict.fromkeys(_network(line.case.layer) for line in lines):
            yield from (f"### {setting}, {network}, ms", "")
            yield from _table_of_times([line for line in lines if _network(line.case.layer) == network])
            yield ""


def _table_of_times(lines: Sequence[Measured]) -> Iterator[str]:
    limits = common_limits(lines)
    at_limits = [
        (f"undivided at {name}", f"ours at {name}", "runs", "takes") for name in map(format_bytes, limits)
    ]
    headings = ("layer", "op", "batch", "own", "hides", "`benchmark`", *itertools.chain(*at_limits))
    yield from markdown(headings, [_times(line, limits) for line in lines])


def _times(line: Measured, limits: Sequence[int]) -> tuple[str, ...]:
    benchmark = None if line.benchmark is None else estimate(line.benchmark.samples_s(BENCHMARK))
    cells = [
        line.case.layer,
        line.case.op,
        str(line.problem.batch),
        milliseconds(line.seconds_of(line.own)),
        format_bytes(line.own_bytes),
        _ms(benchmark),
    ]
    for _, choice in itertools.chain.from_iterable(_choices([line], limit) for limit in limits):
        undivided = choice.of_family(UNDIVIDED)
        cells.append(_ms(None if undivided is None else line.seconds_of(undivided)))
        if choice.strict_key is None:
            cells += ["–", "nothing fits", "–"]
        else:
            ours = milliseconds(line.seconds_of(choice.strict_key))
            cells += [ours, short(choice.strict_key), format_bytes(line.bytes_of(choice.strict_key))]
    return tuple(cells)


def _ms(seconds: Estimate | None) -> str:
    return "–" if seconds is None else milliseconds(seconds)
