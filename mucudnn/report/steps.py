"""What a plan is worth within a program's own step, as text and as JSON values; measures nothing."""

import math
import textwrap
from collections.abc import Iterator, Sequence

from mucudnn.comparing.step_comparison import PairedTimes, StepComparison
from mucudnn.intervals import Estimate, Verdict
from mucudnn.report.plan_notes import OVER_LIMIT
from mucudnn.report.plan_values import interval_as_json
from mucudnn.report.table import Row, table
from mucudnn.report.words import (
    BOUND,
    COMPARISON_SOURCE,
    DEFAULT_WIDTH,
    PERCENT,
    and_more,
    check_told,
    decimals_of_ms,
    describe_ms,
    render_notes,
)
from mucudnn.sizes import format_bytes

_HEADINGS = ("", "before, ms", "now, ms", "saved, ms", "speedup", "verdict")
_ALIGNMENT = "<>>>><"

_GLIBC_SETTINGS = frozenset({"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"})
"""With which its heap keeps what it has, as an environment names them."""

_PAGE_S = 1e-6
"""About what it takes to have a page from the system: 0.2 to 2 µs were seen."""

_MANY_MORE = 1.25
"""How many times as many pages now as before say that the plan may take some."""

_WORTH_TELLING = 0.01
"""Share of a step that pages must take to be told of."""

_MINUTE_S = 60.0

_SHORT_S = 50e-6
"""Of steps of 8 to 25 µs that call no convolution, medians before and now differed by up to 1.2 µs."""

_UNPLANNED = "not as planned"
"""Mark of a convolution that runs something else than its plan has."""


def render_comparison(found: StepComparison, width: int = DEFAULT_WIDTH) -> str:
    """Return what a step takes before and now, and each patched convolution within it, for people to read.

    Plain text, without a line break at its end; notes have lines of at most `width` columns.

    Raises:
        OptionError: it is no comparison.
    """
    check_told(found, StepComparison, COMPARISON_SOURCE)
    lines = table(_HEADINGS, _ALIGNMENT, [("", [*_rows(found)])])
    return "\n".join([*_title(found, width), "", *lines, "", *render_notes(_notes(found), width)])


def comparison_as_json(found: StepComparison) -> dict[str, object]:
    """Return the same as JSON values, with the nanoseconds of all rounds.

    Raises:
        OptionError: it is no comparison.
    """
    check_told(found, StepComparison, COMPARISON_SOURCE)
    return {
        "report": "step",
        "version": found.plan.version,
        "mode": found.plan.mode,
        "limit_bytes": found.plan.limit_bytes,
        "environment": found.plan.environment.to_json(),
        "step": _as_json(found.step),
        "convolutions": [{"path": each.path, **_as_json(each.times)} for each in found.layers],
        "unseen": list(found.unseen),
        "slower": list(found.slower),
        "unplanned": list(found.unplanned),
        "unpatched": list(found.unpatched),
        "taken_back": _taken_back(found),
        "over_limit": over_limit(found),
        "others": found.others,
        "pages": None if found.pages is None else dict(zip(("before", "now"), found.pages, strict=True)),
    }


def _title(found: StepComparison, width: int) -> list[str]:
    plan = found.plan
    limit = f"{plan.mode} of {format_bytes(plan.limit_bytes)}"
    text = (
        "A step with PyTorch's own convolutions, whatever they take (before), and with the plan (now: "
        f"{limit}), in turns: median and {PERCENT} interval."
    )
    return textwrap.wrap(text, width)


def _rows(found: StepComparison) -> Iterator[Row]:
    """Yield the whole step, what its patched convolutions add up to, and each of them."""
    verdict = "own" if patches_nothing(found) else str(found.step.verdict)
    yield (*_cells("the whole step", found.step), verdict)
    if found.layers:
        before, now = (
            sum(getattr(each.times, name).median for each in found.layers) * 1e3 for name in ("before", "now")
        )
        name = "its patched convolutions"
        saved = sum(each.times.saved.median for each in found.layers) * 1e3
        yield name, _ms(before), _ms(now), _ms(saved), f"{before / now:.2f}", ""
    over = frozenset(over_limit(found))
    for each in found.layers:
        mark = f", {OVER_LIMIT}" * (each.path in over)
        mark += f", {_UNPLANNED}" * (each.path in found.unplanned)
        yield (*_cells(f"  {name_of(each.path)}", each.times), f"{each.times.verdict}{mark}")


def _cells(name: str, times: PairedTimes) -> Row:
    return (
        name,
        describe_ms(times.before),
        describe_ms(times.now),
        _ms(times.saved.median * 1e3),
        describe_factor(times.speedup),
    )


def _ms(ms: float) -> str:
    return f"{ms:.{decimals_of_ms(abs(ms))}f}"


