"""What is measured, what is refused, and what is known already: on a device whose time is scripted."""

import contextlib
import dataclasses
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Never, cast

import pytest
from torch import Tensor

from mucudnn.backends import Job
from mucudnn.backends.base import Neighbours, NoNeighbours, Result
from mucudnn.choices import Mode, Policy, Search
from mucudnn.errors import BackendWarning, CompilationError, DeviceLostError, UnmeasuredError
from mucudnn.live.measurer import LiveMeasurer
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.profile import Comparison, Environment, Profile, Record, Refusal, RefusalKind, Trial
from mucudnn.profiling.measurer import Divisions, ModelCall
from mucudnn.profiling.profiler import Profiler
from mucudnn.profiling.trials import division_trial
from mucudnn.store import SqliteStore, Store
from mucudnn.store.memory import MemoryStore
from mucudnn.tuning.run import Tuning
from tests.divisions import a_division
from tests.doubles import MS, BreakableBackend, Damage, Recipe, ScriptedBackend, rate
from tests.models import Listener, a_chain, an_extraction
from tests.operands import a_convolution

pytestmark = pytest.mark.usefixtures("one_thread")

MIB = 2**20

SIZES = 4
"""Of the policy for 8 samples: 1, 2, 4 and 8."""


def _problem(**changes: Any) -> ConvProblem:
    return a_convolution(batch=8, input_size=(4, 5), **changes)


def _profiler(
    backend: ScriptedBackend,
    limit_bytes: int = MIB,
    store: Store | None = None,
    policy: Policy = Policy.POWER_OF_TWO,
    search: Search = Search.HEURISTIC,
    max_error: float | None = None,
) -> Profiler:
    kept = MemoryStore() if store is None else store
    return Profiler(LiveMeasurer(backend), kept, limit_bytes, policy, search, max_error)


def _refused(profile: Profile) -> dict[tuple[str, int], RefusalKind]:
    return {(each.algorithm, each.batch): each.kind for each in profile.refusals}


def _off_by_one(problem: ConvProblem, result: Tensor, behind: Tensor) -> None:
    result.add_(1)


def _off_by_a_little(problem: ConvProblem, result: Tensor, behind: Tensor) -> None:
    result.mul_(1 + 3e-6)


def _off_by_one_at_two_samples(problem: ConvProblem, result: Tensor, behind: Tensor) -> None:
    if problem.batch == 2:
        result.add_(1)


def _write_behind(problem: ConvProblem, result: Tensor, behind: Tensor) -> None:
    behind[:1] += 1


def _not_a_number(problem: ConvProblem, result: Tensor, behind: Tensor) -> None:
    result.view(-1)[0] = float("nan")


def _break(problem: ConvProblem, result: Tensor, behind: Tensor) -> None:
    raise RuntimeError("could not create a primitive")


BREAKING = Recipe(rate(MS), damage=_break)


def _break_otherwise(problem: ConvProblem, result: Tensor, behind: Tensor) -> None:
    raise RuntimeError  # without a text: its kind must do for a reason


def _with(damage: Damage) -> ScriptedBackend:
    """One right algorithm and one that does damage."""
    recipes = {"right": Recipe(rate(0.5 * MS)), "bad": Recipe(rate(0.1 * MS), damage=damage)}
    return ScriptedBackend(recipes)


@pytest.mark.parametrize("op", ConvOp)
def test_candidates_have_the_times_and_workspaces_of_their_parts(op: ConvOp) -> None:
    backend = ScriptedBackend({}, own=Recipe(rate(2 * MS), sample_bytes=300))

    profile = _profiler(backend).profile(_problem(op=op))

    # A nanosecond is the clock's tick; times are binary fractions of a second.
    assert [(each.batch, each.workspace_bytes) for each in profile.candidates] == [
        (1, 300), (2, 600), (4, 1200), (8, 2400)
    ]  # fmt: skip
    assert [each.time_s for each in profile.candidates] == pytest.approx([0.002, 0.004, 0.008, 0.016])


def test_what_its_library_calls_not_deterministic_stays_so_in_the_store_and_in_candidates() -> None:
    recipes = {
        "steady": Recipe(rate(0.5 * MS)),
        "varying": Recipe(rate(0.5 * MS), is_deterministic=False),
    }
    store = MemoryStore()

    profiles = [_profiler(ScriptedBackend(recipes), store=store).profile(_problem()) for _ in range(2)]

    for profile in profiles:
        varying = {each.algorithm for each in profile.candidates if not each.is_deterministic}
        assert varying == {"scripted:varying"}


def test_every_algorithm_is_tried_at_every_size_of_the_policy() -> None:
    backend = ScriptedBackend({"other": Recipe(rate(MS))})

    profile = _profiler(backend, policy=Policy.ALL).profile(_problem().with_batch(3))

    assert {(each.algorithm, each.batch) for each in profile.candidates} == set(
        itertools.product(["scripted:aten", "scripted:other"], [1, 2, 3])
    )


@pytest.mark.parametrize(
    ("search", "names"), [(Search.HEURISTIC, ["aten"]), (Search.EXHAUSTIVE, ["aten", "rare"])]
)
def test_the_search_decides_which_algorithms_are_tried(search: Search, names: list[str]) -> None:
    class Library(ScriptedBackend):
        def algorithms(
            self, problem: ConvProblem, search: Search = Search.HEURISTIC, whole: bool = True
        ) -> tuple[str, ...]:
            return super().algorithms(problem)[: 2 if search is Search.EXHAUSTIVE else 1]

    profile = _profiler(Library({"rare": Recipe(rate(MS))}), search=search).profile(_problem())

    assert {each.algorithm for each in profile.candidates} == {f"scripted:{name}" for name in names}


