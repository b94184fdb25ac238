"""The same steps in one more process: `python -m bench.cpu.step_again`, its task on standard input.

Rounds tell of their own process alone, and times of equal programs differ by more than they show from one
process to the next: memory lies elsewhere in each, and the machine may be busier. So a step is timed in
several.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from bench.cpu.process import done, ended
from bench.cpu.rounds import Rounds
from bench.cpu.step_cases import Network
from bench.cpu.step_lines import OWN, StepCase
from bench.cpu.step_models import ReadingStep, prepared
from bench.cpu.step_rounds import timed
from bench.cpu.using import casting_in, use
from mucudnn import Plan, apply
from mucudnn.backends import backend_of
from mucudnn.plan_file import decode, encode

TIMEOUT_S = 1200.0
"""For up to thirty rounds of three steps that take some seconds each."""


@dataclasses.dataclass(frozen=True)
class AgainTask:
    """What a process times.

    Attributes:
        case: which step.
        network: of the case.
        plans: the files of the plans by which models are patched, each by the name of its step.
        patches_first: whether these are made before the unpatched one, which may be faster or slower for
            that alone: memory is given out in turn.
        rounds: the file to which the rounds are written.
    """

    case: StepCase
    network: Network
    plans: Mapping[str, str]
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
    use(task.case.setting)
    rounds = timed(models(task), backend_of("cpu:").neighbours())
    Path(task.rounds).write_text(json.dumps(encode(rounds)), encoding="utf-8")


def models(task: AgainTask) -> dict[str, ReadingStep]:
    """Return the steps of the unpatched model and of the patched ones, made in the order of the task."""
    first = prepared(task.network.recipe, task.case.layout, casting_in(task.case.setting))
    names = [OWN, *task.plans]
    order = names[::-1] if task.patches_first else names
    steps = dict(zip(order, (first, *(first.copy() for _ in order[1:])), strict=True))
    for name, plan in task.plans.items():
        apply(steps[name].model, Plan.load(Path(plan)))
    return {name: steps[name] for name in names}


if __name__ == "__main__":
    sys.exit(done(AgainTask, work))
