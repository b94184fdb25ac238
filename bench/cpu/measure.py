"""Measuring one case: profile, solve for each limit, let the divisions compete, and prove what won.

Three steps with samples of their own, since samples that chose a winner never prove it. The profile finds
candidates; the deciding rounds let finished divisions compete with PyTorch's own; in the proving rounds
PyTorch's own and what was chosen run once more. On a card PyTorch's own with another flag follows.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from bench.cpu.choice import EIGHTH, Contest, Family, contest, limits_of
from bench.cpu.lines import BENCHMARK, Case, Choice, Measured, Rival
from bench.cpu.rounds import Rounds
from mucudnn.backends import Backend, Job
from mucudnn.backends.own import own_job
from mucudnn.choices import Policy
from mucudnn.division import Division
from mucudnn.errors import BackendError
from mucudnn.execution.weighing import division_job
from mucudnn.live.measurer import LiveMeasurer
from mucudnn.live.stand import Stand
from mucudnn.problem import ConvProblem
from mucudnn.profile import Candidate, Profile, RefusalKind
from mucudnn.profiling.profiler import Profiler
from mucudnn.sizes import format_bytes
from mucudnn.store import Store
from mucudnn.timing import SamplingRule

PROFILING = SamplingRule(looks=(3,), precision=0.05, warmups=1)
"""Of candidates: three samples, since there may be a hundred, and what they choose competes once more."""

LEAST_ROUNDS = 7
"""From 6 samples on a median has an interval; with 7 it goes from the least to the greatest."""

MOST_ROUNDS = 15
"""The interval then leaves three samples out at either end."""

_LOOKS = (7, 9, 12)
"""Rounds after which a contest may end: each but the first leaves out one more disturbed sample."""

_PRECISION = 0.01
"""Half-width of a quotient's interval at which a contest may end."""

DECIDING_S = 1.0
PROVING_S = 1.0
"""Seconds that rounds may take as long as there are fewer than `MOST_ROUNDS`."""

SEED = 1
"""Of the operands; the values do not matter, but that they are the same again."""

HOPELESS = 8.0
"""How many times as long as a rival's is the time predicted for what does not compete on a card."""

_MOST_SPANS_AT_ONCE = 8
"""How many times as many calls as fill its span `compare_runs` has the slowest call run in one."""

_UNCAPPED = 1 << 50

_DETERMINED = (RefusalKind.WRONG, RefusalKind.FAILED)


Call = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Questions:
    """What is asked of every case beside what runs under each limit.

    Attributes:
        policy: which micro-batch sizes are tried.
        divisor: of what PyTorch's own takes where that is much; the quotient is one more limit.
        families: kinds of divisions of which the fastest is told as well.
        benchmark: runs a call of PyTorch's own once with `torch.backends.cudnn.benchmark`, so that this
            thread's later ones, which are timed too, do what it found; None where there is no such flag.
        is_card: whether PyTorch chooses a plan by the memory it may take, and calls may take a thousand
            times as long as one another. Then PyTorch's own is run without a limit before all else, what is
            hopeless does not compete, and as many rounds are timed as calls and their repeats allow.
    """

    policy: Policy = Policy.POWER_OF_TWO
    divisor: int = EIGHTH
    families: tuple[Family, ...] = ()
    benchmark: Callable[[Call], None] | None = None
    is_card: bool = False


_USUAL = Questions()


