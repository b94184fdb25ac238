"""Convolutions on an NVIDIA card: cuDNN's engines with their knobs, what cuDNN lacks, and PyTorch's own."""

import functools
from collections.abc import Hashable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from mucudnn.algorithms.base import checked, memory_format
from mucudnn.algorithms.own import own_convolution, recorded_convolution, result_bytes
from mucudnn.backends.base import Job, NoNeighbours, PartKernel, PartSumKernel, Queue
from mucudnn.backends.cudnn.card import Card, TorchCard
from mucudnn.backends.cudnn.card_engines import Engines
from mucudnn.backends.cudnn.configurations import EngineConfiguration
from mucudnn.backends.cudnn.library import load_library
from mucudnn.backends.cudnn.tiles import Tiles
from mucudnn.backends.cudnn.tiles import is_id as is_tiles
from mucudnn.backends.cudnn.workshop import Workshop
from mucudnn.backends.own import own_job
from mucudnn.backends.rounding import rounding_growth
from mucudnn.choices import Search
from mucudnn.errors import BackendError, BackendWarning, warn_user
from mucudnn.problem import ConvOp, ConvProblem, Layout
from mucudnn.profile import Environment, Trial, own_of
from mucudnn.timing import Clock

_ERROR_BOUNDS = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Largest relative error, in the 2-norm, of a sum of few terms; transforms of float32 lose a digit."""

_TF32_BOUND = 2e-3
"""The same where the user lets float32 be multiplied in TF32: 10 bits, each product off by 2^-11."""

_ALIGNMENT_BYTES = 16
"""Below this most engines that use tensor cores are gone; more gains nothing."""


_MOST_PROBLEMS = 4096
"""Of which is remembered whether PyTorch's own convolution is cuDNN's."""


class CudnnBackend:
    """One NVIDIA card.

    Args:
        card: where PyTorch works.
        workshop: cuDNN's engines on that card; None where the library cannot be used, and PyTorch's own
            convolution on slices is all there is.
    """

    name = "cudnn"
    own = own_of(name)
    alignment_bytes = _ALIGNMENT_BYTES
    takes_memory_by_pages = False
    least_span_ns = 1_000_000  # waiting for a card takes some 10 µs, alike for all that are compared
    recorded_convolution = staticmethod(recorded_convolution)

    def __init__(self, card: Card, workshop: Workshop | None) -> None:
        self._card = card
        self._engines = Engines(card, workshop, self.algorithms)
        self._tiles = Tiles(card)
        # What PyTorch would choose it is asked on stand-ins, which takes longer than a call.
        self._runs_cudnn = functools.lru_cache(_MOST_PROBLEMS)(lambda problem, *_: card.runs_cudnn(problem))

    @classmethod
    def on(cls, index: int) -> "CudnnBackend":
        """Return the backend for a card of this machine; a warning says so if cuDNN cannot be used directly.

        Args:
            index: the card's number, as PyTorch counts.
        """
        card = TorchCard(index)
        try:
            workshop = Workshop(load_library(), card)
        except BackendError as error:
            warn_user(
                f"cuDNN's engines cannot be chosen, but PyTorch's own convolution can be divided. {error}",
                BackendWarning,
            )
            return cls(card, None)
        return cls(card, workshop)

    @property
    def device(self) -> torch.device:
        """Where its tensors lie."""
        return self._card.device

    @property
    def clock(self) -> Clock:
        """Nanoseconds of the host, once the card has done what it was given.

        A span of many calls then takes as long as the slower of the two: what the host pays to launch is
        part of a candidate's time wherever it exceeds the kernel's.
        """
        return self._card.clock

    @property
    def is_capturing(self) -> bool:
        """Whether this thread's present stream of that card is being captured."""
        return self._card.is_capturing

    def queue(self) -> Queue:
        """Return the queue of this thread's present stream, which other threads may share."""
        return self._card.queue()

    def current(self) -> AbstractContextManager[None]:
        """Make the card the calling thread's current one for a while."""
        return self._card.current()

    def flags(self) -> Hashable:
        """Return what PyTorch's flags permit now: of convolutions, of cuDNN and its plans, of products.

        And on what kind of card: in one machine there may be several, and a model may be moved.
        """
        card = self._card
        obstacles = card.obstacle_to_products("float32"), card.obstacle_to_products("float64")
        return card.kind, card.rules, card.uses_cudnn, card.plans_tried, obstacles

    def operand(self, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, layout: Layout) -> Tensor:
        """Return `tensor`, or a copy of it, dense in `layout` and at a multiple of 16 bytes.

        The copy is an operand, as autograd's would be, and no workspace.

        Raises:
            BackendError: it is of another shape, type or device: kernels read what lies at its address.
        """
        tensor = checked(tensor, shape, dtype, self._card.device)
        dense = tensor.contiguous(memory_format=memory_format(layout, tensor.dim()))
        return dense.clone() if dense.data_ptr() % _ALIGNMENT_BYTES else dense

    def environment(self) -> Environment:
        """Return all that a time measured now depends on."""
        return self._card.environment(self._engines.version)

    def packing(self, problem: ConvProblem) -> None:
        """Return None: cuDNN computes with filters as they lie."""

    def neighbours(self) -> NoNeighbours:
        """Return nobody: a card does not tell whose work took its time."""
        return NoNeighbours()

    def algorithms(
        self,
        problem: ConvProblem,
        search: Search = Search.HEURISTIC,
        whole: bool = True,  # noqa: ARG002  # in both roles the same
    ) -> tuple[str, ...]:
        """Return PyTorch's own, then the engines to try for `problem` in cuDNN's order, then tiles."""
        engines, tiles = self._engines.candidates(problem, search), self._tiles.candidates(problem, search)
        return (self.own, *engines, *tiles)

    def computes(self, problem: ConvProblem, algorithm: str) -> bool:
        """Return whether `algorithm` computes `problem`, and the present flags permit it."""
        return algorithm == self.own or self._family(algorithm).computes(problem, algorithm)

    def refusal(self, problem: ConvProblem, algorithm: str) -> str | None:
        """Return why tiles do not compute `problem`; None of others, of which cuDNN gives no reason."""
        return self._family(algorithm).refusal(problem, algorithm)

    def get_ready(self, problem: ConvProblem, algorithm: str) -> None:
        """Build the plans of an engine, or compile the kernels of tiles; nothing if that was done.

        Nor while a CUDA graph is captured: the first call then says what must happen before, and one that is
        not captured does it.

        Raises:
            BackendError: cuDNN refuses to build a plan, it takes more than it declares, or CuPy cannot
                compile a kernel.
        """
        if algorithm != self.own and not self.is_capturing:
            self._family(algorithm).get_ready(problem, algorithm)

    def own_convolution(
        self,
        problem: ConvProblem,
        first: Tensor,
        second: Tensor,
        bias: Tensor | None = None,
        unread: Tensor | None = None,
    ) -> Tensor:
        """Return what PyTorch itself computes for `problem`; see `algorithms.own`.

        Without an x for dgrad PyTorch computes the transposed convolution: it asks the same of cuDNN, and
        needs no block for x, which would be as large as the result.
        """
        is_without = problem.op is ConvOp.DGRAD and unread is None
        if is_without and self._runs_cudnn(problem, self._card.uses_cudnn, self._card.rules):
            with torch.no_grad():
                return recorded_convolution(problem, first, second, None)
        return own_convolution(problem, first, second, bias, unread)

    def workspace_bytes(self, trial: Trial, limit_bytes: int) -> int | None:
        """Return the bytes that a trial takes beside its operands and result, or None if above the limit.

        Engines declare theirs. PyTorch's own is weighed by its allocator, held to the limit; but not run at
        all where it is known to ask for more. Not only would it fail: it would find another plan, and keep to
        that one in this process. The float32 sum of 16-bit weight gradients counts with every part.
        """
        extra = 0 if trial.whole else trial.problem.running_sum_bytes
        if trial.algorithm != self.own:
            return self.buffer_bytes(trial.problem, trial.algorithm) + extra
        if self._engines.asked_bytes(trial.problem) > limit_bytes:
            return None
        hidden = self.footprint(own_job(trial.problem, self.device), limit_bytes)
        if hidden is None or trial.whole:
            return hidden
        return hidden + result_bytes(trial.problem) + extra

    def is_deterministic(self, problem: ConvProblem, algorithm: str) -> bool:
        """Return whether cuDNN says of the engine that equal operands give equal bits in every run.

        PyTorch's own is if every engine is that it may take; where cuDNN cannot be asked which these are, if
        the user forbids others.
        """
        if algorithm != self.own:
            return self._family(algorithm).is_deterministic(problem, algorithm)
        if self._engines.version is None and self._card.runs_cudnn(problem):
            return self._card.rules.deterministic
        return all(each.is_deterministic for each in self._engines.foreseen(problem))

    def declares(self, algorithm: str) -> bool:
        """Return whether the buffer is all that `algorithm` takes; if not, its workspace is weighed."""
        return algorithm != self.own

    def footprint(self, job: Job, limit_bytes: int) -> int | None:
        """Return the bytes that a job takes beside operands and result, as seen, which may exceed the limit.

        None where memory was refused, and it is not known how much more it takes.

        Raises:
            UnmeasuredError: PyTorch's allocator does not count.
        """
        return self._card.weigh(job, limit_bytes)

    def release(self, tail: Tensor) -> None:
        """Give all memory of the workspace whose end is `tail` back to the allocator."""
        tail.untyped_storage().resize_(0)

    def error_bound(self, problem: ConvProblem, algorithm: str) -> float:  # noqa: ARG002  # engines round alike
        """Return the relative error against float64, in the 2-norm, above which `algorithm` is wrong.

        1e-5 in float32, 2e-3 where TF32 is allowed, 4e-3 in float16 and 3e-2 in bfloat16, and more by the
        square root of the number of terms where very many are added up.
        """
        is_tf32 = problem.dtype == "float32" and self._card.rules.allow_tf32
        bound = _TF32_BOUND if is_tf32 else _ERROR_BOUNDS[problem.dtype]
        return bound * rounding_growth(problem)

    def slice_kernel(self, problem: ConvProblem, algorithm: str, buffer: Tensor) -> PartKernel:
        """Return a kernel for fprop or dgrad of this micro-batch that works in `buffer`."""
        return self._family(algorithm).slice_kernel(problem, algorithm, buffer)

    def sum_kernel(self, problem: ConvProblem, algorithm: str, buffer: Tensor) -> PartSumKernel:
        """Return a kernel for wgrad of this micro-batch that works in `buffer`."""
        return self._family(algorithm).sum_kernel(problem, algorithm, buffer)

    def buffer_bytes(self, problem: ConvProblem, algorithm: str) -> int:
        """Return the bytes of buffer that such a kernel needs; what else it takes, it takes elsewhere."""
        return 0 if algorithm == self.own else self._family(algorithm).workspace_bytes(problem, algorithm)

    def engine(self, problem: ConvProblem, algorithm: str) -> EngineConfiguration | None:
        """Return the engine that an id names, if it computes `problem`, whatever the flags permit."""
        return self._engines.named(problem, algorithm)

    def _family(self, algorithm: str) -> Engines | Tiles:
        """Return what has an algorithm that is not PyTorch's own; of an id that nobody gave, the engines."""
        return self._tiles if is_tiles(algorithm) else self._engines
