"""What a backend must offer: algorithms of one kind of device, their workspaces, and kernels that run them.

The contract, tested on every backend by one suite:

* The workspace that a kernel is given is all that it takes, but for what `workspace_bytes` has measured as
  taken elsewhere; nothing that exceeds a limit is ever run to find out its workspace.
* fprop and dgrad write disjoint slices; every part of wgrad writes the same dw, so parts must add up. The
  first part of a division overwrites dw whatever it held, NaN included, and each later part adds exactly
  its own contribution. Each sample counts once; the running sum is held in float32 or wider (float64 for
  float64) and rounded once.
* A kernel reports a result that is not finite, and whoever runs it computes the whole batch with PyTorch's
  own convolution, so that a NaN or an infinity in the data spreads as it does without mucudnn. A card is not
  waited for to know that: there, algorithms that transform tiles spread what is not finite over a tile.
* What a library keeps for good for every thread or stream, as cuBLAS does, is no part of a workspace.
"""

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor

from mucudnn.algorithms import GradientSum, SliceKernel, SumKernel
from mucudnn.algorithms.packed import Pack
from mucudnn.choices import Search
from mucudnn.problem import ConvProblem, Layout
from mucudnn.profile import Environment, Trial
from mucudnn.timing import Clock

Result = TypeVar("Result")


class Queue:
    """Work put on one queue runs in the order in which it was put there; two of them may overlap."""


class Prepared(Protocol):
    """What a job's function returns: work whose operands are in place.

    What the process keeps anyhow, such as a pool of threads, should be there already: stacks of threads
    that a run starts count as its memory.
    """

    @property
    def result_bytes(self) -> int:
        """Bytes of the tensor that `run` returns; 0 if it writes into one that is there before."""

    def run(self) -> object:
        """Do the work, and return the result if it is new. It is run at least twice."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A piece of work to be weighed, perhaps in another process.

    Attributes:
        function: "package.module:name" of a function that takes the payload and returns what is `Prepared`.
        payload: JSON values.
    """

    function: str
    payload: Mapping[str, object]

    def prepare(self) -> Prepared:
        """Return the work with its operands in place."""
        module, _, name = self.function.partition(":")
        return cast(Prepared, getattr(importlib.import_module(module), name)(self.payload))


class PartKernel(Protocol):
    """Computes parts of y or dx; is given the whole tensors, and which samples the part has."""

    def prepare(self, weight: Tensor) -> None:
        """Transform the filter; once per mini-batch, before the first part.

        Kernels of other sizes that are bound to the same buffer, by the same algorithm, find it there.
        """

    def run(self, image: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None, here: slice) -> bool:
        """Write the result of the samples `here` of `image` to those of `out`; return whether it is sound.

        A bias may be left to `finish`.
        """

    def finish(self, out: Tensor, bias: Tensor | None, here: slice) -> None:
        """Do what is left for the samples `here`, of all parts of one algorithm, of whatever sizes."""


class PartSumKernel(Protocol):
    """Computes dw, summed over parts."""

    def add(self, image: Tensor, gradient: Tensor, into: GradientSum, first: bool, here: slice) -> None:
        """Add the dw of the samples `here` to the running sum, or start it if they are the `first`."""

    def finish(self, into: GradientSum) -> bool:
        """Have the sum in `into`; return whether it is sound."""


class OnSlices:
    """An algorithm of ours, run on views of the samples."""

    def __init__(self, kernel: SliceKernel) -> None:
        self._kernel = kernel
        self.prepare = kernel.prepare

    def run(self, image: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None, here: slice) -> bool:
        """Write the result of the samples `here` of `image` to those of `out`; return whether it is sound."""
        if here.stop - here.start < out.shape[0]:  # else a view of all would take some microseconds
            image, out = image[here], out[here]
        return self._kernel.run(image, weight, out, bias)

    def finish(self, out: Tensor, bias: Tensor | None, here: slice) -> None:
        """Nothing is left to do."""


class SumOnSlices:
    """The same for weight gradients."""

    def __init__(self, kernel: SumKernel) -> None:
        self._kernel = kernel
        self.finish = kernel.finish

    def add(self, image: Tensor, gradient: Tensor, into: GradientSum, first: bool, here: slice) -> None:
        """Add the dw of the samples `here` to the running sum, or start it if they are the `first`."""
        if here.stop - here.start < image.shape[0]:
            image, gradient = image[here], gradient[here]
        self._kernel.add(image, gradient, into, first)


class Neighbours(Protocol):
    """Others who use a device while times are measured on it."""

    @property
    def taken(self) -> float | None:
        """How many processors they took on average while they were watched; None if that is not known."""

    def watched(self) -> AbstractContextManager[None]:
        """Return a context in which they are watched, and times measured."""

    def undisturbed(self, measure: Callable[[], Result]) -> tuple[Result, float]:
        """Return what `measure` returns, which may be called again after they disturbed it; watch meanwhile.

        With it comes how many processors they took on average all the same, 0 unless that may have moved it.

        Raises:
            Exception: whatever `measure` raises, unchanged.
        """

    def complaint(self) -> str | None:
        """Return what they took, in a sentence, if it may have moved the times."""


