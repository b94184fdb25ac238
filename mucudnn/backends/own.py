"""PyTorch's own convolution as a job to be weighed."""

import dataclasses
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from mucudnn.algorithms.own import operands, own_convolution, result_bytes, unread_operand
from mucudnn.backends.base import Job
from mucudnn.problem import ConvOp, ConvProblem

_PROCESSOR = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class OwnConvolution:
    """One op of PyTorch's own convolution with its operands in place.

    Attributes:
        problem: what runs.
        first: see `own_convolution`.
        second: see `own_convolution`.
        bias: see `own_convolution`.
        unread: see `own_convolution`; it counts as an operand, since autograd holds a real one.
    """

    problem: ConvProblem
    first: Tensor
    second: Tensor
    bias: Tensor | None
    unread: Tensor | None

    @property
    def result_bytes(self) -> int:
        """Bytes of the tensor that `run` returns."""
        return result_bytes(self.problem)

    def run(self) -> Tensor:
        """Compute the op into a new tensor."""
        return own_convolution(self.problem, self.first, self.second, self.bias, self.unread)


def own_job(problem: ConvProblem, device: torch.device = _PROCESSOR) -> Job:
    """Return the job that tells the workspace of PyTorch's own convolution when it is weighed."""
    return Job(f"{__name__}:prepare", {"problem": problem.to_json(), "device": str(device)})


def prepare(payload: Mapping[str, object]) -> OwnConvolution:
    """Return the problem that `own_job` put into `payload`, ready to run on operands nobody filled.

    How much memory a convolution takes does not depend on the values, and normal ones for a large batch
    take longer than the convolution.
    """
    problem = ConvProblem.from_json(cast("Mapping[str, object]", payload["problem"]))
    device = torch.device(str(payload["device"]))
    first, second, bias = operands(problem, None, device)
    unread = None if problem.op is ConvOp.FPROP else unread_operand(problem, device)
    return OwnConvolution(problem, first, second, bias, unread)
