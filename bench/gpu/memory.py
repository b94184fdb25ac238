"""Memory that stays: after many launches, and after listing and building for many layers."""

import dataclasses
import functools
import gc
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.gpu.ground import Ground
from bench.gpu.layers import DTYPES, Layer
from bench.gpu.sections import Deadline, Task, attempted, only
from bench.gpu.values import Answer
from mucudnn.backends.cudnn.descriptors import Descriptor
from mucudnn.live.stand import Stand
from mucudnn.problem import ConvOp, ConvProblem, Layout
from mucudnn.profile import Trial

LAUNCHES = 1000


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """Memory in use, one moment after the other.

    Attributes:
        moment: when.
        device_bytes: of the card's memory, in use by whomever, as NVML tells.
        allocated_bytes: of tensors, as PyTorch's allocator tells.
        host_bytes: of this process in the host's memory.
    """

    moment: str
    device_bytes: int | None
    allocated_bytes: int
    host_bytes: int


def rows(task: Task) -> Iterator[object]:
    """Yield what is in use before and after launches, then before and after lists and plans."""
    ground = task.ground
    problem = task.middling.problem(ConvOp.FPROP, "bfloat16", Layout.CHANNELS_LAST)
    yield present(ground, "before")
    yield from _launches(ground, problem)
    yield present(ground, "after their operands are gone")
    plans, layers = _built(ground, [*task.layers.values()], task.deadline)
    yield present(ground, f"after listing and building {len(plans)} plans of {layers} layers")
    plans.clear()
    yield present(ground, "after these plans are gone")


def present(ground: Ground, moment: str) -> MemoryRow:
    """Return what is in use now, once the card is idle and what is cached or unreachable is given back."""
    gc.collect()
    ground.allocator.settle()
    return MemoryRow(moment, ground.used_bytes(), ground.allocator.allocated_bytes(), host_bytes())


def host_bytes() -> int:
    """Return the bytes of the host's memory that this process has in use."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _launches(ground: Ground, problem: ConvProblem) -> Iterator[MemoryRow]:
    backend = ground.backend
    algorithm = backend.algorithms(problem)[1]
    stand = Stand(backend, problem, backend.buffer_bytes(problem, algorithm))
    run = stand.run(Trial(problem, algorithm, whole=True))
    yield present(ground, "with operands in place")
    run.part()
    yield present(ground, "after the first launch")
    for _ in range(LAUNCHES):
        run.part()
    yield present(ground, f"after {LAUNCHES:,} more launches")


def _built(ground: Ground, layers: Sequence[Layer], deadline: Deadline) -> tuple[list[Descriptor], int]:
    """Return the plans of all candidates in both types, and of how many layers they are."""
    enumerator = ground.enumerator()
    plans: list[Descriptor] = []
    done = 0
    for dtype in DTYPES:
        for layer in layers:
            if deadline.is_over:
                return plans, done
            for op in ConvOp:
                problem = layer.problem(op, dtype, Layout.CHANNELS_LAST)
                for each in enumerator.candidates(problem):
                    if deadline.is_over:
                        return plans, done
                    build = functools.partial(
                        enumerator.plan, problem, each.engine, each.knobs, accumulate=False
                    )
                    plan, _ = attempted(ground, build, each.id)
                    plans += [] if plan is None else [plan]
            done += 1
    return plans, done


def answers(rows: Sequence[object]) -> Iterator[Answer]:
    """Yield by how much the card's and the host's memory grew."""
    moments = only(MemoryRow, rows)
    for question, word in (
        ("Does memory stay after 1,000 launches?", "launches"),
        ("Does memory stay after listing and building for 20 layers?", "building"),
    ):
        yield from (
            Answer(question, f"{now.moment}: {_grown(before, now)}")
            for before, now in itertools.pairwise(moments)
            if word in now.moment
        )


def _grown(before: MemoryRow, now: MemoryRow) -> str:
    host = f"host {(now.host_bytes - before.host_bytes) / 2**20:+.1f} MiB"
    if before.device_bytes is None or now.device_bytes is None:
        return f"{host}; the card's memory is unknown"
    return f"{(now.device_bytes - before.device_bytes) / 2**20:+.1f} MiB on the card, {host}"
