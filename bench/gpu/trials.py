"""Measuring one algorithm: its error as a whole and in parts, its time, and what a launch costs the host."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from bench.gpu.values import Timing
from mucudnn.algorithms import GradientSum
from mucudnn.backends import Backend
from mucudnn.division import Division
from mucudnn.live.reference import relative_error
from mucudnn.live.stand import Stand, TrialRun
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.profile import Candidate
from mucudnn.timing import Clock, Entrant, SamplingRule, race

LAUNCHES = 50
"""Launches in a row; a card's queue holds about a thousand kernels, of which a launch may have six."""

_SERIES = 5

MOST_PARTS = 4

PROBING = SamplingRule(looks=(6,), precision=0.02, warmups=1)
"""Just enough for an interval."""

SAMPLING = SamplingRule(looks=(6, 10, 15), precision=0.02)


@dataclasses.dataclass(frozen=True)
class PartsCheck:
    """How a division into equal parts came out.

    Attributes:
        error: relative to float64, in the 2-norm.
        is_guard_intact: whether nothing was written behind the workspace.
    """

    error: float
    is_guard_intact: bool


def part_size(problem: ConvProblem, parts: int = MOST_PARTS) -> int:
    """Return the samples of one of so many parts, or of as many as there are."""
    return max(problem.batch // parts, 1)


def equal_division(algorithm: str, problem: ConvProblem, parts: int = MOST_PARTS) -> Division:
    """Return the division into such parts, of which no time is known."""
    size = part_size(problem, parts)
    return Division((Candidate(algorithm, size, 0.0, 0),) * (problem.batch // size))


def stand_for(backend: Backend, problem: ConvProblem, algorithms: Sequence[str]) -> Stand:
    """Return a stand whose workspace is enough for all algorithms, as a whole and in parts."""
    sizes = {problem, problem.part(part_size(problem))}
    needs = (
        backend.buffer_bytes(each, name)
        for name in algorithms
        for each in sizes
        if backend.computes(each, name)
    )
    return Stand(backend, problem, max(needs, default=0))


def checked_in_parts(stand: Stand, algorithm: str) -> PartsCheck:
    """Run a division of equal parts into a result of NaN, in a workspace of exactly the declared size.

    The parts of a weight gradient add up: the first overwrites (beta 0), the others add (beta 1); those of
    16 bits each overwrite a scratch that is added to a sum of 32 bits.
    """
    part = stand.problem.part(part_size(stand.problem))
    n_bytes = stand.backend.buffer_bytes(part, algorithm)
    starts = range(0, stand.problem.batch - part.batch + 1, part.batch)
    slices = [slice(start, start + part.batch) for start in starts]
    run = _summed if part.op is ConvOp.WGRAD else _sliced
    with stand.buffer.poisoned(n_bytes):
        result = run(stand, part, algorithm, stand.buffer.first(n_bytes), slices)
    error = relative_error(result, stand.reference.of(slice(0, slices[-1].stop)))
    return PartsCheck(error, stand.buffer.is_intact(n_bytes))


def _sliced(
    stand: Stand, part: ConvProblem, algorithm: str, buffer: Tensor, slices: Sequence[slice]
) -> Tensor:
    kernel = stand.backend.slice_kernel(part, algorithm, buffer)
    out = stand.out.fill_(float("nan"))
    kernel.prepare(stand.second)
    for here in slices:
        kernel.run(stand.first, stand.second, out, stand.bias, here)
    done = slice(0, slices[-1].stop)
    kernel.finish(out, stand.bias, done)
    return out[done]


def _summed(
    stand: Stand, part: ConvProblem, algorithm: str, buffer: Tensor, slices: Sequence[slice]
) -> Tensor:
    kernel = stand.backend.sum_kernel(part, algorithm, buffer)
    dtype = getattr(torch, part.sum_dtype)
    scratch = None if dtype is stand.out.dtype else stand.out.fill_(float("nan"))
    into = GradientSum(torch.full_like(stand.out, float("nan"), dtype=dtype), scratch=scratch)
    for number, here in enumerate(slices):
        kernel.add(stand.first, stand.second, into, number == 0, here)
    kernel.finish(into)
    return into.total


def whole_call(run: TrialRun) -> Callable[[], None]:
    """Return the call of a mini-batch in one part, with what is paid once, such as a filter's transform."""

    def call() -> None:
        run.part()
        run.setup()

    return call


def timed(
    backend: Backend, calls: Mapping[str, Callable[[], None]], rule: SamplingRule = SAMPLING
) -> dict[str, Timing]:
    """Return the times of all calls, taken in interleaved rounds by the clock that waits for the card.

    None is dropped for being slow.
    """
    entrants = {name: Entrant(call, rivals=name, workspace_bytes=0) for name, call in calls.items()}
    long_enough = dataclasses.replace(rule, min_span_ns=max(rule.min_span_ns, backend.least_span_ns))
    measured = race(entrants, long_enough, backend.clock)
    return {name: Timing.of(times) for name, times in measured.items()}


def seen_once(backend: Backend, call: Callable[[], None]) -> Timing:
    """Return the time of a single call, which has no interval."""
    start = backend.clock()
    call()
    span = max(backend.clock() - start, 1)
    return Timing(span / 1e3, None, None, 1, 1, converged=False, spans_ns=(span,))


def host_us(
    backend: Backend, call: Callable[[], None], clock: Clock = time.perf_counter_ns, parts: int = 1
) -> float:
    """Return the host's microseconds per call: the least of five series of 50 launches, each on an idle card.

    Args:
        backend: whose clock waits for the card.
        call: that is made again and again, without waiting.
        clock: nanoseconds of the host.
        parts: launches in one call.
    """
    calls = max(LAUNCHES // parts, 1)
    series = []
    for _ in range(_SERIES):
        backend.clock()
        start = clock()
        for _ in range(calls):
            call()
        series.append(clock() - start)
    backend.clock()
    return min(series) / calls / 1e3
