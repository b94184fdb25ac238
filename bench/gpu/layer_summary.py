"""The summary of layers on a card, made of the lines alone, without torch; losses as plainly as gains."""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.cpu import tables as common
from bench.cpu.lines import Measured, Recording, read_packed_too
from bench.cpu.markdown import markdown
from bench.gpu import layer_tables as tables
from bench.gpu.layer_kinds import ASKED
from mucudnn.intervals import Verdict, compare
from mucudnn.report import describe_facts

_PREFACE = (
    "Written by `make gpu-layers`, made of the lines beside it, which hold the raw spans. Times are",
    "medians with 95 % intervals from ranks, of interleaved rounds in an order drawn anew, by a clock that",
    "waits for the card; a span holds as many calls as fill a millisecond, at least one. Times are hot:",
    "calls of a span run back to back, and find in the cache what the last one left. **x1.9 means 1.9 times",
    "as fast.** What won in one set of rounds was timed again in fresh ones, and only those count. `Ours` is",
    "the fastest that keeps strictly to the limit, FASTER than PyTorch's own where the limit lets that run;",
    "both of PyTorch's own ways take whatever memory they like. With `cudnn.benchmark` PyTorch's own runs in",
    "a thread of its own, beside ours, in rounds of their own; where ours is PyTorch's own as it comes, its",
    "time there is that of the other rounds. `hides` and `takes` are bytes beside operands and result, as",
    "the allocator gives them.",
)

_ORIGINAL = (
    "Beside it: the original, µ-cuDNN, reports up to 4.54 times, and 1.60 on average, over DeepBench's",
    "convolutions on a V100-SXM2 (2018); limits, batch and kind of mean are not said. These are figures of",
    "another card and another cuDNN, and no base of anything here.",
)


