"""The buffers in which divisions run: one for each queue, reused by all layers, or one for each owner.

A queue is a thread of the processor, or a stream of a device: what is put there runs in order, so one buffer
serves all of it, whichever threads put it there. What a stream captures is replayed on any other: it has
buffers apart, in which nothing else works.
"""

import functools
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mucudnn.backends import Backend, Queue
from mucudnn.backends.failures import is_lack_of_memory
from mucudnn.errors import BackendWarning, warn_user
from mucudnn.interruptions import pass_on_interruption
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
        needed_bytes: the most that was reserved so far, without what it grew to at once.
        expected_bytes: of one for graphs: what is known to be needed of it sooner or later.
    """

    def __init__(self, device: torch.device, *, is_for_graphs: bool = False) -> None:
        """Begin with no bytes.

        Args:
            device: where the buffer will lie.
            is_for_graphs: whether captured graphs work in it. It then never moves nor goes, nor do those that
                it had before it grew: nobody knows when the last replay has been.
        """
        self.device = device
        self.lock = threading.RLock()
        self.is_taken = False
        self.holder: object | None = None
        self.needed_bytes = 0
        self.expected_bytes = 0
        self._buffer = _bytes(0, device)
        self._touched_bytes = 0
        self._is_for_graphs = is_for_graphs
        self._is_alone = False
        self._has_told_of_locks = False
        self._bound: WeakKeyDictionary[Binder[object], object] = WeakKeyDictionary()

    def another(self) -> "Workspace":
        """Return one like this, without bytes, for whoever must compute while somebody does here."""
        return Workspace(self.device, is_for_graphs=self._is_for_graphs)

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

        Args:
            n_bytes: that are needed now.
            capacity_bytes: what later layers are known to need. If the buffer must grow, it grows to this
                size at once, as far as there is memory; if it was given back, so much of it comes again, in
                one piece. One for graphs grows to what is expected instead, where that is enough.
        """
        if n_bytes > self.needed_bytes:
            self.needed_bytes = n_bytes
        if n_bytes > self._touched_bytes:  # else all of it is there, as before
            self._take(n_bytes, self.expected_bytes if n_bytes <= self.expected_bytes else capacity_bytes)

    def _take(self, n_bytes: int, capacity_bytes: int) -> None:
        if n_bytes > self.n_bytes:
            _as_much_as_there_is(self._grow, n_bytes, capacity_bytes)
            self._touched_bytes = self.n_bytes  # as far as one knows: an allocator hands out used pages, too
            return
        storage = self._buffer.untyped_storage()
        if n_bytes > storage.nbytes():  # it was given back, and comes again as far as it is needed
            self.holder = None
            self._touched_bytes = 0  # as long as it is not there
            storage.resize_(0)  # else what is left of it would be copied, and stay until that is done
            _as_much_as_there_is(storage.resize_, n_bytes, min(capacity_bytes, self.n_bytes))
        self._touched_bytes = max(self._touched_bytes, n_bytes)

    def _grow(self, n_bytes: int) -> None:
        self._drop()
        self._buffer = _bytes(n_bytes, self.device)
        if self._is_for_graphs:
            _kept_for_graphs.append(self._buffer)

    def _drop(self) -> None:
        """Let the buffer go, unless a graph or a kernel that runs now keeps it."""
        self._bound.clear()
        self.holder = None
        self._touched_bytes = 0
        self._is_alone = False
        self._buffer = _bytes(0, self.device)

    def make_room(
        self,
        n_bytes: int,
        limit_bytes: int,
        backend: Backend,
        result_bytes: int = 0,
        block_bytes: int = 0,
        *,
        is_in_use: bool = False,
    ) -> None:
        """Let `n_bytes` be taken elsewhere, so that they and what the buffer holds stay within the limit.

        On the host the end of the buffer goes back to the system, on a device the whole buffer to the
        allocator; it comes again when it is needed. Where the system takes no pages back, since they are
        locked in memory, the buffer is dropped; one in use stays whole, and a warning says once that the
        limit does not hold. That of captured graphs always stays, and the limit does not hold there.

        Args:
            n_bytes: that are to be taken.
            limit_bytes: for them and for the buffer.
            backend: that gives memory back.
            result_bytes: of a tensor that is made before they are taken. A caching allocator cuts it out of
                the smallest block that is large enough. If that were the buffer's, the rest would be too
                small for the `n_bytes`; so another block of this size is left free for it.
            block_bytes: what the buffer will grow to, on a device. If `n_bytes` do not fit beside that, it
                grows now, before they are taken: then they are taken out of its block, and the allocator
                keeps one block for both.
            is_in_use: whether a division is half run, whose kernels are bound to the buffer.
        """
        kept_bytes = max(limit_bytes - n_bytes, 0)
        by_pages = backend.takes_memory_by_pages
        if not by_pages and max(self.n_bytes, kept_bytes) < block_bytes:
            self._grow_early(block_bytes)
        # Host memory is taken page by page, as it is written to; a device's at once.
        taken_bytes = self._touched_bytes if by_pages else self.held_bytes
        if taken_bytes > kept_bytes and not self._is_for_graphs:
            self.holder = None
            another = None if by_pages else self._another_block(result_bytes)
            try:
                backend.release(self._buffer[kept_bytes:taken_bytes])
            except OSError as error:
                pass_on_interruption(error)
                if is_in_use:
                    self._tell_of_locks()
                else:
                    self._drop()
                return
            del another
            self._touched_bytes = kept_bytes if by_pages else 0

    def _tell_of_locks(self) -> None:
        if not self._has_told_of_locks:
            self._has_told_of_locks = True
            warn_user(_LOCKED, BackendWarning)

    def _grow_early(self, n_bytes: int) -> None:
        """Grow before anybody needs it, unless captured graphs use the buffer, or there is no memory."""
        if self._is_alone or self._is_for_graphs:
            return
        try:
            self._take(n_bytes, 0)
        except RuntimeError as failure:
            if not is_lack_of_memory(failure):
                raise
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
        except RuntimeError as failure:
            if not is_lack_of_memory(failure):
                raise
            self._is_alone = True
            return None

    def bound(self, binder: Binder[Bound]) -> Bound:
        """Return what `binder` makes for this buffer; it is made once, and anew when the buffer has grown."""
        found = self._bound.get(binder)
        if found is None:
            with _lasting():
                found = self._bound[binder] = binder.bind(self._present())
            if self._is_for_graphs:
                _kept_for_graphs.append(found)
        return cast(Bound, found)

    def _present(self) -> Tensor:
        """The buffer, or as much of it as came again after it was given back: views reach no further."""
        return self._buffer if self.held_bytes >= self.n_bytes else self._buffer[: self.held_bytes]


