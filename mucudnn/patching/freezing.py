"""Whether a graph is one that torch.compile freezes for inference, so that it holds parameters as constants.

That takes two steps. Dynamo, which traces the graph, asks the setting `torch._inductor.config.freezing`
whether parameters are constants. Inductor, which compiles it, asks the setting, or `options` in its place,
whether it shall make use of that, and freezes nothing if gradients are recorded when it begins. If both do,
it packs the filters that are constants, unless it is told not to. PyTorch says so nowhere; where the signs
that are read here are missing, nothing counts as frozen.
"""

import json
import sys
from typing import Any

import torch
from torch._subclasses import FakeTensorMode


def is_traced_to_be_frozen() -> bool:
    """Return whether Dynamo traces parameters as constants now, in a call that records no gradients."""
    frames: Any = sys.modules.get("torch._dynamo.convert_frame")
    # Inside of the graph gradients may be off though they are on around it.
    around: Any = getattr(frames, "initial_global_state", None)
    try:
        state = json.loads(around.__getstate__())
    except (AttributeError, TypeError, ValueError):
        return False
    return state.get("grad_mode") is False and _is_set("freezing")


def is_compiled_to_be_packed() -> bool:
    """Return whether Inductor compiles now, freezes what Dynamo has traced for that, and packs filters."""
    handlers: Any = sys.modules.get("torch._inductor.virtualized")
    mode = getattr(getattr(handlers, "V", None), "fake_mode", None)
    is_frozen = isinstance(mode, FakeTensorMode) and _is_set("freezing") and not torch.is_grad_enabled()
    return is_frozen and _is_set("cpp.weight_prepack") and _is_set("layout_optimization")


def _is_set(name: str) -> bool:
    """Whether a setting of Inductor's is on; before it is loaded, none is."""
    value: Any = sys.modules.get("torch._inductor.config")
    for part in name.split("."):
        value = getattr(value, part, None)
    return bool(value)
