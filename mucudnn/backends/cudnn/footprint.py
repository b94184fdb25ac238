"""How much a piece of work takes from PyTorch's allocator on a device, beside operands and result."""

import contextlib
from collections.abc import Iterator

import torch

from mucudnn.backends.base import Job, Prepared

ALLOWANCE_BYTES = 32 * 2**20
"""By how much the allocator's reserve may pass the limit: it takes blocks of 2 or 20 MiB from the driver."""

_WEIGHINGS = 2
"""The first run of a kind may take what stays for all that come later; the lesser counts."""


def allocated_bytes(job: Job, limit_bytes: int, device: torch.device) -> int | None:
    """Return the most bytes that a job holds at once beside operands and result; None if above the limit.

    The process is held to the limit meanwhile. PyTorch's convolution then takes another algorithm if the
    first one's workspace is refused, which it would not do later: that counts as above the limit too.
    """
    prepared = job.prepare()
    weights = [_weigh(prepared, limit_bytes, device) for _ in range(_WEIGHINGS)]
    known = [weight for weight in weights if weight is not None]
    return min(known) if known and min(known) <= limit_bytes else None


def _weigh(prepared: Prepared, limit_bytes: int, device: torch.device) -> int | None:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    failures = _failures(device)
    with _capped(prepared.result_bytes + limit_bytes, device):
        try:
            result = prepared.run()
            torch.cuda.synchronize(device)
        except torch.OutOfMemoryError:
            return None
    peak = torch.cuda.max_memory_allocated(device)
    after = torch.cuda.memory_allocated(device)
    is_new = prepared.result_bytes > 0 and result is not None
    if _failures(device) > failures:
        return None
    return peak - (after if is_new else before)


def _failures(device: torch.device) -> int:
    """Return how often the allocator has refused memory so far."""
    return int(torch.cuda.memory_stats(device).get("num_ooms", 0))


@contextlib.contextmanager
def _capped(n_bytes: int, device: torch.device) -> Iterator[None]:
    """Hold PyTorch's allocator to what it has now and `n_bytes` more, and its allowance."""
    total = torch.cuda.get_device_properties(device).total_memory
    former = torch.cuda.get_per_process_memory_fraction(device)
    allowed = torch.cuda.memory_reserved(device) + n_bytes + ALLOWANCE_BYTES
    torch.cuda.set_per_process_memory_fraction(min(former, allowed / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(former, device)
