"""Whether an object that a user gave will do for what it is to be, and how messages call it."""

import inspect
from collections.abc import Callable


def offers(value: object, protocol: type) -> bool:
    """Return whether `value` is an instance with all methods of `protocol`."""
    return not isinstance(value, type) and not lacking(value, protocol)


def lacking(value: object, protocol: type) -> list[str]:
    """Return the methods of `protocol` that `value` has not."""
    names = (name for name in vars(protocol) if not name.startswith("_"))
    return [name for name in names if not callable(getattr(value, name, None))]


def late_function(function: object) -> str | None:
    """Return what `function`, or an object that is called, is if it computes once its call has returned."""
    kinds: dict[str, Callable[[object], bool]] = {
        "generator function": inspect.isgeneratorfunction,
        "coroutine function": inspect.iscoroutinefunction,
        "asynchronous generator function": inspect.isasyncgenfunction,
    }
    called = function, getattr(type(function), "__call__", None)  # noqa: B004  # what runs, not whether
    found = next((kind for kind, is_one in kinds.items() if any(map(is_one, called))), None)
    return None if found is None else f"the {found} {name_of(function)!r}"


def name_of(function: object) -> str:
    """Return how a function is named in messages."""
    return getattr(function, "__qualname__", repr(function))


def described(value: object) -> str:
    """Return what `value` is, which may be the class instead of one of its instances."""
    return f"the class {value.__name__}, not an instance" if isinstance(value, type) else repr(value)
