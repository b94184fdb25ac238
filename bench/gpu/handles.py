"""Handles, threads, streams, and where workspace and operands may lie."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from torch import Tensor

from bench.gpu.ground import Ground
from bench.gpu.misaligned import ARGUMENTS
from bench.gpu.sections import Cut, Task, attempted, only
from bench.gpu.trials import equal_division, part_size
from bench.gpu.values import Answer
from mucudnn.algorithms import GradientSum
from mucudnn.execution.runner import Runner
from mucudnn.execution.workspace import Workspace
from mucudnn.live.reference import relative_error
from mucudnn.live.stand import GuardedBuffer, Stand
from mucudnn.problem import ConvOp, ConvProblem, Layout

_HANDLES = 5
_RUNS = 20
_WORKSPACE_ALIGNMENTS = (256, 16)
_MOST_ALIGNMENT = 512


@dataclasses.dataclass(frozen=True)
class HandleRow:
    """What each new handle costs; the first brings what all share."""

    number: int
    host_ms: float
    device_bytes: int | None


@dataclasses.dataclass(frozen=True)
class CheckRow:
    """What is tried on the middling layer, and how it came out.

    Attributes:
        what: that is tried.
        op: which of the three.
        dtype: type of the tensors.
        algorithm: the first of the candidates, or the first that has a workspace.
        outcome: "fine", or what is not.
    """

    what: str
    op: str
    dtype: str
    algorithm: str
    outcome: str


def rows(task: Task) -> Iterator[object]:
    """Yield the cost of handles, then one check after the other."""
    ground = task.ground
    yield from handle_rows(ground)
    for op, dtype in itertools.product(ConvOp, ("bfloat16", "float32")):
        if task.deadline.is_over:
            yield Cut(f"threads and streams, from {op} in {dtype} on")
            break
        yield from _checks(ground, task.middling.problem(op, dtype, Layout.CHANNELS_LAST))
    yield from _misaligned(ground)
    # The largest multiple first, of all ops: whoever wants more may break the card.
    for alignment, op in itertools.product(_WORKSPACE_ALIGNMENTS, ConvOp):
        # In NCHW, tensor cores need a copy of the image, and so a workspace.
        problem = task.middling.problem(op, "bfloat16", Layout.CONTIGUOUS)
        yield _workspace_check(ground, problem, alignment)


def handle_rows(ground: Ground) -> Iterator[HandleRow]:
    """Yield what new handles cost; none is destroyed, as in the tuner."""
    before = ground.used_bytes()
    for number in range(_HANDLES):
        start = time.perf_counter()
        ground.card.handle(ground.library)
        elapsed_ms = (time.perf_counter() - start) * 1e3
        after = ground.used_bytes()
        yield HandleRow(number, elapsed_ms, None if before is None or after is None else after - before)
        before = after


def _checks(ground: Ground, problem: ConvProblem) -> Iterator[CheckRow]:
    algorithm = ground.backend.algorithms(problem.part(part_size(problem)))[1]
    runner = Runner(ground.backend, problem, equal_division(algorithm, problem))
    stand = Stand(ground.backend, problem, 0)
    expected = _result(ground, runner, stand)
    for what, check in (("two threads at once", _two_threads), ("a side stream", _on_side_stream)):
        outcome, failure = attempted(ground, functools.partial(check, ground, runner, stand, expected))
        yield CheckRow(what, problem.op, problem.dtype, algorithm, outcome or f"failed: {failure}")


def _result(ground: Ground, runner: Runner, stand: Stand) -> Tensor:
    """Return the division's result, in a workspace of its own; the card is waited for."""
    result = runner(Workspace(ground.card.device), stand.first, stand.second, stand.bias)
    ground.card.clock()
    return result


def _two_threads(ground: Ground, runner: Runner, stand: Stand, expected: Tensor) -> str:
    """Run the same plans in two threads, each with a handle, a stream and a workspace of its own."""
    start = Barrier(2)

    def work() -> float:
        with ground.current():
            workspace = Workspace(ground.card.device)
            start.wait(timeout=10)
            results = [runner(workspace, stand.first, stand.second, stand.bias) for _ in range(_RUNS)]
            ground.card.clock()
            return max(_difference(result, expected) for result in results)

    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(_on_own_stream, ground, work) for _ in range(2)]
        return _outcome(max(future.result() for future in futures))


