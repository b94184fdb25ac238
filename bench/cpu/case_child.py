"""What the process of a case does: a training step's, or that of a network in all ways."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bench.cpu.lines import Line, Started, append
from bench.cpu.process import reason_of
from bench.cpu.products import gemm_rate
from bench.cpu.using import use
from mucudnn.backends import backend_of
from mucudnn.errors import MucudnnError

Measured = TypeVar("Measured", bound=Line)
Failed = TypeVar("Failed", bound=Line)


def work(
    setting: str,
    lines: Path,
    measure: Callable[[], Measured],
    failed: Callable[[str], Failed],
    told: Callable[[Measured | Failed], str],
) -> None:
    """Measure a case; write what the process found when it started, and the line of the case.

    Args:
        setting: name of the thread setting.
        lines: the file of lines.
        measure: returns the line.
        failed: makes the line of a case that could not be measured, of the reason.
        told: returns what is printed of a line.
    """
    use(setting)
    append(lines, Started(setting, backend_of("cpu:").environment()))
    append(lines, gemm_rate(setting))
    line: Measured | Failed
    try:
        line = measure()
    except (MucudnnError, RuntimeError, MemoryError, ValueError) as error:
        line = failed(reason_of(error))
    append(lines, line)
    print(f"  {told(line)}", flush=True)
