"""What the failure of a run says: of its algorithm, of its problem, or of nothing but the device."""

from collections.abc import Callable

import pytest

from mucudnn.backends import Job
from mucudnn.division import Division
from mucudnn.errors import (
    BackendError,
    BackendWarning,
    CompilationError,
    DeviceLostError,
    UnmeasuredError,
    UnweighableError,
)
from mucudnn.live.measurer import LiveMeasurer
from mucudnn.problem import ConvProblem
from mucudnn.profile import Candidate, Record, RefusalKind, Trial
from mucudnn.profiling.measurer import Limits, ModelCall
from tests.doubles import MS, BreakableBackend, Recipe, ScriptedBackend, rate
from tests.operands import a_convolution

pytestmark = pytest.mark.usefixtures("one_thread")

PROBLEM = a_convolution(batch=4)
LIMIT = 2**20
NAMES = ("scripted:aten", "scripted:fast")


def test_a_failure_that_shows_when_the_device_is_waited_for_is_that_of_who_ran_last() -> None:
    backend = ScriptedBackend({"fast": Recipe(rate(0.5 * MS))})
    runs_before_the_race: list[int] = []

    def clock() -> int:
        ran = backend.world.ran
        runs_before_the_race.append(len(ran))
        if len(ran) > runs_before_the_race[0] and ran[-1] == "scripted:fast@2":
            ran.append("a reset")
            raise RuntimeError("an illegal address")
        return backend.clock()

    trials = [Trial(PROBLEM.part(2), name, whole=False) for name in NAMES]
    own, fast = LiveMeasurer(backend, clock=clock).measure(PROBLEM, trials, LIMIT)

    assert own.refusal is None
    assert own.times is not None
    assert fast.refusal is not None
    assert (fast.refusal.kind, fast.refusal.reason) == (RefusalKind.FAILED, "an illegal address")


def test_a_broken_device_is_told_of_though_the_trace_of_its_error_names_an_allocator() -> None:
    def damage(*_: object) -> None:
        backend.fail("an illegal address (CUDACachingAllocator.cpp)", is_fatal=True)

    backend = BreakableBackend({"bad": Recipe(rate(MS), damage=damage)})

    with pytest.raises(DeviceLostError, match="scripted:bad with 4 samples"):
        _weighed(LiveMeasurer(backend))


class _Failing(ScriptedBackend):
    """A backend that answers for one of its algorithms with an error."""

    def __init__(self, method: str, error: Exception) -> None:
        super().__init__({"bad": Recipe(rate(MS)), "fast": Recipe(rate(0.5 * MS))})
        self._method = method
        self._error = error

    def _asked(self, method: str, algorithm: str) -> None:
        if (method, algorithm) == (self._method, "scripted:bad"):
            raise self._error

    def buffer_bytes(self, problem: ConvProblem, algorithm: str) -> int:
        self._asked("buffer_bytes", algorithm)
        return super().buffer_bytes(problem, algorithm)

    def workspace_bytes(self, trial: Trial, limit_bytes: int) -> int | None:
        self._asked("workspace_bytes", trial.algorithm)
        return super().workspace_bytes(trial, limit_bytes)

    def footprint(self, job: Job, limit_bytes: int) -> int | None:
        self._asked("footprint", "scripted:bad")
        return super().footprint(job, limit_bytes)

    def get_ready(self, problem: ConvProblem, algorithm: str) -> None:
        self._asked("get_ready", algorithm)


def _refusals(backend: ScriptedBackend) -> list[RefusalKind | None]:
    trials = [Trial(PROBLEM.part(2), name, whole=False) for name in backend.algorithms(PROBLEM)]
    records = LiveMeasurer(backend).measure(PROBLEM, trials, LIMIT)
    return [record.refusal and record.refusal.kind for record in records]


@pytest.mark.parametrize("method", ["buffer_bytes", "workspace_bytes"])
def test_an_algorithm_whose_workspace_a_backend_cannot_tell_is_refused(method: str) -> None:
    backend = _Failing(method, BackendError("an engine must be one of others"))

    assert _refusals(backend) == [None, RefusalKind.FAILED, None]


