"""Convolution by tiles in C as an algorithm: which problems it computes, its blocks, and its workspace."""

import dataclasses
import math
from typing import ClassVar

from torch import Tensor

from mucudnn.algorithms.base import SliceKernel, SumKernel
from mucudnn.algorithms.compiled.algorithm import AlgorithmInC
from mucudnn.algorithms.compiled.axes import axes_of
from mucudnn.algorithms.compiled.compiler import compiler
from mucudnn.algorithms.compiled.kernels import (
    CompiledSliceKernel,
    CompiledSumKernel,
    GroupedSliceKernel,
    GroupedSumKernel,
    functions,
)
from mucudnn.algorithms.compiled.shares import Shares
from mucudnn.algorithms.libraries import product_of_matrices
from mucudnn.algorithms.names import Names
from mucudnn.algorithms.tiles import WINOGRAD_TAPS, refusal_of_tiles
from mucudnn.problem import ConvProblem

_AXES = 3
"""Along which images are cut into tiles, at most."""

_STRIDED_TAPS = {2: range(2, 5), 4: range(2, 6)}
"""By m: taps of the longest phase, where there are several; larger m save less than their transforms take."""

_MOST_INPUTS = 6
"""Along each of three axes: in float32 F(4, 3) errs by 5e-6 at most, F(5, 3) and F(4, 4) by 1.5e-5."""

_MOST_VALUES = 12
"""Products, and outputs, of an axis: gcc compiles a form of 11 in 2 s; one of 16 took three times as long."""

_MOST_PLANES = 343
"""Products of all axes. With 9 along each of three, F(4) of 3 taps and stride 2 ran 1.2 to 2.8 times as long
as F(2), in all of 36 cases.
"""


@dataclasses.dataclass(frozen=True)
class CompiledTiles(AlgorithmInC):
    """Winograd's convolution with transforms in C, in blocks of one kind.

    Attributes:
        outputs: m of the form, or of that of each phase of a stride.
        lines: rows of tiles of a block, of any slices and images; 0 for as many as each thread has.
        channels: of y, that are computed at once, from all of x and their part of the filter; 0 for all.
        workers: threads.
        fma: whether products of matrices are in C too, or else BLAS's.
    """

    names: ClassVar[Names] = Names(
        r"cc_winograd(?P<outputs>[2456])(?P<fma>_fma)?", lines="rows", channels="k", workers="mt"
    )

    outputs: int
    lines: int = 0
    channels: int = 0
    workers: int = 1
    fma: bool = False

    @property
    def name(self) -> str:
        """Id without the backend's prefix, such as cc_winograd4_fma_rows8_mt2."""
        return self.names.name(f"cc_winograd{self.outputs}{'_fma' if self.fma else ''}", self)

    def refusal(self, problem: ConvProblem) -> str | None:
        """Return why the problem cannot be computed this way, or None if it can."""
        if (
            refused := refusal_of_tiles(problem)
            or self._refusal_of_taps(problem)
            or self._refusal_of_size(problem)
        ):
            return refused
        shares = self.shares(problem)
        if self.channels and self.lines:
            return "blocks are of lines or of channels"
        if self.channels and not self.channels < shares.y_channels:
            return "there are no more channels than that"
        if compiler() is None:
            return "there is no C compiler"
        has_products = self.fma or product_of_matrices(problem.dtype)
        return None if has_products else "PyTorch has no BLAS that C can call"

    def _refusal_of_taps(self, problem: ConvProblem) -> str | None:
        """Return why there is no good form of so many taps, or None if there is."""
        phases = " in a phase" if is_strided(problem) else ""
        able = (_STRIDED_TAPS if phases else WINOGRAD_TAPS).get(self.outputs, range(0))
        taps = max(taps_of_phases(problem))
        if not able:
            return "it is for stride 1"
        if taps not in able:
            return f"it is for filters of {able[0]} to {able[-1]} taps{phases}"
        if is_deep(problem) and self.outputs + taps - 1 > _MOST_INPUTS:
            return f"in three dimensions tiles of more than {_MOST_INPUTS} inputs lose too many digits"
        return None

    def _refusal_of_size(self, problem: ConvProblem) -> str | None:
        """Return why a tile would take too long to compile, and too much of a stack; None if it would not."""
        forms = [axis.form for axis in axes_of(problem, self.outputs)]
        if max(max(form.rank, form.outputs) for form in forms) > _MOST_VALUES:
            return f"a tile would have more than {_MOST_VALUES} values along an axis"
        if math.prod(form.rank for form in forms) > _MOST_PLANES:
            return f"a tile would take more than {_MOST_PLANES} products"
        return None

    def shares(self, problem: ConvProblem) -> Shares:
        """Return how the threads share the work on a micro-batch."""
        return Shares(problem, self.outputs, self.lines, self.channels, self.workers)

    def compile(self, problem: ConvProblem) -> None:
        """Have in the cache folder what computes the problem, or raise a BackendError."""
        functions(axes_of(problem, self.outputs), problem.dtype)

    def slice_kernel(self, problem: ConvProblem, buffer: Tensor) -> SliceKernel:
        """Return a kernel for fprop or dgrad of this micro-batch that works in `buffer`."""
        kind = GroupedSliceKernel if self.channels else CompiledSliceKernel
        return kind(self.shares(problem), buffer, self._gemm(problem))

    def sum_kernel(self, problem: ConvProblem, buffer: Tensor) -> SumKernel:
        """Return a kernel for wgrad of this micro-batch that works in `buffer`."""
        kind = GroupedSumKernel if self.channels else CompiledSumKernel
        return kind(self.shares(problem), buffer, self._gemm(problem))

    def _gemm(self, problem: ConvProblem) -> int | None:
        return None if self.fma else product_of_matrices(problem.dtype)


def taps_of_phases(problem: ConvProblem) -> tuple[int, ...]:
    """Return the taps of each axis that a phase has at most; with stride 1 there is one."""
    return tuple(-(-taps // step) for taps, step in zip(problem.kernel_size, problem.stride, strict=True))


def is_strided(problem: ConvProblem) -> bool:
    """Whether windows are some inputs apart along an axis of several taps."""
    return any(step > 1 for step, taps in zip(problem.stride, problem.kernel_size, strict=True) if taps > 1)


def is_deep(problem: ConvProblem) -> bool:
    """Whether tiles overlap along three axes."""
    return len(problem.kernel_size) == _AXES and min(taps_of_phases(problem)) > 1
