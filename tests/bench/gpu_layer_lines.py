"""Lines of `make gpu-layers`, all made up."""

from collections.abc import Mapping

from bench.cpu.lines import BENCHMARK, Case, Choice, Measured, Rival, Rounds, Started
from bench.gpu.layer_kinds import IN_PARTS, UNDIVIDED, UNTILED
from mucudnn.problem import ConvOp, ConvProblem, Layout
from mucudnn.profile import Environment

MIB = 2**20
LIMITS = (8 * MIB, 64 * MIB)
OWN = "cudnn:aten@8*1"
HALVES = "cudnn:aten@4*2"
WHOLE = "cudnn:eng1@8*1"
PARTS = "cudnn:eng2@2*4"
ROUNDS = 9


def case(layer: str = "deepbench/a", setting: str = "float32-nchw", op: ConvOp = ConvOp.FPROP) -> Case:
    return Case(setting, layer, Layout.CONTIGUOUS, op)


def rounds(ms: Mapping[str, float], count: int = ROUNDS) -> Rounds:
    return Rounds(1, {key: (round(each * 1e6),) * count for key, each in ms.items()})


def measured(
    which: Case,
    ms: Mapping[str, float],
    benchmark_ms: Mapping[str, float] | None = None,
    key: str = PARTS,
    own_bytes: int = 0,
    taken: Mapping[str, int] | None = None,
    best: Mapping[str, str] | None = None,
    taps: int = 3,
) -> Measured:
    """A line in which one division is chosen under every limit."""
    sizes = taken or {}
    problem = ConvProblem(which.op, 8, 64, 64, (56, 56), (taps, taps), (1, 1), (taps // 2, taps // 2), (1, 1))
    families = {UNDIVIDED: WHOLE, IN_PARTS: HALVES, UNTILED: PARTS}
    kinds = families if best is None else best
    choices = tuple(Choice(limit, key, key, kinds) for limit in LIMITS)
    return Measured(
        case=which,
        problem=problem,
        own=OWN,
        own_bytes=own_bytes,
        candidates=12,
        refused=(),
        errors={"cudnn:aten": 1e-7},
        rivals=tuple(Rival(each, sizes.get(each, 0), 1e-3, sizes.get(each, 0)) for each in ms if each != OWN),
        undivided=WHOLE,
        choices=choices,
        deciding=rounds(ms),
        proving=rounds(ms),
        seconds=2.0,
        benchmark=rounds(benchmark_ms or {BENCHMARK: 6.0, key: ms[key]}, ROUNDS - 2),
    )


FIRST = measured(case("deepbench/a"), {OWN: 8.0, WHOLE: 4.0, PARTS: 2.0, HALVES: 7.0})
SECOND = measured(case("vgg16/b"), {OWN: 10.0, WHOLE: 9.0, PARTS: 10.0, HALVES: 10.0})


def started() -> Started:
    device, soft = {"name": "Some card"}, {"SM clock": "1 MHz"}
    environment = Environment("cudnn", device, {"cuDNN": "9"}, {"TF32": "no"}, soft)
    return Started("float32-nchw", environment, {"date": "today", "commit": "0123"})
