"""Which store is used, and what becomes of one that cannot be written."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from mucudnn.choices import PREFIX
from mucudnn.errors import StoreError, StoreWarning, warn_user
from mucudnn.files import cache_folder, is_there
from mucudnn.store.base import Store
from mucudnn.store.connections import UnusableFileError
from mucudnn.store.memory import MemoryStore
from mucudnn.store.sqlite import SqliteStore
from mucudnn.store.steadfast import SteadfastStore

StoreOption = Store | str | os.PathLike[str] | None
"""An open store, or which file to open; None for that of `default_path`."""


def default_path() -> Path:
    """Return the path in the environment variable MUCUDNN_STORE or, without it, one in the user's cache.

    Raises:
        StoreError: the variable names no file.
    """
    chosen = os.environ.get("MUCUDNN_STORE")
    if chosen:
        return expanded(chosen)
    return cache_folder() / "profiles.sqlite3"


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return `path` with the user's folder for a leading ~; that of an unknown user stays as it is.

    Raises:
        StoreError: it names no file: it is empty, as a variable is that was not set, has a NUL, or is a
            recording's.
    """
    name = os.fspath(path)
    if not name:
        raise StoreError("A store must be a file, but got an empty name.")
    if "\0" in name:
        raise StoreError(f"A store must be a file, but got {name!r}: a file's name has no NUL.")
    if name.startswith(PREFIX):
        raise StoreError(f"A store must be a file, but got {name!r}: a recording is a backend.")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def readable_store(path: Path) -> SqliteStore:
    """Return the store in a file that is only read, unless a write that a crash tore is to be undone.

    Then the file's tables are brought up to this version too, as whenever it is opened to be written to.

    Raises:
        StoreError: as for `open_store`; or the file does not exist or holds nothing.
    """
    try:
        return SqliteStore(path, read_only=True)
    except StoreError:
        if not _is_torn(path):
            raise
    return SqliteStore(path)


def _is_torn(path: Path) -> bool:
    """Return whether a crash has left a write to be undone, as far as that can be told."""
    with contextlib.suppress(OSError):
        return is_there(path) and is_there(path.with_name(f"{path.name}-journal"))
    return False


def open_store(store: StoreOption = None) -> Store:
    """Return the store in the file that `store` names (None names `default_path`), or `store` itself.

    Where the file cannot be made or written, a StoreWarning says so, and the answer is a store in memory
    that holds whatever can be read of the file; likewise where a write fails later, as on a full disk.

    Raises:
        StoreError: the file is damaged, newer than this version, or not ours; or no file is named.
    """
    if store is not None and not isinstance(store, str | os.PathLike):
        return store
    path = default_path() if store is None else expanded(store)
    try:
        return SteadfastStore(SqliteStore(path))
    except UnusableFileError as error:
        warn_user(f"What is measured now is not kept: {error}", StoreWarning)
    return _what_can_be_read(path)


@contextlib.contextmanager
def opened(store: StoreOption) -> Iterator[Store]:
    """Yield the store that was asked for; one that was passed in open stays open."""
    found = open_store(store)
    try:
        yield found
    finally:
        if found is not store:
            found.close()


def in_memory(store: Store) -> Store | None:
    """Return the store in memory that `store` is, or became when its file failed; None if it is none."""
    if isinstance(store, SteadfastStore):
        return store.in_memory
    return store if isinstance(store, MemoryStore) else None


def _what_can_be_read(path: Path) -> MemoryStore:
    memory = MemoryStore()
    with contextlib.suppress(UnusableFileError), SqliteStore(path, read_only=True) as readable:
        readable.copy_into(memory)
    return memory
