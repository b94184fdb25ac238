"""What was measured: raw times, candidates, and the environment that they belong to."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from enum import StrEnum

from mucudnn.intervals import Estimate, estimate, ratio
from mucudnn.locks import cached_property
from mucudnn.problem import ConvProblem

FACTS = {"device": "device", "software": "software", "policy": "setting"}
"""Parts of an environment that decide, and what a fact of each is called."""


@dataclasses.dataclass(frozen=True)
class Environment:
    """All that a time depends on, and the soft facts that stand beside it.

    Two environments are the same if backend, device, software and policy are; a profile answers only
    for its own. Soft facts are kept for the reader and never decide.

    Attributes:
        backend: name of the backend that measures.
        device: what computes: processor or card, its instruction set, its caches.
        software: versions of the libraries that compute.
        policy: precision and determinism flags, threads.
        soft: load, clocks, kernel, as they were.

    Raises:
        ValueError: the backend is no text, or facts are no mapping from texts to texts.
    """

    backend: str
    device: Mapping[str, str]
    software: Mapping[str, str]
    policy: Mapping[str, str]
    soft: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.backend, str):
            raise ValueError(
                f"backend must be a text, but got a value of type {type(self.backend).__name__}."
            )
        for name in ("device", "software", "policy", "soft"):
            facts = getattr(self, name)
            if not isinstance(facts, Mapping):
                raise ValueError(f"{name} must be a mapping, but got a value of type {type(facts).__name__}.")
            if not all(isinstance(word, str) for pair in facts.items() for word in pair):
                raise ValueError(f"{name} must have texts only, but got {dict(facts)}.")

    def __hash__(self) -> int:
        return hash(self.key)

    @cached_property
    def key(self) -> str:
        """A text that is equal for equal environments only."""
        return json.dumps(self._hard_facts(), separators=(",", ":"), sort_keys=True)

    def _hard_facts(self) -> dict[str, object]:
        return {
            "backend": self.backend,
            "device": dict(self.device),
            "software": dict(self.software),
            "policy": dict(self.policy),
        }

    def differences(self, present: "Environment") -> list[str]:
        """Return one phrase for every fact in which this environment differs from the `present` one.

        Of another backend's, only what both know: the rest is of kinds that have no counterpart.
        """
        phrases, is_alike = [], self.backend == present.backend
        if not is_alike:
            phrases.append(f"backend was {self.backend}, is {present.backend}")
        for part, word in FACTS.items():
            then, now = getattr(self, part), getattr(present, part)
            phrases += [
                f"{word} {name} was {then.get(name, 'unset')}, is {now.get(name, 'unset')}"
                for name in sorted(then.keys() | now.keys() if is_alike else then.keys() & now.keys())
                if then.get(name) != now.get(name)
            ]
        return phrases

    def to_json(self) -> dict[str, object]:
        """Return the facts that decide, and the soft ones, as JSON values."""
        return {**self._hard_facts(), "soft": dict(self.soft)}


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Raw times of one call, in the order in which they were taken.

    Attributes:
        spans_ns: timed spans in nanoseconds.
        calls: how many calls each span holds.
        converged: whether the interval was narrow enough when sampling stopped.
        others: how many processors others took on average meanwhile, where that may have moved the times;
            0 elsewhere, and where nobody looked.

    Raises:
        ValueError: there is no span, or a span or the number of calls is no whole number from 1 on, or
            `others` is no number of processors.
    """

    spans_ns: tuple[int, ...]
    calls: int = 1
    converged: bool = True
    others: float = 0.0

    def __post_init__(self) -> None:
        numbers = (*(self.spans_ns or ()), self.calls)  # a recording has a hundred thousand of these
        if not self.spans_ns or {*map(type, numbers)} != {int} or min(numbers) <= 0:
            raise ValueError(
                "A measurement must have spans and calls that are whole numbers above 0, but got "
                f"{self.spans_ns} and {self.calls!r}."
            )
        if not 0 <= self.others < math.inf:
            raise ValueError(f"others must be finite and not negative, but got {self.others!r}.")

    @property
    def samples_s(self) -> list[float]:
        """Seconds per call, one number a span."""
        return [span * 1e-9 / self.calls for span in self.spans_ns]

    @property
    def estimate(self) -> Estimate:
        """Median of the seconds per call, with its interval."""
        return estimate(self.samples_s)


@dataclasses.dataclass(frozen=True, order=True)
class Candidate:
    """One algorithm at one micro-batch size, measured.

    Attributes:
        algorithm: id such as "cpu:winograd4".
        batch: micro-batch size, at least 1.
        time_s: seconds for one micro-batch, set-up aside.
        workspace_bytes: bytes that it needs beside its operands.
        setup_s: seconds that the algorithm takes once per mini-batch, however often it runs; the same
            for every size of one algorithm.
        is_deterministic: whether equal operands give equal bits in every run, as far as its library says;
            True too where nobody asked, as in files from before schema 2 of stores and 4 of plans.

    Raises:
        ValueError: an algorithm that is no text, a size below 1, a time or workspace that is negative or
            not finite, or a size or workspace that is no whole number.
    """

    algorithm: str
    batch: int
    time_s: float
    workspace_bytes: int
    setup_s: float = 0.0
    is_deterministic: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, str):
            raise ValueError(f"algorithm must be a text, but got {self.algorithm!r}.")
        for name, least in (("batch", 1), ("workspace_bytes", 0)):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, but got {number!r}.")
        for name in ("time_s", "setup_s"):
            seconds = getattr(self, name)
            is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            if not (is_number and 0 <= seconds < math.inf):
                raise ValueError(f"{name} must be finite and not negative, but got {seconds!r}.")

    @property
    def is_own(self) -> bool:
        """Whether the algorithm is PyTorch's own convolution."""
        return is_own(self.algorithm)


