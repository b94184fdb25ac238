"""The command line: what it prints, and how it ends."""

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from bench import digits
from mucudnn.backends import BACKENDS
from mucudnn.cli import main, tune_command
from mucudnn.plan import Plan
from mucudnn.report import render_plan
from mucudnn.store import SqliteStore
from mucudnn.version import __version__
from tests.examples import a_plan, a_record, an_environment

MODELS = '''
import sys
import torch
from torch import nn

instance = nn.Conv2d(3, 4, 3)
number = 3

def conv():
    print("a model is being made")
    return nn.Conv2d(3, 4, 3)

def wide():
    return nn.Conv2d(64, 64, 3)

def linear():
    return nn.Linear(3, 4)

def broken():
    raise ValueError("no weights\\nare here")

def silent():
    raise AssertionError

def keyless():
    return {}["weights"]

def leaving():
    sys.exit("enough")

def interrupted():
    raise KeyboardInterrupt

class Shown(nn.Module):
    """Says on what it is run, in an error."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, *images):
        planes = [image for image in images if image.dim() == 4]
        layouts = [image.is_contiguous(memory_format=torch.channels_last) for image in planes]
        weight = self.conv.weight
        raise TypeError(
            f"training {self.training}, weight {weight.dtype} "
            f"{weight.is_contiguous(memory_format=torch.channels_last)}, "
            f"inputs {[tuple(image.shape) for image in images]} {images[0].dtype} {layouts}"
        )
'''

SMALL = ("--input", "4x3x8x8", "--workspace-limit", "1MiB", "--eval", "--policy", "undivided")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a user works: a folder with a module of models."""
    path = tmp_path_factory.mktemp("work")
    (path / "models_of_a_test.py").write_text(MODELS)
    (path / "broken_models_of_a_test.py").write_text("import a_module_that_is_not_there\n")
    return path


@pytest.fixture(autouse=True)
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test runs in the folder; afterwards Python looks for modules where it did before."""
    before = list(sys.path)
    monkeypatch.chdir(folder)
    yield
    sys.path[:] = before


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def tune(name: str, *arguments: str | Path) -> Result:
    return run("tune", f"models_of_a_test:{name}", *(arguments or SMALL))


