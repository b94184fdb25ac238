"""Makes store_schema_2.sqlite3, the released schema 2 as it must stay readable.

    python -m tests.data.make_store_schema_2

Schema 1, and whether algorithms are deterministic. Never change the values: a later version makes a file of
its own.
"""

from pathlib import Path

from mucudnn.profile import Measurement, Record, Trial
from mucudnn.store import SqliteStore
from tests.data.make_store_schema_1 import COMPARISON, ENVIRONMENT, PROBLEM
from tests.data.make_store_schema_1 import RECORDS as FORMER_RECORDS

PATH = Path(__file__).with_name("store_schema_2.sqlite3")

RECORDS = (
    *FORMER_RECORDS,
    Record(
        Trial(PROBLEM, "cpu:atomic", whole=True),
        workspace_bytes=0,
        error=1e-6,
        times=Measurement((70_000, 71_000)),
        is_deterministic=False,
    ),
)


def main() -> None:
    PATH.unlink(missing_ok=True)
    with SqliteStore(PATH) as store:
        store.add_records(ENVIRONMENT, RECORDS)
        store.add_comparison(ENVIRONMENT, COMPARISON)


if __name__ == "__main__":
    main()