def own_whole(candidates: Iterable[Candidate], batch: int) -> Candidate | None:
    """Return PyTorch's own of a whole mini-batch of `batch` samples, if it is among the candidates."""
    return next((each for each in candidates if each.is_own and each.batch == batch), None)


class RefusalKind(StrEnum):
    """Why an algorithm is no candidate."""

    OVER_LIMIT = "over limit"
    WRONG = "wrong result"
    FAILED = "failed"
    NOT_COMPILED = "not compiled"


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why an algorithm at one micro-batch size is no candidate, in a sentence.

    Attributes:
        algorithm: id of the algorithm.
        batch: micro-batch size.
        kind: the class of reasons.
        reason: the sentence.
    """

    algorithm: str
    batch: int
    kind: RefusalKind
    reason: str


_OWN = ":aten"


def own_of(backend: str) -> str:
    """Return the id of PyTorch's own convolution on the backend of that name: "cpu:aten"."""
    return backend + _OWN


def is_own(algorithm: str) -> bool:
    """Return whether an id is that of PyTorch's own convolution, whatever the backend."""
    return algorithm.endswith(_OWN)


@dataclasses.dataclass(frozen=True)
class Trial:
    """What is measured at once, and what the store looks up: one algorithm at one size, in one role.

    Attributes:
        problem: the problem of the micro-batch.
        algorithm: id of the algorithm; or the key of a finished division, or of a whole call, that was
            refused as such.
        whole: whether the micro-batch is the whole mini-batch. A part writes into a slice or adds to a
            gradient, which may cost time and workspace that the whole does not.
    """

    problem: ConvProblem
    algorithm: str
    whole: bool

    @property
    def is_composed(self) -> bool:
        """Whether it stands for a finished division, or a call of several, not for an algorithm."""
        return "@" in self.algorithm


@dataclasses.dataclass(frozen=True)
class Record:
    """What is known of a trial: its times, or why it has none.

    Attributes:
        trial: what was tried.
        workspace_bytes: bytes needed beside the operands; None if unknown, because it hit the limit.
        error: 2-norm of the difference to a float64 reference, relative to the reference's, or more if few
            values are far off; None if not run.
        times: seconds for one micro-batch; None for a refusal.
        setup: seconds once per mini-batch; None where there is none.
        refusal: why it is no candidate; None if it is one.
        limit_bytes: the limit under which it was tried, in bytes; a refusal for size holds up to that.
        is_deterministic: whether equal operands give equal bits in every run, as far as its library says;
            True too where nobody asked, as in files from before schema 2 of stores and 4 of plans.

    Raises:
        ValueError: a workspace or limit is no whole number, or negative.
    """

    trial: Trial
    workspace_bytes: int | None = None
    error: float | None = None
    times: Measurement | None = None
    setup: Measurement | None = None
    refusal: Refusal | None = None
    limit_bytes: int | None = None
    is_deterministic: bool = True

    def __post_init__(self) -> None:
        _check_bytes(self.workspace_bytes, self.limit_bytes)

    @property
    def is_broken(self) -> bool:
        """Whether it was refused under any limit, and not for its size."""
        return self.refusal is not None and self.refusal.kind is not RefusalKind.OVER_LIMIT

    @property
    def lasts(self) -> bool:
        """Whether it holds in other processes, too: a compiler may have failed for want of room or time."""
        return self.refusal is None or self.refusal.kind is not RefusalKind.NOT_COMPILED


def _check_bytes(*amounts: int | None) -> None:
    """Raise a ValueError if an amount of bytes that is known is no whole number, or negative."""
    for n_bytes in amounts:
        if n_bytes is not None and (not isinstance(n_bytes, int) or n_bytes < 0):
            raise ValueError(f"Bytes must be a whole number of at least 0, but got {n_bytes!r}.")


@dataclasses.dataclass(frozen=True)
class Profile:
    """The candidates of a problem in one environment, and what was refused.

    Attributes:
        problem: the problem of the whole mini-batch.
        environment: where it was measured.
        candidates: at every micro-batch size of the policy.
        refusals: the algorithms that are none, with reasons.
        errors: that were measured, relative to float64, by algorithm and size.
    """

    problem: ConvProblem
    environment: Environment
    candidates: tuple[Candidate, ...]
    refusals: tuple[Refusal, ...] = ()
    errors: Mapping[tuple[str, int], float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Finished divisions of one problem, run and weighed as they will run, in the same rounds.

    Attributes:
        problem: of the whole mini-batch.
        times: seconds of the whole division by its key; sample i of each comes from round i.
        workspaces: bytes that each division was seen to take at most, by its key.

    Raises:
        ValueError: a workspace is no whole number, or negative; or divisions have unequal numbers of samples.
    """

    problem: ConvProblem
    times: Mapping[str, Measurement]
    workspaces: Mapping[str, int]

    def __post_init__(self) -> None:
        _check_bytes(*self.workspaces.values())
        rounds = {len(times.spans_ns) for times in self.times.values()}
        if len(rounds) > 1:
            raise ValueError(f"Divisions must be timed in the same rounds, but got {sorted(rounds)} samples.")

    @property
    def others(self) -> float:
        """How many processors others took meanwhile, where that may have moved the times."""
        return max((times.others for times in self.times.values()), default=0.0)

    def speedup(self, base: str, other: str) -> Estimate:
        """Return how many times as fast as the base another division is: the median over the rounds."""
        return ratio(self.times[other].samples_s, self.times[base].samples_s)
