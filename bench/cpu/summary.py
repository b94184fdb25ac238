"""The summary of a run, made of its lines alone: absolute times first, losses as plainly as gains."""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from bench.cpu import coverage, step_tables, tables, targets, way_tables
from bench.cpu.layers import Layer
from bench.cpu.lines import Recording
from bench.cpu.markdown import markdown
from bench.cpu.settings import REMOVED_PREFIXES, SETTINGS
from mucudnn.intervals import estimate

_ALLOCATOR = ("LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_", "THP_MEM_ALLOC_ENABLE")
"""Variables, or how they begin, that change how memory is handed out."""

_PREFACE = (
    "Written by `make bench-cpu`, made of the files .jsonl beside it, which hold the raw",
    "spans. Every figure stands against PyTorch's own convolution, undivided, in the same layout, on the",
    "same operands, in the same process: **x1.9 means 1.9 times as fast.** Times are medians with 95 %",
    "intervals from ranks, of interleaved rounds in an order drawn anew; a speed-up is the median of the",
    "rounds' quotients. What won in one set of rounds was timed again in fresh ones, and only those count.",
    "PyTorch's own is always a candidate, also where it hides more memory than the limit; what keeps",
    "strictly to the limit stands beside it then. `hides` and `takes` are bytes beside operands and result,",
    "seen in a process of their own. `of GEMM` is the rate of nominal operations (two per multiply-add of",
    "the direct algorithm) over that of torch.mm of 2048x2048 matrices at the same number of threads;",
    "`bound` is what the algorithm's number of multiplications would allow at that rate.",
)


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the summary.

    Attributes:
        title: its heading.
        body: yields its lines.
    """

    title: str
    body: Callable[[Recording, Sequence[Layer]], Iterator[str]]


def summary(
    recording: Recording, layers: Sequence[Layer], facts: Mapping[str, str], pictures: Sequence[str] = ()
) -> str:
    """Return the summary in Markdown.

    Args:
        recording: what was measured.
        layers: all that there is to measure, in their order.
        facts: of the run, for the header.
        pictures: names of files beside it that show what was measured.
    """
    lines = ["# Convolution layers on the processor", "", *_PREFACE, ""]
    lines += [f"* {name}: {value}" for name, value in facts.items()]
    lines += [text for name in pictures for text in ("", f"![{name.partition('.')[0]}]({name})")]
    for section in SECTIONS:
        lines += ["", f"## {section.title}", "", *section.body(recording, layers)]
    return "\n".join(lines) + "\n"


def target_table(recording: Recording, layers: Sequence[Layer]) -> Iterator[str]:
    """Yield the table of targets."""
    yield from markdown(("target", "wanted", "found", "verdict"), list(target_rows(recording, layers)))


def target_rows(recording: Recording, layers: Sequence[Layer]) -> Iterator[targets.Row]:
    """Yield what became of each target, of layers and of training steps."""
    yield from targets.rows(recording, layers)
    yield from step_tables.target_rows(recording)


def _settings(recording: Recording, layers: Sequence[Layer]) -> Iterator[str]:  # noqa: ARG001  # a section's
    """Yield what every process was, and what matrix products it reached."""
    for setting in SETTINGS.values():
        started, rates = recording.started.get(setting.name), recording.rates.get(setting.name)
        if started is None or rates is None:
            yield f"* {setting.text}: not measured"
            continue
        seen, policy = estimate(rates), started.environment.policy
        yield (
            f"* {setting.text}: torch.mm {seen.median / 1e9:.0f} GFLOP/s [{seen.low / 1e9:.0f}, "
            f"{seen.high / 1e9:.0f}] (least {min(rates) / 1e9:.0f}, n = {seen.samples}); "
            f"{tables.facts(policy)}"
        )
    prefixes = ", ".join(f"{prefix}*" for prefix in REMOVED_PREFIXES)
    yield f"* No other variable {prefixes} was set. {_allocator(recording)}"


def _allocator(recording: Recording) -> str:
    """Return which allocator there was, in a sentence."""
    started = next(iter(recording.started.values()), None)
    if started is None:
        return "The allocator is not known."
    changed = {name: fact for name, fact in started.environment.policy.items() if name.startswith(_ALLOCATOR)}
    libc = started.environment.soft.get("libc", "libc")
    return f"Allocator: that of {libc}, " + (tables.facts(changed) if changed else "as it comes") + "."


def _times(recording: Recording, layers: Sequence[Layer]) -> Iterator[str]:  # noqa: ARG001  # a section's
    """Yield how long the measuring took."""
    seconds = [line.seconds for line in recording.measured.values()]
    if seconds:
        middle = statistics.median(seconds)
        yield f"{len(seconds)} cases in {sum(seconds):.0f} s, median {middle:.1f} s a case."
    taken = [
        each.others
        for line in recording.measured.values()
        for each in (line.deciding, line.proving)
        if each.others is not None
    ]
    if taken:
        yield (
            f"Others took {statistics.median(taken):.2f} processors on average while rounds ran "
            f"(median), {max(taken):.2f} at most."
        )
    refused = sorted(
        {f"{line.case}: {text}" for line in recording.measured.values() for text in line.refused}
    )
    yield f"Algorithms that were wrong or failed: {len(refused)}."
    yield from (f"* {text}" for text in refused)


SECTIONS: tuple[Section, ...] = (
    Section("Targets", target_table),
    Section("Threads, allocator, matrix products", _settings),
    Section("Training steps", step_tables.section),
    Section("The fastest of PyTorch's own ways against the fastest patched one", way_tables.section),
    Section("Sums of times", tables.sums),
    Section("Slower than PyTorch's own", lambda recording, _: tables.losses(recording)),
    Section("Nothing gained under any limit", tables.without_gain),
    Section("Layers", tables.layer_tables),
    Section("What runs", tables.what_runs),
    Section("What dividing adds", tables.dividing),
    Section("Predicted and measured", tables.predictions),
    Section("Errors against float64", lambda recording, _: tables.errors(recording)),
    Section("Shares of the steps", step_tables.shares),
    Section("Not measured", coverage.missing),
    Section("Measuring", _times),
    Section("Shapes", lambda _, layers: coverage.sources(layers)),
)
"""In their order; a program that measures something else on the same machine may add its own."""
