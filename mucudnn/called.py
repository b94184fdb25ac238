"""What convolutions take as they are called: by a model, and by graphs that torch.compile freezes."""

from mucudnn.choices import Mode
from mucudnn.division import Division, has_room, tight_limit, undivided
from mucudnn.evidence import CallTimes, FrozenEvidence
from mucudnn.extraction import SiteCall
from mucudnn.measuring import Divisions, ModelCall, call_key
from mucudnn.outcome import Outcome
from mucudnn.profile import Comparison, Record
from mucudnn.profiler import Profiler


class Called:
    """Has whole calls timed, PyTorch's own against divisions."""

    def __init__(self, profiler: Profiler, mode: Mode) -> None:
        """Remember whom to ask, and whose the limit is."""
        self._profiler = profiler
        self._own, self._limit_bytes = profiler.own, profiler.limit_bytes
        self._is_sharing = mode is Mode.SHARING

    def times(
        self, call: SiteCall, base: Divisions, divisions: Divisions, *, is_frozen: bool = False
    ) -> CallTimes | Record | None:
        """Return how a call does by a base and by divisions, elsewhere or in frozen graphs.

        A record says that the divisions break. None where nothing was measured, and nothing can be.
        """
        asked = ModelCall(call.problem, self._own, self._is_sharing, self._limit_bytes, is_frozen)
        seen = self._profiler.compare_calls(asked, base, divisions)
        if not isinstance(seen, Comparison):
            return seen
        outcome, (before, now) = Outcome.of(seen), (call_key(asked, each) for each in (base, divisions))
        return CallTimes(
            reference=outcome.estimates[before],
            divided=outcome.estimates[now],
            speedup=seen.speedup(before, now),
            verdict=outcome.verdict(before, now),
        )

    def is_unpatched(self, call: SiteCall, division: Division, common_bytes: int) -> bool:
        """Return whether a forward pass is PyTorch's own as it comes, beside which memory always suffices.

        Args:
            call: of inference.
            division: what runs.
            common_bytes: what the common buffer may come to.
        """
        bound = tight_limit(division, self._own, self._limit_bytes, common_bytes, is_sharing=self._is_sharing)
        return self._is_own(call, division) and bound is None

    def frozen(self, call: SiteCall, division: Division, common_bytes: int) -> FrozenEvidence | None:
        """Return what a forward pass is in frozen graphs; None where PyTorch's own may not run there.

        It has no times where PyTorch's own runs elsewhere too, or the division cannot be timed there.
        """
        n_bytes = self._profiler.packed_bytes(call.problem)
        if n_bytes is None or not has_room(
            n_bytes, division, self._own, self._limit_bytes, common_bytes, is_sharing=self._is_sharing
        ):
            return None
        op, times = call.problem.op, None
        if not self._is_own(call, division):
            base = {op: undivided(self._own, call.problem.batch)}
            times = self.times(call, base, {op: division}, is_frozen=True)
        known = times if isinstance(times, CallTimes) else None
        return FrozenEvidence(call.path, call.variant, n_bytes, known)

    def _is_own(self, call: SiteCall, division: Division) -> bool:
        return division.key == undivided(self._own, call.problem.batch).key
