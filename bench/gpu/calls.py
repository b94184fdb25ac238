"""What a convolution costs the host as a model calls it: forward alone, and with its gradients.

PyTorch's own is found and differentiated in C++, both gradients at once; autograd calls ours in Python, on a
card in a thread of its own. Where kernels take some tens of microseconds, that decides.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.gpu.ground import Ground
from bench.gpu.sections import Cut, Task, attempted, only
from bench.gpu.trials import equal_division, host_us
from bench.gpu.values import Answer, Timing
from mucudnn.division import Division, undivided
from mucudnn.live.stand import Stand
from mucudnn.problem import ConvOp, ConvProblem, Layout, problems_of
from mucudnn.profiling.measurer import Divisions, ModelCall
from mucudnn.timing import SamplingRule, compare_runs

_ROUNDS = SamplingRule(looks=(10, 15, 20), precision=0.01)

_SETTINGS = (("bfloat16", Layout.CHANNELS_LAST), ("float32", Layout.CONTIGUOUS))

_NO_LIMIT = 2**62

FORWARD, BOTH, SAME_THREAD = "forward", "with gradients", "with gradients, in one thread"
"""What of a call runs; the last without a thread of autograd's own."""

OWN, WHOLE, IN_PARTS, NOTHING = "PyTorch's own", "undivided", "in 4 parts", "nothing"
"""By what: undivided and in parts by the first engine on cuDNN's list, for each op. The last one only makes
tensors of the results' shapes, in a function that autograd calls in Python."""


@dataclasses.dataclass(frozen=True)
class CallRow:
    """A whole call of the middling layer.

    Attributes:
        setting: type and layout.
        passes: what of it runs.
        way: by what.
        host_us: of the host for one call, without waiting for the card; the least of five series of 50.
        time: of one call among many, until the card has done them all.
        failure: why it could not be made.
    """

    setting: str
    passes: str
    way: str
    host_us: float | None = None
    time: Timing | None = None
    failure: str | None = None


def rows(task: Task) -> Iterator[object]:
    """Yield forward passes, and calls with gradients in autograd's own thread and in the calling one."""
    for (dtype, layout), passes in itertools.product(_SETTINGS, (FORWARD, BOTH, SAME_THREAD)):
        setting = f"{dtype} {layout}"
        if task.deadline.is_over:
            yield Cut(f"calls in {setting}, {passes}, and what follows")
            return
        problem = task.middling.problem(ConvOp.FPROP, dtype, layout)
        empty = CallRow(setting, passes, "all")
        found, failure = attempted(task.ground, functools.partial(_found, task.ground, problem, empty))
        yield from found or [dataclasses.replace(empty, failure=failure)]


def _found(ground: Ground, problem: ConvProblem, empty: CallRow) -> list[CallRow]:
    """Return a row for every way, all timed in the same rounds."""
    backend = ground.backend
    stand = Stand(backend, problem, 0)
    call = ModelCall(problem, is_sharing=False, limit_bytes=_NO_LIMIT)
    wanted = [problem.op] if empty.passes == FORWARD else [*ConvOp]
    several = empty.passes != SAME_THREAD
    with torch.autograd.set_multithreading_enabled(several):
        calls = {
            way: stand.call(call, _divisions(ground, problem, wanted, divided))
            for way, divided in _WAYS.items()
        }
        calls[NOTHING] = _nothing(stand, has_gradients=len(wanted) > 1)
        for each in calls.values():
            each()  # makes handles, in all threads, and builds plans
        rule = dataclasses.replace(_ROUNDS, min_span_ns=backend.least_span_ns)
        times = compare_runs(calls, rule, backend.clock)
        return [
            dataclasses.replace(empty, way=way, host_us=host_us(backend, each), time=Timing.of(times[way]))
            for way, each in calls.items()
        ]


class _Nothing(torch.autograd.Function):
    """Makes results as a convolution does, and computes none."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        """Return a tensor like `out`, and keep the operands as a convolution does."""
        ctx.save_for_backward(image, weight)
        return torch.empty_like(out)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Return tensors like both operands."""
        image, weight = ctx.saved_tensors
        return torch.empty_like(image), torch.empty_like(weight), None


def _nothing(stand: Stand, *, has_gradients: bool) -> Callable[[], None]:
    """Return a call of the same shapes that computes nothing."""
    image, weight = (each.detach().requires_grad_(has_gradients) for each in (stand.first, stand.second))

    def call() -> None:
        result = _Nothing.apply(image, weight, stand.out)  # type: ignore[no-untyped-call]
        if has_gradients:
            torch.autograd.grad(result, (image, weight), stand.out)

    return call


_Divided = Callable[[Ground, ConvProblem], Division]


def _own(ground: Ground, problem: ConvProblem) -> Division:
    return undivided(ground.backend.own, problem.batch)


def _whole(ground: Ground, problem: ConvProblem) -> Division:
    return equal_division(ground.backend.algorithms(problem)[1], problem, parts=1)


def _in_parts(ground: Ground, problem: ConvProblem) -> Division:
    part = problem.part(problem.batch // 4)
    return equal_division(ground.backend.algorithms(part)[1], problem, parts=4)


_WAYS: dict[str, _Divided] = {OWN: _own, WHOLE: _whole, IN_PARTS: _in_parts}


def _divisions(
    ground: Ground, problem: ConvProblem, wanted: Sequence[ConvOp], divided: _Divided
) -> Divisions:
    problems = problems_of(problem)
    return {op: divided(ground, problems[op]) for op in wanted}


def answers(rows: Sequence[object]) -> Iterator[Answer]:
    """Yield what the host pays for a call in each setting."""
    seen = only(CallRow, rows)
    for setting, passes in dict.fromkeys((row.setting, row.passes) for row in seen):
        these = [row for row in seen if (row.setting, row.passes) == (setting, passes)]
        yield Answer(
            f"What does a whole call cost, {passes}, {setting}?", "; ".join(_told(row) for row in these)
        )


def _told(row: CallRow) -> str:
    if row.failure is not None or row.host_us is None or row.time is None:
        return f"failed: {row.failure}"
    return f"{row.way} {row.host_us:.0f} µs of the host, {row.time.median_us:.0f} until the card is done"
