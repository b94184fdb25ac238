"""Convolutions on the processor: PyTorch's own, algorithms composed of torch operations, and some in C."""

import contextlib
import threading
import time
from collections.abc import Hashable
from contextlib import AbstractContextManager
from operator import attrgetter

import torch
from torch import Tensor

from mucudnn.algorithms import Algorithm, named, offered
from mucudnn.algorithms.compiled.algorithm import AlgorithmInC
from mucudnn.algorithms.compiled.compiler import compiler
from mucudnn.algorithms.own import own_convolution, recorded_convolution, result_bytes
from mucudnn.algorithms.packed import packing
from mucudnn.backends.base import Job, OnSlices, PartKernel, PartSumKernel, Queue, SumOnSlices
from mucudnn.backends.cpu.bounds import ON_OWN, error_bound, may_round
from mucudnn.backends.cpu.environment import present_environment, present_flags
from mucudnn.backends.cpu.footprint import Footprint, FootprintMeter
from mucudnn.backends.cpu.neighbours import ProcessorNeighbours
from mucudnn.backends.cpu.pages import release_pages
from mucudnn.backends.own import own_job
from mucudnn.choices import Search
from mucudnn.errors import BackendError
from mucudnn.locks import cached_property
from mucudnn.problem import ConvProblem
from mucudnn.profile import Environment, Trial, own_of
from mucudnn.timing import Clock

_PREFIX = "cpu:"

_NOTHING = contextlib.nullcontext()


class _ThisThread(threading.local):
    """A queue for each thread, which goes with it."""

    def __init__(self) -> None:
        self.queue = Queue()


