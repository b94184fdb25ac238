"""A run over training steps: a process for each, for as long as there is time."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.cpu.lines import Line, Recording, append, read
from bench.cpu.process import ended
from bench.cpu.step_cases import Network
from bench.cpu.step_child import LINES, StepTask
from bench.cpu.step_lines import StepCase, StepFailed

_PATIENCE_S = 1200.0
"""By how much a process may pass the time that is left: tuning takes minutes. What it profiled is kept."""

_LEAST_S = 10.0
"""With less time left no process is started."""

Process = Callable[[StepTask, float], str | None]


class StepRun:
    """One run over training steps.

    Args:
        folder: of lines, profiles and plans.
        networks: that the cases name.
        process: has a process do a task within so many seconds; returns how it ended if not in order.
    """

    def __init__(self, folder: Path, networks: Sequence[Network], process: Process | None = None) -> None:
        self._folder = folder
        self._networks = {network.name: network for network in networks}
        self._process = process or _ended

    def measure(self, cases: Sequence[StepCase], seconds: float) -> None:
        """Measure the cases that are not known, one by one; none is begun after `seconds`."""
        start = time.monotonic()
        pending = [case for case in cases if case not in self._recording().steps]
        for number, case in enumerate(pending, start=1):
            gone = time.monotonic() - start
            if seconds - gone < _LEAST_S:
                return
            print(
                f"{gone:5.0f} s gone, {seconds - gone:5.0f} s left  {number:3}/{len(pending)}  {case}",
                flush=True,
            )
            self._run(case, seconds - gone)

    def _run(self, case: StepCase, left_s: float) -> None:
        """Have a process measure a case; one in which it ends or hangs has failed."""
        self._folder.mkdir(parents=True, exist_ok=True)
        how = self._process(StepTask(case, self._networks[case.network], str(self._folder)), left_s)
        if how is not None and case not in self._recording().steps:
            append(self._folder / LINES, StepFailed(case, how))

    def lines(self) -> list[Line]:
        """Return all lines of this run and of earlier ones in the same folder."""
        return read(self._folder / LINES)

    def _recording(self) -> Recording:
        return Recording.of(self.lines())


def _ended(task: StepTask, left_s: float) -> str | None:
    return ended("bench.cpu.step_child", task, task.case.setting, left_s + _PATIENCE_S)
