"""The same two steps in one more process: `python -m bench.cpu.step_again`, its task on standard input.

Rounds tell of their own process alone, and times of equal programs differ by more than they show from one
process to the next: memory lies elsewhere in each, and the machine may be busier. So a step is timed in
several.
"""

import ctypes
import dataclasses
import json
import signal
import sys
from pathlib import Path

from bench.cpu.process import done, ended
from bench.cpu.rounds import Rounds
from bench.cpu.step_cases import Network
from bench.cpu.step_lines import StepCase
from bench.cpu.step_models import ReadingStep, prepared
from bench.cpu.step_rounds import timed
from bench.cpu.using import casting_in, use
from mucudnn import Plan, apply
from mucudnn.backends import backend_of
from mucudnn.plan_file import decode, encode

TIMEOUT_S = 900.0
"""For up to thirty rounds of two steps that take some seconds each."""

_PR_SET_PDEATHSIG = 1
"""Linux's number, of prctl, for the signal that a process gets when the one that started it ends."""


@dataclasses.dataclass(frozen=True)
class AgainTask:
    """What a process times.

    Attributes:
        case: which step.
        network: of the case.
        plan: the file of the plan by which one of the two models is patched.
        patches_first: whether that is the model that was made first, which may be faster or slower for that
            alone: memory is given out in turn.
        rounds: the file to which the rounds are written.
    """

    case: StepCase
    network: Network
    plan: str
    patches_first: bool
    rounds: str


def rounds_again(task: AgainTask) -> Rounds | None:
    """Return the rounds of a process of its own; None, and the reason told, if it failed."""
    path = Path(task.rounds)
    path.unlink(missing_ok=True)
    how = ended("bench.cpu.step_again", task, task.case.setting, TIMEOUT_S)
    if how is not None:
        print(f"not timed in another process: {how}", flush=True)
        return None
    rounds: Rounds = decode(Rounds, json.loads(path.read_text(encoding="utf-8")), "the rounds")
    path.unlink()
    return rounds


def work(task: AgainTask) -> None:
    """Time the steps of `task`, and write their rounds."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing computes beside the next case
    use(task.case.setting)
    own, patched = models(task)
    rounds = timed(own, patched, backend_of("cpu:").neighbours())
    Path(task.rounds).write_text(json.dumps(encode(rounds)), encoding="utf-8")


def models(task: AgainTask) -> tuple[ReadingStep, ReadingStep]:
    """Return the steps of the unpatched model and of the patched one, made in the order of the task."""
    first = prepared(task.network.recipe, task.case.layout, casting_in(task.case.setting))
    second = first.copy()
    own, patched = (second, first) if task.patches_first else (first, second)
    apply(patched.model, Plan.load(Path(task.plan)))
    return own, patched


if __name__ == "__main__":
    sys.exit(done(AgainTask, work))
