"""Leaving a model as it was: what a pass that examines it has bound, kept and drawn is put back."""

import collections
import contextlib
import functools
import gc
import itertools
import operator
import random
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mucudnn.errors import ValuesWarning, warn_user
from mucudnn.interruptions import pass_on_interruption

_MOST = 100_000
"""Things that are looked at in search of containers, the nearest first."""

_MOST_ITEMS = 10_000
"""Of a container that is looked into: a larger one holds data."""

_STEPS = 3
"""From a tensor to the cache of a function that keeps it: in a tuple, say, which lies in a dict."""

_ATOMS = frozenset({str, bytes, bytearray, int, float, complex, bool, type(None), torch.dtype, torch.device})

Container = dict[Any, Any] | list[Any] | set[Any] | collections.deque[Any]

_CONTAINERS = (dict, list, set, collections.deque)

_ITEMS: Mapping[type, Callable[[Any], Iterable[object]]] = {
    dict: dict.values,
    list: list.__iter__,
    tuple: tuple.__iter__,
    set: set.__iter__,
    frozenset: frozenset.__iter__,
    collections.deque: collections.deque.__iter__,
}
"""How each is looked into, past whatever a class of the user's would do then."""


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Names of attributes, such as that of its parameters."""

_TABLES = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
"""Names of those that are dictionaries: of parameters, buffers, parts, and of hooks of every kind."""


class _FormerModule(NamedTuple):
    """What a module was made of."""

    module: nn.Module
    attributes: dict[str, Any]
    tables: dict[str, dict[Any, Any]]
    unsaved: set[str]

    @classmethod
    def of(cls, module: nn.Module) -> "_FormerModule":
        """Return what it is made of."""
        attributes = dict(module.__dict__)
        return cls(
            module,
            attributes,
            {name: dict(attributes[name]) for name in _TABLES if name in attributes},
            {*module._non_persistent_buffers_set},
        )

    @property
    def own_attributes(self) -> list[Any]:
        """What its class, or who uses it, has bound to it, without what every module has."""
        return [value for name, value in self.attributes.items() if name not in _OF_EVERY_MODULE]

    def put_back(self) -> None:
        """Have it be made of that again."""
        _replace(self.module.__dict__, self.attributes)
        for name, table in self.tables.items():
            _replace(self.attributes[name], table)
        self.module._non_persistent_buffers_set.intersection_update(self.unsaved)
        self.module._non_persistent_buffers_set.update(self.unsaved)


@contextlib.contextmanager
def left_as_they_were(modules: Iterable[nn.Module], alive: Callable[[], Sequence[Tensor]]) -> Iterator[None]:
    """Put back what a pass has changed: what attributes are bound to, and what is kept of its tensors.

    A model may remember what it has computed. Of a pass without arithmetic that would be a tensor without
    values, with which every later pass fails, or trains nothing. `functional_call` leaves such tensors
    itself, as parameters of modules that lie in a shared one.

    Containers that are attributes of modules are always put back. Other containers, to which attributes,
    hooks and the modules' sources lead, are put back as a whole only if they lead to such a tensor, since
    somebody else may write to them meanwhile. What others wrote to those that are put back is lost.

    Args:
        modules: that are run.
        alive: returns the tensors that nobody may keep.
    """
    before = [
        _FormerModule.of(each)
        for each in modules
        if not isinstance(each, torch.jit.ScriptModule)  # its attributes are its own
    ]
    found = _reached(_roots(each.module for each in before))
    kept = [(each, _copied(each)) for each in found if _is_container(each) and not _is_data(each)]
    own = {id(value) for each in before for value in each.own_attributes}
    try:
        yield
    finally:
        for each in before:
            each.put_back()
        left = alive()
        due = own | _leading([container for container, _ in kept], left) if left else own
        for container, former in kept:
            if id(container) in due:
                _put_back(container, former)


def _roots(modules: Iterable[nn.Module]) -> list[object]:
    """Return what a pass of modules may write to: attributes, and what lies beside and in their classes."""
    attributes: list[object] = []
    classes: dict[type, None] = {}
    for module in modules:
        attributes.extend(module.__dict__.values())
        classes.update(dict.fromkeys(type(module).__mro__))
    sources = [
        sys.modules[name]
        for name in dict.fromkeys(kind.__module__ for kind in classes)
        if name in sys.modules
    ]
    names: list[Mapping[str, object]] = [getattr(each, "__dict__", {}) for each in (*sources, *classes)]
    beside = (each for found in names for each in [*found.values()] if issubclass(type(each), type))
    names += [vars(kind) for kind in beside if kind.__module__.partition(".")[0] not in _LIBRARIES]
    return [*attributes, *itertools.chain.from_iterable(map(_containers, names))]


_LIBRARIES = frozenset({"builtins", "torch", "typing", "collections"})
"""Packages whose classes keep nothing of a model's."""


def _containers(names: Mapping[str, object]) -> list[object]:
    """Return the containers that have a name, but for the functions that are built in."""
    return [value for name, value in [*names.items()] if _is_container(value) and name != "__builtins__"]


def _is_container(thing: object) -> bool:
    return issubclass(type(thing), _CONTAINERS)


def _base(thing: object) -> type | None:
    """Return which of Python's own containers a thing is, or None."""
    return next((each for each in type(thing).__mro__ if each in _ITEMS), None)


