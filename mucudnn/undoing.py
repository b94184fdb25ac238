"""Leaving a model as it was: what a pass that examines it has bound, kept and drawn is put back."""

import collections
import contextlib
import functools
import gc
import itertools
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mucudnn.errors import ValuesWarning, warn_user

_MOST = 100_000
"""Things that are looked at in search of containers, the nearest first: whoever has more keeps data there."""

_ATOMS = (Tensor, str, bytes, int, float, complex, type(None), torch.dtype, torch.device, np.ndarray)

Container = dict[Any, Any] | list[Any] | set[Any] | collections.deque[Any]

_CONTAINERS = (dict, list, set, collections.deque)


@contextlib.contextmanager
def left_as_it_was(model: nn.Module, is_left_over: Callable[[Tensor], bool]) -> Iterator[None]:
    """Put back what a pass has changed: what attributes are bound to, and what is kept of its tensors.

    A model may remember what it has computed. Of a pass without arithmetic that would be a tensor without
    values, with which every later pass fails, or trains nothing. `functional_call` leaves such tensors
    itself, as parameters of modules that lie in a shared one.

    Containers and objects to which attributes, hooks and the modules' sources lead are put back only if they
    hold such a tensor: others may write to them meanwhile.

    Args:
        model: that is run.
        is_left_over: whether a tensor must not stay.
    """
    before = [
        (each, dict(each.__dict__), dict(each._parameters), dict(each._buffers))
        for each in model.modules()
        if not isinstance(each, torch.jit.ScriptModule)  # its attributes are its own
    ]
    found = _reached(_roots(module for module, *_ in before))
    kept = [(each, _copied(each)) for each in found if isinstance(each, _CONTAINERS)]
    try:
        yield
    finally:
        for module, attributes, parameters, buffers in before:
            _replace(module.__dict__, attributes)
            _replace(module._parameters, parameters)
            _replace(module._buffers, buffers)
        for container, former in kept:
            changed = _changed(container, former)
            if any(isinstance(each, Tensor) and is_left_over(each) for each in _reached(changed)):
                _put_back(container, former)


def _roots(modules: Iterable[nn.Module]) -> list[object]:
    """Return what a pass of modules may write to: their attributes, and containers beside their classes."""
    attributes: list[object] = []
    sources: dict[str, None] = {}
    for module in modules:
        attributes.extend(module.__dict__.values())
        sources[type(module).__module__] = None
    globals_ = (vars(sys.modules[name]) for name in sources if name in sys.modules)
    return [*attributes, *itertools.chain.from_iterable(map(_containers, globals_))]


def _containers(names: Mapping[str, object]) -> list[object]:
    """Return the containers of a module of Python's, but for the functions that are built in."""
    return [
        value for name, value in [*names.items()] if isinstance(value, _CONTAINERS) and name != "__builtins__"
    ]


def _reached(roots: Iterable[object]) -> Iterator[object]:
    """Yield what can be reached, the nearest first, each once, as far as not too much is there."""
    left = collections.deque(roots)
    seen: set[int] = set()
    while left and len(seen) < _MOST:
        thing = left.popleft()
        if id(thing) not in seen:
            seen.add(id(thing))
            yield thing
            if not isinstance(thing, _ATOMS):
                left.extend(_inside(thing))


def _inside(thing: object) -> Iterable[object]:
    """Return a container's items, what a function was made of, or an object's attributes as a container."""
    match thing:
        case dict():
            return list(thing.values())
        case list() | set() | collections.deque() | tuple() | frozenset():
            return list(thing)
        case types.FunctionType():
            return [*map(_content, thing.__closure__ or ()), *_containers(thing.__globals__)]
        case types.MethodType():
            return [thing.__self__, thing.__func__]
        case functools.partial():
            return [thing.func, *thing.args, *thing.keywords.values()]
        case type() | types.ModuleType() | types.BuiltinFunctionType():
            return []
        case _:
            attributes = getattr(thing, "__dict__", None)
            return [attributes] if isinstance(attributes, dict) else []


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it has none yet
        return None


def _copied(container: Container) -> Container:
    """Return a plain copy of a container's items."""
    return dict(container) if isinstance(container, dict) else list(container)


def _changed(container: Container, former: Container) -> list[object]:
    """Return the items of a container that are not where they were; none if there are no others."""
    if isinstance(container, dict) and isinstance(former, dict):
        return [value for key, value in container.items() if key not in former or former[key] is not value]
    known = {id(each) for each in former}
    return [each for each in container if id(each) not in known]


def _put_back(container: Container, former: Container) -> None:
    if isinstance(container, dict) and isinstance(former, dict):
        _replace(container, former)
    elif isinstance(container, list):
        container[:] = former
    else:
        container.clear()
        container.extend(former) if isinstance(container, collections.deque) else container.update(former)


def _replace(present: MutableMapping[Any, Any], former: Mapping[Any, Any]) -> None:
    if [*present] != [*former]:  # the order counts; as it is, other threads never see an empty module
        present.clear()
    present.update(former)


def forget(alive: Callable[[], Sequence[Tensor]]) -> None:
    """Have functions' caches forget tensors that are still alive though nobody should hold them, or say so.

    Args:
        alive: returns these tensors.
    """
    if not alive():
        return
    gc.collect()  # some may be parts of a cycle
    for holder in gc.get_referrers(*alive()):
        if isinstance(holder, functools._lru_cache_wrapper):
            holder.cache_clear()
    left = alive()
    if left:
        warn_user(
            f"Somebody keeps {len(left)} tensors without values of the pass that examined the model, outside "
            "of its attributes, hooks and source. Whatever computes with them will fail, or have no values "
            "either: clear what is kept for later calls before the model is called.",
            ValuesWarning,
        )


@contextlib.contextmanager
def random_state_kept(model: nn.Module) -> Iterator[None]:
    """Put back the random states of Python, NumPy, and torch on the host and the cards of the model."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    cards = sorted(each.index for each in devices if each.type == "cuda")
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(cards):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
