"""What the driver tells of a card: clocks, temperature, and memory that no allocator sees."""

import contextlib
import functools
from typing import Any

import pynvml
import torch

UNKNOWN = "unknown"


def driver_version() -> str:
    """Return the driver's version, or "unknown" where NVML does not tell."""
    with contextlib.suppress(pynvml.NVMLError):
        _open()
        return str(pynvml.nvmlSystemGetDriverVersion())
    return UNKNOWN


def conditions(index: int) -> dict[str, str]:
    """Return clocks, temperature and power of a card, as they are now; what NVML does not tell is left out.

    Args:
        index: the card's number, as PyTorch counts.
    """
    facts: dict[str, str] = {}
    with contextlib.suppress(pynvml.NVMLError):
        _open()
        card = _card(index)
        facts["SM clock"] = f"{pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_SM)} MHz"
        facts["memory clock"] = f"{pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_MEM)} MHz"
        facts["temperature"] = f"{pynvml.nvmlDeviceGetTemperature(card, pynvml.NVML_TEMPERATURE_GPU)} °C"
        facts["power"] = f"{pynvml.nvmlDeviceGetPowerUsage(card) / 1000:.0f} W"
    return facts


def used_bytes(index: int) -> int | None:
    """Return the bytes of a card's memory that are in use, by whomever; None where NVML does not tell."""
    with contextlib.suppress(pynvml.NVMLError):
        _open()
        return int(pynvml.nvmlDeviceGetMemoryInfo(_card(index)).used)
    return None


def _card(index: int) -> Any:
    """Return NVML's handle: by the card's own id, since CUDA may number the cards in another order."""
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if uuid is not None:
        with contextlib.suppress(pynvml.NVMLError):
            return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    return pynvml.nvmlDeviceGetHandleByIndex(index)


@functools.cache
def _open() -> None:
    """Have NVML ready, as long as this process lives: to open it takes tens of milliseconds."""
    pynvml.nvmlInit()