class _Layer(NamedTuple):
    name: str


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the summary.

    Attributes:
        title: its heading.
        about: what it tells.
        body: yields its lines.
    """

    title: str
    about: tuple[str, ...]
    body: Callable[[Recording], Iterator[str]]


def summary(recording: Recording) -> str:
    """Return the summary in Markdown."""
    lines = ["# Convolution layers on a card", "", *_PREFACE, "", *_facts(recording)]
    for section in SECTIONS:
        about = [*section.about, ""] if section.about else []
        lines += ["", f"## {section.title}", "", *about, *section.body(recording)]
    return "\n".join(lines) + "\n"


def retell(folder: Path) -> list[Path]:
    """Write the summary of each file of lines in a folder, beside it; return where they are.

    Raises:
        OSError, EOFError: a file cannot be read or written, or a packed one is cut off.
    """
    stems = sorted({path.name.partition(".")[0] for path in folder.glob("layers*.jsonl*")})
    written = [folder / f"{stem}.md" for stem in stems]
    for path in written:
        recording = Recording.of(read_packed_too(path.with_suffix(".jsonl")))
        path.write_text(summary(recording), encoding="utf-8")
    return written


def _facts(recording: Recording) -> Iterator[str]:
    """Yield what every setting was measured with, at its last start."""
    for name, started in recording.started.items():
        environment = started.environment
        kinds = (environment.device, environment.software, environment.policy, environment.soft)
        facts = ". ".join(describe_facts(facts) for facts in kinds if facts)
        run = "" if started.run is None else f" ({common.facts(started.run)})"
        yield f"* {name}: {facts}{run}"


def _runs(recording: Recording) -> Iterator[str]:
    """Yield every run once, with its settings; lines of all of them stand here together."""
    settings: dict[str, list[str]] = {}
    commits: set[str] = set()
    for started in recording.starts:
        run = {name: text for name, text in (started.run or {}).items() if name != ASKED}
        settings.setdefault(common.facts(run), []).append(started.setting)
        commits.add(run.get("commit", "unknown"))
    yield f"{len(settings)} runs of {len(commits)} versions of the code."
    yield from (f"* {run}: {', '.join(dict.fromkeys(names))}" for run, names in settings.items())


def _coverage(recording: Recording) -> Iterator[str]:
    """Yield for each setting how many cases there are, and between which clocks of the card."""
    measured = tables.by_setting(recording)
    failed = Counter(case.setting for case in recording.failed if case not in recording.measured)
    rows = []
    for name in dict.fromkeys((*recording.started, *measured, *failed)):
        started, lines = recording.started.get(name), measured.get(name, [])
        run = {} if started is None or started.run is None else started.run
        rows.append((name, str(len(lines)), str(failed[name]), run.get(ASKED, "–"), _clocks(lines)))
    headings = ("setting", "measured", "failed", "asked for by the last run", "SM clock after a case")
    yield from markdown(headings, rows)


def _clocks(lines: Sequence[Measured]) -> str:
    told = [(line.conditions or {}).get("SM clock", "").partition(" ")[0] for line in lines]
    clocks = [int(each) for each in told if each.isdecimal()]
    return f"{min(clocks)} to {max(clocks)} MHz" if clocks else "–"


def _of_networks(recording: Recording) -> Iterator[str]:
    """Yield the tables of each network, whose cases were asked for with the same limits."""
    names = tables.networks(recording)
    for place, name in enumerate(names):
        yield from ("",) * (place > 0)
        yield from (f"### {name}", "", *tables.sums(recording, f"{name}/"))
        yield from ("", *tables.gains(recording, f"{name}/"))
    if not names:
        yield "None was measured."


def _of_deepbench(recording: Recording) -> Iterator[str]:
    yield from tables.sums(recording, tables.DEEPBENCH)
    yield ""
    yield from tables.gains(recording, tables.DEEPBENCH)
    yield from ("", *_ORIGINAL)


def _layers(recording: Recording) -> list[_Layer]:
    return [_Layer(name) for name in dict.fromkeys(case.layer for case in recording.measured)]


def _settings(recording: Recording) -> dict[str, str]:
    return {name: name for name in tables.by_setting(recording)}


def _without_gain(recording: Recording) -> Iterator[str]:
    """Yield the layers of each group of which nothing that was chosen was FASTER in fresh rounds."""
    for title, lines in common.groups(recording, _layers(recording), _settings(recording)):
        names = [line.case.layer for line in lines if not _gains(line)]
        yield f"* {title}: {len(names)} of {len(lines)}" + (f": {', '.join(names)}" if names else "")


def _gains(line: Measured) -> bool:
    own = line.proving.samples_s(line.own)
    keys = {key for choice in line.choices for key in (choice.key, choice.strict_key) if key is not None}
    return any(compare(own, line.proving.samples_s(key)) is Verdict.FASTER for key in keys)


def _what_runs(recording: Recording) -> Iterator[str]:
    return common.what_runs(recording, _layers(recording), _settings(recording))


def _measuring(recording: Recording) -> Iterator[str]:
    """Yield how long the measuring took, and what was refused."""
    lines = recording.measured.values()
    if lines:
        seconds = [line.seconds for line in lines]
        middle = statistics.median(seconds)
        yield f"{len(seconds)} cases in {sum(seconds):.0f} s, median {middle:.1f} s a case."
    refused = sorted({f"{line.case}: {text}" for line in lines for text in line.refused})
    yield f"Algorithms that were wrong or failed: {len(refused)}."
    yield from (f"* {text}" for text in refused)


_COMPARISONS = (
    "Of `pairs`, which were timed in the same rounds, all means are made; what is not paired is judged by",
    "both intervals, and FASTER and SLOWER count all. Each row makes as many comparisons as it has cases,",
    "and an interval misses once in twenty. Ratios' geometric mean is there for other publications only.",
)

SECTIONS: tuple[Section, ...] = (
    Section("Cases", (), _coverage),
    Section("Runs", ("What was measured by different code stands in the same tables.",), _runs),
    Section("DeepBench's training list", _COMPARISONS, _of_deepbench),
    Section("Networks", ("DeepBench stands above; cliffs have a table of their own.",), _of_networks),
    Section(
        "Workspace saved",
        (
            "Of cases of which PyTorch's own hides more than 40 MiB: how many times less is taken under the",
            "least limit where what keeps strictly to it takes at most 2 % more time (whole interval); 1",
            "where there is none.",
        ),
        tables.savings,
    ),
    Section(
        "Strict float32, 3x3: against the best without tiles",
        ("The base is the fastest of cuDNN's engines and PyTorch's own, divided or not, in the same limit.",),
        tables.tiles,
    ),
    Section(
        "PyTorch's own in parts (pytorch#81940)",
        ("Where PyTorch's own convolution of micro-batches is FASTER than of the whole mini-batch.",),
        tables.in_parts,
    ),
    Section(
        "Slower than PyTorch's own",
        (
            "With the whole interval. Where PyTorch's own hides no more than the limit it could have run;",
            "where it hides more, the loss is what keeping strictly to the limit costs.",
        ),
        common.losses,
    ),
    Section("Slower than `cudnn.benchmark`", ("With the whole interval.",), tables.behind_benchmark),
    Section(
        "Cliffs",
        (
            "Milliseconds per sample: more than 2^31 elements (pytorch#128936) beside one sample less,",
            "depthwise, three-dimensional, on three channels, grouped.",
        ),
        tables.cliffs,
    ),
    Section(
        "Nothing gained under any limit",
        ("Of what was chosen, strictly within the limit or not, nothing was FASTER than PyTorch's own.",),
        _without_gain,
    ),
    Section(
        "What runs",
        ("Where PyTorch's own may run whatever it takes.",),
        _what_runs,
    ),
    Section("Failed", (), tables.failures),
    Section("Errors against float64", (), common.errors),
    Section("Measuring", (), _measuring),
    Section("Layers", (), tables.times),
)
