"""What is told of whole calls of which the base has broken the device."""

from pathlib import Path

import pytest

from mucudnn.choices import Mode, Policy
from mucudnn.division import Division
from mucudnn.examining.extraction import SiteCall
from mucudnn.live.measurer import LiveMeasurer
from mucudnn.problem import ConvOp
from mucudnn.profile import Candidate, Comparison, Record, Refusal, RefusalKind
from mucudnn.profiling.measurer import Divisions, ModelCall
from mucudnn.profiling.profiler import Profiler
from mucudnn.profiling.replay import Replay
from mucudnn.store import SqliteStore
from mucudnn.store.memory import MemoryStore
from mucudnn.tuning.whole_calls import WholeCalls
from tests.doubles import MS, Recipe, ScriptedBackend, rate
from tests.operands import a_convolution

pytestmark = pytest.mark.usefixtures("one_thread")

PROBLEM = a_convolution(batch=8)
CALL = ModelCall(PROBLEM, is_sharing=False, limit_bytes=1000, taken_bytes=500)


def by(algorithm: str) -> Divisions:
    return {op: Division((Candidate(algorithm, 8, 0.0, 1000),)) for op in ConvOp}


@pytest.mark.parametrize("is_replayed", [False, True])
def test_a_base_that_broke_the_device_is_not_asked_about_without_what_others_take(
    is_replayed: bool, tmp_path: Path
) -> None:
    base, divisions = by("scripted:first"), by("scripted:second")
    backend = ScriptedBackend({"first": Recipe(rate(MS)), "second": Recipe(rate(MS))})
    environment, live, trial = backend.environment(), LiveMeasurer(backend), CALL.trial(base)
    refusal = Refusal(trial.algorithm, 8, RefusalKind.FAILED, "it broke the device")
    with SqliteStore(tmp_path / "store.sqlite3") as store:
        seen = [live.compare_calls(CALL._replace(taken_bytes=each), base, divisions) for each in (0, 500)]
        store.add_comparisons(environment, [each for each in seen if isinstance(each, Comparison)])
        store.add_records(environment, [Record(trial, refusal=refusal)])
        asked, known = (Replay(store, environment), MemoryStore()) if is_replayed else (live, store)
        called = WholeCalls(Profiler(asked, known, 1000, Policy.ALL), Mode.REUSE)

        site = SiteCall("", 0, PROBLEM, tuple(ConvOp), tuple(ConvOp))
        times = called.times(site, base, divisions, look=1, taken_bytes=500)

    assert times is None
