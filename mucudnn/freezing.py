"""Whether a graph is one that torch.compile freezes for inference, so that it holds parameters as constants.

That takes two steps. Dynamo, which traces the graph, asks the setting `torch._inductor.config.freezing`
whether parameters are constants. Inductor, which compiles it, asks the setting, or `options` in its place,
whether it shall make use of that, and freezes nothing if gradients are recorded when it begins. Filters are
packed only if both do. PyTorch says so nowhere; where the signs read here are missing, nothing is frozen.
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
    around = getattr(frames, "initial_global_state", None)
    state = "{}" if around is None else around.__getstate__()
    return _is_set() and json.loads(state).get("grad_mode") is False


def is_compiled_to_be_frozen() -> bool:
    """Return whether Inductor compiles now, and freezes what Dynamo has traced for that."""
    handlers: Any = sys.modules.get("torch._inductor.virtualized")
    mode = getattr(getattr(handlers, "V", None), "fake_mode", None)
    return isinstance(mode, FakeTensorMode) and _is_set() and not torch.is_grad_enabled()


def _is_set() -> bool:
    settings: Any = sys.modules.get("torch._inductor.config")
    return bool(getattr(settings, "freezing", False))
