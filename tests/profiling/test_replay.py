"""A recording answers as the machine that made it, and refuses what it never saw."""

import dataclasses
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mucudnn
from mucudnn.choices import Mode, Search
from mucudnn.division import Division, undivided
from mucudnn.errors import (
    BackendError,
    InfeasibleError,
    OptionError,
    PlanFormatError,
    PlanMismatchError,
    StoreError,
)
from mucudnn.evidence import Evidence
from mucudnn.examining.extraction import extract
from mucudnn.intervals import Verdict
from mucudnn.plan import Plan
from mucudnn.problem import ConvProblem
from mucudnn.profile import Candidate, Comparison, Measurement, Record, Refusal, RefusalKind, Trial
from mucudnn.profiling.measurer import Limits, ModelCall
from mucudnn.profiling.replay import Replay, replaying
from mucudnn.profiling.trials import division_trial
from mucudnn.store import SqliteStore
from tests.doubles import MS, Recipe, ScriptedBackend, rate
from tests.examples import a_problem, a_record, a_trial, an_environment
from tests.models import Listener, a_batch, a_chain, an_extraction
from tests.plans import algorithms_of
from tests.recordings import (
    MIB,
    Elsewhere,
    a_backend,
    a_convolution_extraction,
    a_convolution_model,
    record,
)
from tests.store.files import execute
from tests.threads import threads

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan]:
    """A recording of `a_chain` on `a_batch` in training, under a mebibyte, and the plan that was made."""
    path = tmp_path_factory.mktemp("recorded") / "chain.sqlite3"
    with threads(1):
        return path, record(path, a_backend(), an_extraction(a_chain()))


def _replayed(path: Path, limit: int = MIB, number: str = "", **options: Any) -> Plan:
    """The plan for `a_chain`."""
    return mucudnn.tune(
        a_chain(), a_batch(), limit, backend=f"replay:{path}{number}", progress=False, **options
    )


def _replayed_alone(path: Path, limit: int = MIB, **options: Any) -> Plan:
    """The plan for one convolution."""
    model = a_convolution_model()
    return mucudnn.tune(model, a_batch(), limit, backend=f"replay:{path}", progress=False, **options)


def _evidence(plan: Plan) -> list[Evidence]:
    return [each.evidence for each in plan.assignments if each.evidence is not None]


def _keys(plan: Plan) -> list[str]:
    return [division.key for division in plan.sites.values()]


def _parts(samples: int) -> float:
    """Nanoseconds of parts that are best of 4 samples, and useless above."""
    return (0.02 + samples * (0.5 if samples <= 4 else 100)) * MS


def _forget_comparisons(path: Path) -> Path:
    """Take from a recording whatever was run as a whole division."""
    execute(path, "DELETE FROM compared", "DELETE FROM comparisons")
    return path


