"""What commands print beside their results."""

import io
import os
import subprocess
import sys
import warnings

import pytest

from mucudnn import errors
from mucudnn.cli.output import columns, print_report, warnings_as_lines

OURS = [
    each
    for each in vars(errors).values()
    if isinstance(each, type) and issubclass(each, errors.MucudnnWarning)
]


@pytest.mark.parametrize("kind", OURS)
def test_warnings_of_ours_are_lines(kind: type[Warning], capsys: pytest.CaptureFixture[str]) -> None:
    with warnings_as_lines():
        for _ in range(2):
            warnings.warn("something\n is the matter", kind, stacklevel=1)

    assert capsys.readouterr().err == "mucudnn: something is the matter\n" * 2


def test_warnings_of_others_are_left_to_python(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="something is the matter"), warnings_as_lines():
        warnings.warn("something is the matter", UserWarning, stacklevel=1)

    assert capsys.readouterr().err == ""


def test_there_are_warnings_of_ours() -> None:
    assert {errors.UntunedWarning, errors.BusyWarning} < {*OURS}


def test_an_output_that_was_closed_before_the_start_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)

    assert columns(118) == 118


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "expected"), [(_Terminal(), 60), (io.StringIO(), 118)])
def test_a_terminal_tells_its_width(
    stream: io.StringIO, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("COLUMNS", "60")

    assert columns(118) == expected


@pytest.mark.parametrize(
    ("stream", "is_told"), [(_Terminal(), True), (io.StringIO(), False)], ids=["terminal", "pipe"]
)
def test_a_report_that_is_wider_than_the_terminal_is_told_to_be(
    stream: io.StringIO, is_told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("COLUMNS", "60")

    print_report(f"{'x' * 60}\n")
    before = capsys.readouterr().err
    print_report(f"a title\n{'x' * 61}\n")

    assert before == ""
    assert ("The table has 61 columns, and this terminal 60" in capsys.readouterr().err) == is_told
    assert stream.getvalue().count("x") == 121


class _Broken(io.StringIO):
    """A stream whose reader has left."""

    def write(self, _text: str) -> int:
        raise BrokenPipeError


def test_a_warning_that_nobody_can_read_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", _Broken())

    with warnings_as_lines():
        warnings.warn("something is the matter", errors.BusyWarning, stacklevel=1)


def _run(script: str) -> "subprocess.CompletedProcess[str]":
    """Run a script whose standard output C keeps in a buffer, as it does where that is no terminal."""
    lines = "import ctypes, os, sys\nfrom mucudnn.cli.output import others_on_standard_error as apart\n"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", lines + script]
    return subprocess.run(command, capture_output=True, check=True, text=True, env=environment)


def test_what_others_write_from_python_and_from_c_leaves_standard_output_to_the_report() -> None:
    ended = _run("""if True:
        libc, stdout = ctypes.CDLL(None), sys.stdout
        libc.printf(b"before\\n")
        print("long before")
        with apart():
            print("a model is made")
            print("a log", file=stdout)
            libc.printf(b"a solver names itself\\n")
            os.write(1, b"a library too\\n")
        print("the report")
        libc.printf(b"later\\n")
    """)

    assert sorted(ended.stdout.splitlines()) == ["before", "later", "long before", "the report"]
    assert sorted(ended.stderr.splitlines()) == [
        *("a library too", "a log", "a model is made", "a solver names itself"),
    ]


@pytest.mark.parametrize("closing", ["os.close(1)", "sys.__stdout__ = None"])
def test_others_may_write_where_standard_output_is_closed(closing: str) -> None:
    ended = _run(f"""if True:
        {closing}
        with apart():
            os.write(2, b"done")
    """)

    assert ended.stderr == "done"
