"""Who measures: what a profiler asks of a device that is here, or of the recording of one that is not."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import NamedTuple, Protocol

from mucudnn.choices import Search
from mucudnn.division import Division, Room, common_buffer_bytes
from mucudnn.problem import ConvOp, ConvProblem, problems_of
from mucudnn.profile import Comparison, Environment, Record, Trial
from mucudnn.profiling.outcome import Outcome


class Limits(NamedTuple):
    """What finished divisions may be seen to take.

    Attributes:
        limit_bytes: the limit, inclusive.
        rooms: less than that for some divisions, by their keys.
    """

    limit_bytes: int
    rooms: Mapping[str, int] = MappingProxyType({})

    def of(self, division: Division) -> int:
        """Return the bytes that `division` may be seen to take."""
        return min(self.limit_bytes, self.rooms.get(division.key, self.limit_bytes))

    def bound_of(self, division: Division) -> str:
        """Return what it is that bounds `division`, in words."""
        return "limit" if self.of(division) == self.limit_bytes else "room in the limit of all sites"


Divisions = Mapping[ConvOp, Division]
"""What each op of a convolution runs."""


class ModelCall(NamedTuple):
    """A convolution as a model calls it.

    Attributes:
        problem: of the forward pass: fprop, or dgrad of a transposed convolution.
        is_sharing: whether each op owns a workspace, rather than all one in common.
        limit_bytes: for the workspace, inclusive.
        is_frozen: whether it is called by a graph that torch.compile has frozen for inference, which holds
            the filters of PyTorch's own convolution packed.
        look: which of the looks at it this is, from 1; each is timed for itself.
        taken_bytes: what PyTorch's own convolution takes in other layers between the calls; the common
            buffer gives its end back to the system for it.
    """

    problem: ConvProblem
    is_sharing: bool
    limit_bytes: int
    is_frozen: bool = False
    look: int = 1
    taken_bytes: int = 0

    def lost_bytes(self, divisions: Divisions) -> int:
        """Return the bytes that the buffer gave back before each call and that the call takes anew."""
        if self.is_sharing or not self.taken_bytes:
            return 0
        return max(self._common_bytes(divisions) - max(self.limit_bytes - self.taken_bytes, 0), 0)

    def _common_bytes(self, divisions: Divisions) -> int:
        problems = problems_of(self.problem)
        return common_buffer_bytes([(problems[op], each) for op, each in divisions.items()])

    def limits(self, divisions: Divisions) -> dict[ConvOp, int]:
        """Return what buffer and PyTorch's own may take together, by the ops where they might not fit."""
        room = Room(self.limit_bytes, None if self.is_sharing else self._common_bytes(divisions))
        return room.bounds(self.problem, divisions)

    def key(self, divisions: Divisions) -> str:
        """Return the name of the call in a comparison, and in a refusal: it tells all that decides the time.

        Besides the divisions that is how memory is taken: a filter stays transformed in a workspace that its
        op owns, and under a tight limit memory goes back and forth, also for other layers. In a frozen graph
        PyTorch's own convolution is another one. Looks after the first have names of their own.
        """
        names = [f"{op}={divisions[op].key}" for op in ConvOp if op in divisions]
        limits = [f"{op}<={n_bytes}" for op, n_bytes in self.limits(divisions).items()]
        lost_bytes = self.lost_bytes(divisions)
        signs = {
            "sharing": self.is_sharing,
            "frozen": self.is_frozen,
            f"lost={lost_bytes}": lost_bytes > 0,
            f"look{self.look}": self.look > 1,
        }
        return " ".join([*names, *(sign for sign, holds in signs.items() if holds), *limits])

    def trial(self, divisions: Divisions) -> Trial:
        """Return the trial under which it is kept that the call breaks by these divisions."""
        return Trial(self.problem, self.key(divisions), whole=True)

    def broken(self, records: Mapping[Trial, Record], base: Divisions, divisions: Divisions) -> Record | None:
        """Return the record that the call breaks by the divisions, or by the base; None if by neither."""
        return records.get(self.trial(divisions)) or records.get(self.trial(base))


