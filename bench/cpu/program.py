"""`make bench-cpu`: layers and whole training steps against PyTorch's own convolution, and the targets.

With `--ways` networks, in training and inference, in several ways of PyTorch's own, and patched. A process
for each thread setting, or network in all ways, and several for each training step; in each all is
interleaved. What was measured by the same code on the same machine is not measured again: a run that was
interrupted, or whose time was up, is continued by the next one. Lines and profiles lie in build/bench-cpu/,
results in bench/results/.
"""

import argparse
import datetime
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.arguments import at_least_one, seconds
from bench.commit import commit
from bench.cpu import results, summary, targets, way_cases
from bench.cpu.case_run import WAYS, CaseRun, steps_in
from bench.cpu.child import LINES, Task
from bench.cpu.ground import Ground, step_code, way_code
from bench.cpu.layers import ALL
from bench.cpu.lines import Case, Failed, Line, Measured, Recording, append, read
from bench.cpu.process import ended
from bench.cpu.schedule import Selection, Stage, pending, tiers
from bench.cpu.settings import SETTINGS, USUAL
from bench.cpu.step_cases import NETWORKS, cases_of
from bench.cpu.step_child import StepTask
from bench.cpu.step_lines import StepCase
from bench.cpu.way_cases import WAY_NETWORKS, WayCase
from bench.cpu.way_child import WayTask
from bench.endings import INTERRUPTED, not_told_anew
from mucudnn.errors import BackendError, MucudnnError
from mucudnn.intervals import FEWEST_SAMPLES
from mucudnn.problem import ConvOp, Layout
from mucudnn.report import check_matplotlib
from mucudnn.report.table import table
from mucudnn.sizes import parse_bytes

_SECONDS = 3600.0
_LIMITS = ("4MiB", "16MiB", "64MiB")
_EVERY_LAYER = ["*"]
_OPS = [str(op) for op in ConvOp]
_NETWORKS = [network.name for network in NETWORKS]
_WAY_NETWORKS = [network.name for network in WAY_NETWORKS]

_PATIENCE_S = 180.0
"""By how much a process may pass its time, for the case that it has begun, before it is taken to hang."""

_LEAST_S = 10.0
"""With less time left no process is started: it would import torch and end."""

_PROCESSES = FEWEST_SAMPLES
"""In which each training step is timed: of six there is an interval."""

