"""The process of `make gpu-layers` that measures, case by case, until the time is up or the card is broken.

Before a case begins, a line says that the process has ended in it, which the line of the case replaces; so a
hang or a crash costs that case only.
"""

import argparse
import collections
import dataclasses
import datetime
import faulthandler
import gc
import itertools
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from bench.commit import commit
from bench.cpu.choice import Family
from bench.cpu.lines import (
    BENCHMARK,
    Case,
    Failed,
    Line,
    Measured,
    Recording,
    Started,
    append,
    read_packed_too,
)
from bench.cpu.measure import CaseMeter, Questions
from bench.cpu.process import reason_of
from bench.endings import INTERRUPTED
from bench.gpu import layer_cases
from bench.gpu.ground import LOST, CardGround, Ground, is_alive
from bench.gpu.hanging import ended_if_it_hangs, heed_termination
from bench.gpu.layer_cases import LayerCase
from bench.gpu.layer_kinds import ASKED, ENDED, IN_PARTS, STOPPED, UNDIVIDED, UNTILED, is_end
from bench.gpu.layer_options import parser, stem_of
from bench.gpu.layer_records import comparisons
from bench.precision import benchmark
from bench.record import TimeIsUpError, Watch, recording
from bench.workloads import Setting, chosen
from mucudnn.backends import backend_of
from mucudnn.backends.cudnn.backend import CudnnBackend
from mucudnn.backends.cudnn.tiles import is_id as is_tiles
from mucudnn.choices import Policy
from mucudnn.errors import BackendError, DeviceLostError, MucudnnError, StoreError
from mucudnn.intervals import estimate
from mucudnn.profile import Environment
from mucudnn.sizes import format_bytes, parse_bytes
from mucudnn.store import Store
from mucudnn.version import __version__

TENTH = 10
"""What PyTorch's own takes where that is much, over this, is one more limit."""

_TRIES = 3
"""How often a case is begun that has broken the card, each time without what broke it before."""

_ENDS = 2
"""How often a case is begun in which a process has ended, which may have been killed for another reason."""

FAMILIES = (
    Family(UNDIVIDED, lambda part, batch: part.batch == batch, is_base=True),
    Family(IN_PARTS, lambda part, batch: part.algorithm == CudnnBackend.own and part.batch < batch),
    Family(UNTILED, lambda part, _: not is_tiles(part.algorithm), is_base=True),
)


class CardLostError(Exception):
    """The card works no more in this process."""


def find_by_benchmark(call: Callable[[], None]) -> None:
    """Run a call once with `torch.backends.cudnn.benchmark` on, and leave that as it was.

    PyTorch keeps for this thread what it finds, so later calls run it without the flag.
    """
    with benchmark():
        call()


@dataclasses.dataclass(frozen=True)
class Aims:
    """What is asked of every case.

    Attributes:
        limits: in bytes.
        policy: which micro-batch sizes are tried.
        case_s: seconds after which a case is taken to hang.
    """

    limits: tuple[int, ...]
    policy: Policy
    case_s: float


class LayerRun:
    """Measures cases on one card, and appends a line for each to a file.

    Args:
        ground: the card.
        lines: the file.
        store: of profiles.
        aims: what is asked of every case.
        watch: which ends it.
        run: what a run says of itself: date, version, command.
    """

    def __init__(
        self, ground: Ground, lines: Path, store: Store, aims: Aims, watch: Watch, run: dict[str, str]
    ) -> None:
        self._ground = ground
        self._lines = lines
        self._store = store
        self._aims = aims
        self._watch = watch
        self._run = run

    def measure(self, cases: Iterable[LayerCase]) -> None:
        """Measure the cases that are not known, in their order.

        Raises:
            TimeIsUpError: the time was not enough.
            CardLostError: a case has broken the card; the others need another process.
            BackendError: the lines are of another environment.
        """
        known, asked = known_cases(read_packed_too(self._lines), self._aims.limits), list(cases)
        counts = collections.Counter(each.setting.name for each in asked)
        left = [each for each in asked if each.case not in known]
        for setting, group in itertools.groupby(left, key=lambda each: each.setting):
            with self._ground.precision(setting.allow_tf32), self._ground.current():
                # By this backend divisions are weighed, too.
                backend = backend_of(CudnnBackend.own, self._ground.card.device)
                environment = backend.environment()
                self._begin(setting, environment, counts[setting.name])
                questions = Questions(self._aims.policy, TENTH, FAMILIES, find_by_benchmark, is_card=True)
                meter = CaseMeter(backend, self._store, self._aims.limits, questions)
                for each in group:
                    self._watch.check()
                    self._measure(meter, each, environment)

    def _begin(self, setting: Setting, environment: Environment, asked: int) -> None:
        """Begin the lines of a setting, whose flags are in force.

        Args:
            setting: which.
            environment: in which it is measured.
            asked: how many cases of it are asked for, known or not.
        """
        former = Recording.of(read_packed_too(self._lines)).started.get(setting.name)
        if former is not None and former.environment.key != environment.key:
            differences = "; ".join(former.environment.differences(environment))
            raise BackendError(
                f"{self._lines} must hold lines of one environment, but {differences}: give another --output."
            )
        append(self._lines, Started(setting.name, environment, {**self._run, ASKED: str(asked)}))

    def _measure(self, meter: CaseMeter, each: LayerCase, environment: Environment) -> None:
        gc.collect()  # a stand that a failure's frames hold in a cycle would keep its gigabytes of operands
        self._ground.allocator.settle()
        append(self._lines, Failed(each.case, ENDED))
        line: Measured | Failed
        try:
            with ended_if_it_hangs(self._aims.case_s):
                found = meter.measure(each.case, each.problem)
                line = dataclasses.replace(found, conditions=dict(self._ground.conditions()))
        except KeyboardInterrupt:
            append(self._lines, Failed(each.case, STOPPED))
            raise
        except Exception as error:  # noqa: BLE001  # whatever it is, it is what became of the case
            line = Failed(each.case, reason_of(error))
        append(self._lines, line)
        print(f"{each.case}: {told(line)}", flush=True)
        if isinstance(line, Measured):
            self._keep_rounds(line, environment)
        elif _has_lost_the_card(line) or not is_alive(self._ground):
            raise CardLostError(f"The card works no more after {each.case}.")

    def _keep_rounds(self, line: Measured, environment: Environment) -> None:
        """Add the rounds of a line to the store; should that fail, the lines have them, and cases go on."""
        try:
            self._store.add_comparisons(environment, comparisons(line))
        except StoreError as error:
            print(
                f"bench.gpu.layer_run: rounds are not in the store: {error} "
                "`python -m bench.gpu.layer_records FOLDER STORE` adds those of the lines.",
                file=sys.stderr,
                flush=True,
            )


