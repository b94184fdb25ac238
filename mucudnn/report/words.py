"""Problems, environments and notes in words."""

import math
import textwrap
from collections.abc import Iterable, Mapping

from mucudnn.errors import OptionError
from mucudnn.intervals import CONFIDENCE, TOLERANCE, Estimate
from mucudnn.problem import ConvProblem, Layout
from mucudnn.profile import Environment

DEFAULT_WIDTH = 118
"""Columns of lines that are wrapped, where no terminal says how many it has."""

PERCENT = f"{CONFIDENCE * 100:g} %"
"""How surely an interval covers the true median."""

BOUND = f"{TOLERANCE * 100:g} %"
"""By how much times differ that do not count as the same."""

PLAN_SOURCE, COMPARISON_SOURCE = "mucudnn.plan_of(model)", "mucudnn.compare(model, step)"
"""What gives the objects of which reports tell."""

_LABEL_WIDTH = 15

_SAID_BY_THE_NAME = ("vendor_id", "cpu family", "model", "stepping")
"""Facts of a processor that its name tells better."""


def check_told(value: object, kind: type, source: str) -> None:
    """Verify that what is to be told is of its kind.

    Args:
        value: what was given.
        kind: that is needed.
        source: what gives one.

    Raises:
        OptionError: it is something else.
    """
    if not isinstance(value, kind):
        raise OptionError(
            f"A {kind.__name__} is needed, as {source} returns one, but got {type(value).__name__}."
        )


def describe_shape(problem: ConvProblem, is_transposed: bool = False) -> str:
    """Return shapes and type in short, such as "64x64x32x32 -> 64, 3x3, padding 1, float32".

    A stride of 1, a padding of 0, a dilation of 1, a single group and the contiguous layout are not named.
    A transposed convolution is given as its layer sees it: from y to x.
    """
    ends = (problem.input_shape, problem.out_channels)
    if is_transposed:
        ends = (problem.output_shape, problem.in_channels)
    words = [f"{_by(ends[0])} -> {ends[1]}", _by(problem.kernel_size)]
    for name, sizes, usual in (
        ("stride", problem.stride, 1),
        ("padding", problem.padding, 0),
        ("dilation", problem.dilation, 1),
        ("groups", (problem.groups,), 1),
    ):
        if set(sizes) != {usual}:
            words.append(f"{name} {sizes[0] if len(set(sizes)) == 1 else _by(sizes)}")
    layout = [] if problem.layout is Layout.CONTIGUOUS else [str(problem.layout)]
    transposed = ["transposed"] if is_transposed else []
    return ", ".join([*words, *transposed, problem.dtype, *layout])


def describe_environment(environment: Environment) -> dict[str, str]:
    """Return what times depend on, as texts by label; equal environments give equal texts."""
    device = {name: fact for name, fact in environment.device.items() if name not in _SAID_BY_THE_NAME}
    return {
        "device": f"{environment.backend}: {describe_facts(device)}",
        "software": describe_facts(environment.software),
        "settings": describe_facts(environment.policy),
    }


def describe_facts(facts: Mapping[str, str]) -> str:
    """Return named facts in the order of the alphabet: "oneDNN 3.7, torch 2.11.0"."""
    return ", ".join(f"{name} {facts[name]}" for name in sorted(facts, key=str.casefold))


def render_notes(notes: Iterable[tuple[str, str]], width: int = DEFAULT_WIDTH) -> list[str]:
    """Return labelled texts as lines of at most `width` columns, the labels standing out on the left."""
    return [
        line
        for label, text in notes
        for line in textwrap.wrap(
            text,
            width,
            initial_indent=f"{label:{_LABEL_WIDTH}}",
            subsequent_indent=" " * _LABEL_WIDTH,
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]


def and_more(name: str, others: int) -> str:
    """Return the name of the first of several, and how many others there are."""
    return f"{name} and {others} more" if others else name


def elided(text: str, longest: int) -> str:
    """Return a text of at most `longest` characters: of what is longer the middle is left out."""
    if len(text) <= longest:
        return text
    behind = (longest - 1) // 2
    return f"{text[: longest - 1 - behind]}…{text[len(text) - behind :]}"


def decimals_of_ms(ms: float) -> int:
    """Return how many decimals leave four digits of a time in milliseconds, none of them below 0.1 µs."""
    return 4 if ms <= 0 else min(4, max(0, 3 - math.floor(math.log10(ms))))


def describe_ms(estimate: Estimate) -> str:
    """Return milliseconds in four digits, none of them below 0.1 µs, and the interval if there is one."""
    middle, low, high = (seconds * 1e3 for seconds in (estimate.median, estimate.low, estimate.high))
    digits = decimals_of_ms(middle)
    if not (math.isfinite(low) and math.isfinite(high)):
        return f"{middle:.{digits}f} (n = {estimate.samples})"
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _by(sizes: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in sizes)
