"""Running a division: one micro-batch after another, in one buffer, on slices of the operands.

Nothing is allocated on the way but results, and what PyTorch's own convolution takes by itself.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mucudnn.algorithms import GradientSum
from mucudnn.algorithms.base import memory_format
from mucudnn.algorithms.layouts import laid_out
from mucudnn.algorithms.own import result_bytes
from mucudnn.backends import Backend, PartKernel, PartSumKernel
from mucudnn.division import Division, running_sum_bytes
from mucudnn.errors import OptionError
from mucudnn.execution.grouping import Group, Part, Step, groups_of
from mucudnn.execution.kept import KeptFilter
from mucudnn.execution.workspace import Workspace
from mucudnn.problem import ConvOp, ConvProblem, Layout

_WORTH_KEEPING = 0.02
"""A filter's transform is kept if it takes at least this share of a part's time: asking whether the filter is
still the same costs time, too."""


def _strides(shape: tuple[int, ...], order: torch.memory_format) -> tuple[int, ...]:
    """Return those of a new tensor of that shape and order: by them one is made faster than by the order."""
    return torch.empty(shape, device="meta", memory_format=order).stride()


Ready = Callable[[int], None]
"""Is told before each part, and before those of PyTorch's own together, what one takes elsewhere."""


_Form = tuple[tuple[int, ...], torch.dtype, Layout]
"""Shape, type and layout of an operand."""


def _forms(problem: ConvProblem) -> tuple[_Form, _Form]:
    """Return those of the operands: of x or dy, and of w or, for wgrad, dy."""
    dtype: torch.dtype = getattr(torch, problem.dtype)
    x, y = ((shape, dtype, problem.layout) for shape in (problem.input_shape, problem.output_shape))
    w = problem.filter_shape, dtype, problem.filter_layout
    return (y if problem.op is ConvOp.DGRAD else x), (y if problem.op is ConvOp.WGRAD else w)


def _largest_buffer(backend: Backend, groups: Sequence[Group]) -> int:
    """Return the bytes of the buffer that a part needs at most."""
    steps = (part.step for group in groups for part in group.parts)
    return max((backend.buffer_bytes(step.problem, step.algorithm) for step in steps), default=0)


