"""One run of the tuner: profile a model's problems, solve, confirm what was chosen, write it into a plan."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

from mucudnn.choices import Mode
from mucudnn.division import Division, Room, common_buffer_bytes, undivided
from mucudnn.errors import (
    AccuracyWarning,
    BusyWarning,
    InfeasibleError,
    UnmeasuredError,
    UntunedWarning,
    warn_user,
)
from mucudnn.evidence import FrozenEvidence, fits_as_seen
from mucudnn.examining.extraction import Extraction, SiteCall
from mucudnn.plan import Assignment, ConvSite, Plan
from mucudnn.plan_file import LARGEST_NUMBER, printable
from mucudnn.problem import ConvProblem, problems_of
from mucudnn.profile import Profile, own_whole
from mucudnn.profiling.outcome import Outcome
from mucudnn.profiling.profiler import Forgotten, Profiler
from mucudnn.progress import Progress, Work
from mucudnn.standing import MEASURED_ANEW, disturbance, inaccuracy
from mucudnn.tuning.confirming import (
    Confirmed,
    Pool,
    Proven,
    evidence_of,
    in_turn,
    lesser,
    rivals_of,
    winner,
)
from mucudnn.tuning.solving import Solution, solve
from mucudnn.tuning.whole_calls import LOOKS, WholeCalls
from mucudnn.version import __version__

_PROFILING_SHARE = 6.0
"""How many times as long as a confirmation profiling takes: of a ResNet-18 on a processor, in batches of 16,
profiles took 47 s, finished divisions 10 s and whole calls 7 s."""

_FIXED_FLOPS = 10**8
"""What each problem takes beside its own FLOPs, in the same measure: about 0.2 s of profiling there."""


class Tuning:
    """One run of the tuner: what a model computes, and a profiler that measures it under a limit."""

    def __init__(
        self,
        profiler: Profiler,
        mode: Mode,
        extraction: Extraction,
        progress: Progress,
        *,
        may_be_frozen: bool = False,
        warn: Callable[[str, type[Warning]], None] = warn_user,
    ) -> None:
        """Collect the sites and their problems.

        Args:
            profiler: it has the limit and the policy.
            mode: whose the limit is.
            extraction: what the model computes.
            progress: who is told.
            may_be_frozen: whether graphs that torch.compile freezes for inference may ask the plan.
            warn: is told what others did meanwhile, if that may have moved times, and of wrong results.
        """
        self._profiler = profiler
        self._mode = mode
        self._extraction = extraction
        self._problems = dict(extraction.problems)
        self._unmeasured: list[tuple[str, str]] = []
        self._may_be_frozen = may_be_frozen
        self._warn = warn
        self._is_sharing = mode is Mode.SHARING
        self._called = WholeCalls(profiler, mode)
        self._work = Work(progress, self._steps())
        profiler.on_wait, profiler.on_turn = self._wait, self._work.go_on

    def forget(self, forgotten: set[Forgotten] | None = None) -> None:
        """Forget what was measured of these convolutions, so that all of it is measured anew.

        Args:
            forgotten: by those who ran before, and perhaps measured anew since, so that it stays; it grows.
        """
        called = (call.problem for call in self._extraction.calls)  # as which calls are known, tuned or not
        self._profiler.forget([*self._problems.values(), *called], forgotten)

    def plan(self) -> Plan:
        """Profile, solve, confirm; return the checked plan.

        A site that cannot be measured stays as it is, with a warning.

        Raises:
            InfeasibleError: nothing fits the limit.
            UnmeasuredError: no site can be measured.
            DeviceLostError: an algorithm has broken the device.
        """
        profiles = dict(self._profiles([*dict.fromkeys(self._problems.values())]))
        solution = solve(
            self._problems, profiles, self._profiler.limit_bytes, self._mode, self._profiler.known_workspaces
        )
        confirmed = dict(self._confirmed(profiles, solution))
        for look in LOOKS:
            for call in self._extraction.calls:
                confirmed |= self._as_called(call, confirmed, look)
        assignments = tuple(
            Assignment(site, problem, found.division, tuple(sorted(solution[site].fitting)), found.evidence)
            for site, problem in self._problems.items()
            for found in [confirmed[site].chosen]
        )
        plan = Plan(
            mode=self._mode,
            policy=self._profiler.policy,
            limit_bytes=self._profiler.limit_bytes,
            environment=dataclasses.replace(self._profiler.environment, soft={}),
            assignments=assignments,
            untouched=tuple(
                (path, printable(reason)) for path, reason in (*self._extraction.untouched, *self._unmeasured)
            ),
            version=__version__,
            max_error=self._profiler.max_error,
            calls=tuple(filter(None, map(self._called.evidence, self._extraction.calls))),
            frozen=tuple(self._frozen(assignments)),
            transposed=self._extraction.transposed,
        )
        plan.check()
        self._work.end(self._profiler.measured)
        complaint = self._profiler.complaint() or disturbance(plan)
        if complaint is not None:
            self._warn(f"{complaint} {MEASURED_ANEW}", BusyWarning)
        wrong = inaccuracy(plan)
        if wrong is not None:
            self._warn(wrong, AccuracyWarning)
        return plan

    def _steps(self) -> dict[Hashable, float]:
        """Return what there is to do, in FLOPs that take about as long; what is equal is done once."""
        costs = {problem: problem.flops + _FIXED_FLOPS for problem in self._problems.values()}
        steps: dict[Hashable, float] = {
            **{("profile", problem): _PROFILING_SHARE * cost for problem, cost in costs.items()},
            **{("confirm", problem): cost for problem, cost in costs.items()},
        }
        for look in LOOKS:
            for call in self._extraction.calls:
                steps[_step(call, look)] = sum(costs[problems_of(call.problem)[op]] for op in call.ops)
            for call in self._inferences():
                steps[_frozen_step(call, look)] = costs[problems_of(call.problem)[call.problem.op]]
        return steps

    def _profiles(self, problems: Sequence[ConvProblem]) -> Iterator[tuple[ConvProblem, Profile]]:
        """Yield the profiles of those problems that can be measured."""
        for problem in problems:
            try:
                yield problem, self._profile(problem)
            except UnmeasuredError as error:
                self._leave(problem, error)

    def _leave(self, problem: ConvProblem, error: UnmeasuredError) -> None:
        """Leave the sites of a problem as they are.

        Raises:
            UnmeasuredError: there are no others.
        """
        sites = [site for site, each in self._problems.items() if each == problem]
        self._work.finish(("profile", problem), ("confirm", problem))
        for site in sites:
            del self._problems[site]
            if (site.path, str(error)) not in self._unmeasured:
                self._unmeasured.append((site.path, str(error)))
        if not self._problems:
            raise error
        names = ", ".join(map(str, sites))
        warn_user(f"These could not be measured and stay as they are: {names} ({error}).", UntunedWarning)

    def _confirmed(
        self, profiles: Mapping[ConvProblem, Profile], solution: Mapping[ConvSite, Solution]
    ) -> Iterator[tuple[ConvSite, Confirmed]]:
        """Yield what each site runs; equal problems with equal divisions are confirmed once."""
        solved = {site: solution[site].division for site in self._problems}
        pool = Pool(self._profiler.limit_bytes, solved.values()) if self._is_sharing else None
        alike = Counter((problem, solved[site].key) for site, problem in self._problems.items())
        confirmed: dict[tuple[ConvProblem, str], Confirmed] = {}
        for site, problem in [*self._problems.items()]:
            division = solved[site]
            key = (problem, division.key)
            if site not in self._problems:
                continue  # it was left with one that is alike
            if key not in confirmed:
                room_bytes = self._profiler.limit_bytes if pool is None else pool.room(division, alike[key])
                try:
                    confirmed[key] = self._confirm(site, solution[site], profiles[problem], room_bytes)
                except UnmeasuredError as error:
                    self._leave(problem, error)
                    continue
                if pool is not None:
                    pool.settle(division, confirmed[key].heavier, alike[key])
            self._work.finish(("confirm", problem))
            yield site, confirmed[key]

    def _as_called(
        self, call: SiteCall, confirmed: Mapping[ConvSite, Confirmed], look: int
    ) -> dict[ConvSite, Confirmed]:
        """Time a whole call; return what its sites run instead where the chosen divisions are not faster.

        That is PyTorch's own, or something else undivided. Each division was timed alone, without the
        overhead of a call and of each part, and PyTorch's own computes both gradients at once.
        """
        sites = {op: ConvSite(call.path, op, call.variant) for op in call.ops}
        found = {op: confirmed[site] for op, site in sites.items() if site in self._problems}
        untuned = {op: undivided(self._profiler.own, call.problem.batch) for op in call.computed}
        divisions = untuned | {op: each.chosen.division for op, each in found.items()}
        running = {
            site: (problem, confirmed[site].chosen.division) for site, problem in self._problems.items()
        }
        undone: dict[ConvSite, Confirmed] = {}
        for rivals in in_turn(found):
            base = divisions | {op: each.division for op, each in rivals.items()}
            if base == divisions:
                continue
            self._work.at(f"confirming {call.path or 'the model itself'}")
            taken_bytes = self._called.taken_before(call, running)
            if not self._called.is_worth_it(call, base, divisions, look, taken_bytes):
                divisions = base
                undone |= {sites[op]: Confirmed(each, each) for op, each in rivals.items()}
        self._work.finish(_step(call, look))
        return undone

    def _frozen(self, assignments: Sequence[Assignment]) -> Iterable[FrozenEvidence]:
        """Return what is known, in frozen graphs, of the convolutions that inference runs otherwise now."""
        running = {each.site: (each.problem, each.division) for each in assignments}
        common_bytes = None if self._is_sharing else common_buffer_bytes(running.values())
        room = Room(self._profiler.limit_bytes, common_bytes)
        found: dict[SiteCall, FrozenEvidence] = {}
        for look in LOOKS:
            for call in self._inferences():
                site = ConvSite(call.path, call.problem.op, call.variant)
                is_open = look == LOOKS[0] or (call in found and not found[call].is_own)
                if is_open and site in running:
                    taken_bytes = self._called.taken_before(call, running)
                    seen = self._seen_frozen(call, running[site][1], room, look, taken_bytes)
                    found |= {} if seen is None else {call: seen}
                self._work.finish(_frozen_step(call, look))
        return found.values()

    def _seen_frozen(
        self, call: SiteCall, division: Division, room: Room, look: int, taken_bytes: int
    ) -> FrozenEvidence | None:
        """Return what a convolution is in frozen graphs; None where they hold what runs elsewhere."""
        if room.is_unpatched(division):
            return None
        self._work.at(f"confirming {call.path or 'the model itself'} in frozen graphs")
        return self._called.frozen(call, division, room, look=look, taken_bytes=taken_bytes)

    def _inferences(self) -> list[SiteCall]:
        """Return the calls for which frozen graphs may ask the plan: those of forward passes alone."""
        calls = self._extraction.calls if self._may_be_frozen else ()
        return [call for call in calls if call.ops == call.computed == (call.problem.op,)]

    def _wait(self) -> None:
        self._work.wait("waiting for another process of yours that measures on this device")

    def _profile(self, problem: ConvProblem) -> Profile:
        self._work.at(f"profiling {problem}")
        profile = self._profiler.profile(problem)
        self._work.finish(("profile", problem))
        return profile

    def _confirm(self, site: ConvSite, solution: Solution, profile: Profile, room_bytes: int) -> Confirmed:
        """Time the rivals of a site; return what runs: PyTorch's own if it fits, unless another is faster.

        The rivals are, in this order: PyTorch's own undivided (the base), the best undivided candidate, the
        best division without PyTorch's own, and the division that was solved for. A later one must be faster
        than the first one that fits, and than the best before it. A base that does not fit the site's share
        is timed for comparison only. If all were seen to take more than the room, whatever they declared, or
        failed, the best division with less workspace takes their place, or else one of other algorithms.
        """
        problem = profile.problem
        base_key = undivided(self._profiler.own, problem.batch).key
        own = own_whole(profile.candidates, problem.batch)
        base = {} if own is None else {base_key: Division((own,))}
        self._work.at(f"confirming {problem}")
        fitting, tried = solution.fitting, set[str]()
        while True:
            rivals = base | rivals_of(solution)
            rooms = {key: room_bytes for key in rivals if key != base_key}
            outcome = self._profiler.compare(problem, list(rivals.values()), rooms)
            fits = {key: rival for key, rival in rivals.items() if key in outcome.estimates}
            if own not in solution.fitting or not fits_as_seen(outcome.workspaces.get(base_key), room_bytes):
                fits.pop(base_key, None)  # it ran for comparison only
            if fits:
                break
            ran = [rival for key, rival in rivals.items() if key != base_key or own in solution.fitting]
            tried |= {part.algorithm for rival in ran for part in rival.parts}
            less = lesser(solution, fitting, tried)
            if less is None:
                raise self._nothing_fits(site, outcome)
            solution = less
        chosen = winner(fits, outcome, base_key)
        others = [fits[base_key]] if base_key in fits else [chosen, *fits.values()]
        whole = next((each for each in others if each.is_undivided), None)
        return Confirmed(
            _proven(chosen, profile, outcome, base_key),
            None if whole is None else _proven(whole, profile, outcome, base_key),
        )

    def _nothing_fits(self, site: ConvSite, outcome: Outcome) -> InfeasibleError:
        limit_bytes, problem = self._profiler.limit_bytes, str(self._problems[site])
        if self._is_sharing:  # that one site would do says nothing about what all would need
            return InfeasibleError(limit_bytes, None, str(site), is_total=True, problem=problem)
        larger = (seen for seen in outcome.workspaces.values() if not fits_as_seen(seen, limit_bytes))
        least_bytes = min(larger, default=None)  # others fit, but broke
        return InfeasibleError(limit_bytes, least_bytes, str(site), problem=problem)


def _proven(division: Division, profile: Profile, outcome: Outcome, base: str) -> Proven:
    """Return a division with what was seen of it; `base` is the key of PyTorch's own, undivided."""
    errors = profile.errors
    known = [errors[key] for part in division.parts if (key := (part.algorithm, part.batch)) in errors]
    is_known = len(known) == len(division.parts)
    # What is no number counts as the largest of a plan.
    worst = max(min(LARGEST_NUMBER, error) for error in known) if is_known else None
    return Proven(division, evidence_of(division, outcome, base, worst))


def _step(call: SiteCall, look: int) -> Hashable:
    """Return what the call is timed as: equal convolutions with equal gradients are timed once."""
    return ("call", call.problem, call.ops, call.computed, look)


def _frozen_step(call: SiteCall, look: int) -> Hashable:
    """Return what the call is timed as in frozen graphs."""
    return ("frozen", call.problem, look)
