"""What a site runs, of the tuned batch and of smaller ones, within the memory of its plan."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

from mucudnn.backends import Backend
from mucudnn.choices import Mode
from mucudnn.division import (
    Division,
    Room,
    block_bytes,
    buffer_bytes,
    common_buffer_bytes,
    own_bytes,
)
from mucudnn.errors import BackendError
from mucudnn.execution.workspace import Owner
from mucudnn.functional import DividedConvolution
from mucudnn.locks import cached_property
from mucudnn.plan import Assignment, Plan
from mucudnn.problem import ConvOp, ConvProblem, problems_of
from mucudnn.profile import Candidate, Environment, own_whole
from mucudnn.sizes import format_bytes
from mucudnn.solvers import ReuseTable, best_of

_MOST_TABLES = 512
"""Of equal profiles and batches up to the same power of two: for 256 one comes to some half a MB."""
_MOST_COVERED = 2**11
"""Samples up to which a table is kept: those of more are large."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """How a plan's sites take memory.

    Attributes:
        environment: for which the plan was made.
        is_sharing: whether each site owns a buffer, rather than all one in common.
        limit_bytes: of the plan.
        buffer_bytes: what divisions may take of the common buffer.
        capacity_bytes: what it grows to at once: to so much, or to more where PyTorch's own needs a larger
            block while the buffer is given back.
        single_bytes: what single samples may take of it, of which PyTorch's own takes more than the limit.
    """

    environment: Environment
    is_sharing: bool
    limit_bytes: int
    buffer_bytes: int
    capacity_bytes: int
    single_bytes: int = 0

    @classmethod
    def of(cls, plan: Plan, *, is_growing: bool, by_pages: bool) -> "Memory":
        """Return what `plan` says of memory.

        Args:
            plan: whose sites run.
            is_growing: whether more is tuned later, so that the buffer may grow to the limit.
            by_pages: whether what is given back goes to the system, page by page. An allocator keeps it, in
                blocks: there the buffer gets one that PyTorch's own fits in while it is given back.
        """
        sites = [(each.problem, each.division) for each in plan.assignments]
        known = common_buffer_bytes(sites)
        is_sharing = plan.mode is Mode.SHARING
        barred = [each for each in plan.assignments if by_pages and _bars_own(each, plan.limit_bytes)]
        singles = [_single_bytes(each, plan.limit_bytes) for each in barred]
        capacity_bytes = known if by_pages else block_bytes(sites, plan.limit_bytes)
        return cls(
            environment=plan.environment,
            is_sharing=is_sharing,
            limit_bytes=plan.limit_bytes,
            buffer_bytes=plan.limit_bytes if is_growing else known,
            capacity_bytes=0 if is_sharing else capacity_bytes,
            single_bytes=max(singles, default=0),
        )

    @cached_property
    def room(self) -> Room:
        """What sites have beside the buffer, once that has come to all that it may."""
        return self._room_beside(self.buffer_bytes, self.capacity_bytes, self.single_bytes)

    @cached_property
    def room_as_tuned(self) -> Room:
        """The same as tuning has it, which knows of no smaller batches."""
        return self._room_beside(self.buffer_bytes, self.capacity_bytes)

    def _room_beside(self, *buffers: int) -> Room:
        return Room(self.limit_bytes, None if self.is_sharing else max(buffers))

    def share_bytes(self, assigned: Assignment) -> int:
        """What a site may take."""
        return assigned.division.workspace_bytes if self.is_sharing else self.limit_bytes


def divided(
    backend: Backend,
    problem: ConvProblem,
    assignments: Mapping[ConvOp, Assignment],
    memory: Memory,
    owners: Mapping[ConvOp, Owner] | None = None,
    untuned: Mapping[ConvOp, Callable[[], None]] | None = None,
) -> DividedConvolution:
    """Return what computes a forward pass and its gradients as its sites' assignments have it.

    Args:
        backend: that runs it.
        problem: of the forward pass, of at most the tuned batch.
        assignments: what each op runs; the others run PyTorch's own convolution.
        memory: of the plan.
        owners: of the workspaces, in sharing mode.
        untuned: who is told of gradients that were not tuned; see `DividedConvolution`.

    Raises:
        BackendError: the batch cannot be made of sizes that were measured, or its parts are not computed or
            need more than their site may take.
    """
    shares = {op: memory.share_bytes(assigned) for op, assigned in assignments.items()}
    common_bytes = None if memory.is_sharing else max(memory.buffer_bytes, memory.single_bytes)
    at_once = not backend.takes_memory_by_pages
    divisions = {
        op: division_for(assigned, problem.batch, shares[op], common_bytes, at_once=at_once)
        for op, assigned in assignments.items()
    }
    # PyTorch's own was weighed as its plan says, which may be older, or of another number of samples.
    planned = next(iter(assignments.values()), None)
    if planned is not None:
        problem = dataclasses.replace(problem, is_apart=planned.problem.is_apart)
    problems = problems_of(problem)
    for op, division in divisions.items():
        _check_permitted(backend, problems[op], division)
    limits = memory.room.bounds(problem, divisions)
    if memory.is_sharing:  # of which an op's buffer may still be there from another batch
        limits |= {
            op: shares[op]
            for op, division in divisions.items()
            if own_bytes(division) and op not in limits and _may_use_buffer(assignments[op], shares[op])
        }
    result = DividedConvolution(backend, problem, divisions, owners, limits, memory.capacity_bytes, untuned)
    for op, share_bytes in shares.items():
        if result.buffer_bytes[op] > share_bytes:
            raise BackendError(
                f"{problems[op]} needs {result.buffer_bytes[op]} bytes in parts, and may take {share_bytes}."
            )
    return result


def _check_permitted(backend: Backend, problem: ConvProblem, division: Division) -> None:
    """Raise if it is known why a part's algorithm does not compute it now, such as by the user's flags.

    Raises:
        BackendError: it is known, with the reason.
    """
    for algorithm, size in dict.fromkeys((part.algorithm, part.batch) for part in division.parts):
        part = problem.part(size)
        reason = backend.refusal(part, algorithm)
        if reason is not None:
            raise BackendError(f"{algorithm} does not compute {part} here: {reason}.")


def division_for(
    assigned: Assignment,
    batch: int,
    share_bytes: int,
    common_bytes: int | None = None,
    *,
    at_once: bool = False,
) -> Division:
    """Return what a site runs for a mini-batch of at most the tuned size, without measuring.

    The tuned size runs its division. A smaller batch runs

    * PyTorch's own undivided, if that has won: it was confirmed, and takes less the smaller the batch, except
      of a single sample, which was weighed for itself, and perhaps did not fit;
    * the first parts of the tuned division, if that came without a profile;
    * else the best division by the profile, within the workspace of the tuned one, or of a single sample if
      that takes more; or PyTorch's own undivided, if by its time for more samples nothing is faster.

    Args:
        assigned: the site's division and profile.
        batch: samples, from 1 to the tuned number.
        share_bytes: what it may take.
        common_bytes: what divisions may take of the common buffer: others reckon with no more. None if there
            is none.
        at_once: whether the buffer stays as a whole while parts of PyTorch's own run in the same division.

    Raises:
        BackendError: the profile's sizes do not add up to the batch, and PyTorch's own takes too much.
    """
    division = assigned.division
    if batch == division.batch:
        return division
    is_barred = batch == 1 and _bars_own(assigned, share_bytes)
    if not assigned.candidates or (division.is_own and not is_barred):
        single = own_whole(assigned.candidates, 1) if batch == 1 else None
        return _cut(division, batch) if single is None else Division((single,))
    limit_bytes = max(division.workspace_bytes, _single_bytes(assigned, share_bytes))
    held_bytes = limit_bytes if common_bytes is None else min(limit_bytes, common_bytes)
    fitting = tuple(
        each
        for each in assigned.candidates
        if each.workspace_bytes <= (limit_bytes if each.is_own else held_bytes)
    )
    if assigned.problem.running_sum_bytes > held_bytes:  # there is no room for a sum of parts
        fitting = tuple(each for each in fitting if each.batch == batch)
    able = _reckoned(fitting, batch, share_bytes if at_once else None)
    if not is_barred:
        able.append(_own_undivided(assigned.candidates, batch, share_bytes))
    found = [each for each in able if each is not None]
    if not found:
        raise BackendError(_why_not(batch, fitting, held_bytes, is_barred=is_barred))
    return min(found, key=lambda each: each.time_s)


def _reckoned(fitting: tuple[Candidate, ...], batch: int, at_once_bytes: int | None) -> list[Division | None]:
    """Return the best division by a profile, or two where its kinds of parts may not run side by side.

    Args:
        fitting: candidates.
        batch: samples.
        at_once_bytes: what the buffer and PyTorch's own may take together; None where the buffer makes room.
    """
    best = _looked_up(fitting, batch)
    if best is None or at_once_bytes is None or own_bytes(best) + buffer_bytes(best) <= at_once_bytes:
        return [best]
    kinds = (tuple(each for each in fitting if each.is_own is is_own) for is_own in (True, False))
    return [_looked_up(kind, batch) for kind in kinds]


def _why_not(batch: int, fitting: Iterable[Candidate], held_bytes: int, *, is_barred: bool) -> str:
    """Return why nothing may run so many samples."""
    if is_barred:
        return (
            "of a single sample PyTorch's own does not fit, and nothing else that was measured fits into "
            f"{format_bytes(held_bytes)}"
        )
    sizes = ", ".join(str(size) for size in sorted({each.batch for each in fitting})) or "none"
    samples = "a single sample" if batch == 1 else f"{batch} samples"
    return f"{samples} cannot be made of the sizes that were measured and fit: {sizes}"


def is_unpatched(assigned: Assignment, memory: Memory) -> bool:
    """Return whether a site runs PyTorch's own as it comes, of a single sample, too."""
    single = own_whole(assigned.candidates, 1)
    runs = [assigned.division, *([] if single is None else [Division((single,))])]
    is_barred = _bars_own(assigned, memory.share_bytes(assigned))
    return all(map(memory.room.is_unpatched, runs)) and not is_barred


