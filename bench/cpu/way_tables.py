"""Networks in all ways, in the summary: the fastest of PyTorch's own against the fastest patched one."""

from collections.abc import Iterator, Sequence

from bench.cpu.layers import Layer
from bench.cpu.lines import Recording
from bench.cpu.markdown import markdown, milliseconds, spread
from bench.cpu.settings import SETTINGS
from bench.cpu.step_tables import break_even_told, seconds_told
from bench.cpu.way_cases import AS_IT_COMES, WAY_NETWORKS, WAYS, Use, Way, WayCase, cases_of, ways_of
from bench.cpu.way_lines import COPY, OWN, PATCHED, WayFailed, WayMeasured, percentile
from mucudnn.intervals import estimate
from mucudnn.sizes import format_bytes

_TAILS = (0.95, 0.99)

_PREFACE = (
    "Both layouts: eager, eager without oneDNN, and by `torch.compile`; in inference frozen too, where",
    "inductor folds batch norm into filters and packs these for oneDNN (not those of patched convolutions",
    "that are faster there, which are operators of their own). All but those without oneDNN also patched.",
    "Not tried: `max-autotune`, TorchScript's freezing. PyTorch's own may take what memory it likes.",
    "",
    "All ways of a row ran in the same rounds in one process. The fastest patched one, its unpatched twin,",
    "PyTorch as it comes (contiguous, eager) and those of PyTorch's own that were not told apart from their",
    "fastest ran once more in fresh rounds, which alone count here: **x** is the median of their quotients,",
    "of the fastest patched way. The fastest of PyTorch's own is that of these rounds too, which favours it.",
    "A copy of the one that seemed the fastest ran beside it: what that gains or loses (`x of a copy`) is",
    "the noise of where weights lie.",
)


def section(recording: Recording, layers: Sequence[Layer]) -> Iterator[str]:  # noqa: ARG001  # a section's
    """Yield all that there is to say of networks in all ways."""
    lines = known_ways(recording)
    if not lines:
        yield 'Not measured; `make bench-cpu ARGS="--ways"` does.'
        return
    yield from _PREFACE
    compared = sum(line.divided is not None for line in lines)
    yield f"Comparisons with the fastest of PyTorch's own: {compared}."
    for table in (_fastest, _latencies, _every_way, _costs, _within_models):
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
    own = f"{milliseconds(line.seconds_of(line.own))} ms ({line.own})"
    if line.divided is None:
        return f"{own}; nothing is patched  ({line.seconds:.0f} s)"
    divided = f"{milliseconds(line.seconds_of(line.divided))} ms ({line.divided})"
    speedup = f"x{spread(line.speedup(line.divided, line.own))} {line.verdict(line.divided)}"
    return f"{own} -> {divided}, {speedup}  ({line.seconds:.0f} s)"


def title(case: WayCase, shape: Sequence[int]) -> str:
    """Return what a case is called: "inference of resnet18, 8x3x32x32, 2 threads"."""
    size = "x".join(map(str, shape))
    return f"{case.use} of {case.network}, {size}, {SETTINGS[case.setting].text}"


def _title(line: WayMeasured) -> str:
    return title(line.case, line.shape)


def _fastest(lines: Sequence[WayMeasured]) -> Iterator[str]:
    headings = (
        *("what", "as it comes, ms", "fastest of PyTorch's own, ms", "fastest patched, ms"),
        *("x of the fastest", "verdict", "x of as it comes", "x of a copy", "rounds"),
        "processors that others took",
    )
    rows = [
        (
            _title(line),
            milliseconds(line.seconds_of(str(AS_IT_COMES))),
            _named(line, line.own),
            *_patched(line),
            spread(line.speedup(COPY, line.copied)),
            str(line.seconds_of(line.own).samples),
            "–" if line.proving.others is None else f"{line.proving.others:.2f}",
        )
        for line in lines
    ]
    yield from markdown(headings, rows)


def _patched(line: WayMeasured) -> tuple[str, str, str, str]:
    """Return the cells of the fastest patched way."""
    way = line.divided
    if way is None:
        return "nothing is patched", "–", "–", "–"
    return (
        _named(line, way),
        spread(line.speedup(way, line.own)),
        str(line.verdict(way)),
        spread(line.speedup(way, str(AS_IT_COMES))),
    )


