"""The values of a plan as JSON and back. Reading is strict: what has another type or form is refused."""

import dataclasses
import functools
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from mucudnn.errors import PlanFormatError
from mucudnn.intervals import Estimate
from mucudnn.profile import Candidate

LARGEST_NUMBER = 1e100
"""No number of a plan is larger, so that sums and products of a few stay finite."""
_LEAST_SECONDS = 1e-100
"""No time that was measured is less, unless it is 0, so that ratios stay finite."""

_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    type(None): "null",
}
"""What the types of JSON values are called in messages."""


_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""What a terminal obeys, all but tabs and ends of lines, and half of a character, which nothing can draw."""

_UNUSUAL = re.compile(r"\\[bfru]|[\x7f-\x9f\ud800-\udfff]")
"""How JSON writes that, among others, or it as it is: few plans have one."""

_SCALARS = frozenset({str, bool, int, float, type(None)})


def parse(text: str) -> object:
    """Return the JSON value that `text` describes; all its numbers are finite and of moderate size.

    Raises:
        PlanFormatError: the text is no JSON, is nested too deeply, or has a number or text that no plan has.
    """
    try:
        value = json.loads(text, parse_int=_whole, parse_float=_real, parse_constant=_real)
        unprintable = _UNPRINTABLE.findall("".join(_texts(value))) if _UNUSUAL.search(text) else []
        if unprintable:
            raise PlanFormatError(f"A plan's texts must be printable, but one has {unprintable[0]!r}.")
        return value
    except RecursionError:
        raise PlanFormatError("A plan must be a JSON text, but this one is nested too deeply.") from None
    except ValueError as error:
        raise PlanFormatError(f"A plan must be a JSON text, but this one is damaged: {error}.") from error


def printable(text: str) -> str:
    """Return `text`, such as what a library has said, with ? for all that no plan's text may have."""
    return _UNPRINTABLE.sub("?", text)


