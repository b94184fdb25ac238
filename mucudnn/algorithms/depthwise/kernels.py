"""Depthwise convolution in C, called: what its library is told, one call for each thread."""

import ctypes
import functools
import math
from typing import Any

from torch import Tensor

from mucudnn.algorithms.base import GradientSum, carve
from mucudnn.algorithms.compiled.calling import (
    CompiledKernel,
    Function,
    elements_between,
    functions_of,
    place_of,
    structure,
)
from mucudnn.algorithms.compiled.compiler import library, needed_compiler
from mucudnn.algorithms.depthwise.axes import Axis
from mucudnn.algorithms.depthwise.shares import Shares
from mucudnn.algorithms.depthwise.source import FIELDS, source_of
from mucudnn.algorithms.sides import three

_Image = structure(FIELDS["image"])
_Tap = structure(FIELDS["tap"])
_Phase = structure(FIELDS["phase"])
_Axis = structure(FIELDS["axis"])
_Call = structure(FIELDS["call"], x=_Image, y=_Image, d=_Axis, h=_Axis, w=_Axis)
_Share = structure(FIELDS["share"])


@functools.cache
def functions(dtype: str) -> dict[str, Function]:
    """Return a library's functions by their names; each takes a call and a share.

    Args:
        dtype: of the operands.

    Raises:
        BackendError: it cannot be compiled.
    """
    double = ctypes.c_double
    types = {"prepare": None, "slices": double, "add": None, "finish": double, "finish_reals": double}
    loaded = library(source_of(dtype, needed_compiler().vector_bytes))
    return functions_of(loaded, types, _Call, _Share)


class _Kernel(CompiledKernel):
    """What both kernels share: axes with the taps of each phase, and strips of channels for every thread."""

    def __init__(self, shares: Shares, buffer: Tensor) -> None:
        problem = shares.problem
        super().__init__(problem, carve(buffer, shares.regions), functions(problem.dtype))
        self._dense_steps = [math.prod(problem.kernel_size[i + 1 :]) for i in range(len(problem.kernel_size))]
        self._tables = [_tables(axis) for axis in shares.axes]  # held as long as C reads them
        sizes = three(problem.kernel_size, 1)
        axes = [_axis(*each) for each in zip(shares.axes, sizes, self._tables, strict=True)]
        _, dilation_h, dilation_w = three(problem.dilation, 1)
        self._call = _Call(
            **dict(zip("dhw", axes, strict=True)),
            channels=shares.channels, blocks=shares.blocks, band=shares.band, bands=shares.bands,
            strip=shares.strip, strips=shares.strips, pitch=shares.pitch, rows=shares.rows,
            dilation_h=dilation_h, dilation_w=dilation_w,
        )  # fmt: skip
        self._shares = [self._share(shares, worker) for worker in range(shares.workers)]

    def _share(self, shares: Shares, worker: int) -> ctypes.Structure:
        first, last = shares.units_of(worker)
        places = {name: place_of(self._space, name, worker) for name in ("u", "x", "y", "sums")}
        return _Share(first=first, last=last, totals=1, **places)

    def _put_image(self, into: ctypes.Structure, image: Tensor) -> None:
        """Tell where an image lies, and how."""
        n, c, *steps = image.stride()
        into.start, into.step_n, into.step_c = image.data_ptr(), n, c
        into.step_d, into.step_h, into.step_w = three(steps, 0)
        into.depth, into.height, into.width = three(image.shape[2:], 1)

    def _put_filter(self, tensor: Tensor) -> None:
        """Tell where the filter lies, or its gradient."""
        call = self._call
        channel, _, *steps = tensor.stride()
        call.filter, call.filter_c = tensor.data_ptr(), channel
        call.filter_d, call.filter_h, call.filter_w = three(steps, 0)
        call.is_dense = steps == self._dense_steps


class DepthwiseSliceKernel(_Kernel):
    """fprop or dgrad of one micro-batch."""

    def prepare(self, weight: Tensor) -> None:
        """Have the filter in vectors of channels; once per mini-batch."""
        weight = self._checked(weight, self._filter_shape)
        self._put_filter(weight)
        self._functions["prepare"](self._call, self._shares[0])

    def run(self, image: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> bool:  # noqa: ARG002  # by `prepare`
        """Write the part's result into `out`; return whether it is finite."""
        return all(map(math.isfinite, self._run_slice(image, out, bias, "slices")))


class DepthwiseSumKernel(_Kernel):
    """wgrad of one micro-batch, which every thread sums for itself."""

    def __init__(self, shares: Shares, buffer: Tensor) -> None:
        super().__init__(shares, buffer)
        places = [share.sums for share in self._shares]
        vector_bytes = shares.lanes * max(self._dtype.itemsize, 4)
        self._all = self._share(shares, 0)
        self._all.totals = len(places)
        self._all.next_total = elements_between(places, vector_bytes)

    def add(self, image: Tensor, gradient: Tensor, into: GradientSum, first: bool) -> None:  # noqa: ARG002  # summed apart
        """Add the part's products to the running sums, or start these with them if it is the `first`."""
        self._run_add(image, gradient, not first, "add")

    def finish(self, into: GradientSum) -> bool:
        """Write the sum to `into`, or add it; return whether it is finite, written anyway."""
        self._put_filter(into.total)
        self._call.adds = into.accumulate
        finish = self._functions["finish" if into.total.dtype is self._dtype else "finish_reals"]
        return math.isfinite(finish(self._call, self._all))


def _tables(axis: Axis) -> tuple[Any, Any]:
    """Return an axis's phases and their taps as C reads them."""
    phases, taps = (_Phase * axis.period)(), [tap for phase in axis.phases for tap in phase]
    first = 0
    for into, phase in zip(phases, axis.phases, strict=True):
        into.first, into.taps = first, len(phase)
        first += len(phase)
    return phases, (_Tap * len(taps))(*(_Tap(*tap) for tap in taps))


def _axis(axis: Axis, taps: int, tables: tuple[Any, Any]) -> ctypes.Structure:
    phases, places = map(ctypes.addressof, tables)
    return _Axis(axis.outputs, axis.period, axis.step, axis.first, taps, phases, places)
