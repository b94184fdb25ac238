"""What PyTorch's flags let cuDNN do for a while: multiply float32 in TF32, and try its plans."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def tf32(is_allowed: bool) -> Iterator[None]:
    """Let convolutions multiply float32 in TF32, or not, for a while."""
    flags = torch.backends.cudnn.conv  # type: ignore[attr-defined]  # newer than torch's hints
    before = flags.fp32_precision
    flags.fp32_precision = "tf32" if is_allowed else "ieee"
    try:
        yield
    finally:
        flags.fp32_precision = before


@contextlib.contextmanager
def benchmark(is_on: bool = True) -> Iterator[None]:
    """Have PyTorch's own find its plan by trying some, in all threads, or take the first one, for a while."""
    flags = torch.backends.cudnn
    before, flags.benchmark = flags.benchmark, is_on
    try:
        yield
    finally:
        flags.benchmark = before
