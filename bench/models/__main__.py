"""`make models`: public models from packages, divided by hand and trained beside their unpatched twins.

Every convolution runs in uneven parts by different algorithms, forward and backward. After three steps of
SGD with momentum all parameters and statistics must be those of the twin in float64, to 1e-8. In float32 they
are compared with the spread of copies of the twin whose weights were perturbed by 1e-7 before the first step.
"""

import argparse
import datetime
import fnmatch
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.arguments import at_least_one
from bench.commit import commit
from bench.endings import INTERRUPTED
from bench.models.compare import BOUND, Found, compare
from bench.models.zoo import BATCH, Entry, entries
from mucudnn.report.table import table


def main(arguments: Sequence[str] | None = None) -> int:
    """Train all models and print what came of them; return 1 if one differs in float64.

    One outside of its spread is told, and no more: of several that drift alike, one drifts farthest.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(entry.title for entry in entries()))
        return 0
    try:
        chosen = _chosen(options.only)
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    try:
        return _compared(chosen, options)
    except KeyboardInterrupt:
        print("bench.models: interrupted.", file=sys.stderr)
        return INTERRUPTED


def _compared(chosen: Sequence[Entry], options: argparse.Namespace) -> int:
    """Train the chosen models; return the exit status."""
    found = []
    for number, entry in enumerate(chosen, 1):
        start = time.perf_counter()
        found.append(compare(entry, options.steps, options.twins))
        seconds = time.perf_counter() - start
        print(f"{number:3d}/{len(chosen)}  {'  '.join(_row(found[-1]))}  ({seconds:.0f} s)", flush=True)
    text = _text(found, options.steps, options.twins)
    print(f"\n{text}")
    if options.output is not None:
        Path(options.output).write_text(text, encoding="utf-8")
    return int(not all(each.is_equal for each in found))


def _chosen(patterns: Sequence[str]) -> list[Entry]:
    """Return the models whose names match one of the patterns.

    Raises:
        ValueError: a pattern matches none.
    """
    every = entries()
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(entry.title, pattern) for entry in every):
            raise ValueError(f"--only must match one of the names that --list prints, but got {pattern!r}.")
    return [entry for entry in every if any(fnmatch.fnmatchcase(entry.title, each) for each in patterns)]


def _row(found: Found) -> tuple[str, ...]:
    return (
        found.entry.title,
        str(found.convolutions),
        " ".join(found.kinds),
        str(found.sites),
        str(found.divided),
        str(found.left),
        f"{found.in_float64:.1e}",
        "equal" if found.is_equal else "DIFFERENT",
        f"{found.in_float32:.1e}",
        f"{max(found.perturbed):.1e}",
        str(found.farther),
        "within" if found.is_within else "OUTSIDE",
    )


def _text(found: Sequence[Found], steps: int, twins: int) -> str:
    header = (
        "model", "convolutions", "of kinds", "sites", "divided", "left", "float64", "verdict", "float32",
        f"of {twins} perturbed", "farther", "verdict",
    )  # fmt: skip
    lines = table(header, "<><>>>><>>><", [("", [_row(each) for each in found])])
    equal, within = (
        sum(each) for each in zip(*((one.is_equal, one.is_within) for one in found), strict=True)
    )
    results = (
        f"{equal} of {len(found)} models equal their twins to {BOUND:.0e} in float64, after {steps} steps;\n"
        f"in float32 {within} end within the spread of {twins} twins, whose weights were perturbed\n"
        f"by 1e-7 at the start. Batch {BATCH}, uneven parts, torch {torch.__version__},\n"
        f"commit {commit()}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}."
    )
    legend = (
        "float64, float32: the largest difference to the twin, of the losses of all steps and of\n"
        "all parameters and buffers after the last one, relative to the largest number of its\n"
        f"tensor or to 1. of {twins} perturbed: the largest difference of a perturbed twin. farther: how\n"
        f"many of them end at least as far away as the divided model; of {twins + 1} that drift alike,\n"
        "one drifts farthest."
    )
    return "\n".join([results, "", legend, "", *lines, ""])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.models", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the names of the models, and no more")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="names, as in a shell")
    parser.add_argument("--steps", type=at_least_one, default=3, help="of training (default: %(default)s)")
    parser.add_argument(
        "--twins", type=at_least_one, default=20, help="perturbed ones, of each model (default: %(default)s)"
    )
    parser.add_argument("--output", default=None, help="file for the table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
