"""What a plan is worth within a step, as text and as JSON."""

import dataclasses
import json

import pytest

from mucudnn.plan import Plan
from mucudnn.report import comparison_as_json, render_comparison
from mucudnn.step_comparison import LayerComparison, PairedTimes, StepComparison
from mucudnn.taking_back import taken_back
from tests.test_taking_back import OWN, assigned, planned

MS = 10**6
PLAN = planned(assigned("stem"), assigned("head"))
SLOWER = LayerComparison("head", PairedTimes((10 * MS,) * 10, (12 * MS,) * 10))
SETTLED = taken_back(PLAN, [SLOWER], OWN)

FOUND = StepComparison(
    step=PairedTimes((100 * MS, 102 * MS) * 5, (80 * MS,) * 10),
    layers=(
        LayerComparison("stem", PairedTimes((60 * MS,) * 10, (30 * MS,) * 10)),
        SLOWER,
    ),
    unseen=("side.0", "side.1"),
    others=0.25,
    pages=(10.0, 20.0),
    plan=PLAN,
    slower=("head",),
    settled=SETTLED,
)


def note(found: StepComparison, label: str) -> str | None:
    """Return a note without its line breaks, or None if there is none."""
    text = render_comparison(found, width=10_000)
    lines = [line for line in text.splitlines() if line.startswith(f"{label} ")]
    return lines[0].removeprefix(label).strip() if lines else None


def test_the_table_has_the_step_and_each_convolution() -> None:
    table = render_comparison(FOUND).split("\n\n")[1].splitlines()

    assert [" ".join(line.split()) for line in table if "-" * 20 not in line] == [
        "before, ms now, ms speedup verdict",
        "the whole step 101.0 [100.0, 102.0] 80.00 [80.00, 80.00] 1.26 [1.25, 1.27] FASTER",
        "stem 60.00 [60.00, 60.00] 30.00 [30.00, 30.00] 2.00 [2.00, 2.00] FASTER",
        "head 10.00 [10.00, 10.00] 12.00 [12.00, 12.00] 0.83 [0.83, 0.83] SLOWER",
    ]


def test_notes_tell_rounds_shares_and_what_pays_for_tuning() -> None:
    assert (note(FOUND, "rounds") or "").startswith(
        "10 of the whole step, 10 more of its convolutions. Comparisons: 3;"
    )
    assert "about 69% of the step before and 52% now" in (note(FOUND, "convolutions") or "")
    assert note(FOUND, "tuning") == "A minute of it is paid back after 2857 [2727, 3000] steps."
    assert note(FOUND, "others") == "They took 0.25 processors meanwhile; a data loader's workers count."


def test_what_is_slower_is_named_with_what_becomes_of_it() -> None:
    stuck = dataclasses.replace(FOUND, settled=PLAN)
    kept = dataclasses.replace(FOUND, plan=SETTLED)
    fine = dataclasses.replace(FOUND, layers=FOUND.layers[:1], slower=(), settled=PLAN)

    assert note(FOUND, "slower") == "The settled plan leaves head as before."
    assert (note(stuck, "slower") or "").startswith(
        "It cannot leave head as before: PyTorch's own takes more"
    )
    assert note(kept, "slower") == "head, by what a patched call costs."
    assert note(fine, "slower") is None


@pytest.mark.parametrize(
    ("now", "settled", "advice"),
    [
        ((100,) * 10, SETTLED, "Apply the settled plan, and compare again."),
        ((100,) * 10, PLAN, "mucudnn.restore(model) takes the plan back."),
        ((120,) * 10, PLAN, "mucudnn.restore(model) takes the plan back."),
        ((90, 110) * 5, PLAN, "more rounds may tell."),
    ],
)
def test_a_step_that_is_not_faster_is_told_so(now: tuple[int, ...], settled: Plan, advice: str) -> None:
    found = dataclasses.replace(FOUND, step=PairedTimes((100,) * 10, now), settled=settled)

    assert (note(found, "advice") or "").startswith("The step is not found faster")
    assert (note(found, "advice") or "").endswith(advice)


def test_a_step_that_is_faster_needs_no_advice() -> None:
    assert note(FOUND, "advice") is None
    same = dataclasses.replace(FOUND, step=PairedTimes((100,) * 10, (100,) * 10))
    assert note(same, "tuning") == "Nothing is saved that would pay for it."


def test_where_the_limit_forbids_pytorchs_own_is_told() -> None:
    plan = planned(assigned("stem", reference=None), assigned("head"))

    assert note(dataclasses.replace(FOUND, plan=plan), "before") == (
        "PyTorch's own takes more than the limit at stem; it ran all the same."
    )
    assert note(FOUND, "before") is None


def test_convolutions_that_were_not_seen_are_counted() -> None:
    alone = dataclasses.replace(FOUND, layers=())

    assert note(FOUND, "not seen") == (
        "side.0 and 1 more: not called in each step, or only by a compiled graph."
    )
    assert "has run the same both ways" in (note(alone, "not seen") or "")
    assert note(dataclasses.replace(FOUND, unseen=()), "not seen") is None


def test_a_step_without_convolutions_that_are_seen_tells_of_itself_alone() -> None:
    alone = dataclasses.replace(FOUND, layers=())

    assert (note(alone, "rounds"), note(alone, "convolutions")) == ("10 of the whole step.", None)


@pytest.mark.parametrize(
    ("pages", "words"),
    [
        ((2000.0, 1500.0), "glibc, which gives the end of its heap back"),
        ((100.0, 2000.0), "a larger limit prevents that"),
        ((700.0, 700.0), None),  # less than a hundredth of 80 ms
        (None, None),
    ],
)
def test_pages_that_come_anew_are_told_where_they_matter(
    pages: tuple[float, float] | None, words: str | None
) -> None:
    told = note(dataclasses.replace(FOUND, pages=pages), "memory")

    assert told is None if words is None else words in (told or "")


def test_who_has_set_glibc_already_is_not_told_to() -> None:
    policy = {**PLAN.environment.policy, "MALLOC_TRIM_THRESHOLD_": "1"}
    plan = dataclasses.replace(PLAN, environment=dataclasses.replace(PLAN.environment, policy=policy))

    told = note(dataclasses.replace(FOUND, plan=plan, pages=(2000.0, 1500.0)), "memory")

    assert told == "A step takes 2000 pages anew from the system before, 1500 now, at 1 µs or more."


def test_what_others_took_is_not_told_where_it_is_not_known() -> None:
    assert note(dataclasses.replace(FOUND, others=None), "others") is None


def test_the_model_itself_has_a_name() -> None:
    itself = dataclasses.replace(FOUND, layers=(dataclasses.replace(FOUND.layers[0], path=""),))

    assert "\n  the model itself " in render_comparison(itself)


def test_no_note_is_wider_than_asked_for() -> None:
    notes = render_comparison(FOUND, width=70).split("\n\n")[2]

    assert max(map(len, notes.splitlines())) <= 70


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
    assert (values["step"]["now"]["low"], values["step"]["now"]["high"]) == (None, None)
