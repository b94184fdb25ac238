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


class _Loan:
    """A thread's hold on a handle, which goes back when the thread ends."""

    def __init__(self, handle: Handle, idle: list[Handle]) -> None:
        self.handle = handle
        self._idle = idle

    def __del__(self) -> None:
        self._idle.append(self.handle)


class _Here(threading.local):
    """What the calling thread holds; nothing before it is needed."""

    loan: _Loan | None = None


class Handles:
    """The handles of one device.

    None is ever destroyed: that would break a capture that goes on in any thread (seen where the garbage
    collector chose the moment). Those of threads that have ended serve the next ones.

    Args:
        library: cuDNN.
        current_stream: of the calling thread on that device.
        make: makes a handle while the device is current.
    """

    def __init__(
        self, library: Library, current_stream: CurrentStream, make: Callable[[Library], Handle]
    ) -> None:
        self._library = library
        self._current_stream = current_stream
        self._make = make
        self._here = _Here()
        self._idle: list[Handle] = []

    def here(self) -> int | None:
        """Return the calling thread's handle, on the thread's present stream."""
        loan = self._here.loan
        if loan is None:
            loan = self._here.loan = _Loan(self._idle_or_new(), self._idle)
        return loan.handle.on(self._current_stream())

    def _idle_or_new(self) -> Handle:
        try:
            return self._idle.pop()
        except IndexError:
            return self._make(self._library)
