"""Every engine of cuDNN on one layer: FFT, Winograd, run-time compilation, what is refused and why."""

import collections
import dataclasses
import time
from collections.abc import Iterator, Sequence

from bench.gpu.ground import Ground
from bench.gpu.layers import Layer
from bench.gpu.sections import Cut, Task, attempted, only
from bench.gpu.trials import PROBING, timed
from bench.gpu.values import Answer, Timing, duration
from mucudnn.backends.cudnn.configurations import EngineConfiguration
from mucudnn.backends.cudnn.constants import Attribute
from mucudnn.backends.cudnn.library import CudnnError
from mucudnn.choices import Search
from mucudnn.live.stand import Stand
from mucudnn.problem import ConvOp, ConvProblem, Layout
from mucudnn.profile import Trial

_COMPILED = "RUNTIME_COMPILATION"

_MOST_BYTES = 16 * 2**30
"""Engines that want a larger workspace are not run."""


@dataclasses.dataclass(frozen=True)
class EngineRow:
    """Every engine that offers itself, in NCHW: the best placed choice of knobs, or the defaults.

    Attributes:
        op: which of the three.
        dtype: type of the tensors.
        kernel: taps along each dimension.
        engine: its number.
        source: A or FALLBACK for cuDNN's lists, SCAN if it is on none.
        notes: on numerics and behaviour.
        workspace_bytes: declared.
        build_ms: milliseconds in which its plan was made the first time.
        error: relative to float64.
        time: of the whole mini-batch.
        failure: why it did not run.
    """

    op: str
    dtype: str
    kernel: int
    engine: int
    source: str
    notes: tuple[str, ...]
    workspace_bytes: int
    build_ms: float | None
    error: float | None
    time: Timing | None
    failure: str | None


@dataclasses.dataclass(frozen=True)
class NotedRow:
    """Engines that offer themselves, whether or not there was time to run them, and their notes."""

    op: str
    dtype: str
    kernel: int
    engine: int
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class RefusedRow:
    """Engines that refuse a problem with their default knobs, by cuDNN's status."""

    op: str
    dtype: str
    kernel: int
    status: int
    engines: tuple[int, ...]


def problems(layer: Layer) -> Iterator[ConvProblem]:
    """Yield the layer in NCHW with 3x3 and 5x5 taps in float32 and float16, all ops."""
    for dtype in ("float32", "float16"):
        for kernel in (3, 5):
            for op in ConvOp:
                yield dataclasses.replace(layer, kernel=kernel, padding=kernel // 2).problem(
                    op, dtype, Layout.CONTIGUOUS
                )


def rows(task: Task) -> Iterator[object]:
    """Yield what is refused and what offers itself, which takes no time, then how every engine runs."""
    listed: dict[ConvProblem, Sequence[EngineConfiguration]] = {}
    for problem in problems(task.middling):
        yield from refused(task.ground, problem)
        listed[problem] = task.ground.enumerator().listed(problem, Search.EXHAUSTIVE)
        yield from noted(problem, listed[problem])
    for problem, found in listed.items():
        needs = (each.workspace_bytes for each in found)
        stand = None
        for each in best_of_each_engine(found):
            if task.deadline.is_over:
                yield Cut(f"running, from {problem.op} in {problem.dtype}, engine {each.engine} on")
                return
            if stand is None:
                most_bytes = max((need for need in needs if need <= _MOST_BYTES), default=0)
                stand = Stand(task.ground.backend, problem, most_bytes)
            yield _engine_row(task.ground, stand, each)


def noted(problem: ConvProblem, found: Sequence[EngineConfiguration]) -> Iterator[NotedRow]:
    """Yield every engine that offers itself for `problem`, with its notes."""
    for each in best_of_each_engine(found):
        yield NotedRow(problem.op, problem.dtype, problem.kernel_size[0], each.engine, each.notes)


def best_of_each_engine(found: Sequence[EngineConfiguration]) -> list[EngineConfiguration]:
    """Return the first configuration of every engine, by the engines' numbers."""
    first: dict[int, EngineConfiguration] = {}
    for each in found:
        first.setdefault(each.engine, each)
    return [first[number] for number in sorted(first)]


def refused(ground: Ground, problem: ConvProblem) -> Iterator[RefusedRow]:
    """Yield the numbers of the engines that do not compute `problem` by default, for each status."""
    graph = ground.graph(problem)
    offers = ground.offers(graph)
    by_status: dict[int, list[int]] = collections.defaultdict(list)
    for engine in range(graph.int_value(Attribute.GRAPH_ENGINES)):
        try:
            offers.configuration(engine, ()).int_value(Attribute.CONFIGURATION_WORKSPACE)
        except CudnnError as error:
            by_status[error.status].append(engine)
    for status, engines in sorted(by_status.items()):
        yield RefusedRow(problem.op, problem.dtype, problem.kernel_size[0], status, tuple(engines))


def _engine_row(ground: Ground, stand: Stand, found: EngineConfiguration) -> EngineRow:
    problem = stand.problem
    build_ms, failure = attempted(ground, lambda: _build_ms(ground, problem, found), found.id)
    error, timing = None, None
    if failure is None:
        seen, failure = attempted(ground, lambda: _run(stand, found), found.id)
        error, timing = seen or (None, None)
    return EngineRow(
        op=problem.op,
        dtype=problem.dtype,
        kernel=problem.kernel_size[0],
        engine=found.engine,
        source=found.source,
        notes=found.notes,
        workspace_bytes=found.workspace_bytes,
        build_ms=build_ms,
        error=error,
        time=timing,
        failure=failure,
    )


def _build_ms(ground: Ground, problem: ConvProblem, found: EngineConfiguration) -> float:
    enumerator = ground.enumerator()
    start = time.perf_counter()
    enumerator.plan(problem, found.engine, found.knobs, accumulate=False)
    return (time.perf_counter() - start) * 1e3


def _run(stand: Stand, found: EngineConfiguration) -> tuple[float, Timing]:
    run = stand.run(Trial(stand.problem, found.id, whole=True))
    error = run.error()
    return error, timed(stand.backend, {found.id: run.part}, PROBING)[found.id]


def answers(rows: Sequence[object]) -> Iterator[Answer]:
    """Yield which engines have Fourier or Winograd notes, and which are compiled at run time."""
    engines, noted = only(EngineRow, rows), only(NotedRow, rows)
    for note in ("FFT", "WINOGRAD"):
        yield Answer(f"Which engines have the note {note}?", _named(noted, note) or "none that offers itself")
    compiled = [row.build_ms for row in engines if _COMPILED in row.notes and row.build_ms is not None]
    times = f"; building took {duration(max(compiled) * 1e3)} at most" if compiled else ""
    yield Answer(
        "Which engines are compiled at run time?",
        (_named(noted, _COMPILED) or "none that is listed") + times,
    )
    ran = sum(row.error is not None for row in engines)
    yield Answer("How many of all engines run?", f"{ran} of {len(engines)} rows")


def _named(engines: Sequence[NotedRow], note: str) -> str:
    """Return the engines with a note by op: "fprop 3, 4; dgrad 7"."""
    numbers: dict[str, set[int]] = collections.defaultdict(set)
    for row in engines:
        if note in row.notes:
            numbers[row.op].add(row.engine)
    return "; ".join(f"{op} {', '.join(map(str, sorted(found)))}" for op, found in numbers.items())