Process = Callable[[Task], str | None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write the results; return the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(given)
    try:
        check_matplotlib()  # what is measured will be drawn
        if options.retell is not None:
            return _retold(Path(options.retell))
        limits = tuple(sorted({parse_bytes(limit) for limit in options.limits}))
    except MucudnnError as error:
        print(f"bench.cpu: {error}", file=sys.stderr)
        return 2
    if options.ways is not None and not _way_cases(options):
        print("bench.cpu: --ways needs --settings 1-thread or 2-threads.", file=sys.stderr)
        return 2
    has_layers = _has_layers(options) and tiers(ALL, _selection(options))
    if not (has_layers or _step_cases(options) or _way_cases(options)):
        print(
            "bench.cpu: there is nothing of that kind to measure; --help lists what there is.",
            file=sys.stderr,
        )
        return 2
    ground, version = Ground.here(), commit()
    folder = Path("build") / "bench-cpu" / ground.digest
    folder.mkdir(parents=True, exist_ok=True)
    steps_folder, ways_folder = folder / f"steps-{step_code()}", folder / f"ways-{way_code()}"
    if options.again:
        others = [line for line in read(folder / LINES) if not _is_asked_for(line, options)]
        _set_aside(*_to_measure(options, folder / LINES, steps_folder, ways_folder))
        for line in others if _has_layers(options) else ():
            append(folder / LINES, line)
    run = Run(folder, limits, options.seconds)
    step_run = CaseRun(steps_in(options.processes), steps_folder, NETWORKS)
    way_run = CaseRun(WAYS, ways_folder, WAY_NETWORKS)
    status = _status_of(lambda: _measure(options, run, step_run, way_run))
    output = Path(options.output or Path("bench") / "results" / ground.slug)
    lines, steps, ways = read(folder / LINES), step_run.lines(), way_run.lines()
    if not (lines or steps or ways):
        print(f"bench.cpu: nothing is known of this code here, so {output} stays as it is", file=sys.stderr)
        return status or 1
    command = shlex.join(["python", "-m", "bench.cpu", *given])
    results.write(output, ground, lines, command, steps, version, ways)
    rows = list(summary.target_rows(Recording.of([*lines, *steps]), ALL))
    print("\n" + "\n".join(table(targets.Row._fields, "<<<<", [("", rows)])))
    print(f"\nWritten to {output}.")
    return status


def _has_layers(options: argparse.Namespace) -> bool:
    """Whether layers are asked for: unless steps or ways alone are."""
    return options.steps is None and options.ways is None


def _to_measure(options: argparse.Namespace, layers: Path, steps: Path, ways: Path) -> list[Path]:
    """Return where the lines of layers lie, of steps, of ways: of what is asked for."""
    return [
        *([layers] if _has_layers(options) else []),
        *([steps] if _step_cases(options) else []),
        *([ways] if _way_cases(options) else []),
    ]


def _is_asked_for(line: Line, options: argparse.Namespace) -> bool:
    """Whether a line is of a case that is selected."""
    return isinstance(line, Measured | Failed) and line.case in _selection(options)


def _retold(folder: Path) -> int:
    """Write what people read of a folder of results anew; return the exit status."""
    try:
        results.retell(folder)
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        print(f"bench.cpu: {not_told_anew(folder, error)}", file=sys.stderr)
        return 2
    return 0


def _measure(
    options: argparse.Namespace,
    run: "Run",
    step_run: CaseRun[StepCase, StepTask],
    way_run: CaseRun[WayCase, WayTask],
) -> None:
    """Measure layers, then training steps; only steps, or ways, if they are asked for."""
    if _has_layers(options):
        run.measure(_selection(options))
    step_run.measure(_step_cases(options), run.left_s())
    way_run.measure(_way_cases(options), run.left_s())


def _status_of(measure: Callable[[], None]) -> int:
    """Measure, and return the exit status; what was measured before an end of any kind is kept."""
    try:
        measure()
    except KeyboardInterrupt:
        print("bench.cpu: interrupted; what was measured is kept.", file=sys.stderr)
        return INTERRUPTED
    except MucudnnError as error:
        print(f"bench.cpu: {error}", file=sys.stderr)
        return 1
    return 0


class Run:
    """One run of the program, with the time that it has.

    Args:
        folder: of lines and profiles.
        limits: in bytes.
        seconds: for all processes.
        process: has a process do a task; returns how it ended if not in order.
    """

    def __init__(
        self, folder: Path, limits: tuple[int, ...], seconds: float, process: Process | None = None
    ) -> None:
        self._folder = folder
        self._process = process or _ended
        self._limits = limits
        self._seconds = seconds
        self._start = time.monotonic()
        self._known = len(self._lines())

    def measure(self, selection: Selection) -> None:
        """Measure what is selected and not known, tier by tier, until the time is up."""
        for stages in tiers(ALL, selection):
            while (left := pending(stages, self._done())) and self.left_s() >= _LEAST_S:
                for number, stage in enumerate(left):
                    share = len(stage.cases) / sum(len(each.cases) for each in left[number:])
                    self._run(stage, max(share * self.left_s(), 1.0))

    def _lines(self) -> list[Line]:
        return read(self._folder / LINES)

    def left_s(self) -> float:
        """Return the seconds that are left of this run; negative if they are over."""
        return self._seconds - (time.monotonic() - self._start)

    def _done(self) -> set[Case]:
        """Cases that were measured under all limits, or that failed in this run."""
        lines = self._lines()
        failed = {line.case for line in lines[self._known :] if isinstance(line, Failed)}
        return failed | {
            case
            for case, line in Recording.of(lines).measured.items()
            if {*self._limits} <= {choice.limit_bytes for choice in line.choices}
        }

    def _run(self, stage: Stage, seconds: float) -> None:
        """Have a process measure a stage; a case in which it ends or hangs is one that failed."""
        task = Task(
            setting=stage.setting,
            cases=stage.cases,
            limits=self._limits,
            folder=str(self._folder),
            seconds=seconds,
            elapsed_s=self._seconds - self.left_s(),
            budget_s=self._seconds,
        )
        known = len(self._lines())
        how = self._process(task)
        unfinished = pending([stage], self._done())
        if how is None or not unfinished:
            return
        if len(self._lines()) == known:
            raise BackendError(f"A process for {stage.setting} must start, but {how}")
        append(self._folder / LINES, Failed(unfinished[0].cases[0], how))


def _ended(task: Task) -> str | None:
    return ended("bench.cpu.child", task, task.setting, task.seconds + _PATIENCE_S)


def _set_aside(*paths: Path) -> None:
    """Rename files and folders, so that all is measured again and nothing is lost."""
    now = datetime.datetime.now(datetime.UTC)
    for path in paths:
        if path.exists():
            path.rename(path.with_name(f"{path.stem}-until-{now:%Y%m%dT%H%M%SZ}{path.suffix}"))


def _selection(options: argparse.Namespace) -> Selection:
    return Selection(
        patterns=tuple(options.layers),
        settings=_settings(options),
        layouts=tuple(Layout(name) for name in options.layouts),
        ops=tuple(ConvOp(name) for name in options.ops),
    )


def _step_cases(options: argparse.Namespace) -> list[StepCase]:
    """Return the training steps that are asked for; none where some layers or ops were, or ways."""
    is_partial = options.layers != _EVERY_LAYER or options.ops != _OPS or options.ways is not None
    if options.steps is None and is_partial:
        return []
    networks = [network for network in NETWORKS if network.name in (options.steps or _NETWORKS)]
    return cases_of(networks, _settings(options), [Layout(name) for name in options.layouts])


def _way_cases(options: argparse.Namespace) -> list[WayCase]:
    """Return the networks in all ways that are asked for; none unless they are."""
    if options.ways is None:
        return []
    networks = [network for network in WAY_NETWORKS if network.name in (options.ways or _WAY_NETWORKS)]
    return way_cases.cases_of(networks, _settings(options))


def _settings(options: argparse.Namespace) -> tuple[str, ...]:
    return tuple(name for name in options.settings if _is_possible(name))


def _is_possible(setting: str) -> bool:
    """Whether there are as many processors as threads; two threads on one would say nothing."""
    return SETTINGS[setting].threads <= len(os.sched_getaffinity(0))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.cpu", description=__doc__)
    add = parser.add_argument
    add(
        "--seconds",
        type=seconds,
        default=_SECONDS,
        help="for all processes; 0 writes the results of what is known (default: %(default)s)",
    )
    add(
        "--steps",
        nargs="*",
        choices=_NETWORKS,
        help="only training steps, of these networks or of all (default: all layers, then all steps)",
    )
    add(
        "--ways",
        nargs="*",
        choices=_WAY_NETWORKS,
        help="only networks in all ways (layouts, torch.compile, patched or not), of these networks or of "
        "all, in inference and training, on one or two threads; an hour a setting (default: none)",
    )
    add(
        "--layers",
        nargs="+",
        default=_EVERY_LAYER,
        metavar="PATTERN",
        help="only these, by name as in a shell, and no steps unless asked for (default: all)",
    )
    add(
        "--settings",
        nargs="+",
        choices=list(SETTINGS),
        default=list(USUAL),
        help="of threads, precision and limit (default: all without a small limit)",
    )
    add("--ops", nargs="+", choices=_OPS, default=_OPS, help="of layers (default: all)")
    layouts = [str(layout) for layout in Layout]
    add("--layouts", nargs="+", choices=layouts, default=layouts, help="of images and filters")
    add("--limits", nargs="+", default=list(_LIMITS), help="of layers' workspace (default: 4MiB 16MiB 64MiB)")
    add(
        "--processes",
        type=at_least_one,
        default=_PROCESSES,
        help="in how many each training step is timed, by one plan; of fewer than the default intervals are "
        "those of one's rounds; what is known is timed in more only with --again (default: %(default)s)",
    )
    add(
        "--again",
        action="store_true",
        help="measure anew what is selected of layers (profiles are kept), or all steps, or all ways",
    )
    add(
        "--retell",
        metavar="FOLDER",
        help="write summary and pictures of a folder of results anew, from its lines; measure nothing",
    )
    add("--output", default=None, help="folder (default: bench/results/ and the processor's name)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
