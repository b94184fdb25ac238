"""Training steps in the summary: absolute times first, then what each speed-up is of, and what it cost."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from bench.cpu.layers import Layer
from bench.cpu.lines import Recording
from bench.cpu.markdown import markdown, milliseconds, spread
from bench.cpu.settings import SETTINGS
from bench.cpu.step_cases import AIMS, LIMIT_BYTES, NETWORKS, StepAim, cases_of
from bench.cpu.step_lines import (
    DIVIDED,
    OWN,
    UNDIVIDED,
    SiteTime,
    StepCase,
    StepFailed,
    StepMeasured,
    Tuned,
)
from bench.cpu.targets import LEAST_SPEEDUP, Row, counted, judged
from mucudnn.division import is_of_one_part
from mucudnn.intervals import FEWEST_SAMPLES, Estimate
from mucudnn.problem import Layout
from mucudnn.sizes import format_bytes

_PREFACE = (
    "Reading the batch, forward, loss, backward and update of whole networks with batch norm, in training",
    "mode. `mucudnn.tune` and `mucudnn.apply` have patched a copy of the model; all steps are timed in",
    "interleaved rounds, and **x** is the median of the rounds' quotients, unpatched over patched. Times",
    "differ from one process to the next by more than such rounds can tell, so newer versions take them in",
    "several, by the same plan: `x by process` has the one that tuned first, then the others in rising",
    f"order. From {FEWEST_SAMPLES} processes on each is one sample of times and x, and the intervals are of",
    "these; of fewer, as where some have failed, all is of the one that tuned, and the intervals of its",
    "rounds (`of` says which). The verdict is FASTER or SLOWER where the whole 95 % interval of patched over",
    "unpatched lies beyond 2 %, SAME where it lies within, else AMBIGUOUS.",
)


def section(recording: Recording, layers: Sequence[Layer]) -> Iterator[str]:  # noqa: ARG001  # a section's
    """Yield all that there is to say of training steps."""
    lines = known_steps(recording)
    if lines:
        yield from _PREFACE
        yield f"The limit is that of each convolution. Comparisons: {len(lines)}."
        yield ""
        yield from (text for table in _TABLES for text in (*table(lines), ""))
    yield from _networks()
    yield from _absent(recording)


def shares(recording: Recording, layers: Sequence[Layer]) -> Iterator[str]:  # noqa: ARG001  # a section's
    """Yield how much of a step each convolution is, and how many times as fast it has become."""
    lines = [line for line in known_steps(recording) if line.tuned.times]
    if not lines:
        yield "Not kept by the version that measured."
        return
    yield from (
        "By the tuner's confirming rounds: median times of all ops of a convolution together, over that of",
        "the whole step, unpatched and patched; **x** is the one time over the other. `–` stands where the",
        "limit forbade to run PyTorch's own for one of them; the last rows tell those from the others.",
        "Each was timed alone, so that they need not add up to what they take of a step.",
    )
    for line in lines:
        yield from ("", f"{', '.join(_where(line))}:", "", *_shares(line))


class _Share(NamedTuple):
    """Seconds of a convolution in a step before and now; None if one of its ops has none."""

    own_s: float | None
    now_s: float | None


def _shares(line: StepMeasured) -> Iterator[str]:
    places: dict[str, list[SiteTime]] = {}
    for each in line.tuned.times:
        places.setdefault(each.place, []).append(each)
    found = {
        name: _Share(_sum(each.own_s for each in times), _sum(each.now_s for each in times))
        for name, times in places.items()
    }
    own_s, now_s = (line.seconds_of(name).median for name in (OWN, DIVIDED))
    rows = [
        (name, _part(each.own_s, own_s), _part(each.now_s, now_s), _x(each)) for name, each in found.items()
    ]
    known = [each for each in found.values() if None not in each]
    both = _Share(_sum(each.own_s for each in known), _sum(each.now_s for each in known))
    rest = _sum(each.now_s for each in found.values() if None in each)
    last = [(f"these {len(known)} together", _part(both.own_s, own_s), _part(both.now_s, now_s), _x(both))]
    if len(known) < len(found):
        last.append((f"the other {len(found) - len(known)}", "–", _part(rest, now_s), "–"))
    yield from markdown(("convolution", "unpatched", "patched", "x"), [*rows, *last])


def _sum(seconds: Iterable[float | None]) -> float | None:
    """Return what all come to; None if one is not known."""
    given = list(seconds)
    known = [each for each in given if each is not None]
    return math.fsum(known) if len(known) == len(given) else None


def _part(seconds: float | None, step_s: float) -> str:
    return "–" if seconds is None else f"{seconds / step_s:.1%}"


def _x(share: _Share) -> str:
    return f"{share.own_s / share.now_s:.2f}" if share.own_s and share.now_s else "–"


def known_steps(recording: Recording) -> list[StepMeasured]:
    """Return the steps that were measured, in their order."""
    return [recording.steps[case] for case in _every_case() if case in recording.steps]


def target_rows(recording: Recording) -> Iterator[Row]:
    """Yield what became of the targets of training steps."""
    for aim in AIMS:
        yield _row(aim, recording.steps.get(aim.case))
    slow = {case: line.speedup for case, line in recording.steps.items() if line.speedup.high < LEAST_SPEEDUP}
    yield counted(
        "every training step: upper end of the interval of the speed-up",
        f"{LEAST_SPEEDUP:.2f}",
        len(recording.steps),
        [f"{case} {spread(seen)}" for case, seen in slow.items()],
    )


def told(line: StepMeasured | StepFailed) -> str:
    """Return what a line of progress says of a case."""
    if isinstance(line, StepFailed):
        return f"failed: {line.reason}"
    each = f" (by process {_by_process(line)})" if line.again else ""
    return (
        f"{milliseconds(line.seconds_of(OWN))} ms -> {milliseconds(line.seconds_of(DIVIDED))} ms, "
        f"x{spread(line.speedup)} {line.verdict}{each}, tuned in {seconds_told(line.tuned)}  "
        f"({line.seconds:.0f} s)"
    )


def _every_case() -> list[StepCase]:
    return cases_of(NETWORKS, tuple(SETTINGS), tuple(Layout))


def _row(aim: StepAim, line: StepMeasured | None) -> Row:
    case, wanted = aim.case, f"{aim.wanted:.2f}"
    text = (
        f"training step of {case.network}, {format_bytes(LIMIT_BYTES)}, {case.layout}, "
        f"{SETTINGS[case.setting].text}"
    )
    if line is None:
        return Row(text, wanted, "–", "not measured")
    return Row(text, wanted, f"{spread(line.speedup)} ({line.verdict})", judged(aim.wanted, line.speedup))


def _where(line: StepMeasured) -> tuple[str, str, str]:
    return line.case.network, str(line.case.layout), SETTINGS[line.case.setting].text


_WHERE = ("network", "layout", "threads")


def _times(lines: Sequence[StepMeasured]) -> Iterator[str]:
    wanted = {aim.case: f"{aim.wanted:.2f}" for aim in AIMS}
    headings = (
        *(*_WHERE, "batch", "limit", "unpatched, ms", "patched, ms", "x", "verdict"),
        *("wanted", "of", "x by process", "processors that others took, at most"),
    )
    rows = [
        (
            *_where(line),
            str(line.batch),
            format_bytes(line.limit_bytes),
            milliseconds(line.seconds_of(OWN)),
            milliseconds(line.seconds_of(DIVIDED)),
            spread(line.speedup),
            str(line.verdict),
            wanted.get(line.case, "–"),
            f"{line.speedup.samples} {'processes' if line.is_of_processes else 'rounds'}",
            _by_process(line),
            "–" if line.others is None else f"{line.others:.2f}",
        )
        for line in lines
    ]
    yield from markdown(headings, rows)


def _by_process(line: StepMeasured) -> str:
    """Return what each process found, the one that tuned first: "1.51; 1.48, 1.49, 1.53"."""
    first, *others = line.speedups
    return f"{first:.2f}; {', '.join(f'{each:.2f}' for each in sorted(others))}" if others else "–"


def _dividing(lines: Sequence[StepMeasured]) -> Iterator[str]:
    """What micro-batches add to the other algorithms."""
    yield from (
        "What dividing adds: `undivided` was tuned within the same limit for whole mini-batches alone, and",
        "timed in the same rounds; **x** is undivided over patched. `–` stands where nothing is divided, or",
        "no whole mini-batch fits, and in lines of versions that did not time this.",
        "",
    )
    headings = (*_WHERE, "in micro-batches", "undivided, ms", "patched, ms", "x", "verdict")
    rows = [
        (
            *_where(line),
            f"{sum(not is_of_one_part(key) for key in line.tuned.runs.values())} of {len(line.tuned.runs)}",
            milliseconds(line.seconds_of(UNDIVIDED)) if line.has_undivided else "–",
            milliseconds(line.seconds_of(DIVIDED)),
            spread(line.speedup_over(UNDIVIDED)) if line.has_undivided else "–",
            str(line.verdict_over(UNDIVIDED)) if line.has_undivided else "–",
        )
        for line in lines
    ]
    yield from markdown(headings, rows)


def _parts(lines: Sequence[StepMeasured]) -> Iterator[str]:
    """What of the step can become faster at all, and what memory it takes."""
    yield from (
        "Shares are those of one unpatched step. `peak` is the most memory of a step beside weights and",
        "data: activations, gradients, momentum, workspace. `kept` are sites where PyTorch's own convolution",
        "runs undivided. A workspace may be seen up to 32 KiB above the limit: the noise of weighing.",
        "",
    )
    headings = (
        *(*_WHERE, "convolutions", "x if they took no time", "reading", "peak unpatched", "peak patched"),
        *("workspace of a convolution, at most", "kept"),
    )
    rows = [
        (
            *_where(line),
            f"{line.convolutions:.0%}",
            _bound(line),
            f"{line.reading:.1%}",
            _bytes(line.own_bytes),
            _bytes(line.divided_bytes),
            _bytes(line.tuned.seen_bytes),
            f"{line.tuned.kept} of {len(line.tuned.runs)}",
        )
        for line in lines
    ]
    yield from markdown(headings, rows)


def _changes(lines: Sequence[StepMeasured]) -> Iterator[str]:
    """How far the patched model's results are from the unpatched one's."""
    yield from (
        "Largest differences of the patched model from the unpatched one after one pass with equal weights,",
        "relative to the largest value; beside them, in brackets, what rounding alone does: the unpatched",
        "model in its own type against float64. A ReLU turns a rounding into a jump, which gradients show",
        "most. The gradient of a bias before a batch norm (3-D U-Net) is zero but for rounding: no measure.",
        "",
    )
    names = ("outputs", "gradients", "statistics")
    rows = [(*_where(line), *(_beside(line, name) for name in names)) for line in lines]
    yield from markdown((*_WHERE, "scores", "gradients", "batch-norm statistics"), rows)


def _beside(line: StepMeasured, name: str) -> str:
    """Return how far one kind of result is off, beside what rounding does."""
    if line.differences is None or line.rounding is None:
        return f"{line.difference:.1e}" if name == "outputs" else "–"
    return f"{getattr(line.differences, name):.1e} ({getattr(line.rounding, name):.1e})"


def _bound(line: StepMeasured) -> str:
    return f"{1 / (1 - line.convolutions):.2f}" if line.convolutions < 1 else "∞"


def _bytes(n_bytes: int | None) -> str:
    return "–" if n_bytes is None else format_bytes(n_bytes)


def _tuning(lines: Sequence[StepMeasured]) -> Iterator[str]:
    yield from (
        "Each row was tuned from an empty store. Steps to break even: the time of tuning over what a step",
        "saves. `at least` stands where a run was interrupted: its trials were kept, their seconds were not.",
        "",
    )
    headings = (
        *(*_WHERE, "tuning", "trials", "memory while tuning, beside what stood there"),
        "steps to break even",
    )
    rows = [
        (
            *_where(line),
            seconds_told(line.tuned),
            str(line.tuned.known + line.tuned.trials),
            format_bytes(line.tuned.grown_bytes),
            break_even_told(line.break_even, line.tuned),
        )
        for line in lines
    ]
    yield from markdown(headings, rows)


def seconds_told(cost: Tuned) -> str:
    """Return the seconds that tuning took: "190 s", or "at least 190 s"."""
    return f"{_at_least(cost)}{cost.seconds:.0f} s"


def _at_least(cost: Tuned) -> str:
    """What stands before a cost of which a part was paid in a run that was interrupted."""
    return "at least " if cost.known else ""


def break_even_told(found: Estimate, cost: Tuned) -> str:
    """Return the steps that pay tuning back: "190 [180, 210]", or "at least 190 [180, 210]"."""
    return f"{_at_least(cost)}{_number(found.median)} [{_number(found.low)}, {_number(found.high)}]"


def _number(steps: float) -> str:
    return f"{steps:.0f}" if math.isfinite(steps) else "∞"


_TABLES = (_times, _dividing, _parts, _changes, _tuning)


def _networks() -> Iterator[str]:
    yield from (f"* {network.name}: {network.source}; {network.data}." for network in NETWORKS)


def _absent(recording: Recording) -> Iterator[str]:
    """Yield why some steps failed, which were not measured, and which convolutions could not be tuned."""
    for failed in recording.failed_steps.values():
        yield f"* {failed.case} failed: {failed.reason}"
    known = {*recording.steps, *recording.failed_steps}
    for network in NETWORKS:
        absent = [case for case in _every_case() if case.network == network.name and case not in known]
        if absent:
            where = ", ".join(f"{case.setting} {case.layout}" for case in absent)
            yield f"* {network.name} was not measured with {where}."
    untouched = {
        (line.case.network, each) for line in recording.steps.values() for each in line.tuned.untouched
    }
    yield from (f"* {network} leaves untouched: {each}" for network, each in sorted(untouched))
