"""What is run in several ways of PyTorch's own, and patched: which networks, on what batches, what for."""

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum

from bench.cpu.settings import ONE, TWO
from bench.cpu.step_cases import NETWORKS, Network
from mucudnn.problem import Layout


class Use(StrEnum):
    """What a network is run for."""

    TRAINING = "training"
    """A step: reading the batch, forward, loss, backward and update."""
    INFERENCE = "inference"
    """The forward pass in evaluation mode, without gradients."""


class Form(StrEnum):
    """How PyTorch runs a model."""

    EAGER = "eager"
    WITHOUT_ONEDNN = "eager without oneDNN"
    COMPILED = "compiled"
    FROZEN = "compiled and frozen"
    """Inductor folds what is constant, batch norm into filters among it, and packs filters for oneDNN; not in
    those patched convolutions that are faster there, which are operators of their own."""


@dataclasses.dataclass(frozen=True, order=True)
class Way:
    """One way to run a network.

    Attributes:
        layout: of images and filters.
        form: how PyTorch runs it.
        is_divided: whether mucudnn has patched it.
    """

    layout: Layout
    form: Form
    is_divided: bool

    def __str__(self) -> str:
        return f"{self.layout}, {self.form}" + ", patched" * self.is_divided

    @property
    def unpatched(self) -> "Way":
        """The same way of the unpatched model."""
        return dataclasses.replace(self, is_divided=False)


AS_IT_COMES = Way(Layout.CONTIGUOUS, Form.EAGER, is_divided=False)


@dataclasses.dataclass(frozen=True, order=True)
class WayCase:
    """A network in all ways, in one thread setting.

    Attributes:
        setting: its name.
        network: its name.
        use: what it is run for.
        batch: samples at a time.
    """

    setting: str
    network: str
    use: Use
    batch: int

    def __str__(self) -> str:
        return f"{self.setting} {self.network} {self.use} {self.batch}"


_BATCHES: tuple[tuple[str, Use, tuple[int, ...]], ...] = (
    ("resnet18", Use.INFERENCE, (1, 8, 64)),
    ("resnet18", Use.TRAINING, (64,)),
    ("unet", Use.INFERENCE, (1,)),
    ("resnet18-224", Use.TRAINING, (16,)),
    ("resnet50", Use.TRAINING, (8,)),
    ("resnet50", Use.INFERENCE, (1, 8)),
    ("unet", Use.TRAINING, (4,)),
)
"""In the order in which they are measured; training takes the batch of its recipe."""

WAY_NETWORKS: tuple[Network, ...] = tuple(
    network for network in NETWORKS if network.name in {name for name, _, _ in _BATCHES}
)


def cases_of(networks: Sequence[Network], settings: Collection[str]) -> list[WayCase]:
    """Return the cases in their order: should the time run out, the first settings are complete."""
    names = {network.name for network in networks}
    return [
        WayCase(setting.name, network, use, batch)
        for setting in (TWO, ONE)
        for network, use, batches in _BATCHES
        for batch in batches
        if setting.name in settings and network in names
    ]


def ways_of(use: Use) -> list[Way]:
    """Return the ways in which a network is run."""
    forms = [Form.EAGER, Form.COMPILED, *([Form.FROZEN] if use is Use.INFERENCE else [])]
    return [
        *itertools.starmap(Way, itertools.product(Layout, forms, (False, True))),
        *(Way(layout, Form.WITHOUT_ONEDNN, is_divided=False) for layout in Layout),
    ]


WAYS: Mapping[str, Way] = {str(way): way for use in Use for way in ways_of(use)}
"""All ways by their texts."""
