"""Puts all questions to the card, and keeps the answers as files; `python -m bench.gpu` has it run."""

import argparse
import datetime
import faulthandler
import functools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from bench.arguments import seconds
from bench.gpu import (
    calls,
    capture,
    device,
    engines,
    enumeration,
    handles,
    legacy,
    memory,
    overlap,
    own,
    plans,
    results,
    tested,
)
from bench.gpu.available import obstacle
from bench.gpu.ground import LOST, CardGround, Ground, is_alive
from bench.gpu.hanging import ended_if_it_hangs, heed_termination
from bench.gpu.layers import LAYERS, MIDDLING, TILED
from bench.gpu.sections import Deadline, Result, Section, Task, run_section
from bench.gpu.values import Answer
from mucudnn.errors import MucudnnError
from mucudnn.report.table import table


def _told(setting: str) -> Callable[[Sequence[object]], Iterable[Answer]]:
    return functools.partial(plans.answers, setting)


SECTIONS = (
    Section("device", "The device", device.rows, device.answers, share=1),
    Section("tests", "Tests on the card", tested.rows, tested.answers, share=0.1),
    # Before any other makes a handle: the first one costs most.
    Section("handles", "Handles, threads, streams, alignment", handles.rows, handles.answers, share=5),
    Section(
        "enumeration", "Lists with and without the device", enumeration.rows, enumeration.answers, share=9
    ),
    Section("legacy", "The legacy API's workspaces", legacy.rows, legacy.answers, share=3),
    Section("memory", "Memory that stays", memory.rows, memory.answers, share=6),
    Section("own", "Memory of PyTorch's own convolution", own.rows, own.answers, share=6),
    Section("calls", "Whole calls, and what they cost the host", calls.rows, calls.answers, share=4),
    Section("engines", "Every engine on one layer", engines.rows, engines.answers, share=12),
    # Three, so that a candidate that ends a process costs one of them.
    Section("bfloat16", "Every candidate in bfloat16", plans.in_bfloat16, _told("bfloat16"), share=20),
    Section("tf32", "Every candidate in float32 with TF32", plans.in_tf32, _told("TF32"), share=15),
    Section(
        "float32",
        "Every candidate in strict float32, NCHW",
        plans.in_float32,
        _told("strict float32"),
        share=15,
    ),
    # A capture that fails leaves PyTorch's allocator in one, in which it frees nothing.
    Section("capture", "Capture in CUDA graphs", capture.rows, capture.answers, share=5),
)
"""What all others depend on goes first, and what takes longest, or leaves traces, last."""

EXTRA = (
    Section("overlap", "Parts on two streams", overlap.rows, overlap.answers, share=20),
    Section(
        "bfloat16-nchw",
        "Every candidate in bfloat16, NCHW, and from 2^31 elements on",
        plans.in_bfloat16_nchw,
        _told("bfloat16 NCHW"),
        share=20,
    ),
    Section(
        "tiles",
        "Winograd and FFT beside cuDNN in strict float32, both layouts",
        plans.in_float32_by_tiles,
        _told("strict float32, filters that tiles compute"),
        share=20,
    ),
)
"""What there is no time for in one go: only run where it is named."""

_SECONDS = 240.0
"""The tests that `make gpu` runs before take their time too; all of it should end within nine minutes."""

_LEAST_S = 10.0
"""Of a section, however long those before it took."""

PATIENCE_S = 60.0
"""By how much a section may pass its time before it is taken to hang."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections; return the exit status: 1 if one has failed, `LOST` where another process goes on."""
    options = parsed(arguments)
    reason = obstacle()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    try:
        ground = CardGround(options.device)
    except MucudnnError as error:
        print(f"bench.gpu: {error}", file=sys.stderr)
        return 1
    *others, captures = SECTIONS
    chosen = [section for section in (*others, *EXTRA, captures) if section.name in options.only]
    faulthandler.enable(sys.__stderr__ or sys.stderr)
    return measure(ground, chosen, folder_of(options, ground.name), options.seconds)


def measure(ground: Ground, sections: Sequence[Section], folder: Path, seconds: float) -> int:
    """Run `sections` one after the other and write their files; return 1 if any in the folder failed.

    Should the card work no more after one of them, that is `LOST`: the others, which have no files then, and
    what is concluded of all are left to a new process.

    Args:
        ground: the card.
        sections: in the order in which they run.
        folder: of the results.
        seconds: for all of them; what one leaves is for the later ones, each of which has at least ten.
    """
    for section in sections:
        results.path_of(folder, section.name).unlink(missing_ok=True)
    start = time.perf_counter()
    for number, section in enumerate(sections):
        left = seconds - (time.perf_counter() - start)
        share = section.share / sum(each.share for each in sections[number:])
        _run(ground, section, folder, max(left * share, _LEAST_S))
        if not is_alive(ground) and sections[number + 1 :]:
            _say("The card works no more in this process; what is left runs in a new one.")
            return LOST
    return conclude(folder, [section.name for section in sections])


def _run(ground: Ground, section: Section, folder: Path, seconds: float) -> None:
    def keep(result: Result) -> None:
        results.write(folder, result, datetime.datetime.now(datetime.UTC))

    task = Task(ground, LAYERS, MIDDLING, TILED, Deadline(seconds))
    with ended_if_it_hangs(seconds + PATIENCE_S):
        result = run_section(section, task, keep=keep)
    keep(result)
    state = "failed" if result.failure else "done"
    _say(f"{section.name:12} {result.seconds:6.1f} s  {len(result.rows):5} rows  {state}")


def folder_of(options: argparse.Namespace, name: str) -> Path:
    """Return where the results of a card of this name go."""
    return Path(options.output or Path("bench") / "results" / results.slug(name))


def conclude(folder: Path, asked: Sequence[str]) -> int:
    """Write the README of a folder and print the answers.

    Return 1 if a section that is there failed, or one that was `asked` is not there.
    """
    every = [section.name for section in (*SECTIONS, *EXTRA)]
    names = [name for name in every if name in asked or results.path_of(folder, name).exists()]
    contents = results.read(folder, names)
    (folder / "README.md").write_text(results.readme(contents), encoding="utf-8")
    answers = [(each.question, each.text) for each in results.answered(contents)]
    _say("\n" + "\n".join(table(("question", "answer"), "<<", [("", answers)])))
    failed = results.failed(contents, names)
    _say(f"\nWritten to {folder}." + (f" Failed or missing: {', '.join(failed)}." if failed else ""))
    return 1 if failed else 0


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a command line; None takes the process's."""
    return _parser().parse_args(arguments)


def _parser() -> argparse.ArgumentParser:
    names, extra = ([section.name for section in sections] for sections in (SECTIONS, EXTRA))
    parser = argparse.ArgumentParser(prog="bench.gpu", description=__doc__)
    parser.add_argument("--device", type=int, default=0, help="the card's number (default: %(default)s)")
    parser.add_argument("--output", default=None, help="folder (default: bench/results/ and the card's name)")
    parser.add_argument(
        "--seconds", type=seconds, default=_SECONDS, help="for all sections (default: %(default)s)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[*names, *extra],
        default=names,
        help=f"sections to run anew (default: all but {', '.join(extra)})",
    )
    return parser


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    heed_termination()
    sys.exit(main())
