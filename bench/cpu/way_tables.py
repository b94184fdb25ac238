"""Networks in all ways, in the summary: the fastest of PyTorch's own against the fastest patched one."""

from collections.abc import Callable, Iterator, Sequence

from bench.cpu.layers import Layer
from bench.cpu.lines import Recording
from bench.cpu.markdown import markdown, milliseconds, spread
from bench.cpu.settings import SETTINGS
from bench.cpu.step_lines import Tuned
from bench.cpu.step_tables import break_even_told, seconds_told
from bench.cpu.way_cases import AS_IT_COMES, WAY_NETWORKS, Use, WayCase, cases_of, ways_of
from bench.cpu.way_lines import LEAST_SAMPLES, WayFailed, WayMeasured, percentile, unpatched
from mucudnn.intervals import estimate
from mucudnn.sizes import format_bytes

_PREFACE = (
    "Both layouts, eager and by `torch.compile`; in inference frozen too, where batch norm is folded into",
    "filters and these are packed for oneDNN; once without oneDNN; and all of these but the last patched.",
    "All ways of a row ran in the same rounds in one process. The fastest of PyTorch's own, the fastest",
    "patched one with its unpatched twin, and PyTorch as it comes (contiguous, eager) ran once more in fresh",
    "rounds, which alone count here. **x** is the median of these rounds' quotients, of the fastest patched",
    "way; the verdict is against the fastest of PyTorch's own, which these rounds name: that favours it.",
)


def section(recording: Recording, layers: Sequence[Layer]) -> Iterator[str]:  # noqa: ARG001  # a section's
    """Yield all that there is to say of networks in all ways."""
    lines = known_ways(recording)
    if not lines:
        yield 'Not measured; `make bench-cpu ARGS="--ways"` does.'
        return
    yield from _PREFACE
    yield f"Comparisons with the fastest of PyTorch's own: {len(lines)}."
    for table in (_fastest, _latencies, _every_way, _costs):
        yield from ("", *table(lines))
    yield ""
    names = {line.case.network for line in lines}
    yield from (f"* {each.name}: {each.source}; {each.data}." for each in WAY_NETWORKS if each.name in names)
    yield from (f"* {line.case}: {way} failed: {why}" for line in lines for way, why in line.failed.items())
    yield from (f"* {failed.case} failed: {failed.reason}" for failed in recording.failed_ways.values())
    known = {*recording.ways, *recording.failed_ways}
    absent = [str(case) for case in cases_of(WAY_NETWORKS, SETTINGS) if case not in known]
    if absent:
        yield f"* Not measured: {', '.join(absent)}."


def known_ways(recording: Recording) -> list[WayMeasured]:
    """Return what was measured, in its order."""
    every = cases_of(WAY_NETWORKS, SETTINGS)
    return [recording.ways[case] for case in every if case in recording.ways]


def told(line: WayMeasured | WayFailed) -> str:
    """Return what a line of progress says of a case."""
    if isinstance(line, WayFailed):
        return f"failed: {line.reason}"
    own, divided = (milliseconds(line.seconds_of(way)) for way in (line.own, line.divided))
    return (
        f"{own} ms ({line.own}) -> {divided} ms ({line.divided}), "
        f"x{spread(line.speedup(line.own))} {line.verdict}  ({line.seconds:.0f} s)"
    )


def title(case: WayCase, shape: Sequence[int]) -> str:
    """Return what a case is called: "inference of resnet18, 8x3x32x32, 2 threads"."""
    size = "x".join(map(str, shape))
    return f"{case.use} of {case.network}, {size}, {SETTINGS[case.setting].text}"


def _title(line: WayMeasured) -> str:
    return title(line.case, line.shape)


def _fastest(lines: Sequence[WayMeasured]) -> Iterator[str]:
    headings = (
        *("what", "as it comes, ms", "fastest of PyTorch's own, ms", "fastest patched, ms"),
        *("x of the fastest", "verdict", "x of as it comes", "rounds", "processors that others took"),
    )
    rows = [
        (
            _title(line),
            milliseconds(line.seconds_of(str(AS_IT_COMES))),
            _named(line, line.own),
            _named(line, line.divided),
            spread(line.speedup(line.own)),
            str(line.verdict),
            spread(line.speedup(str(AS_IT_COMES))),
            str(line.speedup(line.own).samples),
            "–" if line.proving.others is None else f"{line.proving.others:.2f}",
        )
        for line in lines
    ]
    yield from markdown(headings, rows)


def _named(line: WayMeasured, way: str) -> str:
    return f"{milliseconds(line.seconds_of(way))}, {unpatched(way)}"


def _latencies(lines: Sequence[WayMeasured]) -> Iterator[str]:
    """Tails of inference; a percentile that there are too few samples for has a dash."""
    serving = [line for line in lines if line.case.use is Use.INFERENCE]
    if not serving:
        return
    least = ", ".join(f"{samples} for the {share:.0%}" for share, samples in LEAST_SAMPLES.items())
    yield from (
        "Latencies of inference in ms, one call at a time: the median and the percentiles of the proving",
        f"rounds, where there are enough of them ({least}).",
        "",
    )
    shares = (0.5, *LEAST_SAMPLES)
    rows = [
        (_title(line), way, *(_percentile(line, way, share) for share in shares))
        for line in serving
        for way in line.proving.spans_ns
    ]
    yield from markdown(("what", "way", *(f"p{share * 100:.0f}" for share in shares)), rows)


def _percentile(line: WayMeasured, way: str, share: float) -> str:
    found = percentile(line.proving.samples_s(way), share) if line.proving.calls == 1 else None
    return "–" if found is None else f"{found * 1e3:.4g}"


def _every_way(lines: Sequence[WayMeasured]) -> Iterator[str]:
    yield from (
        "All ways, in ms, by the choosing rounds; in brackets how far results are from float64 on the same",
        "weights, relative to the largest: of the scores in inference, of the first step's loss in training.",
        "",
    )
    every = list(dict.fromkeys(str(way) for use in Use for way in ways_of(use)))
    rows = [(way, *(_way(line, way) for line in lines)) for way in every]
    yield from markdown(("way", *(_title(line) for line in lines)), rows)


def _way(line: WayMeasured, way: str) -> str:
    if way not in line.choosing.spans_ns:
        return "failed" if way in line.failed else "–"
    return f"{milliseconds(estimate(line.choosing.samples_s(way)))} ({line.errors[way]:.0e})"


def _costs(lines: Sequence[WayMeasured]) -> Iterator[str]:
    yield from (
        "What it costs to get there: tuning in each layout, from an empty store; calls (steps in training)",
        "after which that of the fastest patched way is paid back, against the fastest of PyTorch's own; the",
        "first call of compiled ways, which compiles; the most that a convolution was seen to take, where",
        f"the limit is {format_bytes(lines[0].limit_bytes)}.",
        "",
    )
    headings = ("what", "tuned in", "paid back after", "first call of the two fastest", "workspace", "kept")
    rows = [
        (
            _title(line),
            _by_layout(line, seconds_told),
            break_even_told(line.break_even),
            ", ".join(f"{line.ready_s[way]:.0f} s" for way in (line.own, line.divided)),
            _by_layout(line, lambda cost: format_bytes(cost.seen_bytes or 0)),
            _by_layout(line, lambda cost: f"{cost.kept} of {len(cost.runs)}"),
        )
        for line in lines
    ]
    yield from markdown(headings, rows)


def _by_layout(line: WayMeasured, text: Callable[[Tuned], str]) -> str:
    return "; ".join(f"{layout} {text(cost)}" for layout, cost in line.tuned.items())
