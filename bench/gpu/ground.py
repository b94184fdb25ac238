"""What the questions are put to: one card, with all that it takes to ask it."""

import contextlib
import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from bench.precision import tf32
from mucudnn.backends.cudnn import nvml
from mucudnn.backends.cudnn.backend import CudnnBackend
from mucudnn.backends.cudnn.card import Card, TorchCard
from mucudnn.backends.cudnn.descriptors import Descriptor
from mucudnn.backends.cudnn.devices import DeviceDescription, live_device, live_text
from mucudnn.backends.cudnn.engines import Enumerator
from mucudnn.backends.cudnn.footprint import Allocator, TorchAllocator
from mucudnn.backends.cudnn.graph import operation_graph
from mucudnn.backends.cudnn.handles import Handles
from mucudnn.backends.cudnn.library import Library, load_library
from mucudnn.backends.cudnn.offers import Offers
from mucudnn.backends.cudnn.workshop import Workshop
from mucudnn.problem import ConvProblem

_PATIENCE_S = 45
"""Less than what a section that hangs is given: its answers are to be kept."""

LOST = 3
"""Exit status of a process in which the card works no more, where another process is to go on."""


class Ground(Protocol):
    """One card. What a section measures goes through here, so that it runs on a card on paper too."""

    @property
    def name(self) -> str:
        """The card's name, as its driver calls it."""

    @property
    def library(self) -> Library:
        """cuDNN."""

    @property
    def card(self) -> Card:
        """The card as PyTorch has it."""

    @property
    def backend(self) -> CudnnBackend:
        """That of the tuner, whose lists come from the card itself."""

    @property
    def allocator(self) -> Allocator:
        """PyTorch's, on the card."""

    def description(self) -> DeviceDescription:
        """Return what cuDNN itself says of the card."""

    def told(self) -> str:
        """Return the text in which it says that, read or not."""

    def enumerator(self) -> Enumerator:
        """Return lists and plans by the card itself, under the present flags."""

    def graph(self, problem: ConvProblem) -> Descriptor:
        """Return the graph of `problem` with beta 0, for the card itself."""

    def offers(self, graph: Descriptor) -> Offers:
        """Return what the card itself offers for a graph."""

    def handle(self) -> int | None:
        """Return the calling thread's handle."""

    def used_bytes(self) -> int | None:
        """Return the bytes of the card's memory that are in use, by whomever; None if nobody tells."""

    def conditions(self) -> Mapping[str, str]:
        """Return clocks, temperature and power, as they are now."""

    def precision(self, allow_tf32: bool) -> AbstractContextManager[None]:
        """Let float32 be multiplied in TF32, or not, for a while."""

    def current(self) -> AbstractContextManager[None]:
        """Have the calling thread work on this card for a while."""

    def side_stream(self) -> AbstractContextManager[None]:
        """Put this thread's work on a new stream for a while; the others are waited for before and after."""

    def on_streams(self, calls: Sequence[Callable[[], None]], streams: int) -> None:
        """Make calls on so many streams of their own, in turns, behind and before all else of this thread."""

    def captured(self, call: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Return a replay of `call`, which is captured, and the tensor that each replay fills."""

    def apart(self, module: str, arguments: Sequence[str]) -> list[str]:
        """Return the last line that each of some processes prints, which run `module` on one argument."""


class CardGround:
    """A card of this machine.

    Args:
        index: its number, as PyTorch counts.

    Raises:
        BackendError: cuDNN cannot be used.
    """

    def __init__(self, index: int = 0) -> None:
        self._index = index
        self._streams: list[torch.cuda.Stream] = []  # whose handles are made once
        self.library = load_library()
        self.card: Card = TorchCard(index)
        self.backend = CudnnBackend(self.card, Workshop(self.library, self.card))
        self.allocator: Allocator = TorchAllocator(self.card.device)
        self._handles = Handles(self.library, self.card.stream, self.card.handle)

    @property
    def name(self) -> str:
        """The card's name, as its driver calls it."""
        return torch.cuda.get_device_name(self._index)

    def description(self) -> DeviceDescription:
        """Return what cuDNN itself says of the card."""
        return live_device(self.library, self._index)

    def told(self) -> str:
        """Return the text in which it says that, read or not."""
        return live_text(self.library, self._index)

    def enumerator(self) -> Enumerator:
        """Return lists and plans by the card itself, under the present flags."""
        return Enumerator(self.library, self._handles.here, self.card.rules)

    def graph(self, problem: ConvProblem) -> Descriptor:
        """Return the graph of `problem` with beta 0, for the card itself."""
        return operation_graph(self.library, problem, accumulate=False, handle=self.handle())

    def offers(self, graph: Descriptor) -> Offers:
        """Return what the card itself offers for a graph."""
        return Offers(self.library, self.handle(), graph)

    def handle(self) -> int | None:
        """Return the calling thread's handle."""
        return self._handles.here()

    def used_bytes(self) -> int | None:
        """Return the bytes of the card's memory that are in use, by whomever; None if NVML does not tell."""
        torch.cuda.synchronize(self._index)
        return nvml.used_bytes(self._index)

    def conditions(self) -> Mapping[str, str]:
        """Return clocks, temperature and power, as they are now."""
        return nvml.conditions(self._index)

    def precision(self, allow_tf32: bool) -> AbstractContextManager[None]:
        """Let float32 be multiplied in TF32, or not, for a while."""
        return tf32(allow_tf32)

    def current(self) -> AbstractContextManager[None]:
        """Have the calling thread work on this card for a while."""
        return torch.cuda.device(self._index)

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """Put this thread's work on a new stream for a while; the others are waited for before and after."""
        torch.cuda.synchronize(self._index)
        try:
            with torch.cuda.stream(torch.cuda.Stream(self._index)):
                yield
        finally:
            torch.cuda.synchronize(self._index)

    def on_streams(self, calls: Sequence[Callable[[], None]], streams: int) -> None:
        """Make calls on so many streams of their own, in turns, behind and before all else of this thread."""
        here = torch.cuda.current_stream(self._index)
        while len(self._streams) < streams:
            self._streams.append(torch.cuda.Stream(self._index))
        others = self._streams[:streams]
        for each in others:
            each.wait_stream(here)
        for number, call in enumerate(calls):
            with torch.cuda.stream(others[number % streams]):
                call()
        for each in others:
            here.wait_stream(each)

    def captured(self, call: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Return a replay of `call`, which is captured, and the tensor that each replay fills."""
        graph = torch.cuda.CUDAGraph()
        with collected(), same_stream(), torch.cuda.graph(graph):
            result = call()
        return graph.replay, result

    def apart(self, module: str, arguments: Sequence[str]) -> list[str]:
        """Return the last line that each of some processes prints, all of which run at once."""
        running = [
            subprocess.Popen(
                [sys.executable, "-m", module, argument, str(self._index)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for argument in arguments
        ]
        end = time.monotonic() + _PATIENCE_S
        try:
            return [_last_line(each, end) for each in running]
        finally:
            for each in running:  # none goes on beside what is timed next
                each.kill()


def _last_line(process: "subprocess.Popen[str]", end: float) -> str:
    try:
        printed, _ = process.communicate(timeout=max(end - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"error: no answer after {_PATIENCE_S} s"
    lines = printed.strip().splitlines() or ["nothing was printed"]
    return lines[-1] if process.returncode == 0 else f"error: status {process.returncode}: {lines[-1]}"


@contextlib.contextmanager
def collected() -> Iterator[None]:
    """Collect garbage before and not meanwhile: a plan that is destroyed would break a capture."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def same_stream() -> AbstractContextManager[None]:
    """Have this thread on its present stream again afterwards: a capture that fails leaves it on its own."""
    return torch.cuda.stream(torch.cuda.current_stream())


def described_backend(ground: Ground, description: DeviceDescription) -> CudnnBackend:
    """Return a backend whose lists and plans are made from a description, without a handle."""
    return CudnnBackend(ground.card, Workshop(ground.library, ground.card, description))


def is_alive(ground: Ground) -> bool:
    """Return whether the card still works: after a fault in its memory, every later call fails too."""
    try:
        ground.card.clock()
    except Exception:  # noqa: BLE001  # whatever it says, it does not work
        return False
    return True
