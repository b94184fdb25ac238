"""Convolution by a matrix unit as an algorithm: which problems it computes, its units, and its workspace."""

import dataclasses
from typing import ClassVar

from torch import Tensor

from mucudnn.algorithms.base import SliceKernel, SumKernel
from mucudnn.algorithms.compiled.algorithm import AlgorithmInC
from mucudnn.algorithms.matrix.kernels import MatrixSliceKernel, MatrixSumKernel, functions
from mucudnn.algorithms.matrix.shares import Shares
from mucudnn.algorithms.matrix.unit import refusal_of_processor
from mucudnn.algorithms.names import Names
from mucudnn.problem import ConvProblem


@dataclasses.dataclass(frozen=True)
class MatrixAlgorithm(AlgorithmInC):
    """Products of tiles of bfloat16, of which several make a float32.

    Attributes:
        addends: bfloat16 that make a number: 2 keep 16 of a float32's 24 bits, 3 all; 1 is a bfloat16.
        slices, rows: of the result in a unit; 0 for all.
        images: units, of whole images or of parts, that are computed at once.
        workers: threads.
    """

    names: ClassVar[Names] = Names(
        r"bf16x(?P<addends>[123])", slices="slices", rows="rows", images="images", workers="mt"
    )

    addends: int
    slices: int = 0
    rows: int = 0
    images: int = 1
    workers: int = 1

    @property
    def name(self) -> str:
        """Id without the backend's prefix, such as bf16x2_rows8_mt2."""
        return self.names.name(f"bf16x{self.addends}", self)

    @property
    def dtype(self) -> str:
        """What it computes, by torch's name."""
        return "bfloat16" if self.addends == 1 else "float32"

    def refusal(self, problem: ConvProblem) -> str | None:
        """Return why the problem cannot be computed this way, or None if it can."""
        if problem.dtype != self.dtype:
            return f"it is for {self.dtype}"
        if problem.groups > 1:
            return "it is for one group"
        return refusal_of_processor()

    def shares(self, problem: ConvProblem) -> Shares:
        """Return how the threads share the work on a micro-batch."""
        return Shares(problem, self.addends, self.slices, self.rows, self.images, self.workers)

    def compile(self, problem: ConvProblem) -> None:
        """Have in the cache folder what computes the problem, or raise a BackendError."""
        functions(problem.dtype)

    def slice_kernel(self, problem: ConvProblem, buffer: Tensor) -> SliceKernel:
        """Return a kernel for fprop or dgrad of this micro-batch that works in `buffer`."""
        return MatrixSliceKernel(self.shares(problem), buffer, functions(problem.dtype))

    def sum_kernel(self, problem: ConvProblem, buffer: Tensor) -> SumKernel:
        """Return a kernel for wgrad of this micro-batch that works in `buffer`."""
        return MatrixSumKernel(self.shares(problem), buffer, functions(problem.dtype))
