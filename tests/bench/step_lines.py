"""Lines of steps of `make bench-cpu`, all made up."""

from collections.abc import Sequence
from typing import Any

from bench.cpu.rounds import Rounds
from bench.cpu.step_cases import LIMIT_BYTES
from bench.cpu.step_lines import DIVIDED, OWN, UNDIVIDED, SiteTime, StepCase, StepMeasured, Tuned
from mucudnn.problem import Layout

FLAT = (1.0,) * 15


def case(
    network: str = "resnet18", setting: str = "1-thread", layout: Layout = Layout.CHANNELS_LAST
) -> StepCase:
    return StepCase(setting, network, layout)


def measured(
    which: StepCase,
    own_ms: float = 2500.0,
    divided_ms: float = 1250.0,
    noise: Sequence[float] = FLAT,
    known: int = 0,
    untouched: tuple[str, ...] = (),
    own_bytes: int | None = 3 * 2**30,
    times: tuple[SiteTime, ...] = (),
    others: float | None = None,
    undivided_ms: float | None = None,
    **changes: Any,
) -> StepMeasured:
    spans = {OWN: [own_ms] * len(noise), DIVIDED: [divided_ms * each for each in noise]}
    runs = {"stem fprop": "cpu:aten@64*1", "stage1 fprop": "cpu:winograd4@64*1"}
    if undivided_ms is not None:
        spans[UNDIVIDED] = [undivided_ms] * len(noise)
        runs["stage1 fprop"] = "cpu:winograd4@32*2"
    return StepMeasured(
        case=which,
        batch=64,
        limit_bytes=LIMIT_BYTES,
        tuned=Tuned(100.0, known, 300, 2**28, runs, 1, untouched, 12 * 2**20, times),
        rounds=Rounds(
            1, {name: tuple(round(ms * 1e6) for ms in some) for name, some in spans.items()}, others
        ),
        convolutions=0.8,
        reading=0.001,
        difference=3e-6,
        own_bytes=own_bytes,
        divided_bytes=2**30,
        seconds=400.0,
        **changes,
    )
