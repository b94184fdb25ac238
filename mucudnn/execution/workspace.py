"""The buffers in which divisions run: one for each queue, reused by all layers, or one for each owner.

A queue is a thread of the processor, or a stream of a device: what is put there runs in order, so one buffer
serves all of it, whichever threads put it there.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mucudnn.backends import Backend, Queue
from mucudnn.locks import ForkSafeLock

Bound = TypeVar("Bound", covariant=True)


class Binder(Protocol[Bound]):
    """Whoever makes something for one buffer, such as kernels that work in it."""

    def bind(self, buffer: Tensor) -> Bound:
        """Return it; the buffer has the bytes that were reserved."""


class Workspace:
    """One buffer, and what is bound to it. Serves one queue, and one runner at a time.

    Attributes:
        device: where the buffer lies.
        lock: whoever runs a division holds it, from its first part to its last.
        is_taken: whether somebody does. Then who gets the lock is a signal handler of the same thread.
        holder: whose transformed filter lies at its start, and which, as that user says; None if nobody's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self.is_taken = False
        self.holder: object | None = None
        self._buffer = _bytes(0, device)
        self._touched_bytes = 0
        self._is_captured = False
        self._is_alone = False
        self._bound: WeakKeyDictionary[Binder[object], object] = WeakKeyDictionary()

    @property
    def n_bytes(self) -> int:
        """Bytes that the buffer has when all of it is there."""
        return self._buffer.numel()

    @property
    def held_bytes(self) -> int:
        """Bytes of it that are there now: a device's are not while they are given back."""
        return self._buffer.untyped_storage().nbytes()

    def reserve(self, n_bytes: int, capacity_bytes: int = 0) -> None:
        """Make the buffer hold at least `n_bytes`; if it must grow, all is bound anew later.

        A buffer in which a captured graph works stays where it is; a new one is made if it is too small.

        Args:
            n_bytes: that are needed now.
            capacity_bytes: what it grows to at once, if it must grow and there is memory: what later layers
                are known to need. As much of it comes again after it was given back, in one piece.
        """
        if n_bytes <= self._touched_bytes and not _is_capturing(self._buffer):
            return  # all of it is there, as before
        storage = self._buffer.untyped_storage()
        if n_bytes > self.n_bytes or (self._is_captured and n_bytes > storage.nbytes()):
            _as_much_as_there_is(self._grow, n_bytes, capacity_bytes)
            storage = self._buffer.untyped_storage()
        if n_bytes > storage.nbytes():  # it was given back, and comes again as far as it is needed
            self.holder = None
            self._touched_bytes = 0  # as long as it is not there
            storage.resize_(0)  # else what is left of it would be copied, and stay until that is done
            _as_much_as_there_is(storage.resize_, n_bytes, min(capacity_bytes, self.n_bytes))
        self._touched_bytes = max(self._touched_bytes, n_bytes)
        if _is_capturing(self._buffer) and not self._is_captured:
            self._is_captured = True
            _kept_for_graphs.append(self._buffer)

    def _grow(self, n_bytes: int) -> None:
        self._bound.clear()
        self.holder = None
        self._touched_bytes = 0
        self._is_captured = self._is_alone = False
        self._buffer = _bytes(0, self.device)  # the old one goes first, unless a graph keeps it
        self._buffer = _bytes(n_bytes, self.device)

    def make_room(
        self, n_bytes: int, limit_bytes: int, backend: Backend, result_bytes: int = 0, block_bytes: int = 0
    ) -> None:
        """Let `n_bytes` be taken elsewhere, so that they and what the buffer holds stay within the limit.

        What lies behind in the buffer goes back to the system, or on a device all of it to its allocator; it
        comes again when it is needed. A buffer in which a captured graph works stays, and the limit does not
        hold there.

        Args:
            n_bytes: that are to be taken.
            limit_bytes: for them and for the buffer.
            backend: that gives memory back.
            result_bytes: of a tensor that is made before they are taken. An allocator that keeps blocks cuts
                it out of the smallest that will do: so that this is not the buffer's, which would be too
                small for the `n_bytes` then, there is another one.
            block_bytes: what the buffer will grow to, on a device. If `n_bytes` do not fit beside that, it
                grows before they are taken: out of its block, and the allocator keeps one for both.
        """
        kept_bytes = max(limit_bytes - n_bytes, 0)
        by_pages = backend.takes_memory_by_pages
        if not by_pages and max(self.n_bytes, kept_bytes) < block_bytes:
            self._grow_early(block_bytes)
        # Host memory is taken page by page, as it is written to; a device's at once.
        taken_bytes = self._touched_bytes if by_pages else self.held_bytes
        if taken_bytes > kept_bytes and not self._is_captured:
            self.holder = None
            another = None if by_pages else self._another_block(result_bytes)
            backend.release(self._buffer[kept_bytes:taken_bytes])
            del another
            self._touched_bytes = kept_bytes if by_pages else 0

    def _grow_early(self, n_bytes: int) -> None:
        """Grow before anybody needs it, unless a captured graph uses the buffer, or there is no memory."""
        if self._is_alone or self._is_captured or _is_capturing(self._buffer):
            return
        try:
            self.reserve(n_bytes)
        except torch.OutOfMemoryError:
            self._is_alone = True

    def _another_block(self, n_bytes: int) -> torch.UntypedStorage | None:
        """Take a block beside the buffer; None if there is no memory for both.

        Nothing but what the allocator keeps depends on it. It is not tried again until the buffer grows: each
        time the allocator would give back all that it has left over.
        """
        if self._is_alone:
            return None
        try:
            return torch.UntypedStorage(n_bytes, device=self.device)  # which nobody fills, unlike a tensor
        except torch.OutOfMemoryError:
            self._is_alone = True
            return None

    def bound(self, binder: Binder[Bound]) -> Bound:
        """Return what `binder` makes for this buffer; it is made once, and anew when the buffer has grown."""
        found = self._bound.get(binder)
        if found is None:
            with _lasting():
                found = self._bound[binder] = binder.bind(self._present())
        if _is_capturing(self._buffer):
            _kept_for_graphs.append(found)
        return cast(Bound, found)

    def _present(self) -> Tensor:
        """The buffer, or as much of it as came again after it was given back: views reach no further."""
        return self._buffer if self.held_bytes >= self.n_bytes else self._buffer[: self.held_bytes]