def _may_use_buffer(assigned: Assignment, share_bytes: int) -> bool:
    """Return whether a site runs something else than PyTorch's own, undivided, of any batch."""
    return not assigned.division.is_own or _bars_own(assigned, share_bytes)


def _looked_up(candidates: tuple[Candidate, ...], batch: int) -> Division | None:
    """Return the best division; by a table that covers more samples, up to a power of two, and is kept."""
    if batch > _MOST_COVERED:  # large ones are not
        return best_of(candidates, batch)
    return _table(candidates, 1 << (batch - 1).bit_length()).division(batch)


@functools.lru_cache(_MOST_TABLES)
def _table(candidates: tuple[Candidate, ...], batch: int) -> ReuseTable:
    """Return the best divisions of all batches up to one; modules of equal profile have them in common."""
    return ReuseTable(candidates, batch)


def _single_bytes(assigned: Assignment, share_bytes: int) -> int:
    """Return what one sample takes within a site's share: by PyTorch's own, else by what takes least.

    Every smaller batch can be made of single samples; 0 if none was measured, or none fits.
    """
    singles = [
        each for each in assigned.candidates if each.batch == 1 and each.workspace_bytes <= share_bytes
    ]
    found = min(singles, key=lambda each: (not each.is_own, each.workspace_bytes), default=None)
    return 0 if found is None else found.workspace_bytes


