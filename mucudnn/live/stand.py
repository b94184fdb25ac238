"""A test stand: operands of its own for one problem, and calls on them that run as in a model."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from mucudnn.algorithms import GradientSum
from mucudnn.algorithms.base import memory_format
from mucudnn.algorithms.own import operands, unread_operand
from mucudnn.backends import Backend
from mucudnn.backends.cpu.soiling import soiled_memory
from mucudnn.backends.cpu.spinning import ordinary_operation
from mucudnn.division import Division
from mucudnn.execution.runner import Runner
from mucudnn.execution.workspace import Owner, Workspace
from mucudnn.live.reference import Reference, relative_error
from mucudnn.live.rehearsal import Operands, rehearsed
from mucudnn.locks import cached_property
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.profile import Trial
from mucudnn.profiling.measurer import Divisions, ModelCall
from mucudnn.timing import nothing

_GUARD_BYTES = 4096
_GUARD = 0xA5

_POISON = 0xFF
"""Bytes that make every float NaN."""


class TrialRun(Protocol):
    """The calls of one trial."""

    def ready_for_parts(self) -> None:
        """Make anew what a part finds in the workspace, in which other trials run too.

        What they leave there may be numbers that a processor multiplies slowly: of bfloat16, read as float32,
        one in three hundred was denormal, and a Winograd that found them in place of its filter took seven
        times as long.
        """

    def ready_for_setup(self) -> None:
        """Make anew what the set-up finds there."""

    def part(self) -> None:
        """Run one micro-batch, on the next slice of the operands."""

    def setup(self) -> None:
        """Run what is paid once per mini-batch."""

    def error(self) -> float:
        """Run once and return how far the result is from the reference: see `relative_error`.

        Result and workspace are filled with NaN, and free memory with garbage, so that reading what nobody
        wrote shows. In wgrad a part is added twice: to nothing, and to a sum. Writing beyond the workspace
        counts as an infinite error.
        """


class Stand:
    """Operands of normal random values for one problem, and its reference result in float64.

    Parts of a trial run on one slice of the operands after the other, as in a division, so that their data
    lie in the cache as little, or as much, as they will.
    """

    def __init__(self, backend: Backend, problem: ConvProblem, buffer_bytes: int, seed: int = 0) -> None:
        """Make the operands of a whole mini-batch.

        Args:
            backend: that computes.
            problem: of the whole mini-batch.
            buffer_bytes: of the one workspace in which all trials run.
            seed: of the operands.
        """
        self.backend = backend
        self.problem = problem
        self._seed = seed
        self.first, self.second, self.bias = self._given()
        self._given_traits = self._traits()
        self.buffer = GuardedBuffer(buffer_bytes, backend.device)
        self.out = self._poisoned_result()
        self.reference = self._new_reference()
        self._workspace = Workspace(backend.device)
        self._owners = {op: Owner() for op in ConvOp}  # of workspaces in rehearsed calls

    @cached_property
    def running_sum(self) -> Tensor:
        """Where weight gradients of parts add up, one for all trials."""
        return torch.zeros_like(self.out, dtype=getattr(torch, self.problem.sum_dtype))

    @cached_property
    def unread(self) -> Tensor | None:
        """The operand that PyTorch's own takes and never reads; None where it reads all."""
        return unread_operand(self.problem, self.backend.device)

    @cached_property
    def ordinary_operation(self) -> Callable[[], None]:
        """A call that leaves the processor as an operation before a convolution in a model leaves it.

        PyTorch's threads spin for milliseconds after each operation, before they sleep. Meanwhile they are
        quick to begin, and take cores from threads that are not theirs: timed after a rest, or after one
        another, algorithms of several kinds would rank otherwise than in a model. On another device, where
        they compute nothing, it does nothing.
        """
        return ordinary_operation() if self.backend.device.type == "cpu" else nothing

    def mend(self) -> bool:
        """Restore the operands if a run has written to them; return whether one has.

        A run that only reorders their values is not noticed.
        """
        if self._traits() == self._given_traits:
            return False
        is_harmed = False
        for operand, given in zip((self.first, self.second, self.bias), self._given(), strict=True):
            if operand is not None and given is not None and not torch.equal(operand, given):
                operand.copy_(given)
                is_harmed = True
        if is_harmed:
            self.reference = self._new_reference()
        return is_harmed

    def run(self, trial: Trial) -> TrialRun:
        """Return the calls of one trial, in a workspace of exactly the bytes that it declares."""
        if trial.algorithm == self.backend.own:
            return _OwnRun(self, trial)
        if self.problem.op is ConvOp.WGRAD:
            return _SumRun(self, trial)
        return _SliceRun(self, trial)

    def division(self, division: Division) -> Callable[[], None]:
        """Return a call that runs a whole division as it will run, result and all."""
        runner, unread = Runner(self.backend, self.problem, division), self.unread

        def call() -> None:
            runner(self._workspace, self.first, self.second, self.bias, unread)

        return call

    def call(self, call: ModelCall, divisions: Divisions) -> Callable[[], None]:
        """Return a call of this forward pass with its gradients; see `mucudnn.live.rehearsal`."""
        gradient = self.out.nan_to_num_(1.0)  # ones will do: it was poisoned
        bias = self.bias
        if call.problem.op is ConvOp.DGRAD:  # which as a problem has none, and as a module one by default
            bias = self.first.new_zeros(call.problem.in_channels)
        operands = Operands(self.first, self.second, bias, gradient)
        common = self._owners[ConvOp.FPROP]
        owners = self._owners if call.is_sharing else dict.fromkeys(ConvOp, common)
        return rehearsed(self.backend, call, divisions, operands, owners)

    def _given(self) -> tuple[Tensor, Tensor, Tensor | None]:
        generator = torch.Generator(self.backend.device).manual_seed(self._seed)
        return operands(self.problem, generator, self.backend.device)

    def _traits(self) -> list[tuple[float, float]]:
        """Return numbers that change with the operands, for which nothing is copied.

        A hash of each, in which equal changes of two values cancel, as of all signs, and a sum.
        """
        given = (each for each in (self.first, self.second, self.bias) if each is not None and each.numel())
        return [(torch.hash_tensor(each).item(), each.sum().item()) for each in given]

    def _new_reference(self) -> Reference:
        return Reference(self.backend, self.problem, (self.first, self.second, self.bias), self.out)

    def _poisoned_result(self) -> Tensor:
        problem = self.problem
        shape, layout = {
            ConvOp.FPROP: (problem.output_shape, problem.layout),
            ConvOp.DGRAD: (problem.input_shape, problem.layout),
            ConvOp.WGRAD: (problem.filter_shape, problem.filter_layout),
        }[problem.op]
        out = torch.full(shape, float("nan"), dtype=self.first.dtype, device=self.first.device)
        return out.contiguous(memory_format=memory_format(layout, len(shape)))


