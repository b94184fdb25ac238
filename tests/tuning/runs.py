"""Runs of the tuner on machines whose times are scripted."""

from collections.abc import Callable

from torch import nn

from mucudnn.choices import Mode, Policy
from mucudnn.examining.extraction import Extraction, extract
from mucudnn.live.measurer import LiveMeasurer
from mucudnn.plan import Plan
from mucudnn.profiling.profiler import Profiler
from mucudnn.store import Store
from mucudnn.store.memory import MemoryStore
from mucudnn.tuning.run import Tuning
from tests.doubles import MS, Recipe, ScriptedBackend
from tests.models import Listener, a_batch


def planned(
    backend: ScriptedBackend,
    extraction: Extraction,
    limit_bytes: int = 2**20,
    mode: Mode = Mode.REUSE,
    policy: Policy = Policy.POWER_OF_TWO,
    store: Store | None = None,
    listener: Listener | None = None,
    *,
    may_be_frozen: bool = False,
) -> Plan:
    """The plan for a machine whose time is scripted."""
    opened = MemoryStore() if store is None else store
    profiler = Profiler(LiveMeasurer(backend), opened, limit_bytes, policy)
    return Tuning(profiler, mode, extraction, listener or Listener(), may_be_frozen=may_be_frozen).plan()


def one_convolution() -> Extraction:
    """fprop of 8 samples."""
    return extract(nn.Conv2d(3, 4, 3, padding=1).eval(), a_batch())


def keys_of(plan: Plan) -> list[str]:
    return [division.key for division in plan.sites.values()]


def affine(each: float, part: float) -> Callable[[int], float]:
    """Milliseconds for each sample and for each part: the larger a part, the better."""
    return lambda samples: (each * samples + part) * MS


def with_rival(ns: Callable[[int], float]) -> ScriptedBackend:
    """PyTorch's own takes 8 ms for 8 samples; the rival runs 4 samples at most in good time."""
    slow_when_whole = Recipe(lambda samples: ns(samples) if samples <= 4 else 100 * MS, setup_ns=0.001 * MS)
    return ScriptedBackend({"rival": slow_when_whole})
