"""Executing a plan of cuDNN on given addresses: a device allocates nothing, and is not waited for."""

import functools
import threading
from collections.abc import Callable

from mucudnn.backends.cudnn.constants import Attribute, Kind
from mucudnn.backends.cudnn.descriptors import Descriptor
from mucudnn.backends.cudnn.graph import UID_W, UID_X, UID_Y
from mucudnn.backends.cudnn.library import Library
from mucudnn.errors import BackendError

WHAT = "Launching a convolution"

_MOST_PACKS = 8192
"""Variant packs that are kept: 4.5 KiB of the host's memory each. A step that launches on more sets of
addresses finds none of them again."""


class Packs:
    """The variant packs of the addresses last used, for whatever plans.

    One that is finalised can be neither set nor finalised again, so other addresses need another one; to
    execute does not change it. Source: NVIDIA/cudnn-frontend, time_sorted_plan, executes one a hundred times.
    A model in training mostly comes back to the same addresses at every step.

    Attributes:
        of: returns the pack of the addresses of x, w, y and the workspace, kept or made; it is destroyed when
            neither this nor a caller holds it.
    """

    def __init__(self, library: Library, most: int = _MOST_PACKS) -> None:
        self._library = library
        self.of: Callable[[int, int, int, int], Descriptor] = functools.lru_cache(most)(self._made)

    def _made(self, x: int, w: int, y: int, workspace: int) -> Descriptor:
        return (
            Descriptor(self._library, Kind.VARIANT_PACK)
            .set_ints(Attribute.PACK_IDS, UID_X, UID_W, UID_Y)
            .set_addresses(Attribute.PACK_POINTERS, x, w, y)
            .set_addresses(Attribute.PACK_WORKSPACE, workspace)
            .finalized()
        )


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
