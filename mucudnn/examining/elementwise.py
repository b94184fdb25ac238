"""The strides that PyTorch gives to what it computes element by element.

Where lengths of 1 leave them open stand-ins have others, by a rule of their own. This is PyTorch's: see its
aten/src/ATen/TensorIterator.cpp, which works out a result's strides from those of the operands.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_ATEN = torch.ops.aten

Strided = tuple[tuple[int, ...], tuple[int, ...]]
"""Lengths and strides of an operand."""

_KEEPING = frozenset(
    {
        _ATEN._prelu_kernel.default,
        _ATEN.clone.default,
        _ATEN.empty_like.default,
        _ATEN.flip.default,
        _ATEN.full_like.default,
        _ATEN.hardtanh.default,
        _ATEN.nan_to_num.default,
        _ATEN.ones_like.default,
        _ATEN.rand_like.default,
        _ATEN.randn_like.default,
        _ATEN.zeros_like.default,
    }
)
"""Functions whose results are made like their input, before anything is computed."""

_UNMARKED = frozenset({_ATEN.floor_divide.default, _ATEN.hardswish.default, _ATEN.leaky_relu.default})
"""Functions that compute element by element, though not all versions of PyTorch mark them so."""

_MADE_TENSORS = ("self", "other")
"""Names of numbers of which functions like `add.Scalar` make tensors without axes."""

_SCALAR: Strided = ((), ())

_IMAGES = 4
"""Axes of what may be in channels last, for that rule alone."""


def elementwise_strides(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], shape: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the strides of the result of a function that is called so, or None if it is no such one.

    Few compute element by element, but make their results by other rules, as `masked_fill`: not for these.

    Args:
        func: an operator of PyTorch's, as a dispatch mode sees it.
        args: its arguments by position, all operands among them.
        kwargs: those by name.
        shape: of its result.
    """
    if any(isinstance(each, Tensor) and each.layout is not torch.strided for each in args):
        return None
    if func in _KEEPING:
        if kwargs.get("memory_format") not in (None, torch.preserve_format):
            return None
        kept = _operand(args[0])
        return kept[1] if _is_dense(kept, _outermost_first(kept)) else _by_order(shape, [kept])
    operands = _operands(func, args) if _is_elementwise(func) else []
    return (_by_looks(shape, operands) or _by_order(shape, operands)) if operands else None


@functools.cache
def _is_elementwise(func: Any) -> bool:
    schema = func._schema
    makes_one = len(schema.returns) == 1 and not schema.is_mutable and schema.returns[0].alias_info is None
    is_marked = func.namespace == "aten" and torch.Tag.pointwise in func.tags
    return makes_one and (is_marked or func in _UNMARKED)


def _operands(func: Any, args: Sequence[Any]) -> list[Strided]:
    """Return the operands: tensors, and numbers that stand for such."""
    found = []
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if isinstance(value, Tensor):
            found.append(_operand(value))
        elif isinstance(argument.type, torch.TensorType):
            if value is not None:
                found.append(_SCALAR)
        elif func._overloadname.startswith("Scalar") and argument.name in _MADE_TENSORS:
            found.append(_SCALAR)
    return found


def _operand(tensor: Tensor) -> Strided:
    return tuple(tensor.shape), tensor.stride()


def _by_looks(shape: tuple[int, ...], operands: Sequence[Strided]) -> tuple[int, ...] | None:
    """Return the strides of operands that are all contiguous, or all in channels last, or all alike."""
    if any(lengths != shape for lengths, _ in operands):
        return None
    if all(_is_dense(one, range(len(shape))) for one in operands):
        return _dense(shape, range(len(shape)))
    if len(shape) == _IMAGES and all(_is_dense(one, (0, 2, 3, 1)) for one in operands):
        return _dense(shape, (0, 2, 3, 1))
    first, *others = operands
    is_alike = all(other == first for other in others)
    return first[1] if is_alike and _is_dense(first, _outermost_first(first)) else None


def _by_order(shape: tuple[int, ...], operands: Sequence[Strided]) -> tuple[int, ...]:
    """Return the strides of a dense result, whose axes have the order of those of the operands."""
    spread = [_spread(shape, one) for one in operands]
    order = list(range(len(shape)))[::-1]  # from the innermost axis
    for start in range(1, len(order)):
        place = start
        for before in range(start - 1, -1, -1):
            comparison = _compared(shape, spread, order[before], order[place])
            if comparison < 0:
                break
            if comparison > 0:
                order[before], order[place] = order[place], order[before]
                place = before
    return _dense(shape, order[::-1])


def _spread(shape: tuple[int, ...], operand: Strided) -> tuple[int, ...]:
    """Return the strides of an operand along the axes of the result; 0 where it is repeated."""
    lengths, strides = operand
    missing = len(shape) - len(lengths)
    of_its_own = (
        0 if length == 1 != whole else stride
        for length, stride, whole in zip(lengths, strides, shape[missing:], strict=True)
    )
    return (0,) * missing + tuple(of_its_own)


def _compared(shape: tuple[int, ...], spread: Sequence[tuple[int, ...]], inner: int, outer: int) -> int:
    """Return more than 0 if two axes must change places, less if they must not, and 0 if either will do."""
    for strides in spread:
        if strides[inner] == 0 or strides[outer] == 0:
            continue
        if strides[inner] != strides[outer]:
            return 1 if strides[inner] > strides[outer] else -1
        if shape[inner] > shape[outer]:
            return 1
    return 0


def _outermost_first(operand: Strided) -> list[int]:
    """Return the axes from the outermost, but those of length 1 last."""
    lengths, strides = operand
    return sorted(range(len(lengths)), key=lambda axis: -strides[axis] if lengths[axis] > 1 else 1)


def _is_dense(operand: Strided, order: Sequence[int]) -> bool:
    """Return whether elements lie one after another, the last axis of `order` innermost."""
    lengths, strides = operand
    pairs = zip(lengths, strides, _dense(lengths, order), strict=True)
    return all(length == 1 or stride == dense for length, stride, dense in pairs)


def _dense(lengths: tuple[int, ...], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor whose elements lie so."""
    found = [0] * len(lengths)
    stride = 1
    for axis in reversed(order):
        found[axis] = stride
        stride *= max(lengths[axis], 1)
    return tuple(found)
