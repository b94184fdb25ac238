"""Replaying: a store that was filled on one machine answers for it on another, and refuses what it never saw.

The recording is only ever read. Where it holds a comparison of the divisions that are asked for, alone or
among others, those rounds answer; else their times are predicted from the recorded times of their parts.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence

from mucudnn.choices import PREFIX, Search
from mucudnn.division import Division
from mucudnn.errors import BackendError, OptionError, StoreError
from mucudnn.evidence import fits_as_seen
from mucudnn.interruptions import pass_on_interruption
from mucudnn.problem import ConvOp, ConvProblem, problems_of
from mucudnn.profile import FACTS, Comparison, Environment, Record, Trial, own_of
from mucudnn.profiling.measurer import Compared, Divisions, Limits, ModelCall
from mucudnn.profiling.outcome import Outcome, predicted_estimate
from mucudnn.profiling.trials import division_trial, is_settled, packed_trial
from mucudnn.recordings import recording_file, shipped
from mucudnn.sizes import format_exactly
from mucudnn.store import SqliteStore, readable_store

_SIZES = (
    " A recording has only the sizes of the policy that it was made with; of those that come with the "
    "package that is power_of_two."
)

_FEW = 4
"""How many sizes are named one by one."""


class Replay:
    """Measures nothing: all that it says stands in a recording.

    Attributes:
        own: id of PyTorch's own convolution.
        measured: nothing, ever.
    """

    measured = 0

    def __init__(self, store: SqliteStore, environment: Environment) -> None:
        """Answer for one environment of a store."""
        self._store = store
        self._environment = environment
        self._known: dict[ConvProblem, dict[Trial, Record]] = {}
        self.own = own_of(environment.backend)

    def environment(self) -> Environment:
        """Return the recorded environment."""
        return self._environment

    def alone(self, on_wait: Callable[[], None]) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        """Return a context that does nothing: whoever only reads disturbs nobody."""
        return contextlib.nullcontext()

    def complaint(self) -> str | None:
        """Return None: nothing is measured."""
        return None

    def known_as(self, problem: ConvProblem, ops: Collection[ConvOp]) -> ConvProblem:
        """Return the problem of a forward pass of which ops were recorded, or itself if none were.

        Whether PyTorch computes a transposed convolution otherwise than as a gradient depends on where it
        runs, as on the processor's instructions.
        """
        if problem.op is not ConvOp.DGRAD:
            return problem
        other = dataclasses.replace(problem, is_apart=not problem.is_apart)
        known = (
            each for each in (problem, other) if all(self._records_of(problems_of(each)[op]) for op in ops)
        )
        return next(known, problem)

    def algorithms(self, problem: ConvProblem, search: Search, whole: bool) -> tuple[str, ...]:  # noqa: ARG002  # a recording has searched
        """Return the ids of the algorithms that were recorded, whatever was tried then, PyTorch's own first.

        Raises:
            BackendError: the problem was never recorded in this role.
        """
        found = [
            trial.algorithm
            for trial in self._records_of(problem)
            if trial.whole == whole and not trial.is_composed
        ]
        if not found:
            role = "whole mini-batch" if whole else "micro-batch"
            raise BackendError(
                f"{problem} must have been measured as a {role}, but the recording {self._store.path} never "
                f"saw it.{self._contents(problem) if whole else _SIZES}"
            )
        return tuple(sorted(found, key=lambda name: (name != self.own, name)))

    def declared_bytes(self, trial: Trial) -> int | None:
        """Return the recorded workspace of `trial`, if there is one."""
        record = self._records_of(trial.problem).get(trial)
        return None if record is None else record.workspace_bytes

    def measure(self, problem: ConvProblem, trials: Sequence[Trial], limit_bytes: int) -> list[Record]:  # noqa: ARG002  # a trial says all
        """Return the records of `trials`.

        Raises:
            BackendError: one was never recorded, or it was refused under a smaller limit than this one, which
                it might meet.
        """
        records = [self._record(trial) for trial in trials]
        for record in records:
            is_larger = record.workspace_bytes is not None and record.workspace_bytes > limit_bytes
            if not is_larger and not is_settled(record, limit_bytes):
                raise BackendError(self._too_large_then(record, limit_bytes))
        return records

    def compare(self, problem: ConvProblem, divisions: Sequence[Division], limits: Limits) -> Compared:
        """Return the recorded rounds of `divisions`, else what the recorded times of their parts add up to.

        A division that was seen to be too large is refused under every limit that what it took, as far as
        that is known, does not fit: it takes more than its parts declare. One that broke is refused.

        Raises:
            BackendError: a part was never recorded, or has no times.
        """
        known = self._records_of(problem)
        comparisons = self._store.comparisons_of(self._environment, problem)
        refusals = [
            record
            for division in divisions
            if (record := known.get(division_trial(problem, division))) is not None
            and _is_refused(record, division, comparisons, limits.of(division))
        ]
        refused = {record.trial.algorithm for record in refusals}
        fitting = [division for division in divisions if division.key not in refused]
        recorded = _smallest_with([division.key for division in fitting], comparisons)
        outcome = recorded or self._predict(problem, fitting, comparisons)
        return Compared(outcome, tuple(refusals))

    def packs(self, problem: ConvProblem) -> bool:  # noqa: ARG002  # the device is not there to be asked
        """Return that it may be so: where no filter was packed, nothing is recorded of one."""
        return True

    def weigh_packed(self, problem: ConvProblem, limit_bytes: int) -> Record | None:
        """Return what was recorded of it; None where nothing was, or a smaller limit than this forbade it."""
        record = self._records_of(problem).get(packed_trial(problem, self.own))
        return record if is_settled(record, limit_bytes) else None

    def compare_calls(
        self, call: ModelCall, base: Divisions, divisions: Divisions
    ) -> Comparison | Record | None:
        """Return what was recorded of such calls; None where nothing was: nothing foretells it."""
        broken = call.broken(self._records_of(call.problem), base, divisions)
        keys = [call.key(base), call.key(divisions)]
        return broken or self._store.comparison(self._environment, call.problem, keys)

    def _records_of(self, problem: ConvProblem) -> dict[Trial, Record]:
        if problem not in self._known:
            records = self._store.records_of(self._environment, problem)
            self._known[problem] = {record.trial: record for record in records}
        return self._known[problem]

    def _contents(self, problem: ConvProblem) -> str:
        """Return a sentence on the whole mini-batches recorded: of how many samples, types and layouts."""
        batches: dict[str, set[int]] = {}
        for each in self._store.problems_of(self._environment):
            batches.setdefault(each.form, set()).add(each.batch)
        if problem.batch in batches.get(problem.form, ()):
            return (
                f" It holds others of {problem.batch} samples in {problem.form}: those of other networks, of "
                "other images, or other ops of these (training, or --eval)."
            )
        forms: dict[str, list[str]] = {}
        for form, sizes in sorted(batches.items()):
            forms.setdefault(_in_words(sizes), []).append(form)
        kinds = [f"of {sizes} samples in {' or '.join(alike)}" for sizes, alike in forms.items()]
        return f" It holds mini-batches {', and '.join(kinds)}." if kinds else ""

    def _record(self, trial: Trial) -> Record:
        record = self._records_of(trial.problem).get(trial)
        if record is None:
            raise BackendError(
                f"{trial.algorithm} for {trial.problem} must have been measured, but the recording "
                f"{self._store.path} never saw it."
            )
        return record

    def _too_large_then(self, record: Record, limit_bytes: int) -> str:
        trial, then = record.trial, "the limit that it was made under, and lower ones,"
        if record.limit_bytes is not None:
            then = f"limits up to {format_exactly(record.limit_bytes)}"
        return (
            f"The recording {self._store.path} answers {then} for {trial.problem}, but not "
            f"{format_exactly(limit_bytes)}: {trial.algorithm} was too large then, and its time is not known."
        )

    def _predict(
        self, problem: ConvProblem, divisions: Sequence[Division], comparisons: Sequence[Comparison]
    ) -> Outcome:
        estimates, workspaces = {}, {}
        for division in divisions:
            records = [self._part(problem, part.algorithm, part.batch) for part in division.parts]
            seen = [each.workspaces.get(division.key, 0) for each in comparisons]
            refused = self._records_of(problem).get(division_trial(problem, division))
            seen += [] if refused is None else [refused.workspace_bytes or 0]
            estimates[division.key] = predicted_estimate(division, records)
            workspaces[division.key] = max([record.workspace_bytes or 0 for record in records] + seen)
        return Outcome(estimates, workspaces)

    def _part(self, problem: ConvProblem, algorithm: str, size: int) -> Record:
        record = self._record(Trial(problem.part(size), algorithm, whole=size == problem.batch))
        if record.times is None:
            raise BackendError(
                f"{algorithm} for {record.trial.problem} must have times, but in the recording "
                f"{self._store.path} it was refused."
            )
        return record


@contextlib.contextmanager
def replaying(name: str) -> Iterator[Replay]:
    """Yield the replay that `name`, "FILE" or "FILE#2", stands for: the second environment of the store FILE.

    A recording that comes with the package is named without its folder and endings.

    Raises:
        StoreError: there is no such file or recording, or it is no store, damaged, newer or empty.
        OptionError: the file has several environments and `name` chooses none, or has fewer than it says.
    """
    file, number = _parsed(name)
    with recorded_store(name) as store:
        environments = store.environments()
        if not environments:
            raise StoreError(f"{store.path} must hold a recording, but got a store without records.")
        place = int(number) if number else 1
        if not 1 <= place <= len(environments) or (not number and len(environments) > 1):
            raise OptionError(
                f"{PREFIX}{file} must be followed by # and the number of one of its environments, "
                f"{'; '.join(numbered(environments))}, but got {PREFIX + name!r}."
            )
        yield Replay(store, environments[place - 1])


def recorded_store(name: str) -> SqliteStore:
    """Return the store that `name` stands for, as for `replaying`, with all its environments.

    Raises:
        StoreError: neither is there, or it cannot be read.
    """
    file, _ = _parsed(name)
    try:
        path = recording_file(file)
        if path.exists():
            return readable_store(path)
        reason = f"{path} cannot be used as a store: there is no such file."
    except OSError as error:  # a name may be too long for a file's
        pass_on_interruption(error)
        reason = f"{file} cannot be used as a store: {error}."
    names = ", ".join(shipped()) or "none"
    raise StoreError(f"{reason} Recordings that come with the package: {names}.")


def _parsed(name: str) -> tuple[str, str]:
    """Return the file, or the name of a recording, and the number behind it; "" if there is none."""
    file, _, number = name.rpartition("#")
    return (file, number) if file and number.isdecimal() else (name, "")


def _is_refused(
    record: Record, division: Division, comparisons: Sequence[Comparison], limit_bytes: int
) -> bool:
    """Whether what is known of a division says that it breaks, or takes more than it may."""
    if record.is_broken:
        return True
    fits = fits_as_seen(record.workspace_bytes, limit_bytes)
    return not fits and not _has_fitted(division, comparisons, limit_bytes)


def _has_fitted(division: Division, comparisons: Sequence[Comparison], limit_bytes: int) -> bool:
    """Whether a division was timed and took no more: it may have been refused for less room."""
    return any(fits_as_seen(each.workspaces.get(division.key), limit_bytes) for each in comparisons)


def _in_words(sizes: Collection[int]) -> str:
    """Return "8 or 16", or where there are many sizes the least and the largest of them."""
    return " or ".join(map(str, sorted(sizes))) if len(sizes) <= _FEW else f"{min(sizes)} to {max(sizes)}"


def _smallest_with(keys: Sequence[str], comparisons: Sequence[Comparison]) -> Outcome | None:
    """Return what the comparison of fewest divisions shows that has all of `keys`; of equals the first.

    Its other divisions are left out: those that are asked for ran in the same rounds all the same.
    """
    fitting = [each for each in comparisons if each.times.keys() >= set(keys)]
    smallest = min(fitting, key=lambda each: len(each.times), default=None)
    if smallest is None:
        return None
    return Outcome.of(
        Comparison(
            smallest.problem,
            {key: smallest.times[key] for key in keys},
            {key: smallest.workspaces[key] for key in keys if key in smallest.workspaces},
        )
    )


def numbered(environments: Sequence[Environment]) -> list[str]:
    """Return how environments differ: ["#1: cpu, setting threads 8", "#2: cpu, setting threads 16"]."""
    facts = [_facts(environment) for environment in environments]
    telling = [
        name
        for name in sorted({name for each in facts for name in each})
        if len({each.get(name) for each in facts}) > 1
    ]
    return [
        ", ".join(
            [f"#{number}: {environment.backend}", *(f"{name} {each.get(name, 'unset')}" for name in telling)]
        )
        for number, (environment, each) in enumerate(zip(environments, facts, strict=True), start=1)
    ]


def _facts(environment: Environment) -> dict[str, str]:
    return {
        f"{word} {name}": fact
        for part, word in FACTS.items()
        for name, fact in getattr(environment, part).items()
    }
