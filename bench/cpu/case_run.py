"""A run over cases that have a process each: training steps, and networks in all ways."""

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from bench.cpu import step_child, way_child
from bench.cpu.lines import Line, Recording, append, read
from bench.cpu.process import ended
from bench.cpu.step_again import TIMEOUT_S
from bench.cpu.step_cases import Network
from bench.cpu.step_lines import StepCase, StepFailed
from bench.cpu.way_cases import WayCase
from bench.cpu.way_lines import WayFailed

_PATIENCE_S = 1200.0
"""By how much a process may pass the time that is left: tuning takes minutes. What it profiled is kept."""

_LEAST_S = 10.0
"""With less time left no process is started."""


class Case(Protocol):
    """What a process measures."""

    @property
    def setting(self) -> str:
        """The name of its thread setting."""

    @property
    def network(self) -> str:
        """The name of its network."""


AnyCase = TypeVar("AnyCase", bound=Case)
Task = TypeVar("Task")


@dataclasses.dataclass(frozen=True)
class Kind(Generic[AnyCase, Task]):
    """A kind of cases.

    Attributes:
        module: what their processes run.
        lines: the name of the file of lines.
        task: makes what a process is told, of a case, its network and the folder.
        failed: makes the line of a case that could not be measured, of the case and the reason.
        known: returns the cases that were measured.
        patience_s: by how many seconds a process may pass the time that is left.
    """

    module: str
    lines: str
    task: Callable[[AnyCase, Network, str], Task]
    failed: Callable[[AnyCase, str], Line]
    known: Callable[[Recording], Collection[AnyCase]]
    patience_s: float = _PATIENCE_S


def steps_in(processes: int) -> Kind[StepCase, step_child.StepTask]:
    """Return the kind of training steps, of which each is timed in so many processes."""
    return Kind(
        "bench.cpu.step_child",
        step_child.LINES,
        functools.partial(step_child.StepTask, processes=processes),
        StepFailed,
        lambda found: found.steps,
        _PATIENCE_S + (processes - 1) * TIMEOUT_S,
    )


WAYS = Kind[WayCase, way_child.WayTask](
    "bench.cpu.way_child", way_child.LINES, way_child.WayTask, WayFailed, lambda found: found.ways
)


class CaseRun(Generic[AnyCase, Task]):
    """One run over cases.

    Args:
        kind: of the cases.
        folder: of lines, profiles and plans.
        networks: that the cases name.
        process: has a process do a task for a case within so many seconds; returns how it ended if not in
            order.
    """

    def __init__(
        self,
        kind: Kind[AnyCase, Task],
        folder: Path,
        networks: Sequence[Network],
        process: Callable[[Task, float], str | None] | None = None,
    ) -> None:
        self._kind = kind
        self._folder = folder
        self._networks = {network.name: network for network in networks}
        self._process = process

    def measure(self, cases: Sequence[AnyCase], seconds: float) -> None:
        """Measure the cases that are not known, one by one; none is begun after `seconds`."""
        start = time.monotonic()
        known = self._known()
        pending = [case for case in cases if case not in known]
        for number, case in enumerate(pending, start=1):
            gone = time.monotonic() - start
            if seconds - gone < _LEAST_S:
                return
            print(
                f"{gone:5.0f} s gone, {seconds - gone:5.0f} s left  {number:3}/{len(pending)}  {case}",
                flush=True,
            )
            self._run(case, seconds - gone)

    def _run(self, case: AnyCase, left_s: float) -> None:
        """Have a process measure a case; one in which it ends or hangs has failed."""
        self._folder.mkdir(parents=True, exist_ok=True)
        task = self._kind.task(case, self._networks[case.network], str(self._folder))
        if self._process is None:
            how = ended(self._kind.module, task, case.setting, left_s + self._kind.patience_s)
        else:
            how = self._process(task, left_s)
        if how is not None and case not in self._known():
            append(self._folder / self._kind.lines, self._kind.failed(case, how))

    def lines(self) -> list[Line]:
        """Return all lines of this run and of earlier ones in the same folder."""
        return read(self._folder / self._kind.lines)

    def _known(self) -> Collection[AnyCase]:
        return self._kind.known(Recording.of(self.lines()))
