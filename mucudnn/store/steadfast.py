"""A store in a file, and in memory from the moment at which the file can be used no more."""

import contextlib
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

from mucudnn.errors import StoreWarning, warn_user
from mucudnn.locks import ForkSafeLock
from mucudnn.problem import ConvProblem
from mucudnn.profile import Comparison, Environment, Record, Trial
from mucudnn.store.base import Store
from mucudnn.store.connections import UnusableFileError
from mucudnn.store.memory import MemoryStore
from mucudnn.store.sqlite import SqliteStore

Result = TypeVar("Result")


class SteadfastStore:
    """Keeps what it can in a file; where a disk is full, or a file stays locked, it warns and goes on.

    Attributes:
        path: of the file, absolute.

    Args:
        file: the store; it is closed with this one.
    """

    def __init__(self, file: SqliteStore) -> None:
        self.path = file.path
        self._file: SqliteStore | None = file
        self._store: Store = file
        self._moving = ForkSafeLock()

    def __getstate__(self) -> dict[str, Any]:
        """Keep the file, or what is in its place by now."""
        return {**self.__dict__, "_file": self._file if self.is_kept else None}

    @property
    def is_kept(self) -> bool:
        """Whether the file still takes what is added."""
        return self._store is self._file

    @property
    def in_memory(self) -> Store | None:
        """What is in the place of the file; None as long as that takes what is added."""
        return None if self.is_kept else self._store

    def records(self, environment: Environment, trials: Iterable[Trial]) -> dict[Trial, Record]:
        """Return the records of those `trials` that are known in `environment`, in the order of `trials`."""
        wanted = list(trials)
        return self._used(lambda store: store.records(environment, wanted))

    def add_records(self, environment: Environment, records: Iterable[Record]) -> None:
        """Keep all `records`, as far as what is there gives way."""
        added = list(records)
        self._used(lambda store: store.add_records(environment, added))

    def comparison(
        self, environment: Environment, problem: ConvProblem, keys: Iterable[str]
    ) -> Comparison | None:
        """Return the comparison of exactly the divisions `keys`, in any order; None if there is none."""
        wanted = list(keys)
        return self._used(lambda store: store.comparison(environment, problem, wanted))

    def add_comparisons(self, environment: Environment, comparisons: Iterable[Comparison]) -> None:
        """Keep those of `comparisons` of whose divisions there is none yet."""
        added = list(comparisons)
        self._used(lambda store: store.add_comparisons(environment, added))

    def forget(self, environment: Environment, problems: Iterable[ConvProblem], *, whole: bool) -> None:
        """Remove what is known of these `problems` in `environment`, in one role."""
        forgotten = list(problems)
        self._used(lambda store: store.forget(environment, forgotten, whole=whole))

    def count(self) -> int:
        """Return the number of records, of all environments together."""
        return self._used(lambda store: store.count())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _used(self, use: Callable[[Store], Result]) -> Result:
        """Return what comes of using the file or, where that cannot be used now, what is in its place."""
        try:
            return use(self._store)
        except UnusableFileError as error:
            return use(self._go_on_in_memory(error))

    def _go_on_in_memory(self, error: UnusableFileError) -> Store:
        """Return a store in memory that holds what the file holds, and stands for it from now on."""
        with self._moving:
            if self._file is not None and self.is_kept:  # another thread may have been here
                memory = MemoryStore()
                with contextlib.suppress(UnusableFileError):  # then it cannot be read any more, either
                    self._file.copy_into(memory)
                self._store = memory
                warn_user(f"What is measured from now on is not kept: {error}", StoreWarning)
        return self._store

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
