"""The probe of idle threads compares worker threads after an operation with the same after a rest."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mucudnn.backends.cpu.spinning import ordinary_operation, spinning_cost
from tests.threads import threads

MS = 1_000_000
"""Nanoseconds of a millisecond."""


class _Machine(TorchDispatchMode):
    """Workers take 3 ms where a multiplication by a number ran last, and 2 ms after a rest."""

    def __init__(self) -> None:
        super().__init__()
        self.spins = False
        self.rests_s: list[float] = []
        self._readings: Iterator[int] = self._read()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.spins = self.spins or str(func) == "aten.mul_.Tensor"
        return func(*args, **(kwargs or {}))

    def sleep(self, seconds: float) -> None:
        self.rests_s.append(seconds)
        self.spins = False

    def clock(self) -> int:
        return next(self._readings)

    def _read(self) -> Iterator[int]:
        now_ns = 0
        while True:
            yield now_ns
            now_ns += 3 * MS if self.spins else 2 * MS
            yield now_ns


def test_the_cost_is_the_time_after_an_operation_relative_to_that_without_spinning() -> None:
    with _Machine() as machine:
        cost = spinning_cost(machine.clock, machine.sleep)

    assert (cost.median, cost.low, cost.high, cost.samples) == (1.5, 1.5, 1.5, 10)
    assert set(machine.rests_s) == {0.05}


@pytest.mark.parametrize(("count", "elements"), [(1, 2**15), (3, 3 * 2**15), (100, 2**20)])
def test_an_ordinary_operation_is_large_enough_for_all_threads_and_at_most_4_mib(
    count: int, elements: int
) -> None:
    with threads(count):
        operation = ordinary_operation()

    # Without acc_events torch 2.11 warns.
    with torch.profiler.profile(record_shapes=True, acc_events=True) as recording:
        operation()

    shapes = [event.input_shapes[0] for event in recording.events() if event.name == "aten::mul_"]
    assert shapes == [[elements]]
