"""Files that are written whole or not at all, and the folder of those that may be deleted."""

import contextlib
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import platformdirs

from mucudnn.interruptions import pass_on_interruption

_STREAMS = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d+)", re.ASCII)


def cache_folder() -> Path:
    """Return the folder of the user's cache in which ours lie, or one that nobody can make without a home."""
    nowhere = Path(os.devnull, "mucudnn")
    try:
        found = platformdirs.user_cache_path("mucudnn", appauthor=False)
    except RuntimeError:  # neither a variable nor the system's list of users knows of a home
        return nowhere
    return found if found.is_absolute() else nowhere  # older releases give ~ as it is


def is_there(path: Path) -> bool:
    """Return whether something has this name.

    Raises:
        OSError: that cannot be told, as in a folder that may not be entered. `Path.exists` says no to some of
            these errors, and from Python 3.14 on to all.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_device(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` names what cannot be replaced: a pipe, say, or what this process has open."""
    if _descriptor(path) is not None:
        return True
    return Path(path).exists() and not (Path(path).is_file() or Path(path).is_dir())


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file, whole or not at all; through a link to what it names, which keeps its permissions.

    Its folder must be writable. What is no file, such as a pipe, is written to as it is, and what this
    process has open, such as /dev/stdout, goes on where it was.

    Raises:
        OSError: the file cannot be written; the error names `path`.
    """
    try:
        descriptor = _descriptor(path)
        if descriptor is not None:
            _write_on(descriptor, content)
        elif is_device(path):
            Path(path).write_bytes(content)
        else:
            _replace(Path(os.path.realpath(path)), content)
    except OSError as error:
        pass_on_interruption(error)
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def _descriptor(path: str | os.PathLike[str]) -> int | None:
    """Return the number of the open file that a path stands for, or None if it stands for none."""
    name = os.fspath(path)
    found = _DESCRIPTOR.fullmatch(name)
    return int(found[1]) if found else _STREAMS.get(name)


def _write_on(descriptor: int, content: bytes) -> None:
    for stream in (sys.stdout, sys.stderr):  # what was printed before comes before
        if stream is not None:
            with contextlib.suppress(ValueError):  # it is closed
                stream.flush()
    with os.fdopen(os.dup(descriptor), "wb") as opened:
        opened.write(content)


def _replace(target: Path, content: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        draft = Path(folder) / target.name
        with draft.open("wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())  # or after a loss of power the name may stand for an empty file
        with contextlib.suppress(OSError):  # as where there is none
            shutil.copymode(target, draft)
        draft.replace(target)