def test_the_backend_is_asked_for_the_whole_first_and_told_which_it_is() -> None:
    asked: list[tuple[int, bool]] = []

    class Asked(ScriptedBackend):
        def algorithms(
            self, problem: ConvProblem, search: Search = Search.HEURISTIC, whole: bool = True
        ) -> tuple[str, ...]:
            asked.append((problem.batch, whole))
            return super().algorithms(problem)

    _profiler(Asked({})).known_workspaces(_problem())

    assert asked == [(8, True), (1, False), (2, False), (4, False)]


def test_what_was_refused_for_another_reason_than_its_size_does_not_tell_what_is_needed() -> None:
    backend, store = _with(_break), MemoryStore()
    _profiler(backend, store=store).profile(_problem())

    known = _profiler(backend, store=store).known_workspaces(_problem())

    assert {each.algorithm for each in known} == {"scripted:aten", "scripted:right"}


def test_parts_are_measured_with_the_alignment_of_their_slices() -> None:
    # An image of 3·25 floats has 300 bytes, a result of 5·25 has 500.
    store, problem = MemoryStore(), dataclasses.replace(_problem(), input_size=(5, 5))
    profiler = _profiler(ScriptedBackend({}), store=store)
    profiler.profile(problem)

    alignments = {1: 4, 2: 8, 4: 16, 8: 16}
    trials = [
        Trial(dataclasses.replace(problem, batch=size, alignment_bytes=alignment), "scripted:aten", size == 8)
        for size, alignment in alignments.items()
    ]
    assert list(store.records(profiler.environment, trials)) == trials
    assert store.count() == 4


def test_the_clock_may_be_another_than_the_backends() -> None:
    backend, ticks = ScriptedBackend({}), itertools.count(step=5 * MS)
    measurer = LiveMeasurer(backend, clock=lambda: next(ticks))
    profiler = Profiler(measurer, MemoryStore(), MIB, Policy.UNDIVIDED)

    profile = profiler.profile(_problem())

    assert [each.time_s for each in profile.candidates] == pytest.approx([0.005])


def test_a_second_profile_measures_nothing() -> None:
    backend, store = ScriptedBackend({"other": Recipe(rate(MS))}), MemoryStore()
    first = _profiler(backend, store=store).profile(_problem())
    backend.world.ran.clear()
    backend.weighed = 0
    profiler = _profiler(backend, store=store)

    second = profiler.profile(_problem())

    assert second == first
    assert (profiler.measured, backend.weighed, backend.world.ran) == (0, 0, [])


def test_only_what_the_store_lacks_is_measured() -> None:
    backend, store = ScriptedBackend({}), MemoryStore()
    _profiler(backend, store=store).profile(_problem())
    profiler = _profiler(backend, store=store, policy=Policy.ALL)

    profiler.profile(_problem())

    assert profiler.measured == 8 - SIZES


@pytest.mark.parametrize("op", ConvOp)
def test_nothing_above_the_limit_is_ever_run(op: ConvOp) -> None:
    # Small parts of both fit, large ones do not; the division fits by what its parts declare.
    backend = ScriptedBackend({"large": Recipe(rate(0.5 * MS), 800, unforeseen_bytes=10**6)})
    profiler = _profiler(backend, limit_bytes=2500)

    profiler.profile(_problem(op=op))
    profiler.compare(
        _problem(op=op), [a_division(f"scripted:{name}", 2, 2, 2, 2) for name in ("aten", "large")]
    )

    assert 0 < backend.largest_bytes <= 2500


def test_a_division_is_held_to_its_room_and_that_is_told() -> None:
    backend, store = ScriptedBackend({"fast": Recipe(rate(0.5 * MS), sample_bytes=10**5)}), MemoryStore()
    own, fast = a_division("scripted:aten", 8), a_division("scripted:fast", 8)
    profiler = _profiler(backend, MIB, store)

    narrow = profiler.compare(_problem(), [own, fast], {fast.key: 700_000})
    wide = profiler.compare(_problem(), [own, fast], {fast.key: 800_000})

    (record,) = store.records(profiler.environment, [division_trial(_problem(), fast)]).values()
    assert record.refusal is not None
    assert record.refusal.reason.endswith("the room in the limit of all sites is 700000 bytes (0.6676 MiB)")
    assert list(narrow.estimates) == [own.key]
    assert list(wide.estimates) == [own.key, fast.key]
    assert profiler.compare(_problem(), [own, fast], {fast.key: 700_000}).estimates == narrow.estimates
    assert profiler.compare(_problem(), [own, fast], {fast.key: 800_000}) == wide


def test_what_exceeds_the_limit_is_refused_with_both_sizes() -> None:
    backend = ScriptedBackend({"large": Recipe(rate(MS), sample_bytes=1024)})

    profile = _profiler(backend, limit_bytes=4096).profile(_problem())

    reasons = {refusal.reason for refusal in profile.refusals if refusal.algorithm == "scripted:large"}
    assert reasons == {"it needs 8192 bytes (0.0078 MiB), the limit is 4096 bytes (0.0039 MiB)"}


def test_a_refusal_for_size_is_measured_again_under_a_larger_limit() -> None:
    backend, store = ScriptedBackend({}, own=Recipe(rate(MS), sample_bytes=1000)), MemoryStore()
    _profiler(backend, 2000, store).profile(_problem())
    profiler = _profiler(backend, 8000, store)

    profile = profiler.profile(_problem())

    assert [each.batch for each in profile.candidates] == [1, 2, 4, 8]
    assert profiler.measured == 2


