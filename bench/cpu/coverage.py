"""Which layers there are, and which of them were not measured."""

import itertools
from collections.abc import Iterator, Sequence

from bench.cpu.layers import Layer
from bench.cpu.lines import Case, Recording
from bench.cpu.schedule import cases_of
from bench.cpu.settings import OF_LAYERS
from mucudnn.problem import ConvOp, Layout


def missing(recording: Recording, layers: Sequence[Layer]) -> Iterator[str]:
    """Yield the layers that were not measured, and those that failed with the reason."""
    groups: dict[str, list[str]] = {}
    for setting, layout, op in itertools.product(OF_LAYERS, Layout, ConvOp):
        names = _absent(recording, layers, setting, layout, op)
        if names:
            groups.setdefault(names, []).append(f"{setting}, {layout}, {op}")
    for names, titles in groups.items():
        yield f"* {'; '.join(titles)}: {names}"
    for failed in recording.failed.values():
        yield f"* {failed.case} failed: {failed.reason}"
    if not groups and not recording.failed:
        yield "None."


def _absent(recording: Recording, layers: Sequence[Layer], setting: str, layout: Layout, op: ConvOp) -> str:
    """Return the layers without a line in a group, in words; nothing if there are none."""
    cases = [Case(setting, layer.name, layout, op) for layer in layers]
    asked = [case for case, layer in zip(cases, layers, strict=True) if case in cases_of(layer, setting)]
    absent = [case.layer for case in asked if case not in recording.measured and case not in recording.failed]
    return f"{len(absent)} layers: {_by_network([case.layer for case in asked], absent)}" if absent else ""


def _by_network(names: Sequence[str], absent: Sequence[str]) -> str:
    """Return the absent names; where a whole network is absent, its name and how many layers it has."""
    networks: dict[str, list[str]] = {}
    for name in names:
        networks.setdefault(name.partition("/")[0], []).append(name)
    texts = []
    for network, members in networks.items():
        missed = [name for name in members if name in absent]
        texts += [f"{network}/* ({len(missed)})"] if missed == members and len(members) > 1 else missed
    return ", ".join(texts)


def sources(layers: Sequence[Layer]) -> Iterator[str]:
    """Yield where the shapes come from, and the shapes."""
    by_source: dict[str, list[Layer]] = {}
    for layer in layers:
        by_source.setdefault(layer.source, []).append(layer)
    for source, some in by_source.items():
        yield f"* {source}: {'; '.join(_shape(layer) for layer in some)}"


def _shape(layer: Layer) -> str:
    problem = str(layer.problem(ConvOp.FPROP, Layout.CONTIGUOUS))
    return f"{layer.name} {problem.removeprefix('fprop ').removesuffix(', float32 contiguous')}"
