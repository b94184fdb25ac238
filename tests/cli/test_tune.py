"""`mucudnn tune`."""

import contextlib
import dataclasses
import importlib
import json
import os
import re
import sqlite3
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from mucudnn.plan import Plan
from mucudnn.report import render_plan
from mucudnn.store import SqliteStore
from tests.alone import Server
from tests.cli.commands import (
    SMALL,
    assert_one_sentence,
    damage,
    in_a_fork,
    in_a_process,
    lasting,
    run,
    tune,
)
from tests.plans import algorithms_of


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What one tuning in a process of its own has left behind."""

    status: int
    stdout: str
    stderr: str
    plan: Path
    store: Path


@pytest.fixture(scope="module")
def tuned(folder: Path) -> Tuned:
    plan, store = folder / "plan.json", folder / "profiles.sqlite3"
    with contextlib.chdir(folder):
        finished = in_a_process("tune", "models_of_a_test:conv", *SMALL, "--store", store, "-o", "plan.json")
    said = lasting(finished.stderr.decode())
    return Tuned(finished.returncode, finished.stdout.decode(), said, plan, store)


def test_tuning_prints_the_plan_and_where_it_is_saved(tuned: Tuned) -> None:
    table, _, rest = tuned.stdout.partition("\nTuned in ")

    assert (tuned.status, tuned.stderr) == (0, "a model is being made\n")
    assert table == render_plan(Plan.load(tuned.plan))
    assert rest.endswith(" s.\nThe plan is saved in plan.json.\n")


def test_tuning_keeps_what_it_measures_in_the_store(tuned: Tuned) -> None:
    with SqliteStore(tuned.store) as store:
        assert store.count() > 0


def test_tuning_again_gives_the_same_plan_and_can_print_it_as_json(tuned: Tuned, tmp_path: Path) -> None:
    again = tmp_path / "again.json"

    result = tune("conv", *SMALL, "--store", tuned.store, "-o", again, "--json")

    assert result.exit_code == 0
    assert (
        json.loads(result.stdout)["sites"][0]["now"]["division"]
        == next(iter(Plan.load(again).sites.values())).key
    )
    assert f"The plan is saved in {again}.\n" in result.stderr


def test_a_reader_who_leaves_early_does_not_cost_the_plan(
    tuned: Tuned, tmp_path: Path, folder: Path, alone: Server
) -> None:
    output = tmp_path / "plan.json"
    arguments = ("tune", "models_of_a_test:conv", *SMALL, "--store", tuned.store, "-o", output)

    with contextlib.chdir(folder):
        left = in_a_fork(alone, *arguments, is_read=False)

    assert (left.returncode, lasting(left.stderr)) == (1, "a model is being made\n")  # as click ends
    assert output.read_text() == tuned.plan.read_text()


def test_a_plan_is_drawn_and_saved(tuned: Tuned, tmp_path: Path) -> None:
    output, picture = tmp_path / "plan.json", tmp_path / "plan.html"

    result = tune("conv", *SMALL, "--store", tuned.store, "-o", output, "--plot", picture)

    assert result.stdout.endswith(f"The plan is saved in {output}.\nIt is drawn in {picture}.\n")
    assert "<svg" in picture.read_text(encoding="utf-8")


def test_a_picture_does_not_take_the_plans_place() -> None:
    result = tune("broken", *SMALL, "-o", "plan.svg", "--plot", "./plan.svg")

    assert (result.exit_code, result.stdout) == (2, "")
    assert "the plan itself is saved in 'plan.svg'." in result.stderr


@pytest.mark.usefixtures("tuned")
def test_where_nothing_can_be_drawn_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    result = tune("broken", *SMALL, "--plot", "plan.svg")

    assert (result.exit_code, result.stdout) == (2, "")
    assert "pip install matplotlib adds it." in result.stderr


def test_a_plan_without_a_file_is_only_shown(tuned: Tuned) -> None:
    result = tune("instance", *SMALL, "--store", tuned.store)

    assert result.exit_code == 0
    assert result.stdout.endswith("The plan is not saved; -o FILE saves it.\n")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--workspace-limit", "16", "A size in a string must name its unit"),
        ("--limit", "-1", "A size must not be negative, but got '-1'."),
        ("--workspace-limit", "-1MiB", "A size must not be negative, but got '-1MiB'."),
        ("--workspace-limit", "1XB", "A unit must be one of"),
        ("--input", "4x3x8x", "it must read like 64x3x32x32, or 64:int64 where"),
        ("--input", "0x3x8x8", "all sizes must be at least 1, but got '0x3x8x8'."),
        ("--input", "4:int65", "but got '4:int65'."),
        ("--input", "4x3x8x8:", "but got '4x3x8x8:'."),
        ("--mode", "both", "'both' is not one of 'reuse', 'sharing'."),
        ("--policy", "some", "'some' is not one of 'undivided', 'power-of-two', 'all'."),
        ("--dtype", "int8", "'int8' is not one of"),
        ("--autocast", "f32", "'f32' is not one of 'bf16', 'bfloat16', 'fp16', 'f16', 'half', 'float16'."),
        ("--search", "some", "'some' is not one of 'heuristic', 'exhaustive'."),
        ("--output", "-", "it must be a file: nothing is written"),
        ("--output", "", "it must name a file, but got ''."),
        ("--plot", "", "it must name a file, but got ''."),
        ("--store", "", "it must name a file, but got ''."),
        (
            "--output",
            "no_such_folder/plan.json",
            "its folder must exist and be writable, but got 'no_such_folder/plan.json'.",
        ),
        ("--output", ".", "is a directory."),
        ("--plot", "plan.gif", "must end in .svg, .pdf, .png, .html, but got 'plan.gif'."),
        ("--plot", "no_such_folder/plan.svg", "its folder must exist and be writable, but got"),
    ],
)
def test_a_wrong_option_is_a_usage_error(option: str, value: str, message: str) -> None:
    result = tune("conv", *SMALL, option, value)

    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{option}'" in result.stderr
    assert message in result.stderr


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("models_of_a_test.py", "File 'models_of_a_test.py' is not writable."),
        ("new.json", "its folder must exist and be writable, but got 'new.json'."),
    ],
)
def test_where_nothing_can_be_written_nothing_is_measured(
    name: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere

    result = tune("broken", *SMALL, "-o", name)

    assert result.exit_code == 2
    assert sentence in result.stderr


@pytest.mark.parametrize(
    "target", ["models_of_a_test", "models_of_a_test:", ":conv", "net.py", "../net.py:conv", "/a/net:conv"]
)
def test_a_target_that_names_no_callable_is_a_usage_error(target: str) -> None:
    result = run("tune", target, *SMALL)

    assert result.exit_code == 2
    assert f"it must read PACKAGE.MODULE:CALLABLE, but got '{target}'." in result.stderr


def test_a_missing_option_is_a_usage_error() -> None:
    result = run("tune", "models_of_a_test:conv", "--input", "4x3x8x8")

    assert result.exit_code == 2
    assert "Missing option '--workspace-limit'" in result.stderr


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("no_such_module:conv", "no_such_module cannot be imported: No module named 'no_such_module'."),
        (
            "broken_models_of_a_test:conv",
            "broken_models_of_a_test cannot be imported: No module named 'a_module_that_is_not_there' "
            "(broken_models_of_a_test.py, line 1).\n",
        ),
        (
            "models_of_a_test:nothing",
            "models_of_a_test:nothing cannot be found: "
            "module 'models_of_a_test' has no attribute 'nothing'.\n",
        ),
        (
            "models_of_a_test:broken",
            "models_of_a_test:broken fails: no weights are here (models_of_a_test.py, line ",
        ),
        (
            "models_of_a_test:silent",
            "models_of_a_test:silent fails: AssertionError (models_of_a_test.py, line",
        ),
        (
            "models_of_a_test:keyless",
            "models_of_a_test:keyless fails: KeyError 'weights' (models_of_a_test.py, line",
        ),
        ("models_of_a_test:leaving", "models_of_a_test:leaving fails: enough (models_of_a_test.py, line"),
        (
            "models_of_a_test:ending",
            "models_of_a_test:ending fails: it ends the program, by SystemExit(3) (models_of_a_test.py, line",
        ),
        (
            "models_of_a_test:needing",
            "models_of_a_test:needing is called without arguments, but is missing a required argument: ",
        ),
        (
            "models_of_a_test:number",
            "models_of_a_test:number must give a torch.nn.Module, but got a value of type int.\n",
        ),
    ],
)
def test_a_model_that_cannot_be_had_ends_with_a_sentence(target: str, sentence: str) -> None:
    assert_one_sentence(run("tune", target, *SMALL), f"mucudnn: {sentence}")


def test_a_factory_whose_wrapper_has_its_arguments_is_called(tmp_path: Path) -> None:
    result = tune("wrapped", *SMALL, "--store", tmp_path / "store")

    assert result.exit_code == 0, result.stderr


def test_a_class_of_modules_that_has_no_forward_ends_with_the_error_of_pytorch() -> None:
    with pytest.raises(Exception, match="forward") as missing:
        torch.nn.Module()(torch.ones(1))

    assert_one_sentence(
        run("tune", "models_of_a_test:nn.Module", *SMALL),
        f"mucudnn: The model must run on the sample, but it raised {missing.typename}(",
    )


def test_a_model_that_ends_the_program_when_it_runs_is_told_and_no_success() -> None:
    assert_one_sentence(tune("Leaving"), "mucudnn: The model has tried to end the program, by SystemExit().")


def test_a_model_without_convolutions_ends_with_a_sentence() -> None:
    result = tune("linear", "--input", "4x3", "--workspace-limit", "1MiB")

    assert_one_sentence(
        result, "mucudnn: The model must have a convolution that can be divided, but it has none."
    )


def test_a_sample_that_the_model_rejects_ends_with_a_sentence() -> None:
    result = tune("instance", "--input", "4x5x8x8", "--workspace-limit", "1MiB")

    assert_one_sentence(result, "mucudnn: The model must run on the sample, but it raised RuntimeError(")


def test_where_a_model_fails_is_told() -> None:
    result = tune("Failing", "--input", "4x3x8x8", "--workspace-limit", "1MiB")

    assert_one_sentence(
        result,
        "mucudnn: The model must run on the sample, but it raised ValueError('the image is too small') "
        "(models_of_a_test.py, line ",
    )


def test_a_limit_that_nothing_fits_ends_with_a_sentence_that_names_the_least() -> None:
    result = tune(
        "wide", "--input", "4x64x32x32", "--workspace-limit", "0B", "--eval", "--policy", "undivided"
    )

    assert_one_sentence(
        result, "mucudnn: No division for 'the model itself fprop' fits the workspace limit of 0 "
    )
    assert re.search(r"a limit of \d+ bytes \(.* MiB\) may be enough", result.stderr)


def test_a_damaged_store_ends_tuning_before_anything_is_run(store_path: Path) -> None:
    damage(store_path)

    assert_one_sentence(
        tune("broken"),
        f"mucudnn: {store_path} cannot be used as a store: file is not a database; move it away, or choose "
        "another store.",
    )


def test_a_store_that_cannot_be_written_is_told_in_one_line(folder: Path) -> None:
    store = folder / "models_of_a_test.py" / "profiles.sqlite3"

    result = tune("conv", *SMALL, "--store", store, "--json")

    assert result.exit_code == 0
    assert json.loads(result.stdout)["mode"] == "reuse"
    assert result.stderr.splitlines()[0].startswith(
        f"mucudnn: What is measured now is not kept: {store} cannot be used as a store: "
    )


def test_an_interrupt_says_that_what_was_measured_is_kept() -> None:
    assert_one_sentence(
        tune("interrupted"),
        "mucudnn: interrupted; finished measurements are kept in the store.",
        status=130,
    )


def test_an_interrupt_of_measuring_again_says_how_to_go_on() -> None:
    assert_one_sentence(
        tune("interrupted", *SMALL, "--again"),
        "mucudnn: interrupted; finished measurements are kept in the store; go on without --again.",
        status=130,
    )


def test_where_a_package_raises_it_is_the_user_s_line_that_is_told() -> None:
    result = run("tune", "models_of_a_test:strange", *SMALL)

    assert_one_sentence(
        result, "mucudnn: models_of_a_test:strange fails: in_channels must be divisible by groups"
    )
    assert re.search(r" \(models_of_a_test\.py, line \d+\)\.\n$", result.stderr)


def test_an_interrupt_promises_nothing_where_nothing_is_kept(folder: Path) -> None:
    store = folder / "models_of_a_test.py" / "profiles.sqlite3"

    result = tune("interrupted", *SMALL, "--store", store)

    assert (result.exit_code, result.stderr.count("\n")) == (130, 1)
    assert "is not kept" in result.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "training True, weight torch.float32 False, inputs [(4, 3, 8, 8)] torch.float32 [False]"),
        (
            ["--eval", "--dtype", "float64"],
            "training False, weight torch.float64 False, inputs [(4, 3, 8, 8)] torch.float64",
        ),
        (
            ["--input", "4:int64", "--input", "4x5:bf16", "--input", "2:bool"],
            "inputs [(4, 3, 8, 8), (4,), (4, 5), (2,)] torch.float32 torch.int64 torch.bfloat16 torch.bool [",
        ),
        (
            ["--channels-last", "--input", "4x5"],
            "weight torch.float32 True, inputs [(4, 3, 8, 8), (4, 5)] torch.float32 torch.float32 [True]",
        ),
    ],
)
def test_model_and_inputs_are_prepared_as_the_options_say(options: list[str], sentence: str) -> None:
    result = tune("Shown", "--input", "4x3x8x8", "--workspace-limit", "1MiB", *options)

    assert sentence in result.stderr


@pytest.mark.parametrize("name", ["bf16", "BF16", "bfloat16"])
def test_types_have_the_names_that_people_give_them(name: str) -> None:
    result = tune("Shown", "--input", "4x3x8x8", "--workspace-limit", "1MiB", "--dtype", name)

    assert "weight torch.bfloat16 False, inputs [(4, 3, 8, 8)] torch.bfloat16" in result.stderr


def test_an_unknown_backend_is_a_usage_error_before_anything_is_imported(store_path: Path) -> None:
    result = run("tune", "no_such_module:conv", *SMALL, "--backend", "tpu")

    assert (result.exit_code, result.stdout) == (2, "")
    assert "backend must be one of 'auto', 'cpu'" in result.stderr
    assert result.stderr.endswith("but got 'tpu'.\n")
    assert not store_path.exists()


def test_choices_may_be_spelt_as_in_python() -> None:
    result = tune("conv", *SMALL, "--policy", "power_of_two", "--max_error", "1", "--json")

    report = json.loads(result.stdout)
    assert (report["policy"], report["max_error"]) == ("power_of_two", 1)


@pytest.mark.parametrize("shape", ["4x3x100000000x100000000", "10000000000x10000000000x10000000000"])
def test_inputs_that_cannot_be_made_end_with_a_sentence(shape: str) -> None:
    result = run("tune", "models_of_a_test:instance", *SMALL, "--input", shape)

    assert_one_sentence(result, "mucudnn: An input of the shape ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_gpu_backend_without_a_gpu_ends_with_a_sentence() -> None:
    assert_one_sentence(
        tune("conv", *SMALL, "--backend", "cudnn"),
        "mucudnn: The backend 'cudnn' must have a GPU that torch can use, but torch.cuda.is_available() is",
    )


def test_a_store_answers_for_the_machine_that_filled_it(tuned: Tuned, tmp_path: Path) -> None:
    replayed = tmp_path / "replayed.json"

    result = tune("conv", *SMALL, "--backend", f"replay:{tuned.store}", "-o", replayed)

    assert result.exit_code == 0, result.stderr
    assert replayed.read_text() == tuned.plan.read_text()
    assert f"by the recording {tuned.store}; nothing was measured here." in result.stdout


def test_a_replay_needs_and_makes_no_store(tuned: Tuned, store_path: Path) -> None:
    result = tune("conv", *SMALL, "--backend", f"replay:{tuned.store}")

    assert result.exit_code == 0
    assert not store_path.exists()


def test_a_replay_takes_no_other_store(tuned: Tuned, tmp_path: Path) -> None:
    result = tune("conv", *SMALL, "--backend", f"replay:{tuned.store}", "--store", tmp_path / "other")

    assert result.exit_code == 2
    assert "a recording is its own store" in result.stderr


def test_a_replay_measures_nothing_again(tuned: Tuned) -> None:
    result = tune("conv", *SMALL, "--backend", f"replay:{tuned.store}", "--again")

    assert result.exit_code == 2
    assert "a recording measures nothing" in result.stderr


def test_what_is_known_may_be_measured_again(tmp_path: Path) -> None:
    store = tmp_path / "profiles.sqlite3"

    def first_date() -> str:
        with contextlib.closing(sqlite3.connect(store)) as database:
            return str(database.execute("SELECT min(date) FROM records").fetchone()[0])

    tune("conv", *SMALL, "--store", store)
    with contextlib.closing(sqlite3.connect(store)) as database, database:
        database.execute("UPDATE records SET date = '2001-01-01'")

    assert tune("conv", *SMALL, "--store", store).exit_code == 0
    assert first_date() == "2001-01-01"
    assert tune("conv", *SMALL, "--store", store, "--again").exit_code == 0
    assert first_date() > "2001-01-01"


def test_what_is_asked_for_is_what_the_model_is_tuned_with(
    tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    def told(model: nn.Module, sample: object, limit_bytes: int, **options: object) -> Plan:
        asked.update(options, limit_bytes=limit_bytes)
        return Plan.load(tuned.plan)

    monkeypatch.setattr("mucudnn.tuner.tune", told)
    options = (
        "--mode",
        "sharing",
        "--search",
        "exhaustive",
        "--policy",
        "all",
        "--max-error",
        "1e-3",
        "--again",
    )

    result = tune("conv", *SMALL[:2], "--workspace-limit", "2MiB", *options)

    assert result.exit_code == 0
    assert asked.pop("store") is not None
    assert asked == {
        "limit_bytes": 2 * 2**20, "mode": "sharing", "search": "exhaustive", "policy": "all",
        "max_error": 1e-3, "backend": "auto", "again": True, "progress": True,
    }  # fmt: skip


@pytest.mark.parametrize("is_inference", [True, False])
def test_a_model_may_be_tuned_within_autocast(is_inference: bool, tmp_path: Path) -> None:
    output, store = tmp_path / "plan.json", tmp_path / "profiles.sqlite3"
    options = [each for each in SMALL if is_inference or each != "--eval"]

    tuned = tune("instance", *options, "--autocast", "bf16", "--store", store, "-o", output)
    again = tune("conv", *options, "--autocast", "BFloat16", "--dtype", "f32", "--backend", f"replay:{store}")

    assert (tuned.exit_code, again.exit_code) == (0, 0)
    assert {each.problem.dtype for each in Plan.load(output).assignments} == {"bfloat16"}
    assert "bfloat16" in again.stdout
    assert importlib.import_module("models_of_a_test").instance.weight.dtype is torch.float32


@pytest.mark.parametrize("command", ["tune", "compare", "forecast"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_autocast_is_for_models_in_float32(command: str, dtype: str, tmp_path: Path) -> None:
    more = {"tune": SMALL[2:], "compare": ("--plan", tmp_path / "plan.json")}.get(command, ())

    result = run(command, "no_such_module:model", *SMALL[:2], *more, "--autocast", "bf16", "--dtype", dtype)

    assert result.exit_code == 2
    assert f"autocast is for models in float32, but got --dtype {dtype}" in result.stderr


@pytest.mark.parametrize("error", ["nan", "inf"])
def test_an_error_without_an_end_is_refused_before_anything_is_done(error: str) -> None:
    result = tune("no_such_model", *SMALL, "--max-error", error)

    assert result.exit_code == 2
    assert f"it must be finite, but got {error}" in result.stderr


def test_an_exacter_result_may_be_asked_for(tuned: Tuned, tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    arguments = ("conv", *SMALL, "--backend", f"replay:{tuned.store}", "--max-error", "0", "-o", str(output))

    result = tune(*arguments)

    assert result.exit_code == 0
    assert algorithms_of(Plan.load(output)) == {"cpu:aten"}


def test_a_file_with_its_folder_in_the_place_of_a_module_is_a_usage_error() -> None:
    result = run("tune", "/models/net.py:conv", *SMALL)

    assert result.exit_code == 2
    assert "did you mean 'net:conv', run in /models?" in result.stderr


@pytest.mark.parametrize(
    ("file", "module"),
    [("models_of_a_test.py", "models_of_a_test"), ("models/net.py", "models.net"), ("./net.py", "net")],
)
def test_a_file_in_the_place_of_a_module_is_a_usage_error(file: str, module: str) -> None:
    result = run("tune", f"{file}:conv", *SMALL)

    assert result.exit_code == 2
    assert f"did you mean '{module}:conv'?" in result.stderr
