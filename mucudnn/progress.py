"""Telling how far long work has come."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Progress(Protocol):
    """Whoever wants to be told."""

    def begin(self, work: float) -> None:
        """Some work begins; `work` is all of it, in units of its own."""

    def at(self, what: str, done: float) -> None:
        """Now `what` is being done, and so much of the work lies behind."""

    def end(self, measured: int) -> None:
        """The work is done, with so many things really measured; the rest was known."""


class Silence:
    """Tells nobody."""

    def begin(self, work: float) -> None:
        """Say nothing."""

    def at(self, what: str, done: float) -> None:
        """Say nothing."""

    def end(self, measured: int) -> None:
        """Say nothing."""


class Bar:
    """A bar on standard error, with the time that has gone and the time that is left by its own reckoning."""

    def __init__(self, bar: RichProgress) -> None:
        self._bar = bar
        self._task = bar.add_task("tuning", total=None)

    def begin(self, work: float) -> None:
        """Draw the empty bar."""
        self._bar.update(self._task, total=work)

    def at(self, what: str, done: float) -> None:
        """Move the bar."""
        self._bar.update(self._task, description=what, completed=done)

    def end(self, measured: int) -> None:  # noqa: ARG002  # the protocol's
        """Remove the bar; whoever drew it says what came of the work."""
        self._bar.stop()


@contextlib.contextmanager
def progress_for(wish: "bool | Progress | None") -> Iterator[Progress]:
    """Yield what is to be told: a bar for True, nobody for False, for None a bar on a terminal only."""
    if wish is None:
        wish = sys.stderr.isatty()
    if not isinstance(wish, bool):
        yield wish
    elif not wish:
        yield Silence()
    else:
        columns = (
            TextColumn("{task.description:42.42}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
            yield Bar(bar)
