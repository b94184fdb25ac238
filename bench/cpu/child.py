"""The process of one thread setting: `python -m bench.cpu.child`, with its task as JSON on standard input."""

import dataclasses
import sys
import time
from pathlib import Path

from bench.cpu.layers import ALL, Layer
from bench.cpu.lines import Case, Failed, Measured, Started, append
from bench.cpu.measure import CaseMeter
from bench.cpu.process import done, reason_of
from bench.cpu.products import gemm_rate
from bench.cpu.using import use
from mucudnn.backends import backend_of
from mucudnn.errors import MucudnnError
from mucudnn.sizes import format_bytes
from mucudnn.store import open_store

LINES = "layers.jsonl"
PROFILES = "profiles.sqlite3"


@dataclasses.dataclass(frozen=True)
class Task:
    """What a process measures.

    Attributes:
        setting: its name.
        cases: in their order.
        limits: in bytes.
        folder: of the lines and the profiles.
        seconds: after which no case is begun.
        elapsed_s: seconds that the whole run has taken before.
        budget_s: seconds of the whole run.
    """

    setting: str
    cases: tuple[Case, ...]
    limits: tuple[int, ...]
    folder: str
    seconds: float
    elapsed_s: float
    budget_s: float


def work(task: Task) -> None:
    """Measure the cases of `task` until its seconds are over; every one is written at once."""
    start = time.monotonic()
    use(task.setting)
    folder, backend = Path(task.folder), backend_of("cpu:")
    lines = folder / LINES
    append(lines, Started(task.setting, backend.environment()))
    append(lines, gemm_rate(task.setting))
    with open_store(folder / PROFILES) as store:
        meter = CaseMeter(backend, store, task.limits)
        for number, case in enumerate(task.cases, start=1):
            elapsed = time.monotonic() - start
            if elapsed >= task.seconds:
                break
            line = _measured(meter, case)
            append(lines, line)
            _tell(task, number, task.elapsed_s + time.monotonic() - start, _told(line))
    append(lines, gemm_rate(task.setting))


def _measured(meter: CaseMeter, case: Case) -> Measured | Failed:
    try:
        return meter.measure(case, _layer(case.layer).problem(case.op, case.layout))
    except (MucudnnError, RuntimeError, MemoryError) as error:
        return Failed(case, reason_of(error))


def _layer(name: str) -> Layer:
    return next(layer for layer in ALL if layer.name == name)


def _told(line: Measured | Failed) -> str:
    """What a line of progress says of a case."""
    if isinstance(line, Failed):
        return f"failed: {line.reason}"
    limits = (
        f"{format_bytes(each.limit_bytes)} x{line.speedup(each.key).median:.2f}" for each in line.choices
    )
    own = line.seconds_of(line.own).median * 1e3
    return f"{own:.1f} ms, {', '.join(limits)}  ({line.seconds:.1f} s)"


def _tell(task: Task, number: int, elapsed_s: float, told: str) -> None:
    left = max(task.budget_s - elapsed_s, 0.0)
    print(
        f"{elapsed_s:5.0f} s gone, {left:5.0f} s left  {number:3}/{len(task.cases)}  "
        f"{task.cases[number - 1]}: {told}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(done(Task, work))