def _texts(value: object) -> Iterator[str]:
    """Yield all texts of a JSON value, the names of fields among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield name
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def _whole(text: str) -> int:
    _real(text)  # before int, which refuses thousands of digits with advice that is of no use here
    return int(text)


def _real(text: str) -> float:
    number = float(text)
    if not abs(number) <= LARGEST_NUMBER:
        shown = text if len(text) <= 20 else f"{text[:20]}..."
        raise PlanFormatError(
            f"A plan's numbers must be at most {LARGEST_NUMBER:g} in size, but got {shown}."
        )
    return number


def encode(value: Any) -> Any:
    """Return a value of a plan as a JSON value: dataclasses as objects, candidates and estimates as lists."""
    if type(value) in _SCALARS:  # asked first, for nearly all values are of these types
        return value
    if isinstance(value, Estimate):
        ends = [end if math.isfinite(end) else None for end in (value.low, value.high)]
        return [value.median, *ends, value.samples]
    if isinstance(value, Candidate):
        numbers = [getattr(value, name) for name in _fields(Candidate)]
        return numbers[:-1] if value.is_deterministic else numbers  # as in files before there was a last one
    if dataclasses.is_dataclass(value):
        kind: type = type(value)
        defaults = _optional(kind)
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {
            name: encode(each) for name, each in fields if not (name in defaults and each == defaults[name])
        }
    if isinstance(value, Mapping):
        return {name: encode(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return [encode(each) for each in value]
    return value


def decode(kind: Any, value: object, name: str = "it") -> Any:
    """Return the value of type `kind` of which `encode` gave `value`.

    Args:
        kind: a dataclass, an enumeration, a tuple, a mapping of texts, `str`, `int`, `float`, `bool`, or one
            of these or None. Numbers must not be negative: no plan has such.
        value: a JSON value.
        name: what the value is called in messages.

    Raises:
        ValueError: the value, or one in it, has another type or is refused by its class.
    """
    if type(kind) is type and kind in _NAMES:  # asked first, for nearly all values are of these types
        return _as(kind, value, name)
    arguments = get_args(kind)
    if isinstance(kind, UnionType):
        return None if value is None else decode(arguments[0], value, name)
    if get_origin(kind) is tuple:
        return _decode_tuple(arguments, value, name)
    if get_origin(kind) is Mapping:
        facts = _as(dict, value, name)
        return {fact: decode(arguments[1], each, f"{name}.{fact}") for fact, each in facts.items()}
    if kind is Estimate:
        return _decode_estimate(value, name)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, name)
    return _decode_choice(kind, value, name)


def _as(kind: type, value: Any, name: str) -> Any:
    """Return `value`, if it has the JSON type `kind` and is not negative."""
    kinds = (int, float) if kind is float else (kind,)
    if type(value) not in kinds:  # not isinstance, for which true is a whole number
        raise ValueError(f"{name} must be {_NAMES[kind]}, but got {_NAMES[type(value)]}")
    if int in kinds and value < 0:
        raise ValueError(f"{name} must not be negative, but got {value}")
    return value


def _decode_choice(kind: type[StrEnum], value: object, name: str) -> StrEnum:
    text = _as(str, value, name)
    if text not in list(kind):
        raise ValueError(f"{name} must be one of {', '.join(kind)}, but got '{text}'")
    return kind(text)


def _decode_tuple(kinds: tuple[Any, ...], value: object, name: str) -> tuple[Any, ...]:
    items = _as(list, value, name)
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(items)
    if len(items) != len(kinds):
        raise ValueError(f"{name} must have {len(kinds)} values, but got {len(items)}")
    return tuple(
        decode(kind, item, f"{name}[{index}]")
        for index, (kind, item) in enumerate(zip(kinds, items, strict=True))
    )


def _decode_estimate(value: object, name: str) -> Estimate:
    middle, low, high, samples = _decode_tuple((float, float | None, float | None, int), value, name)
    if 0 < middle < _LEAST_SECONDS:
        raise ValueError(f"{name} must be 0 or at least {_LEAST_SECONDS:g} seconds, but got {middle}")
    if middle > 0 and high is not None and high <= 0:  # reports divide by it
        raise ValueError(f"{name} must have an upper end above 0, as its median is {middle}, but got {high}")
    return Estimate(middle, -math.inf if low is None else low, math.inf if high is None else high, samples)


def _decode_dataclass(kind: Any, value: object, name: str) -> Any:
    kinds = _fields(kind)
    if kind is Candidate:
        given = _decode_candidate(kinds, value, name)
    else:
        items = _as(dict, value, name)
        if not kinds.keys() - _optional(kind).keys() <= items.keys() <= kinds.keys():
            raise ValueError(f"{name} must have {', '.join(kinds)}, but got {', '.join(items) or 'nothing'}")
        given = {
            field: item if _is_just(kinds[field], item) else decode(kinds[field], item, f"{name}.{field}")
            for field, item in items.items()
        }
    try:
        return kind(**given)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _decode_candidate(kinds: Mapping[str, Any], value: object, name: str) -> dict[str, Any]:
    """Return the fields of a candidate, the last of which may be missing."""
    number = max(len(_as(list, value, name)), len(kinds) - 1)
    present = dict(itertools.islice(kinds.items(), number))
    return dict(zip(present, _decode_tuple(tuple(present.values()), value, name), strict=True))


def _is_just(kind: Any, value: Any) -> bool:
    """Return whether it is plain that `decode` would return the value as it is, as it mostly is."""
    return type(value) is kind and kind in _SCALARS and (kind in (str, bool) or value >= 0)


@functools.cache
def _optional(kind: type) -> dict[str, Any]:
    """Return the defaults of a dataclass's fields that a file may lack, by name."""
    return {
        field.name: field.default for field in dataclasses.fields(kind) if "is_optional" in field.metadata
    }


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields, by name and in order."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