class Runner:
    """Runs one division of one problem, again and again."""

    def __init__(
        self,
        backend: Backend,
        problem: ConvProblem,
        division: Division,
        limit_bytes: int | None = None,
        capacity_bytes: int = 0,
    ) -> None:
        """Work out which samples each part computes, and the bytes that all need.

        Args:
            backend: that runs the parts.
            problem: of the whole mini-batch.
            division: its parts; PyTorch's own, and what uses it, take workspace outside of the buffer.
            limit_bytes: what the buffer and that workspace may take together; None for no such bound.
            capacity_bytes: what the buffer may grow to at once, since other divisions need it.

        Raises:
            OptionError: the division is of another batch.
            BackendError: one of its algorithms does not compute the problem, or cannot be made ready to.
        """
        if division.batch != problem.batch:
            raise OptionError(f"The division must be of {problem.batch} samples, but got {division.batch}.")
        self.problem = problem
        self._backend = backend
        sum_bytes = running_sum_bytes(problem, division)
        groups = groups_of(backend, problem, division, sum_bytes)
        self._groups = groups
        for step in dict.fromkeys(part.step for group in groups for part in group.parts):
            backend.get_ready(step.problem, step.algorithm)
        self.is_own = division.is_undivided and all(group.is_own for group in groups)
        self.buffer_bytes = sum_bytes + _largest_buffer(backend, groups)
        self._slices = _SliceParts(backend, problem, groups)
        self._sums = _SumParts(backend, problem, groups, sum_bytes)
        self._by_pages = backend.takes_memory_by_pages
        self._is_anywhere = backend.alignment_bytes == 1
        block_bytes = capacity_bytes if self.is_own else 0
        self._room = _Room(backend, problem, groups, self.buffer_bytes, limit_bytes, block_bytes)
        # What other divisions need would be taken at once beside what this one takes elsewhere.
        self._capacity_bytes = 0 if self._room.is_needed else capacity_bytes
        self._kept = KeptFilter()
        self._can_keep_filter = (
            self._by_pages
            and len(groups) == 1  # each has its filter in the same place
            and any(part.setup_s > _WORTH_KEEPING * part.time_s for part in division.parts)
        )
        self._first_form, self._second_form = _forms(problem)

    def __call__(
        self,
        workspace: Workspace,
        first: Tensor,
        second: Tensor,
        bias: Tensor | None = None,
        unread: Tensor | None = None,
        *,
        keeps_filter: bool = False,
    ) -> Tensor:
        """Return y from (x, w), dx from (dy, w), or dw from (x, dy), as the problem's op says.

        A signal handler that computes while its thread does has a buffer of its own, beyond the limit.

        Args:
            workspace: of this thread's present queue.
            first: x or dy, of the problem's shape and layout.
            second: w, or dy for wgrad.
            bias: of fprop, shape (k,); None for none.
            unread: x for dgrad, w for wgrad, dy for fprop of a transposed convolution, whatever it holds;
                without it PyTorch's own makes one, but parts of dgrad take the result in its place.
            keeps_filter: whether the filter is likely to be that of the last call: then its transform is
                made once, as long as nobody else writes to the workspace.
        """
        with workspace.lock:
            if workspace.is_taken:
                return self(workspace.another(), first, second, bias, unread)
            workspace.is_taken = True
            try:
                if self._by_pages:  # the host, which is always current
                    return self._run(workspace, first, second, bias, unread, keeps_filter)
                with self._backend.current():
                    return self._run(workspace, first, second, bias, unread, keeps_filter)
            finally:
                workspace.is_taken = False

    def _run(
        self,
        workspace: Workspace,
        first: Tensor,
        second: Tensor,
        bias: Tensor | None,
        unread: Tensor | None,
        keeps_filter: bool,
    ) -> Tensor:
        """Return the same in a workspace that nobody else writes to."""
        room = self._room
        if room.is_made_at_start:
            room.make_at_start(workspace)
        if self.is_own:
            return self._backend.own_convolution(self.problem, first, second, bias, unread)
        if not self._is_anywhere:
            first = self._backend.operand(first, *self._first_form)
            second = self._backend.operand(second, *self._second_form)
        workspace.reserve(self.buffer_bytes, self._capacity_bytes)
        ready = functools.partial(room.make_before, workspace) if room.is_made_between else None
        if self.problem.op is ConvOp.WGRAD:
            workspace.holder = None
            return self._sums.run(workspace, first, second, unread, ready)
        is_prepared, held = False, None
        if keeps_filter and self._can_keep_filter:
            is_prepared, held = self._kept.look(workspace, second)
        workspace.holder = None  # until all has gone well
        result = self._slices.run(workspace, first, second, bias, unread, ready, is_prepared=is_prepared)
        workspace.holder = held
        return result


