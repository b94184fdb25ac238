"""Convolution by a matrix unit, called: what its library is told, one call for each thread."""

import ctypes
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mucudnn.algorithms.base import GradientSum, carve
from mucudnn.algorithms.compiled.calling import (
    CompiledKernel,
    Function,
    elements_between,
    functions_of,
    place_of,
    run_shares,
    structure,
)
from mucudnn.algorithms.compiled.compiler import library
from mucudnn.algorithms.matrix.geometry import Geometry, spread
from mucudnn.algorithms.matrix.shares import Shares
from mucudnn.algorithms.matrix.source import FIELDS, source_of
from mucudnn.algorithms.matrix.unit import refusal_of_processor
from mucudnn.errors import BackendError

_LARGEST = 1e38
"""A third of float32's largest number: neither roundings of many terms lead from one to the other, nor does
that of a number to bfloat16.
"""

_SMALLEST = 1e-30
"""Of numbers below it the last of three bfloat16 would be too small for a unit, which takes it for zero."""


_Image = structure(FIELDS["image"])
_Set = structure(FIELDS["set"])
_Group = structure(FIELDS["group"])
_Call = structure(FIELDS["call"], x=_Image, y=_Image)
_Share = structure(FIELDS["share"])


@functools.cache
def functions(dtype: str) -> dict[str, Function]:
    """Return the functions for a type by their names; each takes a call and a share.

    Args:
        dtype: of the operands, float32 or bfloat16.

    Raises:
        BackendError: this processor has no matrix unit, or they cannot be compiled.
    """
    if refused := refusal_of_processor():
        raise BackendError(f"Tiles of bfloat16 cannot be multiplied here: {refused}.")
    return functions_in(source_of(dtype))


def functions_in(source: str) -> dict[str, Function]:
    """Return the functions of a source by their names.

    Raises:
        BackendError: it cannot be compiled.
    """
    double = ctypes.c_double
    types = {"prepare": double, "slices": double, "add": None, "finish": double, "finish_floats": double}
    return functions_of(library(source, is_plain=True), types, _Call, _Share)


class _Kernel(CompiledKernel):
    """What both kernels share: sets of groups of taps, and units of rows for every thread."""

    def __init__(self, shares: Shares, buffer: Tensor, functions: Mapping[str, Function]) -> None:
        geometry = shares.geometry
        super().__init__(shares.problem, carve(buffer, shares.regions), functions)
        self._is_usual = _cannot_overflow if shares.addends == 1 else _has_addends
        self._sets, self._groups = _tables(shares)
        depth, height, width = geometry.axes
        self._call = _Call(
            addends=shares.addends,
            step_d=depth.step, step_h=height.step, step_w=width.step,
            phases_d=depth.phases, phases_h=height.phases,
            first_d=depth.first, first_h=height.first, first_w=geometry.first_column,
            rows_d=geometry.rows_d, rows_h=geometry.rows_h, pitch=geometry.pitch,
            band_d=geometry.band_d, band_h=geometry.band_h,
            bands_d=geometry.bands_d, bands_h=geometry.bands_h,
            at_once=shares.at_once, unit_length=geometry.unit_length,
            panel=geometry.panel, panel_length=geometry.panel_length, turned=geometry.turned,
            next_tap=width.next_tap,
            sets=len(self._sets), set=ctypes.addressof(self._sets), group=ctypes.addressof(self._groups),
        )  # fmt: skip
        self._call.x.channels, self._call.y.channels = geometry.x_channels, geometry.y_channels
        whole = [(shares.units_of(each), shares.channels_of(each)) for each in range(shares.workers)]
        self._shares = [self._share(each, *share) for each, share in enumerate(whole)]
        parts = [shares.part_of_channels(each) for each in range(shares.workers)]
        self._parts = [self._share(each, (0, 0), part) for each, part in enumerate(parts)]

    def _share(self, worker: int, units: tuple[int, int], channels: tuple[int, int]) -> ctypes.Structure:
        names = ("u", "x", "pairs", "turned", "sums")
        return _Share(
            first=units[0], last=units[1], channel=channels[0], last_channel=channels[1], totals=1,
            **{name: place_of(self._space, name, worker) for name in names},
        )  # fmt: skip

    def _put_image(self, into: ctypes.Structure, image: Tensor) -> None:
        """Tell where an image lies, and how: of one dimension along h."""
        n, c, *steps = image.stride()
        into.start, into.step_n, into.step_c = image.data_ptr(), n, c
        into.step_d, into.step_h, into.step_w = spread(tuple(steps), 0)
        into.depth, into.height, into.width = spread(tuple(image.shape[2:]), 1)

    def _put_filter(self, tensor: Tensor) -> None:
        """Tell where the filter lies, or its gradient; in dgrad x has the channels of dy."""
        call = self._call
        k, c, *steps = tensor.stride()
        call.filter = tensor.data_ptr()
        call.filter_x, call.filter_y = (k, c) if self._is_dgrad else (c, k)
        call.filter_d, call.filter_h, call.filter_w = spread(tuple(steps), 0)


