"""`mucudnn show`."""

import json
import os
from pathlib import Path

import pytest

from mucudnn.profile import RefusalKind
from mucudnn.report import render_plan
from mucudnn.store import SqliteStore
from tests.cli.commands import assert_one_sentence, in_a_process, run
from tests.examples import a_plan, a_problem, a_record, an_environment, refused


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    a_plan().save(path)
    return path


def test_show_prints_a_saved_plan(plan_path: Path) -> None:
    result = run("show", plan_path)

    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == render_plan(a_plan()) + "\n"


def test_notes_are_as_wide_as_a_narrow_terminal(plan_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mucudnn.cli.output.columns", lambda _: 60)

    result = run("show", plan_path)

    assert result.stdout == render_plan(a_plan(), width=60) + "\n"
    notes = result.stdout.split("\n\n")[-1].splitlines()
    assert 50 < max(map(len, notes)) <= 60


def test_in_brief_a_plan_is_shown_without_what_its_words_mean(plan_path: Path) -> None:
    whole, brief = (run("show", str(plan_path), *more).stdout for more in ((), ("--brief",)))

    assert whole.startswith(brief.rstrip("\n"))
    for label in ("total ", "sites ", "workspace ", "not tuned "):
        assert f"\n{label}" in brief
    for label in ("now runs ", "chosen in ", "device ", "settings "):
        assert f"\n{label}" in whole
        assert f"\n{label}" not in brief


def test_show_prints_json_and_nothing_else(plan_path: Path) -> None:
    result = run("show", "--json", plan_path)

    assert json.loads(result.stdout)["limit_bytes"] == 2048


def test_show_draws_a_plan_beside_what_it_prints(plan_path: Path, tmp_path: Path) -> None:
    picture = tmp_path / "plan.html"

    result = run("show", plan_path, "--plot", picture)

    assert result.stdout == f"{render_plan(a_plan())}\nIt is drawn in {picture}.\n"
    assert "<svg" in picture.read_text(encoding="utf-8")


def test_where_a_plan_is_drawn_is_said_beside_json(plan_path: Path, tmp_path: Path) -> None:
    result = run("show", plan_path, "--json", "--plot", tmp_path / "plan.svg")

    assert json.loads(result.stdout)["limit_bytes"] == 2048
    assert result.stderr == f"It is drawn in {tmp_path / 'plan.svg'}.\n"


def test_show_works_where_output_knows_no_multiplication_sign(plan_path: Path) -> None:
    finished = in_a_process("show", plan_path, PYTHONIOENCODING="koi8-r")

    assert b"direct 2?16" in finished.stdout


def test_a_reader_who_leaves_early_sees_no_error(plan_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)

    finished = in_a_process("show", plan_path, stdout=writing)

    os.close(writing)
    assert finished.stderr == b""


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "{path} cannot be used: A plan must be a JSON text, but this one is damaged: "),
        ("[]", "{path} cannot be used: A plan must name its schema, but this text does not."),
        (
            "[" * 100_000,
            "{path} cannot be used: A plan must be a JSON text, but this one is nested too deeply.",
        ),
        (
            '{"schema": 1' + "0" * 5000 + "}",
            "{path} cannot be used: A plan's numbers must be at most 1e+100 ",
        ),
        ('{"schema": NaN}', "{path} cannot be used: A plan's numbers must be at most 1e+100 in size, "),
        ('{"schema": 1}', "{path} cannot be used: A plan must be whole, but a field is missing or wrong: "),
        ('{"schema": 99}', "{path} cannot be used: A plan must have schema 7 or lower, but got 99: "),
    ],
)
def test_a_plan_that_cannot_be_used_ends_with_a_sentence(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)

    assert_one_sentence(run("show", path), "mucudnn: " + sentence.format(path=path))


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("environment", "software", ["torch"]),
        ("environment", "device", 5),
        ("problems", "bias", []),
        ("assignments", "path", []),
        ("assignments", "division", [[3, 32, 0.1, 10, 0.0]]),
    ],
)
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_plan_with_a_damaged_field_ends_with_a_sentence_that_names_it(
    tmp_path: Path, part: str, field: str, value: object, options: list[str]
) -> None:
    path = tmp_path / "plan.json"
    fields = json.loads(a_plan().to_text())
    holder = fields[part] if isinstance(fields[part], dict) else fields[part][0]
    holder[field] = value
    path.write_text(json.dumps(fields))

    result = run("show", path, *options)

    assert_one_sentence(result, f"mucudnn: {path} cannot be used: A plan must be whole, ")
    assert f".{field}" in result.stderr


