"""The same two steps in one more process: `python -m bench.cpu.step_again`, its task on standard input.

An interval holds for the process whose rounds it is of. Where memory lies, and which pages are neighbours in
a cache, is drawn anew for every process, and stays so for as long as it lives: times of equal programs differ
by more than any interval says. So a step is timed in several.
"""

import dataclasses
import json
import sys
from pathlib import Path

from bench.cpu.process import answer, done
from bench.cpu.rounds import Rounds
from bench.cpu.step_cases import Network
from bench.cpu.step_lines import StepCase
from bench.cpu.step_models import prepared
from bench.cpu.step_rounds import timed
from bench.cpu.using import casting_in, use
from mucudnn import Plan, apply
from mucudnn.backends import backend_of
from mucudnn.plan_file import decode, encode

_TIMEOUT_S = 900.0
"""For up to thirty rounds of two steps that take some seconds each."""


@dataclasses.dataclass(frozen=True)
class AgainTask:
    """What a process times.

    Attributes:
        case: which step.
        network: of the case.
        plan: the file of the plan that it is patched by.
        patches_first: whether the model that is patched is made before the one that is not: what comes first
            lies elsewhere, and must not be the same in every process.
    """

    case: StepCase
    network: Network
    plan: str
    patches_first: bool


def rounds_again(task: AgainTask) -> Rounds:
    """Return the rounds of a process of its own.

    Raises:
        RuntimeError: it failed; what it said stands on standard error.
    """
    text = answer("bench.cpu.step_again", task, task.case.setting, _TIMEOUT_S)
    rounds: Rounds = decode(Rounds, json.loads(text), "the rounds")
    return rounds


def work(task: AgainTask) -> None:
    """Time the steps of `task`, and write their rounds."""
    use(task.case.setting)
    first = prepared(task.network.recipe, task.case.layout, casting_in(task.case.setting))
    second = first.copy()
    own, patched = (second, first) if task.patches_first else (first, second)
    apply(patched.model, Plan.load(Path(task.plan)))
    print(json.dumps(encode(timed(own, patched, backend_of("cpu:").neighbours()))))


if __name__ == "__main__":
    sys.exit(done(AgainTask, work))
