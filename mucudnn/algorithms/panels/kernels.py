"""Products by panels in C, called: what their library is told, one call for each thread."""

import ctypes
import functools

from torch import Tensor

from mucudnn.algorithms.base import GradientSum, carve
from mucudnn.algorithms.compiled.calling import (
    CompiledKernel,
    Function,
    functions_of,
    place_of,
    structure,
)
from mucudnn.algorithms.compiled.compiler import library, needed_compiler
from mucudnn.algorithms.panels.shares import Share, Shares
from mucudnn.algorithms.panels.source import FIELDS, source_of
from mucudnn.algorithms.pointwise import matrices_of, rows_of

_Image = structure(FIELDS["image"])
_Call = structure(FIELDS["call"], x=_Image, y=_Image)
_Share = structure(FIELDS["share"])


@functools.cache
def functions(dtype: str) -> dict[str, Function]:
    """Return a library's functions by their names; each takes a call and a share.

    Args:
        dtype: of the operands, float32 or float64.

    Raises:
        BackendError: it cannot be compiled.
    """
    loaded = library(source_of(dtype, needed_compiler().vector_bytes))
    return functions_of(loaded, dict.fromkeys(("prepare", "rows", "columns", "add")), _Call, _Share)


class _Kernel(CompiledKernel):
    """What these kernels share: matrices of pixels and channels, and a part of them for every thread."""

    def __init__(self, shares: Shares, buffer: Tensor) -> None:
        problem = shares.problem
        super().__init__(problem, carve(buffer, shares.regions), functions(problem.dtype))
        self._has_rows = shares.has_rows
        self._call = _Call(
            images=shares.images, pixels=shares.pixels,
            x_channels=shares.x_channels, y_channels=shares.y_channels,
        )  # fmt: skip
        self._shares = [self._share(worker, each) for worker, each in enumerate(shares.all)]

    def _share(self, worker: int, of: Share) -> ctypes.Structure:
        (first, last), (channel, last_channel) = of
        u = place_of(self._space, "u", worker)
        return _Share(first=first, last=last, channel=channel, last_channel=last_channel, u=u)

    def _put_image(self, into: ctypes.Structure, image: Tensor) -> None:
        """Tell where an image lies, and how."""
        into.start = image.data_ptr()
        if self._has_rows:
            into.step_p, into.step_c = rows_of(image).stride()
        else:
            into.step_n, into.step_c, into.step_p = matrices_of(image).stride()

    def _put_filter(self, tensor: Tensor) -> None:
        """Tell where the filter lies, or its gradient; in dgrad x has the channels of dy."""
        k, c, *_ = tensor.stride()
        self._call.filter = tensor.data_ptr()
        self._call.filter_x, self._call.filter_y = (k, c) if self._is_dgrad else (c, k)


class RowSliceKernel(_Kernel):
    """fprop or dgrad of one micro-batch, whose pixels are rows."""

    def prepare(self, weight: Tensor) -> None:
        """Pack the filter; once per mini-batch."""
        weight = self._checked(weight, self._filter_shape)
        self._put_filter(weight)
        self._run("prepare")

    def run(self, image: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> bool:  # noqa: ARG002  # by `prepare`
        """Write the part's result into `out`; return that it is sound."""
        self._run_slice(image, out, bias, "rows")
        return True


class ColumnSliceKernel(_Kernel):
    """fprop or dgrad of one micro-batch, whose pixels are columns."""

    def prepare(self, weight: Tensor) -> None:
        """Do nothing: the filter is read as it is."""

    def run(self, image: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> bool:
        """Write the part's result into `out`; return that it is sound."""
        weight = self._checked(weight, self._filter_shape)  # held as long as C reads it
        self._put_filter(weight)
        self._run_slice(image, out, bias, "columns")
        return True


class PanelSumKernel(_Kernel):
    """wgrad of one micro-batch, summed where the gradient is wanted."""

    def add(self, image: Tensor, gradient: Tensor, into: GradientSum, first: bool) -> None:
        """Add the part's dw to `into`, or write it there if it is the `first` and nothing is to be kept."""
        self._put_filter(into.total)
        self._run_add(image, gradient, into.accumulate or not first, "add")

    def finish(self, into: GradientSum) -> bool:  # noqa: ARG002  # it holds the sum
        """Return that the sum is sound."""
        return True
