"""Put recordings together into one that comes with the package, which `--backend replay:NAME` replays.

Several stores, packed or not, become one packed store of the environments of all, or of one of each; `make
record` fills such stores on a GPU, and `mucudnn tune --store` anywhere. What two of them know stays as the
first one has it, but for what was too large for its limit and is known under a larger one.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mucudnn.errors import StoreError
from mucudnn.files import write_whole
from mucudnn.profiling.replay import numbered
from mucudnn.recordings import packed_file
from mucudnn.report import describe_environment
from mucudnn.sizes import format_bytes
from mucudnn.store import SqliteStore, readable_store

_NAME = re.compile("[a-z0-9-]+")

MOST_BYTES = 8 * 2**20
"""Of a recording that comes with the package, packed."""


def ship(name: str, stores: Sequence[Path], only: int | None = None) -> Path:
    """Return the package's file of a recording made of `stores`; it replaces one of the same name.

    Args:
        name: by which it is replayed.
        stores: files.
        only: number of the environment that is taken of each store; None for all.

    Raises:
        StoreError: the name is none, a store cannot be read or has no environment of that number, none holds
            a record, or all together are larger than they may be.
    """
    if not _NAME.fullmatch(name):
        raise StoreError(f"A recording's name must be of a-z, 0-9 and -, such as h200, but got {name!r}.")
    target = packed_file(name)
    with tempfile.TemporaryDirectory() as scratch, SqliteStore(Path(scratch, "merged.sqlite3")) as merged:
        for path in stores:
            with readable_store(path) as store:
                if only is not None and not 1 <= only <= len(store.environments()):
                    raise StoreError(
                        f"{path} must hold environment {only}, but has {len(store.environments())}."
                    )
                store.copy_into(merged, only)
        if not merged.count():
            raise StoreError("A recording must hold something, but got stores without records.")
        packed = Path(scratch, target.name)
        merged.pack(packed)
        if packed.stat().st_size > MOST_BYTES:
            raise StoreError(
                f"A recording that comes with the package must be of at most {format_bytes(MOST_BYTES)}, but "
                f"this one is of {format_bytes(packed.stat().st_size)}; ship fewer networks."
            )
        write_whole(target, packed.read_bytes())
    return target


def _described(path: Path) -> str:
    """Return what a recording holds, in some lines."""
    with readable_store(path) as store:
        environments = store.environments()
        facts = numbered(environments) if len(environments) > 1 else [environments[0].backend]
        size = format_bytes(path.stat().st_size)
        first = "; ".join(describe_environment(environments[0]).values())
        return "\n".join([f"{path.name}: {store.count()} records in {size}; {first}", *facts])


def main(arguments: Sequence[str] | None = None) -> int:
    """Ship what is asked for; return the exit status."""
    parser = argparse.ArgumentParser(prog="bench.ship", description=__doc__)
    parser.add_argument("name", help="by which it is replayed: lower case, such as h200")
    parser.add_argument(
        "stores", nargs="+", type=Path, metavar="STORE", help="file of a store, packed or not"
    )
    parser.add_argument(
        "--only", type=int, metavar="N", help="one environment of each store, that of replay:STORE#N"
    )
    options = parser.parse_args(arguments)
    try:
        print(_described(ship(options.name, options.stores, only=options.only)))
    except StoreError as error:
        print(f"bench.ship: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