class CaseMeter:
    """Measures cases with one backend, one store and one set of limits."""

    def __init__(
        self, backend: Backend, store: Store, limits: Sequence[int], questions: Questions = _USUAL
    ) -> None:
        """Remember what to measure with.

        Args:
            backend: that computes.
            store: of profiles; what it knows is not measured again.
            limits: in bytes; profiles are made under the largest.
            questions: asked of every case.
        """
        self._backend = backend
        self._limits = tuple(sorted(limits))
        self._questions = questions
        measurer = LiveMeasurer(backend, PROFILING, PROFILING)
        self._profiler = Profiler(measurer, store, self._limits[-1], questions.policy)

    def measure(self, case: Case, problem: ConvProblem) -> Measured:
        """Return what is found of `problem`, which is that of `case`.

        Raises:
            MucudnnError: it cannot be measured here.
            RuntimeError: a call has failed, for example for want of memory.
        """
        start = time.perf_counter()
        own_bytes = self._own_bytes(problem) if self._questions.is_card else None  # that plan PyTorch keeps
        profile = self._profiler.profile(problem)
        own = self._own(problem, profile, own_bytes)
        limits = limits_of(self._limits, own.workspace_bytes, self._questions.divisor)
        hopeless = HOPELESS if self._questions.is_card else math.inf
        rivalry = contest(profile.candidates, own, limits, self._questions.families, hopeless)
        stand = Stand(self._backend, problem, 0, seed=SEED)
        calls = _calls(stand, rivalry)
        seconds = self._seconds(calls, rivalry)
        deciding = self._timed(calls, _looks(self._round_s(seconds, calls)), stand)
        seen, choices = self._choose(problem, rivalry, deciding)
        chosen = {own.key: calls[own.key], **{key: calls[key] for key in _keys(choices)}}
        proving = self._timed(chosen, (_rounds(PROVING_S, self._round_s(seconds, chosen)),), stand)
        return Measured(
            case=case,
            problem=problem,
            own=own.key,
            own_bytes=own.workspace_bytes,
            candidates=len(profile.candidates),
            refused=(*_refused(profile), *_unusual(profile.errors)),
            errors=_errors(profile.errors, (own, *rivalry.rivals.values())),
            rivals=tuple(_rival(division, seen) for division in rivalry.rivals.values()),
            undivided=rivalry.undivided,
            choices=choices,
            deciding=deciding,
            proving=proving,
            benchmark=self._benchmarked(stand, rivalry, choices, seconds),
            seconds=time.perf_counter() - start,
        )

    def _own(self, problem: ConvProblem, profile: Profile, own_bytes: int | None) -> Division:
        """PyTorch's own convolution, undivided, with what it takes, however much that is; None for unseen."""
        name, batch = self._backend.own, problem.batch
        for candidate in profile.candidates:
            if (candidate.algorithm, candidate.batch) == (name, batch):
                return Division((candidate,))
        seen_bytes = self._own_bytes(problem) if own_bytes is None else own_bytes
        return Division((Candidate(name, batch, 0.0, seen_bytes),))

    def _own_bytes(self, problem: ConvProblem) -> int:
        return self._weight(own_job(problem, self._backend.device))

    def _choose(
        self, problem: ConvProblem, rivalry: Contest, deciding: Rounds
    ) -> tuple[dict[str, int], tuple[Choice, ...]]:
        """Return what the chosen divisions were seen to take, and the choices that follow from it."""
        samples = {key: deciding.samples_s(key) for key in deciding.spans_ns}
        seen: dict[str, int] = {}
        while True:
            choices = rivalry.choose(samples, seen)
            unweighed = [key for key in _keys(choices) if key in rivalry.rivals and key not in seen]
            if not unweighed:
                return seen, choices
            for key in unweighed:
                seen[key] = self._weight(division_job(problem, rivalry.rivals[key], self._backend.device))

    def _benchmarked(
        self, stand: Stand, rivalry: Contest, choices: Sequence[Choice], seconds: Mapping[str, float]
    ) -> Rounds | None:
        """Time PyTorch's own as `benchmark` has it beside what was chosen strictly, in a thread of its own.

        PyTorch keeps for every thread which plan it has found for a convolution, with the flag or without.
        So PyTorch's own as it comes is not among the others: in this thread it would be the same call.
        """
        benchmark = self._questions.benchmark
        if benchmark is None:
            return None
        keys = dict.fromkeys(each.strict_key for each in choices)
        strict = [rivalry.rivals[key] for key in keys if key is not None and key in rivalry.rivals]

        def rounds() -> Rounds:
            with self._backend.current():
                own = stand.division(rivalry.own)
                benchmark(own)
                self._backend.clock()  # waits for the device
                calls = {BENCHMARK: own}
                calls |= {division.key: stand.division(division) for division in strict}
                round_s = self._round_s({**seconds, BENCHMARK: seconds[rivalry.own.key]}, calls)
                return self._timed(calls, (_rounds(PROVING_S, round_s),), stand)

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(rounds).result()

    def _seconds(self, calls: Mapping[str, Call], rivalry: Contest) -> dict[str, float]:
        """Return about how long each call takes: as predicted, on a card as seen once after a first run."""
        if not self._questions.is_card:
            slowest_s = max(each.time_s for each in (rivalry.own, *rivalry.rivals.values()))
            return dict.fromkeys(calls, slowest_s)
        found = {}
        for key, call in calls.items():
            call()
            start_ns = self._backend.clock()
            call()
            found[key] = (self._backend.clock() - start_ns) * 1e-9
        return found

    def _round_s(self, seconds: Mapping[str, float], keys: Iterable[str]) -> float:
        """Return about how long a round of these calls takes, on a card with their repeats."""
        some = [seconds[key] for key in keys]
        repeats = calls_per_span(some, self._backend.least_span_ns * 1e-9) if self._questions.is_card else 1
        return repeats * sum(some)

    def _timed(self, calls: Mapping[str, Call], looks: tuple[int, ...], stand: Stand) -> Rounds:
        """Time `calls` in the same rounds, each after an ordinary operation, as in a model."""
        backend = self._backend
        rule = SamplingRule(looks, _PRECISION, backend.least_span_ns)
        return Rounds.timed(calls, rule, backend.neighbours(), stand.ordinary_operation, backend.clock)

    def _weight(self, job: Job) -> int:
        n_bytes = self._backend.footprint(job, _UNCAPPED)
        if n_bytes is None:
            raise BackendError(f"A job must fit into {format_bytes(_UNCAPPED)}, but {job.function} does not.")
        return n_bytes


