"""PyTorch's own convolution as a job to be weighed: as it comes, or with a filter packed beforehand."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor

from mucudnn.algorithms.own import operands, own_convolution, result_bytes, unread_operand
from mucudnn.algorithms.packed import image_order, packing
from mucudnn.backends.base import Job
from mucudnn.errors import BackendError
from mucudnn.problem import ConvProblem

_PROCESSOR = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class PreparedConvolution:
    """One op with its operands in place.

    Attributes:
        problem: what is computed.
        compute: returns the result, a new tensor; it holds the operands.
    """

    problem: ConvProblem
    compute: Callable[[], Tensor]

    @property
    def result_bytes(self) -> int:
        """Bytes of the tensor that `run` returns."""
        return result_bytes(self.problem)

    def run(self) -> Tensor:
        """Compute the op into a new tensor."""
        return self.compute()


def own_job(problem: ConvProblem, device: torch.device = _PROCESSOR) -> Job:
    """Return the job that tells the workspace of PyTorch's own convolution when it is weighed."""
    return Job(f"{__name__}:prepare", {"problem": problem.to_json(), "device": str(device)})


def prepare(payload: Mapping[str, object]) -> PreparedConvolution:
    """Return the problem that `own_job` put into `payload`, ready to run on operands nobody filled.

    How much memory a convolution takes does not depend on the values, and normal ones for a large batch
    take longer than the convolution. What is never read counts as an operand, since autograd holds a real
    one.
    """
    problem = ConvProblem.from_json(cast("Mapping[str, object]", payload["problem"]))
    device = torch.device(str(payload["device"]))
    first, second, bias = operands(problem, None, device)
    unread = unread_operand(problem, device)
    return PreparedConvolution(
        problem, functools.partial(own_convolution, problem, first, second, bias, unread)
    )


def packed_job(problem: ConvProblem) -> Job:
    """Return the job that tells the workspace of the same with its filter packed, on the processor."""
    return Job(f"{__name__}:prepare_packed", {"problem": problem.to_json()})


def prepare_packed(payload: Mapping[str, object]) -> PreparedConvolution:
    """Return the forward pass that `packed_job` put into `payload`, ready to run.

    Raises:
        BackendError: no filters are packed for it here.
    """
    problem = ConvProblem.from_json(cast("Mapping[str, object]", payload["problem"]))
    pack = packing(problem)
    if pack is None:
        raise BackendError(f"No filter is packed for {problem} here.")
    image, weight, bias = operands(problem, None)
    ordered = image.contiguous(memory_format=image_order(problem))
    return PreparedConvolution(problem, functools.partial(pack(weight, bias), ordered))
