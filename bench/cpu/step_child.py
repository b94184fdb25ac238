"""The process of one training step: `python -m bench.cpu.step_child`, its task as JSON on standard input."""

import dataclasses
import json
import sys
from pathlib import Path

import torch

from bench.cpu.lines import Started, append
from bench.cpu.products import gemm_rate
from bench.cpu.settings import SETTINGS
from bench.cpu.step_cases import Network
from bench.cpu.step_lines import StepCase, StepFailed, StepMeasured
from bench.cpu.step_tables import told
from bench.cpu.steps import measure
from mucudnn.backends import backend_of
from mucudnn.errors import MucudnnError
from mucudnn.plan_file import decode, encode

_INTERRUPTED = 130

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

    def to_text(self) -> str:
        """Return the task as JSON."""
        return json.dumps(encode(self))

    @classmethod
    def from_text(cls, text: str) -> "StepTask":
        """Return the task of which `to_text` gave `text`.

        Raises:
            ValueError: the text is no task's.
        """
        task: StepTask = decode(cls, json.loads(text), "the task")
        return task


def main() -> int:
    """Measure what the task asks for; return 0, whatever comes of it."""
    try:
        work(StepTask.from_text(sys.stdin.read()))
    except KeyboardInterrupt:  # whoever started this process is interrupted too, and says so
        return _INTERRUPTED
    return 0


def work(task: StepTask) -> None:
    """Measure the step of `task` and write its line."""
    torch.set_num_threads(SETTINGS[task.case.setting].threads)
    folder = Path(task.folder)
    append(folder / LINES, Started(task.case.setting, backend_of("cpu:").environment()))
    append(folder / LINES, gemm_rate(task.case.setting))
    line = _measured(task, folder)
    append(folder / LINES, line)
    print(f"  {told(line)}", flush=True)


def _measured(task: StepTask, folder: Path) -> StepMeasured | StepFailed:
    try:
        return measure(task.case, task.network.recipe, folder)
    except (MucudnnError, RuntimeError, MemoryError, ValueError) as error:
        return StepFailed(task.case, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


if __name__ == "__main__":
    sys.exit(main())
