"""What convolutions take as they are called: by a model, and by graphs that torch.compile freezes."""

from collections.abc import Mapping

from mucudnn.choices import Mode
from mucudnn.division import Division, Room, common_buffer_bytes, undivided
from mucudnn.evidence import CallEvidence, CallTimes, FrozenEvidence
from mucudnn.examining.extraction import SiteCall
from mucudnn.plan import ConvSite
from mucudnn.problem import ConvProblem
from mucudnn.profile import Comparison, Record
from mucudnn.profiling.measurer import Divisions, ModelCall
from mucudnn.profiling.outcome import Outcome
from mucudnn.profiling.profiler import Profiler

LOOKS = (1, 2)
"""How often whole calls are timed: what was FASTER at one look is timed again after all others.

Other guests of a host take caches, and the other half of a core, for seconds, unseen by the kernel. The
rounds of a look last tenths of a second, so all may show what is gone later: of 150 later looks at 38 calls
of U-Nets that had been FASTER, 23 did not find them so, and 12 found them SLOWER. A convolution that is tuned
alone, as by `autotune` and `dynamic=True`, is looked at again at once, in memory of its own."""


class WholeCalls:
    """Has whole calls timed, PyTorch's own against divisions."""

    def __init__(self, profiler: Profiler, mode: Mode) -> None:
        """Remember whom to ask, and whose the limit is."""
        self._profiler = profiler
        self._own, self._limit_bytes = profiler.own, profiler.limit_bytes
        self._is_sharing = mode is Mode.SHARING
        self._seen: dict[tuple[SiteCall, bool], CallEvidence] = {}  # against PyTorch's own, or others

    def evidence(self, call: SiteCall) -> CallEvidence | None:
        """Return what a call has shown for a plan: against PyTorch's own, or else against others."""
        return self._seen.get((call, True)) or self._seen.get((call, False))

    def taken_before(self, call: SiteCall, running: Mapping[ConvSite, tuple[ConvProblem, Division]]) -> int:
        """Return the most that PyTorch's own of another layer takes where the buffer makes room for it.

        The end of the common buffer then goes back to the system, and the next call gets it anew, page by
        page. It is 0 where no layer does so, and in sharing mode, which has no common buffer.

        Args:
            call: that is the next one.
            running: what all sites compute, and by what.
        """
        if self._is_sharing:
            return 0
        common_bytes = common_buffer_bytes(running.values())
        taken = (
            part.workspace_bytes
            for site, (_, division) in running.items()
            for part in division.parts
            if part.is_own and (site.path, site.variant) != (call.path, call.variant)
        )
        return max((each for each in taken if each + common_bytes > self._limit_bytes), default=0)

    def is_worth_it(
        self, call: SiteCall, base: Divisions, divisions: Divisions, look: int, taken_bytes: int
    ) -> bool:
        """Return whether the divisions of a call are faster than its base, and keep the times for the plan.

        Where the whole call cannot be timed they count as faster: each of them was, for itself.
        """
        times = self.times(call, base, divisions, look=look, taken_bytes=taken_bytes)
        is_own = any(base[op].is_own for op in base if base[op] != divisions[op])
        if not isinstance(times, CallTimes):
            if times is not None:
                self._seen.pop((call, is_own), None)  # they broke, though once they were faster
            return times is None
        self._seen[call, is_own] = CallEvidence(**vars(times), path=call.path, variant=call.variant)
        return times.is_faster

    def times(
        self,
        call: SiteCall,
        base: Divisions,
        divisions: Divisions,
        *,
        look: int,
        is_frozen: bool = False,
        taken_bytes: int = 0,
    ) -> CallTimes | Record | None:
        """Time a call by a base and by divisions, in frozen graphs or elsewhere.

        Before each call, `taken_bytes` are taken as if by PyTorch's own of another layer; a recording that
        does not know that is asked without. The first look that is not FASTER decides, else the last one that
        is possible: samples of those before have chosen, and so prove nothing. A record says that the
        divisions break; None, that nothing was measured and nothing can be.
        """
        asked = ModelCall(
            call.problem, self._is_sharing, self._limit_bytes, is_frozen, taken_bytes=taken_bytes
        )
        times: CallTimes | None = None
        for number in range(1, look + 1):
            each = asked._replace(look=number)
            seen = self._profiler.compare_calls(each, base, divisions)
            if seen is None and each.lost_bytes(divisions):
                each = each._replace(taken_bytes=0)
                seen = self._profiler.compare_calls(each, base, divisions)
            if isinstance(seen, Record) and seen.trial != each.trial(base):
                return seen
            if not isinstance(seen, Comparison):
                break
            times = _times(seen, each.key(base), each.key(divisions))
            if not times.is_faster:
                break
        return times

    def frozen(
        self, call: SiteCall, division: Division, room: Room, *, look: int, taken_bytes: int = 0
    ) -> FrozenEvidence | None:
        """Return what is known of a forward pass in frozen graphs; None if PyTorch's own may not run there.

        It has no times if PyTorch's own is planned anyway, or the division cannot be timed there.
        """
        n_bytes = self._profiler.packed_bytes(call.problem)
        if n_bytes is None or not room.suffices(n_bytes, division):
            return None
        op, times = call.problem.op, None
        if not division.is_own:
            base = {op: undivided(self._own, call.problem.batch)}
            times = self.times(call, base, {op: division}, look=look, is_frozen=True, taken_bytes=taken_bytes)
        known = times if isinstance(times, CallTimes) else None
        return FrozenEvidence(call.path, call.variant, n_bytes, known)


def _times(seen: Comparison, before: str, now: str) -> CallTimes:
    outcome = Outcome.of(seen)
    return CallTimes(
        reference=outcome.estimates[before],
        divided=outcome.estimates[now],
        speedup=seen.speedup(before, now),
        verdict=outcome.verdict(before, now),
        others=outcome.others,
    )
