"""What algorithms in C have in common: they are compiled before they run, and threads share the work."""

import abc
from typing import Protocol

from mucudnn.algorithms.base import Region, total_bytes
from mucudnn.problem import ConvProblem


class Regions(Protocol):
    """How the threads share the work on a micro-batch, and the workspace."""

    @property
    def regions(self) -> tuple[Region, ...]:
        """The workspace."""


class AlgorithmInC(abc.ABC):
    """An algorithm in C, on which PyTorch's settings have no effect."""

    @abc.abstractmethod
    def shares(self, problem: ConvProblem) -> Regions:
        """Return how the threads share the work on a micro-batch."""

    @abc.abstractmethod
    def compile(self, problem: ConvProblem) -> None:
        """Have in the cache folder what computes the problem, of any batch.

        Raises:
            BackendError: it cannot be compiled.
        """

    def workspace_bytes(self, problem: ConvProblem) -> int:
        """Return the bytes of buffer that a kernel for this micro-batch needs."""
        return total_bytes(self.shares(problem).regions)
