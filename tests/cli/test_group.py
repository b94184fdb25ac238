"""What holds for all commands, and for the demonstration, which is a program of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import digits
from mucudnn.version import __version__
from tests.cli.commands import run
from tests.examples import a_plan


@pytest.mark.parametrize("command", ["tune", "show", "compare", "forecast", "info"])
def test_help_loads_no_torch(command: str) -> None:
    program = (
        "import sys, mucudnn.cli\n"
        f"try: mucudnn.cli.main(['{command}', '--help'])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )

    assert finished.stdout.endswith("0 False False\n")


def test_version_is_that_of_the_package() -> None:
    assert run("--version").stdout == f"mucudnn {__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["tune", "--help"], ["show", "plan.json"]])
def test_where_standard_output_is_full_a_sentence_says_so(arguments: list[str], tmp_path: Path) -> None:
    a_plan().save(tmp_path / "plan.json")

    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "mucudnn", *arguments],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip

    assert ended.returncode == 1
    assert ended.stderr == (
        "mucudnn: Standard output, or another open file, cannot be used: No space left on device.\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", ""],
        ["compare", "models:conv", "--input", "1x3x8x8", "--plan", ""],
        ["info", "--store", ""],
    ],
)
def test_an_empty_name_is_of_no_file(arguments: list[str]) -> None:
    result = run(*arguments)

    assert result.exit_code == 2
    assert "it must name a file, but got ''." in result.stderr


@pytest.mark.parametrize("command", [[], ["tune"], ["show"], ["compare"], ["forecast"], ["info"]])
def test_every_help_has_an_example(command: list[str]) -> None:
    result = run(*command, "--help")

    assert result.exit_code == 0
    assert "Example:\n" in result.stdout


@pytest.mark.parametrize("command", ["tune", "compare", "forecast"])
def test_help_tells_autocast_from_a_cast_of_the_whole_model(command: str) -> None:
    help_text = " ".join(run(command, "--help").stdout.split())

    assert "--dtype TYPE Type that the whole model and its inputs are cast to" in help_text
    assert "--autocast TYPE Run the model in torch.autocast to bf16 or fp16" in help_text
    assert "its parameters keep their type, which --dtype would change" in help_text


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


def test_help_lists_the_commands_in_the_order_in_which_they_are_used() -> None:
    _, _, listed = run("--help").stdout.partition("Commands:\n")

    assert [line.split()[0] for line in listed.splitlines()] == [
        "tune",
        "show",
        "compare",
        "forecast",
        "info",
    ]