def _is_data(thing: Any) -> bool:
    """Return whether a container is too large for anything but data."""
    base: Any = _base(thing)
    return bool(base.__len__(thing) > _MOST_ITEMS)


def _reached(roots: Iterable[object], most: int = _MOST) -> Iterator[object]:
    """Yield what can be reached, the nearest first, each once; so many things at most."""
    seen: set[int] = set()
    left = collections.deque(roots)
    while left and len(seen) < most:
        thing = left.popleft()
        if id(thing) not in seen:
            seen.add(id(thing))
            yield thing
            left.extend(each for each in _inside(thing) if type(each) not in _ATOMS)


def _inside(thing: object) -> Iterable[object]:
    """Return a container's items, what a function was made of, or an object's attributes as a container."""
    kind, base = type(thing), _base(thing)
    if base is not None:
        return [] if _is_data(thing) else list(_ITEMS[base](thing))
    if issubclass(kind, (type, types.ModuleType, types.BuiltinFunctionType, Tensor, np.ndarray)):
        return []
    if issubclass(kind, types.FunctionType):
        return [*map(_content, thing.__closure__ or ()), *_containers(thing.__globals__)]  # type: ignore[attr-defined]
    if issubclass(kind, types.MethodType):
        return [thing.__self__, thing.__func__]  # type: ignore[attr-defined]
    if issubclass(kind, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]  # type: ignore[attr-defined]
    try:
        attributes = object.__getattribute__(thing, "__dict__")
    except Exception as error:  # noqa: BLE001  # whatever a class makes of it, there is nothing to be seen
        pass_on_interruption(error)
        return []
    return [attributes] if type(attributes) is dict else []


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it has none yet
        return None


def _copied(container: Any) -> Container:
    """Return a plain copy of a container's items."""
    return dict.copy(container) if issubclass(type(container), dict) else list(_inside(container))


def _leading(roots: Sequence[object], tensors: Iterable[Tensor]) -> set[int]:
    """Return the ids of what lies between `roots` and some tensors, or is one of these."""
    holders: dict[int, list[int]] = {}
    for thing in _reached(roots, len(roots) + _MOST):
        for each in _inside(thing):
            holders.setdefault(id(each), []).append(id(thing))
    leading = {id(each) for each in tensors}
    left = [*leading]
    while left:
        found = [each for each in holders.get(left.pop(), ()) if each not in leading]
        leading.update(found)
        left.extend(found)
    return leading


def _put_back(container: Any, former: Container) -> None:
    """Have a container hold again what it held."""
    if isinstance(former, dict):
        # Which keeps an order of its own beside the dict's.
        kind: Any = OrderedDict if issubclass(type(container), OrderedDict) else dict
        is_in_order = [*kind.keys(container)] == [*former]
        for key in [*dict.keys(container)]:
            if key not in former:
                kind.pop(container, key, None)
        for key, value in former.items():
            if not is_in_order:  # what is put in again is the last
                kind.pop(container, key, None)
            if dict.get(container, key, container) is not value:
                kind.__setitem__(container, key, value)
    elif [*map(id, _inside(container))] == [*map(id, former)]:
        return
    elif issubclass(type(container), list):
        list.__setitem__(container, slice(None), former)
    else:
        container.clear()
        (container.extend if issubclass(type(container), collections.deque) else container.update)(former)


def _replace(present: MutableMapping[Any, Any], former: Mapping[Any, Any]) -> None:
    if [*present] != [*former]:  # the order counts; as it is, other threads never see an empty module
        present.clear()
    present.update(former)


def clear_caches(tensors: Sequence[Tensor]) -> None:
    """Clear the caches of functions that keep a tensor, as it is or within something."""
    wanted = {*map(id, tensors)}
    if not wanted:
        return
    objects = gc.get_objects()  # of which a large process holds millions: so no line of Python for each
    are_caches = map(operator.is_, map(type, objects), itertools.repeat(functools._lru_cache_wrapper))
    for cache in itertools.compress(objects, are_caches):
        if cache.cache_info().currsize and _has(cache, wanted):
            cache.cache_clear()


def _has(cache: object, wanted: Set[int]) -> bool:
    """Return whether a cache keeps something of these addresses, as it is or within something."""
    things: Sequence[object] = [cache]
    for _ in range(_STEPS):
        things = gc.get_referents(*things)
        if not wanted.isdisjoint(map(id, things)):
            return True
        things = [each for each in things if type(each) in (dict, list, tuple)]
    return False


def forget(alive: Callable[[], Sequence[Tensor]]) -> None:
    """Clear functions' caches that keep tensors which nobody may keep, all that is in them, or warn.

    Args:
        alive: returns these tensors.
    """
    # From what is found at once, as a young cycle, to what takes a look through all that the process holds.
    for look in (lambda: gc.collect(1), lambda: clear_caches(alive()), gc.collect):
        if not alive():
            return
        look()
    left = tuple(alive())  # by which they are asked for below, and found, too, from Python 3.13 on
    keepers = [each for each in gc.get_referrers(*left) if each is not left]  # some, PyTorch has lost
    kept = {*map(id, gc.get_referents(*keepers))}
    count = sum(id(each) in kept for each in left)
    if count:
        warn_user(
            f"While mucudnn examined the model, tensors without values ({count} of them) were stored outside "
            "of its attributes, hooks, classes and source. Whatever computes with them will fail, or have no "
            "values either: clear what was stored before the model is called.",
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