class GuardedBuffer:
    """A workspace with known bytes behind its end, to find out who writes beyond it."""

    def __init__(self, n_bytes: int, device: torch.device) -> None:
        self._bytes = torch.zeros(n_bytes + _GUARD_BYTES, dtype=torch.uint8, device=device)

    def first(self, n_bytes: int) -> Tensor:
        """Return the first `n_bytes`, to work in."""
        return self._bytes[:n_bytes]

    @contextlib.contextmanager
    def poisoned(self, n_bytes: int) -> Iterator[None]:
        """Make the first `n_bytes` no numbers for a while, with a pattern behind them; soil free memory."""
        self.first(n_bytes).fill_(_POISON)
        self._behind(n_bytes).fill_(_GUARD)
        try:
            with soiled_memory(self._bytes.device):
                yield
        finally:
            self.first(n_bytes).zero_()

    def is_intact(self, n_bytes: int) -> bool:
        """Return whether the pattern behind the first `n_bytes` is still there."""
        return bool((self._behind(n_bytes) == _GUARD).all())

    def _behind(self, n_bytes: int) -> Tensor:
        return self._bytes[n_bytes : n_bytes + _GUARD_BYTES]


class _OwnRun:
    """PyTorch's own convolution: of the whole mini-batch as it runs without mucudnn, of a part on slices."""

    def __init__(self, stand: Stand, trial: Trial) -> None:
        self._stand = stand
        self._problem = trial.problem
        self._is_whole = trial.whole
        self._slices = _rotation(stand.problem.batch, trial.problem.batch)

    def ready_for_parts(self) -> None:
        """Nothing is made before a part."""

    def ready_for_setup(self) -> None:
        """Nothing is paid apart."""

    def part(self) -> None:
        """Run the next part: the whole as a new result, a part copied or added to where it belongs."""
        here = next(self._slices)
        result = self._compute(here)
        if self._is_whole:
            return
        if self._problem.op is ConvOp.WGRAD:
            self._stand.running_sum.add_(result)
        else:
            self._stand.out[here].copy_(result)

    def setup(self) -> None:
        """Nothing is paid apart."""

    def error(self) -> float:
        """Return the error of the first part."""
        here = slice(0, self._problem.batch)
        with soiled_memory(self._stand.out.device):
            result = self._compute(here)
        return relative_error(result, self._stand.reference.of(here))

    def _compute(self, here: slice) -> Tensor:
        stand, op = self._stand, self._problem.op
        second = stand.second[here] if op is ConvOp.WGRAD else stand.second
        unread = stand.unread  # w for wgrad, else of these samples
        if unread is not None and op is not ConvOp.WGRAD:
            unread = unread[here]
        return stand.backend.own_convolution(self._problem, stand.first[here], second, stand.bias, unread)