def describe_factor(found: Estimate) -> str:
    """Return how many times as fast something is, with its interval where that has ends."""
    if not (math.isfinite(found.low) and math.isfinite(found.high)):
        return f"{found.median:.2f}"
    return f"{found.median:.2f} [{found.low:.2f}, {found.high:.2f}]"


def _as_json(times: PairedTimes) -> dict[str, object]:
    return {
        "before_ns": list(times.before_ns),
        "now_ns": list(times.now_ns),
        "before": interval_as_json(times.before, "_s"),
        "now": interval_as_json(times.now, "_s"),
        "speedup": interval_as_json(times.speedup),
        "verdict": times.verdict,
    }


def _notes(found: StepComparison) -> Iterator[tuple[str, str]]:
    yield "rounds", f"{len(found.step.now_ns)} of the whole step{_of_layers(found)}."
    yield (
        "verdict",
        f"FASTER if the whole interval of now / before is more than {BOUND} below 1, SLOWER if more than "
        f"{BOUND} above, SAME if within {BOUND}, else AMBIGUOUS. The speedup is the median over the rounds "
        "of before / now, and what is saved that of before - now.",
    )
    if found.unseen and not found.layers:
        yield "not seen", _about_unseen(found)
    if max(found.step.before.median, found.step.now.median) < _SHORT_S:
        yield (
            "short",
            f"In a step of less than {_SHORT_S * 1e6:.0f} µs a difference of a microsecond or two means "
            "nothing: what ran just before it matters as much. Let step do its work several times over.",
        )
    if found.layers:
        yield "convolutions", _about_layers(found)
    if over := over_limit(found):
        yield (
            OVER_LIMIT,
            f"At {len(over)} of these the limit forbids PyTorch's own, although it ran before. Under a "
            "larger limit the tuner could choose it.",
        )
    if found.unpatched:
        yield "not patched", _about_unpatched(found)
    if patches_nothing(found):
        yield (
            "no patches",
            "The plan leaves PyTorch's own convolutions everywhere, so the same ran both times: any "
            "difference is chance.",
        )
    elif found.layers or (found.unseen and found.step.verdict in (Verdict.FASTER, Verdict.SLOWER)):
        yield "tuning", _pay_back(found.step)
        if found.slower:
            yield "slower", _about_slower(found)
        if found.step.verdict is not Verdict.FASTER:
            yield "advice", _advice(found)
    if found.unplanned:
        yield _UNPLANNED, _about_unplanned(found)
    if found.unseen and found.layers:
        yield "not seen", _about_unseen(found)
    if found.pages is not None and _is_worth_telling(found.pages, found.step):
        yield "memory", _about_pages(found, *found.pages)
    if found.others is not None:
        yield (
            "others",
            f"Other processes took {found.others:.2f} processors meanwhile. A data loader's workers count; "
            "if it was anybody else, compare again when the machine is idle.",
        )


def _of_layers(found: StepComparison) -> str:
    """Return how many rounds its convolutions have, and how far their verdicts can be trusted."""
    if not found.layers:
        return ""
    more, count = len(found.layers[0].times.now_ns), len(found.layers)
    return (
        f", {more} more of its convolutions. Comparisons: {count + 1}; with {PERCENT} intervals, one in "
        "twenty may be wrong by chance"
    )


def _about_layers(found: StepComparison) -> str:
    shares = [_share(found, is_now=is_now) for is_now in (False, True)]
    told = (
        "For each patched one, all its calls in a step: forward passes and their gradients. "
        f"Together they take about {shares[0]:.0%} of the step before and {shares[1]:.0%} now"
    )
    if max(shares) <= 1.0:
        return f"{told}."
    return (
        f"{told}: more than all of it, because they were timed in rounds of their own, which were slower. "
        "Compare again when the machine is idle, or with more rounds."
    )


def _share(found: StepComparison, *, is_now: bool) -> float:
    """Return which part of the step its patched convolutions take."""
    times = [found.step, *(each.times for each in found.layers)]
    step_s, *layers_s = [(each.now if is_now else each.before).median for each in times]
    return math.fsum(layers_s) / step_s


def over_limit(found: StepComparison) -> list[str]:
    """Return the timed modules at which the tuner was not allowed to run PyTorch's own."""
    evidence = ((each.site.path, each.evidence) for each in found.plan.assignments)
    forbidden = {path for path, seen in evidence if seen is not None and seen.reference is None}
    return [layer.path for layer in found.layers if layer.path in forbidden]


def patches_nothing(found: StepComparison) -> bool:
    """Return whether the plan changes no convolution of the model."""
    return not found.layers and not found.unseen and not found.unpatched


