"""Having this process compute in one of the settings."""

import contextlib
from contextlib import AbstractContextManager

import torch

from bench.cpu.settings import SETTINGS


def use(setting: str) -> None:
    """Compute with the threads and the precision of the setting of that name from now on."""
    chosen = SETTINGS[setting]
    torch.set_num_threads(chosen.threads)
    flags = torch.backends.mkldnn.conv  # type: ignore[attr-defined]  # torch's stub forgets it
    flags.fp32_precision = chosen.fp32_precision


def casting_in(setting: str) -> AbstractContextManager[object]:
    """Return a context for the forward pass of a network, which may be entered again and again."""
    if SETTINGS[setting].autocasts:
        return torch.autocast("cpu", torch.bfloat16)
    return contextlib.nullcontext()
