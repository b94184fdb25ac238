"""Telling how far long work has come."""

import contextlib
import io
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Protocol, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

from mucudnn.errors import OptionError
from mucudnn.objects import described, offers

_UNWRITABLE = (AttributeError, OSError, ValueError)
"""What streams raise that lack a method, are broken or are closed."""


class Progress(Protocol):
    """Whoever wants to be told."""

    def begin(self, work: float) -> None:
        """Some work begins; `work` is all of it, in units of its own."""

    def at(self, what: str, done: float) -> None:
        """Now `what` is being done, and so much of the work lies behind."""

    def end(self, measured: int) -> None:
        """The work is done, with so many things really measured; the rest was known."""


ProgressOption = bool | Progress | None
"""Whether progress is told (None: on a terminal and in a notebook), or who is told."""


def check_progress(progress: object) -> None:
    """Verify that `progress` is an option of that name.

    Raises:
        OptionError: it is not.
    """
    if not (progress is None or isinstance(progress, bool) or offers(progress, Progress)):
        raise OptionError(
            "progress must be True, False, None or a Progress (begin, at and end), "
            f"but got {described(progress)}."
        )


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
        self._task = bar.add_task("starting", total=None)

    def begin(self, work: float) -> None:
        """Draw the empty bar."""
        self._bar.update(self._task, total=work)

    def at(self, what: str, done: float) -> None:
        """Move the bar."""
        self._bar.update(self._task, description=what, completed=done)

    def end(self, measured: int) -> None:  # noqa: ARG002  # the protocol's
        """Remove the bar; whoever drew it says what came of the work."""
        self._bar.stop()


class Lines:
    """A line now and then, for output that is no terminal: a log, a notebook, or a batch job's.

    Args:
        stream: where they go.
        clock: seconds.
        every_s: least seconds between two lines; work that takes less says nothing.
    """

    def __init__(
        self, stream: TextIO, clock: Callable[[], float] = time.monotonic, every_s: float = 15.0
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._every_s = every_s
        self._work = 0.0
        self._start_s = self._told_s = clock()

    def begin(self, work: float) -> None:
        """Begin to count the seconds."""
        self._work = work
        self._start_s = self._told_s = self._clock()

    def at(self, what: str, done: float) -> None:
        """Tell how much is done, if it is time to."""
        now_s = self._clock()
        if now_s - self._told_s >= self._every_s:
            self._told_s = now_s
            self._tell(f"{done / self._work:.0%} after {now_s - self._start_s:.0f} s, {what}")

    def end(self, measured: int) -> None:
        """Tell how long it took, if anything was told."""
        if self._told_s > self._start_s:
            self._tell(f"done after {self._clock() - self._start_s:.0f} s, {measured} measured")

    def _tell(self, text: str) -> None:
        self._stream.write(f"mucudnn: {text}\n")
        self._stream.flush()


class Work:
    """Work made of steps, each of which is done once, however often it is met.

    Args:
        progress: who is told.
        steps: what the steps take, in one unit.
    """

    def __init__(self, progress: Progress, steps: Mapping[Hashable, float]) -> None:
        self._progress = progress
        self._left = dict(steps)
        self._done = 0.0
        self._what, self._is_waiting = "", False
        progress.begin(sum(steps.values()))

    def at(self, what: str) -> None:
        """Tell what is being done now."""
        self._what, self._is_waiting = what, False
        self._progress.at(what, self._done)

    def wait(self, what: str) -> None:
        """Tell what it waits for, until it goes on."""
        self._is_waiting = True
        self._progress.at(what, self._done)

    def go_on(self) -> None:
        """Tell again what is being done, if it has waited meanwhile."""
        if self._is_waiting:
            self.at(self._what)

    def finish(self, *steps: Hashable) -> None:
        """Count some steps as done, unless they were."""
        self._done += sum(self._left.pop(step, 0.0) for step in steps)

    def end(self, measured: int) -> None:
        """Tell that all is done."""
        self._progress.end(measured)


class _StandardError(io.TextIOBase):
    """Standard error, whatever the program has put there; what cannot be written is not said.

    It may be None, closed at any time, or an object that does no more than write.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stream = sys.stderr

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed has a variable
        """That of the stream."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Return whether it is a terminal that can be written to."""
        with contextlib.suppress(*_UNWRITABLE):
            return self._stream.isatty()
        return False

    def is_notebook(self) -> bool:
        """Return whether it is shown in a notebook (Jupyter, Colab and others by IPython's kernel)."""
        return type(self._stream).__module__.partition(".")[0] == "ipykernel"

    def write(self, text: str) -> int:
        """Pass the text on."""
        with contextlib.suppress(*_UNWRITABLE):
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                known = text.encode(self.encoding, "replace").decode(self.encoding)
                self._stream.write(known)
        return len(text)

    def flush(self) -> None:
        """Have it shown now."""
        with contextlib.suppress(*_UNWRITABLE):
            self._stream.flush()


@contextlib.contextmanager
def progress_for(wish: ProgressOption) -> Iterator[Progress]:
    """Yield what is told: a bar on a terminal, lines in notebooks and, for True, elsewhere; or nobody."""
    error = _StandardError()
    stream = cast("TextIO", error)
    if wish is None:
        wish = error.isatty() or error.is_notebook()
    if not isinstance(wish, bool):
        yield wish
    elif not wish:
        yield Silence()
    elif not stream.isatty():
        yield Lines(stream)
    else:
        columns = (
            TimeElapsedColumn(),
            BarColumn(bar_width=16),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("left,"),
            TextColumn(
                "{task.description}",
                markup=False,  # a module's name may have brackets
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
        )
        with RichProgress(*columns, console=Console(file=stream), transient=True, expand=True) as bar:
            yield Bar(bar)