def _pay_back(step: PairedTimes) -> str:
    """Return how many steps pay for a minute of tuning."""
    steps = step.break_even(_MINUTE_S)
    if not math.isfinite(steps.median):
        return "The step saves no time that would pay for it."
    worst = f"{steps.high:.0f} at worst" if math.isfinite(steps.high) else "perhaps never"
    paid = f"is paid back by {steps.median:.0f} steps ({steps.low:.0f} at best, {worst})"
    if step.verdict is Verdict.FASTER:
        return f"Each minute that it took {paid}."
    return f"If the step is faster at all, each minute that it took {paid}."


def _taken_back(found: StepComparison) -> list[str]:
    """Return the modules that the settled plan leaves as they were."""
    before, settled = found.plan.sites, found.settled.sites
    return list(dict.fromkeys(site.path for site in before if before[site].key != settled[site].key))


def _about_slower(found: StepComparison) -> str:
    """Return what the settled plan does about the convolutions that are slower than before."""
    back = _taken_back(found)
    running = {each.site.path for each in found.settled.assignments if not each.is_kept}
    stuck = [path for path in found.slower if path in running]
    alike = [path for path in found.slower if path not in running and path not in back]
    told = []
    if back:
        told.append(
            f"The settled plan, which has not been timed itself, runs PyTorch's own at {_listed(back)}: "
            "mucudnn.apply(model, found.settled), or -o of mucudnn compare. Compare again with it."
        )
    if stuck:
        what = "It cannot do so" if back else "The settled plan cannot run PyTorch's own again"
        told.append(
            f"{what} at {_listed(stuck)}: it takes more than it may there, or the tuner did not run it."
        )
    if alike:
        told.append(
            f"At {_listed(alike)} PyTorch's own runs both times. With the plan each call looks it up first, "
            "and where the limit leaves no room beside the common buffer, gives back the end of that."
        )
    return " ".join(told)


def _advice(found: StepComparison) -> str:
    """Return what to do where the whole step is not found faster."""
    is_slower = found.step.verdict is Verdict.SLOWER
    told = f"The step is {'slower' if is_slower else 'not found faster'} with the plan."
    if _taken_back(found):
        return f"{told} Try the settled plan."
    if found.unplanned:
        return f"{told} But the step does not run all of the plan, see below."
    if found.step.verdict is Verdict.AMBIGUOUS:
        return f"{told} More rounds may tell."
    return f"{told} Do not apply it; mucudnn.restore(model) takes it back."


def _about_unplanned(found: StepComparison) -> str:
    return (
        f"{_listed(found.unplanned)}: the step does not run all that the plan has there. It has other "
        "shapes, types or batches, or only some of them, or no gradients. So the settled plan changes "
        "nothing there. Judge a plan by a step that it was tuned for."
    )


def _about_unpatched(found: StepComparison) -> str:
    return (
        f"{_listed(found.unpatched)}: the model no longer runs what the plan has there, for example because "
        "the module was replaced. PyTorch's own ran both times. Tune again, or apply the plan again if the "
        "new module is like the old one."
    )


def _about_unseen(found: StepComparison) -> str:
    if found.layers:
        return f"{_listed(found.unseen)}: not called in each step, or only in a compiled graph."
    return (
        f"{_listed(found.unseen)}. Either the step does not call this model: then the same ran both times. "
        "Or it calls it in a compiled graph, where single convolutions cannot be timed: then the times of "
        "the whole step are valid, unless it replays a graph captured earlier, which is the same both times."
    )


def _is_worth_telling(pages: tuple[float, float], step: PairedTimes) -> bool:
    return max(pages) * _PAGE_S >= _WORTH_TELLING * step.now.median


def _about_pages(found: StepComparison, before: float, now: float) -> str:
    """Return what it means that a step takes many pages of memory anew, and what helps."""
    cost_ms = max(before, now) * _PAGE_S * 1e3
    told = (
        f"Each step gets fresh pages of memory from the system, {before:.0f} before and {now:.0f} now, "
        f"which costs it some {cost_ms:{'.0f' if cost_ms >= 1 else '.1g'}} ms."
    )
    if _GLIBC_SETTINGS.isdisjoint(found.plan.environment.policy):
        advice = " and ".join(f"{name}=2000000000" for name in sorted(_GLIBC_SETTINGS))
        told += (
            " The usual reason is glibc, which gives the end of its heap back. Another allocator prevents "
            f"that, or {advice} in the environment of the program. Tune again there: this plan is refused."
        )
    if before < now / _MANY_MORE:
        told += (
            " A plan, too, gives back the end of its buffer where PyTorch's own needs that room within the "
            "limit; a larger limit prevents that."
        )
    return told


def _listed(paths: Sequence[str]) -> str:
    return and_more(name_of(paths[0]), len(paths) - 1)


def name_of(path: str) -> str:
    """Return what a module is called."""
    return path or "the model itself"
