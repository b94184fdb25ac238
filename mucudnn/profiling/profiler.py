"""Knowing what is asked for: the store is asked first, and whoever measures only for what it lacks."""

import logging
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from mucudnn.choices import Policy, Search
from mucudnn.division import Division
from mucudnn.errors import BackendError, DeviceLostError, UnmeasuredError
from mucudnn.evidence import fits_as_seen
from mucudnn.interruptions import pass_on_interruption
from mucudnn.intervals import median
from mucudnn.problem import ConvProblem
from mucudnn.profile import Candidate, Comparison, Environment, Profile, Record, Refusal, RefusalKind, Trial
from mucudnn.profiling.measurer import Divisions, Limits, Measurer, ModelCall
from mucudnn.profiling.outcome import Outcome
from mucudnn.profiling.trials import division_trial, is_settled, judged, packed_trial
from mucudnn.store import Store
from mucudnn.timing import nothing

Known = TypeVar("Known")

_log = logging.getLogger(__name__)


class Forgotten(NamedTuple):
    """What is measured anew: a problem in an environment, of its key, as a whole mini-batch or as a part."""

    environment: str
    problem: ConvProblem
    whole: bool


class Profiler:
    """Has one measurer measure under one limit, and keeps what it measures in a store.

    Attributes:
        environment: in which it measures.
        limit_bytes: the limit, inclusive.
        policy: which micro-batch sizes are tried.
        search: which algorithms are tried.
        max_error: of candidates but PyTorch's own; None for no bound beside the backend's.
        own: id of PyTorch's own convolution.
        on_wait: called when it has to wait for somebody else who measures on the same device.
        on_turn: called once its turn to measure has come.
    """

    def __init__(
        self,
        measurer: Measurer,
        store: Store,
        limit_bytes: int,
        policy: Policy,
        search: Search = Search.HEURISTIC,
        max_error: float | None = None,
    ) -> None:
        """Remember whom to ask; nothing is measured yet."""
        self.environment: Environment = measurer.environment()
        self.limit_bytes = limit_bytes
        self.policy = policy
        self.search = search
        self.max_error = max_error
        self.own = measurer.own
        self.on_wait: Callable[[], None] = nothing
        self.on_turn: Callable[[], None] = nothing
        self._measurer = measurer
        self._store = store

    @property
    def measured(self) -> int:
        """How many trials, divisions and pairs of whole calls were begun so far, without what was known."""
        return self._measurer.measured

    def complaint(self) -> str | None:
        """Return what others did while times were measured, if that may have moved them."""
        return self._measurer.complaint()

    def forget(self, problems: Iterable[ConvProblem], forgotten: set[Forgotten] | None = None) -> None:
        """Have the store forget what it knows here of mini-batches of `problems` and of their parts.

        A smaller mini-batch is as large as such a part: what is known of it as a whole stays.

        Args:
            problems: to be measured anew.
            forgotten: what was forgotten before, and may be known anew, so that it stays; it grows.
        """
        before = set() if forgotten is None else forgotten
        wholes = set(problems)
        parts = {
            each.part(size) for each in wholes for size in self.policy.sizes(each.batch) if size < each.batch
        }
        for whole, asked in ((True, wholes), (False, parts)):
            found = {each: Forgotten(self.environment.key, each, whole) for each in asked}
            self._store.forget(
                self.environment, [each for each in found if found[each] not in before], whole=whole
            )
            before.update(found.values())

    def profile(self, problem: ConvProblem) -> Profile:
        """Return the candidates of `problem` within the limit, at all sizes of the policy.

        Raises:
            BackendError: a candidate cannot be measured.
        """
        trials = self._trials(problem)
        found = self._once(lambda: self._settled(trials), lambda: self._measured(problem, trials))
        records = [judged(found[trial], self.max_error) for trial in trials]
        return _profile(problem, self.environment, records, self.limit_bytes)

    def _once(self, known: Callable[[], Known | None], measure: Callable[[], Known]) -> Known:
        """Return what is known, or else measure, unless somebody else has while this one waited its turn."""
        found = known()
        if found is not None:
            return found
        with self._measurer.alone(self.on_wait):
            self.on_turn()
            found = known()
            return measure() if found is None else found

    def _settled(self, trials: Sequence[Trial]) -> dict[Trial, Record] | None:
        """Return the records of all trials; None if one is missing."""
        known = self._store.records(self.environment, trials)
        return None if self._missing(trials, known) else known

    def _missing(self, trials: Sequence[Trial], known: Mapping[Trial, Record]) -> list[Trial]:
        return [trial for trial in trials if not is_settled(known.get(trial), self.limit_bytes)]

    def _measured(self, problem: ConvProblem, trials: Sequence[Trial]) -> dict[Trial, Record]:
        """Measure what is missing, and return the records of all trials."""
        known = self._store.records(self.environment, trials)
        fresh = self._measure(problem, self._missing(trials, known))
        self._keep(fresh)
        # What is kept is what others may have written first, so that all plan from the same. What was
        # known stays known, should the store have lost it since: one that measures anew forgets, too.
        seen = known | {record.trial: record for record in fresh}
        return seen | self._store.records(self.environment, trials)

    def _keep(self, records: Iterable[Record]) -> None:
        """Have the store keep those records that will hold in other processes, too."""
        self._store.add_records(self.environment, [each for each in records if each.lasts])

    def _measure(self, problem: ConvProblem, missing: Sequence[Trial]) -> list[Record]:
        """Have `missing` measured; what has broken the device is kept as refused, at every size."""
        try:
            return self._measurer.measure(problem, missing, self.limit_bytes)
        except DeviceLostError as lost:
            broken = [_broken(trial, lost) for trial in missing if trial.algorithm == lost.algorithm]
            self._keep(broken)
            raise

    def known_workspaces(self, problem: ConvProblem) -> list[Candidate]:
        """Return every algorithm at every size with the workspace that it needs, as far as known, untimed.

        By it the least limit that would do is told when none fits. What was refused for another reason than
        its size is left out.
        """
        trials = self._trials(problem)
        known = self._store.records(self.environment, trials)
        records = [
            judged(known.get(trial) or Record(trial, self._declared_bytes(trial)), self.max_error)
            for trial in trials
        ]
        return [
            Candidate(record.trial.algorithm, record.trial.problem.batch, 0.0, record.workspace_bytes)
            for record in records
            if record.workspace_bytes is not None and not record.is_broken
        ]

    def _declared_bytes(self, trial: Trial) -> int | None:
        """Return the bytes that `trial` needs; None where that is not known or cannot be told."""
        try:
            return self._measurer.declared_bytes(trial)
        except (RuntimeError, BackendError) as error:
            pass_on_interruption(error)
            return None

    def compare(
        self, problem: ConvProblem, divisions: Sequence[Division], rooms: Mapping[str, int] | None = None
    ) -> Outcome:
        """Return how finished `divisions` do against one another, the base first, run as they will run.

        A division that was seen to take more than it may has no times in the answer; what it was seen to
        take stands there if that is known.

        Args:
            problem: of the mini-batch.
            divisions: of it.
            rooms: bytes that some may be seen to take, by their keys; the others have the whole limit.

        Raises:
            BackendError: a division cannot be measured.
        """
        limits = Limits(self.limit_bytes, rooms or {})
        whole = self._undisputed(problem, divisions, limits)
        if whole is not None:
            return Outcome.of(whole)
        refused, outcome = self._once(
            lambda: self._known_outcome(problem, divisions, limits),
            lambda: self._compare(problem, divisions, limits),
        )
        seen = {key: n_bytes for key, n_bytes in refused.items() if n_bytes is not None}
        workspaces = {**seen, **outcome.workspaces}
        unfit = [
            each.key for each in divisions if not fits_as_seen(workspaces.get(each.key), limits.of(each))
        ]
        return Outcome(outcome.estimates, workspaces, outcome.comparison).without(unfit)

    def _undisputed(
        self, problem: ConvProblem, divisions: Sequence[Division], limits: Limits
    ) -> Comparison | None:
        """Return the rounds of these divisions, if all fitted and none broke, then or since.

        What was refused since for its size was so in less room, or by the noise of weighing.
        """
        whole = self._comparison(problem, divisions)
        if whole is None or not all(
            fits_as_seen(whole.workspaces.get(each.key), limits.of(each)) for each in divisions
        ):
            return None
        trials = [division_trial(problem, each) for each in divisions]
        known = self._store.records(self.environment, trials)
        return None if any(record.is_broken for record in known.values()) else whole

    def _known_outcome(
        self, problem: ConvProblem, divisions: Sequence[Division], limits: Limits
    ) -> tuple[dict[str, int | None], Outcome] | None:
        """Return, by key, what those take that are known to be refused, and how the others do, if known."""
        refused, fitting = self._refused(problem, divisions, limits)
        known = self._comparison(problem, fitting) if fitting else Comparison(problem, {}, {})
        return None if known is None else (refused, Outcome.of(known))

    def compare_calls(
        self, call: ModelCall, base: Divisions, divisions: Divisions
    ) -> Comparison | Record | None:
        """Return how a convolution does as a model calls it: by the base, and by other divisions.

        Their names in the comparison are their keys. A record says which of them breaks, be it the base. None
        where that was not measured, and cannot be: the base fails, or memory is lacking.

        Raises:
            DeviceLostError: the base, or the divisions, have broken the device.
        """
        return self._once(
            lambda: self._known_calls(call, base, divisions),
            lambda: self._compare_calls(call, base, divisions),
        )

    def packed_bytes(self, problem: ConvProblem) -> int | None:
        """Return what PyTorch's own takes in a graph that torch.compile has frozen, beside its packed filter.

        None where such graphs pack none, it does not fit the limit, or it was not weighed and cannot be.
        """
        if not self._measurer.packs(problem):
            return None  # without waiting for whoever measures
        known = self._once(lambda: self._known_packed(problem), lambda: self._weigh_packed(problem))
        if known is None or known.refusal is not None or known.workspace_bytes is None:
            return None
        return known.workspace_bytes if known.workspace_bytes <= self.limit_bytes else None

    def _known_packed(self, problem: ConvProblem) -> Record | None:
        trial = packed_trial(problem, self.own)
        known = self._store.records(self.environment, [trial]).get(trial)
        return known if is_settled(known, self.limit_bytes) else None

    def _weigh_packed(self, problem: ConvProblem) -> Record | None:
        """Have it weighed, keep what was seen, and return it."""
        try:
            seen = self._measurer.weigh_packed(problem, self.limit_bytes)
        except UnmeasuredError as error:
            _log.info("What frozen graphs take is not known: %s", error)
            return None
        if seen is None:
            return None
        self._keep([seen])
        return self._known_packed(problem) or seen

    def _known_calls(
        self, call: ModelCall, base: Divisions, divisions: Divisions
    ) -> Comparison | Record | None:
        """Return what is known of such calls: a record of those that break, be it the base."""
        broken = self._store.records(self.environment, [call.trial(each) for each in (base, divisions)])
        keys = (call.key(base), call.key(divisions))
        found = call.broken(broken, base, divisions)
        return found or self._store.comparison(self.environment, call.problem, keys)

    def _compare_calls(
        self, call: ModelCall, base: Divisions, divisions: Divisions
    ) -> Comparison | Record | None:
        """Have such calls compared, keep what was seen, and return it."""
        try:
            seen = self._measurer.compare_calls(call, base, divisions)
        except UnmeasuredError as error:
            _log.info("A whole call is not timed: %s", error)
            return None
        except DeviceLostError as lost:
            self._keep([_broken(Trial(call.problem, lost.algorithm, whole=True), lost)])
            raise
        if isinstance(seen, Record):
            self._keep([seen])
        elif seen is not None:
            self._store.add_comparisons(self.environment, [seen])
            seen = self._store.comparison(self.environment, call.problem, list(seen.times)) or seen
        return seen

    def _comparison(self, problem: ConvProblem, divisions: Sequence[Division]) -> Comparison | None:
        return self._store.comparison(self.environment, problem, [each.key for each in divisions])

    def _trials(self, problem: ConvProblem) -> list[Trial]:
        """Return what to try; the whole is asked for first: then a refusal names what the user has given."""
        sizes = self.policy.sizes(problem.batch)
        found = {
            size: self._measurer.algorithms(problem.part(size), self.search, whole=size == problem.batch)
            for size in sorted(sizes, key=lambda size: size != problem.batch)
        }
        return [
            Trial(problem.part(size), algorithm, whole=size == problem.batch)
            for size in sizes
            for algorithm in found[size]
        ]

    def _refused(
        self, problem: ConvProblem, divisions: Sequence[Division], limits: Limits
    ) -> tuple[dict[str, int | None], list[Division]]:
        """Return, by key, what those take that are known to take too much, or to break, and the others."""
        trials = {division_trial(problem, division): limits.of(division) for division in divisions}
        known = self._store.records(self.environment, trials)
        refused = {
            trial.algorithm: record.workspace_bytes
            for trial, record in known.items()
            if record.refusal is not None and is_settled(record, trials[trial])
        }
        return refused, [division for division in divisions if division.key not in refused]

    def _compare(
        self, problem: ConvProblem, divisions: Sequence[Division], limits: Limits
    ) -> tuple[dict[str, int | None], Outcome]:
        """Have those compared that are not refused, keep what was seen, and return what is known then."""
        refused, fitting = self._refused(problem, divisions, limits)
        try:
            outcome, refusals = self._measurer.compare(problem, fitting, limits)
        except DeviceLostError as lost:
            trials = (division_trial(problem, division) for division in fitting)
            broken = [_broken(trial, lost) for trial in trials if trial.algorithm == lost.algorithm]
            self._keep(broken)
            raise
        self._keep(refusals)
        if outcome.comparison is not None and outcome.comparison.times:
            self._store.add_comparisons(self.environment, [outcome.comparison])
            kept = self._store.comparison(self.environment, problem, outcome.comparison.times)
            outcome = outcome if kept is None else Outcome.of(kept)
        refused_now = {record.trial.algorithm: record.workspace_bytes for record in refusals}
        return refused | refused_now, outcome