def _named(line: WayMeasured, way: str) -> str:
    return f"{milliseconds(line.seconds_of(way))}, {WAYS[way].unpatched}"


def _latencies(lines: Sequence[WayMeasured]) -> Iterator[str]:
    """Tails of inference; a percentile that there are too few samples for has a dash."""
    serving = [line for line in lines if line.case.use is Use.INFERENCE]
    if not serving:
        return
    yield from (
        "Latencies of inference in ms: the median and percentiles of the proving rounds with intervals",
        "from ranks, where there are enough rounds for one (72 for the 95th, 368 for the 99th). The ways",
        "take turns, so that each finds the weights of the others in the caches.",
        "",
    )
    rows = [
        (
            _title(line),
            way,
            milliseconds(line.seconds_of(way)),
            *(_tail(line, way, share) for share in _TAILS),
        )
        for line in serving
        for way in line.proving.spans_ns
    ]
    yield from markdown(("what", "way", "p50", *(f"p{share * 100:.0f}" for share in _TAILS)), rows)


def _tail(line: WayMeasured, way: str, share: float) -> str:
    found = percentile(line.proving.samples_s(way), share) if line.proving.calls == 1 else None
    return "–" if found is None else milliseconds(found)


def _every_way(lines: Sequence[WayMeasured]) -> Iterator[str]:
    yield from (
        "All ways, in ms, by the choosing rounds; behind the intervals how far results are from float64 on",
        "the same weights, relative to the largest: of the scores in inference, of the first two losses in",
        "training. `=` stands where the plan patches nothing.",
        "",
    )
    rows = [(name, *(_cell(line, way) for line in lines)) for name, way in WAYS.items()]
    yield from markdown(("way", *(_title(line) for line in lines)), rows)


def _cell(line: WayMeasured, way: Way) -> str:
    name = str(way)
    if name in line.choosing.spans_ns:
        return f"{milliseconds(estimate(line.choosing.samples_s(name)))} ({line.errors[name]:.0e})"
    if name in line.failed:
        return "failed"
    return "=" if way in ways_of(line.case.use) else "–"


def _costs(lines: Sequence[WayMeasured]) -> Iterator[str]:
    yield from (
        "Tuning in each layout, from an empty store; calls (steps in training) after which that of the",
        "fastest patched way is paid back, against the fastest of PyTorch's own, compiling not counted; the",
        f"most that a convolution was seen to take, where the limit is {format_bytes(lines[0].limit_bytes)};",
        "at how many sites PyTorch's own convolution stays.",
        "",
    )
    headings = ("what", "layout", "tuned in", "paid back after", "workspace", "stay")
    rows = [
        (
            _title(line),
            layout,
            seconds_told(cost),
            _paid_back(line, layout),
            "–" if cost.seen_bytes is None else format_bytes(cost.seen_bytes),
            f"{cost.kept} of {len(cost.runs)}",
        )
        for line in lines
        for layout, cost in line.tuned.items()
    ]
    yield from markdown(headings, rows)


def _paid_back(line: WayMeasured, layout: str) -> str:
    way = line.divided
    if way is None or WAYS[way].layout != layout:
        return "–"
    return break_even_told(line.break_even(way), line.cost(way))


def _within_models(lines: Sequence[WayMeasured]) -> Iterator[str]:
    """Whether what the tuner found of single convolutions comes true within the model."""
    rows = [
        (
            _title(line),
            each.layout,
            each.path,
            each.runs,
            *(milliseconds(each.seconds_of(name)) for name in (OWN, PATCHED)),
            f"{spread(each.speedup)} {each.verdict}",
            "–" if each.claimed is None else f"{each.claimed:.2f}",
            "–" if each.rounds.others is None else f"{each.rounds.others:.2f}",
        )
        for line in lines
        for each in line.within
    ]
    if not rows:
        return
    yield from (
        "Each patched convolution within its model, eagerly: forward passes of the unpatched and of the",
        "patched model in the same rounds, in ms, and what the tuner had found of it alone (`–`: nothing, as",
        "where PyTorch's own takes more than the limit). Copies differ too, by where their weights lie.",
        f"Comparisons: {len(rows)}.",
        "",
    )
    headings = (
        *("what", "layout", "convolution", "runs", "own", "patched", "x within", "x by the tuner"),
        "processors that others took",
    )
    yield from markdown(headings, rows)
