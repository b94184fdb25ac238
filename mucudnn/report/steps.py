"""What a plan is worth within a program's own step, as text and as JSON values; measures nothing."""

import math
from collections.abc import Iterator, Sequence

from mucudnn.intervals import CONFIDENCE, Estimate, Verdict
from mucudnn.report.table import Row, table
from mucudnn.report.words import DEFAULT_WIDTH, and_more, describe_ms, render_notes
from mucudnn.step_comparison import PairedTimes, StepComparison
from mucudnn.taking_back import is_kept, seen_at

_TITLE = (
    "A step of the program, in turns with PyTorch's own convolutions (before) and with the plan (now): "
    f"median and {CONFIDENCE * 100:g} % interval."
)
_HEADINGS = ("", "before, ms", "now, ms", "speedup", "verdict")
_ALIGNMENT = "<>>><"

_GLIBC_SETTINGS = frozenset({"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"})
"""With which its heap keeps what it has, as an environment names them."""

_PAGE_S = 1e-6
"""About what it takes to have a page from the system: 0.7 to 1.7 µs were seen."""

_WORTH_TELLING = 0.01
"""Share of a step that pages must take to be told of."""

_MINUTE_S = 60.0


def render_comparison(found: StepComparison, width: int = DEFAULT_WIDTH) -> str:
    """Return what a step takes before and now, and each patched convolution within it, for people to read.

    Plain text, without a line break at its end; notes have lines of at most `width` columns.
    """
    layers = [_cells(f"  {_named(each.path)}", each.times) for each in found.layers]
    rows = [_cells("the whole step", found.step), *layers]
    lines = table(_HEADINGS, _ALIGNMENT, [("", rows)])
    return "\n".join([_TITLE, "", *lines, "", *render_notes(_notes(found), width)])


def comparison_as_json(found: StepComparison) -> dict[str, object]:
    """Return the same as JSON values, with the nanoseconds of all rounds."""
    return {
        "report": "step",
        "version": found.plan.version,
        "environment": found.plan.environment.to_json(),
        "step": _as_json(found.step),
        "convolutions": [{"path": each.path, **_as_json(each.times)} for each in found.layers],
        "unseen": list(found.unseen),
        "slower": list(found.slower),
        "taken_back": _taken_back(found),
        "over_limit": _over_limit(found),
        "others": found.others,
        "pages": None if found.pages is None else dict(zip(("before", "now"), found.pages, strict=True)),
    }


def _cells(name: str, times: PairedTimes) -> Row:
    return name, describe_ms(times.before), describe_ms(times.now), _factor(times.speedup), str(times.verdict)


def _factor(found: Estimate) -> str:
    if not (math.isfinite(found.low) and math.isfinite(found.high)):
        return f"{found.median:.2f}"
    return f"{found.median:.2f} [{found.low:.2f}, {found.high:.2f}]"


def _as_json(times: PairedTimes) -> dict[str, object]:
    return {
        "before_ns": list(times.before_ns),
        "now_ns": list(times.now_ns),
        "before": _estimate_as_json(times.before),
        "now": _estimate_as_json(times.now),
        "speedup": _estimate_as_json(times.speedup),
        "verdict": times.verdict,
    }


def _estimate_as_json(found: Estimate) -> dict[str, object]:
    ends = ((name, getattr(found, name)) for name in ("median", "low", "high"))
    return {name: end if math.isfinite(end) else None for name, end in ends}


def _notes(found: StepComparison) -> Iterator[tuple[str, str]]:
    yield "rounds", f"{len(found.step.now_ns)} of the whole step{_of_layers(found)}."
    if found.layers:
        yield (
            "convolutions",
            "Of each patched one, all its calls in a step: forward passes, and their gradients by autograd. "
            f"Together they take about {_share(found, is_now=False)} of the step before and "
            f"{_share(found, is_now=True)} now.",
        )
    if _over_limit(found):
        yield (
            "before",
            f"PyTorch's own takes more than the limit at {_listed(_over_limit(found))}; it ran all the same.",
        )
    yield "tuning", _pay_back(found.step)
    if found.slower:
        yield "slower", _about_slower(found)
    if found.step.verdict is not Verdict.FASTER and found.layers:
        yield "advice", _advice(found)
    if found.unseen:
        yield "not seen", _about_unseen(found)
    if found.pages is not None and _is_worth_telling(found.pages, found.step):
        yield "memory", _about_pages(found, *found.pages)
    if found.others is not None:
        yield "others", f"They took {found.others:.2f} processors meanwhile; a data loader's workers count."


