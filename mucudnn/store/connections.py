"""Connections to the SQLite files of stores, packed or not: opened, and closed by whoever opened them."""

import contextlib
import gzip
import os
import sqlite3
import zlib
from collections.abc import Iterator
from pathlib import Path

from mucudnn.errors import StoreError
from mucudnn.files import is_there
from mucudnn.interruptions import pass_on_interruption
from mucudnn.locks import unforked_lock

PACKED = ".gz"
"""What the name of a file ends with that holds a store in compressed form, to be read only."""

_BUSY_TIMEOUT_S = 30.0

_LEFT: list[sqlite3.Connection] = []
"""Of a parent that forked: SQLite forbids its child to use them, and to close them.

Source: SQLite, How To Corrupt An SQLite Database File, section 2.6.
"""

unforked = unforked_lock()
"""Held by whoever has a transaction in this process.

SQLite's account of what a process has locked goes by file. A child that is forked meanwhile inherits it, and
finds the file locked for good, by nobody.
"""

_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_UNUSABLE = {
    sqlite3.SQLITE_BUSY,  # somebody else has held it for all that time
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_READONLY,
}


class UnusableFileError(StoreError):
    """A file that cannot be made, opened or written, which says nothing against what it holds."""


@contextlib.contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """Raise what goes wrong with the file, or with a row in it, as our errors, which name the file."""
    try:
        yield
    except OSError as error:
        pass_on_interruption(error)
        raise UnusableFileError(f"{path} cannot be used as a store: {error}.") from error
    except sqlite3.Error as error:
        pass_on_interruption(error)
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the upper bits tell variants apart
        kind = UnusableFileError if code in _UNUSABLE else StoreError
        advice = "; move it away, or choose another store" if code in _DAMAGED else ""
        raise kind(f"{path} cannot be used as a store: {error}{advice}.") from error
    except (LookupError, RecursionError, TypeError, ValueError) as error:
        pass_on_interruption(error)
        raise StoreError(
            f"{path} is damaged, a row cannot be read: {error!r}; move it away, or choose another store."
        ) from error


def connect(path: Path, read_only: bool) -> sqlite3.Connection:
    """Return a connection to a file, which is made if need be, or to what it was packed from.

    Raises:
        UnusableFileError: it cannot be read, or not be written though it shall.
        StoreError: it is damaged.
    """
    with errors_naming(path):  # its folder may be one that may not be entered
        if not is_there(path):
            if read_only:
                raise UnusableFileError(f"{path} cannot be used as a store: there is no such file.")
        elif path.is_dir():
            raise UnusableFileError(f"{path} cannot be used as a store: it is a folder.")
        if path.suffix == PACKED:
            return _unpacked(path, read_only)
        if not read_only:
            path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(
            f"{path.as_uri()}?mode={'ro' if read_only else 'rwc'}",
            uri=True,
            timeout=_BUSY_TIMEOUT_S,
            isolation_level=None,  # transactions begin where we say
            check_same_thread=False,  # the store's lock sees to that
        )
    connection.row_factory = sqlite3.Row
    return connection


def _unpacked(path: Path, read_only: bool) -> sqlite3.Connection:
    """Return a database in memory that holds what the file was packed from."""
    if not read_only:
        raise UnusableFileError(f"{path} is packed, and can only be read.")
    try:
        contents = gzip.decompress(path.read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise StoreError(f"{path} is damaged, it cannot be unpacked: {error}.") from error
    if not contents:
        raise UnusableFileError(f"{path} holds nothing to read.")
    connection = memory_connection()
    connection.deserialize(contents)
    return connection


def memory_connection() -> sqlite3.Connection:
    """Return an empty database in memory."""
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    return connection


def close(connection: sqlite3.Connection, process: int) -> None:
    """Close what this process has opened; leave alone what its parent has."""
    if os.getpid() == process:
        connection.close()
    else:
        _LEFT.append(connection)
