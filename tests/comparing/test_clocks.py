"""What modules take within whatever runs them; `test_steps` has the rest, on a program's step."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor, nn, zeros
from torch.autograd import Function

from mucudnn.comparing.clocks import ModuleClocks


class Telling:
    """A clock of one tick for each mark, which tells what it was asked."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def begin(self) -> None:
        self.told.append("begin")

    def mark(self) -> int:
        self.told.append("mark")
        return len(self.told)

    def wait(self) -> None:
        self.told.append("wait")

    def between_ns(self, start: int, end: int) -> int:
        return end - start


def test_a_clock_gets_ready_before_what_runs_and_waits_after_it() -> None:
    clock, module = Telling(), nn.Linear(2, 2)
    clocks = ModuleClocks(clock)

    with clocks.watching({"only": module}):
        taken = clocks.taken_by(lambda: (clock.told.append("run"), module(zeros(1, 2))))

    assert clock.told == ["begin", "run", "mark", "mark", "wait"]
    assert taken == {"only": 1}


def test_what_began_within_something_else_and_failed_counts_as_that() -> None:
    clocks = ModuleClocks(Telling())

    def run() -> None:
        clocks.begin("outer")
        clocks.begin("failed")
        clocks.end("outer")

    assert clocks.taken_by(run) == {"outer": 2}


def test_threads_have_spans_of_their_own() -> None:
    clocks = ModuleClocks(Telling())

    def run() -> None:
        clocks.begin("one")
        with ThreadPoolExecutor(1) as other:
            other.submit(clocks.begin, "two").result()
            clocks.end("one")
            other.submit(clocks.end, "two").result()

    assert clocks.taken_by(run) == {"one": 2, "two": 2}


def test_what_was_differentiated_is_told_of_the_last_run() -> None:
    clocks, module = ModuleClocks(Telling()), nn.Linear(2, 2)
    differentiated = []

    with clocks.watching({"only": module}):
        for run in (lambda: module(zeros(1, 2)).sum().backward(), lambda: module(zeros(1, 2))):
            clocks.taken_by(run)
            differentiated.append(clocks.differentiated)

    assert differentiated == [{"only"}, set()]


class Slow(Function):
    """Takes five ticks of a clock to differentiate."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, clock: Telling) -> Tensor:
        ctx.clock = clock
        return image.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.clock.told += ["compute"] * 5
        return gradient, None


class OfOneSample(nn.Module):
    """Computes a batch of one, and returns the sample."""

    def forward(self, image: Tensor, clock: Telling) -> Tensor:
        result: Tensor = Slow.apply(image[None], clock)
        return result.squeeze(0)


def test_of_a_sample_without_a_batch_what_computes_its_batch_counts() -> None:
    clock, module, image = Telling(), OfOneSample(), zeros(2).requires_grad_()
    clocks = ModuleClocks(clock)

    with clocks.watching({"only": module}):
        taken = clocks.taken_by(lambda: module(image, clock).sum().backward())

    assert taken == {"only": 1 + 6}  # from one mark to the next, and over five ticks
