"""What a plan is worth within a step, as text and as JSON."""

import dataclasses
import json

import pytest

from mucudnn.comparing.step_comparison import PairedTimes, StepComparison
from mucudnn.plan import Plan
from mucudnn.report import comparison_as_json, render_comparison
from tests.comparing.plans import assigned, planned
from tests.report.comparisons import FOUND, MS, PLAN, SETTLED


def note(found: StepComparison, label: str) -> str | None:
    """Return a note without its line breaks, or None if there is none."""
    text = render_comparison(found, width=10_000)
    lines = [line for line in text.splitlines() if line.startswith(f"{label} ")]
    return lines[0].removeprefix(label).strip() if lines else None


def table_of(found: StepComparison) -> list[str]:
    """Return the rows without their spaces."""
    lines = render_comparison(found).split("\n\n")[1].splitlines()
    return [" ".join(line.split()) for line in lines if "-" * 20 not in line]


def test_the_table_has_the_step_its_convolutions_and_each_of_them() -> None:
    assert table_of(FOUND) == [
        "before, ms now, ms saved, ms speedup verdict",
        "the whole step 101.0 [100.0, 102.0] 80.00 [80.00, 80.00] 21.00 1.26 [1.25, 1.27] FASTER",
        "its patched convolutions 70.00 42.00 28.00 1.67",
        "stem 60.00 [60.00, 60.00] 30.00 [30.00, 30.00] 30.00 2.00 [2.00, 2.00] FASTER",
        "head 10.00 [10.00, 10.00] 12.00 [12.00, 12.00] -2.000 0.83 [0.83, 0.83] SLOWER",
    ]


def test_what_is_saved_is_what_pays_for_tuning() -> None:
    spans = [(100, 88), (200, 188), (120, 150)]  # medians of 120 and 150, and mostly 12 saved
    step = PairedTimes(*(tuple(span * MS for span in each) for each in zip(*spans * 4, strict=True)))

    found = dataclasses.replace(FOUND, step=step)

    assert " 120.0 [100.0, 200.0] 150.0 [88.0, 188.0] 12.00 1.06 " in table_of(found)[1]
    assert "each minute that it took is paid back by 5000 steps" in (note(found, "tuning") or "")


def test_the_title_says_what_stands_against_what() -> None:
    title = render_comparison(FOUND, width=1000).splitlines()[0]

    assert "PyTorch's own convolutions, whatever they take (before)" in title
    assert "with the plan (now: reuse of 9.766 KiB)" in title


def test_notes_tell_rounds_shares_and_what_pays_for_tuning() -> None:
    rounds = "10 of the whole step, 10 more of its convolutions. Comparisons: 3;"
    assert (note(FOUND, "rounds") or "").startswith(rounds)
    assert "about 69% of the step before and 52% now" in (note(FOUND, "convolutions") or "")
    assert note(FOUND, "tuning") == (
        "Each minute that it took is paid back by 2857 steps (2727 at best, 3000 at worst)."
    )
    assert (note(FOUND, "others") or "").startswith("Other processes took 0.25 processors meanwhile.")


def test_what_may_save_nothing_may_never_pay() -> None:
    step = PairedTimes((100 * MS,) * 10, (80 * MS,) * 8 + (110 * MS,) * 2)

    told = note(dataclasses.replace(FOUND, step=step), "tuning")

    assert told == (
        "If the step is faster at all, each minute that it took is paid back by 3000 steps (3000 at best, "
        "perhaps never)."
    )


def test_what_is_slower_is_named_with_what_becomes_of_it() -> None:
    stuck = dataclasses.replace(FOUND, settled=PLAN)
    kept = dataclasses.replace(FOUND, plan=SETTLED)
    fine = dataclasses.replace(FOUND, layers=FOUND.layers[:1], slower=(), settled=PLAN)

    assert "runs PyTorch's own at head: mucudnn.apply(model, found.settled)" in (note(FOUND, "slower") or "")
    assert (note(stuck, "slower") or "").startswith(
        "The settled plan cannot run PyTorch's own again at head: it takes more than it may there"
    )
    assert (note(kept, "slower") or "").startswith(
        "At head PyTorch's own runs both times. With the plan each call"
    )
    assert note(fine, "slower") is None


@pytest.mark.parametrize(
    ("now", "settled", "advice"),
    [
        ((100,) * 10, SETTLED, "The step is not found faster with the plan. Try the settled plan."),
        ((100,) * 10, PLAN, "The step is not found faster with the plan. Do not apply it;"),
        ((120,) * 10, PLAN, "The step is slower with the plan. Do not apply it;"),
        ((90, 110) * 5, PLAN, "The step is not found faster with the plan. More rounds may tell."),
    ],
)
def test_a_step_that_is_not_faster_is_told_so(now: tuple[int, ...], settled: Plan, advice: str) -> None:
    found = dataclasses.replace(FOUND, step=PairedTimes((100,) * 10, now), settled=settled)

    assert (note(found, "advice") or "").startswith(advice)


