"""What PyTorch's own convolution takes at its peak, beside what cuDNN's first plan declares."""

import dataclasses
from collections.abc import Iterator, Sequence

from bench.gpu.ground import Ground
from bench.gpu.layers import Case, all_cases
from bench.gpu.sections import Cut, Task, attempted, only
from bench.gpu.values import Answer
from mucudnn.backends.own import own_job
from mucudnn.choices import Search

_UNLIMITED = 2**50
_NEAR_BYTES = 2**21
"""The allocator rounds large blocks to 2 MiB."""


@dataclasses.dataclass(frozen=True)
class OwnRow:
    """Memory of PyTorch's own convolution, benchmark off, beside the first plan's declared workspace.

    Attributes:
        layer: name of the layer.
        op: which of the three.
        setting: type and layout.
        batch: samples.
        peak_bytes: what it holds at most beside operands and result, as PyTorch's allocator tells.
        first_bytes: the first plan's workspace; None if nothing is listed.
        runs_cudnn: whether PyTorch takes cuDNN for it at all.
        failure: why it could not be weighed.
    """

    layer: str
    op: str
    setting: str
    batch: int
    peak_bytes: int | None
    first_bytes: int | None
    runs_cudnn: bool | None
    failure: str | None


def rows(task: Task) -> Iterator[object]:
    """Yield every problem, as long as there is time."""
    with task.ground.precision(allow_tf32=True):
        for case in all_cases(task.layers):
            if task.deadline.is_over:
                yield Cut(f"{case.layer}, {case.problem.op}, {case.setting} and what follows")
                return
            yield _row(task.ground, case)


def _row(ground: Ground, case: Case) -> OwnRow:
    problem, backend = case.problem, ground.backend
    job = own_job(problem, ground.card.device)
    peak, failure = attempted(ground, lambda: backend.footprint(job, _UNLIMITED))
    listed = ground.enumerator().listed(problem, Search.HEURISTIC)
    runs_cudnn, _ = attempted(ground, lambda: ground.card.runs_cudnn(problem))
    return OwnRow(
        layer=case.layer,
        op=problem.op,
        setting=case.setting,
        batch=problem.batch,
        peak_bytes=peak,
        first_bytes=listed[0].overwriting_bytes if listed else None,
        runs_cudnn=runs_cudnn,
        failure=failure,
    )


def answers(rows: Sequence[object]) -> Iterator[Answer]:
    """Yield how often PyTorch's own takes what cuDNN's first plan declares."""
    weighed = [row for row in only(OwnRow, rows) if row.peak_bytes is not None]
    by_cudnn = [row for row in weighed if row.runs_cudnn]
    near = sum(
        row.first_bytes is not None and abs((row.peak_bytes or 0) - row.first_bytes) <= _NEAR_BYTES
        for row in by_cudnn
    )
    yield Answer(
        "Does PyTorch's own take the workspace of cuDNN's first plan (to 2 MiB)?",
        f"in {near} of {len(by_cudnn)} problems that it gives to cuDNN; {len(weighed)} were weighed",
    )