def _on_own_stream(ground: Ground, work: Callable[[], float]) -> float:
    with ground.current(), ground.side_stream():
        return work()


def _on_side_stream(ground: Ground, runner: Runner, stand: Stand, expected: Tensor) -> str:
    with ground.side_stream():
        result = _result(ground, runner, stand)
    return _outcome(_difference(result, expected))


def _difference(result: Tensor, expected: Tensor) -> float:
    return relative_error(result, expected.double())


def _outcome(difference: float) -> str:
    return "fine" if difference == 0 else f"differs by {difference:.1e}"


def _workspace_check(ground: Ground, problem: ConvProblem, alignment: int) -> CheckRow:
    """Run in a workspace of exactly the declared size, at a multiple of `alignment` bytes and no more."""
    what = f"workspace at a multiple of {alignment} bytes only, of exactly the declared size"
    backend = ground.backend
    with_workspace = (name for name in backend.algorithms(problem)[1:] if backend.buffer_bytes(problem, name))
    algorithm = next(with_workspace, None)
    if algorithm is None:
        return CheckRow(what, problem.op, problem.dtype, "", "no candidate has a workspace")
    outcome, failure = attempted(ground, lambda: _in_shifted(ground, problem, algorithm, alignment))
    return CheckRow(what, problem.op, problem.dtype, algorithm, outcome or f"failed: {failure}")


def _in_shifted(ground: Ground, problem: ConvProblem, algorithm: str, alignment: int) -> str:
    """Run the whole in a guarded workspace that starts so many bytes behind a multiple of 512."""
    backend = ground.backend
    n_bytes = backend.buffer_bytes(problem, algorithm)
    stand = Stand(backend, problem, 0)
    buffer = GuardedBuffer(n_bytes + 2 * _MOST_ALIGNMENT, ground.card.device)
    shift = alignment - buffer.first(1).data_ptr() % _MOST_ALIGNMENT
    shift += _MOST_ALIGNMENT if shift < 0 else 0
    with buffer.poisoned(shift + n_bytes):
        result = _whole(stand, algorithm, buffer.first(shift + n_bytes)[shift:])
        error = relative_error(result, stand.reference.of(slice(0, problem.batch)))
    if not buffer.is_intact(shift + n_bytes):
        return "wrong: it writes behind its workspace"
    return "fine" if error <= backend.error_bound(problem, algorithm) else f"wrong: error {error:.1e}"


def _whole(stand: Stand, algorithm: str, buffer: Tensor) -> Tensor:
    problem, out = stand.problem, stand.out
    here = slice(0, problem.batch)
    if problem.op is ConvOp.WGRAD:
        kernel = stand.backend.sum_kernel(problem, algorithm, buffer)
        kernel.add(stand.first, stand.second, GradientSum(out), first=True, here=here)
    else:
        stand.backend.slice_kernel(problem, algorithm, buffer).run(
            stand.first, stand.second, out, stand.bias, here
        )
    return out


def _misaligned(ground: Ground) -> Iterator[CheckRow]:
    """Run plans on addresses that break their promise, in processes of their own: a fault ends a process."""
    arguments = list(ARGUMENTS)
    for argument, outcome in zip(arguments, ground.apart("bench.gpu.misaligned", arguments), strict=True):
        problem = ARGUMENTS[argument]
        yield CheckRow(f"misaligned slices, {argument}", problem.op, problem.dtype, "the first", outcome)


def answers(rows: Sequence[object]) -> Iterator[Answer]:
    """Yield what a handle costs, and how the checks came out."""
    made = only(HandleRow, rows)
    if made:
        later = sorted(row.host_ms for row in made[1:])
        memory = [row.device_bytes for row in made[1:] if row.device_bytes is not None]
        told = f", {max(memory) / 2**20:.1f} MiB at most" if memory else ", memory unknown"
        yield Answer(
            "What does a handle cost?",
            f"{made[0].host_ms:.1f} ms the first, {later[len(later) // 2]:.1f} ms a later one{told}",
        )
    checks = only(CheckRow, rows)
    for what in dict.fromkeys(row.what for row in checks):
        outcomes = [row.outcome for row in checks if row.what == what]
        told = "; ".join(f"{outcome} ({outcomes.count(outcome)})" for outcome in dict.fromkeys(outcomes))
        yield Answer(f"How does it go: {what}?", told)