class MatrixSliceKernel(_Kernel):
    """fprop or dgrad of one micro-batch.

    No sum is larger than the largest magnitude of x times the largest sum of a channel's magnitudes, which
    lies in the workspace with the packed filter: where both and their product are far from overflow, and from
    underflow, so are all results, but for what is much smaller than the largest. What is bfloat16 itself may
    be small: PyTorch's own takes the least numbers for zero by such a unit, too.
    """

    def __init__(self, shares: Shares, buffer: Tensor, functions: Mapping[str, Function]) -> None:
        super().__init__(shares, buffer, functions)
        self._sums = (ctypes.c_double * shares.workers).from_address(self._space["found"].data_ptr())

    def prepare(self, weight: Tensor) -> None:
        """Pack the filter; once per mini-batch."""
        weight = self._checked(weight, self._filter_shape)
        self._put_filter(weight)
        self._sums[:] = run_shares(self._functions["prepare"], self._call, self._parts)

    def run(self, image: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> bool:  # noqa: ARG002  # by `prepare`
        """Write the part's result into `out`; return whether it is right, relative to the largest.

        A bias near overflow is not looked at.
        """
        largest = self._run_slice(image, out, bias, "slices")
        pairs = itertools.product(largest, self._sums)
        return all(
            self._is_usual(each) and self._is_usual(found) and self._is_usual(each * found)
            for each, found in pairs
        )


def _has_addends(magnitude: float) -> bool:
    return magnitude == 0 or _SMALLEST < magnitude < _LARGEST  # what is no number is neither


def _cannot_overflow(magnitude: float) -> bool:
    return magnitude < _LARGEST


class MatrixSumKernel(_Kernel):
    """wgrad of one micro-batch, which every thread sums for itself, or of some channels."""

    def __init__(self, shares: Shares, buffer: Tensor, functions: Mapping[str, Function]) -> None:
        super().__init__(shares, buffer, functions)
        if not shares.is_by_channels:
            places = [self._space[f"sums{each}"].data_ptr() for each in range(shares.workers)]
            for part in self._parts:
                part.sums, part.totals = places[0], len(places)
                part.next_total = elements_between(places, torch.float32.itemsize)

    def add(self, image: Tensor, gradient: Tensor, into: GradientSum, first: bool) -> None:  # noqa: ARG002  # summed apart
        """Add the part's products to the running sums, or start these with them if it is the `first`."""
        self._run_add(image, gradient, not first, "add")

    def finish(self, into: GradientSum) -> bool:
        """Write the sum to `into`, or add it; return whether it is finite, written anyway."""
        self._put_filter(into.total)
        self._call.adds = into.accumulate
        finish = self._functions["finish" if into.total.dtype is self._dtype else "finish_floats"]
        return all(map(math.isfinite, run_shares(finish, self._call, self._parts)))


def _tables(shares: Shares) -> tuple[Any, Any]:
    """Return the sets and the groups as C reads them."""
    geometry: Geometry = shares.geometry
    every = geometry.sets
    groups = [group for each in every for group in each.groups]
    sets = (_Set * len(every))()
    first_group = u = 0
    for into, each in zip(sets, every, strict=True):
        for axis, outputs in zip("dhw", each.axes, strict=True):
            setattr(into, f"start_{axis}", outputs.start)
            setattr(into, f"step_{axis}", outputs.step)
            setattr(into, f"count_{axis}", outputs.length)
        into.first_group, into.groups, into.taps, into.u = first_group, len(each.groups), each.taps, u
        first_group += len(each.groups)
        u += shares.addends * geometry.packed(each)
    return sets, (_Group * max(len(groups), 1))(*(_Group(group.shift, *group.tap) for group in groups))