def test_a_step_that_is_faster_needs_no_advice() -> None:
    assert note(FOUND, "advice") is None
    same = dataclasses.replace(FOUND, step=PairedTimes((100,) * 10, (100,) * 10))
    assert note(same, "tuning") == "The step saves no time that would pay for it."


def test_where_the_limit_forbids_pytorchs_own_is_marked_and_told() -> None:
    plan = planned(assigned("stem", reference=None), dataclasses.replace(assigned("head"), evidence=None))
    found = dataclasses.replace(FOUND, plan=plan)

    assert [line.rpartition("] ")[2] for line in table_of(found)[3:]] == ["FASTER, over limit", "SLOWER"]
    assert (note(found, "over limit") or "").startswith("At 1 of these the limit forbids PyTorch's own")
    assert note(FOUND, "over limit") is None


def test_convolutions_that_were_not_seen_are_counted() -> None:
    alone = dataclasses.replace(FOUND, layers=())

    assert note(FOUND, "not seen") == (
        "side.0 and 1 more: not called in each step, or only in a compiled graph."
    )
    assert "unless it replays a graph captured earlier" in (note(alone, "not seen") or "")
    assert note(dataclasses.replace(FOUND, unseen=()), "not seen") is None


def test_where_no_convolution_was_seen_that_is_told_before_what_the_step_is_worth() -> None:
    alone = render_comparison(dataclasses.replace(FOUND, layers=()), width=10_000)

    assert alone.index("\nnot seen ") < alone.index("\ntuning ")


def test_a_step_that_shows_no_convolution_and_no_difference_is_given_no_advice() -> None:
    chance = PairedTimes((100,) * 10, (90, 110) * 5)
    alone = render_comparison(dataclasses.replace(FOUND, step=chance, layers=()), width=10_000)

    assert "Either the step does not call this model: then the same ran both times." in alone
    assert not {"tuning", "advice"} & {line.split(" ")[0] for line in alone.splitlines()}


def test_convolutions_that_take_more_than_the_step_are_told_to_be_disturbed() -> None:
    disturbed = dataclasses.replace(FOUND, step=PairedTimes((100 * MS,) * 10, (40 * MS,) * 10))

    told = note(disturbed, "convolutions") or ""
    assert "about 70% of the step before and 105% now: more than all of it" in told
    assert "more than all of it" not in (note(FOUND, "convolutions") or "")


def test_of_a_step_of_some_microseconds_small_differences_are_said_to_tell_nothing() -> None:
    short = dataclasses.replace(FOUND, step=PairedTimes((49_000,) * 10, (49_000,) * 10))

    assert (note(short, "short") or "").startswith(
        "In a step of less than 50 µs a difference of a microsecond"
    )
    assert note(FOUND, "short") is None


def test_a_step_without_convolutions_that_are_seen_tells_of_itself_alone() -> None:
    alone = dataclasses.replace(FOUND, layers=())

    assert (note(alone, "rounds"), note(alone, "convolutions")) == ("10 of the whole step.", None)


@pytest.mark.parametrize(
    ("pages", "words"),
    [
        ((2000.0, 1500.0), "glibc, which gives the end of its heap back"),
        ((100.0, 2000.0), "this plan is refused. A plan, too, gives back the end of its buffer"),
        ((900.0, 900.0), "costs it some 0.9 ms."),
        ((700.0, 700.0), None),  # less than a hundredth of 80 ms
        (None, None),
    ],
)
def test_pages_that_come_anew_are_told_where_they_matter(
    pages: tuple[float, float] | None, words: str | None
) -> None:
    told = note(dataclasses.replace(FOUND, pages=pages), "memory")

    assert told is None if words is None else words in (told or "")


@pytest.mark.parametrize("now", [1500, 2400])
def test_who_has_set_glibc_already_is_not_told_to_and_only_more_pages_are_the_plans(now: int) -> None:
    policy = {**PLAN.environment.policy, "MALLOC_TRIM_THRESHOLD_": "1"}
    plan = dataclasses.replace(PLAN, environment=dataclasses.replace(PLAN.environment, policy=policy))

    told = note(dataclasses.replace(FOUND, plan=plan, pages=(2000.0, float(now))), "memory")

    assert told == (
        f"Each step gets fresh pages of memory from the system, 2000 before and {now} now, which costs it "
        "some 2 ms."
    )


