"""Executing a plan of cuDNN on given addresses: nothing is allocated, and no device is waited for."""

import ctypes
import functools
import sys
import threading
from collections.abc import Callable

from mucudnn.backends.cudnn.constants import Attribute, AttributeType, Kind
from mucudnn.backends.cudnn.descriptors import Descriptor
from mucudnn.backends.cudnn.graph import UID_W, UID_X, UID_Y
from mucudnn.backends.cudnn.library import Library
from mucudnn.errors import BackendError

WHAT = "Launching a convolution"

_MOST_PACKS = 4096
"""Variant packs that are kept: 4.5 KiB of the host's memory each."""


class Pack:
    """Owns a variant pack of cuDNN, which is destroyed with it.

    Attributes:
        pointer: cuDNN's address of it.
    """

    __slots__ = ("_library", "pointer")

    def __init__(self, library: Library) -> None:
        self.pointer = 0
        self._library = library
        slot = ctypes.c_void_p()
        library.check(library.create_descriptor(_PACK, ctypes.addressof(slot)), WHAT)
        self.pointer = slot.value or 0

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.pointer and not is_finalizing():
            self._library.destroy_descriptor(self.pointer)


class Packs:
    """The variant packs of the addresses last used, for whatever plans.

    One that is finalised can be neither set nor finalised again, so other addresses need another one; to
    execute does not change it. Source: NVIDIA/cudnn-frontend, time_sorted_plan, executes one a hundred times.
    A model in training comes back to the same addresses at every step.

    Attributes:
        of: returns the pack of the addresses of x, w, y and the workspace, kept or made.
    """

    def __init__(self, library: Library, most: int = _MOST_PACKS) -> None:
        self._library = library
        self._uids = (ctypes.c_int64 * 3)(UID_X, UID_W, UID_Y)
        self.of: Callable[[int, int, int, int], Pack] = functools.lru_cache(most)(self._made)

    def _made(self, x: int, w: int, y: int, workspace: int) -> Pack:
        library, pack = self._library, Pack(self._library)
        pointers, place = (ctypes.c_void_p * 3)(x, w, y), ctypes.c_void_p(workspace)
        pointer, addressof = pack.pointer, ctypes.addressof
        status = (
            library.set_attribute(pointer, _UIDS, _INT64, 3, addressof(self._uids))
            or library.set_attribute(pointer, _POINTERS, _ADDRESS, 3, addressof(pointers))
            or library.set_attribute(pointer, _WORKSPACE, _ADDRESS, 1, addressof(place))
            or library.finalize(pointer)
        )
        library.check(status, WHAT)
        return pack


class Launch:
    """One execution plan, on whatever addresses.

    Not every engine's plan may be used by two threads at once, and ctypes lets other threads run in each
    call: a lock is held for the execution.

    Attributes:
        workspace_bytes: what the plan itself declares.

    Args:
        library: cuDNN.
        plan: a finalised execution plan.
        alignment_bytes: what every operand's address must be a multiple of; cuDNN takes others without a
            word.
        packs: of this library.
    """

    def __init__(self, library: Library, plan: Descriptor, alignment_bytes: int, packs: Packs) -> None:
        self.workspace_bytes = plan.int_value(Attribute.PLAN_WORKSPACE)
        self._library = library
        self._plan = plan
        self._alignment_mask = alignment_bytes - 1
        self._lock = threading.RLock()  # a signal handler may launch what it interrupts
        self._pack_of, self._execute = packs.of, library.execute

    def __call__(self, handle: int | None, x: int, w: int, y: int, workspace: int) -> None:
        """Put one execution on the handle's stream.

        Args:
            handle: of the calling thread.
            x: address of the part's x or dx.
            w: address of w or dw.
            y: address of the part's y or dy.
            workspace: address of at least the bytes that the plan declares; 0 for none.

        Raises:
            BackendError: an address is not aligned.
            CudnnError: cuDNN refuses the launch.
        """
        if (x | w | y) & self._alignment_mask:
            raise BackendError(
                f"Operands must lie at multiples of {self._alignment_mask + 1} bytes, "
                f"but got the addresses {x:#x}, {w:#x} and {y:#x}."
            )
        pack = self._pack_of(x, w, y, workspace)
        with self._lock:
            status = self._execute(handle, self._plan.pointer, pack.pointer)
        if status:
            self._library.check(status, WHAT)


# Plain ints: an enumeration's members take longer to pass.
_PACK = int(Kind.VARIANT_PACK)
_UIDS = int(Attribute.PACK_IDS)
_POINTERS = int(Attribute.PACK_POINTERS)
_WORKSPACE = int(Attribute.PACK_WORKSPACE)
_INT64 = int(AttributeType.INT64)
_ADDRESS = int(AttributeType.VOID_POINTER)
