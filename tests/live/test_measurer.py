"""Whoever measures on a device times every call after the same thing."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mucudnn.division import Division
from mucudnn.errors import BackendError
from mucudnn.live.measurer import LiveMeasurer
from mucudnn.problem import ConvOp
from mucudnn.profile import Candidate, Trial
from mucudnn.profiling.measurer import Limits, ModelCall
from tests.doubles import MS, Recipe, ScriptedBackend, rate
from tests.operands import a_convolution

pytestmark = pytest.mark.usefixtures("one_thread")

PROBLEM = a_convolution(batch=4)
LIMIT = 2**20
NAMES = ("scripted:aten", "scripted:fast")


class _Operations(TorchDispatchMode):
    """Writes the names of all operations of PyTorch to a log."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._log.append(str(func))
        return func(*args, **(kwargs or {}))


class _Logging(ScriptedBackend):
    """A backend whose operations are logged."""

    def __init__(self, recipes: Mapping[str, Recipe], log: list[str]) -> None:
        super().__init__(recipes)
        self._log = log

    def current(self) -> AbstractContextManager[Any]:
        return _Operations(self._log)


def _candidates(measurer: LiveMeasurer) -> None:
    measurer.measure(PROBLEM, [Trial(PROBLEM.part(2), name, whole=False) for name in NAMES], LIMIT)


def _divisions(measurer: LiveMeasurer) -> None:
    divisions = [Division((Candidate(name, 2, 0.0, 0),) * 2) for name in NAMES]
    measurer.compare(PROBLEM, divisions, Limits(LIMIT))


def _calls(measurer: LiveMeasurer) -> None:
    base, divided = ({op: Division((Candidate(name, 2, 0.0, 0),) * 2) for op in ConvOp} for name in NAMES)
    measurer.compare_calls(ModelCall(PROBLEM, is_sharing=False, limit_bytes=LIMIT), base, divided)


@pytest.mark.parametrize("measure", [_candidates, _divisions])
def test_every_span_follows_an_ordinary_operation(measure: Callable[[LiveMeasurer], None]) -> None:
    log: list[str] = []
    backend = _Logging({"fast": Recipe(rate(0.5 * MS))}, log)

    def clock() -> int:
        log.append("clock")
        return backend.world.now_ns

    measure(LiveMeasurer(backend, clock=clock))

    starts = [place for place, name in enumerate(log) if name == "clock"][::2]
    assert starts
    assert {log[place - 1] for place in starts} == {"aten.mul_.Tensor"}


@pytest.mark.parametrize("measure", [_candidates, _divisions, _calls])
def test_what_is_measured_is_unseen_by_the_callers_dispatch_modes(
    measure: Callable[[LiveMeasurer], None],
) -> None:
    log: list[str] = []

    with _Operations(log):
        measure(LiveMeasurer(ScriptedBackend({"fast": Recipe(rate(0.5 * MS))})))
        assert log == []
        torch.ones(())

    assert log == ["aten.ones.default"]


def test_where_tensors_are_fake_what_is_measured_is_not() -> None:
    measurer = LiveMeasurer(ScriptedBackend({"fast": Recipe(rate(0.5 * MS))}))

    with FakeTensorMode():
        records = measurer.measure(PROBLEM, [Trial(PROBLEM, name, whole=True) for name in NAMES], LIMIT)

    assert [record.refusal for record in records] == [None, None]
    assert all(record.times is not None for record in records)


def test_a_lack_of_memory_for_the_operands_is_told() -> None:
    huge = a_convolution(batch=2**42)
    measurer = LiveMeasurer(ScriptedBackend({}, own=Recipe(rate(0))))
    name, limits = NAMES[0], Limits(LIMIT)

    with pytest.raises(BackendError, match=r"could not be measured: .*alloc"):
        measurer.measure(huge, [Trial(huge, name, whole=True)], LIMIT)
    with pytest.raises(BackendError, match=r"could not be measured: .*alloc"):
        measurer.compare(huge, [Division((Candidate(name, huge.batch, 0.0, 0),))], limits)


def test_a_set_up_is_timed_in_shorter_spans_than_a_part() -> None:
    backend = ScriptedBackend({"fast": Recipe(rate(0.05 * MS), setup_ns=0.01 * MS)})
    backend.least_span_ns = 2 * MS

    (record,) = LiveMeasurer(backend).measure(PROBLEM, [Trial(PROBLEM.part(2), NAMES[1], whole=False)], LIMIT)

    assert record.times is not None
    assert record.setup is not None
    assert record.times.calls == 16  # of 0.1 ms, which fill 1 ms
    assert record.setup.calls == 32  # of 0.01 ms, which fill a fifth of that


def test_a_candidate_is_timed_on_what_its_own_set_up_left_in_the_workspace() -> None:
    backend = ScriptedBackend({"one": Recipe(rate(MS)), "two": Recipe(rate(MS))})
    trials = [Trial(PROBLEM.part(2), f"scripted:{name}", whole=False) for name in ("one", "two")]

    LiveMeasurer(backend).measure(PROBLEM, trials, LIMIT)

    last, parts = "", 0
    for name in backend.world.ran:
        if name.endswith(" set-up"):
            last = name.removesuffix(" set-up")
        else:
            parts += 1
            assert name == f"{last}@2"
    assert parts == 20  # checked once, warmed up three times, and six samples of both


def test_a_set_up_that_makes_the_filter_itself_is_not_preceded_by_another() -> None:
    backend = ScriptedBackend({name: Recipe(rate(MS), setup_ns=0.05 * MS) for name in ("one", "two")})
    trials = [Trial(PROBLEM.part(2), f"scripted:{name}", whole=False) for name in ("one", "two")]

    LiveMeasurer(backend).measure(PROBLEM, trials, LIMIT)

    ran = backend.world.ran
    last_part = max(place for place, name in enumerate(ran) if name.endswith("@2"))
    assert len(ran) - last_part - 1 == 18  # warmed up three times, and six samples of both
