"""What whoever measures must do: the device itself, and the recording of it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from mucudnn.choices import Policy, Search
from mucudnn.live.measurer import LiveMeasurer
from mucudnn.problem import ConvProblem
from mucudnn.profile import RefusalKind, Trial
from mucudnn.profiling.measurer import Limits, Measurer
from mucudnn.profiling.profiler import Profiler
from mucudnn.profiling.replay import replaying
from mucudnn.profiling.trials import division_trial, packed_trial
from mucudnn.store import SqliteStore
from tests.divisions import a_division
from tests.doubles import MS, Recipe, ScriptedBackend, rate
from tests.operands import a_convolution

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT = 10_000

PROBLEM: ConvProblem = a_convolution(batch=8, input_size=(4, 5))

OWN = "scripted:aten"
FAST = "scripted:fast"
LARGE = "scripted:large"
"""Needs 2000 bytes a sample."""
GREEDY = "scripted:greedy"
"""Takes a mebibyte more, as a whole division, than it declares."""


def _backend() -> ScriptedBackend:
    backend = ScriptedBackend(
        {
            "fast": Recipe(rate(0.5 * MS), sample_bytes=100),
            "large": Recipe(rate(0.5 * MS), sample_bytes=2000),
            "greedy": Recipe(rate(MS), sample_bytes=100, unforeseen_bytes=2**20),
        }
    )
    backend.packed = Recipe(rate(MS), sample_bytes=10)
    return backend


DIVISIONS = (a_division(OWN, 8), a_division(FAST, 4, 4), a_division(GREEDY, 4, 4))


def _live(folder: Path) -> AbstractContextManager[Measurer]:
    return nullcontext(LiveMeasurer(_backend()))


def _replay(folder: Path) -> AbstractContextManager[Measurer]:
    with SqliteStore(folder / "recording") as store:
        profiler = Profiler(LiveMeasurer(_backend()), store, LIMIT, Policy.POWER_OF_TWO)
        profiler.profile(PROBLEM)
        profiler.compare(PROBLEM, DIVISIONS)
        profiler.packed_bytes(PROBLEM)
    return replaying(str(folder / "recording"))


def _replay_of_parts(folder: Path) -> AbstractContextManager[Measurer]:
    """A recording in which nothing but the too large division was ever run as a whole."""
    with SqliteStore(folder / "recording") as store:
        profiler = Profiler(LiveMeasurer(_backend()), store, LIMIT, Policy.POWER_OF_TWO)
        profiler.profile(PROBLEM)
        profiler.compare(PROBLEM, DIVISIONS[2:])
        profiler.packed_bytes(PROBLEM)
    return replaying(str(folder / "recording"))


KINDS: dict[str, Callable[[Path], AbstractContextManager[Measurer]]] = {
    "live": _live,
    "replay": _replay,
    "replay of parts": _replay_of_parts,
}


@pytest.fixture(params=KINDS)
def measurer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Measurer]:
    with KINDS[request.param](tmp_path) as measurer:
        yield measurer


def _trials(measurer: Measurer, size: int) -> list[Trial]:
    part, whole = PROBLEM.part(size), size == PROBLEM.batch
    return [Trial(part, name, whole) for name in measurer.algorithms(part, Search.HEURISTIC, whole)]


def test_it_measures_in_the_environment_of_the_device(measurer: Measurer) -> None:
    assert measurer.environment() == _backend().environment()


def test_whoever_is_alone_did_not_wait_and_may_be_so_again(measurer: Measurer) -> None:
    waited: list[str] = []

    for _ in range(2):
        with measurer.alone(lambda: waited.append("waited")):
            pass

    assert waited == []


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_pytorchs_own_is_tried_first_at_every_size(measurer: Measurer, size: int) -> None:
    names = [trial.algorithm for trial in _trials(measurer, size)]

    assert names[0] == measurer.own == OWN
    assert set(names) == {OWN, FAST, LARGE, GREEDY}


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_trial_has_one_record_in_the_order_of_the_trials(measurer: Measurer, size: int) -> None:
    trials = _trials(measurer, size)

    assert [record.trial for record in measurer.measure(PROBLEM, trials, LIMIT)] == trials


def test_candidates_have_times_workspace_and_error(measurer: Measurer) -> None:
    (record,) = measurer.measure(PROBLEM, [Trial(PROBLEM.part(4), FAST, whole=False)], LIMIT)

    assert record.times is not None
    assert record.times.estimate.median == pytest.approx(0.002)
    assert record.workspace_bytes == 400
    assert record.error is not None
    assert 0 < record.error < 1e-6  # a few roundings of float32, each 6e-8


def test_algorithms_other_than_pytorchs_own_have_a_set_up(measurer: Measurer) -> None:
    records = measurer.measure(PROBLEM, _trials(measurer, 4), LIMIT)

    assert {record.trial.algorithm for record in records if record.setup is None} == {OWN}


def test_it_knows_what_pytorchs_own_takes_in_frozen_graphs(measurer: Measurer) -> None:
    assert measurer.packs(PROBLEM)
    record = measurer.weigh_packed(PROBLEM, LIMIT)

    assert record is not None
    assert (record.trial, record.workspace_bytes) == (packed_trial(PROBLEM, OWN), 80)
    assert record.refusal is None


def test_what_needs_more_than_the_limit_is_refused_with_both_sizes(measurer: Measurer) -> None:
    (record,) = measurer.measure(PROBLEM, [Trial(PROBLEM, LARGE, whole=True)], LIMIT)

    assert record.refusal is not None
    assert record.refusal.kind is RefusalKind.OVER_LIMIT
    assert record.refusal.reason == "it needs 16000 bytes (0.0153 MiB), the limit is 10000 bytes (0.0095 MiB)"
    assert record.workspace_bytes == 16_000


def test_the_least_that_a_trial_needs_is_known_where_it_is_too_large(measurer: Measurer) -> None:
    assert measurer.declared_bytes(Trial(PROBLEM, LARGE, whole=True)) == 16_000


def test_divisions_have_the_time_of_the_whole(measurer: Measurer) -> None:
    outcome, _ = measurer.compare(PROBLEM, DIVISIONS[:2], Limits(LIMIT))

    assert list(outcome.estimates) == [f"{OWN}@8*1", f"{FAST}@4*2"]
    medians = [each.median for each in outcome.estimates.values()]
    assert medians == pytest.approx([0.008, 0.0041])  # with the set-up of 0.1 ms
    assert outcome.workspaces == {f"{OWN}@8*1": 8000, f"{FAST}@4*2": 400}
    assert outcome.verdict(f"{OWN}@8*1", f"{FAST}@4*2") == "FASTER"


def test_a_division_that_was_seen_to_be_too_large_is_refused_and_has_no_times(measurer: Measurer) -> None:
    outcome, refusals = measurer.compare(PROBLEM, DIVISIONS, Limits(LIMIT))

    assert [record.trial for record in refusals] == [division_trial(PROBLEM, DIVISIONS[2])]
    assert f"{GREEDY}@4*2" not in outcome.estimates
    assert len(outcome.estimates) == 2