def _as_much_as_there_is(take: Callable[[int], object], n_bytes: int, wanted_bytes: int) -> None:
    """Take what is wanted, or what is needed where a device has no more memory."""
    if wanted_bytes > n_bytes:
        with contextlib.suppress(torch.OutOfMemoryError):
            take(wanted_bytes)
            return
    take(n_bytes)


_kept_for_graphs: list[object] = []
"""Buffers, kernels and plans that captured graphs use: nobody knows when the last replay has been."""


def _is_capturing(buffer: Tensor) -> bool:
    return buffer.is_cuda and torch.cuda.is_current_stream_capturing()


def head(buffer: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor at the start of a buffer of bytes."""
    elements = torch.Size(shape).numel()
    return buffer[: elements * dtype.itemsize].view(dtype).view(shape)


def _bytes(n_bytes: int, device: torch.device) -> Tensor:
    make = torch.empty if device.type == "cuda" else torch.zeros  # a graph would fill it at every replay
    with _lasting():
        return make(n_bytes, dtype=torch.uint8, device=device)


def _lasting() -> torch.inference_mode:
    """Have tensors made that can be written to at any time: those of inference mode only inside of it."""
    return torch.inference_mode(mode=False)


class Owner:
    """Whoever owns a workspace of its own; the workspace goes when its owner goes."""


class _Workspaces:
    """The workspaces of one queue: one that all share, and those that have an owner."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.common = Workspace(device)
        self.owned: WeakKeyDictionary[Owner, Workspace] = WeakKeyDictionary()


_workspaces: WeakKeyDictionary[Queue, _Workspaces] = WeakKeyDictionary()
_making = ForkSafeLock()


def workspace_of(backend: Backend, owner: Owner | None = None) -> Workspace:
    """Return the workspace of this thread's present queue: the common one, or the one of `owner`.

    In reuse mode all sites share the common one; in sharing mode each site owns its own.
    """
    queue = backend.queue()
    here = _workspaces.get(queue)
    if here is None:
        with _making:
            here = _workspaces.setdefault(queue, _Workspaces(backend.device))
    if owner is None:
        return here.common
    owned = here.owned.get(owner)
    if owned is None:
        with _making:
            owned = here.owned.setdefault(owner, Workspace(here.device))
    return owned


def release_workspaces() -> None:
    """Give back the memory of all workspaces that nobody runs in; they grow anew when needed.

    What captured graphs use stays.
    """
    _workspaces.clear()
