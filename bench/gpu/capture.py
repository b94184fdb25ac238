"""Whether divisions can be captured in a CUDA graph, what replaying saves, and what the host costs."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from bench.gpu.ground import Ground
from bench.gpu.sections import Cut, Task, attempted, only
from bench.gpu.trials import equal_division, host_us, part_size
from bench.gpu.values import Answer, Timing
from mucudnn.execution.runner import Runner
from mucudnn.execution.workspace import workspace_of
from mucudnn.intervals import Verdict, compare
from mucudnn.live.reference import relative_error
from mucudnn.live.stand import Stand
from mucudnn.problem import ConvOp, ConvProblem, Layout
from mucudnn.timing import SamplingRule, compare_runs

REPLAYS = 100

PARTS = (4, 8)

_IN_ONE_GRAPH = 10
"""Divisions captured together: the host launches so many at once, and each costs its kernels alone."""

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
        kernels_time: of one division among ten in one graph: its kernels, one behind the other.
        verdict: what paired rounds say of replaying.
        eager_host_us: of the host to launch one division part by part, without waiting for the card.
        replay_host_us: of the host to launch one replay.
        replay_peak_bytes: what the allocator held at most during the replays beside what it held before.
        eager_peak_bytes: the same for as many eager runs; their result is part of it.
        failure: why it could not be captured.
    """

    op: str
    dtype: str
    parts: int
    algorithm: str
    error: float | None = None
    eager_time: Timing | None = None
    replay_time: Timing | None = None
    kernels_time: Timing | None = None
    verdict: Verdict | None = None
    eager_host_us: float | None = None
    replay_host_us: float | None = None
    replay_peak_bytes: int | None = None
    eager_peak_bytes: int | None = None
    failure: str | None = None


def rows(task: Task) -> Iterator[object]:
    """Yield the three ops of the middling layer in two types, in four and in eight parts."""
    for dtype, op, parts in itertools.product(("bfloat16", "float32"), ConvOp, PARTS):
        if task.deadline.is_over:
            yield Cut(f"{op} in {dtype} in {parts} parts and what follows")
            return
        # In NCHW, tensor cores need a copy of the image, and so a workspace.
        yield _row(task.ground, task.middling.problem(op, dtype, Layout.CONTIGUOUS), parts)


def _row(ground: Ground, problem: ConvProblem, parts: int) -> CaptureRow:
    part = problem.part(part_size(problem, parts))
    algorithm = ground.backend.algorithms(part)[1]
    nothing = CaptureRow(problem.op, problem.dtype, problem.batch // part.batch, algorithm)
    seen, failure = attempted(ground, lambda: _captured(ground, problem, nothing))
    return seen or dataclasses.replace(nothing, failure=failure)


def _captured(ground: Ground, problem: ConvProblem, nothing: CaptureRow) -> CaptureRow:
    """Return the row with what is seen of a captured division."""
    stand = Stand(ground.backend, problem, 0)
    runner = Runner(ground.backend, problem, equal_division(nothing.algorithm, problem, nothing.parts))

    def eager() -> Tensor:
        return runner(workspace_of(ground.backend), stand.first, stand.second, stand.bias)

    expected = eager()  # makes the handle, builds the plans, and runs each of them once
    ground.card.clock()
    replay, result = ground.captured(eager)
    result.fill_(float("nan"))
    for _ in range(REPLAYS):
        replay()
    error = relative_error(result, expected.double())
    several, _ = ground.captured(functools.partial(_repeated, eager))
    rule = dataclasses.replace(_COMPARING, min_span_ns=ground.backend.least_span_ns)
    calls = {"eager": _silent(eager), "replay": replay, "several": several}
    times = compare_runs(calls, rule, ground.backend.clock)
    kernels = dataclasses.replace(times["several"], calls=_IN_ONE_GRAPH * times["several"].calls)
    return dataclasses.replace(
        nothing,
        error=error,
        eager_time=Timing.of(times["eager"]),
        replay_time=Timing.of(times["replay"]),
        kernels_time=Timing.of(kernels),
        verdict=compare(times["eager"].samples_s, times["replay"].samples_s),
        eager_host_us=host_us(ground.backend, _silent(eager), parts=nothing.parts),
        replay_host_us=host_us(ground.backend, replay, parts=nothing.parts),
        replay_peak_bytes=_peak_bytes(ground, replay),
        eager_peak_bytes=_peak_bytes(ground, eager),
    )


def _repeated(call: Callable[[], Tensor]) -> Tensor:
    for _ in range(_IN_ONE_GRAPH - 1):
        call()  # whose result goes before the next one is made
    return call()


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
    """Yield whether divisions can be captured, what that saves, and what they cost beside their kernels."""
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
    for parts in sorted({row.parts for row in done}):
        these = [row for row in done if row.parts == parts]
        replayed = _beside([(row.replay_time, row.replay_host_us, row.kernels_time) for row in these])
        launched = _beside([(row.eager_time, row.eager_host_us, row.kernels_time) for row in these])
        question = f"What does a division of {parts} parts cost beside its kernels?"
        yield Answer(question, f"under a graph {replayed}; part by part {launched}")


def _beside(seen: Sequence[tuple[Timing | None, float | None, Timing | None]]) -> str:
    """Say how long calls take beside their kernels, and for how much of that the host is busy."""
    known = [
        (time.median_us, host or 0.0, kernels.median_us) for time, host, kernels in seen if time and kernels
    ]
    times, shares = [time / kernels for time, _, kernels in known], [host / time for time, host, _ in known]
    return f"{_range(times)} times their time, the host busy for {_range(shares)} of it"


def _range(numbers: Sequence[float]) -> str:
    return f"{min(numbers):.2f} to {max(numbers):.2f}"
