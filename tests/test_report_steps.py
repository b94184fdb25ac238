"""What a plan is worth within a step, as text and as JSON."""

import dataclasses
import json

import pytest

from mucudnn.report import comparison_as_json, render_comparison
from mucudnn.step_comparison import LayerComparison, PairedTimes, StepComparison
from mucudnn.taking_back import taken_back
from tests.test_taking_back import OWN, assigned, planned

MS = 10**6
PLAN = planned(assigned("stem"), assigned("head"))
SETTLED = taken_back(PLAN, ["head"], OWN)

FOUND = StepComparison(
    step=PairedTimes((100 * MS, 102 * MS) * 5, (80 * MS,) * 10),
    layers=(
        LayerComparison("stem", PairedTimes((60 * MS,) * 10, (30 * MS,) * 10)),
        LayerComparison("head", PairedTimes((10 * MS,) * 10, (12 * MS,) * 10)),
    ),
    unseen=("side.0", "side.1"),
    others=0.25,
    pages=(10.0, 20.0),
    plan=PLAN,
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
    assert (note(FOUND, "rounds") or "").startswith("10 of the whole step, 10 more of its convolutions.")
    assert "69% of the step before and 52% now" in (note(FOUND, "convolutions") or "")
    assert note(FOUND, "tuning") == "A minute of it is paid back after 2857 [2727, 3000] steps."
    assert note(FOUND, "others") == "They took 0.25 processors meanwhile; a data loader's workers count."


def test_what_is_slower_is_named_with_what_becomes_of_it() -> None:
    stuck = dataclasses.replace(FOUND, settled=PLAN)
    fine = dataclasses.replace(FOUND, layers=FOUND.layers[:1], settled=PLAN)

    assert note(FOUND, "slower") == "The settled plan leaves head as before."
    assert note(stuck, "slower") == "The limit does not allow PyTorch's own for head."
    assert note(fine, "slower") is None


def test_a_step_that_is_not_faster_is_told_so() -> None:
    same = dataclasses.replace(FOUND, step=PairedTimes((100,) * 10, (100,) * 10))

    assert "mucudnn.restore(model) takes the plan back" in (note(same, "advice") or "")
    assert note(same, "tuning") == "Nothing is saved that would pay for it."
    assert note(FOUND, "advice") is None


def test_convolutions_that_were_not_seen_are_counted() -> None:
    assert (note(FOUND, "not seen") or "").startswith("side.0 and 1 more: not called in each step")
    assert note(dataclasses.replace(FOUND, unseen=()), "not seen") is None


def test_a_step_without_convolutions_that_are_seen_tells_of_itself_alone() -> None:
    alone = dataclasses.replace(FOUND, layers=())

    assert (note(alone, "rounds"), note(alone, "convolutions")) == ("10 of the whole step.", None)


@pytest.mark.parametrize("pages", [(10.0, 300.0), (300.0, 10.0)])
def test_pages_that_come_anew_are_told_when_they_are_many(pages: tuple[float, float]) -> None:
    text = note(dataclasses.replace(FOUND, pages=pages), "memory")

    assert (text or "").startswith(f"A step takes {pages[0]:.0f} pages anew from the system before")
    assert note(FOUND, "memory") is None


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
    assert values["step"]["speedup"] == pytest.approx(1.2625)
    assert [(each["path"], each["verdict"]) for each in values["convolutions"]] == [
        ("stem", "FASTER"),
        ("head", "SLOWER"),
    ]
    assert (values["unseen"], values["pages"], values["is_settled"]) == (
        ["side.0", "side.1"],
        [10, 20],
        False,
    )
