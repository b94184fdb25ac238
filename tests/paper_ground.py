"""A card on paper to which all questions of `bench.gpu` can be put, and layers that the processor can run."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from bench.gpu import misaligned
from bench.gpu.layers import Layer
from mucudnn.backends.cudnn.backend import CudnnBackend
from mucudnn.backends.cudnn.configurations import Rules
from mucudnn.backends.cudnn.descriptors import Descriptor
from mucudnn.backends.cudnn.devices import DeviceDescription, device_described
from mucudnn.backends.cudnn.engines import Enumerator
from mucudnn.backends.cudnn.graph import operation_graph
from mucudnn.backends.cudnn.library import Library
from mucudnn.backends.cudnn.offers import Offers
from mucudnn.problem import ConvProblem
from tests.cudnn.paper import PaperCard, PaperLibrary, paper_backend

LAYERS = {
    "small": Layer(8, (6, 6), 8, kernel=3, padding=1, batch=8),
    "small3d": Layer(8, (3, 4, 4), 8, kernel=3, padding=1, batch=2),
}
SMALL = LAYERS["small"]

SPAN_NS = 100_000
"""What passes between two looks at the clock of the card on paper, enough for a span of one call."""


PLAIN_STREAM = 7


class NoMemory:
    """An allocator of a card that has none."""

    def settle(self) -> None:
        pass

    def allocated_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0


_SIDE_STREAM = 1000


class PaperGround:
    """The ground of a card on paper: described by the shipped H200, computed on the processor."""

    name = "NVIDIA H200"

    def __init__(self, real: Library) -> None:
        self.paper = PaperLibrary(real)
        self.library = self.paper.library
        self.card = PaperCard()
        looks = itertools.count(0, SPAN_NS)
        self.card.clock = lambda: next(looks)
        self._streams = itertools.count(100)
        self._here = threading.local()
        self.card.stream = lambda: getattr(self._here, "stream", PLAIN_STREAM)
        self.backend: CudnnBackend = paper_backend(self.paper, self.card)
        self.backend.least_span_ns = 1
        self.allocator = NoMemory()

    def description(self) -> DeviceDescription:
        return device_described("h200")

    def told(self) -> str:
        return self.description().text

    def enumerator(self) -> Enumerator:
        return Enumerator(self.library, self.description(), self.card.rules)

    def graph(self, problem: ConvProblem) -> Descriptor:
        return operation_graph(self.library, problem, accumulate=False)

    def offers(self, graph: Descriptor) -> Offers:
        return Offers(self.library, self.description().descriptor(self.library), graph)

    def handle(self) -> int | None:
        return None

    def used_bytes(self) -> int | None:
        return None

    def conditions(self) -> Mapping[str, str]:
        return {"SM clock": "0 MHz"}

    @contextlib.contextmanager
    def precision(self, allow_tf32: bool) -> Iterator[None]:
        before, self.card.rules = self.card.rules, Rules(allow_tf32=allow_tf32)
        yield
        self.card.rules = before

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        with self.card.current():
            yield

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """Of this thread alone, as on a card."""
        self._here.stream = next(self._streams)
        yield
        del self._here.stream

    def on_streams(self, calls: Sequence[Callable[[], None]], streams: int) -> None:
        """In turns, on streams that are not the thread's own."""
        before = getattr(self._here, "stream", PLAIN_STREAM)
        for number, call in enumerate(calls):
            self._here.stream = _SIDE_STREAM + number % streams
            call()
        self._here.stream = before

    def captured(self, call: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """A replay fills the same tensor again; whatever may not happen in a capture raises."""
        self.card.is_capturing = True
        try:
            result = call()
        finally:
            self.card.is_capturing = False

        def replay() -> None:
            result.copy_(call())

        return replay, result

    def apart(self, module: str, arguments: Sequence[str]) -> list[str]:
        problems = [misaligned.ARGUMENTS[argument].with_batch(1) for argument in arguments]
        return [misaligned.outcome(self, problem) for problem in problems]