class NoNeighbours:
    """Nobody, or nobody who can be watched."""

    taken = None

    def watched(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def undisturbed(self, measure: Callable[[], Result]) -> tuple[Result, float]:
        """Return what `measure` returns, called once."""
        return measure(), 0.0

    def complaint(self) -> str | None:
        """Return None."""
        return None


class Backend(Protocol):
    """One kind of device."""

    @property
    def name(self) -> str:
        """By which it is asked for; `backend_named_by` tells it for an algorithm's id."""

    @property
    def own(self) -> str:
        """Id of PyTorch's own convolution, which computes every problem: `own_of` the name."""

    @property
    def device(self) -> torch.device:
        """Where its tensors lie."""

    @property
    def clock(self) -> Clock:
        """Nanoseconds; on a device that runs behind the host, it waits for the device first."""

    @property
    def least_span_ns(self) -> int:
        """Nanoseconds of a timed span against which reading the clock is little.

        Candidates are timed in spans half as long, but no shorter than their rule says: what wins is timed
        again.
        """

    @property
    def alignment_bytes(self) -> int:
        """Bytes: operands start at a multiple of this, and so do parts where a sample's bytes are a multiple.

        With 1 they may start anywhere: they are read as they are, and nobody asks for `operand`.
        """

    @property
    def takes_memory_by_pages(self) -> bool:
        """Whether a buffer's memory is taken as it is written to, page by page, and given back likewise.

        So is the host's, which is always the `current` device. If not, it is taken and given back as a whole.
        """

    @property
    def is_capturing(self) -> bool:
        """Whether what this thread puts there now is captured in a graph, rather than run; cheap to ask."""

    def queue(self) -> Queue:
        """Return where this thread's work is put now."""

    def current(self) -> AbstractContextManager[None]:
        """Make the device the current one of this thread for a while; whoever runs kernels does so inside."""

    def flags(self) -> Hashable:
        """Return what the user may change at any time of the environment; cheap to ask.

        That is its policy, and its device where a machine has several: for environments that differ in either
        these differ too.
        """

    def operand(self, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, layout: Layout) -> Tensor:
        """Return `tensor`, or a copy of it, dense in `layout` and aligned as this backend's kernels need.

        Raises:
            BackendError: they cannot read it, since it is of another shape, type or device.
        """

    def environment(self) -> Environment:
        """Return all that a time measured now depends on."""

    def neighbours(self) -> Neighbours:
        """Return what watches others while times are measured, from now on."""

    def algorithms(
        self, problem: ConvProblem, search: Search = Search.HEURISTIC, whole: bool = True
    ) -> tuple[str, ...]:
        """Return the ids of the algorithms to try for `problem`, PyTorch's own first.

        Args:
            problem: of a micro-batch.
            search: how many of them.
            whole: whether it is the whole mini-batch.
        """

    def computes(self, problem: ConvProblem, algorithm: str) -> bool:
        """Return whether `algorithm` computes `problem`, whether or not it would be tried."""

    def refusal(self, problem: ConvProblem, algorithm: str) -> str | None:
        """Return why `algorithm` does not compute `problem` now, in words without a full stop.

        None if it computes it, or if no reason is known.
        """

    def get_ready(self, problem: ConvProblem, algorithm: str) -> None:
        """Do what would take seconds at the first call, such as to compile; nothing if it was done.

        Raises:
            BackendError: it cannot be done.
        """

    def workspace_bytes(self, trial: Trial, limit_bytes: int) -> int | None:
        """Return the bytes that a trial takes beside its operands and result, or None if above the limit.

        Where what it is held to is coarser than the limit, the bytes may be seen, and exceed it.
        """

    def is_deterministic(self, problem: ConvProblem, algorithm: str) -> bool:
        """Return whether `algorithm` gives equal bits for equal operands in every run.

        As far as its library says, and under the present flags.
        """

    def declares(self, algorithm: str) -> bool:
        """Return whether the buffer is all that `algorithm` takes; if not, its workspace is weighed."""

    def footprint(self, job: Job, limit_bytes: int) -> int | None:
        """Return the bytes that a job takes beside operands and result, as seen, which may exceed the limit.

        None where memory was refused, and it is not known how much more it takes.

        Raises:
            UnmeasuredError: what the job takes cannot be seen here, whatever it is.
        """

    def release(self, tail: Tensor) -> None:
        """Give memory of a workspace back to the system: that of its end, or all of it.

        By pages, the addresses of `tail` stay valid, and memory comes again when they are written to. As a
        whole, all memory of the workspace is gone until its storage is resized.

        Raises:
            OSError: the system takes no pages, as when they are locked in memory; `tail` is as it was.
        """

    def error_bound(self, problem: ConvProblem, algorithm: str) -> float:
        """Return the relative error against float64, in the 2-norm, above which `algorithm` is wrong."""

    def recorded_convolution(
        self, problem: ConvProblem, image: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Return PyTorch's own convolution of a forward pass, which autograd records."""

    def packing(self, problem: ConvProblem) -> Pack | None:
        """Return what packs filters for PyTorch's own as graphs do that torch.compile freezes.

        None where it runs there as it does elsewhere.
        """

    def own_convolution(
        self,
        problem: ConvProblem,
        first: Tensor,
        second: Tensor,
        bias: Tensor | None = None,
        unread: Tensor | None = None,
    ) -> Tensor:
        """Return what PyTorch itself computes: y from (x, w), dx from (dy, w), or dw from (x, dy).

        The third tensor that the backward ops name but never read may be given as `unread`: x or w, or dy
        for fprop of a transposed convolution that PyTorch computes otherwise.
        """

    def slice_kernel(self, problem: ConvProblem, algorithm: str, buffer: Tensor) -> PartKernel:
        """Return a kernel for fprop or dgrad of this micro-batch that works in `buffer`."""

    def sum_kernel(self, problem: ConvProblem, algorithm: str, buffer: Tensor) -> PartSumKernel:
        """Return a kernel for wgrad of this micro-batch that works in `buffer`."""

    def buffer_bytes(self, problem: ConvProblem, algorithm: str) -> int:
        """Return the bytes of buffer that such a kernel needs; what else it takes, it takes elsewhere."""
