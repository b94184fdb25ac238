"""What each patched convolution takes within its model, beside the same one unpatched.

A tuner times convolutions one by one, on operands of their own. Within a model others have used the caches
meanwhile, and what it found may not come true: this tells, of forward passes, run eagerly.
"""

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from bench.cpu.rounds import Rounds
from bench.cpu.way_lines import Within
from mucudnn import Plan
from mucudnn.backends import Backend
from mucudnn.comparing.clocks import HostClock, ModuleClocks
from mucudnn.division import undivided
from mucudnn.intervals import FEWEST_SAMPLES

MOST_ROUNDS = 40

_SECONDS = 30.0
"""That rounds may take, as long as there are six, which an interval needs."""


def within(
    calls: Mapping[str, Callable[[], object]],
    models: Mapping[str, nn.Module],
    plan: Plan,
    layout: str,
    backend: Backend,
) -> tuple[Within, ...]:
    """Return what each convolution takes that the plan patches; nothing else is compiled or hooked.

    Args:
        calls: run each of the models once, by `OWN` and `PATCHED`.
        models: likewise.
        plan: of the patched model, for inference.
        layout: of both.
        backend: that computes.
    """
    runs = {
        site.path: division.key
        for site, division in plan.sites.items()
        if division.key != undivided(backend.own, division.batch).key
    }
    neighbours = backend.neighbours()
    claims = {call.path: call.speedup.median for call in plan.calls}
    clocks = ModuleClocks(HostClock(backend.clock))
    with contextlib.ExitStack() as stack:
        for model in models.values():
            stack.enter_context(clocks.watching({path: model.get_submodule(path) for path in runs}))
        with neighbours.watched():
            spans = _rounds(calls, clocks, [*runs])
    rounds = {path: {name: spans[name][path] for name in calls} for path in runs}
    return tuple(
        Within(layout, path, key, Rounds(1, rounds[path], neighbours.taken), claims.get(path))
        for path, key in runs.items()
    )


def _rounds(
    calls: Mapping[str, Callable[[], object]], clocks: ModuleClocks, paths: Sequence[str]
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the spans of each module in each model, in rounds that run all models in an order drawn anew."""
    order, passes = random.Random(0), dict[str, list[dict[str, int]]]()
    for call in calls.values():
        call()
    end_s = time.monotonic() + _SECONDS
    for number in itertools.count(1):
        for name in order.sample([*calls], len(calls)):
            passes.setdefault(name, []).append(clocks.taken_by(calls[name]))
        if number >= MOST_ROUNDS or (number >= FEWEST_SAMPLES and time.monotonic() > end_s):
            break
    return {
        name: {path: tuple(each.get(path, 1) for each in found) for path in paths}
        for name, found in passes.items()
    }
