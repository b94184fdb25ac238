"""Stores filled by a tuning on a device whose time is scripted, to be replayed."""

from pathlib import Path

import torch
from torch import nn

from mucudnn.choices import Mode, Policy
from mucudnn.examining.extraction import Extraction, extract
from mucudnn.live.measurer import LiveMeasurer
from mucudnn.plan import Plan
from mucudnn.profile import Environment
from mucudnn.profiling.profiler import Profiler
from mucudnn.store import SqliteStore
from mucudnn.tuning.run import Tuning
from tests.doubles import MS, Recipe, ScriptedBackend, rate
from tests.models import Listener, a_batch

MIB = 2**20


class Elsewhere(ScriptedBackend):
    """The same device with other settings."""

    def environment(self) -> Environment:
        return Environment(self.name, {"name": "made up"}, {"torch": torch.__version__}, {"threads": "9"})


def a_backend() -> ScriptedBackend:
    """PyTorch's own, one that is faster in parts of 4 and less, and one that needs little workspace."""
    return ScriptedBackend(
        {
            "parts": Recipe(
                lambda samples: (0.02 + samples * (0.5 if samples <= 4 else 5)) * MS, sample_bytes=200
            ),
            "small": Recipe(rate(2 * MS), sample_bytes=10),
        }
    )


def record(
    path: Path,
    backend: ScriptedBackend,
    extraction: Extraction,
    limit_bytes: int = MIB,
    mode: Mode = Mode.REUSE,
    policy: Policy = Policy.POWER_OF_TWO,
) -> Plan:
    """Tune on a scripted device, and keep all that was measured at `path`; return the plan."""
    with SqliteStore(path) as store:
        profiler = Profiler(LiveMeasurer(backend), store, limit_bytes, policy)
        return Tuning(profiler, mode, extraction, Listener()).plan()


def a_convolution_model() -> nn.Module:
    """fprop alone."""
    return nn.Conv2d(3, 4, 3, padding=1).eval()


def a_convolution_extraction() -> Extraction:
    """fprop of 8 samples."""
    return extract(a_convolution_model(), a_batch())