class CpuBackend:
    """The processor."""

    name = "cpu"
    own = own_of(name)
    device = torch.device("cpu")
    alignment_bytes = 1
    least_span_ns = 50_000
    takes_memory_by_pages = True
    is_capturing = False
    own_convolution = staticmethod(own_convolution)
    recorded_convolution = staticmethod(recorded_convolution)
    packing = staticmethod(packing)

    def __init__(self) -> None:
        self._here = _ThisThread()

    @property
    def clock(self) -> Clock:
        """Nanoseconds of the host, which computes itself."""
        return time.perf_counter_ns

    def queue(self) -> Queue:
        """Return this thread's queue: what a thread computes comes one after the other."""
        return self._here.queue

    def current(self) -> AbstractContextManager[None]:
        """Return a context in which nothing is other than outside: there is one processor."""
        return _NOTHING

    def flags(self) -> Hashable:
        """Return the number of threads, for which blocks on their own are made, and oneDNN's flags."""
        return present_flags()

    def operand(self, tensor: Tensor, *_: object) -> Tensor:
        """Return `tensor`: images are laid out before they come here, a filter is read however it lies."""
        return tensor

    @cached_property
    def _meter(self) -> FootprintMeter:
        """Made when first needed: plans run everywhere, only weighing needs Linux."""
        return FootprintMeter()

    def environment(self) -> Environment:
        """Return all that a time measured now depends on."""
        return present_environment()

    def neighbours(self) -> ProcessorNeighbours:
        """Return what watches who else computes on these processors."""
        return ProcessorNeighbours()

    def algorithms(
        self,
        problem: ConvProblem,
        search: Search = Search.HEURISTIC,
        whole: bool = True,
    ) -> tuple[str, ...]:
        """Return the ids of the algorithms to try for `problem`, PyTorch's own first.

        Those on worker threads are tried where this thread computes with several, those that keep 16 of
        float32's 24 bits where the user lets convolutions round.
        """
        exhaustive, compiles = search is Search.EXHAUSTIVE, compiler() is not None
        others = offered(problem, torch.get_num_threads(), whole, exhaustive, compiles, may_round())
        return (self.own, *(_PREFIX + each.name for each in others))

    def computes(self, problem: ConvProblem, algorithm: str) -> bool:
        """Return whether `algorithm` computes `problem`."""
        found = _found(algorithm)
        return algorithm == self.own or (found is not None and found.refusal(problem) is None)

    def refusal(self, problem: ConvProblem, algorithm: str) -> str | None:
        """Return why `algorithm` does not compute `problem`; None if it does, or if there is none such."""
        found = _found(algorithm)
        return None if found is None else found.refusal(problem)

    def get_ready(self, problem: ConvProblem, algorithm: str) -> None:
        """Have the algorithm's C compiled, if it is in C."""
        found = _found(algorithm)
        if isinstance(found, AlgorithmInC):
            found.compile(problem)

    def workspace_bytes(self, trial: Trial, limit_bytes: int) -> int | None:
        """Return the bytes that a trial takes beside its operands and result, or None if above the limit.

        PyTorch's own convolution is weighed in a child process that is held to the limit. Where it computes
        a part, in the other layout or some rows, it also makes a result of its own, which is then copied or
        added. Then what was seen counts in full, however little: the sum must be within the noise of one
        weighing.
        """
        problem = trial.problem
        declared = self.buffer_bytes(problem, trial.algorithm)
        if not trial.whole:
            declared += problem.running_sum_bytes
        makes_result = not (trial.whole and trial.algorithm == self.own)
        taken = [declared]
        for each in self._by_own(problem, trial.algorithm):
            hidden = self._weighed(own_job(each), limit_bytes)
            if hidden.n_bytes is None or hidden.seen_bytes is None:
                return None
            elsewhere = hidden.seen_bytes + result_bytes(each) if makes_result else hidden.n_bytes
            taken.append(declared + elsewhere)
        return max(taken)

    def footprint(self, job: Job, limit_bytes: int) -> int | None:
        """Return the bytes that a job takes beside operands and result, which may exceed the limit.

        0 where no more is seen than a run without workspace is seen to take; None where memory was refused,
        and it is not known how much more it takes.
        """
        return self._weighed(job, limit_bytes).n_bytes

    def _weighed(self, job: Job, limit_bytes: int) -> Footprint:
        """Return what the child saw; of two looks that which saw less, or anything at all."""
        first = self._meter.measure(job, limit_bytes)
        if first.n_bytes is not None and first.n_bytes <= limit_bytes:
            return first
        # Once in a while a library takes what it keeps in the middle of a run, 1 MiB seen: ask again.
        again = self._meter.measure(job, limit_bytes)
        seen = [each for each in (first, again) if each.n_bytes is not None]
        return min(seen, key=attrgetter("n_bytes"), default=again)

    def is_deterministic(self, problem: ConvProblem, algorithm: str) -> bool:  # noqa: ARG002  # all are alike
        """Return True: blocks and threads are cut by shapes and settings alone, and sums keep their order."""
        return True

    def release(self, tail: Tensor) -> None:
        """Give the memory of `tail` back to the system, in whole pages, where the system is Linux.

        Raises:
            OSError: the kernel refuses, as when the pages are locked in memory.
        """
        release_pages(tail)

    def error_bound(self, problem: ConvProblem, algorithm: str) -> float:
        """Return the relative error against float64, in the 2-norm, above which `algorithm` is wrong."""
        return error_bound(problem, None if algorithm == self.own else self._algorithm(algorithm))

    def slice_kernel(self, problem: ConvProblem, algorithm: str, buffer: Tensor) -> PartKernel:
        """Return a kernel for fprop or dgrad of this micro-batch that works in `buffer`."""
        return OnSlices(self._algorithm(algorithm).slice_kernel(problem, buffer))

    def sum_kernel(self, problem: ConvProblem, algorithm: str, buffer: Tensor) -> PartSumKernel:
        """Return a kernel for wgrad of this micro-batch that works in `buffer`."""
        return SumOnSlices(self._algorithm(algorithm).sum_kernel(problem, buffer))

    def buffer_bytes(self, problem: ConvProblem, algorithm: str) -> int:
        """Return the bytes of buffer that such a kernel needs; what else it takes, it takes elsewhere."""
        return 0 if algorithm == self.own else self._algorithm(algorithm).workspace_bytes(problem)

    def declares(self, algorithm: str) -> bool:
        """Return whether the buffer is all that `algorithm` takes; if not, its workspace is weighed."""
        return algorithm != self.own and not isinstance(self._algorithm(algorithm), ON_OWN)

    def _by_own(self, problem: ConvProblem, algorithm: str) -> tuple[ConvProblem, ...]:
        """Return what PyTorch's own convolution computes in `algorithm`, one after the other, if it does."""
        if algorithm == self.own:
            return (problem,)
        found = self._algorithm(algorithm)
        return found.own_problems(problem) if isinstance(found, ON_OWN) else ()

    def _algorithm(self, name: str) -> Algorithm:
        found = _found(name)
        if found is None:
            raise BackendError(
                f"An algorithm must be one of {self.own}, {_PREFIX}im2col, {_PREFIX}winograd4, "
                f"{_PREFIX}winograd4_rows8 and the like, but got {name!r}."
            )
        return found


def _found(name: str) -> Algorithm | None:
    """Return the algorithm of that id, if it is not PyTorch's own."""
    return named(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None
