"""A store that ends with the process."""

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from mucudnn.locks import ForkSafeLock
from mucudnn.problem import ConvProblem
from mucudnn.profile import Comparison, Environment, Record, RefusalKind, Trial


class MemoryStore:
    """A store that ends with the process."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, Trial], Record] = {}
        self._comparisons: dict[tuple[str, ConvProblem, frozenset[str]], Comparison] = {}
        self._lock = ForkSafeLock()

    def __getstate__(self) -> dict[str, Any]:
        """Return what is known now."""
        with self._lock:
            return {**self.__dict__, "_records": dict(self._records), "_comparisons": dict(self._comparisons)}

    def records(self, environment: Environment, trials: Iterable[Trial]) -> dict[Trial, Record]:
        """Return the records of those `trials` that are known in `environment`, in the order of `trials`."""
        found = {trial: self._records.get((environment.key, trial)) for trial in trials}
        return {trial: record for trial, record in found.items() if record is not None}

    def add_records(self, environment: Environment, records: Iterable[Record]) -> None:
        """Keep all `records`, as far as what is there gives way."""
        added = list(records)
        with self._lock:
            for record in added:
                place = (environment.key, record.trial)
                held = self._records.get(place)
                if held is None or _gives_way(held, record):
                    self._records[place] = record

    def comparison(
        self, environment: Environment, problem: ConvProblem, keys: Iterable[str]
    ) -> Comparison | None:
        """Return the comparison of exactly the divisions `keys`, in any order; None if there is none."""
        return self._comparisons.get((environment.key, problem, frozenset(keys)))

    def add_comparisons(self, environment: Environment, comparisons: Iterable[Comparison]) -> None:
        """Keep those of `comparisons` of whose divisions there is none yet."""
        key, added = environment.key, list(comparisons)
        with self._lock:
            for each in added:
                self._comparisons.setdefault((key, each.problem, frozenset(each.times)), each)

    def forget(self, environment: Environment, problems: Iterable[ConvProblem], *, whole: bool) -> None:
        """Remove what is known of these `problems` in `environment`, in one role."""
        places = {(environment.key, problem) for problem in problems}
        with self._lock:
            self._records = {
                (key, trial): record
                for (key, trial), record in self._records.items()
                if trial.whole is not whole or (key, trial.problem) not in places
            }
            self._comparisons = {
                place: comparison
                for place, comparison in self._comparisons.items()
                if not whole or place[:2] not in places
            }

    def count(self) -> int:
        """Return the number of records, of all environments together."""
        return len(self._records)

    def close(self) -> None:
        """Do nothing: nothing is held of the system."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _gives_way(held: Record, new: Record) -> bool:
    """Return whether `held` was refused for its size under a smaller limit than that of `new`."""
    if held.refusal is None or held.refusal.kind is not RefusalKind.OVER_LIMIT or held.limit_bytes is None:
        return False
    return new.limit_bytes is None or held.limit_bytes < new.limit_bytes
