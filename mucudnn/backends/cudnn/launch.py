"""Executing a plan of cuDNN on given addresses: nothing is allocated, and no device is waited for."""

import ctypes
import threading

from mucudnn.backends.cudnn.constants import Attribute, AttributeType, Kind
from mucudnn.backends.cudnn.descriptors import Descriptor
from mucudnn.backends.cudnn.graph import UID_W, UID_X, UID_Y
from mucudnn.backends.cudnn.library import Library
from mucudnn.errors import BackendError

WHAT = "Launching a convolution"


class Launch:
    """One execution plan, with the arrays that every launch of it fills anew.

    A variant pack that is finalised can be neither set nor finalised again, so each launch makes one. Not
    every engine's plan may be used by two threads at once, and ctypes lets other threads run in each call:
    a lock is held from the first address to the end of the execution. A signal handler that comes in between,
    which gets the lock of its own thread, launches with arrays of its own.

    Attributes:
        workspace_bytes: what the plan itself declares.

    Args:
        library: cuDNN.
        plan: a finalised execution plan.
        alignment_bytes: what every operand's address must be a multiple of; cuDNN takes others without a
            word.
    """

    def __init__(self, library: Library, plan: Descriptor, alignment_bytes: int) -> None:
        self.workspace_bytes = plan.int_value(Attribute.PLAN_WORKSPACE)
        self._library = library
        self._plan = plan
        self._alignment_mask = alignment_bytes - 1
        self._lock = threading.RLock()
        self._is_taken = False
        self._pack = ctypes.c_void_p()
        self._uids = (ctypes.c_int64 * 3)(UID_X, UID_W, UID_Y)
        self._pointers = (ctypes.c_void_p * 3)()
        self._workspace = (ctypes.c_void_p * 1)()
        arrays = (self._pack, self._uids, self._pointers, self._workspace)
        self._addresses = tuple(ctypes.addressof(array) for array in arrays)

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
        with self._lock:
            if self._is_taken:
                Launch(self._library, self._plan, self._alignment_mask + 1)(handle, x, w, y, workspace)
                return
            self._is_taken = True
            try:
                pointers = self._pointers
                pointers[0], pointers[1], pointers[2] = x, w, y
                self._workspace[0] = workspace
                status = self._execute(handle)
            finally:
                self._is_taken = False
        if status:
            self._library.check(status, WHAT)

    def _execute(self, handle: int | None) -> int:
        """Return the first status that is none of success, and destroy the pack in any case."""
        library = self._library
        slot, uids, pointers, workspace = self._addresses
        status = library.create_descriptor(_PACK, slot)
        if status:
            return status
        pack = self._pack.value or 0
        try:
            return (
                library.set_attribute(pack, _UIDS, _INT64, 3, uids)
                or library.set_attribute(pack, _POINTERS, _ADDRESS, 3, pointers)
                or library.set_attribute(pack, _WORKSPACE, _ADDRESS, 1, workspace)
                or library.finalize(pack)
                or library.execute(handle, self._plan.pointer, pack)
            )
        finally:
            library.destroy_descriptor(pack)


# Plain ints: an enumeration's members take longer to pass.
_PACK = int(Kind.VARIANT_PACK)
_UIDS = int(Attribute.PACK_IDS)
_POINTERS = int(Attribute.PACK_POINTERS)
_WORKSPACE = int(Attribute.PACK_WORKSPACE)
_INT64 = int(AttributeType.INT64)
_ADDRESS = int(AttributeType.VOID_POINTER)