# The same plan


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("limit", [MIB, 6000, 2000])
def test_the_plan_of_a_replay_is_the_recorded_one_byte_for_byte(
    tmp_path: Path, mode: Mode, limit: int
) -> None:
    path = tmp_path / "recording"
    recorded = record(path, a_backend(), an_extraction(a_chain()), limit, mode)

    assert _replayed(path, limit, mode=mode).to_text() == recorded.to_text()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_transposed_convolution_is_found_whatever_computed_pytorchs_own_where_it_was_recorded(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model = torch.nn.Sequential(torch.nn.ConvTranspose2d(3, 4, 3)).to(dtype)
    sample = torch.zeros(4, 3, 6, 6, dtype=dtype)
    here = extract(model, sample)
    elsewhere = here.known_as(lambda each, _: dataclasses.replace(each, is_apart=not each.is_apart))
    backend = a_backend()
    backend.is_exact_timed = dtype == torch.float64
    recorded = record(tmp_path / "recording", backend, elsewhere)

    plan = mucudnn.tune(model, sample, MIB, backend=f"replay:{tmp_path / 'recording'}", progress=False)

    assert plan.to_text() == recorded.to_text()
    assert {each.is_apart for each in here.problems.values()} == {dtype == torch.float64}


def test_what_was_refused_for_its_room_alone_is_refused_in_the_replay_and_in_a_second_run(
    tmp_path: Path,
) -> None:
    # One site of several finds room for what its division was seen to take.
    greedy = Recipe(rate(0.1 * MS), sample_bytes=100, unforeseen_bytes=2 * MIB)
    backend = ScriptedBackend({"greedy": greedy, "modest": Recipe(rate(0.5 * MS))})
    path, extraction = tmp_path / "recording", an_extraction(a_chain())

    first = record(path, backend, extraction, 3 * MIB, Mode.SHARING)
    second = record(path, backend, extraction, 3 * MIB, Mode.SHARING)
    reuse = record(path, backend, extraction, 3 * MIB, Mode.REUSE)

    assert first.to_text() == second.to_text()
    assert _replayed(path, 3 * MIB, mode=Mode.SHARING).to_text() == first.to_text()
    assert _replayed(path, 3 * MIB, mode=Mode.REUSE).to_text() == reuse.to_text()
    assert {"scripted:greedy", "scripted:modest"} <= algorithms_of(first)
    assert algorithms_of(reuse) == {"scripted:greedy"}


def test_a_replay_measures_nothing(chain: tuple[Path, Plan]) -> None:
    listener = Listener()

    mucudnn.tune(a_chain(), a_batch(), MIB, backend=f"replay:{chain[0]}", progress=listener)

    assert listener.measured == 0


def test_a_replay_changes_neither_recording_nor_store(chain: tuple[Path, Plan], store_path: Path) -> None:
    before = chain[0].read_bytes()

    _replayed(chain[0], mode="sharing")

    assert chain[0].read_bytes() == before
    assert not store_path.exists()


def test_a_recording_made_here_is_replayed_to_a_plan_that_can_be_applied(tmp_path: Path) -> None:
    model, path = a_convolution_model(), tmp_path / "recording"
    options: dict[str, Any] = {"policy": "undivided", "progress": False}
    tuned = mucudnn.tune(model, a_batch(), MIB, store=path, **options)

    plan = mucudnn.tune(model, a_batch(), MIB, backend=f"replay:{path}", **options)

    assert plan.to_text() == tuned.to_text()
    assert mucudnn.plan_of(mucudnn.apply(model, plan)) == plan


def test_a_plan_from_elsewhere_is_not_applied(chain: tuple[Path, Plan]) -> None:
    with pytest.raises(PlanMismatchError, match="another environment: backend was scripted, is cpu"):
        mucudnn.apply(a_chain(), _replayed(chain[0]))


@pytest.mark.parametrize("sample", [None, a_batch()])
def test_optimize_refuses_a_recording_before_anything_is_done(
    chain: tuple[Path, Plan], sample: Tensor | None
) -> None:
    model = a_chain()

    with pytest.raises(OptionError, match="optimize must measure where the model runs, but got 'replay:"):
        mucudnn.optimize(model, MIB, sample, backend=f"replay:{chain[0]}")

    assert not model._forward_pre_hooks


# What was never run as a whole


def test_what_was_compared_is_not_predicted(chain: tuple[Path, Plan]) -> None:
    assert [each.is_predicted for each in _evidence(_replayed(chain[0]))] == [False] * 5


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("limit", [2000, 4000, 9000])
def test_both_solvers_plan_within_other_limits(chain: tuple[Path, Plan], mode: Mode, limit: int) -> None:
    plan = _replayed(chain[0], limit, mode=mode)

    plan.check()
    assert (plan.mode, plan.limit_bytes, len(plan.sites)) == (mode, limit, 5)
    assert plan.environment == chain[1].environment


def test_more_workspace_is_never_slower(chain: tuple[Path, Plan]) -> None:
    times = [_replayed(chain[0], limit, mode="sharing").time_s for limit in (2000, 4000, 9000, MIB)]

    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


def test_a_prediction_adds_up_parts_and_set_ups_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    record(path, a_backend(), a_convolution_extraction())

    plan = _replayed_alone(_forget_comparisons(path))

    (evidence,) = _evidence(plan)
    assert _keys(plan) == ["scripted:parts@4*2"]
    assert evidence.is_predicted
    assert evidence.reference is not None
    assert evidence.chosen is not None
    assert (evidence.reference.median, evidence.chosen.median) == pytest.approx((0.008, 0.00414))
    assert (evidence.reference_workspace_bytes, evidence.workspace_bytes) == (8000, 800)
    assert evidence.verdict is Verdict.FASTER
    assert evidence.error is not None


def test_a_prediction_within_the_recorded_noise_replaces_nothing(tmp_path: Path) -> None:
    # Twenty percent faster in its median, but now and then slower.
    noise = itertools.cycle([0.7, 1.0, 1.3])
    rival = Recipe(lambda samples: (0.8 * next(noise) if samples == 4 else 100) * samples * MS)
    backend = ScriptedBackend({"rival": rival})
    path = tmp_path / "recording"
    record(path, backend, a_convolution_extraction())

    plan = _replayed_alone(_forget_comparisons(path))

    (evidence,) = _evidence(plan)
    assert _keys(plan) == ["scripted:aten@8*1"]
    assert (evidence.verdict, evidence.is_predicted) == (Verdict.SAME, True)
    assert [key for key, _ in evidence.rejected] == ["scripted:rival@4*2"]


def test_pytorchs_own_gives_way_to_what_made_it_leave_the_race(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    record(path, ScriptedBackend({"rival": Recipe(rate(0.2 * MS))}), a_convolution_extraction())

    plan = _replayed_alone(_forget_comparisons(path))

    (evidence,) = _evidence(plan)
    assert evidence.reference is not None
    assert evidence.reference.samples == 3
    assert {part.algorithm for division in plan.sites.values() for part in division.parts} == {
        "scripted:rival"
    }


def test_rounds_answer_for_some_of_their_divisions_too(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    (assigned,) = record(path, a_backend(), a_convolution_extraction()).assignments
    with replaying(str(path)) as replay:
        outcome, _ = replay.compare(assigned.problem, [assigned.division], Limits(MIB))

    assert not outcome.is_predicted
    assert list(outcome.estimates) == ["scripted:parts@4*2"]


def test_of_several_rounds_those_with_fewest_others_answer(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    (assigned,) = record(path, a_backend(), a_convolution_extraction()).assignments
    key = assigned.division.key
    alone = Comparison(assigned.problem, {key: Measurement((7, 7, 7))}, {key: 5})
    with SqliteStore(path) as store:
        store.add_comparisons(a_backend().environment(), [alone])
    with replaying(str(path)) as replay:
        outcome, _ = replay.compare(assigned.problem, [assigned.division], Limits(MIB))

    assert outcome.comparison == alone


def test_a_division_that_was_seen_to_be_too_large_is_not_predicted(tmp_path: Path) -> None:
    backend = ScriptedBackend({"greedy": Recipe(rate(0.1 * MS), sample_bytes=100, unforeseen_bytes=2 * MIB)})
    path = tmp_path / "recording"
    record(path, backend, a_convolution_extraction())

    plan = _replayed_alone(_forget_comparisons(path))

    assert _keys(plan) == ["scripted:aten@8*1"]


def test_a_division_that_broke_when_it_was_timed_is_not_predicted(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    record(path, ScriptedBackend({"parts": Recipe(_parts)}), a_convolution_extraction())
    [assigned] = _replayed_alone(_forget_comparisons(path)).assignments
    assert assigned.division.key == "scripted:parts@4*2"
    broken = division_trial(assigned.problem, assigned.division)
    refusal = Refusal(broken.algorithm, broken.problem.batch, RefusalKind.FAILED, "no engine runs it")
    with SqliteStore(path) as store:
        [environment] = store.environments()
        store.add_records(environment, [Record(broken, 800, refusal=refusal)])

    assert _keys(_replayed_alone(path)) == ["scripted:aten@8*1"]


def test_a_division_that_was_refused_for_less_room_is_not_where_it_has_fitted(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    (assigned,) = record(path, a_backend(), a_convolution_extraction()).assignments
    too_large = division_trial(assigned.problem, assigned.division)
    refusal = Refusal(too_large.algorithm, assigned.problem.batch, RefusalKind.OVER_LIMIT, "of its share")
    others = Comparison(assigned.problem, {"another": Measurement((7, 7, 7))}, {"another": 5})
    with SqliteStore(path) as store:
        [environment] = store.environments()
        store.add_records(environment, [Record(too_large, None, refusal=refusal, limit_bytes=100)])
        store.add_comparisons(environment, [others])
    with replaying(str(path)) as replay:
        outcome, refused = replay.compare(assigned.problem, [assigned.division], Limits(MIB))

    assert (list(outcome.estimates), refused) == ([assigned.division.key], ())


def test_a_call_that_broke_after_it_was_timed_does_not_answer_by_these_times(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    (assigned,) = record(path, a_backend(), a_convolution_extraction()).assignments
    call = ModelCall(assigned.problem, is_sharing=False, limit_bytes=MIB)
    base, divisions = (
        {assigned.problem.op: each} for each in (undivided("scripted:aten", 8), assigned.division)
    )
    trial = call.trial(divisions)
    refusal = Refusal(trial.algorithm, trial.problem.batch, RefusalKind.FAILED, "no engine runs it")
    broken = Record(trial, refusal=refusal)
    with replaying(str(path)) as replay:
        assert isinstance(replay.compare_calls(call, base, divisions), Comparison)
    with SqliteStore(path) as store:
        store.add_records(store.environments()[0], [broken])

    with replaying(str(path)) as replay:
        assert replay.compare_calls(call, base, divisions) == broken


def test_a_prediction_counts_what_a_division_was_seen_to_take_in_other_rounds(tmp_path: Path) -> None:
    backend = ScriptedBackend({"greedy": Recipe(_parts, sample_bytes=100, unforeseen_bytes=2 * MIB)})
    path = tmp_path / "recording"
    (assigned,) = record(path, backend, a_convolution_extraction(), 4 * MIB).assignments
    never_run = Division((Candidate("scripted:aten", 4, 0.0, 0),) * 2)
    with replaying(str(path)) as replay:
        outcome, _ = replay.compare(assigned.problem, [assigned.division, never_run], Limits(4 * MIB))

    assert outcome.is_predicted
    assert outcome.workspaces == {"scripted:greedy@4*2": 400 + 2 * MIB, "scripted:aten@4*2": 4000}


def test_what_was_compared_under_a_larger_limit_is_held_to_the_present_one(tmp_path: Path) -> None:
    backend = ScriptedBackend({"greedy": Recipe(_parts, sample_bytes=100, unforeseen_bytes=2 * MIB)})
    path = tmp_path / "recording"
    record(path, backend, a_convolution_extraction(), 4 * MIB)

    plan = _replayed_alone(path, MIB)

    assert _keys(plan) == ["scripted:aten@8*1"]
    assert [each.is_predicted for each in _evidence(plan)] == [False]


# What it never saw


def test_of_a_batch_that_it_holds_it_says_that_the_convolution_is_another(chain: tuple[Path, Plan]) -> None:
    sentence = r"It holds others of 8 samples in float32 contiguous: those of other networks, of "
    with pytest.raises(BackendError, match=sentence):
        mucudnn.tune(a_chain(), a_batch()[:, :, :5, :5], MIB, backend=f"replay:{chain[0]}")


def test_of_sizes_that_its_policy_left_out_it_says_that(chain: tuple[Path, Plan]) -> None:
    with pytest.raises(BackendError, match=r"as a micro-batch, .* A recording has only the sizes of"):
        mucudnn.tune(a_chain(), a_batch(samples=8), MIB, backend=f"replay:{chain[0]}", policy="all")


@pytest.mark.parametrize("policy", ["undivided", "power_of_two"])
def test_a_problem_that_was_never_recorded_is_refused_by_name_beside_what_was(
    chain: tuple[Path, Plan], policy: str
) -> None:
    sentences = (
        rf"fprop 16x3x6x6 .* measured as a whole mini-batch, but .*{chain[0].name} never saw it\. "
        r"It holds mini-batches of 8 samples in float32 contiguous\.$"
    )
    with pytest.raises(BackendError, match=sentences):
        mucudnn.tune(a_chain(), a_batch(samples=16), MIB, backend=f"replay:{chain[0]}", policy=policy)


@pytest.mark.parametrize(
    ("recorded", "sentence"),
    [
        ([a_problem(batch=16), a_problem(batch=2)], "mini-batches of 2 or 16 samples in float32 contiguous"),
        (
            [a_problem(batch=n) for n in (1, 2, 3, 4, 5)],
            "mini-batches of 1 to 5 samples in float32 contiguous",
        ),
        (
            [a_problem(batch=2), a_problem(batch=2, dtype="float64"), a_problem(batch=4, dtype="bfloat16")],
            "mini-batches of 4 samples in bfloat16 contiguous, "
            "and of 2 samples in float32 contiguous or float64 contiguous",
        ),
    ],
)
def test_what_a_recording_holds_is_told_in_a_sentence(
    tmp_path: Path, recorded: Sequence[ConvProblem], sentence: str
) -> None:
    with SqliteStore(tmp_path / "recording") as store:
        trials = [Trial(each, "cpu:a", whole=True) for each in recorded]
        store.add_records(an_environment(), [a_record(each) for each in trials])

        replay = Replay(store, an_environment())
        with pytest.raises(BackendError, match=rf"never saw it\. It holds {sentence}\.$"):
            replay.algorithms(a_problem(batch=64), Search.HEURISTIC, whole=True)


def test_a_recording_of_parts_alone_holds_no_mini_batches(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "recording") as store:
        store.add_records(an_environment(), [a_record(a_trial())])

        replay = Replay(store, an_environment())
        with pytest.raises(BackendError, match=r"never saw it\.$"):
            replay.algorithms(a_problem(), Search.HEURISTIC, whole=True)


def test_a_size_that_was_never_recorded_is_refused_by_name(chain: tuple[Path, Plan]) -> None:
    with pytest.raises(
        BackendError, match=r"fprop 3x3x6x6 .* as a micro-batch, but the recording .* never saw it"
    ):
        _replayed(chain[0], policy="all")


def test_fewer_sizes_than_were_recorded_will_do(chain: tuple[Path, Plan]) -> None:
    plan = _replayed(chain[0], policy="undivided")

    assert {part.batch for division in plan.sites.values() for part in division.parts} == {8}


def test_what_was_too_large_then_is_refused_under_a_larger_limit(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    record(path, a_backend(), a_convolution_extraction(), 2000)

    with pytest.raises(
        BackendError,
        match=(
            r"The recording .* answers limits up to 2000 bytes .* for fprop 8x.*, but not 1048576 bytes "
            r"\(1 MiB\): scripted:aten was too large then, and its time is not known\."
        ),
    ):
        _replayed_alone(path, policy="undivided")


def test_what_is_known_to_be_too_large_for_both_limits_stays_refused(tmp_path: Path) -> None:
    backend = ScriptedBackend(
        {"large": Recipe(rate(MS), sample_bytes=10_000)}, own=Recipe(rate(MS), sample_bytes=1)
    )
    path = tmp_path / "recording"
    record(path, backend, a_convolution_extraction(), 100)

    assert _keys(_replayed_alone(path, 9999)) == ["scripted:aten@8*1"]
    with pytest.raises(
        BackendError, match=r"for fprop 1x.* scripted:large was too large then, and its time is not known"
    ):
        _replayed_alone(path, 10_000)


def test_a_limit_that_nothing_fits_names_one_that_would_do(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    record(path, a_backend(), a_convolution_extraction())

    with pytest.raises(InfeasibleError, match=r"a limit of 10 bytes \(.*\) may be enough"):
        _replayed_alone(path, 0)


def test_a_trial_that_was_never_recorded_is_refused(chain: tuple[Path, Plan]) -> None:
    with (
        replaying(str(chain[0])) as replay,
        pytest.raises(
            BackendError, match=r"cpu:direct for fprop .* must have been measured, but .* never saw"
        ),
    ):
        replay.measure(a_problem(), [a_trial()], MIB)


def test_a_part_that_was_refused_has_no_predicted_time(tmp_path: Path) -> None:
    def off_by_one(problem: object, result: Tensor, behind: Tensor) -> None:
        result.add_(1)

    path = tmp_path / "recording"
    backend = ScriptedBackend({"wrong": Recipe(rate(MS), damage=off_by_one)})
    (assigned,) = record(path, backend, a_convolution_extraction()).assignments
    division = dataclasses.replace(
        assigned.division,
        parts=(dataclasses.replace(assigned.division.parts[0], algorithm="scripted:wrong"),),
    )
    with (
        replaying(str(path)) as replay,
        pytest.raises(
            BackendError, match=r"scripted:wrong for fprop 8x.* must have times, but .* was refused"
        ),
    ):
        replay.compare(assigned.problem, [division], Limits(MIB))


# Which recording


def test_one_of_several_environments_must_be_chosen(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    for backend in (ScriptedBackend({}), Elsewhere({})):
        record(path, backend, an_extraction(a_chain()))

    with pytest.raises(
        OptionError,
        match=(
            r"recording must be followed by # and the number of one of its environments, "
            r"#1: scripted, setting threads unset; #2: scripted, setting threads 9, but got 'replay:"
        ),
    ):
        _replayed(path)
    assert _replayed(path, number="#1").environment.policy == {}
    assert _replayed(path, number="#2").environment.policy == {"threads": "9"}


@pytest.mark.parametrize("number", ["#0", "#2", "#99"])
def test_a_number_that_no_environment_has_is_refused(chain: tuple[Path, Plan], number: str) -> None:
    with pytest.raises(OptionError, match=rf"#1: scripted, but got 'replay:.*{number}'"):
        _replayed(chain[0], number=number)


def test_a_file_may_have_a_number_sign_in_its_name(tmp_path: Path) -> None:
    path = tmp_path / "recording#new"
    record(path, ScriptedBackend({}), an_extraction(a_chain()))

    assert len(_replayed(path).sites) == 5


def test_a_file_that_does_not_exist_is_refused_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="missing cannot be used as a store: there is no such file"):
        _replayed(tmp_path / "missing")

    assert not (tmp_path / "missing").exists()


def test_a_file_that_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("what was measured\n" * 1000)

    with pytest.raises(StoreError, match="text cannot be used as a store: file is not a database"):
        _replayed(tmp_path / "text")


def test_a_store_without_records_is_no_recording(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "empty").close()

    with pytest.raises(StoreError, match="empty must hold a recording, but got a store without records"):
        _replayed(tmp_path / "empty")


def test_a_damaged_row_is_refused_with_the_name_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    record(path, ScriptedBackend({}), a_convolution_extraction())
    execute(path, "UPDATE records SET times = '[]'")

    with pytest.raises(StoreError, match=rf"{re.escape(str(path))} is damaged, a row cannot be read"):
        _replayed_alone(path)


def test_pytorchs_own_need_not_have_been_timed(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    backend = ScriptedBackend({"small": Recipe(rate(MS))}, own=Recipe(rate(MS), sample_bytes=MIB))
    recorded = record(path, backend, a_convolution_extraction(), 1000)

    with SqliteStore(path, read_only=True) as store:
        assert Replay(store, backend.environment()).own == backend.own
    assert _replayed_alone(path, 1000).to_text() == recorded.to_text()


# In a plan


def test_what_was_predicted_says_so_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    record(path, a_backend(), a_convolution_extraction())
    plan = _replayed_alone(_forget_comparisons(path))

    loaded = Plan.from_text(plan.to_text())

    assert loaded == plan
    assert [each.is_predicted for each in _evidence(loaded)] == [True]


def test_what_was_seen_is_written_as_it_was_before_there_were_predictions(chain: tuple[Path, Plan]) -> None:
    text = chain[1].to_text()

    assert "is_predicted" not in text
    assert Plan.from_text(text) == chain[1]


def test_a_plan_that_misnames_what_is_optional_is_refused(chain: tuple[Path, Plan]) -> None:
    fields = json.loads(chain[1].to_text())
    fields["assignments"][0]["evidence"]["is_guessed"] = True

    with pytest.raises(PlanFormatError, match=r"evidence must have reference, .* but got .*is_guessed"):
        Plan.from_text(json.dumps(fields))


def test_pytorchs_own_comes_first_whatever_the_others_are_called(tmp_path: Path) -> None:
    path, extraction = tmp_path / "store.sqlite3", a_convolution_extraction()
    record(path, ScriptedBackend({"a": Recipe(rate(MS)), "z": Recipe(rate(MS))}), extraction)

    with SqliteStore(path) as store:
        replay = Replay(store, store.environments()[0])
        names = replay.algorithms(extraction.calls[0].problem, Search.HEURISTIC, whole=True)

    assert names == ("scripted:aten", "scripted:a", "scripted:z")
