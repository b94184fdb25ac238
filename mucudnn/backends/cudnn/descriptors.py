"""One backend descriptor of cuDNN: created, set, finalised, asked, and destroyed with its owner."""

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any, Self

from mucudnn.backends.cudnn.constants import Attribute, AttributeType, Kind
from mucudnn.backends.cudnn.library import Library

_MOST_NOTES = 32


class Descriptor:
    """Owns one backend descriptor, which is destroyed with it, and keeps alive those that it refers to.

    But a plan is destroyed when the next one is made, which no capture of a CUDA graph allows: Python's
    garbage collector may find one at any time, and the driver, asked to free what it holds, would refuse that
    while a graph is captured, and the capture with it.

    The setters return the descriptor, so that they can be chained. Every method raises CudnnError where
    cuDNN refuses the call.

    Attributes:
        pointer: cuDNN's address of it.
    """

    __slots__ = ("_children", "_kind", "_library", "pointer")

    def __init__(self, library: Library, kind: Kind) -> None:
        self.pointer = 0
        if kind is Kind.EXECUTION_PLAN:
            library.destroy_retired()
        self._library = library
        self._kind = kind
        self._children: list[Descriptor] = []
        slot = ctypes.c_void_p()
        library.check(library.create_descriptor(kind, ctypes.addressof(slot)), f"Creating {_text(kind)}")
        self.pointer = slot.value or 0

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # While a process ends, its memory goes anyway, and plans of cuDNN may fault then (pytorch#169153).
        if not self.pointer or is_finalizing():
            return
        if self._kind is Kind.EXECUTION_PLAN:
            self._library.retired.append((self.pointer, self._children))
        else:
            self._library.destroy_descriptor(self.pointer)

    def finalized(self) -> Self:
        """Make the descriptor usable by others, and return it; it cannot be set any more."""
        status = self._library.finalize(self.pointer)
        self._library.check(status, f"Finalising {_text(self._kind)}")
        return self

    def set_ints(self, attribute: Attribute, *values: int) -> Self:
        """Set int64 values: dimensions, strides, numbers, ids."""
        return self._set(attribute, AttributeType.INT64, (ctypes.c_int64 * len(values))(*values))

    def set_int32(self, attribute: Attribute, value: int) -> Self:
        """Set one int32 value."""
        return self._set(attribute, AttributeType.INT32, (ctypes.c_int32 * 1)(value))

    def set_enum(self, attribute: Attribute, attribute_type: AttributeType, value: int) -> Self:
        """Set one value of an enumeration, a C int."""
        return self._set(attribute, attribute_type, (ctypes.c_int * 1)(value))

    def set_float(self, attribute: Attribute, value: float) -> Self:
        """Set one value of single precision."""
        return self._set(attribute, AttributeType.FLOAT, (ctypes.c_float * 1)(value))

    def set_double(self, attribute: Attribute, value: float) -> Self:
        """Set one value of double precision."""
        return self._set(attribute, AttributeType.DOUBLE, (ctypes.c_double * 1)(value))

    def set_text(self, attribute: Attribute, text: str) -> Self:
        """Set a text, as UTF-8."""
        encoded = text.encode()
        return self._set(attribute, AttributeType.CHAR, ctypes.create_string_buffer(encoded, len(encoded)))

    def set_handle(self, attribute: Attribute, handle: int) -> Self:
        """Set one of cuDNN's handles, by its address."""
        return self._set(attribute, AttributeType.HANDLE, (ctypes.c_void_p * 1)(handle))

    def set_addresses(self, attribute: Attribute, *addresses: int) -> Self:
        """Set addresses in the device's memory; 0 for none."""
        return self._set(
            attribute, AttributeType.VOID_POINTER, (ctypes.c_void_p * len(addresses))(*addresses)
        )

    def set_descriptors(self, attribute: Attribute, *children: "Descriptor") -> Self:
        """Refer to finalised descriptors, which live as long as this one."""
        self._children += children
        pointers = (ctypes.c_void_p * len(children))(*(child.pointer for child in children))
        return self._set(attribute, AttributeType.DESCRIPTOR, pointers)

    def int_value(self, attribute: Attribute) -> int:
        """Return one int64 value."""
        values = (ctypes.c_int64 * 1)()
        self._get(attribute, AttributeType.INT64, 1, values)
        return int(values[0])

    def enum_values(
        self, attribute: Attribute, attribute_type: AttributeType, most: int = _MOST_NOTES
    ) -> tuple[int, ...]:
        """Return the values of an enumeration that the attribute holds, in cuDNN's order.

        Args:
            attribute: one that holds values of an enumeration.
            attribute_type: which enumeration.
            most: how many there may be; exactly 1 for a scalar.
        """
        values = (ctypes.c_int * most)()
        count = self._get(attribute, attribute_type, most, values)
        return tuple(values[: min(count, most)])

    def text(self, attribute: Attribute) -> str:
        """Return a text, from UTF-8."""
        length = self._get(attribute, AttributeType.CHAR, 0, None)
        values = (ctypes.c_char * length)()
        self._get(attribute, AttributeType.CHAR, length, values)
        return values.value.decode()

    def count(self, attribute: Attribute) -> int:
        """Return how many descriptors the attribute holds."""
        return self._get(attribute, AttributeType.DESCRIPTOR, 0, None)

    def filled(self, attribute: Attribute, empty: Sequence["Descriptor"]) -> tuple["Descriptor", ...]:
        """Return those of the empty descriptors that cuDNN has filled from the attribute, in its order.

        Args:
            attribute: one that holds descriptors.
            empty: unfinalised descriptors of the attribute's kind, enough of them.
        """
        pointers = (ctypes.c_void_p * len(empty))(*(descriptor.pointer for descriptor in empty))
        count = self._get(attribute, AttributeType.DESCRIPTOR, len(empty), pointers)
        return tuple(empty[: min(count, len(empty))])

    def _set(self, attribute: Attribute, attribute_type: AttributeType, values: "ctypes.Array[Any]") -> Self:
        status = self._library.set_attribute(
            self.pointer, attribute, attribute_type, len(values), ctypes.addressof(values)
        )
        if status:
            self._library.check(status, f"Setting {_text(attribute)}")
        return self

    def _get(
        self,
        attribute: Attribute,
        attribute_type: AttributeType,
        requested: int,
        values: "ctypes.Array[Any] | None",
    ) -> int:
        """Fill `values` and return how many there are; a scalar must be requested with a count of 1."""
        count = ctypes.c_int64()
        address = None if values is None else ctypes.addressof(values)
        status = self._library.get_attribute(
            self.pointer, attribute, attribute_type, requested, ctypes.addressof(count), address
        )
        if status:
            self._library.check(status, f"Getting {_text(attribute)}")
        return count.value


def _text(member: Kind | Attribute) -> str:
    words = member.name.lower().replace("_", " ")
    return f"a descriptor of kind {words}" if isinstance(member, Kind) else f"attribute {words} ({member})"
