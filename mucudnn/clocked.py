"""What modules take within whatever runs them: their forward passes, and what autograd computes of these."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from mucudnn.timing import Clock


class ModuleClocks:
    """Counts the nanoseconds of modules while something runs: of each, those of all its calls together."""

    def __init__(self, clock: Clock) -> None:
        """Count nothing yet. The clock of a device that runs behind the host waits for it at every look."""
        self.clock = clock
        self._taken: dict[str, int] = {}

    @contextlib.contextmanager
    def watching(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Have modules counted for a while, by their names."""
        with contextlib.ExitStack() as stack:
            for name, module in modules.items():
                forward = _Span(self, name)
                # The hooks of others run before the first of ours and after the last.
                stack.callback(module.register_forward_pre_hook(forward.begin).remove)
                stack.callback(module.register_forward_hook(forward.end_forward, prepend=True).remove)
            yield

    def taken_by(self, run: Callable[[], object]) -> dict[str, int]:
        """Return what each module takes while something is run.

        Modules that are not called meanwhile, or in a compiled graph, have no number.
        """
        self._taken = {}
        run()
        return self._taken

    def add(self, name: str, span_ns: int) -> None:
        """Count so many nanoseconds more."""
        self._taken[name] = self._taken.get(name, 0) + span_ns


class _Span:
    """A forward pass of a module, or a node of autograd's, from its beginning to its end."""

    def __init__(self, clocks: ModuleClocks, name: str) -> None:
        self._clocks, self._name, self._start_ns = clocks, name, 0

    def begin(self, *_: Any) -> None:
        """Begin to count."""
        self._start_ns = self._clocks.clock()

    def end(self, *_: Any) -> None:
        """Count what has gone."""
        self._clocks.add(self._name, max(self._clocks.clock() - self._start_ns, 1))

    def end_forward(self, _module: nn.Module, _inputs: Any, result: Any) -> None:
        """Count what has gone, and what autograd will compute."""
        self.end()
        node = getattr(result, "grad_fn", None)
        while node is not None and node.name().startswith("Squeeze"):  # of a sample without a batch
            node = node.next_functions[0][0]
        if node is not None:
            backward = _Span(self._clocks, self._name)
            node.register_prehook(backward.begin)
            node.register_hook(backward.end)