class Compared(NamedTuple):
    """What came of a comparison.

    Attributes:
        outcome: of the divisions that fit.
        refusals: a record, as `division_trial` names it, of each division that is too large, or breaks.
    """

    outcome: Outcome
    refusals: tuple[Record, ...]


class Measurer(Protocol):
    """Answers what a trial or a finished division takes; every implementation keeps these rules.

    * It answers for one environment, whether or not that is this machine's.
    * Nothing whose workspace is above the limit is run.
    * Every trial asked for has one record in the answer. Whoever cannot answer raises: nothing is guessed,
      but for the time of a whole division, and then the outcome says that it is predicted.
    * A candidate in an answer may need more than the limit, where that was measured under a larger one.
    """

    @property
    def own(self) -> str:
        """Id of PyTorch's own convolution."""

    @property
    def measured(self) -> int:
        """How many trials, divisions and pairs of whole calls were begun so far, without what was known."""

    def environment(self) -> Environment:
        """Return all that the times depend on."""

    def alone(self, on_wait: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a context in which nobody else measures on this device, as far as that can be had.

        Args:
            on_wait: called before waiting for whoever does, and again while that lasts.
        """

    def complaint(self) -> str | None:
        """Return what others did while it measured, in a sentence, if that may have moved the times."""

    def known_as(self, problem: ConvProblem, ops: Collection[ConvOp]) -> ConvProblem:
        """Return by which problem ops of a forward pass are known where it answers for.

        Whether PyTorch computes a transposed convolution otherwise than as a gradient depends on that.
        """

    def algorithms(self, problem: ConvProblem, search: Search, whole: bool) -> tuple[str, ...]:
        """Return the ids of the algorithms to try, PyTorch's own first.

        Args:
            problem: of the micro-batch.
            search: how many of them.
            whole: whether the micro-batch is the whole mini-batch.

        Raises:
            BackendError: nothing is known of the problem in this role, or can be.
        """

    def declared_bytes(self, trial: Trial) -> int | None:
        """Return the bytes that `trial` needs, as far as that is known without running anything."""

    def measure(self, problem: ConvProblem, trials: Sequence[Trial], limit_bytes: int) -> list[Record]:
        """Return what is known of `trials`, which are all of mini-batches of `problem`, in their order.

        Raises:
            BackendError: a trial cannot be measured here and now.
        """

    def compare_calls(
        self, call: ModelCall, base: Divisions, divisions: Divisions
    ) -> Comparison | Record | None:
        """Return how a convolution does as a model calls it: by the base, and by other divisions.

        Their names in the comparison are their keys. A record says which of them breaks, be it the base. None
        where nothing was measured, and nothing can be.

        Raises:
            UnmeasuredError: the base fails, or memory is lacking.
            DeviceLostError: one of them has broken the device; its key stands for the algorithm.
        """

    def packs(self, problem: ConvProblem) -> bool:
        """Return whether PyTorch's own may have its filter packed in a graph that torch.compile has frozen.

        Args:
            problem: of a forward pass: fprop, or dgrad of a transposed convolution.
        """

    def weigh_packed(self, problem: ConvProblem, limit_bytes: int) -> Record | None:
        """Return what PyTorch's own takes in such a graph, beside its packed filter.

        Its trial is `packed_trial`. None where nothing was measured, and nothing can be.

        Args:
            problem: of a forward pass whose filter may be packed.
            limit_bytes: above which it is not run.

        Raises:
            UnmeasuredError: it fails, or memory is lacking.
        """

    def compare(self, problem: ConvProblem, divisions: Sequence[Division], limits: Limits) -> Compared:
        """Return how finished `divisions` of `problem` do against one another, the base first.

        Each is held to its limit.

        Raises:
            BackendError: a division cannot be measured here and now.
        """
