"""What convolutions take within a model, on a clock that they move themselves."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bench.by_hand import a_plan_for
from bench.cpu import within as tested
from bench.cpu.way_lines import OWN, PATCHED, Within
from bench.cpu.within import MOST_ROUNDS, within
from mucudnn import Plan
from mucudnn.backends.cpu.backend import CpuBackend
from mucudnn.division import undivided
from mucudnn.evidence import CallEvidence
from mucudnn.intervals import Estimate, Verdict

IMAGES = torch.zeros(8, 4, 5, 5)


class Clock:
    """Stands for the module `time`."""

    now_ns = 0

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def monotonic(self) -> float:
        return self.now_ns * 1e-9


class Timed(CpuBackend):
    """The processor, by that clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._ticking = clock

    @property
    def clock(self) -> Callable[[], int]:
        return self._ticking.perf_counter_ns


class Network(nn.Module):
    """Runs one convolution twice, and another once."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, image: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(self.first(image)))
        return result


class Taking(nn.Module):
    """Takes so many nanoseconds."""

    def __init__(self, clock: Clock, ns: int) -> None:
        super().__init__()
        self._clock, self._ns = clock, ns

    def forward(self, image: Tensor) -> Tensor:
        self._clock.now_ns += self._ns
        return image


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(tested, "time", clock)
    return clock


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Both are divided, and a third one is PyTorch's own; the tuner knows what the second is worth."""
    with torch.no_grad():
        made = a_plan_for(Network(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3)).eval(), IMAGES)
    own, second = made.assignments[0], Estimate(2.5, 2.5, 2.5, 10)
    site, division = dataclasses.replace(own.site, path="third"), undivided("cpu:aten", 8)
    return dataclasses.replace(
        made,
        assignments=(*made.assignments, dataclasses.replace(own, site=site, division=division)),
        calls=(CallEvidence(second, second, second, Verdict.FASTER, "second", 0),),
    )


def measured(clock: Clock, plan: Plan, own: tuple[int, int], now: tuple[int, int]) -> tuple[Within, ...]:
    """Return what is found where the two convolutions take so many nanoseconds a call."""
    models = {
        name: Network(*(Taking(clock, ns) for ns in taken)) for name, taken in ((OWN, own), (PATCHED, now))
    }
    calls: dict[str, Callable[[], object]] = {
        OWN: lambda: models[OWN](IMAGES),
        PATCHED: lambda: models[PATCHED](IMAGES),
    }
    found = within(calls, models, plan, "contiguous", Timed(clock))
    assert not any(
        module._forward_hooks or module._forward_pre_hooks
        for model in models.values()
        for module in model.modules()
    )
    return found


def test_all_calls_of_a_forward_pass_add_up(clock: Clock, plan: Plan) -> None:
    first, second = measured(clock, plan, own=(40, 300), now=(50, 100))

    assert (first.path, second.path) == ("first", "second")
    assert first.rounds.spans_ns == {OWN: (80,) * MOST_ROUNDS, PATCHED: (100,) * MOST_ROUNDS}
    assert (first.verdict, second.verdict) == (Verdict.SLOWER, Verdict.FASTER)
    assert second.speedup.median == pytest.approx(3)
    assert (first.claimed, second.claimed) == (None, 2.5)


def test_slow_models_have_as_many_rounds_as_an_interval_needs(clock: Clock, plan: Plan) -> None:
    first, _ = measured(clock, plan, own=(0, 10**10), now=(0, 10**10))

    assert {len(spans) for spans in first.rounds.spans_ns.values()} == {6}
    assert first.rounds.spans_ns[OWN][0] == 1  # of a clock that stood still: quotients exist
