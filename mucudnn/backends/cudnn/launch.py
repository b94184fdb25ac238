"""Executing a plan of cuDNN on given addresses: a device allocates nothing, and is not waited for."""

import functools
import itertools
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

PackOf = Callable[[int, int, int, int], Descriptor]
"""Returns the variant pack of the addresses of x, w, y and the workspace."""


class Packs:
    """The variant packs last used, each of one plan and one set of addresses.

    One that is finalised can be neither set nor finalised again, so other addresses need another one; and so
    do other plans: executing one leaves alpha and beta of its graph in the pack. On an H200 packs that other
    plans had been executed with made engines 0 and 28 of cuDNN 9.19 add to what was there, where beta was 0,
    and engine 70 refuse its own alpha and beta. Source: NVIDIA/cudnn-frontend, time_sorted_plan, executes one
    plan with one pack a hundred times. A model in training mostly comes back to the same addresses at every
    step.
    """

    def __init__(self, library: Library, most: int = _MOST_PACKS) -> None:
        self._library = library
        self._plans = itertools.count()
        self._of = functools.lru_cache(most)(self._made)

    def of_a_plan(self) -> PackOf:
        """Return what gives the packs of a plan, kept or made.

        They are destroyed when as many newer ones are kept, also after the plan itself.
        """
        return functools.partial(self._of, next(self._plans))

    def _made(self, plan: int, x: int, w: int, y: int, workspace: int) -> Descriptor:  # noqa: ARG002  # a key
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
        before_first: is called as long as nothing has been executed, and raises where that must not happen
            now: what cuDNN does the first time is not known to be fit for a graph.
    """

    def __init__(
        self,
        library: Library,
        plan: Descriptor,
        alignment_bytes: int,
        packs: Packs,
        before_first: Callable[[], None] = lambda: None,
    ) -> None:
        self.workspace_bytes = plan.int_value(Attribute.PLAN_WORKSPACE)
        self._library = library
        self._plan = plan
        self._alignment_mask = alignment_bytes - 1
        # A signal handler may launch what it interrupts. A ForkSafeLock would add 45 ns to the 1.6 us that
        # Python takes for a launch, for nothing: CUDA does not work in a forked child.
        self._lock = threading.RLock()
        self._pack_of, self._execute = packs.of_a_plan(), library.execute
        self._before_first, self._has_run = before_first, False

    def __call__(self, handle: int | None, x: int, w: int, y: int, workspace: int) -> None:
        """Put one execution on the handle's stream.

        Args:
            handle: of the calling thread.
            x: address of the part's x or dx.
            w: address of w or dw.
            y: address of the part's y or dy.
            workspace: address of at least the bytes that the plan declares; 0 for none.

        Raises:
            BackendError: an address is not aligned, or this is the first time, and must not happen now.
            CudnnError: cuDNN refuses the launch.
        """
        if not self._has_run:
            self._before_first()
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
        self._has_run = True