def test_many_more_pages_than_before_may_be_the_plans() -> None:
    told = note(dataclasses.replace(FOUND, pages=(2000.0, 2600.0)), "memory")

    assert str(told).endswith("needs that room within the limit; a larger limit prevents that.")


def test_what_others_took_is_not_told_where_it_is_not_known() -> None:
    assert note(dataclasses.replace(FOUND, others=None), "others") is None


def test_the_model_itself_has_a_name() -> None:
    itself = dataclasses.replace(FOUND, layers=(dataclasses.replace(FOUND.layers[0], path=""),))

    assert "\n  the model itself " in render_comparison(itself)


def test_no_note_is_wider_than_asked_for() -> None:
    title, _, notes = render_comparison(FOUND, width=70).split("\n\n")

    assert max(map(len, [*title.splitlines(), *notes.splitlines()])) <= 70


def test_json_has_the_nanoseconds_of_every_round() -> None:
    values = json.loads(json.dumps(comparison_as_json(FOUND), allow_nan=False))

    assert values["report"] == "step"
    assert values["step"]["before_ns"] == [100 * MS, 102 * MS] * 5
    assert values["step"]["speedup"]["median"] == pytest.approx(1.2625)
    assert [(each["path"], each["verdict"]) for each in values["convolutions"]] == [
        ("stem", "FASTER"),
        ("head", "SLOWER"),
    ]
    assert (values["slower"], values["taken_back"], values["over_limit"]) == (["head"], ["head"], [])
    assert (values["unseen"], values["pages"]) == (["side.0", "side.1"], {"before": 10, "now": 20})
    assert values["environment"] == json.loads(json.dumps(PLAN.environment.to_json()))


def test_json_of_rounds_that_have_no_interval_has_no_infinity() -> None:
    short = dataclasses.replace(FOUND, step=PairedTimes((100,), (50,)), layers=())

    values = json.loads(json.dumps(comparison_as_json(short), allow_nan=False))
    assert (values["step"]["now"]["low_s"], values["step"]["now"]["high_s"]) == (None, None)


def test_what_does_not_run_as_planned_is_named_with_what_to_do() -> None:
    found = dataclasses.replace(FOUND, slower=(), settled=FOUND.plan, unplanned=("stem", "head"))

    told = note(found, "not as planned")

    assert told is not None
    assert told.startswith("stem and 1 more: the step does not run all that the plan has there. It has")
    assert table_of(found)[-2].endswith("FASTER, not as planned")
    assert comparison_as_json(found)["unplanned"] == ["stem", "head"]
    assert note(FOUND, "not as planned") is None


def test_what_is_no_longer_patched_is_named() -> None:
    found = dataclasses.replace(FOUND, layers=(), unseen=(), slower=(), unpatched=("stem",))

    assert (note(found, "not patched") or "").startswith(
        "stem: the model no longer runs what the plan has there"
    )
    assert note(found, "no patches") is None
    assert note(found, "tuning") is None
    assert comparison_as_json(found)["unpatched"] == ["stem"]
    assert note(FOUND, "not patched") is None


def test_where_nothing_is_patched_there_is_no_verdict_on_chance() -> None:
    plan = dataclasses.replace(PLAN, assignments=())
    slower = PairedTimes((100 * MS,) * 10, (120 * MS,) * 10)
    found = dataclasses.replace(FOUND, step=slower, layers=(), unseen=(), slower=(), plan=plan, settled=plan)

    assert table_of(found)[-1].endswith("own")
    assert note(found, "no patches") is not None


def test_a_step_that_is_not_faster_and_runs_another_thing_is_not_blamed_on_the_plan() -> None:
    slower = PairedTimes((100 * MS,) * 10, (120 * MS,) * 10)
    found = dataclasses.replace(FOUND, step=slower, slower=(), settled=FOUND.plan, unplanned=("stem",))

    assert note(found, "advice") == (
        "The step is slower with the plan. But the step does not run all of the plan, see below."
    )


def test_a_limit_is_told_of_at_the_rows_alone() -> None:
    rows = tuple(
        dataclasses.replace(each, evidence=dataclasses.replace(each.evidence, reference=None))
        for each in PLAN.assignments
        if each.evidence is not None
    )
    plan = dataclasses.replace(PLAN, assignments=rows)
    found = dataclasses.replace(FOUND, plan=plan, slower=(), settled=plan)

    assert str(note(found, "over limit")).startswith("At 2 of these the limit forbids")
    assert str(note(dataclasses.replace(found, layers=FOUND.layers[:1]), "over limit")).startswith("At 1 of")
    assert note(dataclasses.replace(found, layers=()), "over limit") is None
