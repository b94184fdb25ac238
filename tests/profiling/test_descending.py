"""Which trials a profile asks for: smaller micro-batches only where they promise something."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mucudnn.choices import Policy
from mucudnn.errors import DeviceLostError
from mucudnn.live.measurer import LiveMeasurer
from mucudnn.problem import ConvProblem
from mucudnn.profile import Candidate, Environment, Measurement, Record, Refusal, RefusalKind, Trial
from mucudnn.profiling.descending import every, wanted
from mucudnn.profiling.measurer import is_composed
from mucudnn.profiling.profiler import Profiler
from mucudnn.recordings import recording_file
from mucudnn.sizes import parse_bytes
from mucudnn.solvers import solve_reuse
from mucudnn.store import SqliteStore, readable_store
from mucudnn.store.memory import MemoryStore
from tests.doubles import MS, Recipe, ScriptedBackend, rate
from tests.examples import a_problem

OWN = "own"
BATCH = 8
LIMIT = 1000

Costs = Mapping[tuple[str, int], tuple[int, int]]
"""Nanoseconds of a part and bytes of its workspace, by algorithm and size."""

Asked = list[tuple[str, int]]


def costs(
    of_a_sample: Mapping[str, tuple[int, int]], sizes: Sequence[int] = (8, 4, 2, 1)
) -> dict[tuple[str, int], tuple[int, int]]:
    """What algorithms cost that take so many nanoseconds and bytes for each sample."""
    return {
        (name, size): (ns * size, n_bytes * size)
        for name, (ns, n_bytes) in of_a_sample.items()
        for size in sizes
    }


def record(trial: Trial, cost: tuple[int, int]) -> Record:
    ns, n_bytes = cost
    if n_bytes > LIMIT:
        refusal = Refusal(trial.algorithm, trial.problem.batch, RefusalKind.OVER_LIMIT, "It is.")
        return Record(trial, n_bytes, refusal=refusal, limit_bytes=LIMIT)
    return Record(trial, n_bytes, times=Measurement((ns, ns, ns)))


def trials_of(known: Costs) -> dict[int, list[Trial]]:
    problem = a_problem(batch=max(size for _, size in known))
    found: dict[int, list[Trial]] = {}
    for name, size in known:
        found.setdefault(size, []).append(Trial(problem.part(size), name, whole=size == problem.batch))
    return found


def asked(known: Costs) -> list[Asked]:
    """What is asked for, step by step, until no more is."""
    trials, records, steps = trials_of(known), dict[Trial, Record](), list[Asked]()
    while missing := [each for each in wanted(trials, records, LIMIT, OWN) if each not in records]:
        names = [(each.algorithm, each.problem.batch) for each in missing]
        steps.append(names)
        records |= {each: record(each, known[name]) for each, name in zip(missing, names, strict=True)}
    return steps


def flat(steps: Sequence[Asked]) -> Asked:
    return [each for step in steps for each in step]


def test_where_all_fit_and_parts_are_no_faster_only_the_fastest_and_pytorchs_own_are_tried_in_parts() -> None:
    whole, parts = asked(costs({OWN: (3, 10), "fast": (1, 10), "slow": (9, 0)}))

    assert whole == [(OWN, 8), ("fast", 8), ("slow", 8)]
    assert parts == [(OWN, 4), ("fast", 4), (OWN, 2), ("fast", 2), (OWN, 1), ("fast", 1)]


def test_where_pytorchs_own_is_the_fastest_it_alone_is_tried_in_parts() -> None:
    _, parts = asked(costs({OWN: (1, 10), "slow": (9, 0)}))

    assert parts == [(OWN, 4), (OWN, 2), (OWN, 1)]


def test_sizes_are_halved_until_all_fit() -> None:
    steps = asked(costs({OWN: (3, 10), "large": (1, 400), "small": (5, 0)}))

    assert steps[:3] == [[(name, size) for name in (OWN, "large", "small")] for size in (8, 4, 2)]
    assert steps[3:] == [[(OWN, 1), ("large", 1)]]


def test_what_is_refused_for_another_reason_than_its_size_is_no_reason_to_go_on() -> None:
    known = costs({OWN: (3, 0), "wrong": (1, 0)})
    trials = trials_of(known)
    records = {each: record(each, known[each.algorithm, 8]) for each in trials[8]}
    wrong = trials[8][1]
    refusal = Refusal(wrong.algorithm, 8, RefusalKind.WRONG, "It is.")
    records[wrong] = dataclasses.replace(records[wrong], times=None, refusal=refusal)

    found = wanted(trials, records, LIMIT, OWN)

    assert [each.algorithm for each in found if each.problem.batch < 8] == [OWN] * 3


@pytest.mark.parametrize(("ns", "is_worth_it"), [(480, True), (499, False)])
def test_parts_that_take_less_time_a_sample_have_all_algorithms_tried(ns: int, is_worth_it: bool) -> None:
    known = costs({OWN: (300, 0), "fast": (125, 0), "slow": (900, 0)}) | {("fast", 4): (ns, 0)}

    steps = asked(known)

    assert (("slow", 4) in flat(steps)) == is_worth_it


def test_the_first_of_a_list_stands_for_what_is_not_on_it() -> None:
    known = costs({OWN: (3, 0), "fast": (1, 0)}, sizes=(8,)) | costs(
        {OWN: (3, 0), "b": (1, 0), "a": (1, 0)}, (4, 2)
    )

    _, parts = asked(known)

    assert parts == [(OWN, 4), ("b", 4), (OWN, 2), ("b", 2)]


def test_where_nothing_fits_all_is_tried() -> None:
    steps = asked(costs({OWN: (3, 2000), "other": (1, 2000)}))

    assert sorted(flat(steps)) == sorted((name, size) for name in (OWN, "other") for size in (8, 4, 2, 1))


@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "c", "d"]),
        st.tuples(st.lists(st.integers(1, 50), min_size=4, max_size=4), st.integers(0, 400)),
        min_size=1,
    )
)
def test_where_smaller_parts_never_take_less_time_a_sample_nothing_is_lost(
    drawn: dict[str, tuple[list[int], int]],
) -> None:
    known: dict[tuple[str, int], tuple[int, int]] = {(OWN, size): (1000 * size, 100) for size in (8, 4, 2, 1)}
    for name, (numbers, n_bytes) in drawn.items():
        for size, ns in zip((8, 4, 2, 1), sorted(numbers), strict=True):  # more a sample, the smaller it is
            known[name, size] = (ns * size, n_bytes * size)

    steps = asked(known)

    tried = flat(steps)
    assert len(tried) == len(set(tried))
    assert {size for name, size in tried if name == OWN} == {8, 4, 2, 1}
    assert best_ns({each: known[each] for each in tried}) == best_ns(known)


def best_ns(known: Costs) -> float:
    candidates = [
        Candidate(*each, float(ns), n_bytes) for each, (ns, n_bytes) in known.items() if n_bytes <= LIMIT
    ]
    return solve_reuse(candidates, BATCH, LIMIT).time_s


def profiler(
    backend: ScriptedBackend, store: MemoryStore, limit_bytes: int = LIMIT, descends: bool = True
) -> Profiler:
    return Profiler(LiveMeasurer(backend), store, limit_bytes, Policy.POWER_OF_TWO, descends=descends)


PROBLEM = a_problem(batch=BATCH, in_channels=2, out_channels=3, input_size=(4, 5))

RECIPES = {
    "fast": Recipe(rate(0.1 * MS)),
    "middling": Recipe(rate(0.2 * MS)),
    "large": Recipe(rate(0.3 * MS), 100),
}


def sizes(found: Profiler) -> dict[str, list[int]]:
    by_name: dict[str, list[int]] = {}
    for each in found.profile(PROBLEM).candidates:
        by_name.setdefault(each.algorithm.removeprefix("scripted:"), []).append(each.batch)
    return {name: sorted(batches) for name, batches in by_name.items()}


def test_a_profile_has_what_was_needed_and_the_store_answers_for_it() -> None:
    backend, store = ScriptedBackend(RECIPES, own=Recipe(rate(MS))), MemoryStore()

    first = profiler(backend, store)
    assert sizes(first) == {"own": [1, 2, 4, 8], "fast": [1, 2, 4, 8], "middling": [8], "large": [8]}
    assert first.measured == 10

    again = profiler(backend, store)
    assert sizes(again) == sizes(first)
    assert again.measured == 0


def test_a_lower_limit_asks_for_more_and_who_wants_all_sizes_has_them() -> None:
    backend, store = ScriptedBackend(RECIPES, own=Recipe(rate(MS))), MemoryStore()
    sizes(profiler(backend, store))

    lower = sizes(profiler(backend, store, limit_bytes=400))
    assert lower == {"own": [1, 2, 4, 8], "fast": [1, 2, 4, 8], "middling": [4, 8], "large": [4]}

    all_of_them = sizes(profiler(backend, store, descends=False))
    assert set(map(tuple, all_of_them.values())) == {(1, 2, 4, 8)}


def test_what_breaks_the_device_is_tried_at_no_size_again() -> None:
    class Breaking(LiveMeasurer):
        def measure(self, problem: ConvProblem, trials: Sequence[Trial], limit_bytes: int) -> list[Record]:
            if any(each.algorithm == "scripted:fast" for each in trials):
                raise DeviceLostError("scripted:fast", BATCH, "it burnt")
            return super().measure(problem, trials, limit_bytes)

    store = MemoryStore()
    one = Profiler(Breaking(ScriptedBackend(RECIPES)), store, 2**20, Policy.POWER_OF_TWO, descends=True)
    with pytest.raises(DeviceLostError):
        one.profile(PROBLEM)

    assert "fast" not in sizes(one)
    kinds = {each.batch: each.kind for each in one.profile(PROBLEM).refusals}
    assert kinds == dict.fromkeys((1, 2, 4, 8), RefusalKind.FAILED)


def test_all_trials_are_in_the_order_of_their_sizes() -> None:
    assert [each.problem.batch for each in every(trials_of(costs({OWN: (1, 0), "a": (1, 0)})))] == [
        1,
        1,
        2,
        2,
        4,
        4,
        8,
        8,
    ]


@pytest.mark.parametrize(("limit", "share"), [("8MiB", 0.75), ("64MiB", 0.48), ("512MiB", 0.37)])
def test_of_what_a_card_recorded_little_is_needed_and_the_best_divisions_are_in_it(
    limit: str, share: float
) -> None:
    limit_bytes, tried, needed = parse_bytes(limit), 0, 0
    with readable_store(recording_file("h200-tf32")) as store:
        (environment,) = store.environments()
        for problem in store.problems_of(environment):
            records = recorded(store, environment, problem)
            trials = {
                size: sorted(
                    (each.trial for each in found),
                    key=lambda each: (each.algorithm != CARDS_OWN, each.algorithm),
                )
                for size, found in records.items()
            }
            known = {each.trial: each for found in records.values() for each in found}
            found = wanted(trials, known, limit_bytes, CARDS_OWN)
            tried += sum(each.times is not None for each in known.values())
            needed += sum(known[each].times is not None for each in found)
            best_s = fastest(known.values(), limit_bytes)
            assert fastest([known[each] for each in found], limit_bytes) <= 1.001 * best_s

    assert needed <= share * tried


CARDS_OWN = "cudnn:aten"


def recorded(store: SqliteStore, environment: Environment, problem: ConvProblem) -> dict[int, list[Record]]:
    """What was tried of a problem, by sizes."""
    return {
        size: [
            each
            for each in store.records_of(environment, problem.part(size))
            if each.trial.whole == (size == problem.batch) and not is_composed(each.trial)
        ]
        for size in Policy.POWER_OF_TWO.sizes(problem.batch)
    }


def fastest(records: Iterable[Record], limit_bytes: int) -> float:
    candidates = [
        Candidate(
            each.trial.algorithm, each.trial.problem.batch, each.times.estimate.median, each.workspace_bytes
        )
        for each in records
        if each.times is not None and each.workspace_bytes is not None
    ]
    return solve_reuse(candidates, max(each.batch for each in candidates), limit_bytes).time_s
