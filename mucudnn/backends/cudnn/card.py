"""The card as PyTorch has it: streams, memory, flags, and a clock that waits for it."""

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mucudnn.algorithms.base import memory_format
from mucudnn.backends.base import Job, Queue
from mucudnn.backends.cudnn import compiler
from mucudnn.backends.cudnn.compiler import KernelLaunch
from mucudnn.backends.cudnn.configurations import Rules
from mucudnn.backends.cudnn.environment import (
    Obstacle,
    device_facts,
    obstacle_to_products,
    present_environment,
    present_rules,
)
from mucudnn.backends.cudnn.footprint import TorchAllocator, check_counts, taken_bytes
from mucudnn.backends.cudnn.handles import Handle
from mucudnn.backends.cudnn.library import Library
from mucudnn.errors import BackendError, BackendWarning, warn_user
from mucudnn.locks import ForkSafeLock, cached_property
from mucudnn.problem import ConvProblem
from mucudnn.profile import Environment

_AS_IT_IS = nullcontext()
_ALL = 2**31
_CUDNN = ("Cudnn", "CudnnTranspose")


def pytorchs_choice(problem: ConvProblem, device: torch.device) -> str:
    """Return PyTorch's name of the implementation that it takes for a convolution; nothing is computed."""
    with FakeTensorMode():
        dtype: torch.dtype = getattr(torch, problem.dtype)
        is_transposed = problem.is_apart
        images = problem.output_shape if is_transposed else problem.input_shape
        image, weight = (
            torch.empty(shape, dtype=dtype, device=device).contiguous(
                memory_format=memory_format(problem.layout, len(shape))
            )
            for shape in (images, problem.filter_shape)
        )
        more = problem.output_padding if is_transposed else (0,) * len(problem.stride)
        arguments = (problem.stride, problem.padding, problem.dilation, is_transposed, more)
        return str(torch._C._select_conv_backend(image, weight, None, *arguments, problem.groups).name)


class Card(Protocol):
    """What the backend must know of a card beside cuDNN itself."""

    @property
    def device(self) -> torch.device:
        """Where its tensors lie."""

    @property
    def kind(self) -> str:
        """What is equal for cards of which times are comparable; cheap to ask."""

    @property
    def rules(self) -> Rules:
        """What PyTorch's flags permit now."""

    @property
    def uses_cudnn(self) -> bool:
        """Whether PyTorch may use cuDNN at all."""

    @property
    def tries_plans(self) -> bool:
        """Whether PyTorch tries cuDNN's plans before it settles for one, if only the first."""

    @property
    def plans_tried(self) -> int:
        """How many of cuDNN's plans PyTorch tries before it settles for one; 1 if it tries none."""

    def runs_cudnn(self, problem: ConvProblem) -> bool:
        """Return whether PyTorch's own convolution is cuDNN's, rather than a kernel of PyTorch's."""

    def clock(self) -> int:
        """Return nanoseconds of the host, once the card has done what it was given."""

    def current(self) -> AbstractContextManager[None]:
        """Make the card the calling thread's current one for a while."""

    @property
    def is_capturing(self) -> bool:
        """Whether the stream on which the calling thread puts its work is being captured."""

    def stream(self) -> int:
        """Return the address of the stream on which the calling thread puts its work now."""

    def queue(self) -> Queue:
        """Return the queue of that stream."""

    def handle(self, library: Library) -> Handle:
        """Return a new handle of cuDNN on this card."""

    @property
    def can_compile(self) -> bool:
        """Whether kernels can be compiled for it; asked while the card is current."""

    def compiled(self, source: str, kernel: str) -> KernelLaunch:
        """Return what launches the kernel of that name in `source`; called while the card is current.

        Raises:
            BackendError: it cannot be compiled.
        """

    def obstacle_to_products(self, dtype: str) -> Obstacle | None:
        """Return what keeps matrices of `dtype` from being multiplied now, with the rounding of that type."""

    def environment(self, cudnn_version: int | None) -> Environment:
        """Return all that a time measured now depends on."""

    def weigh(self, job: Job, limit_bytes: int) -> int | None:
        """Return the bytes that a job takes beside operands and result; None if it was refused some.

        Raises:
            UnmeasuredError: nobody counts them.
        """


def check_not_capturing(card: Card, what: str) -> None:
    """Raise unless `what`, the first words of a sentence, may be done on `card` now.

    Raises:
        BackendError: the thread's stream there is being captured.
    """
    if card.is_capturing:
        raise BackendError(
            f"{what} must happen before a CUDA graph is captured, but one is: run the model once, on the "
            "same shapes and in the same threads, and capture it then."
        )


