"""`make gpu-layers`: layers on a card, PyTorch's own ways and ours within the same limits.

One op of a layer after the other: PyTorch as it comes and with `cudnn.benchmark`, the best undivided
algorithm, PyTorch's own in parts, cuDNN alone, and the fastest division of all, each strictly within every
limit. What is known is not measured again: a run that was interrupted, or whose time was up, is gone on with
by the next one. A process measures; should it crash or hang, another one goes on with the next case.
"""

import argparse
import fnmatch
import math
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.cpu.lines import Failed, Line, append, read_packed_too, write_lines
from bench.endings import INTERRUPTED, not_told_anew
from bench.gpu.available import obstacle
from bench.gpu.hanging import heed_termination, status_of
from bench.gpu.layer_kinds import ENDED, STOPPED, with_status
from bench.gpu.layer_options import parser, stem_of
from bench.gpu.layer_summary import retell
from mucudnn.errors import MucudnnError
from mucudnn.sizes import parse_bytes

_LEAST_S = 15.0
"""With less time left no further process is started: it would import torch and end."""

_STOPPING_S = 3.0
"""That a process has to end after an interrupt, before it is killed and its case told as stopped: whoever
began this one, as `make gpu-rest` does, may not wait much longer."""

PATIENCE_S = 60.0
"""By how much a process may pass its time and that of its last case before it is killed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare what is asked for, or tell of it anew; return the exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser().parse_args(given)
    if options.retell is not None:
        return _retold(options.retell)
    try:
        for limit in options.limit:
            parse_bytes(limit)  # before hours of work
    except MucudnnError as error:
        print(f"bench.gpu.layer_run: {error}", file=sys.stderr)
        return 2
    reason = obstacle()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    _fill_in_folders(options)
    try:
        return watched(options, given)
    except KeyboardInterrupt:
        told = f"interrupted; `--retell {shlex.quote(str(options.output))}` writes the summary."
        print(f"bench.gpu.layer_run: {told}", file=sys.stderr)
        return INTERRUPTED


def _fill_in_folders(options: argparse.Namespace) -> None:
    import torch  # not before it is needed: a summary is told without it

    from bench.gpu.results import slug

    card = slug(torch.cuda.get_device_name(options.device))
    options.output = options.output or Path("bench/results", card)
    options.recording = options.recording or Path("build/gpu-layers", card)


def _retold(folder: Path) -> int:
    try:
        written = retell(folder)
    except (OSError, EOFError, ValueError) as error:
        print(f"bench.gpu.layer_run: {not_told_anew(folder, error)}", file=sys.stderr)
        return 2
    for path in written:
        print(f"Written to {path}.")
    if not written:
        print(f"bench.gpu.layer_run: {folder} has no lines of layers.", file=sys.stderr)
    return 0 if written else 2


def watched(options: argparse.Namespace, given: Sequence[str]) -> int:
    """Start processes until one ends in order or the time is up; write the summary, whatever happened.

    Args:
        options: with both folders.
        given: the command line.
    """
    lines = options.output / f"{stem_of(options.policy)}.jsonl"
    if options.again:
        kept = [line for line in read_packed_too(lines) if not _is_tried_again(line, options)]
        options.output.mkdir(parents=True, exist_ok=True)
        write_lines(lines, kept)
    try:
        return _measured(options, given, lines)
    except KeyboardInterrupt:
        _say_of_the_last_case(lines, STOPPED)  # a process that is killed cannot
        print("bench.gpu.layer_run: interrupted; the next run goes on.", file=sys.stderr)
        return INTERRUPTED
    finally:
        if not options.untold:
            _conclude(options.output, lines)


def _measured(options: argparse.Namespace, given: Sequence[str], lines: Path) -> int:
    end = time.monotonic() + options.seconds
    left_s = options.seconds
    while True:
        known = len(read_packed_too(lines))
        timeout_s = max(left_s, 0.0) + options.case_seconds + PATIENCE_S
        is_endless = math.isinf(timeout_s)
        seconds = None if is_endless else timeout_s
        status = status_of(_command(options, given, left_s), seconds, interrupted_s=_STOPPING_S)
        left_s = end - time.monotonic()
        has_begun_a_case = len(read_packed_too(lines)) > known + 1
        if has_begun_a_case:
            is_stopped = status in (INTERRUPTED, -signal.SIGINT)
            _say_of_the_last_case(lines, STOPPED if is_stopped else with_status(status))
        if status in (0, 2, INTERRUPTED) or not has_begun_a_case:
            return status
        if left_s < _LEAST_S:
            return 0
        print(f"The process ended with status {status}; another one goes on.", flush=True)


def _is_tried_again(line: Line, options: argparse.Namespace) -> bool:
    """Whether a line is of a failure that the options select."""
    return (
        isinstance(line, Failed)
        and any(fnmatch.fnmatchcase(line.case.setting, each) for each in options.settings)
        and any(fnmatch.fnmatchcase(line.case.layer, each) for each in options.layers)
    )


def _say_of_the_last_case(lines: Path, reason: str) -> None:
    """Append why the last case failed, if all that is known is that its process ended."""
    *_, last = [None, *read_packed_too(lines)]
    if isinstance(last, Failed) and last.reason == ENDED:
        append(lines, Failed(last.case, reason))


def _command(options: argparse.Namespace, given: Sequence[str], seconds: float) -> list[str]:
    """Return the command of a process: of two equal options the last one counts."""
    return [
        *(sys.executable, "-m", "bench.gpu.layer_child", *given, "--seconds", str(max(seconds, 0.0))),
        *("--output", str(options.output), "--recording", str(options.recording)),
        *("--typed", shlex.join(given)),
    ]


def _conclude(folder: Path, lines: Path) -> None:
    """Write the summary, and pack the lines if they are many."""
    found = read_packed_too(lines)
    if found:
        write_lines(lines, found)
        for path in retell(folder):
            print(f"Written to {path}.")


if __name__ == "__main__":
    heed_termination()
    sys.exit(main())
