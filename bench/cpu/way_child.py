"""The process of a network in all ways: `python -m bench.cpu.way_child`, its task as JSON on its input."""

import dataclasses
import sys
from pathlib import Path

from bench.cpu.lines import append
from bench.cpu.process import done, reason_of
from bench.cpu.step_cases import Network
from bench.cpu.step_child import start
from bench.cpu.way_cases import WayCase
from bench.cpu.way_lines import WayFailed, WayMeasured
from bench.cpu.way_tables import told
from bench.cpu.ways import measure
from mucudnn.errors import MucudnnError

LINES = "ways.jsonl"


@dataclasses.dataclass(frozen=True)
class WayTask:
    """What a process measures.

    Attributes:
        case: which network, for what.
        network: of the case.
        folder: of the lines, the profiles and the plans.
    """

    case: WayCase
    network: Network
    folder: str


def work(task: WayTask) -> None:
    """Measure the network of `task` in all ways, and write its line."""
    folder = Path(task.folder)
    start(task.case.setting, folder / LINES)
    line = _measured(task, folder)
    append(folder / LINES, line)
    print(f"  {told(line)}", flush=True)


def _measured(task: WayTask, folder: Path) -> WayMeasured | WayFailed:
    try:
        return measure(task.case, task.network.recipe, folder)
    except (MucudnnError, RuntimeError, MemoryError, ValueError) as error:
        return WayFailed(task.case, reason_of(error))


if __name__ == "__main__":
    sys.exit(done(WayTask, work))