def in_a_process(
    *arguments: str | Path, stdout: int = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    """Run the command line as a user does, with standard streams that are no terminal."""
    package = Path(__file__).parent.parent
    return subprocess.run(
        [sys.executable, "-m", "mucudnn", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(package), "PYTHONSAFEPATH": "1", **environment},
        stdout=stdout,
        stderr=subprocess.PIPE,
        check=False,
    )


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
    return Tuned(finished.returncode, finished.stdout.decode(), finished.stderr.decode(), plan, store)


def assert_one_sentence(result: Result, start: str, status: int = 1) -> None:
    """The command has printed nothing but one line on standard error, and ended with `status`."""
    assert result.stderr.startswith(start)
    assert (result.stderr.count("\n"), result.stdout, result.exit_code) == (1, "", status)
    assert result.stderr.endswith(".\n")


# What a user does in earnest


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


def test_a_plan_without_a_file_is_only_shown(tuned: Tuned) -> None:
    result = tune("instance", *SMALL, "--store", tuned.store)

    assert result.exit_code == 0
    assert result.stdout.endswith("The plan is not saved; -o FILE saves it.\n")


def test_show_prints_a_saved_plan(tuned: Tuned) -> None:
    result = run("show", tuned.plan)

    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == render_plan(Plan.load(tuned.plan)) + "\n"


def test_show_prints_json_and_nothing_else(tuned: Tuned) -> None:
    result = run("show", "--json", tuned.plan)

    assert json.loads(result.stdout)["limit_bytes"] == 2**20


def test_show_works_where_output_knows_no_multiplication_sign(tmp_path: Path) -> None:
    a_plan().save(tmp_path / "plan.json")

    finished = in_a_process("show", tmp_path / "plan.json", PYTHONIOENCODING="koi8-r")

    assert b"direct 2?16" in finished.stdout


def test_a_reader_who_leaves_early_sees_no_error(tmp_path: Path) -> None:
    a_plan().save(tmp_path / "plan.json")
    reading, writing = os.pipe()
    os.close(reading)

    finished = in_a_process("show", tmp_path / "plan.json", stdout=writing)

    os.close(writing)
    assert finished.stderr == b""


def test_help_loads_no_torch() -> None:
    program = (
        "import sys, mucudnn.cli\n"
        "try: mucudnn.cli.main(['tune', '--help'])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )

    assert finished.stdout.endswith("0 False False\n")


# Help, version and information


def test_version_is_that_of_the_package() -> None:
    assert run("--version").stdout == f"mucudnn {__version__}\n"


@pytest.mark.parametrize("command", [[], ["tune"], ["show"], ["info"]])
def test_every_help_has_an_example(command: list[str]) -> None:
    result = run(*command, "--help")

    assert result.exit_code == 0
    assert "Example:\n" in result.stdout


def test_the_backends_are_those_that_there_are() -> None:
    (option,) = [each for each in tune_command.params if each.name == "backend"]

    assert isinstance(option.type, click.Choice)
    assert tuple(option.type.choices) == ("auto", *BACKENDS)


def test_info_tells_version_environment_and_store(store_path: Path) -> None:
    with SqliteStore(store_path) as store:
        store.add_records(an_environment(), [a_record()])

    result = run("info")

    labels = [line.split()[0] for line in result.stdout.splitlines() if not line.startswith(" ")]
    assert (result.exit_code, result.stderr) == (0, "")
    assert labels == ["mucudnn", "device", "software", "settings", "system", "store"]
    assert f"{store_path}, 1 records" in " ".join(result.stdout.split())  # a long path breaks the line


def test_info_makes_no_store(store_path: Path) -> None:
    assert json.loads(run("info", "--json").stdout)["store"] == {"path": str(store_path), "records": 0}
    assert not store_path.exists()


def test_info_has_facts_as_json() -> None:
    value = json.loads(run("info", "--json").stdout)

    assert value["version"] == __version__
    assert "torch" in value["environment"]["software"]
    assert "threads" in value["environment"]["policy"]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_info_works_beside_a_damaged_store(store_path: Path, options: list[str]) -> None:
    damage(store_path)

    result = run("info", *options)

    assert result.exit_code == 1
    assert result.stderr == f"mucudnn: {store_path} cannot be used as a store: file is not a database.\n"
    assert str(store_path) in result.stdout
    assert __version__ in result.stdout


# What cannot be done


def damage(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("what was measured\n" * 1000)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--workspace-limit", "16", "A size in a string must name its unit"),
        ("--workspace-limit", "-1MiB", "A size must not be negative, but got '-1MiB'."),
        ("--workspace-limit", "1XB", "A unit must be one of"),
        ("--input", "4x3x8x", "it must read like 64x3x32x32, but got '4x3x8x'."),
        ("--input", "0x3x8x8", "it must read like 64x3x32x32, but got '0x3x8x8'."),
        ("--mode", "both", "'both' is not one of 'reuse', 'sharing'."),
        ("--policy", "some", "'some' is not one of 'undivided', 'power-of-two', 'all'."),
        ("--dtype", "int8", "'int8' is not one of"),
        ("--backend", "tpu", "'tpu' is not one of"),
        (
            "--output",
            "no_such_folder/plan.json",
            "its folder must exist, but got 'no_such_folder/plan.json'.",
        ),
        ("--output", ".", "is a directory."),
    ],
)
def test_a_wrong_option_is_a_usage_error(option: str, value: str, message: str) -> None:
    result = tune("conv", *SMALL, option, value)

    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{option}'" in result.stderr
    assert message in result.stderr


@pytest.mark.parametrize("target", ["models_of_a_test", "models_of_a_test:", ":conv", "models/a.py:conv"])
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
            "broken_models_of_a_test cannot be imported: No module named 'a_module_that_is_not_there'.\n",
        ),
        (
            "models_of_a_test:nothing",
            "models_of_a_test:nothing cannot be found: "
            "module 'models_of_a_test' has no attribute 'nothing'.\n",
        ),
        ("models_of_a_test:broken", "models_of_a_test:broken fails: no weights are here.\n"),
        ("models_of_a_test:silent", "models_of_a_test:silent fails: AssertionError.\n"),
        ("models_of_a_test:keyless", "models_of_a_test:keyless fails: KeyError 'weights'.\n"),
        ("models_of_a_test:leaving", "models_of_a_test:leaving fails: enough.\n"),
        (
            "models_of_a_test:number",
            "models_of_a_test:number must give a torch.nn.Module, but got a value of type int.\n",
        ),
        (
            "models_of_a_test:nn.Module",
            "The model must run on the sample, but it raised NotImplementedError(",
        ),
    ],
)
def test_a_model_that_cannot_be_had_ends_with_a_sentence(target: str, sentence: str) -> None:
    assert_one_sentence(run("tune", target, *SMALL), f"mucudnn: {sentence}")


