"""Lines of layers of `make bench-cpu`, all made up."""

from collections.abc import Mapping, Sequence

from bench.cpu.layers import Layer
from bench.cpu.lines import Case, Choice, Measured, Rival, Rounds
from mucudnn.problem import ConvOp, Layout
from mucudnn.profile import Environment

MIB = 2**20
LIMITS = (4 * MIB, 16 * MIB, 64 * MIB)
OWN = "cpu:aten@8*1"
WINOGRAD = "cpu:winograd4@2*4"
FLAT = (1.0,) * 9


def layer(name: str, taps: int = 3, channels: int = 64) -> Layer:
    sizes = ((56, 56), channels, (taps, taps), (1, 1), (taps // 2, taps // 2))
    return Layer(name, "made up", 8, channels, *sizes)


LAYERS = (layer("net/a"), layer("net/b"), layer("net/few", channels=32), layer("net/5x5", taps=5))


def case(name: str = "net/a", setting: str = "1-thread", **changes: object) -> Case:
    return Case(
        **{"setting": setting, "layer": name, "layout": Layout.CONTIGUOUS, "op": ConvOp.FPROP, **changes}
    )


def rounds(samples_ms: Mapping[str, Sequence[float]]) -> Rounds:
    return Rounds(1, {key: tuple(round(ms * 1e6) for ms in some) for key, some in samples_ms.items()})


def measured(
    which: Case,
    own_ms: float,
    divided_ms: float,
    noise: Sequence[float] = FLAT,
    own_bytes: int = 0,
    choices: tuple[Choice, ...] | None = None,
    seen_bytes: int = 3 * MIB,
) -> Measured:
    """A line in which the division is chosen under every limit, unless other choices are given."""
    times = {OWN: [own_ms * each for each in noise], WINOGRAD: [divided_ms] * len(noise)}
    problem = next(each for each in LAYERS if each.name == which.layer).problem(which.op, which.layout)
    return Measured(
        case=which,
        problem=problem,
        own=OWN,
        own_bytes=own_bytes,
        candidates=12,
        refused=(),
        errors={"cpu:aten": 1e-7, "cpu:winograd4": 2e-6},
        rivals=(Rival(WINOGRAD, 2 * MIB, divided_ms * 0.8e-3, seen_bytes),),
        undivided=OWN,
        choices=choices or tuple(Choice(limit, WINOGRAD, WINOGRAD) for limit in LIMITS),
        deciding=rounds(times),
        proving=rounds(times),
        seconds=2.0,
    )


def environment() -> Environment:
    policy = {"threads": "1", "LD_PRELOAD": "libjemalloc.so"}
    return Environment("cpu", {"model name": "Some CPU"}, {"torch": "2"}, policy, {"libc": "glibc 2.36"})