def _of_layers(found: StepComparison) -> str:
    """Return how many rounds its convolutions have, and how far their verdicts can be trusted."""
    if not found.layers:
        return ""
    more, count = len(found.layers[0].times.now_ns), len(found.layers)
    return (
        f", {more} more of its convolutions. Comparisons: {count + 1}; with intervals of "
        f"{CONFIDENCE * 100:g} %, one in twenty may be wrong by chance"
    )


def _share(found: StepComparison, *, is_now: bool) -> str:
    """Return which part of the step its patched convolutions take."""
    times = [found.step, *(each.times for each in found.layers)]
    step_s, *layers_s = [(each.now if is_now else each.before).median for each in times]
    return f"{math.fsum(layers_s) / step_s:.0%}"


def _over_limit(found: StepComparison) -> list[str]:
    """Return the modules at which the tuner was not allowed to run PyTorch's own."""
    paths = [each.site.path for each in found.plan.assignments if seen_at(each).reference is None]
    return list(dict.fromkeys(paths))


def _pay_back(step: PairedTimes) -> str:
    """Return after how many steps a minute of tuning is paid back."""
    steps = step.break_even(_MINUTE_S)
    if not math.isfinite(steps.median):
        return "Nothing is saved that would pay for it."
    low, high = (f"{each:.0f}" if math.isfinite(each) else "never" for each in (steps.low, steps.high))
    return f"A minute of it is paid back after {steps.median:.0f} [{low}, {high}] steps."


def _taken_back(found: StepComparison) -> list[str]:
    """Return the modules that the settled plan leaves as they were."""
    before, settled = found.plan.sites, found.settled.sites
    return list(dict.fromkeys(site.path for site in before if before[site].key != settled[site].key))


def _about_slower(found: StepComparison) -> str:
    """Return what the settled plan does about the convolutions that are slower than before."""
    back = _taken_back(found)
    running = {each.site.path for each in found.settled.assignments if not is_kept(each)}
    stuck = [path for path in found.slower if path in running]
    told = []
    if back:
        told.append(f"The settled plan leaves {_listed(back)} as before.")
    if stuck:
        told.append(
            f"It cannot leave {_listed(stuck)} as before: PyTorch's own takes more than it may there, or was "
            "not run by the tuner."
        )
    return " ".join(told) or f"{_listed(found.slower)}, by what a patched call costs."


def _advice(found: StepComparison) -> str:
    """Return what to do where the whole step is not found faster."""
    if _taken_back(found):
        return "The step is not found faster. Apply the settled plan, and compare again."
    if found.step.verdict is Verdict.AMBIGUOUS:
        return "The step is not found faster; more rounds may tell."
    return "The step is not found faster. mucudnn.restore(model) takes the plan back."


def _about_unseen(found: StepComparison) -> str:
    if found.layers:
        return f"{_listed(found.unseen)}: not called in each step, or only by a compiled graph."
    return (
        f"{_listed(found.unseen)}: the step does not call the model, or in a graph, into which nobody sees. "
        "One that was captured before, and is only replayed, has run the same both ways."
    )


def _is_worth_telling(pages: tuple[float, float], step: PairedTimes) -> bool:
    return max(pages) * _PAGE_S >= _WORTH_TELLING * step.now.median


def _about_pages(found: StepComparison, before: float, now: float) -> str:
    """Return what it means that a step takes many pages of memory anew, and what helps."""
    told = f"A step takes {before:.0f} pages anew from the system before, {now:.0f} now, at 1 µs or more."
    if before < now / 2:
        return (
            f"{told} A plan gives the end of its buffer back where PyTorch's own of other convolutions needs "
            "that room within the limit; a larger limit prevents that."
        )
    if not _GLIBC_SETTINGS.isdisjoint(found.plan.environment.policy):
        return told
    advice = " and ".join(f"{name}=2000000000" for name in sorted(_GLIBC_SETTINGS))
    return (
        f"{told} Mostly that is glibc, which gives the end of its heap back. Another allocator prevents it, "
        f"or {advice} in the environment; set them before tuning, since a plan remembers them."
    )


def _listed(paths: Sequence[str]) -> str:
    return and_more(_named(paths[0]), len(paths) - 1)


def _named(path: str) -> str:
    return path or "the model itself"