def _broken(trial: Trial, lost: DeviceLostError) -> Record:
    reason = f"with {lost.batch} samples it broke the device: {lost.reason}"
    refusal = Refusal(trial.algorithm, trial.problem.batch, RefusalKind.FAILED, reason)
    return Record(trial, refusal=refusal)


def _profile(
    problem: ConvProblem, environment: Environment, records: Sequence[Record], limit_bytes: int
) -> Profile:
    """Join the records of one problem's trials: medians as times, one set-up time for each algorithm."""
    fitting = [
        record
        for record in records
        if record.workspace_bytes is not None and record.workspace_bytes <= limit_bytes
    ]
    set_ups: dict[str, list[float]] = {}
    for record in fitting:  # what was measured under a larger limit changes nothing here
        if record.setup is not None:
            set_ups.setdefault(record.trial.algorithm, []).append(median(record.setup.samples_s))
    candidates = [
        Candidate(
            record.trial.algorithm,
            record.trial.problem.batch,
            median(record.times.samples_s),
            record.workspace_bytes,
            statistics.median(set_ups.get(record.trial.algorithm, [0.0])),
            record.is_deterministic,
        )
        for record in fitting
        if record.times is not None and record.workspace_bytes is not None
    ]
    refusals = [record.refusal for record in records if record.refusal is not None]
    errors = {
        (record.trial.algorithm, record.trial.problem.batch): record.error
        for record in records
        if record.error is not None
    }
    return Profile(problem, environment, tuple(candidates), tuple(refusals), errors)