class TorchCard:
    """A card of this machine.

    Args:
        index: its number, as PyTorch counts.
    """

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self._index = index
        self._allocator = TorchAllocator(self.device)
        self._queues: dict[int, Queue] = {}
        self._making = ForkSafeLock()
        # What torch.cuda.current_stream asks, without a Python object for every launch.
        self._raw_stream = torch._C._cuda_getCurrentRawStream

    @cached_property
    def kind(self) -> str:
        """The facts of the card by which an environment knows it, which never change, in one text."""
        return str(device_facts(self._index))  # whose hash is worked out once, unlike that of a tuple

    @property
    def rules(self) -> Rules:
        """What PyTorch's flags permit now."""
        return present_rules()

    @property
    def uses_cudnn(self) -> bool:
        """Whether PyTorch may use cuDNN at all."""
        return torch.backends.cudnn.enabled

    @property
    def tries_plans(self) -> bool:
        """Whether PyTorch tries cuDNN's plans before it settles for one, if only the first."""
        return torch.backends.cudnn.benchmark

    @property
    def plans_tried(self) -> int:
        """How many of cuDNN's plans PyTorch tries before it settles for one; 1 if it tries none."""
        cudnn = torch.backends.cudnn
        return (cudnn.benchmark_limit or _ALL) if cudnn.benchmark else 1  # a limit of 0 is none

    def runs_cudnn(self, problem: ConvProblem) -> bool:
        """Return whether PyTorch's own convolution is cuDNN's, rather than a kernel of PyTorch's."""
        return pytorchs_choice(problem, self.device) in _CUDNN

    def clock(self) -> int:
        """Return nanoseconds of the host, once the card has done what it was given."""
        torch.cuda.synchronize(self.device)
        return time.perf_counter_ns()

    def current(self) -> AbstractContextManager[None]:
        """Make the card the calling thread's current one for a while: new threads start on the first."""
        if torch.cuda.current_device() == self._index:  # as it mostly is; to ask costs less than to set
            return _AS_IT_IS
        return torch.cuda.device(self._index)

    @property
    def is_capturing(self) -> bool:
        """Whether the calling thread's stream on this card is being captured, whichever card is current."""
        with self.current():
            return torch.cuda.is_current_stream_capturing()

    def stream(self) -> int:
        """Return the address of the stream on which the calling thread puts its work now."""
        address: int = self._raw_stream(self._index)
        return address

    def queue(self) -> Queue:
        """Return the queue of that stream: threads that put work on one stream share it."""
        address = self.stream()
        found = self._queues.get(address)
        if found is None:
            with self._making:
                found = self._queues.setdefault(address, Queue())
        return found

    def handle(self, library: Library) -> Handle:
        """Return a new handle of cuDNN, made while this card is the current one."""
        check_not_capturing(self, "Making a handle of cuDNN")
        with torch.cuda.device(self.device):
            return Handle(library)

    @cached_property
    def can_compile(self) -> bool:
        """Whether CuPy is installed, and works; a warning says so if it does not."""
        if compiler.version() is None:
            return False
        check_not_capturing(self, "Looking for a compiler")
        try:
            compiler.compiled(compiler.NOTHING, "nothing")
        except BackendError as error:
            warn_user(
                f"Winograd and FFT in strict float32 and in float64 cannot be compiled. {error}",
                BackendWarning,
            )
            return False
        return True

    def compiled(self, source: str, kernel: str) -> KernelLaunch:
        """Return what launches the kernel of that name in `source`, compiled by CuPy."""
        return compiler.compiled(source, kernel)

    def obstacle_to_products(self, dtype: str) -> Obstacle | None:
        """Return what in PyTorch's flags keeps cuBLAS from multiplying matrices of `dtype` now."""
        return obstacle_to_products(dtype)

    def environment(self, cudnn_version: int | None) -> Environment:
        """Return card, libraries and flags, as they are now."""
        return present_environment(self._index, cudnn_version)

    def weigh(self, job: Job, limit_bytes: int) -> int | None:
        """Return the bytes that a job takes from PyTorch's allocator; None if it was refused some.

        The workspace of cuBLAS, which PyTorch keeps for good for every thread and stream, is there before.

        Raises:
            UnmeasuredError: the allocator does not count.
        """
        torch.cuda.current_blas_handle()
        return taken_bytes(job, limit_bytes, self._counting_allocator)

    @cached_property
    def _counting_allocator(self) -> TorchAllocator:
        """The allocator, of which is known that it counts; that it does not is told each time."""
        check_counts(self._allocator)
        return self._allocator
