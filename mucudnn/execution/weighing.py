"""A whole division as a job to be weighed, perhaps in another process."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from mucudnn.algorithms.own import operands, result_bytes, unread_operand
from mucudnn.backends import Job, backend_of
from mucudnn.division import Division
from mucudnn.execution.runner import Runner
from mucudnn.execution.workspace import Workspace
from mucudnn.problem import ConvProblem
from mucudnn.profile import Candidate


class DivisionJob:
    """A division with operands of its own in place, to be weighed in another process."""

    def __init__(self, payload: Mapping[str, object]) -> None:
        """Take the values that `division_job` gave."""
        self._problem = ConvProblem.from_json(cast("Mapping[str, object]", payload["problem"]))
        parts = cast("list[tuple[str, int]]", payload["parts"])
        division = Division(tuple(Candidate(name, batch, 0.0, 0) for name, batch in parts))
        self._device = torch.device(str(payload["device"]))
        backend = backend_of(division.parts[0].algorithm, self._device)
        first, second, bias = operands(self._problem, torch.Generator(self._device), self._device)
        self._operands = (first, second, bias, unread_operand(self._problem, self._device))
        self._runner = Runner(backend, self._problem, division)

    @property
    def result_bytes(self) -> int:
        """Bytes of the tensor that `run` returns."""
        return result_bytes(self._problem)

    def run(self) -> Tensor:
        """Run the division in a workspace of its own, which goes with the run."""
        return self._runner(Workspace(self._device), *self._operands)


def division_job(problem: ConvProblem, division: Division, device: torch.device | None = None) -> Job:
    """Return the job that weighs a whole division: its buffer, and whatever else it takes.

    Without a device it runs on the processor.
    """
    parts = [[part.algorithm, part.batch] for part in division.parts]
    payload = {"problem": problem.to_json(), "parts": parts, "device": str(device or torch.device("cpu"))}
    return Job("mucudnn.execution.weighing:DivisionJob", payload)
