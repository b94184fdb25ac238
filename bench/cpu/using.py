"""Having this process compute in one of the settings."""

import torch

from bench.cpu.settings import SETTINGS


def use(setting: str) -> None:
    """Compute with the threads and the precision of the setting of that name from now on."""
    chosen = SETTINGS[setting]
    torch.set_num_threads(chosen.threads)
    flags = torch.backends.mkldnn.conv  # type: ignore[attr-defined]  # torch's stub forgets it
    flags.fp32_precision = chosen.fp32_precision