def test_a_model_without_convolutions_ends_with_a_sentence() -> None:
    result = tune("linear", "--input", "4x3", "--workspace-limit", "1MiB")

    assert_one_sentence(
        result, "mucudnn: The model must have a convolution that can be divided, but it has none."
    )


def test_a_sample_that_the_model_rejects_ends_with_a_sentence() -> None:
    result = tune("instance", "--input", "4x5x8x8", "--workspace-limit", "1MiB")

    assert_one_sentence(result, "mucudnn: The model must run on the sample, but it raised RuntimeError(")


def test_a_limit_that_nothing_fits_ends_with_a_sentence_that_names_the_least() -> None:
    result = tune(
        "wide", "--input", "4x64x32x32", "--workspace-limit", "0B", "--eval", "--policy", "undivided"
    )

    assert_one_sentence(
        result, "mucudnn: No division for 'the model itself fprop' fits the workspace limit of 0 "
    )
    assert re.search(r"a limit of \d+ bytes \(.* MiB\) would do", result.stderr)


def test_a_damaged_store_ends_tuning_before_anything_is_run(store_path: Path) -> None:
    damage(store_path)

    assert_one_sentence(
        tune("broken"), f"mucudnn: {store_path} cannot be used as a store: file is not a database."
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
        tune("interrupted"), "mucudnn: interrupted; what was measured is kept in the store.", status=130
    )


def test_an_interrupt_promises_nothing_where_nothing_is_kept(folder: Path) -> None:
    store = folder / "models_of_a_test.py" / "profiles.sqlite3"

    result = tune("interrupted", *SMALL, "--store", store)

    assert (result.exit_code, result.stderr.count("\n")) == (130, 1)
    assert "is not kept" in result.stderr


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
        ('{"schema": 99}', "{path} cannot be used: A plan must have schema 1 or lower, but got 99: "),
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


# How the model is prepared


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "training True, weight torch.float32 False, inputs [(4, 3, 8, 8)] torch.float32 [False]"),
        (
            ["--eval", "--dtype", "float64"],
            "training False, weight torch.float64 False, inputs [(4, 3, 8, 8)] torch.float64",
        ),
        (
            ["--channels-last", "--input", "4x5"],
            "weight torch.float32 True, inputs [(4, 3, 8, 8), (4, 5)] torch.float32 [True]",
        ),
    ],
)
def test_model_and_inputs_are_prepared_as_the_options_say(options: list[str], sentence: str) -> None:
    result = tune("Shown", "--input", "4x3x8x8", "--workspace-limit", "1MiB", *options)

    assert sentence in result.stderr


# The demonstration, which is a program of its own


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (PermissionError(13, "Permission denied", "build"), "build cannot be used: Permission denied."),
        (OSError("the disk is gone"), "A file cannot be used: the disk is gone."),
    ],
)
def test_the_demonstration_ends_with_a_sentence_if_a_file_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OSError, sentence: str
) -> None:
    def fail(options: object) -> None:
        raise error

    monkeypatch.setattr(digits, "_demonstrate", fail)
    monkeypatch.setattr(sys, "argv", ["digits"])

    assert digits.main() == 1
    assert capsys.readouterr().err == f"mucudnn: {sentence}\n"
