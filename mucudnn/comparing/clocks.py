"""Timing modules within whatever runs them: their forward passes, and autograd's part of these."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn


class Clock(Protocol):
    """Marks moments in what is computed, and tells later what lies between two of them."""

    def begin(self) -> None:
        """Get ready for what is to be marked."""

    def mark(self) -> Any:
        """Mark the present moment, without waiting for a device."""

    def wait(self) -> None:
        """Wait until all marked moments have come."""

    def between_ns(self, start: Any, end: Any) -> int:
        """Return the nanoseconds from one mark to another."""


class HostClock:
    """Times what the host computes.

    Args:
        now_ns: nanoseconds since some moment.
    """

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self.mark = now_ns

    def begin(self) -> None:
        """Nothing is to be done."""

    def wait(self) -> None:
        """Nothing is left to wait for."""

    def between_ns(self, start: int, end: int) -> int:
        """Return the difference."""
        return end - start


_HEAD_START_CYCLES = 10_000_000
"""Of a card, some 5 ms: about as long as a host takes to launch a few hundred kernels."""


class CardClock:
    """Times what a card computes on each thread's stream, while the host runs ahead, as in a long run.

    Args:
        device: the card.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> None:
        """Keep the card busy for a while: else it would wait for the host, as it has nothing to do yet."""
        with torch.cuda.device(self._device):
            torch.cuda._sleep(_HEAD_START_CYCLES)

    def mark(self) -> torch.cuda.Event:
        """Have the stream note the time when it comes here."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self) -> None:
        """Wait for the card."""
        torch.cuda.synchronize(self._device)

    def between_ns(self, start: torch.cuda.Event, end: torch.cuda.Event) -> int:
        """Return what has gone on the stream."""
        milliseconds: float = start.elapsed_time(end)
        return round(milliseconds * 1e6)


@dataclasses.dataclass
class _Span:
    """A forward pass of a module, or a node of autograd's, and what was begun and ended within it."""

    name: str
    start: Any = None
    end: Any = None
    inner: "list[_Span]" = dataclasses.field(default_factory=list)


class ModuleClocks:
    """Counts the nanoseconds of modules while something runs, of all calls of a module together.

    Time that one spends within another counts for the inner one alone: a node of autograd's may compute the
    forward passes of checkpointed modules again.

    Attributes:
        differentiated: names of the modules of which autograd has computed something in the last run.
    """

    def __init__(self, clock: Clock) -> None:
        """Count nothing yet."""
        self._clock = clock
        self.differentiated: set[str] = set()
        self._spans: list[_Span] = []
        self._here = threading.local()

    @contextlib.contextmanager
    def watching(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Have modules counted for a while, by their names."""
        with contextlib.ExitStack() as stack:
            for name, module in modules.items():
                watch = _Watch(self, name)
                # Hooks that others have given the module run before the first of ours and after the last.
                stack.callback(module.register_forward_pre_hook(watch.begin).remove)
                stack.callback(module.register_forward_hook(watch.end_forward, prepend=True).remove)
            yield

    def taken_by(self, run: Callable[[], object]) -> dict[str, int]:
        """Return what each module takes while something is run.

        Modules that are not called, or only in a compiled graph, have no number. Of autograd's work, only the
        node from which a module's result comes is counted.
        """
        self._spans, self._here, self.differentiated = [], threading.local(), set()
        self._clock.begin()
        run()
        self._clock.wait()
        taken: dict[str, int] = {}
        for span in self._spans:
            inner_ns = sum(self._taken_ns(each) for each in span.inner)
            taken[span.name] = taken.get(span.name, 0) + self._taken_ns(span) - inner_ns
        return {name: max(taken_ns, 1) for name, taken_ns in taken.items()}  # so that quotients exist

    def _taken_ns(self, span: _Span) -> int:
        return self._clock.between_ns(span.start, span.end)

    def begin(self, name: str) -> None:
        """Begin a span of a module."""
        span = _Span(name)
        self._open().append(span)
        span.start = self._clock.mark()

    def end(self, name: str) -> None:
        """End the last span of a module; what was begun after it has failed."""
        end, opened = self._clock.mark(), self._open()
        while opened:
            span = opened.pop()
            if span.name == name:
                span.end = end
                self._spans.append(span)
                if opened:
                    opened[-1].inner.append(span)
                return

    def _open(self) -> list[_Span]:
        """The spans of this thread that have begun and not ended, the outermost first."""
        found: list[_Span] | None = getattr(self._here, "spans", None)
        if found is None:
            found = self._here.spans = []
        return found


class _Watch:
    """Counts the passes of one module; copies and pickles, as when a step copies the model, count none."""

    def __init__(self, clocks: ModuleClocks | None, name: str) -> None:
        self._clocks, self._name = clocks, name

    def __reduce__(self) -> "tuple[type[_Watch], tuple[None, str]]":
        return _Watch, (None, self._name)

    def begin(self, *_: Any) -> None:
        """Begin a span."""
        if self._clocks is not None:
            self._clocks.begin(self._name)

    def begin_node(self, *_: Any) -> None:
        """Begin a span of what autograd computes."""
        if self._clocks is not None:
            self._clocks.differentiated.add(self._name)
        self.begin()

    def end(self, *_: Any) -> None:
        """End it."""
        if self._clocks is not None:
            self._clocks.end(self._name)

    def end_forward(self, _module: nn.Module, _inputs: Any, result: Any) -> None:
        """End the span of a forward pass, and have what autograd computes of it counted too."""
        self.end()
        node = getattr(result, "grad_fn", None)
        while node is not None and node.name().startswith("Squeeze"):  # of a sample without a batch
            node = node.next_functions[0][0]
        if node is not None:
            node.register_prehook(self.begin_node)
            node.register_hook(self.end)
