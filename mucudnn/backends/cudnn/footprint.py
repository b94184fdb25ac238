"""How much a piece of work takes from PyTorch's allocator on a device, beside operands and result."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from mucudnn.backends.base import Job, Prepared
from mucudnn.backends.failures import is_lack_of_memory
from mucudnn.errors import UnmeasuredError

_ALLOWANCE_BYTES = 32 * 2**20
"""By how much the allocator's reserve may pass the limit: it takes blocks of 2 or 20 MiB from the driver."""

_WEIGHINGS = 2
"""The first run of a kind may take what stays for all that come later; the lesser counts."""

_KNOWN_BYTES = 16 * 2**20
"""What is taken to see whether an allocator counts."""

_MORE_THAN_ALL_BYTES = 2**50
"""What no device has; limits may be larger."""

_ASSERTION = "INTERNAL ASSERT FAILED"
"""Of PyTorch's allocator, where it refuses memory without counting that: see `is_lack_of_memory`."""


class Allocator(Protocol):
    """What an allocator tells of a device, and how it is held to a limit."""

    def settle(self) -> None:
        """Wait for the device, give back what is cached, and forget the peak."""

    def piece(self, n_bytes: int) -> object:
        """Return memory of so many bytes, which goes back when nobody has it any more.

        Raises:
            RuntimeError: there is not as much, which `is_lack_of_memory`.
        """

    def allocated_bytes(self) -> int:
        """Return the bytes that are asked for now."""

    def peak_bytes(self) -> int:
        """Return the most bytes that were asked for at once since `settle`, once the device is done."""

    def refusals(self) -> int:
        """Return how often memory was refused so far."""

    def held_to(self, n_bytes: int) -> AbstractContextManager[None]:
        """Refuse whatever goes beyond what is taken now, and `n_bytes`; a few blocks more may pass."""


class TorchAllocator:
    """PyTorch's allocator on one card; its peak statistics start anew with every weighing.

    The caching one keeps them. Others may say that nothing was ever asked for: see `check_counts`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def settle(self) -> None:
        """Wait for the device, give back what is cached, and forget the peak."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def piece(self, n_bytes: int) -> torch.Tensor:
        """Return memory of so many bytes, which goes back when nobody has it any more."""
        return torch.empty(n_bytes, dtype=torch.uint8, device=self._device)

    def allocated_bytes(self) -> int:
        """Return the bytes that are asked for now; blocks may be larger by up to 2 MiB each."""
        return self._told("requested_bytes.all.current")

    def peak_bytes(self) -> int:
        """Return the most bytes that were asked for at once since `settle`, once the device is done."""
        torch.cuda.synchronize(self._device)
        return self._told("requested_bytes.all.peak")

    def refusals(self) -> int:
        """Return how often memory was refused so far."""
        return self._told("num_ooms")

    def _told(self, name: str) -> int:
        return int(torch.cuda.memory_stats(self._device).get(name, 0))

    @contextlib.contextmanager
    def held_to(self, n_bytes: int) -> Iterator[None]:
        """Refuse whatever goes beyond what is taken now, and `n_bytes`; a few blocks more may pass."""
        total = torch.cuda.get_device_properties(self._device).total_memory
        former = torch.cuda.get_per_process_memory_fraction(self._device)
        allowed = torch.cuda.memory_reserved(self._device) + n_bytes + _ALLOWANCE_BYTES
        torch.cuda.set_per_process_memory_fraction(min(former, allowed / total), self._device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(former, self._device)


def check_counts(allocator: Allocator) -> None:
    """Raise unless the allocator tells of 16 MiB that are taken from it.

    One that does not would have PyTorch's own convolution weigh nothing, which then fits any limit. PyTorch
    says of "backend:cudaMallocAsync" that some statistics are always zero; without caching it keeps none.

    Raises:
        UnmeasuredError: it does not.
    """
    allocator.settle()
    before = allocator.allocated_bytes()
    piece = allocator.piece(_KNOWN_BYTES)
    seen = allocator.peak_bytes() - before
    del piece
    if seen < _KNOWN_BYTES:
        raise UnmeasuredError(
            f"PyTorch's allocator must count what is asked of it, but of {_KNOWN_BYTES} bytes told {seen}, "
            "so that the workspace of PyTorch's own convolution cannot be weighed: leave "
            "backend:cudaMallocAsync out of PYTORCH_CUDA_ALLOC_CONF (or PYTORCH_ALLOC_CONF), and "
            "PYTORCH_NO_CUDA_MEMORY_CACHING unset."
        )


def taken_bytes(job: Job, limit_bytes: int, allocator: Allocator) -> int | None:
    """Return the most bytes that a job holds at once beside operands and result; None if it was refused some.

    The process is held to the limit meanwhile. PyTorch's convolution then takes another algorithm if the
    first one's workspace is refused, which it would not do later: so that it was refused any is what counts.

    Raises:
        RuntimeError: it was refused some, and the device has not left what the limit allows: that
            `is_lack_of_memory`. Or it fails for another reason.
    """
    prepared = job.prepare()
    weights = [_weigh(prepared, limit_bytes, allocator) for _ in range(_WEIGHINGS)]
    # One refusal is enough: what was refused once is not asked for again, but would be without the limit.
    known = [weight for weight in weights if weight is not None]
    return min(known) if len(known) == len(weights) else None


def _weigh(prepared: Prepared, limit_bytes: int, allocator: Allocator) -> int | None:
    allocator.settle()
    before, refusals = allocator.allocated_bytes(), allocator.refusals()
    allowed_bytes = prepared.result_bytes + limit_bytes
    result: object = None
    is_refused = False
    with allocator.held_to(allowed_bytes):
        try:
            result = prepared.run()
            peak = allocator.peak_bytes()
        except RuntimeError as failure:  # out of memory, or "unable to find an engine" because of that
            is_refused = _ASSERTION in str(failure) and is_lack_of_memory(failure)
            if not is_refused and allocator.refusals() == refusals:
                raise
    if is_refused or allocator.refusals() > refusals:
        del result
        # Is refused too where the device has less left than the limit allows, so that this says nothing.
        allocator.piece(min(allowed_bytes, _MORE_THAN_ALL_BYTES))
        return None
    # The result, if it is new, is still there.
    kept = allocator.allocated_bytes() if prepared.result_bytes else before
    del result
    return peak - kept
