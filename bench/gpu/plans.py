"""Every candidate of every layer: right or wrong, how long it takes, and what launching it costs the host."""

import dataclasses
import functools
import gc
from collections.abc import Iterable, Iterator, Sequence

from bench.gpu.contest import CandidateRow, CaseRow, Contest
from bench.gpu.layers import Case, Layer, cases
from bench.gpu.sections import Deadline, Task, attempted, only
from bench.gpu.values import Answer, duration
from mucudnn.intervals import Verdict, median
from mucudnn.problem import ConvOp, Layout

LARGE = Layer(128, (513, 513), 128, kernel=3, padding=0, stride=2)
"""64 samples are more than 2^31 elements."""


@dataclasses.dataclass(frozen=True)
class LeftOutRow:
    """Problems for which the time was up, or which could not be set up."""

    layer: str
    op: str
    setting: str
    reason: str


def in_bfloat16(task: Task) -> Iterator[object]:
    """Yield the candidates of one problem after the other, as long as there is time."""
    yield from _rows(task, cases(task.layers, "bfloat16", Layout.CHANNELS_LAST))


def in_tf32(task: Task) -> Iterator[object]:
    """Yield those of float32, multiplied in TF32."""
    yield from _rows(task, cases(task.layers, "float32", Layout.CHANNELS_LAST))


def in_float32(task: Task) -> Iterator[object]:
    """Yield those of strict float32, in NCHW."""
    yield from _rows(task, cases(task.layers, "float32", Layout.CONTIGUOUS, allow_tf32=False))


def in_bfloat16_nchw(task: Task) -> Iterator[object]:
    """Yield what was reported as a cliff, then those of bfloat16 in NCHW, where images are transposed.

    pytorch#128936: from 2^31 elements on, 64 samples took 60 times as long as 63.
    """
    large = Case("pt128936", LARGE.problem(ConvOp.FPROP, "bfloat16", Layout.CONTIGUOUS))
    fewer = Case("pt128936", dataclasses.replace(large.problem, batch=LARGE.batch - 1))
    yield from _rows(task, (large, fewer))
    yield from _rows(task, cases(task.layers, "bfloat16", Layout.CONTIGUOUS))


def in_float32_by_tiles(task: Task) -> Iterator[object]:
    """Yield those of strict float32 for filters that tiles compute, in both layouts."""
    for layout in (Layout.CHANNELS_LAST, Layout.CONTIGUOUS):
        yield from _rows(task, cases(task.tiled, "float32", layout, allow_tf32=False))


def _rows(task: Task, measured: Iterable[Case]) -> Iterator[object]:
    left = [*measured]
    for number, case in enumerate(left):
        if task.deadline.is_over:
            yield _left_out(case, "the time was up")
            continue
        gc.collect()  # a stand that a failure's frames hold in a cycle would keep its gigabytes of operands
        with task.ground.precision(case.allow_tf32):
            yield from _case_rows(task, case, task.deadline.shared(len(left) - number))


def _case_rows(task: Task, case: Case, deadline: Deadline) -> Iterator[object]:
    make = functools.partial(Contest, task.ground, case, deadline)
    found, failure = attempted(task.ground, make)
    if found is None:
        yield _left_out(case, failure or "")
    else:
        yield from found.rows()


def _left_out(case: Case, reason: str) -> LeftOutRow:
    return LeftOutRow(case.layer, case.problem.op, case.setting, reason)


def answers(setting: str, rows: Sequence[object]) -> Iterator[Answer]:
    """Yield how many plans are right, where the fastest stands, and what launching costs."""
    tried = [row for row in only(CandidateRow, rows) if not row.is_own]
    found = only(CaseRow, rows)
    left_out = len(only(LeftOutRow, rows))
    missed = sum(row.not_reached for row in found)
    yield Answer(
        f"How many problems were measured in {setting}?",
        f"{len(found)}; {left_out} were left out, and {missed} candidates of the others",
    )
    wrong = sum(not row.is_right for row in tried)
    guards = sum(row.is_guard_intact is False for row in tried)
    yield Answer(
        f"Is every candidate in {setting} right, as a whole and in parts (beta 0, 1, 1, 1; NaN before)?",
        f"{len(tried) - wrong} of {len(tried)} are; {guards} touched what lies behind their workspace",
    )
    ranks = [row.rank for row in found if row.rank is not None]
    yield Answer(
        f"How often is cuDNN's first plan the fastest in {setting}?",
        f"in {ranks.count(0)} of {len(ranks)} problems where a plan of cuDNN is; else it stands "
        f"{max(ranks, default=0)} places down at most",
    )
    if any(row.rank is None for row in tried):
        reached = {(row.layer, row.op, row.setting, row.batch) for row in tried if row.rank is None}
        yield Answer(
            f"What are Winograd's and Fourier's algorithms worth in {setting}?", _worth(found, len(reached))
        )
    yield Answer(f"Is the fastest in {setting} faster than PyTorch's own (benchmark off)?", _verdicts(found))
    plans = [row.host_us for row in tried if row.rank is not None and row.host_us is not None]
    owns = [row.host_us for row in only(CandidateRow, rows) if row.is_own and row.host_us is not None]
    yield Answer(
        f"What does a launch in {setting} cost the host?",
        f"{_median_duration(plans)} a plan, {_median_duration(owns)} PyTorch's own (medians of "
        f"{len(plans)} and {len(owns)})",
    )


def _worth(found: Sequence[CaseRow], reached: int) -> str:
    """Say where one is the fastest, and by how much at most against the fastest plan of cuDNN.

    Args:
        found: all problems.
        reached: of how many of them one was a candidate.
    """
    ahead = [row for row in found if row.fastest is not None and row.rank is None]
    told = f"one is the fastest in {len(ahead)} of {reached} problems that they compute"
    gains = [
        (row.fastest_plan_time.median_us / row.fastest_time.median_us, f"{row.layer} {row.op}")
        for row in ahead
        if row.fastest_plan_time is not None and row.fastest_time is not None
    ]
    if not gains:
        return told
    most, where = max(gains)
    return f"{told}; the fastest plan of cuDNN takes {most:.2f} times as long at most ({where})"


def _verdicts(found: Sequence[CaseRow]) -> str:
    verdicts = [row.verdict for row in found if row.verdict is not None]
    return ", ".join(f"{verdict} {verdicts.count(verdict)}" for verdict in Verdict)


def _median_duration(microseconds: Sequence[float]) -> str:
    return duration(median(microseconds)) if microseconds else "unknown"