def _as_much_as_there_is(take: Callable[[int], object], n_bytes: int, wanted_bytes: int) -> None:
    """Take what is wanted, or what is needed where a device has no more memory."""
    if wanted_bytes > n_bytes:
        try:
            take(wanted_bytes)
            return
        except RuntimeError as failure:
            if not is_lack_of_memory(failure):
                raise
    take(n_bytes)


_kept_for_graphs: list[object] = []
"""Buffers, kernels and plans that captured graphs use: nobody knows when the last replay has been."""


_LOCKED = (
    "The pages of a workspace are locked in memory (mlockall) and cannot be given back between the parts of "
    "a division, so the workspace limit does not hold there. It does where they are not locked."
)


def _bytes(n_bytes: int, device: torch.device) -> Tensor:
    with _lasting():  # nobody fills it: that would touch all of its pages, and a graph would at every replay
        return torch.empty(n_bytes, dtype=torch.uint8, device=device)


def _lasting() -> torch.inference_mode:
    """Have tensors made that can be written to at any time: those of inference mode only inside of it."""
    return torch.inference_mode(mode=False)


class Owner:
    """Whoever owns a workspace of its own; the workspace goes when its owner goes."""


class _Workspaces:
    """The workspaces of one queue: one that all share, and those that have an owner."""

    def __init__(self, make: Callable[[], Workspace]) -> None:
        self.make = make
        self.common = make()
        self.owned: WeakKeyDictionary[Owner, Workspace] = WeakKeyDictionary()

    def made_for(self, owner: Owner) -> Workspace:
        """Return a new one, or that which another thread has made meanwhile."""
        with _making:
            return self.owned.setdefault(owner, self.make())


_workspaces: WeakKeyDictionary[Queue, _Workspaces] = WeakKeyDictionary()
_of_graphs: WeakKeyDictionary[Queue, _Workspaces] = WeakKeyDictionary()
"""What a stream captures works in these; graphs that were captured on one stream share them."""

_making = ForkSafeLock()


def workspace_of(backend: Backend, owner: Owner | None = None) -> Workspace:
    """Return the workspace of this thread's present queue: the common one, or the one of `owner`.

    In reuse mode all sites share the common one; in sharing mode each site owns its own. While the queue is
    being captured they are those of graphs, which keep what they have outgrown: so they begin with what eager
    runs have needed in their place, on whatever queue, as the runs that warm up are mostly on another one.
    """
    queue, device = backend.queue(), backend.device
    is_for_graphs = backend.is_capturing
    workspaces = _of_graphs if is_for_graphs else _workspaces
    here = workspaces.get(queue)
    if here is None:
        make = functools.partial(Workspace, device, is_for_graphs=is_for_graphs)
        with _making:
            here = workspaces.setdefault(queue, _Workspaces(make))
    found = here.common if owner is None else here.owned.get(owner) or here.made_for(owner)
    if is_for_graphs:
        found.expected_bytes = _needed_bytes(device, owner)
    return found


def _needed_bytes(device: torch.device, owner: Owner | None) -> int:
    """Return the most bytes that eager runs have needed of a workspace on `device`, on any queue."""
    with _making:
        there = [each for each in _workspaces.values() if each.common.device == device]
        found = [each.common if owner is None else each.owned.get(owner) for each in there]
    return max((each.needed_bytes for each in found if each is not None), default=0)


def release_workspaces() -> None:
    """Give back the memory of all workspaces that nobody runs in; new ones are made when needed.

    What captured graphs use stays.
    """
    with _making:
        _workspaces.clear()
