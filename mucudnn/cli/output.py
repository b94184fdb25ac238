"""What commands print, and errors as sentences."""

import contextlib
import ctypes
import json
import os
import shutil
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TextIO

import click

import mucudnn
from mucudnn.errors import MucudnnWarning, SampleError
from mucudnn.report import DEFAULT_WIDTH
from mucudnn.store import Store
from mucudnn.store.steadfast import SteadfastStore

_STDOUT, _STDERR = 1, 2
"""Their descriptors, which what is written in C knows."""


class Failure(click.ClickException):
    """What cannot be done, in a sentence; it ends the program with status 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the sentence as all our messages are printed."""
        tell(self.format_message(), file)


class Mistake(Failure):
    """What cannot be meant, in a sentence; it ends the program with status 2, as click's own do."""

    exit_code = click.UsageError.exit_code


def say(line: str, as_json: bool) -> None:
    """Print a line to standard output or, where that is JSON, to standard error."""
    if as_json:
        _to_standard_error(line)
    else:
        click.echo(line)


def tell(message: str, file: IO[Any] | None = None) -> None:
    """Print a warning or an error, to standard error unless there is a file."""
    _to_standard_error(f"mucudnn: {message}", file)


def _to_standard_error(line: str, file: IO[Any] | None = None) -> None:
    """Print a line; where its reader has left or a disk is full, hours of work go on without."""
    with contextlib.suppress(OSError):
        click.echo(line, file=file, err=True)


@contextlib.contextmanager
def telling_what_is_kept(store: Store, *, again: bool) -> Iterator[None]:
    """On an interrupt, say what remains of the work, and let it pass."""
    try:
        yield
    except KeyboardInterrupt:
        if isinstance(store, SteadfastStore) and store.is_kept:
            how = "; go on without --again" if again else ""
            tell(f"interrupted; finished measurements are kept in the store{how}.")
        raise


@contextlib.contextmanager
def others_on_standard_error() -> Iterator[None]:
    """Have whatever others print for a while, from Python or from C, leave standard output to the report.

    The user's model may print, and HiGHS 1.16 names itself. Where standard output was closed at the start,
    its descriptor may be that of any file by now, and stays.
    """
    with contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as stack:
        if sys.__stdout__ is not None:
            with contextlib.suppress(OSError):  # one of them was closed since
                before = os.dup(_STDOUT)
                stack.callback(os.close, before)
                stack.callback(os.dup2, before, _STDOUT)
                _write_out()
                os.dup2(_STDERR, _STDOUT)
                stack.callback(_write_out)
        yield


def _write_out() -> None:
    """Write out what Python and C have in their buffers for standard output."""
    if sys.__stdout__ is not None:
        with contextlib.suppress(OSError, ValueError):  # it was closed since
            sys.__stdout__.flush()
    ctypes.CDLL(None).fflush(None)


def print_json(value: dict[str, object]) -> None:
    """Print JSON values to standard output."""
    click.echo(json.dumps(value, indent=1, allow_nan=False))


def columns(default: int) -> int:
    """Return the columns of the terminal that standard output is, or `default` where it is none."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()  # None where it was closed before the start
    return shutil.get_terminal_size((default, 0)).columns if is_terminal else default


def print_report(text: str) -> None:
    """Print a report to standard output; where the terminal is narrower, say what shows all of it."""
    click.echo(text)
    widest = max(map(len, text.splitlines()), default=0)
    here = columns(widest)
    if here < widest:
        _to_standard_error(
            f"The table has {widest} columns, and this terminal {here}: | less -S scrolls it, and a page "
            "made by --plot FILE.html has it, too."
        )


def report_width() -> int:
    """Return the columns of the terminal, if they are fewer than a report has."""
    return min(columns(DEFAULT_WIDTH), DEFAULT_WIDTH)


def sentence(error: Exception) -> str:
    """Return what an error says, in one line."""
    if isinstance(error, OSError) and error.strerror:
        what = error.filename or "Standard output, or another open file,"  # whose errors name no file
        return f"{what} cannot be used: {error.strerror}."
    text = _in_one_line(str(error))
    if isinstance(error, SampleError) and error.__cause__ is not None:  # the model itself has raised that
        return f"{text.removesuffix('.')}{_place(error.__cause__)}."
    return text


@contextlib.contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Turn whatever the user's code raises into one sentence that begins with `what`."""
    try:
        yield
    except (Exception, SystemExit) as error:  # a module may try to end the program
        raise Failure(f"{what}: {_reason(error)}{_place(error)}.") from error


def _place(error: BaseException) -> str:
    """Return where in the user's code it was raised, as far as it was; a syntax error says so itself."""
    frames = [] if isinstance(error, SyntaxError) else traceback.extract_tb(error.__traceback__)
    user = [
        frame for frame in frames if Path(frame.filename).is_file() and not _is_ours(Path(frame.filename))
    ]
    return f" ({Path(user[-1].filename).name}, line {user[-1].lineno})" if user else ""


def _is_ours(path: Path) -> bool:
    """Return whether a file is of this package, of an installed one, or of Python itself."""
    homes = (
        Path(mucudnn.__file__).parent,
        *map(Path, map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))),
    )
    return any(home in path.parents for home in homes)


@contextlib.contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Show our own warnings as one line on standard error; others as Python shows them."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", MucudnnWarning)
        show_as_before = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            """Show one warning; the signature is that of `warnings.showwarning`."""
            if issubclass(category, MucudnnWarning):
                tell(_in_one_line(str(message)))
            else:
                show_as_before(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield


def _reason(error: BaseException) -> str:
    """Return what an error of the user's code says, in one line that goes on with a full stop."""
    text = _in_one_line(str(error)).removesuffix(".")
    if isinstance(error, SystemExit) and not isinstance(error.code, str):
        return f"it ends the program, by {error!r}"
    if text and not isinstance(error, KeyError):
        return text
    return f"{type(error).__name__} {text}".rstrip()  # which alone says nothing, or just names the key


def _in_one_line(text: str) -> str:
    return " ".join(text.split())
