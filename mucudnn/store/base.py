"""What every store must offer."""

from collections.abc import Iterable
from types import TracebackType
from typing import Protocol, Self

from mucudnn.problem import ConvProblem
from mucudnn.profile import Comparison, Environment, Record, Trial


class Store(Protocol):
    """What was measured, by environment and trial; every implementation keeps these rules.

    * A look-up answers for exactly the environment and trial asked for: whatever decides a time is part of
      the key, soft facts are not. It also returns what was refused for its size, with the limit that held
      then; whether that refusal still holds is for the caller to judge.
    * What is there stays, until it is to be forgotten: the first writer wins, so that one store gives one
      plan. The one exception is a record refused for its size: it gives way to a record made under a larger
      limit. A record without a limit counts as made under the largest of all.
    * Nothing that another thread or process wrote is lost, and each call adds all or nothing.
    * Whoever opened a store closes it, by the end of a `with` block or by `close`; closing it again does
      nothing, and nothing else may be called after that.

    Every method raises StoreError where the store turns out to be damaged, or cannot be read or written.
    """

    def records(self, environment: Environment, trials: Iterable[Trial]) -> dict[Trial, Record]:
        """Return the records of those `trials` that are known in `environment`, in the order of `trials`."""

    def add_records(self, environment: Environment, records: Iterable[Record]) -> None:
        """Keep all `records`, as far as what is there gives way."""

    def comparison(
        self, environment: Environment, problem: ConvProblem, keys: Iterable[str]
    ) -> Comparison | None:
        """Return the comparison of exactly the divisions `keys`, in any order; None if there is none."""

    def add_comparisons(self, environment: Environment, comparisons: Iterable[Comparison]) -> None:
        """Keep those of `comparisons` of whose divisions there is none yet."""

    def forget(self, environment: Environment, problems: Iterable[ConvProblem], *, whole: bool) -> None:
        """Remove what is known of these `problems` in `environment`, in one role.

        Args:
            environment: in which it was measured.
            problems: of micro-batches.
            whole: whether these are whole mini-batches, whose comparisons are removed too, or parts of some.
        """

    def count(self) -> int:
        """Return the number of records, of all environments together."""

    def close(self) -> None:
        """Give back what the store holds of the system."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