class _Room:
    """Keeps the buffer, and what parts take beside it, within one limit, by giving back memory of the buffer.

    Attributes:
        is_needed: whether the buffer must make room: there is a limit, and something is taken elsewhere.
        is_made_at_start: whether it does so once, before all parts: a device gives a buffer back as a whole,
            before any kernel works in it.
        is_made_between: whether it does so before each part that needs it, page by page.
    """

    def __init__(
        self,
        backend: Backend,
        problem: ConvProblem,
        groups: Sequence[Group],
        buffer_bytes: int,
        limit_bytes: int | None,
        block_bytes: int,
    ) -> None:
        self._backend = backend
        self._result_bytes = result_bytes(problem)
        self._elsewhere_bytes = max((group.elsewhere_bytes for group in groups), default=0)
        self._buffer_bytes = buffer_bytes
        self._limit_bytes = limit_bytes or 0  # without a limit nobody makes room
        self._block_bytes = block_bytes
        self.is_needed = limit_bytes is not None and self._elsewhere_bytes > 0
        self.is_made_between = self.is_needed and backend.takes_memory_by_pages and buffer_bytes > 0
        self.is_made_at_start = self.is_needed and not self.is_made_between

    def make_at_start(self, workspace: Workspace) -> None:
        """Let as much be taken beside the buffer as any group takes."""
        self._make(workspace, self._elsewhere_bytes)

    def make_before(self, workspace: Workspace, elsewhere_bytes: int) -> None:
        """Give back what the parts before have touched of the buffer, if this one needs that room.

        The running sum at its start stays: the workspace of every part counts it.
        """
        workspace.reserve(self._buffer_bytes)
        if elsewhere_bytes:
            self._make(workspace, elsewhere_bytes, is_in_use=True)

    def _make(self, workspace: Workspace, elsewhere_bytes: int, *, is_in_use: bool = False) -> None:
        workspace.make_room(
            elsewhere_bytes,
            self._limit_bytes,
            self._backend,
            self._result_bytes,
            self._block_bytes,
            is_in_use=is_in_use,
        )


class _SliceParts:
    """fprop and dgrad: every part writes its own slice of the result."""

    def __init__(self, backend: Backend, problem: ConvProblem, groups: list[Group]) -> None:
        self._backend = backend
        self._groups = groups
        self._problem = problem
        self._shape = problem.output_shape if problem.op is ConvOp.FPROP else problem.input_shape
        self._order = memory_format(problem.layout, len(self._shape))
        self._strides = _strides(self._shape, self._order)

    def bind(self, buffer: Tensor) -> list[list[tuple[PartKernel, Part]]]:
        """Return the kernels of each group's parts; of none for PyTorch's own."""

        def kernel_of(step: Step) -> PartKernel:
            return self._backend.slice_kernel(step.problem, step.algorithm, buffer)

        return [group.bound(kernel_of) for group in self._groups]

    def run(
        self,
        workspace: Workspace,
        image: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        unread: Tensor | None,
        ready: Ready | None,
        *,
        is_prepared: bool = False,
    ) -> Tensor:
        """Return y, shape (n, k, *size), or dx, shape (n, c, *size), in a new tensor of the problem's layout.

        Where something is not finite PyTorch's own computes all of it, beyond any limit. Parts would take
        less, but it may compute a single image by another algorithm, which leaves other marks.

        Args:
            workspace: with the bytes that the kernels need.
            image: x or dy, of the whole mini-batch.
            weight: (k, c / groups, *taps).
            bias: (k,), for fprop only.
            unread: x for dgrad, dy for fprop of a transposed convolution, whatever it holds; without an x
                PyTorch's own is given the result in its place.
            ready: is told what is taken elsewhere before it is, if there is one.
            is_prepared: whether the only group has this filter's transform in the workspace.

        Raises:
            BackendError: a kernel cannot be made or launched.
        """
        out = image.new_empty_strided(self._shape, self._strides)
        if unread is None and self._problem.op is ConvOp.DGRAD:
            unread = out  # as large as it, and laid out so
        for group, kernels in zip(self._groups, workspace.bound(self), strict=True):
            if group.is_own:
                if ready is not None:
                    ready(group.elsewhere_bytes)
                self._by_own(group.parts, image, weight, bias, unread, out)
                continue
            for number, (kernel, part) in enumerate(kernels):
                if ready is not None:
                    ready(part.elsewhere_bytes)
                if not (number or is_prepared):
                    kernel.prepare(weight)
                if not kernel.run(image, weight, out, bias, part.here):  # something is not finite
                    result = self._backend.own_convolution(self._problem, image, weight, bias, unread)
                    return result.contiguous(memory_format=self._order)
            kernels[-1][0].finish(out, bias, group.here)
        return out

    def _by_own(
        self,
        parts: list[Part],
        image: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        unread: Tensor | None,
        out: Tensor,
    ) -> None:
        """Write PyTorch's own convolution of `parts` to their slices of `out`."""
        for step, here, _ in parts:
            ignored = None if unread is None else unread[here]
            out[here].copy_(self._backend.own_convolution(step.problem, image[here], weight, bias, ignored))