def known_cases(lines: Sequence[Line], limits: Iterable[int]) -> set[Case]:
    """Return the cases that lines hold as measured under all limits, or as failed for good."""
    recording, wanted = Recording.of(lines), set(limits)
    failures = [line for line in lines if isinstance(line, Failed)]
    lost = collections.Counter(line.case for line in failures if _has_lost_the_card(line))
    ended = _ends(lines)
    measured = {
        case
        for case, line in recording.measured.items()
        if wanted <= {choice.limit_bytes for choice in line.choices}
    }
    failed = {
        case
        for case, line in recording.failed.items()
        if line.reason != STOPPED
        and not (_has_lost_the_card(line) and lost[case] < _TRIES)
        and not (is_end(line.reason) and ended[case] < _ENDS)
    }
    return measured | failed


def _has_lost_the_card(line: Failed) -> bool:
    """Whether an algorithm broke the card in a case; it is known now, and not tried again."""
    return line.reason.startswith(f"{DeviceLostError.__name__}:")


def _ends(lines: Iterable[Line]) -> collections.Counter[Case]:
    """Return how often a process ended in each case: it had begun, and nothing else was said of it."""
    found: collections.Counter[Case] = collections.Counter()
    for line in lines:
        if isinstance(line, Failed) and line.reason == ENDED:
            found[line.case] += 1
        elif isinstance(line, Measured) or (isinstance(line, Failed) and not is_end(line.reason)):
            found[line.case] = max(found[line.case] - 1, 0)
    return found


def told(line: Measured | Failed) -> str:
    """Return what a line of progress says of a case."""
    if isinstance(line, Failed):
        return f"failed: {line.reason}"
    own = line.seconds_of(line.own).median
    texts = [f"own {own * 1e3:.3g} ms"]
    if line.benchmark is not None:
        texts.append(f"benchmark {estimate(line.benchmark.samples_s(BENCHMARK)).median * 1e3:.3g} ms")
    for choice in line.choices:
        ours = "nothing fits"
        if choice.strict_key is not None:
            ours = f"{line.seconds_of(choice.strict_key).median * 1e3:.3g} ms"
        texts.append(f"{format_bytes(choice.limit_bytes)} {ours}")
    return f"{', '.join(texts)}  ({line.seconds:.1f} s)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for; return the exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser().parse_args(given)
    faulthandler.enable(sys.__stderr__ or sys.stderr)
    settings = chosen(options.settings, layer_cases.settings())
    cases = list(layer_cases.cases(layer_cases.layers(), settings, options.layers))
    if not cases:
        print("bench.gpu.layer_run: no layer or no setting has such a name.", file=sys.stderr)
        return 2
    try:
        return measured(CardGround(options.device), cases, options, options.typed or shlex.join(given))
    except MucudnnError as error:
        print(f"bench.gpu.layer_run: {error}", file=sys.stderr)
        return 2


def measured(ground: Ground, cases: Sequence[LayerCase], options: argparse.Namespace, command: str) -> int:
    """Measure the cases on a card; return the exit status, 0 if all is known or the time is up.

    Raises:
        MucudnnError: the lines are of another environment, or the store cannot be used.
    """
    run = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "mucudnn": __version__,
        "commit": commit(),
        "policy": options.policy,
        "command": f"python -m bench.gpu.layer_run {command}",
    }
    watch = Watch(time.monotonic() + options.seconds)
    limits = tuple(sorted({parse_bytes(limit) for limit in options.limit}))
    aims = Aims(limits, Policy(options.policy), options.case_seconds)
    lines = options.output / f"{stem_of(options.policy)}.jsonl"
    for folder in (options.output, options.recording):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with recording(options.recording) as store:
            LayerRun(ground, lines, store, aims, watch, run).measure(cases)
    except TimeIsUpError as error:
        print(error)
    except CardLostError as error:
        print(f"bench.gpu.layer_run: {error}", file=sys.stderr)
        return LOST
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    heed_termination()
    sys.exit(main())