def test_what_cannot_be_compiled_when_it_is_weighed_is_refused_for_now() -> None:
    backend = _Failing("workspace_bytes", CompilationError("no space left"))

    with pytest.warns(BackendWarning, match="tried again later: no space left"):
        assert _refusals(backend) == [None, RefusalKind.NOT_COMPILED, None]


@pytest.mark.parametrize("kind", [BackendError, RuntimeError])
def test_a_division_that_cannot_be_made_ready_is_refused_and_the_others_are_timed(
    kind: type[Exception],
) -> None:
    measurer = LiveMeasurer(_Failing("get_ready", kind("no plan can be built")))
    names = ("scripted:aten", "scripted:bad", "scripted:fast")
    own, bad, fast = (Division((Candidate(name, 2, 0.0, 0),) * 2) for name in names)

    compared = measurer.compare(PROBLEM, [own, bad, fast], Limits(LIMIT))

    assert compared.outcome.estimates.keys() == {own.key, fast.key}
    (record,) = compared.refusals
    assert record.refusal is not None
    assert (record.trial.algorithm, record.refusal.reason) == (bad.key, "no plan can be built")


def test_divisions_of_a_call_that_cannot_be_made_ready_are_refused() -> None:
    measurer = LiveMeasurer(_Failing("get_ready", BackendError("no plan can be built")))
    call = ModelCall(PROBLEM, is_sharing=False, limit_bytes=LIMIT)
    base, bad = ({PROBLEM.op: Division((Candidate(name, 4, 0.0, 0),))} for name in (NAMES[0], "scripted:bad"))

    record = measurer.compare_calls(call, base, bad)

    assert isinstance(record, Record)
    assert record.refusal is not None
    assert (record.trial, record.refusal.reason) == (call.trial(bad), "no plan can be built")


def _weighed(measurer: LiveMeasurer) -> None:
    measurer.measure(PROBLEM, [Trial(PROBLEM, "scripted:bad", whole=True)], LIMIT)


def _compared(measurer: LiveMeasurer) -> None:
    measurer.compare(PROBLEM, [Division((Candidate("scripted:bad", 4, 0.0, 0),))], Limits(LIMIT))


def _packed(measurer: LiveMeasurer) -> None:
    measurer.weigh_packed(PROBLEM, LIMIT)


_asked = pytest.mark.parametrize(
    ("method", "measure"),
    [
        ("buffer_bytes", _weighed),
        ("workspace_bytes", _weighed),
        ("footprint", _compared),
        ("footprint", _packed),
        ("get_ready", _compared),
    ],
)


@_asked
def test_memory_that_lacks_before_anything_is_timed_refuses_nothing(
    method: str, measure: Callable[[LiveMeasurer], None]
) -> None:
    measurer = LiveMeasurer(_Failing(method, MemoryError()))

    with pytest.raises(UnmeasuredError, match="could not be measured"):
        measure(measurer)


def test_pytorchs_own_that_cannot_be_weighed_with_its_filter_packed_is_not_measured() -> None:
    measurer = LiveMeasurer(_Failing("footprint", BackendError("no plan can be built")))

    with pytest.raises(UnmeasuredError, match="could not be measured: no plan can be built"):
        _packed(measurer)


@_asked
@pytest.mark.parametrize(
    "error",
    [
        UnmeasuredError("it is stuck"),
        UnweighableError("no child"),
        DeviceLostError("cudnn:eng1", 1, "a fault"),
        TypeError("one argument too many"),  # a fault of our own, before anything is timed
        OSError("too many open files"),  # and one of the host
    ],
)
def test_an_error_that_says_nothing_of_an_algorithm_refuses_none(
    method: str, measure: Callable[[LiveMeasurer], None], error: Exception
) -> None:
    measurer = LiveMeasurer(_Failing(method, error))

    with pytest.raises(type(error), match=str(error)):
        measure(measurer)
