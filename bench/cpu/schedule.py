"""In which order cases are measured, and how long each process may take."""

import dataclasses
import fnmatch
from collections.abc import Collection, Iterable, Sequence

from bench.cpu.layers import Layer
from bench.cpu.lines import Case
from bench.cpu.settings import OF_LAYERS, ONE
from mucudnn.problem import ConvOp, Layout


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which cases are asked for.

    Attributes:
        patterns: of layers' names, as in a shell.
        settings: names.
        layouts: of tensors.
        ops: of the three.
    """

    patterns: tuple[str, ...]
    settings: tuple[str, ...]
    layouts: tuple[Layout, ...]
    ops: tuple[ConvOp, ...]

    def __contains__(self, case: Case) -> bool:
        return (
            case.setting in self.settings
            and case.layout in self.layouts
            and case.op in self.ops
            and any(fnmatch.fnmatchcase(case.layer, pattern) for pattern in self.patterns)
        )


@dataclasses.dataclass(frozen=True)
class Stage:
    """What one process measures.

    Attributes:
        setting: name of the thread setting.
        cases: in their order.
    """

    setting: str
    cases: tuple[Case, ...]


def cases_of(layer: Layer, setting: str) -> list[Case]:
    """Return what there is to measure of a layer in a setting."""
    return [Case(setting, layer.name, layout, op) for op in layer.ops for layout in layer.layouts]


def tiers(layers: Sequence[Layer], selection: Selection) -> list[list[Stage]]:
    """Return the stages, tier by tier: should the time run out, the last ones lack most.

    Of the core layers forward in all settings, then backward on one thread, then backward on more; then the
    other layers. Backward ops go layer by layer, so that as many layers as possible have all three.
    """
    found: dict[int, dict[str, list[Case]]] = {}
    for setting in OF_LAYERS:
        for layer in layers:
            for case in cases_of(layer, setting):
                if case in selection:
                    found.setdefault(_tier(layer, case), {}).setdefault(setting, []).append(case)
    return [
        [Stage(setting, _forward_first(cases)) for setting, cases in found[tier].items()]
        for tier in sorted(found)
    ]


def _tier(layer: Layer, case: Case) -> int:
    if not layer.is_core:
        return 3
    if case.op is ConvOp.FPROP:
        return 0
    return 1 if case.setting == ONE.name else 2


def _forward_first(cases: Iterable[Case]) -> tuple[Case, ...]:
    return tuple(sorted(cases, key=lambda case: case.op is not ConvOp.FPROP))  # stable: layers keep order


def pending(stages: Iterable[Stage], done: Collection[Case]) -> list[Stage]:
    """Return the stages with what is left of them."""
    left = (Stage(stage.setting, tuple(case for case in stage.cases if case not in done)) for stage in stages)
    return [stage for stage in left if stage.cases]
