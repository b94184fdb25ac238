"""Ordinary values, of which a test changes what it is about."""

import dataclasses
import shutil
import sqlite3
from pathlib import Path
from typing import Any

from mucudnn.choices import Mode, Policy
from mucudnn.division import Division
from mucudnn.plan import Assignment, ConvSite, Plan
from mucudnn.problem import ConvOp, ConvProblem, Layout
from mucudnn.profile import Candidate, Environment, Measurement, Record, Refusal, RefusalKind, Trial

_PROBLEM = ConvProblem(
    op=ConvOp.FPROP,
    batch=32,
    in_channels=16,
    out_channels=24,
    input_size=(14, 12),
    kernel_size=(3, 5),
    stride=(2, 1),
    padding=(1, 2),
    dilation=(1, 1),
)

_ENVIRONMENT = Environment(
    backend="cpu",
    device={"name": "Example 9000", "caches": "32K 1M 16M"},
    software={"torch": "2.11.0", "onednn": "3.7"},
    policy={"threads": "8", "deterministic": "no"},
    soft={"load": "0.3"},
)

OTHER_VALUES: dict[str, Any] = {
    "op": ConvOp.WGRAD,
    "batch": 31,
    "in_channels": 17,
    "out_channels": 25,
    "input_size": (15, 12),
    "kernel_size": (3, 3),
    "stride": (1, 1),
    "padding": (1, 1),
    "dilation": (2, 1),
    "groups": 2,
    "dtype": "bfloat16",
    "layout": Layout.CHANNELS_LAST,
    "filter_layout": Layout.CHANNELS_LAST,
    "bias": True,
    "alignment_bytes": 4,
    "is_apart": True,
}
"""For every field of a problem, a value that the example does not have."""

DECIDING_CHANGES: dict[str, Any] = {
    "backend": "cudnn",
    "device": {"name": "Example 9001", "caches": "32K 1M 16M"},
    "software": {"torch": "2.11.1", "onednn": "3.7"},
    "policy": {"threads": "4", "deterministic": "no"},
}
"""For every field of an environment that decides, a value that the example does not have."""


def a_problem(**changes: Any) -> ConvProblem:
    return dataclasses.replace(_PROBLEM, **changes)


def an_environment(**changes: Any) -> Environment:
    return dataclasses.replace(_ENVIRONMENT, **changes)


def a_trial(algorithm: str = "cpu:direct", whole: bool = False, **changes: Any) -> Trial:
    return Trial(a_problem(**changes), algorithm, whole)


def a_record(trial: Trial | None = None, first_span_ns: int = 51_000) -> Record:
    return Record(
        trial or a_trial(),
        workspace_bytes=4096,
        error=1.5e-7,
        times=Measurement((first_span_ns, 50_000, 52_000), calls=4),
        setup=Measurement((9_000,), converged=False),
        limit_bytes=2**20,
    )


def an_over_limit_record(limit_bytes: int | None, trial: Trial | None = None) -> Record:
    trial = trial or a_trial()
    refusal = Refusal(
        trial.algorithm, trial.problem.batch, RefusalKind.OVER_LIMIT, f"{limit_bytes} is too little."
    )
    return Record(trial, workspace_bytes=2**21, refusal=refusal, limit_bytes=limit_bytes)


def refused(problem: ConvProblem, algorithm: str, kind: RefusalKind, reason: str) -> Record:
    """Of a part, unless the problem is that of the whole mini-batch."""
    trial = Trial(problem, algorithm, whole=problem == _PROBLEM)
    return Record(trial, refusal=Refusal(algorithm, problem.batch, kind, reason))


def a_candidate(**changes: Any) -> Candidate:
    return dataclasses.replace(Candidate("cpu:direct", 16, 0.002, 1024), **changes)


def a_plan(**changes: Any) -> Plan:
    """A plan in reuse mode for one site of 32 samples, in two parts of 16, that needs 1024 of 2048 bytes."""
    assignment = Assignment(
        ConvSite("layer1.conv", ConvOp.FPROP),
        a_problem(),
        Division((a_candidate(), a_candidate())),
        candidates=(a_candidate(batch=8), a_candidate()),
    )
    plan = Plan(Mode.REUSE, Policy.POWER_OF_TWO, 2048, an_environment(), (assignment,), version="0.1.0")
    return dataclasses.replace(plan, **changes)


def copy_in_a_write(path: Path, crashed: Path) -> None:
    """Copy a store of at least one record in the middle of a write, as a crash would leave it."""
    database = sqlite3.connect(path)
    database.execute("PRAGMA cache_size = 1")  # pages reach the file long before the end of the transaction
    database.executemany(
        "INSERT INTO records (environment, problem, algorithm, whole) VALUES (1, ?, 'torn', 0)",
        [(f"{index:04000}",) for index in range(100)],
    )
    shutil.copyfile(path, crashed)
    shutil.copyfile(f"{path}-journal", f"{crashed}-journal")
    database.close()