def test_a_refusal_for_size_holds_under_a_smaller_limit() -> None:
    backend, store = ScriptedBackend({}, own=Recipe(rate(MS), sample_bytes=1000)), MemoryStore()
    _profiler(backend, 2000, store).profile(_problem())
    profiler = _profiler(backend, 1500, store)

    profile = profiler.profile(_problem())

    assert [each.batch for each in profile.candidates] == [1]
    assert profiler.measured == 0


@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize(
    ("damage", "kind", "reason"),
    [
        (_off_by_one, RefusalKind.WRONG, r"its relative error is .*, the bound is 1e-05"),
        (_not_a_number, RefusalKind.WRONG, r"its relative error is nan, the bound is 1e-05"),
        (_write_behind, RefusalKind.WRONG, r"its relative error is inf, the bound is 1e-05"),
        (_break, RefusalKind.FAILED, "could not create a primitive"),
        (_break_otherwise, RefusalKind.FAILED, "RuntimeError"),  # the kind, for want of a text
    ],
)
def test_a_bad_algorithm_is_refused_with_its_reason(
    op: ConvOp, damage: Damage, kind: RefusalKind, reason: str
) -> None:
    profile = _profiler(_with(damage)).profile(_problem(op=op))

    assert _refused(profile) == {("scripted:bad", size): kind for size in (1, 2, 4, 8)}
    assert all(re.fullmatch(reason, refusal.reason) for refusal in profile.refusals)
    assert {each.algorithm for each in profile.candidates} == {"scripted:aten", "scripted:right"}


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("op", ConvOp)
def test_who_writes_to_its_operands_is_refused_and_those_after_it_find_them_as_they_were(
    op: ConvOp, which: int
) -> None:
    def harm(*operands: Tensor) -> None:
        operands[which].mul_(1.5)

    def harm_and_break(*operands: Tensor) -> None:
        harm(*operands)
        raise RuntimeError("could not create a primitive")

    recipes = {
        "harmful": Recipe(rate(0.1 * MS), harm=harm),
        "breaking": Recipe(rate(0.1 * MS), harm=harm_and_break),
        "right": Recipe(rate(0.5 * MS)),
    }

    profile = _profiler(ScriptedBackend(recipes)).profile(_problem(op=op))

    assert {each.algorithm for each in profile.candidates} == {"scripted:aten", "scripted:right"}
    assert _refused(profile) == {
        (f"scripted:{name}", size): kind
        for name, kind in (("harmful", RefusalKind.WRONG), ("breaking", RefusalKind.FAILED))
        for size in (1, 2, 4, 8)
    }
    if op is not ConvOp.WGRAD:  # of which a part is added twice, the second time of other operands
        reasons = {each.reason for each in profile.refusals if each.kind is RefusalKind.WRONG}
        assert reasons == {"it writes to its operands"}


def _fail_to_compile(problem: ConvProblem, result: Tensor, behind: Tensor) -> None:
    raise CompilationError("no space left on device")


def test_what_cannot_be_compiled_is_refused_for_this_process_alone() -> None:
    store = MemoryStore()
    with pytest.warns(BackendWarning, match="tried again later: no space left on device") as warned:
        refused = _profiler(_with(_fail_to_compile), store=store).profile(_problem())

    later = _profiler(_with(lambda *_: None), store=store).profile(_problem())

    assert len(warned) == 1
    assert _refused(refused) == {("scripted:bad", size): RefusalKind.NOT_COMPILED for size in (1, 2, 4, 8)}
    assert {each.algorithm for each in refused.candidates} == {"scripted:aten", "scripted:right"}
    assert not later.refusals
    assert {each.algorithm for each in later.candidates} == {
        "scripted:aten",
        "scripted:right",
        "scripted:bad",
    }


@pytest.mark.parametrize("op", ConvOp)
def test_an_algorithm_less_exact_than_is_wanted_is_refused_from_what_is_known(op: ConvOp) -> None:
    backend, store = _with(_off_by_a_little), MemoryStore()
    assert not _profiler(backend, store=store).profile(_problem(op=op)).refusals

    profilers = {error: _profiler(backend, store=store, max_error=error) for error in (1.0, 4e-6, 2e-6, 0.0)}
    found = {error: profiler.profile(_problem(op=op)) for error, profiler in profilers.items()}

    names = {error: {each.algorithm for each in profile.candidates} for error, profile in found.items()}
    assert names[1.0] == names[4e-6] == {"scripted:aten", "scripted:right", "scripted:bad"}
    assert names[2e-6] == {"scripted:aten", "scripted:right"}
    assert names[0.0] == {"scripted:aten"}  # there must be something
    assert _refused(found[2e-6]) == {("scripted:bad", size): RefusalKind.WRONG for size in (1, 2, 4, 8)}
    assert re.fullmatch(r"its error is 3\.\de-06, and 2\.0e-06 are allowed", found[2e-6].refusals[0].reason)
    assert not any(profiler.measured for profiler in profilers.values())


@pytest.mark.parametrize("op", ConvOp)
def test_an_algorithm_that_is_wrong_at_one_size_is_refused_at_that_size(op: ConvOp) -> None:
    profile = _profiler(_with(_off_by_one_at_two_samples)).profile(_problem(op=op))

    assert _refused(profile) == {("scripted:bad", 2): RefusalKind.WRONG}
    assert [each.batch for each in profile.candidates if each.algorithm == "scripted:bad"] == [1, 4, 8]


