"""Whole training steps on a card: as PyTorch comes, with `cudnn.benchmark`, undivided and divided in a limit.

All ways begin with the same weights, train on the same batch, and run in the same rounds and in one thread,
the backward pass too; but with `cudnn.benchmark` in another one, as PyTorch keeps for every thread which of
cuDNN's plans it has found. Two controls tell what is only noise: PyTorch as it comes once more, in the thread
of the others and in one of its own. Dropout is off, so that losses can be compared. Profiles are those that
`make record` has made, if any.
"""

import argparse
import datetime
import gc
import itertools
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench.arguments import seconds
from bench.commit import commit
from bench.endings import INTERRUPTED, not_told_anew
from bench.gpu.available import obstacle
from bench.gpu.ground import CardGround, Ground, is_alive
from bench.gpu.hanging import heed_termination
from bench.gpu.results import slug
from bench.gpu.sections import sentence
from bench.gpu.step_lines import LINES, known, retell
from bench.gpu.step_rows import (
    PairRow,
    StepRow,
    network_of,
    summary,
    told,
)
from bench.gpu.step_trial import Trial
from bench.gpu.values import jsonable
from bench.record import TimeIsUpError, Watch, folder_of
from bench.workloads import NETWORKS, SETTINGS, Setting, Workload, chosen
from mucudnn.errors import MucudnnError
from mucudnn.sizes import parse_bytes
from mucudnn.version import __version__


def run(
    ground: Ground,
    workloads: Sequence[Workload],
    settings: Sequence[Setting],
    limits: Sequence[str],
    folders: tuple[Path, Path],
    watch: Watch,
    again: bool = False,
) -> tuple[list[StepRow | PairRow], bool]:
    """Compare the ways of all networks as long as there is time; return the rows, and whether all went well.

    Args:
        ground: the card.
        workloads: networks.
        settings: types and layouts.
        limits: of workspace.
        folders: of the recording, and of the rows, which are appended to steps.jsonl one by one, after a
            line that says under which conditions they were measured.
        watch: which ends it.
        again: whether to measure what the lines hold already.
    """
    recorded, results = folders
    rows: list[StepRow | PairRow] = []
    is_well = True
    done = set() if again else known(results)
    with (results / LINES).open("a", encoding="utf-8") as file:
        try:
            for workload, setting, limit in itertools.product(workloads, settings, limits):
                if (network_of(workload), setting.name, parse_bytes(limit)) in done:
                    print(f"{network_of(workload)}, {setting.name}, {limit}: known, see --again.", flush=True)
                    continue
                watch.check()
                with ground.precision(setting.allow_tf32), ground.current():
                    _write(file.write, _header(ground))
                    trial = Trial(ground, workload, setting, limit, recorded, watch)
                    for row in _rows_of(trial, ground, workload, setting, limit):
                        rows.append(row)
                        is_well = is_well and not (isinstance(row, StepRow) and row.is_ill)
                        _write(file.write, row)
                        file.flush()
                        print(told(row), flush=True)
        except TimeIsUpError as error:
            print(error, flush=True)
    return rows, is_well


def _header(ground: Ground) -> dict[str, object]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "commit": commit(),
        "command": shlex.join(["python", "-m", "bench.gpu.steps", *sys.argv[1:]]),
        "environment": ground.backend.environment().to_json(),
    }


def _write(write: Callable[[str], object], value: object) -> None:
    write(json.dumps(jsonable(value)) + "\n")


def _rows_of(
    trial: Trial, ground: Ground, workload: Workload, setting: Setting, limit: str
) -> Iterator[StepRow | PairRow]:
    """Yield the rows of a trial, and why it ended if it did; only a broken card ends the others too."""
    gc.collect()
    try:
        yield from trial.rows()
    except TimeIsUpError:
        raise
    except Exception as error:  # whatever one trial dies of, the others are to be had
        yield StepRow(network_of(workload), setting.name, parse_bytes(limit), "all", failure=sentence(error))
        if not is_alive(ground):
            raise TimeIsUpError("The card works no more; run the same command again.") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare what is asked for; return the exit status."""
    options = _parser().parse_args(arguments)
    if options.retell is not None:
        return _retold(options.retell)
    reason = obstacle()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    networks, settings = chosen(options.networks, NETWORKS), chosen(options.settings, SETTINGS)
    if not (networks and settings):
        print("bench.gpu.steps: no network or no setting has such a name.", file=sys.stderr)
        return 2
    try:
        return _compare(options, networks, settings)
    except MucudnnError as error:
        print(f"bench.gpu.steps: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench.gpu.steps: interrupted; what was measured is kept.", file=sys.stderr)
        return INTERRUPTED


def _compare(options: argparse.Namespace, networks: Sequence[Workload], settings: Sequence[Setting]) -> int:
    # Before hours of work; what a large limit has raced serves the smaller ones.
    limits = sorted(options.limit, key=parse_bytes, reverse=True)
    watch = Watch(time.monotonic() + options.seconds)
    ground = CardGround(options.device)
    results = options.output or Path("bench/results", slug(ground.name))
    recorded = options.recording or folder_of(ground.card.device)
    if not recorded.is_dir():
        print(f"There is no recording {recorded}: what is needed is measured first, and kept there.")
    for folder in (results, recorded):
        folder.mkdir(parents=True, exist_ok=True)
    rows, is_well = run(ground, networks, settings, limits, (recorded, results), watch, options.again)
    print(f"\n{summary(rows)}\n\nWritten to {results / LINES}.")
    return _retold(results) or (0 if is_well else 1)


def _retold(folder: Path) -> int:
    try:
        print(f"Written to {retell(folder)}.")
    except (OSError, ValueError) as error:
        print(f"bench.gpu.steps: {not_told_anew(folder, error)}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.gpu.steps", description=__doc__)
    parser.add_argument("--device", type=int, default=0, help="the card's number (default: %(default)s)")
    parser.add_argument(
        "--limit", nargs="+", default=["64MiB"], help="of workspace, one or several (default: 64MiB)"
    )
    parser.add_argument(
        "--seconds", type=seconds, default=math.inf, help="after which nothing new is begun (default: no end)"
    )
    parser.add_argument("--networks", nargs="+", default=["*"], metavar="PATTERN", help="(default: all)")
    parser.add_argument("--settings", nargs="+", default=["*"], metavar="PATTERN", help="(default: all)")
    parser.add_argument("--again", action="store_true", help="measure what is known anew")
    parser.add_argument(
        "--recording", type=Path, help="folder of make record (default: build/record/ and the card's name)"
    )
    parser.add_argument("--output", type=Path, help="folder (default: bench/results/ and the card's name)")
    parser.add_argument(
        "--retell", type=Path, metavar="FOLDER",
        help="write the tables of a folder of results anew, from its lines; measure nothing",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    heed_termination()
    sys.exit(main())
