"""Makes store_schema_1.sqlite3, the released schema 1 as it must stay readable.

    python -m tests.data.make_store_schema_1

Never change the values: a later version makes a file of its own.
"""

from collections.abc import Sequence
from pathlib import Path

from mucudnn.problem import ConvOp, ConvProblem, Layout
from mucudnn.profile import Comparison, Environment, Measurement, Record, Refusal, RefusalKind, Trial
from mucudnn.store import SqliteStore

PATH = Path(__file__).with_name("store_schema_1.sqlite3")

ENVIRONMENT = Environment(
    backend="cpu",
    device={"name": "Example 9000", "caches": "32K 1M 16M"},
    software={"torch": "2.11.0", "onednn": "3.7"},
    policy={"threads": "8", "deterministic": "no"},
    soft={"load": "0.3"},
)

PROBLEM = ConvProblem(
    op=ConvOp.WGRAD,
    batch=8,
    in_channels=16,
    out_channels=24,
    input_size=(14, 12),
    kernel_size=(3, 5),
    stride=(2, 1),
    padding=(1, 2),
    dilation=(1, 1),
    groups=8,
    dtype="bfloat16",
    layout=Layout.CHANNELS_LAST,
    filter_layout=Layout.CHANNELS_LAST,
    alignment_bytes=64,
)

RECORDS = (
    Record(
        Trial(PROBLEM, "cpu:winograd4", whole=False),
        workspace_bytes=65_536,
        error=2.5e-4,
        times=Measurement((51_000, 50_500, 52_250), calls=4, converged=False),
        setup=Measurement((9_000,)),
        limit_bytes=2**26,
    ),
    Record(
        Trial(PROBLEM, "cpu:fft", whole=False),
        workspace_bytes=2**27,
        refusal=Refusal("cpu:fft", 8, RefusalKind.OVER_LIMIT, "it needs 128 MiB, the limit is 64 MiB."),
        limit_bytes=2**26,
    ),
    Record(
        Trial(PROBLEM, "cpu:fft", whole=True),
        error=0.75,
        refusal=Refusal("cpu:fft", 8, RefusalKind.WRONG, "it differs from the reference by 0.75."),
    ),
)

COMPARISON = Comparison(
    PROBLEM.with_batch(16),
    times={
        "torch@16*1": Measurement((110_000, 111_000), calls=2),
        "cpu:winograd4@8*2": Measurement((90_000, 92_000), calls=2),
    },
    workspaces={"torch@16*1": 4096, "cpu:winograd4@8*2": 65_536},
)


def make(path: Path, records: Sequence[Record]) -> None:
    """Write a store of these records and the comparison; it has the schema of the version that runs."""
    path.unlink(missing_ok=True)
    with SqliteStore(path) as store:
        store.add_records(ENVIRONMENT, records)
        store.add_comparisons(ENVIRONMENT, [COMPARISON])


if __name__ == "__main__":
    make(PATH, RECORDS)
