"""Convolution by filters of one tap, in C, as an algorithm: which problems it computes, and its workspace."""

import dataclasses
from typing import ClassVar

from torch import Tensor

from mucudnn.algorithms.base import SliceKernel, SumKernel
from mucudnn.algorithms.compiled.algorithm import AlgorithmInC
from mucudnn.algorithms.compiled.compiler import compiler, needed_compiler
from mucudnn.algorithms.names import Names
from mucudnn.algorithms.panels.kernels import (
    ColumnSliceKernel,
    PanelSumKernel,
    RowSliceKernel,
    functions,
)
from mucudnn.algorithms.panels.shares import Shares
from mucudnn.algorithms.pointwise import refusal_of_products
from mucudnn.problem import ConvProblem


@dataclasses.dataclass(frozen=True)
class PanelAlgorithm(AlgorithmInC):
    """Products of matrices in C, of which one is packed into panels.

    Results are always sound, for the reason that `mucudnn.algorithms.pointwise` gives.

    Attributes:
        workers: threads.
    """

    names: ClassVar[Names] = Names("cc_gemm", workers="mt")

    workers: int = 1

    @property
    def name(self) -> str:
        """Id without the backend's prefix, such as cc_gemm_mt2."""
        return self.names.name("cc_gemm", self)

    def refusal(self, problem: ConvProblem) -> str | None:
        """Return why the problem cannot be computed this way, or None if it can."""
        if refused := refusal_of_products(problem):
            return refused
        return "there is no C compiler" if compiler() is None else None

    def shares(self, problem: ConvProblem) -> Shares:
        """Return how the threads share the work on a micro-batch."""
        return Shares(problem, needed_compiler().vector_bytes, self.workers)

    def compile(self, problem: ConvProblem) -> None:
        """Have in the cache folder what computes the problem, or raise a BackendError."""
        functions(problem.dtype)

    def slice_kernel(self, problem: ConvProblem, buffer: Tensor) -> SliceKernel:
        """Return a kernel for fprop or dgrad of this micro-batch that works in `buffer`."""
        shares = self.shares(problem)
        return (RowSliceKernel if shares.has_rows else ColumnSliceKernel)(shares, buffer)

    def sum_kernel(self, problem: ConvProblem, buffer: Tensor) -> SumKernel:
        """Return a kernel for wgrad of this micro-batch that works in `buffer`."""
        return PanelSumKernel(self.shares(problem), buffer)