def test_an_algorithm_that_cannot_be_built_is_refused() -> None:
    class Unbuildable(ScriptedBackend):
        def slice_kernel(self, *arguments: object) -> Any:  # whatever is asked for
            raise ValueError("no kernel for this shape")

    profile = _profiler(Unbuildable({"other": Recipe(rate(MS))})).profile(_problem())

    assert {refusal.reason for refusal in profile.refusals} == {"no kernel for this shape"}
    assert {each.algorithm for each in profile.candidates} == {"scripted:aten"}


@pytest.mark.parametrize("error", [CompilationError("no space left"), RuntimeError("an internal error")])
def test_an_algorithm_of_which_the_backend_cannot_tell_does_not_hide_what_the_others_need(
    error: Exception,
) -> None:
    class Silent(ScriptedBackend):
        def buffer_bytes(self, problem: ConvProblem, algorithm: str) -> int:
            if algorithm == "scripted:bad":
                raise error
            return super().buffer_bytes(problem, algorithm)

    backend = Silent({"bad": Recipe(rate(MS)), "good": Recipe(rate(MS), sample_bytes=10)})

    known = _profiler(backend).known_workspaces(_problem())

    assert {(each.algorithm, each.batch, each.workspace_bytes) for each in known} == {
        ("scripted:good", size, 10 * size) for size in (1, 2, 4, 8)
    }


def test_a_refusal_for_a_wrong_result_is_kept() -> None:
    backend, store = _with(_off_by_one), MemoryStore()
    first = _profiler(backend, store=store).profile(_problem())
    profiler = _profiler(backend, store=store)

    assert profiler.profile(_problem()).refusals == first.refusals
    assert profiler.measured == 0


@pytest.mark.parametrize("op", ConvOp)
def test_an_algorithm_has_one_set_up_time_at_all_sizes(op: ConvOp) -> None:
    backend = ScriptedBackend({"winograd": Recipe(rate(MS), setup_ns=0.25 * MS)})

    profile = _profiler(backend).profile(_problem(op=op))

    assert {(each.algorithm, round(each.setup_s, 9)) for each in profile.candidates} == {
        ("scripted:aten", 0.0),
        ("scripted:winograd", 0.00025),
    }


def test_a_set_up_measured_for_other_sizes_is_known_for_the_whole_batch() -> None:
    backend, store = ScriptedBackend({"winograd": Recipe(rate(MS), setup_ns=0.25 * MS)}), MemoryStore()
    _profiler(backend, store=store).profile(_problem())

    profile = _profiler(backend, store=store, policy=Policy.UNDIVIDED).profile(_problem())

    set_ups = [each.setup_s for each in profile.candidates if each.algorithm == "scripted:winograd"]
    assert set_ups == pytest.approx([0.00025])


def test_raw_times_are_kept_in_the_store() -> None:
    backend, store = ScriptedBackend({}, own=Recipe(rate(MS))), MemoryStore()
    profiler = _profiler(backend, store=store, policy=Policy.UNDIVIDED)
    profiler.profile(_problem())

    trials = profiler._trials(_problem())
    record = store.records(profiler.environment, trials)[trials[0]]

    assert record.times is not None
    assert record.times.spans_ns == (8 * MS,) * 6


def test_the_measured_error_of_every_candidate_is_known() -> None:
    errors = _profiler(ScriptedBackend({"other": Recipe(rate(MS))})).profile(_problem()).errors

    # float32 rounds to 6e-8; sums of 27 products stay within a few of these.
    assert len(errors) == 2 * SIZES
    assert all(0 < error < 1e-6 for error in errors.values())


def test_what_another_process_wrote_first_is_what_both_plan_from() -> None:
    store = MemoryStore()
    fast, slow = (ScriptedBackend({}, own=Recipe(rate(ns * MS))) for ns in (1, 2))

    class LateStore(MemoryStore):
        """Knows nothing until something is added: as if another process had written meanwhile."""

        def records(self, *arguments: Any) -> Any:
            return {} if not self._records else super().records(*arguments)

        def add_records(self, *arguments: Any) -> None:
            self._records.update(store._records)
            super().add_records(*arguments)

    first = _profiler(fast, store=store).profile(_problem())
    second = _profiler(slow, store=LateStore()).profile(_problem())

    assert second.candidates == first.candidates


def test_what_is_forgotten_of_a_mini_batch_stays_known_of_a_part_as_large() -> None:
    backend, store = ScriptedBackend({}), MemoryStore()
    large, small = _problem().with_batch(16), _problem()
    profiler = _profiler(backend, store=store)
    for problem in (large, small):
        profiler.profile(problem)
    before = profiler.measured

    profiler.forget([small])
    for problem in (large, small):
        profiler.profile(problem)

    assert profiler.measured - before == 3 + 1  # of 1, 2 and 4 samples, parts of both, and of the whole


def test_calls_are_timed_by_the_base_first() -> None:
    own, parts = ({ConvOp.FPROP: a_division("scripted:aten", *sizes)} for sizes in [(8,), (4, 4)])
    call = ModelCall(_problem(), is_sharing=False, limit_bytes=MIB)

    comparison = _profiler(ScriptedBackend({})).compare_calls(call, own, parts)

    assert isinstance(comparison, Comparison)
    assert [*comparison.times] == [call.key(own), call.key(parts)]


