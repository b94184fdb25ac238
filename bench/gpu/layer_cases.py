"""The layers that are compared on a card, in the order in which they are measured: by what they may show."""

import dataclasses
import fnmatch
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from bench.cpu.lines import Case
from bench.gpu.layer_kinds import CLIFFS
from bench.gpu.layers import LAYERS as QUESTIONED
from bench.gpu.plans import LARGE
from bench.workloads import LAYERS, NETWORKS, SETTINGS, Setting, Workload
from mucudnn.examining.extraction import extract
from mucudnn.problem import ConvOp, ConvProblem, Layout

_SETTINGS = (
    "bfloat16-nchw",
    "float32-nchw",
    "bfloat16-nhwc",
    "tf32-nchw",
    "tf32-nhwc",
    "float32-nhwc",
)
"""First that in which workspace matters most, then that in which cuDNN lacks Winograd's algorithms."""

_CLIFFS = ("dw7x7", "unet3d", "conv3d", "rn50_c1", "grp32")
"""Depthwise, in three dimensions, on three channels, grouped: where PyTorch was reported to be slow."""

_NETWORKS = ("vgg16", "resnet18", "unet3d", "resnet50")

_ENLARGED = ("vgg16", "resnet18")

_LARGE = 512
"""Images of a mini-batch of which a tenth keeps a card busy, so that it matters less what a part costs."""

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclasses.dataclass(frozen=True)
class Layer:
    """A convolution of a network with its mini-batch.

    Attributes:
        name: of the network, or of a list of layers, and of the module.
        problems: by op, as they are in float32 and contiguous; a network's first layer has no dgrad.
        takes_minutes: whether it is measured after all others, in all settings.
    """

    name: str
    problems: Mapping[ConvOp, ConvProblem]
    takes_minutes: bool = False


@dataclasses.dataclass(frozen=True)
class LayerCase:
    """One op of a layer in one setting.

    Attributes:
        case: what it is called in the lines.
        problem: what is computed.
        setting: type, layout and precision.
    """

    case: Case
    problem: ConvProblem
    setting: Setting


def settings() -> list[Setting]:
    """Return all settings, in the order in which they are measured."""
    return sorted(SETTINGS, key=lambda setting: _SETTINGS.index(setting.name))


@functools.cache
def layers() -> tuple[Layer, ...]:
    """Return all layers, for which all networks are examined, once."""
    return tuple(_layers())


def _layers() -> Iterator[Layer]:
    """Yield all: cliffs, AlexNet's, DeepBench's, those of larger networks and batches, the largest cliff."""
    named = {workload.name: workload for workload in NETWORKS}
    yield from cliffs()
    for workload in (named["alexnet"], *LAYERS, *(named[name] for name in _NETWORKS)):
        yield from layers_of(workload)
    yield from itertools.chain.from_iterable(
        layers_of(_with_batch(named[name], _LARGE)) for name in _ENLARGED
    )
    yield from largest()


def _with_batch(workload: Workload, batch: int) -> Workload:
    name = f"{workload.name}_b{batch}"
    return dataclasses.replace(workload, name=name, shape=(batch, *workload.shape[1:]))


def cliffs() -> Iterator[Layer]:
    """Yield layers of which it was reported that PyTorch is slow."""
    for name in _CLIFFS:
        ops = {op: QUESTIONED[name].problem(op, "float32", Layout.CONTIGUOUS) for op in ConvOp}
        yield Layer(f"{CLIFFS}{name}", ops)


def largest() -> Iterator[Layer]:
    """Yield the layer of pytorch#128936, whose forward pass is slow, and with a sample less."""
    for batch in (LARGE.batch, LARGE.batch - 1):
        large = dataclasses.replace(LARGE, batch=batch)
        problem = large.problem(ConvOp.FPROP, "float32", Layout.CONTIGUOUS)
        yield Layer(f"{CLIFFS}pt128936_{batch}", {ConvOp.FPROP: problem}, takes_minutes=True)


def layers_of(workload: Workload) -> Iterator[Layer]:
    """Yield the distinct convolutions of a network, each by the name of the first that is alike.

    They are found without memory or arithmetic: the network lies on a device that has neither.
    """
    with torch.device("meta"):
        model = workload.build()
        sample = torch.empty(workload.shape).requires_grad_(workload.wants_gradient)
    known: set[ConvProblem] = set()
    found = extract(model, sample).problems.items()
    for path, sites in itertools.groupby(found, key=lambda each: each[0].path):
        problems = {site.op: problem for site, problem in sites if problem not in known}
        known.update(problems.values())
        if problems:
            yield Layer(f"{workload.name}/{path}" if path else workload.name, problems)


def cases(
    layers: Iterable[Layer], settings: Iterable[Setting], patterns: Sequence[str] = ("*",)
) -> Iterator[LayerCase]:
    """Yield the cases of the layers whose names match some pattern, as in a shell, setting by setting.

    Those that take minutes come after all others. What several lists of layers have in common is measured
    once in each setting; but cliffs, which are few, are measured by their own names as well.
    """
    chosen = [layer for layer in layers if any(fnmatch.fnmatchcase(layer.name, each) for each in patterns)]
    wanted = list(settings)
    yield from _cases([layer for layer in chosen if not layer.takes_minutes], wanted)
    yield from _cases([layer for layer in chosen if layer.takes_minutes], wanted)


def _cases(chosen: Sequence[Layer], settings: Iterable[Setting]) -> Iterator[LayerCase]:
    """Yield the cases of these layers, setting by setting."""
    for setting in settings:
        known: set[ConvProblem] = set()
        for layer in chosen:
            for op, problem in layer.problems.items():
                here = _in(setting, problem)
                is_cliff = layer.name.startswith(CLIFFS)
                if is_cliff or here not in known:
                    yield LayerCase(Case(setting.name, layer.name, setting.layout, op), here, setting)
                if not is_cliff:
                    known.add(here)


def _in(setting: Setting, problem: ConvProblem) -> ConvProblem:
    return dataclasses.replace(
        problem, dtype=_DTYPES[setting.dtype], layout=setting.layout, filter_layout=setting.layout
    )
