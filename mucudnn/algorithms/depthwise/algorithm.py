"""Depthwise convolution as an algorithm: which problems it computes, and its workspace."""

import dataclasses
from typing import ClassVar

from torch import Tensor

from mucudnn.algorithms.base import SliceKernel, SumKernel
from mucudnn.algorithms.compiled.algorithm import AlgorithmInC
from mucudnn.algorithms.compiled.compiler import compiler, needed_compiler
from mucudnn.algorithms.depthwise.kernels import DepthwiseSliceKernel, DepthwiseSumKernel, functions
from mucudnn.algorithms.depthwise.shares import Shares
from mucudnn.algorithms.depthwise.source import ELEMENTS
from mucudnn.algorithms.names import Names
from mucudnn.problem import ConvProblem


@dataclasses.dataclass(frozen=True)
class DepthwiseAlgorithm(AlgorithmInC):
    """Each channel by itself, by the definition, a vector of channels at a time.

    Attributes:
        workers: threads.
    """

    names: ClassVar[Names] = Names("cc_depthwise", workers="mt")

    workers: int = 1

    @property
    def name(self) -> str:
        """Id without the backend's prefix, such as cc_depthwise_mt2."""
        return self.names.name("cc_depthwise", self)

    def refusal(self, problem: ConvProblem) -> str | None:
        """Return why the problem cannot be computed this way, or None if it can."""
        if problem.dtype not in ELEMENTS:
            return f"it is for {', '.join(ELEMENTS)}"
        if problem.groups == 1 or not problem.groups == problem.in_channels == problem.out_channels:
            return "it is for as many groups as channels of x and of y"
        if 0 in (*problem.output_size, *problem.input_size, problem.batch):
            return "there is nothing to compute"
        return "there is no C compiler" if compiler() is None else None

    def shares(self, problem: ConvProblem) -> Shares:
        """Return how the threads share the work on a micro-batch."""
        return Shares(problem, needed_compiler().vector_bytes, self.workers)

    def compile(self, problem: ConvProblem) -> None:
        """Have in the cache folder what computes the problem, or raise a BackendError."""
        functions(problem.dtype)

    def slice_kernel(self, problem: ConvProblem, buffer: Tensor) -> SliceKernel:
        """Return a kernel for fprop or dgrad of this micro-batch that works in `buffer`."""
        return DepthwiseSliceKernel(self.shares(problem), buffer)

    def sum_kernel(self, problem: ConvProblem, buffer: Tensor) -> SumKernel:
        """Return a kernel for wgrad of this micro-batch that works in `buffer`."""
        return DepthwiseSumKernel(self.shares(problem), buffer)