def _bars_own(assigned: Assignment, share_bytes: int) -> bool:
    """Return whether PyTorch's own may not run of a single sample: it was tried, and does not fit.

    Elsewhere fewer samples need no more. But on processors PyTorch computes a single sample by another
    algorithm than several: 3x64x64x64 with 3x3x3 filters took 81 MiB, two of them 32 (27 and 2.4 of
    64x16x16x16); 32x24x24 with 3x3 filters took 656 KiB, two of them 200.

    Of images that is certain only where several fit as a part: whole batches need less, since a part is
    copied into the result.
    """
    single = own_whole(assigned.candidates, 1)
    if single is not None:
        return single.workspace_bytes > share_bytes
    is_volume = len(assigned.problem.input_size) == 3
    return any(each.is_own and each.batch < assigned.division.batch for each in assigned.candidates) or (
        is_volume and any(each.batch == 1 for each in assigned.candidates)
    )


def _own_undivided(candidates: Sequence[Candidate], batch: int, share_bytes: int) -> Division | None:
    """Return PyTorch's own convolution of so many samples, with the next larger size's time in proportion.

    Fewer samples are taken to need no more workspace, which nothing has weighed, and no less time each: what
    beats this is faster in earnest.
    """
    able = [
        each
        for each in candidates
        if each.is_own and each.batch >= batch and each.workspace_bytes <= share_bytes
    ]
    if not able:
        return None
    next_larger = min(able, key=lambda each: each.batch)
    time_s = next_larger.time_s * batch / next_larger.batch
    return Division((dataclasses.replace(next_larger, batch=batch, time_s=time_s),))


def _cut(division: Division, batch: int) -> Division:
    """Return the first `batch` samples of a division; its last part may become smaller."""
    parts: list[Candidate] = []
    left = batch
    for part in division.parts:
        if left:
            parts.append(dataclasses.replace(part, batch=min(part.batch, left)))
            left -= parts[-1].batch
    return Division(tuple(parts))