def test_calls_that_break_are_not_made_again() -> None:
    store, backend = MemoryStore(), _with(_break)
    own, bad = ({ConvOp.FPROP: a_division(f"scripted:{name}", 8)} for name in ("aten", "bad"))
    call = ModelCall(_problem(), is_sharing=False, limit_bytes=MIB)
    profilers = [_profiler(backend, store=store) for _ in range(2)]

    first, second = (profiler.compare_calls(call, own, bad) for profiler in profilers)

    assert isinstance(first, Record)
    assert second == first
    assert profilers[1].measured == 0


def test_of_calls_that_break_by_either_the_record_is_that_of_the_divisions() -> None:
    store, backend = MemoryStore(), ScriptedBackend({})
    own, parts = ({ConvOp.FPROP: a_division("scripted:aten", *sizes)} for sizes in [(8,), (4, 4)])
    call = ModelCall(_problem(), is_sharing=False, limit_bytes=MIB)
    for trial in (call.trial(own), call.trial(parts)):
        refusal = Refusal(trial.algorithm, 8, RefusalKind.FAILED, "it broke the device")
        store.add_records(backend.environment(), [Record(trial, refusal=refusal)])

    record = _profiler(backend, store=store).compare_calls(call, own, parts)

    assert isinstance(record, Record)
    assert record.trial == call.trial(parts)


def _asked(way: Callable[..., object]) -> tuple[object, ...]:
    """What one way of asking a profiler is given."""
    whole, parts = a_division("scripted:aten", 8), a_division("scripted:aten", 4, 4)
    call = ModelCall(_problem(), is_sharing=False, limit_bytes=MIB)
    asked: dict[Callable[..., object], tuple[object, ...]] = {
        Profiler.compare: (_problem(), [whole, parts]),
        Profiler.compare_calls: (call, {ConvOp.FPROP: whole}, {ConvOp.FPROP: parts}),
        Profiler.packed_bytes: (_problem(),),
    }
    return asked[way]


WAYS = pytest.mark.parametrize(
    "way",
    [Profiler.compare, Profiler.compare_calls, Profiler.packed_bytes],
    ids=["divisions", "calls", "packed filters"],
)


@WAYS
def test_what_another_process_has_seen_first_is_what_both_answer(way: Callable[..., object]) -> None:
    store, first, second = MemoryStore(), _packing(80), _packing(160, own=Recipe(rate(2 * MS)))

    class LateStore(MemoryStore):
        """Knows what the other process has written once something is added."""

        def add_records(self, *arguments: Any) -> None:
            self._records.update(store._records)
            super().add_records(*arguments)

        def add_comparisons(self, *arguments: Any) -> None:
            self._comparisons.update(store._comparisons)
            super().add_comparisons(*arguments)

    answers = [
        way(_profiler(backend, store=each), *_asked(way))
        for backend, each in ((first, store), (second, LateStore()))
    ]

    assert answers[0] == answers[1]


def test_what_was_measured_under_a_larger_limit_changes_no_profile() -> None:
    store = MemoryStore()
    quick, slow = (
        ScriptedBackend({"rival": Recipe(rate(0.5 * MS), sample_bytes=100, setup_ns=setup_ns)})
        for setup_ns in (1 * MS, 9 * MS)
    )
    before = _profiler(quick, 100, store).profile(_problem())
    larger = _profiler(slow, 800, store).profile(_problem())

    assert {round(each.setup_s, 9) for each in before.candidates} == {0.001}
    assert {round(each.setup_s, 9) for each in larger.candidates} == {0.009}  # the median of 1, 9, 9 and 9
    assert _profiler(quick, 100, store).profile(_problem()).candidates == before.candidates


