"""What the system says of the processor."""

import platform
from pathlib import Path

from mucudnn.interruptions import pass_on_interruption

_TOLD = Path("/proc/cpuinfo")


def processor_facts() -> dict[str, str]:
    """Return the first processor's lines of /proc/cpuinfo; where there is none, what Python knows."""
    try:
        text = _TOLD.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError as error:
        pass_on_interruption(error)
        return {"model name": platform.processor()}
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
