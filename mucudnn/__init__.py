"""Micro-batching convolution autotuner: the fastest convolutions that fit a workspace limit.

    model = mucudnn.optimize(model, "64MiB", sample)

Importing the package is cheap: what computes is loaded with the first name that needs it.
"""

import importlib
import random
from types import ModuleType
from typing import TYPE_CHECKING

from mucudnn import errors
from mucudnn.division import Division
from mucudnn.plan import ConvSite, Plan
from mucudnn.profile import Candidate
from mucudnn.version import __version__

if TYPE_CHECKING:
    from mucudnn import functional, report, solvers
    from mucudnn.autotuning import autotune
    from mucudnn.comparing.steps import compare
    from mucudnn.patching.applying import apply, plan_of, restore
    from mucudnn.tuner import optimize, tune

__all__ = [
    "Candidate",
    "ConvSite",
    "Division",
    "Plan",
    "__version__",
    "apply",
    "autotune",
    "compare",
    "errors",
    "functional",
    "optimize",
    "plan_of",
    "report",
    "restore",
    "solvers",
    "tune",
]

_HOMES = {
    "apply": "mucudnn.patching.applying",
    "autotune": "mucudnn.autotuning",
    "compare": "mucudnn.comparing.steps",
    "plan_of": "mucudnn.patching.applying",
    "restore": "mucudnn.patching.applying",
    "optimize": "mucudnn.tuner",
    "tune": "mucudnn.tuner",
}


def __getattr__(name: str) -> object:
    if name in ("functional", "report", "solvers"):
        return _imported(f"mucudnn.{name}")
    if name in _HOMES:
        return getattr(_imported(_HOMES[name]), name)
    raise AttributeError(f"module 'mucudnn' has no attribute {name!r}")


def _imported(name: str) -> ModuleType:
    """Import a module in the midst of a program, which may have seeded Python's random numbers before.

    Rich draws one of them when it is imported; the state is put back.
    """
    state = random.getstate()
    try:
        return importlib.import_module(name)
    finally:
        random.setstate(state)


def __dir__() -> list[str]:
    return __all__
