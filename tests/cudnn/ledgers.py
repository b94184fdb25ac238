"""An allocator on paper, and work that takes memory from it."""

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

from mucudnn.backends import Job


@dataclasses.dataclass
class Ledger:
    """An allocator on paper, with 1000 bytes of operands in it.

    Attributes:
        taken: bytes that are taken now.
        peak: most bytes so far.
        cap: at which memory is refused.
        refused: how often it was.
        size: what there is, of operands and all.
    """

    taken: int = 1000
    peak: int = 0
    cap: int = 2**62
    refused: int = 0
    size: int = 2**62

    def take(self, n_bytes: int) -> None:
        if self.taken + n_bytes > min(self.cap, self.size):
            self.refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.taken += n_bytes
        self.peak = max(self.peak, self.taken)

    def piece(self, n_bytes: int) -> "Result":
        return Result(self, n_bytes)

    def settle(self) -> None:
        self.peak = self.taken

    def allocated_bytes(self) -> int:
        return self.taken

    def peak_bytes(self) -> int:
        return self.peak

    def refusals(self) -> int:
        return self.refused

    @contextlib.contextmanager
    def held_to(self, n_bytes: int) -> Iterator[None]:
        self.cap = self.taken + n_bytes
        yield
        self.cap = 2**62


class Work:
    """A piece of work with a result of 100 bytes, and a workspace that it gives back in the end."""

    def __init__(self, ledger: Ledger, workspaces: list[int]) -> None:
        self.result_bytes = 100
        self._ledger = ledger
        self._workspaces = iter(workspaces)

    def run(self) -> "Result":
        result = Result(self._ledger)
        workspace = next(self._workspaces)
        self._ledger.take(workspace)
        self._ledger.taken -= workspace
        return result


class Result:
    """Memory that is taken for as long as it is there: 100 bytes, which the allocator rounds up to 128."""

    def __init__(self, ledger: Ledger, n_bytes: int = 128) -> None:
        self._ledger = ledger
        self._n_bytes = 0
        ledger.take(n_bytes)
        self._n_bytes = n_bytes

    def __del__(self) -> None:
        self._ledger.taken -= self._n_bytes


class Blind(Ledger):
    """An allocator that says of all memory that nobody has asked for it, as those do that keep no count."""

    def allocated_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class Prepared(Job):
    """A job that is prepared already."""

    work: Work | None = None

    def prepare(self) -> Work:  # type: ignore[override]  # a double
        assert self.work is not None
        return self.work
