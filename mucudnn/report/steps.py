"""What a plan is worth within a program's own step, as text and as JSON values; measures nothing."""

import math
from collections.abc import Iterator, Sequence

from mucudnn.intervals import CONFIDENCE, Verdict
from mucudnn.report.table import Row, table
from mucudnn.report.words import DEFAULT_WIDTH, and_more, describe_ms, render_notes
from mucudnn.step_comparison import PairedTimes, StepComparison

_TITLE = (
    "A step of the program, in turns with PyTorch's own convolutions (before) and with the plan (now): "
    f"median and {CONFIDENCE * 100:g} % interval."
)
_MANY_PAGES = 256
"""A step that takes fewer loses less than some 0.5 ms by it."""

_HEADINGS = ("", "before, ms", "now, ms", "speedup", "verdict")
_ALIGNMENT = "<>>><"


def render_comparison(found: StepComparison, width: int = DEFAULT_WIDTH) -> str:
    """Return what a step takes before and now, and each patched convolution within it, for people to read.

    Plain text, without a line break at its end; notes have lines of at most `width` columns.
    """
    rows = [
        _cells("the whole step", found.step),
        *(_cells(f"  {_named(each.path)}", each.times) for each in found.layers),
    ]
    return "\n".join(
        [_TITLE, "", *table(_HEADINGS, _ALIGNMENT, [("", rows)]), "", *render_notes(_notes(found), width)]
    )


def comparison_as_json(found: StepComparison) -> dict[str, object]:
    """Return the same as JSON values, with the nanoseconds of all rounds."""
    return {
        "report": "step",
        "step": _as_json(found.step),
        "convolutions": [{"path": each.path, **_as_json(each.times)} for each in found.layers],
        "unseen": list(found.unseen),
        "others": found.others,
        "pages": list(found.pages),
        "is_settled": found.settled == found.plan,
    }


def _cells(name: str, times: PairedTimes) -> Row:
    low, high = times.speedup.low, times.speedup.high
    interval = f" [{low:.2f}, {high:.2f}]" if math.isfinite(low) and math.isfinite(high) else ""
    return (
        name,
        describe_ms(times.before),
        describe_ms(times.now),
        f"{times.speedup.median:.2f}{interval}",
        str(times.verdict),
    )


def _as_json(times: PairedTimes) -> dict[str, object]:
    return {
        "before_ns": list(times.before_ns),
        "now_ns": list(times.now_ns),
        "before_s": times.before.median,
        "now_s": times.now.median,
        "speedup": times.speedup.median,
        "verdict": times.verdict,
    }


def _notes(found: StepComparison) -> Iterator[tuple[str, str]]:
    yield "rounds", f"{len(found.step.now_ns)} of the whole step{_of_layers(found)}."
    if found.layers:
        yield (
            "convolutions",
            "Of each patched one, all its calls in a step, forward and backward. Together they take "
            f"{_share(found, is_now=False)} of the step before and {_share(found, is_now=True)} now.",
        )
    if found.step.verdict is not Verdict.FASTER:
        yield "advice", "The step is not found faster. mucudnn.restore(model) takes the plan back."
    yield "tuning", _pay_back(found.step)
    if found.slower:
        yield "slower", _about_slower(found)
    if found.unseen:
        yield (
            "not seen",
            f"{_listed(found.unseen)}: not called in each step, or only by "
            "compiled or captured graphs, into which nobody sees.",
        )
    if max(found.pages) >= _MANY_PAGES:
        yield "memory", _about_pages(*found.pages)
    if found.others is not None:
        yield "others", f"They took {found.others:.2f} processors meanwhile; a data loader's workers count."


def _of_layers(found: StepComparison) -> str:
    """Return how many rounds its convolutions have, and how far their verdicts can be trusted."""
    if not found.layers:
        return ""
    more, count = len(found.layers[0].times.now_ns), len(found.layers)
    return (
        f", {more} more of its convolutions. These are {count} comparisons, and an interval misses the true "
        "value once in twenty times"
    )


def _about_pages(before: float, now: float) -> str:
    """Return what it means that a step takes many pages of memory anew, and what helps."""
    return (
        f"A step takes {before:.0f} pages anew from the system before and {now:.0f} now, at some 2 µs, "
        "mostly as glibc gives the end of its heap back. Another allocator does not, nor does glibc with "
        "MALLOC_TRIM_THRESHOLD_=2000000000 and MALLOC_MMAP_THRESHOLD_=2000000000 in the environment, which a "
        "plan remembers: set them before tuning."
    )


def _share(found: StepComparison, *, is_now: bool) -> str:
    """Return which part of the step its patched convolutions take."""
    times = [found.step, *(each.times for each in found.layers)]
    step_s, *layers_s = [(each.now if is_now else each.before).median for each in times]
    return f"{math.fsum(layers_s) / step_s:.0%}"


def _pay_back(step: PairedTimes) -> str:
    """Return after how many steps a minute of tuning is paid back."""
    steps = step.break_even(60.0)
    if not math.isfinite(steps.median):
        return "Nothing is saved that would pay for it."
    low, high = (f"{each:.0f}" if math.isfinite(each) else "never" for each in (steps.low, steps.high))
    return f"A minute of it is paid back after {steps.median:.0f} [{low}, {high}] steps."


def _about_slower(found: StepComparison) -> str:
    """Return which convolutions are slower than before, and what the settled plan does about it."""
    now, settled = found.plan.sites, found.settled.sites
    changed = {site.path for site in now if now[site].key != settled[site].key}
    back = [path for path in found.slower if path in changed]
    stuck = [path for path in found.slower if path not in changed]
    told = []
    if back:
        told.append(f"The settled plan leaves {_listed(back)} as before.")
    if stuck:
        told.append(f"The limit does not allow PyTorch's own for {_listed(stuck)}.")
    return " ".join(told)


def _listed(paths: Sequence[str]) -> str:
    return and_more(_named(paths[0]), len(paths) - 1)


def _named(path: str) -> str:
    return path or "the model itself"
