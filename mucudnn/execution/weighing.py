"""A whole division as a job to be weighed, perhaps in another process."""

from collections.abc import Mapping
from typing import cast

import torch

from mucudnn.algorithms.own import operands, unread_operand
from mucudnn.backends import Job, backend_of
from mucudnn.backends.own import PreparedConvolution
from mucudnn.division import Division
from mucudnn.execution.runner import Runner
from mucudnn.execution.workspace import Workspace
from mucudnn.problem import ConvProblem
from mucudnn.profile import Candidate


def division_job(problem: ConvProblem, division: Division, device: torch.device | None = None) -> Job:
    """Return the job that weighs a whole division: its buffer, and whatever else it takes.

    Without a device it runs on the processor.
    """
    parts = [[part.algorithm, part.batch] for part in division.parts]
    payload = {"problem": problem.to_json(), "parts": parts, "device": str(device or torch.device("cpu"))}
    return Job("mucudnn.execution.weighing:prepare", payload)


def prepare(payload: Mapping[str, object]) -> PreparedConvolution:
    """Return the division that `division_job` put into `payload`, ready to run on operands of its own.

    Each run has a workspace of its own, which goes with it.
    """
    problem = ConvProblem.from_json(cast("Mapping[str, object]", payload["problem"]))
    parts = cast("list[tuple[str, int]]", payload["parts"])
    division = Division(tuple(Candidate(name, batch, 0.0, 0) for name, batch in parts))
    device = torch.device(str(payload["device"]))
    backend = backend_of(division.parts[0].algorithm, device)
    first, second, bias = operands(problem, torch.Generator(device), device)
    unread = unread_operand(problem, device)
    runner = Runner(backend, problem, division)
    return PreparedConvolution(problem, lambda: runner(Workspace(device), first, second, bias, unread))
