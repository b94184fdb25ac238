"""What modules take within whatever runs them; `test_steps` has the rest, on a program's step."""

from torch import nn, zeros

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