class _SliceRun:
    """fprop or dgrad of a micro-batch, written into its slice of the result."""

    def __init__(self, stand: Stand, trial: Trial) -> None:
        self._stand = stand
        self._size = trial.problem.batch
        self._n_bytes = stand.backend.buffer_bytes(trial.problem, trial.algorithm)
        buffer = stand.buffer.first(self._n_bytes)
        self._kernel = stand.backend.slice_kernel(trial.problem, trial.algorithm, buffer)
        self._slices = _rotation(stand.problem.batch, self._size)

    def ready_for_parts(self) -> None:
        """Transform the filter, or whatever comes before the first part."""
        self._kernel.prepare(self._stand.second)

    def ready_for_setup(self) -> None:
        """The set-up itself makes what is there."""

    def part(self) -> None:
        """Run the next part into its slice of the result."""
        here = next(self._slices)
        stand = self._stand
        self._kernel.run(stand.first, stand.second, stand.out, stand.bias, here)

    def setup(self) -> None:
        """Run what precedes the first part of a mini-batch, and what follows the last."""
        stand = self._stand
        self._kernel.prepare(stand.second)
        self._kernel.finish(stand.out, stand.bias, slice(0, stand.problem.batch))

    def error(self) -> float:
        """Return the error of one part; see `TrialRun`."""
        stand, here = self._stand, _least_aligned(self._stand.problem, self._size)
        out = stand.out[here].fill_(float("nan"))
        with stand.buffer.poisoned(self._n_bytes):
            self._kernel.prepare(stand.second)
            self._kernel.run(stand.first, stand.second, stand.out, stand.bias, here)
            self._kernel.finish(stand.out, stand.bias, here)
        if not stand.buffer.is_intact(self._n_bytes):
            return math.inf
        return relative_error(out, stand.reference.of(here))


class _SumRun:
    """wgrad of a micro-batch, added to a running sum."""

    def __init__(self, stand: Stand, trial: Trial) -> None:
        self._stand = stand
        self._size = trial.problem.batch
        self._n_bytes = stand.backend.buffer_bytes(trial.problem, trial.algorithm)
        buffer = stand.buffer.first(self._n_bytes)
        self._kernel = stand.backend.sum_kernel(trial.problem, trial.algorithm, buffer)
        self._slices = _rotation(stand.problem.batch, self._size)
        self._is_whole = trial.whole
        self._into = _sum_of(stand, trial)

    def ready_for_parts(self) -> None:
        """Have sums that are nothing, to which parts add; the whole overwrites them."""
        if not self._is_whole:
            self.ready_for_setup()

    def ready_for_setup(self) -> None:
        """Have sums that are nothing, which are finished: what others have left there may be slow numbers.

        A card computes with all as fast, and writing so much before each span would empty its caches.
        """
        if self._stand.backend.device.type == "cpu":
            self._stand.buffer.first(self._n_bytes).zero_()

    def part(self) -> None:
        """Add the next part to the sum; the whole overwrites it."""
        here, stand = next(self._slices), self._stand
        self._kernel.add(stand.first, stand.second, self._into, self._is_whole, here)

    def setup(self) -> None:
        """Run what follows the last part of a mini-batch."""
        self._kernel.finish(self._into)

    def error(self) -> float:
        """Return the larger error of a sum, from nothing and onto another, relative to float64."""
        stand, into = self._stand, self._into
        into.total.fill_(float("nan"))
        with stand.buffer.poisoned(self._n_bytes):
            if into.total.dtype.itemsize == 2:  # in which nothing is added
                errors = [self._error_after(into, times=1, multiple=1)]
            else:
                onto = dataclasses.replace(into, accumulate=True)
                errors = [self._error_after(into, 2, 2), self._error_after(onto, 2, 4)]
        if not stand.buffer.is_intact(self._n_bytes):
            return math.inf
        return math.nan if any(math.isnan(error) for error in errors) else max(errors)

    def _error_after(self, into: GradientSum, times: int, multiple: int) -> float:
        """Add one part so many times; return the error of the total against a multiple of it."""
        stand, here = self._stand, _least_aligned(self._stand.problem, self._size)
        for number in range(times):
            if into.scratch is not None:
                into.scratch.fill_(float("nan"))
            self._kernel.add(stand.first, stand.second, into, number == 0, here)
        self._kernel.finish(into)
        return relative_error(into.total, multiple * stand.reference.of(here))


def _sum_of(stand: Stand, trial: Trial) -> GradientSum:
    """Where the gradient goes: the whole into the result, parts into a sum of 32 bits at least."""
    if trial.whole or stand.problem.sum_dtype == stand.problem.dtype:
        return GradientSum(stand.out)
    return GradientSum(stand.running_sum, scratch=stand.out)


def _rotation(batch: int, size: int) -> "itertools.cycle[slice]":
    """Yield the slices of `size` samples that fit into the batch, over and over."""
    return itertools.cycle([slice(i * size, (i + 1) * size) for i in range(batch // size)])


def _least_aligned(problem: ConvProblem, size: int) -> slice:
    """Return a part of `size` samples that starts no better aligned than any may, if there is one."""
    part = problem.part(size)
    start = 0
    if part.alignment_bytes < problem.alignment_bytes and problem.batch >= 2 * size:
        start = size  # an odd multiple of the size, while 0 is aligned to anything
    return slice(start, start + size)
