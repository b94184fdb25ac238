"""Convolution by tiles in C, called: the functions of its library, and what they are told."""

import ctypes
import functools
import math
from typing import Any

from torch import Tensor

from mucudnn.algorithms.base import GradientSum, carve
from mucudnn.algorithms.compiled.axes import Axis
from mucudnn.algorithms.compiled.calling import (
    CompiledKernel,
    Function,
    elements_between,
    functions_of,
    place_of,
    structure,
)
from mucudnn.algorithms.compiled.compiler import library, needed_compiler
from mucudnn.algorithms.compiled.shares import Shares
from mucudnn.algorithms.compiled.source import FIELDS, has_sums, source_of
from mucudnn.algorithms.sides import three

_Image = structure(FIELDS["image"])
_Call = structure(FIELDS["call"], x=_Image, y=_Image)
_Share = structure(FIELDS["share"])


@functools.cache
def functions(axes: tuple[Axis, ...], dtype: str) -> dict[str, Function]:
    """Return the functions of a library by their names; each takes a call and a share.

    Raises:
        BackendError: it cannot be compiled.
    """
    loaded = library(source_of(axes, dtype, needed_compiler().vector_bytes))
    types: dict[str, Any] = {
        **dict.fromkeys(("prepare", "gather")),
        **dict.fromkeys(("slices", "grouped_slices"), ctypes.c_double),
    }
    if has_sums(axes):
        types |= {"add": None, **dict.fromkeys(("finish", "grouped_sums"), ctypes.c_double)}
    return functions_of(loaded, types, _Call, _Share)


class _Kernel(CompiledKernel):
    """What these kernels share: lines of tiles, and channels, for every thread.

    Args:
        shares: of the micro-batch.
        buffer: workspace.
        gemm: address of BLAS's product of matrices; None for that in C.
    """

    def __init__(self, shares: Shares, buffer: Tensor, gemm: int | None) -> None:
        problem = shares.problem
        space = carve(buffer, shares.regions)
        super().__init__(problem, space, functions(shares.axes, problem.dtype))
        self._call = _Call(
            **{f"tiles_{name}": tiles for name, tiles in zip("dhw", shares.tiles, strict=True)},
            **{f"margin_{name}": axis.margin for name, axis in zip("dhw", shares.axes, strict=True)},
            gemm=gemm,
        )  # fmt: skip
        for image, channels in ((self._call.x, shares.x_channels), (self._call.y, shares.y_channels)):
            image.channels, image.depth, image.height = channels, 1, 1
        self._shares = [self._share(shares, worker) for worker in range(shares.workers)]

    def _share(self, shares: Shares, worker: int) -> ctypes.Structure:
        first, last = shares.lines_of(worker)
        channel, last_channel = shares.channels_of(worker)
        return _Share(
            first=first, last=last, lines=shares.block,
            channel=channel, last_channel=last_channel, group=shares.group,
            **{name: place_of(self._space, name, worker) for name in ("u", "x", "y", "stage", "sums")},
            u_plane=shares.u_plane, x_plane=shares.x_plane, y_plane=shares.y_plane, sums_plane=shares.u_plane,
        )  # fmt: skip

    def _put_image(self, into: ctypes.Structure, image: Tensor) -> None:
        """Tell where an image lies, and how; of one slice or row it is told already."""
        shape, steps = image.shape, image.stride()
        into.start = image.data_ptr()
        into.step_n, into.step_c, into.step_w, into.width = steps[0], steps[1], steps[-1], shape[-1]
        if len(shape) > 3:  # samples, channels, rows, columns
            into.step_h, into.height = steps[-2], shape[-2]
        if len(shape) > 4:
            into.step_d, into.depth = steps[-3], shape[-3]

    def _put_filter(self, tensor: Tensor) -> None:
        """Tell where the filter lies, or its gradient. In dgrad it is turned round, and x is dy."""
        call, start = self._call, tensor.data_ptr()
        k, c, *steps = tensor.stride()
        if self._is_dgrad:
            last = sum((taps - 1) * step for taps, step in zip(tensor.shape[2:], steps, strict=True))
            start += last * tensor.element_size()
            k, c, steps = c, k, [-step for step in steps]
        call.filter, call.filter_x, call.filter_y = start, c, k
        call.filter_d, call.filter_h, call.filter_w = three(steps, 0)


class CompiledSliceKernel(_Kernel):
    """fprop or dgrad of one micro-batch."""

    _of_a_part: tuple[str, ...] = ("slices",)

    def prepare(self, weight: Tensor) -> None:
        """Transform the filter; once per mini-batch."""
        weight = self._checked(weight, self._filter_shape)
        self._put_filter(weight)
        self._run("prepare")

    def run(self, image: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> bool:  # noqa: ARG002  # by `prepare`
        """Write the part's result into `out`; return whether it is finite."""
        return all(map(math.isfinite, self._run_slice(image, out, bias, *self._of_a_part)))


class GroupedSliceKernel(CompiledSliceKernel):
    """The same some channels of y at a time, whose part of the filter is transformed after x."""

    _of_a_part = ("gather", "grouped_slices")

    def prepare(self, weight: Tensor) -> None:
        """Do nothing before the first part."""

    def run(self, image: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> bool:
        """Write the part's result into `out`; return whether it is finite."""
        weight = self._checked(weight, self._filter_shape)  # held as long as C reads it
        self._put_filter(weight)
        return super().run(image, weight, out, bias)


class CompiledSumKernel(_Kernel):
    """wgrad of one micro-batch, which every thread sums for itself in the transformed domain."""

    def __init__(self, shares: Shares, buffer: Tensor, gemm: int | None) -> None:
        super().__init__(shares, buffer, gemm)
        places = [share.sums for share in self._shares]
        for share in self._shares:
            share.u, share.u_plane = places[0], share.sums_plane
            share.addends = len(places)
            share.addend = elements_between(places, self._dtype.itemsize)

    def add(self, image: Tensor, gradient: Tensor, into: GradientSum, first: bool) -> None:  # noqa: ARG002  # summed apart
        """Add the part's products to the running sums, or start these with them if it is the `first`."""
        self._run_add(image, gradient, not first, "add")

    def finish(self, into: GradientSum) -> bool:
        """Write the sum to `into`, or add it; return whether it is finite, written anyway."""
        self._put_filter(into.total)
        self._call.adds = into.accumulate
        return all(map(math.isfinite, self._run("finish")))


class GroupedSumKernel(_Kernel):
    """wgrad of one micro-batch, some channels of dy at a time, summed where the gradient is wanted."""

    def __init__(self, shares: Shares, buffer: Tensor, gemm: int | None) -> None:
        super().__init__(shares, buffer, gemm)
        # By all parts, whatever their sizes, so that it lies in the workspace.
        self._found = (ctypes.c_double * shares.workers).from_address(self._space["found"].data_ptr())

    def add(self, image: Tensor, gradient: Tensor, into: GradientSum, first: bool) -> None:
        """Add the part's dw to `into`, or write it there if it is the `first` and nothing is to be kept."""
        self._put_filter(into.total)
        adds = into.accumulate or not first
        for worker, found in enumerate(self._run_add(image, gradient, adds, "gather", "grouped_sums")):
            self._found[worker] = found if first else self._found[worker] + found

    def finish(self, into: GradientSum) -> bool:  # noqa: ARG002  # it holds the sum
        """Return whether the sum is finite; if not, `into` holds a part of it."""
        return all(map(math.isfinite, self._found))
