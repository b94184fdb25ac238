"""Whether cuDNN may multiply float32 in TF32."""

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
