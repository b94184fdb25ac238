"""Whether a division can be captured in a CUDA graph, and what replaying it saves."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from bench.gpu.ground import Ground
from bench.gpu.sections import Cut, Task, attempted, only
from bench.gpu.trials import equal_division, part_size
from bench.gpu.values import Answer, Timing
from mucudnn.execution import Runner
from mucudnn.intervals import Verdict, compare
from mucudnn.problem import ConvOp, ConvProblem, Layout
from mucudnn.stand import Stand, relative_error
from mucudnn.timing import SamplingRule, compare_runs
from mucudnn.workspace import Workspace

REPLAYS = 100
_COMPARING = SamplingRule(looks=(10, 15, 20), precision=0.01)


@dataclasses.dataclass(frozen=True)
class CaptureRow:
    """A division of equal parts, captured after a warm run and replayed 100 times.

    Attributes:
        op: which of the three.
        dtype: type of the tensors.
        parts: of the division.
        algorithm: of every part.
        error: of the last replay against the eager run, relative, in the 2-norm; 0 if they are equal.
        eager_time: of one division, launched part by part.
        replay_time: of one replay.
        verdict: what paired rounds say of replaying.
        replay_peak_bytes: what the allocator held at most during the replays beside what it held before.
        eager_peak_bytes: the same for as many eager runs; their result is part of it.
        failure: why it could not be captured.
    """

    op: str
    dtype: str
    parts: int
    algorithm: str
    error: float | None
    eager_time: Timing | None
    replay_time: Timing | None
    verdict: Verdict | None
    replay_peak_bytes: int | None
    eager_peak_bytes: int | None
    failure: str | None


def rows(task: Task) -> Iterator[object]:
    """Yield the three ops of the middling layer in two types."""
    for dtype in ("bfloat16", "float32"):
        for op in ConvOp:
            if task.deadline.is_over:
                yield Cut(f"{op} in {dtype} and what follows")
                return
            # In NCHW, tensor cores need a copy of the image, and so a workspace.
            yield _row(task.ground, task.middling.problem(op, dtype, Layout.CONTIGUOUS))


def _row(ground: Ground, problem: ConvProblem) -> CaptureRow:
    part = problem.part(part_size(problem))
    algorithm = ground.backend.algorithms(part)[1]
    nothing = CaptureRow(
        problem.op,
        problem.dtype,
        problem.batch // part.batch,
        algorithm,
        *(None, None, None, None, None, None),
        failure=None,
    )
    seen, failure = attempted(ground, lambda: _captured(ground, problem, nothing))
    return seen or dataclasses.replace(nothing, failure=failure)


def _captured(ground: Ground, problem: ConvProblem, nothing: CaptureRow) -> CaptureRow:
    """Return the row with what is seen of a captured division."""
    stand = Stand(ground.backend, problem, 0)
    runner = Runner(ground.backend, problem, equal_division(nothing.algorithm, problem))
    workspace = Workspace(ground.card.device)

    def eager() -> Tensor:
        return runner(workspace, stand.first, stand.second, stand.bias)

    expected = eager()  # makes the handle, builds the plans, and runs each of them once
    ground.card.clock()
    replay, result = ground.captured(eager)
    result.fill_(float("nan"))
    for _ in range(REPLAYS):
        replay()
    error = relative_error(result, expected.double())
    rule = dataclasses.replace(_COMPARING, min_span_ns=ground.backend.least_span_ns)
    times = compare_runs({"eager": _silent(eager), "replay": replay}, rule, ground.backend.clock)
    return dataclasses.replace(
        nothing,
        error=error,
        eager_time=Timing.of(times["eager"]),
        replay_time=Timing.of(times["replay"]),
        verdict=compare(times["eager"].samples_s, times["replay"].samples_s),
        replay_peak_bytes=_peak_bytes(ground, replay),
        eager_peak_bytes=_peak_bytes(ground, eager),
    )


def _silent(call: Callable[[], Tensor]) -> Callable[[], None]:
    def silent() -> None:
        call()

    return silent


def _peak_bytes(ground: Ground, call: Callable[[], object]) -> int:
    """Return what 100 calls hold at most beside what is held before."""
    ground.allocator.settle()
    before = ground.allocator.allocated_bytes()
    for _ in range(REPLAYS):
        call()
    return ground.allocator.peak_bytes() - before


def answers(rows: Sequence[object]) -> Iterator[Answer]:
    """Yield whether divisions can be captured, and what that saves."""
    tried = only(CaptureRow, rows)
    done = [row for row in tried if row.error is not None]
    worst = max((row.error or 0.0 for row in done), default=0.0)
    verdicts = [row.verdict for row in done]
    told = ", ".join(f"{verdict} {verdicts.count(verdict)}" for verdict in Verdict)
    failures = {row.failure for row in tried if row.failure is not None}
    yield Answer(
        "Can a division be captured and replayed?",
        f"{len(done)} of {len(tried)} can; error against eager {worst:.1e}; replaying is {told}"
        + "".join(f"; failed: {failure}" for failure in sorted(failures)),
    )