def test_a_plan_that_is_not_there_ends_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"

    assert_one_sentence(run("show", path), f"mucudnn: {path} cannot be used: No such file or directory.")


@pytest.fixture
def filled(store_path: Path) -> Path:
    """The default store, with what was refused of the plan's problem."""
    whole, parts = a_problem(), [a_problem().part(size) for size in (8, 16)]
    with SqliteStore(store_path) as store:
        store.add_records(
            an_environment(),
            [
                refused(
                    whole, "cpu:fft16", RefusalKind.WRONG, "its relative error is 0.5, the bound is 1e-06"
                ),
                *(refused(part, "cpu:winograd4", RefusalKind.FAILED, "no such tile") for part in parts),
            ],
        )
    return store_path


@pytest.mark.usefixtures("filled")
def test_what_was_refused_is_told_with_its_reason(plan_path: Path) -> None:
    result = run("show", plan_path, "--refusals")

    assert (result.exit_code, result.stderr) == (0, "")
    plan, _, told = result.stdout.rpartition("Refused when the plan was made")
    assert plan == render_plan(a_plan()) + "\n\n"
    assert told.splitlines()[2:] == [
        "layer1.conv fprop  32x16x14x12 -> 24, 3x5, stride 2x1, padding 1x2, float32",
        "  cpu:fft16, 32: wrong result, its relative error is 0.5, the bound is 1e-06.",
        "  cpu:winograd4, 8, 16: failed, no such tile.",
    ]


def test_what_was_refused_is_told_as_json(plan_path: Path, filled: Path) -> None:
    result = run("show", plan_path, "--refusals", "--store", filled, "--json")

    report = json.loads(result.stdout)
    refusals = report["refusals"]
    assert (report["report"], report["not_known"]) == ("plan", [])
    assert [(each["algorithm"], each["batch"]) for each in refusals] == [
        ("cpu:winograd4", 8),
        ("cpu:winograd4", 16),
        ("cpu:fft16", 32),
    ]
    assert {each["path"] for each in refusals} == {"layer1.conv"}


@pytest.mark.parametrize("number", ["", "#1"])
def test_what_was_refused_in_a_recording_is_read_as_the_plan_was(
    plan_path: Path, filled: Path, number: str
) -> None:
    result = run("show", plan_path, "--refusals", "--store", f"replay:{filled}{number}")

    assert result.stdout == run("show", plan_path, "--refusals", "--store", filled).stdout
    assert result.exit_code == 0


def test_what_was_refused_in_a_recording_that_comes_with_the_package_is_told(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    model = ("bench.networks:alexnet", "--input", "256x3x224x224", "--limit", "64MiB")
    run("tune", *model, "--backend", "replay:h200", "-o", path)

    result = run("show", path, "--refusals", "--store", "replay:h200")

    assert (result.exit_code, result.stderr) == (0, "")
    assert "Refused when the plan was made" in result.stdout
    assert ", it needs " in result.stdout


@pytest.mark.parametrize("options", [[], ["--refusals"]])
@pytest.mark.usefixtures("filled")
def test_a_report_is_not_taken_for_a_plan(plan_path: Path, tmp_path: Path, options: list[str]) -> None:
    report = tmp_path / "report.json"
    report.write_text(run("show", plan_path, "--json", *options).stdout)

    assert_one_sentence(
        run("show", report),
        f"mucudnn: {report} cannot be used: A plan must be what save or mucudnn tune -o writes, but got a ",
    )


def test_a_store_of_something_else_ends_with_a_sentence(plan_path: Path, store_path: Path) -> None:
    with SqliteStore(store_path) as store:
        store.add_records(an_environment(policy={}), [a_record()])

    assert_one_sentence(
        run("show", plan_path, "--refusals"),
        f"mucudnn: {store_path} must hold what the plan was made from, but has nothing",
    )


def test_a_store_that_is_not_there_is_not_made(plan_path: Path, store_path: Path) -> None:
    result = run("show", plan_path, "--refusals")

    assert_one_sentence(result, f"mucudnn: {store_path}")
    assert "from a recording give --store replay:NAME." in result.stderr
    assert not store_path.exists()


def test_a_store_that_nothing_is_read_from_is_not_ignored(plan_path: Path, tmp_path: Path) -> None:
    result = run("show", plan_path, "--store", tmp_path / "store")

    assert result.exit_code == 2
    assert "only --refusals reads a store" in result.stderr
