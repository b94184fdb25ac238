"""Recordings that come with the package: what was measured on machines that you may not have, to be replayed.

Each is a packed store, NAME.sqlite3.gz, and its backend is `replay:NAME`. `python -m bench.ship` makes them.
"""

from pathlib import Path

from mucudnn.store import expanded

_SUFFIX = ".sqlite3.gz"

_FOLDER = Path(__file__).parent


def shipped() -> tuple[str, ...]:
    """Return the names of the recordings that come with the package, in order."""
    return tuple(sorted(path.name.removesuffix(_SUFFIX) for path in _FOLDER.glob(f"*{_SUFFIX}")))


def packed_file(name: str) -> Path:
    """Return the package's file of the recording `name`."""
    return _FOLDER / f"{name}{_SUFFIX}"


def recording_file(name: str) -> Path:
    """Return the file that `name` means: the one of that path, else the shipped recording of that name.

    Where there is neither, it is the path.
    """
    path = expanded(name)
    return packed_file(name) if name in shipped() and not path.is_file() else path
