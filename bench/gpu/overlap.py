"""Whether parts that run on two streams hide what each takes beyond its share of the whole.

A part of a division ends with kernels that do not fill the card, and begins with others that turn its images
round. On two streams, with a buffer on each, the next part may run meanwhile. All is timed as replays of
CUDA graphs, so that the host has no part in it.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from bench.gpu.ground import Ground
from bench.gpu.sections import Cut, Task, attempted, only
from bench.gpu.trials import part_size
from bench.gpu.values import Answer, Timing
from mucudnn.live.reference import relative_error
from mucudnn.live.stand import Stand
from mucudnn.problem import ConvOp, ConvProblem, Layout
from mucudnn.timing import SamplingRule, compare_runs

PARTS = (4, 8, 16, 32)

STREAMS = 2

_WHOLE, _IN_TURN, _AT_ONCE = "whole", "in turn", "at once"

_COMPARING = SamplingRule(looks=(10, 15, 20), precision=0.01)


@dataclasses.dataclass(frozen=True)
class OverlapRow:
    """A convolution as a whole, in parts on one stream, and in parts on two, by the first on cuDNN's lists.

    Attributes:
        layer, op: of what.
        parts: how many, of equal size.
        whole, part: algorithm of the whole, and of a part.
        whole_bytes, part_bytes: workspace of the whole, and of a part; on two streams it is needed twice.
        whole_time, in_turn_time, at_once_time: of a replay of the whole, of parts on one stream, on two.
        error: of the parts on two streams against the whole, relative, in the 2-norm.
        failure: why it could not be timed.
    """

    layer: str
    op: str
    parts: int
    whole: str = ""
    part: str = ""
    whole_bytes: int = 0
    part_bytes: int = 0
    whole_time: Timing | None = None
    in_turn_time: Timing | None = None
    at_once_time: Timing | None = None
    error: float | None = None
    failure: str | None = None


def rows(task: Task) -> Iterator[object]:
    """Yield fprop and dgrad of the layers with several taps, contiguous, in bfloat16.

    A layer is divided into every number of parts that divides its batch.
    """
    layers = [(name, layer) for name, layer in task.layers.items() if layer.kernel > 1 and layer.groups == 1]
    for (name, layer), op, parts in itertools.product(layers, (ConvOp.FPROP, ConvOp.DGRAD), PARTS):
        if layer.batch % parts:
            continue
        if task.deadline.is_over:
            yield Cut(f"{name}, {op} in {parts} parts and what follows")
            return
        yield _row(task.ground, name, layer.problem(op, "bfloat16", Layout.CONTIGUOUS), parts)


def _row(ground: Ground, layer: str, problem: ConvProblem, parts: int) -> OverlapRow:
    part = problem.part(part_size(problem, parts))
    nothing = OverlapRow(layer, problem.op, parts)
    seen, failure = attempted(ground, lambda: _compared(ground, problem, part, nothing))
    return seen or dataclasses.replace(nothing, failure=failure)


def _compared(ground: Ground, problem: ConvProblem, part: ConvProblem, nothing: OverlapRow) -> OverlapRow:
    backend = ground.backend
    whole_name, part_name = (backend.algorithms(each)[1] for each in (problem, part))
    nothing = dataclasses.replace(
        nothing,
        whole=whole_name,
        part=part_name,
        whole_bytes=backend.buffer_bytes(problem, whole_name),
        part_bytes=backend.buffer_bytes(part, part_name),
    )
    stand = Stand(backend, problem, 0)

    def run_of(each: ConvProblem, algorithm: str, n_bytes: int) -> Callable[[slice], None]:
        buffer = torch.empty(n_bytes, dtype=torch.uint8, device=ground.card.device)
        kernel = backend.slice_kernel(each, algorithm, buffer)
        kernel.prepare(stand.second)

        def run(here: slice) -> None:
            kernel.run(stand.first, stand.second, stand.out, None, here)

        return run

    whole = run_of(problem, nothing.whole, nothing.whole_bytes)
    runs = [run_of(part, nothing.part, nothing.part_bytes) for _ in range(STREAMS)]
    places = [slice(start, start + part.batch) for start in range(0, problem.batch, part.batch)]

    def as_a_whole() -> Tensor:
        whole(slice(0, problem.batch))
        return stand.out

    def in_turn() -> Tensor:
        for here in places:
            runs[0](here)
        return stand.out

    def at_once() -> Tensor:
        calls = [functools.partial(runs[place % STREAMS], here) for place, here in enumerate(places)]
        ground.on_streams(calls, STREAMS)
        return stand.out

    ways = {_WHOLE: as_a_whole, _IN_TURN: in_turn, _AT_ONCE: at_once}
    expected = as_a_whole().double()
    for way in ways.values():
        way()  # which makes handles, and runs each plan once
    ground.card.clock()
    replays = {name: ground.captured(way)[0] for name, way in ways.items()}
    stand.out.fill_(float("nan"))
    replays[_AT_ONCE]()
    error = relative_error(stand.out, expected)
    rule = dataclasses.replace(_COMPARING, min_span_ns=backend.least_span_ns)
    times = {name: Timing.of(each) for name, each in compare_runs(replays, rule, backend.clock).items()}
    return dataclasses.replace(
        nothing,
        whole_time=times[_WHOLE],
        in_turn_time=times[_IN_TURN],
        at_once_time=times[_AT_ONCE],
        error=error,
    )


def answers(rows: Sequence[object]) -> Iterator[Answer]:
    """Yield how long parts take beside the whole, on one stream and on two."""
    found = only(OverlapRow, rows)
    failures = sorted({row.failure for row in found if row.failure is not None})
    for parts in sorted({row.parts for row in found}):
        times = [(row.whole_time, row.in_turn_time, row.at_once_time) for row in found if row.parts == parts]
        known = [
            (in_turn.median_us / whole.median_us, at_once.median_us / whole.median_us)
            for whole, in_turn, at_once in times
            if whole and in_turn and at_once
        ]
        told = "nothing was timed"
        if known:
            one, two = zip(*known, strict=True)
            told = (
                f"of {len(known)} cases {min(one):.2f} to {max(one):.2f} times the whole on one stream, "
                f"{min(two):.2f} to {max(two):.2f} on two"
            )
        yield Answer(
            f"What do {parts} parts take, contiguous, in bfloat16, on one stream and on two?",
            "; ".join([told, *(f"failed: {failure}" for failure in failures)]),
        )
