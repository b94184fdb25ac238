"""The process of one training step: `python -m bench.cpu.step_child`, its task as JSON on standard input."""

import dataclasses
import functools
import sys
from pathlib import Path

from bench.cpu import case_child
from bench.cpu.process import done
from bench.cpu.step_cases import Network
from bench.cpu.step_lines import StepCase, StepFailed
from bench.cpu.step_tables import told
from bench.cpu.steps import measure

LINES = "steps.jsonl"


@dataclasses.dataclass(frozen=True)
class StepTask:
    """What a process measures.

    Attributes:
        case: which step.
        network: of the case.
        folder: of the lines, the profiles and the plans.
        processes: in how many the steps are timed.
    """

    case: StepCase
    network: Network
    folder: str
    processes: int


def work(task: StepTask) -> None:
    """Measure the step of `task` and write its line."""
    folder = Path(task.folder)
    case_child.work(
        task.case.setting,
        folder / LINES,
        functools.partial(measure, task.case, task.network, folder, task.processes),
        functools.partial(StepFailed, task.case),
        told,
    )


if __name__ == "__main__":
    sys.exit(done(StepTask, work))