def _calls(stand: Stand, rivalry: Contest) -> dict[str, Call]:
    divisions = {rivalry.own.key: rivalry.own, **rivalry.rivals}
    return {key: stand.division(division) for key, division in divisions.items()}


def calls_per_span(seconds: Sequence[float], least_span_s: float) -> int:
    """Return how often `compare_runs` repeats calls that take so long within a span."""
    fills = [1 << math.ceil(math.log2(max(least_span_s / max(each, 1e-9), 1.0))) for each in seconds]
    return min(max(fills), _MOST_SPANS_AT_ONCE * min(fills))


def _rounds(seconds: float, round_s: float) -> int:
    """Return how many rounds fit into `seconds`, within bounds."""
    return min(max(int(seconds / max(round_s, 1e-9)), LEAST_ROUNDS), MOST_ROUNDS)


def _looks(round_s: float) -> tuple[int, ...]:
    """Return when a contest may end; one that is not decided goes on, however slow, to the last of these."""
    most = max(_rounds(DECIDING_S, round_s), _LOOKS[-1])
    return (*(look for look in _LOOKS if look < most), most)


def _keys(choices: Sequence[Choice]) -> list[str]:
    """All that is chosen under any limit, strictly or not, or is the best of a family."""
    keys = [key for each in choices for key in (each.key, each.strict_key, *(each.best or {}).values())]
    return list(dict.fromkeys(key for key in keys if key is not None))


def _rival(division: Division, seen: Mapping[str, int]) -> Rival:
    return Rival(division.key, division.workspace_bytes, division.time_s, seen.get(division.key))


def _errors(measured: Mapping[tuple[str, int], float], divisions: Sequence[Division]) -> dict[str, float]:
    """Return each algorithm's largest finite error in the divisions, as far as it ran under the limit."""
    algorithms = {part.algorithm for division in divisions for part in division.parts}
    largest: dict[str, float] = {}
    for (algorithm, _), error in measured.items():
        if algorithm in algorithms and math.isfinite(error):
            largest[algorithm] = max(error, largest.get(algorithm, 0.0))
    return largest


def _unusual(measured: Mapping[tuple[str, int], float]) -> tuple[str, ...]:
    """Return in a sentence each which errors are no numbers; PyTorch's own is not refused for that."""
    return tuple(
        f"{algorithm}@{batch}: its error is {error}."
        for (algorithm, batch), error in measured.items()
        if not math.isfinite(error)
    )


def _refused(profile: Profile) -> tuple[str, ...]:
    return tuple(
        f"{each.algorithm}@{each.batch}: {each.reason}"
        for each in profile.refusals
        if each.kind in _DETERMINED
    )