@pytest.mark.parametrize("what", ["profile", "compare", "compare_calls", "packed_bytes"])
def test_what_another_process_measured_while_this_one_waited_is_not_measured_again(what: str) -> None:
    store = MemoryStore()
    divisions = [a_division("scripted:aten", 8), a_division("scripted:aten", 4, 4)]
    whole, parts = ({ConvOp.FPROP: division} for division in divisions)
    call = ModelCall(_problem(), is_sharing=False, limit_bytes=MIB)
    ways: dict[str, Callable[[Profiler], object]] = {
        "profile": lambda profiler: profiler.profile(_problem()),
        "compare": lambda profiler: profiler.compare(_problem(), divisions),
        "compare_calls": lambda profiler: profiler.compare_calls(call, whole, parts),
        "packed_bytes": lambda profiler: profiler.packed_bytes(_problem()),
    }

    class Waiting(LiveMeasurer):
        @contextlib.contextmanager
        def alone(self, on_wait: Callable[[], None]) -> Iterator[None]:
            found.append(ways[what](_profiler(_packing(80), store=store)))
            on_wait()
            yield

    found: list[object] = []
    backend = _packing(80)
    profiler = Profiler(Waiting(backend), store, MIB, Policy.POWER_OF_TWO)
    profiler.on_wait = lambda: found.append("waited")

    last = ways[what](profiler)

    assert found == [last, "waited"]
    assert (profiler.measured, backend.weighed) == (0, 0)


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Yield the lines of the profiler's log."""
    lines: list[str] = []
    log = logging.getLogger(Profiler.__module__)

    def keeps(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return False

    log.addFilter(keeps)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.setLevel(logging.NOTSET)
        log.removeFilter(keeps)


def _packing(n_bytes: int, own: Recipe | None = None) -> ScriptedBackend:
    """PyTorch's own takes so many bytes for 8 samples where its filter is packed."""
    backend = ScriptedBackend({}, own)
    backend.packed = Recipe(rate(MS), n_bytes // 8)
    return backend


def test_what_pytorchs_own_takes_in_frozen_graphs_is_weighed_once() -> None:
    store, backend = MemoryStore(), _packing(80)

    assert [_profiler(backend, 100, store).packed_bytes(_problem()) for _ in range(2)] == [80, 80]
    assert backend.weighed == 1
    assert _profiler(backend, 79, store).packed_bytes(_problem()) is None


def test_what_was_too_large_for_frozen_graphs_is_weighed_under_a_larger_limit() -> None:
    store, backend = MemoryStore(), _packing(80)

    seen = [_profiler(backend, limit, store).packed_bytes(_problem()) for limit in (79, 79, 80)]

    assert seen == [None, None, 80]
    assert backend.weighed == 2


def test_where_a_packed_filter_cannot_be_weighed_the_log_says_why() -> None:
    class Failing(ScriptedBackend):
        def footprint(self, job: Job, limit_bytes: int) -> int | None:
            raise RuntimeError("no engine")

    failing = Failing({})
    failing.packed = Recipe(rate(MS))

    with logged() as lines:
        assert _profiler(failing).packed_bytes(_problem()) is None
    (line,) = lines
    assert line.startswith("What frozen graphs take is not known: ")
    assert line.endswith(" could not be measured: no engine")


def test_where_no_filter_is_packed_nobody_waits_for_a_turn() -> None:
    class Waiting(LiveMeasurer):
        def alone(self, on_wait: Callable[[], None]) -> Never:
            raise AssertionError("there is nothing to measure")

    profiler = Profiler(Waiting(ScriptedBackend({})), MemoryStore(), MIB, Policy.POWER_OF_TWO)

    assert profiler.packed_bytes(_problem()) is None


def test_where_a_whole_call_cannot_be_timed_the_log_says_why() -> None:
    class Failing(LiveMeasurer):
        def compare_calls(self, call: ModelCall, base: Divisions, divisions: Divisions) -> Never:
            raise UnmeasuredError("no memory")

    call = ModelCall(_problem(), is_sharing=False, limit_bytes=MIB)
    whole, parts = ({ConvOp.FPROP: a_division("scripted:aten", *sizes)} for sizes in [(8,), (4, 4)])
    profiler = Profiler(Failing(ScriptedBackend({})), MemoryStore(), MIB, Policy.POWER_OF_TWO)

    with logged() as lines:
        assert profiler.compare_calls(call, whole, parts) is None
    assert lines == ["A whole call is not timed: no memory"]


def test_a_division_that_broke_after_it_was_timed_does_not_answer_by_these_times() -> None:
    backend, store = ScriptedBackend({}), MemoryStore()
    divisions = [a_division("scripted:aten", 8), a_division("scripted:aten", 4, 4)]
    timed = _profiler(backend, store=store).compare(_problem(), divisions)
    trial = division_trial(_problem(), divisions[1])
    broken = Record(trial, refusal=Refusal(trial.algorithm, 8, RefusalKind.FAILED, "it broke the device"))
    store.add_records(backend.environment(), [broken])

    outcome = _profiler(backend, store=store).compare(_problem(), divisions)

    assert [*timed.estimates] == [each.key for each in divisions]
    assert [*outcome.estimates] == [divisions[0].key]


class _Forgetful(MemoryStore):
    """Loses all that was known when something is added: as if a process that measures anew had come by."""

    def add_records(self, environment: Environment, records: Iterable[Record]) -> None:
        self._records.clear()
        super().add_records(environment, records)


def test_what_the_store_loses_while_something_is_measured_stays_known_to_who_measures() -> None:
    store = _Forgetful()
    recipes = {"small": Recipe(rate(MS)), "large": Recipe(rate(MS), sample_bytes=100)}
    _profiler(ScriptedBackend(recipes), limit_bytes=100, store=store).profile(_problem())

    profiler = _profiler(ScriptedBackend(recipes), limit_bytes=MIB, store=store)
    profile = profiler.profile(_problem())

    trials = {(each.algorithm, each.batch) for each in profile.candidates}
    assert trials == {
        (f"scripted:{name}", size) for name in ("aten", "small", "large") for size in (1, 2, 4, 8)
    }
    assert profile.errors.keys() == trials


class _Losing(MemoryStore):
    """Loses whatever is added: as if a process that measures anew came by each time."""

    def add_records(self, *_: object) -> None:
        pass

    def add_comparisons(self, *_: object) -> None:
        pass


@WAYS
def test_what_the_store_has_lost_at_once_is_answered_as_it_was_seen(way: Callable[..., object]) -> None:
    kept, lost = (
        way(_profiler(_packing(80), store=store), *_asked(way)) for store in (MemoryStore(), _Losing())
    )

    assert lost is not None
    assert lost == kept


def test_a_division_that_broke_the_device_of_another_process_meanwhile_is_not_run() -> None:
    store, divisions = MemoryStore(), [a_division("scripted:aten", 8), a_division("scripted:aten", 4, 4)]
    trial = division_trial(_problem(), divisions[1])
    broken = Record(trial, refusal=Refusal(trial.algorithm, 8, RefusalKind.FAILED, "it broke the device"))
    backend = ScriptedBackend({})

    class Waiting(LiveMeasurer):
        @contextlib.contextmanager
        def alone(self, on_wait: Callable[[], None]) -> Iterator[None]:
            store.add_records(self.environment(), [broken])
            yield

    outcome = Profiler(Waiting(backend), store, MIB, Policy.POWER_OF_TWO).compare(_problem(), divisions)

    assert [*outcome.estimates] == [divisions[0].key]
    assert not any("@4" in ran for ran in backend.world.ran)


def test_whatever_is_timed_is_watched() -> None:
    class Watching(ScriptedBackend):
        def neighbours(self) -> Neighbours:
            return Counting()

    class Counting(NoNeighbours):
        def __init__(self) -> None:
            self.watches = 0

        def undisturbed(self, measure: Callable[[], Result]) -> tuple[Result, float]:
            measure()  # what they disturb is measured again, and the last time counts
            before = len(backend.world.ran)
            found = measure()
            assert len(backend.world.ran) > before
            self.watches += 1
            return found, 0.25 * self.watches

        def complaint(self) -> Any:
            return f"{self.watches} watches"

    backend, store = Watching({}), MemoryStore()
    profiler = _profiler(backend, store=store)
    own = {ConvOp.FPROP: a_division("scripted:aten", 8)}
    parts = {ConvOp.FPROP: a_division("scripted:aten", 4, 4)}

    profiler.profile(_problem())
    found = profiler.compare(_problem(), [own[ConvOp.FPROP]])
    call = ModelCall(_problem(), is_sharing=False, limit_bytes=MIB)
    called = profiler.compare_calls(call, own, parts)

    assert profiler.complaint() == "3 watches"
    assert found.others == 0.5
    assert isinstance(called, Comparison)
    assert called.others == 0.75
    trial = Trial(_problem(), "scripted:aten", whole=True)
    known = store.records(backend.environment(), [trial])[trial]
    assert known.times is not None
    assert known.times.others == 0.25


def test_threads_with_one_store_share_the_work() -> None:
    alone = _profiler(ScriptedBackend({}))
    problems = [_problem(out_channels=channels) for channels in range(1, 9)]
    for problem in problems:
        alone.profile(problem)

    store = MemoryStore()
    profilers = [_profiler(ScriptedBackend({}), store=store) for _ in range(3)]
    with ThreadPoolExecutor() as pool:
        profiles = list(pool.map(lambda profiler: list(map(profiler.profile, problems)), profilers))

    assert sum(profiler.measured for profiler in profilers) == alone.measured
    assert profiles[0] == profiles[1] == profiles[2]


def test_divisions_are_compared_by_the_time_of_the_whole() -> None:
    backend = ScriptedBackend({"winograd": Recipe(rate(0.5 * MS), setup_ns=MS)})
    divisions = [a_division("scripted:aten", 8), a_division("scripted:winograd", 4, 4)]

    outcome = _profiler(backend).compare(_problem(), divisions)

    medians = [each.median for each in outcome.estimates.values()]
    assert medians == pytest.approx([0.008, 0.005])


def test_a_second_comparison_measures_nothing() -> None:
    backend, store = ScriptedBackend({}), MemoryStore()
    divisions = [a_division("scripted:aten", 8), a_division("scripted:aten", 4, 4)]
    first = _profiler(backend, store=store).compare(_problem(), divisions)
    profiler = _profiler(backend, store=store)

    assert profiler.compare(_problem(), divisions) == first
    assert profiler.measured == 0


def test_a_division_that_takes_more_than_it_declares_is_not_timed() -> None:
    backend = ScriptedBackend({"greedy": Recipe(rate(0.1 * MS), unforeseen_bytes=2 * MIB)})
    divisions = [a_division("scripted:aten", 8), a_division("scripted:greedy", 4, 4)]

    outcome = _profiler(backend).compare(_problem(), divisions)

    assert list(outcome.estimates) == ["scripted:aten@8*1"]
    assert outcome.workspaces == {"scripted:aten@8*1": 8000}


def test_a_division_that_takes_more_than_the_limit_is_weighed_once() -> None:
    backend = ScriptedBackend({"greedy": Recipe(rate(0.1 * MS), unforeseen_bytes=2 * MIB)})
    store = MemoryStore()
    divisions = [a_division("scripted:aten", 8), a_division("scripted:greedy", 4, 4)]
    first = _profiler(backend, store=store).compare(_problem(), divisions)
    profiler = _profiler(backend, store=store)

    assert profiler.compare(_problem(), divisions) == first
    assert profiler.measured == 0


def test_where_all_divisions_are_too_large_nothing_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = ScriptedBackend({"greedy": Recipe(rate(0.1 * MS), unforeseen_bytes=2 * MIB)})
    divisions = [a_division("scripted:greedy", *sizes) for sizes in [(4, 4), (2, 2, 2, 2)]]
    store = SqliteStore(tmp_path / "store")
    monkeypatch.setattr(LiveMeasurer, "_stand", None)  # nor are operands made
    first = _profiler(backend, store=store).compare(_problem(), divisions)
    profiler = _profiler(backend, store=store)
    monkeypatch.setattr(LiveMeasurer, "compare", None)  # nor is anybody asked

    assert profiler.compare(_problem(), divisions) == first
    assert first.estimates == {}
    assert profiler.measured == 0
    assert store.comparisons_of(profiler.environment, _problem()) == []


def test_a_division_that_was_too_large_is_weighed_again_under_a_larger_limit() -> None:
    backend = ScriptedBackend({"greedy": Recipe(rate(0.1 * MS), unforeseen_bytes=2 * MIB)})
    store = MemoryStore()
    divisions = [a_division("scripted:aten", 8), a_division("scripted:greedy", 4, 4)]
    _profiler(backend, MIB, store).compare(_problem(), divisions)

    outcome = _profiler(backend, 3 * MIB, store).compare(_problem(), divisions)

    assert list(outcome.estimates) == ["scripted:aten@8*1", "scripted:greedy@4*2"]


def test_what_was_compared_under_a_larger_limit_is_held_to_the_present_one() -> None:
    backend = ScriptedBackend({"greedy": Recipe(rate(0.1 * MS), unforeseen_bytes=2 * MIB)})
    store = MemoryStore()
    divisions = [a_division("scripted:aten", 8), a_division("scripted:greedy", 4, 4)]
    _profiler(backend, 3 * MIB, store).compare(_problem(), divisions)

    outcome = _profiler(backend, MIB, store).compare(_problem(), divisions)

    assert list(outcome.estimates) == ["scripted:aten@8*1"]
    assert outcome.workspaces["scripted:greedy@4*2"] == 2 * MIB


def test_a_killed_tuning_goes_on_from_what_it_measured() -> None:
    backend, store = ScriptedBackend({"other": Recipe(rate(0.5 * MS))}), MemoryStore()
    extraction = an_extraction(a_chain())
    whole = _profiler(backend)
    Tuning(whole, Mode.REUSE, extraction, Listener()).plan()
    killed, resumed = _profiler(backend, store=store), _profiler(backend, store=store)

    with pytest.raises(KeyboardInterrupt, match="at the fourth step"):
        Tuning(killed, Mode.REUSE, extraction, Listener(patience=3)).plan()
    Tuning(resumed, Mode.REUSE, extraction, Listener()).plan()

    assert killed.measured > 0
    assert killed.measured + resumed.measured == whole.measured


def _breakable() -> BreakableBackend:
    fatal = Recipe(
        rate(MS), damage=lambda *_: backend.fail("an illegal memory access was encountered.", is_fatal=True)
    )
    backend = BreakableBackend({"fine": Recipe(rate(MS)), "fatal": fatal})
    return backend


def test_an_algorithm_that_breaks_the_device_ends_the_process_s_measuring_with_its_name() -> None:
    message = "scripted:fatal with 1 samples has broken the device for this process: an illegal memory access"

    with pytest.raises(DeviceLostError, match=message):
        _profiler(_breakable()).profile(_problem())


def test_an_algorithm_that_broke_the_device_is_not_tried_again() -> None:
    store = MemoryStore()
    with pytest.raises(DeviceLostError, match="scripted:fatal"):
        _profiler(_breakable(), store=store).profile(_problem())

    profile = _profiler(_breakable(), store=store).profile(_problem())

    fatal = {("scripted:fatal", size): RefusalKind.FAILED for size in (1, 2, 4, 8)}
    assert _refused(profile) == fatal
    assert {each.algorithm for each in profile.candidates} == {"scripted:aten", "scripted:fine"}


def test_a_division_that_broke_the_device_is_not_tried_again() -> None:
    store, divisions = MemoryStore(), [a_division("scripted:aten", 8), a_division("scripted:fatal", 4, 4)]
    with pytest.raises(DeviceLostError, match=r"scripted:fatal@4\*2 with 8 samples has broken the device"):
        _profiler(_breakable(), store=store).compare(_problem(), divisions)

    outcome = _profiler(_breakable(), store=store).compare(_problem(), divisions)

    assert outcome.estimates.keys() == {"scripted:aten@8*1"}


def test_a_division_that_breaks_is_refused_and_the_others_are_compared() -> None:
    store, backend = MemoryStore(), ScriptedBackend({"fine": Recipe(rate(MS)), "bad": BREAKING})
    divisions = [a_division(name, 4, 4) for name in ("scripted:aten", "scripted:bad", "scripted:fine")]

    outcomes = [_profiler(backend, store=store).compare(_problem(), divisions) for _ in range(2)]

    trial = division_trial(_problem(), divisions[1])
    refusal = store.records(backend.environment(), [trial])[trial].refusal
    assert [[*outcome.estimates] for outcome in outcomes] == [["scripted:aten@4*2", "scripted:fine@4*2"]] * 2
    assert refusal is not None
    assert (refusal.kind, refusal.reason) == (RefusalKind.FAILED, "could not create a primitive")


def test_a_division_that_breaks_when_it_is_weighed_is_refused() -> None:
    class Unweighable(ScriptedBackend):
        def footprint(self, job: Job, limit_bytes: int) -> int | None:
            if ["scripted:bad", 4] in cast("list[object]", job.payload["parts"]):
                raise RuntimeError("no such engine")
            return super().footprint(job, limit_bytes)

    backend = Unweighable({"bad": Recipe(rate(MS))})
    divisions = [a_division(name, 4, 4) for name in ("scripted:aten", "scripted:bad")]

    assert [*_profiler(backend).compare(_problem(), divisions).estimates] == ["scripted:aten@4*2"]


@pytest.mark.parametrize("failure", [RuntimeError("no engine"), MemoryError("out of memory")])
def test_where_pytorchs_own_breaks_a_convolution_is_unmeasured(failure: Exception) -> None:
    def broken(samples: int) -> float:
        raise failure

    profiler = _profiler(ScriptedBackend({}, own=Recipe(broken)))

    with pytest.raises(UnmeasuredError, match=f"could not be measured: {failure}"):
        profiler.profile(_problem())
    with pytest.raises(UnmeasuredError, match=f"could not be measured: {failure}"):
        profiler.compare(_problem(), [a_division("scripted:aten", 8)])


def test_where_pytorchs_own_breaks_when_it_is_weighed_a_convolution_is_unmeasured() -> None:
    class Unweighable(ScriptedBackend):
        def workspace_bytes(self, trial: Trial, limit_bytes: int) -> int | None:
            raise RuntimeError("no engine")

    with pytest.raises(UnmeasuredError, match="could not be measured: no engine"):
        _profiler(Unweighable({})).profile(_problem())
