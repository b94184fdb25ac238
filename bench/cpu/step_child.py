"""The process of one training step: `python -m bench.cpu.step_child`, its task as JSON on standard input."""

import dataclasses
import sys
from pathlib import Path

import torch

from bench.cpu.lines import Started, append
from bench.cpu.process import done, reason_of
from bench.cpu.products import gemm_rate
from bench.cpu.settings import SETTINGS
from bench.cpu.step_cases import Network
from bench.cpu.step_lines import StepCase, StepFailed, StepMeasured
from bench.cpu.step_tables import told
from bench.cpu.steps import measure
from mucudnn.backends import backend_of
from mucudnn.errors import MucudnnError

LINES = "steps.jsonl"


@dataclasses.dataclass(frozen=True)
class StepTask:
    """What a process measures.

    Attributes:
        case: which step.
        network: of the case.
        folder: of the lines, the profiles and the plans.
    """

    case: StepCase
    network: Network
    folder: str


def work(task: StepTask) -> None:
    """Measure the step of `task` and write its line."""
    folder = Path(task.folder)
    start(task.case.setting, folder / LINES)
    line = _measured(task, folder)
    append(folder / LINES, line)
    print(f"  {told(line)}", flush=True)


def start(setting: str, lines: Path) -> None:
    """Set the threads, and write what a process found when it started into a file of lines."""
    torch.set_num_threads(SETTINGS[setting].threads)
    append(lines, Started(setting, backend_of("cpu:").environment()))
    append(lines, gemm_rate(setting))


def _measured(task: StepTask, folder: Path) -> StepMeasured | StepFailed:
    try:
        return measure(task.case, task.network.recipe, folder)
    except (MucudnnError, RuntimeError, MemoryError, ValueError) as error:
        return StepFailed(task.case, reason_of(error))


if __name__ == "__main__":
    sys.exit(done(StepTask, work))