class _SumParts:
    """wgrad: what the parts compute adds up."""

    def __init__(self, backend: Backend, problem: ConvProblem, groups: list[Group], sum_bytes: int) -> None:
        self._backend = backend
        self._problem = problem
        self._groups = groups
        self._sum_bytes = sum_bytes
        self._order = memory_format(problem.filter_layout, len(problem.filter_shape))
        self._strides = _strides(problem.filter_shape, self._order)

    def bind(self, buffer: Tensor) -> tuple[Tensor | None, list[list[tuple[PartSumKernel, Part]]]]:
        """Return the sum at the start of the buffer, if there is one, and the kernels that work behind it."""
        behind = buffer[self._sum_bytes :]

        def kernel_of(step: Step) -> PartSumKernel:
            return self._backend.sum_kernel(step.problem, step.algorithm, behind)

        total = self._running_sum(buffer) if self._sum_bytes else None
        return total, [group.bound(kernel_of) for group in self._groups]

    def _running_sum(self, buffer: Tensor) -> Tensor:
        """The sum, laid out as dw, so that adding runs through both in step."""
        shape, dtype = self._problem.filter_shape, getattr(torch, self._problem.sum_dtype)
        values = buffer[: math.prod(shape) * dtype.itemsize].view(dtype)
        return laid_out(values, shape, self._problem.filter_layout)

    def run(
        self,
        workspace: Workspace,
        image: Tensor,
        gradient: Tensor,
        unread: Tensor | None,
        ready: Ready | None,
    ) -> Tensor:
        """Return dw, shape (k, c / groups, *taps), in a new tensor of the filter's layout.

        Where a kernel finds something that is not finite PyTorch's own computes all of it, as for slices.

        Args:
            workspace: with the bytes of the running sum and of the kernels behind it.
            image: x, of the whole mini-batch.
            gradient: dy, of the whole mini-batch.
            unread: w, whatever it holds.
            ready: is told what is taken elsewhere before it is, if there is one.

        Raises:
            BackendError: a kernel cannot be made or launched.
        """
        dw = image.new_empty_strided(self._problem.filter_shape, self._strides)
        running, bound = workspace.bound(self)
        total, scratch = (dw, None) if running is None else (running, dw)
        for number, (group, kernels) in enumerate(zip(self._groups, bound, strict=True)):
            into = GradientSum(total, number > 0, scratch)
            if group.is_own:
                if ready is not None:
                    ready(group.elsewhere_bytes)
                self._by_own(group.parts, image, gradient, unread, into)
                continue
            for place, (kernel, part) in enumerate(kernels):
                if ready is not None:
                    ready(part.elsewhere_bytes)
                kernel.add(image, gradient, into, place == 0, part.here)
            if not kernel.finish(into):  # something is not finite
                result = self._backend.own_convolution(self._problem, image, gradient, None, unread)
                return result.contiguous(memory_format=self._order)
        return dw if running is None else dw.copy_(running)

    def _by_own(
        self, parts: list[Part], image: Tensor, gradient: Tensor, unread: Tensor | None, into: GradientSum
    ) -> None:
        """Write the sum of PyTorch's own dw of `parts` to `into`, or add it."""
        for step, here, _ in parts:
            dw = self._backend.own_convolution(step.problem, image[here], gradient[here], None, unread)
            into.take(dw)
            del dw  # before the next one is made
            into = dataclasses.replace(into, accumulate=True)
