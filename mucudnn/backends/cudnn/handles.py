"""cuDNN's handles: one for each thread and device, on whatever stream the thread works."""

import ctypes
import threading
from collections.abc import Callable

from mucudnn.backends.cudnn.library import Library

CurrentStream = Callable[[], int]
"""The address of the stream on which the calling thread puts its work now; 0 is CUDA's default stream."""


class Handle:
    """cuDNN's state of one thread on one device; the device must be current when it is made."""

    def __init__(self, library: Library) -> None:
        self._library = library
        slot = ctypes.c_void_p()
        library.check(library.create_handle(ctypes.addressof(slot)), "Creating a handle")
        self.pointer = slot.value
        self._stream: int | None = None  # whatever it is at first, it is told

    def on(self, stream: int) -> int | None:
        """Put what is executed next on `stream`; return cuDNN's address of the handle."""
        if stream != self._stream:
            self._library.check(self._library.set_stream(self.pointer, stream), "Setting a handle's stream")
            self._stream = stream
        return self.pointer


class _Slot(threading.local):
    """A thread's handle; none before it is needed."""

    handle: Handle | None = None


class Handles:
    """The handles of one device.

    None is ever destroyed: that would break a capture that goes on in any thread (seen where the garbage
    collector chose the moment).

    Args:
        library: cuDNN.
        current_stream: of the calling thread on that device.
        make: makes a handle while the device is current.
    """

    def __init__(
        self, library: Library, current_stream: CurrentStream, make: Callable[[Library], Handle] = Handle
    ) -> None:
        self._library = library
        self._current_stream = current_stream
        self._make = make
        self._slot = _Slot()

    def here(self) -> int | None:
        """Return the calling thread's handle, on the thread's present stream."""
        handle = self._slot.handle
        if handle is None:
            handle = self._slot.handle = self._make(self._library)
        return handle.on(self._current_stream())
