"""Makes store_schema_2.sqlite3, the released schema 2 as it must stay readable.

    python -m tests.data.make_store_schema_2

Schema 1, and whether algorithms are deterministic. Never change the values: a later version makes a file of
its own.
"""

from pathlib import Path

from mucudnn.profile import Measurement, Record, Trial
from tests.data.make_store_schema_1 import COMPARISON, ENVIRONMENT, PROBLEM, make
from tests.data.make_store_schema_1 import RECORDS as FORMER_RECORDS

__all__ = ["COMPARISON", "ENVIRONMENT", "PATH", "RECORDS"]

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


if __name__ == "__main__":
    make(PATH, RECORDS)
