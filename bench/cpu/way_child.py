"""The process of a network in all ways: `python -m bench.cpu.way_child`, its task as JSON on its input."""

import dataclasses
import functools
import sys
from pathlib import Path

from bench.cpu import case_child
from bench.cpu.process import done
from bench.cpu.step_cases import Network
from bench.cpu.way_cases import WayCase
from bench.cpu.way_lines import WayFailed
from bench.cpu.way_tables import told
from bench.cpu.ways import measure

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
    folder, recipe = Path(task.folder), task.network.recipe
    case_child.work(
        task.case.setting,
        folder / LINES,
        functools.partial(measure, task.case, recipe, folder),
        functools.partial(WayFailed, task.case),
        told,
    )


if __name__ == "__main__":
    sys.exit(done(WayTask, work))
