"""What a call is to run within a plan's memory, worked out once for each shape: for modules and functions."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mucudnn.backends import Backend, backend_name, backend_of
from mucudnn.calls import (
    as_autocast,
    autocast_dtype,
    has_its_bias,
    obstacle,
    problem_of,
    without_autocast,
)
from mucudnn.choices import Mode
from mucudnn.division import (
    Division,
    common_buffer_bytes,
    has_room,
    running_sum_bytes,
    tight_limit,
)
from mucudnn.errors import BackendError, OptionError, ProblemError
from mucudnn.functional import DividedConvolution
from mucudnn.modules import Call, padded
from mucudnn.plan import Assignment, Plan
from mucudnn.problem import ConvOp, ConvProblem, problems_of
from mucudnn.profile import Candidate, Environment
from mucudnn.solvers import ReuseTable
from mucudnn.workspace import Owner

_MOST_ROUTES = 256
"""Shapes of which a router remembers what runs them; of more, it works that out again and again."""

Decide = Callable[[Backend, ConvProblem], DividedConvolution | None]
"""Returns what computes a forward pass and its gradients; None for PyTorch's own convolution.

Raises:
    NotNowError: that cannot be decided now.
"""


class NotNowError(Exception):
    """This call is PyTorch's own, and the next one like it is to be asked about again."""


class Route(NamedTuple):
    """What serves calls of one shape.

    Attributes:
        convolution: what runs.
        is_padded: whether the image is padded before.
        dtype: what autocast casts the tensors to; None where there is no autocast.
    """

    convolution: DividedConvolution
    is_padded: bool
    dtype: torch.dtype | None

    def run(self, module: nn.Module | None, call: Call) -> Tensor:
        """Return the convolution of the call."""
        image, weight, bias, settings = call
        if self.dtype is None and not self.is_padded:
            return self.convolution(image, weight, bias)
        if self.dtype is not None:
            image, weight, bias = as_autocast(image, weight, bias, self.dtype)
        with without_autocast(image.device, self.dtype):
            if self.is_padded:
                image, _ = padded(module, Call(image, weight, bias, settings))
            return self.convolution(image, weight, bias)


class Router:
    """Finds what runs the calls of a module, or of functions."""

    def __init__(
        self,
        backends: tuple[str, ...],
        module: nn.Module | None,
        tell_device: Callable[[torch.device], None] | None = None,
    ) -> None:
        """Know of no shape yet.

        Args:
            backends: names of those that serve calls; PyTorch's own convolution serves others.
            module: whose calls they are; None for functions.
            tell_device: is told of each call on a device that is none of theirs.
        """
        self._backends = backends
        self._module = module
        self._tell_device = tell_device
        self._served: dict[torch.device, Backend] = {}
        self._routes: dict[Hashable, Route | None] = {}

    def served(self, call: Call, decide: Decide, needs: Hashable = None) -> Tensor | None:
        """Return the convolution, or None where PyTorch's own serves the call; see `found`."""
        route = self.found(call, decide, needs)
        if route is not None:
            return route.run(self._module, call)
        image = call.image
        if image.dim() == call.weight.dim() - 1 and image.layout is torch.strided:
            result = self.served(call._replace(image=image.unsqueeze(0)), decide, needs)
            return None if result is None else result.squeeze(0)
        return None

    def found(self, call: Call, decide: Decide, needs: Hashable = None) -> Route | None:
        """Return what runs the call, or None for PyTorch's own; that is worked out once for each shape.

        Args:
            call: of a batch.
            decide: is asked for shapes that are not known.
            needs: what else its answer depends on.
        """
        image, weight, bias, settings = call
        device = image.device
        backend = self._served.get(device)  # each look-up, and each function, takes time in every call
        if backend is None:
            backend = self._backend_for(device)
        if backend is None or not (image.layout is weight.layout is torch.strided):
            return None
        dtype = autocast_dtype(device)
        key = (
            image.shape, image.stride(), image.dtype, device, weight.shape, weight.stride(), weight.dtype,
            weight.device, None if bias is None else (bias.shape, bias.dtype, bias.device), dtype,
            backend.flags(), settings, needs,
        )  # fmt: skip
        try:
            return self._routes[key]
        except KeyError:
            pass
        if image.dim() != weight.dim():
            return None
        try:
            route = self._route(backend, call, dtype, decide)
        except NotNowError:
            return None
        self._remember(key, route)
        return route

    def pass_by(self) -> None:
        """Know that PyTorch's own serves a call of which this is not asked."""

    def _backend_for(self, device: torch.device) -> Backend | None:
        """Return the backend that serves a device; None if none of this router's does."""
        name = backend_name(device)
        if name not in self._backends:
            if self._tell_device is not None:
                self._tell_device(device)
            return None
        return self._served.setdefault(device, backend_of(name, device))

    def _route(self, backend: Backend, call: Call, dtype: torch.dtype | None, decide: Decide) -> Route | None:
        """Return what runs such calls, or None for PyTorch's own."""
        image, weight, bias, settings = call
        if dtype is not None:
            image, weight, bias = as_autocast(image, weight, bias, dtype)
        if obstacle(image, weight, bias) is not None:
            return None
        plain = Call(image, weight, bias, settings)
        try:
            image, arguments = padded(self._module, plain)
            problem = problem_of(image, weight, bias is not None, arguments)
        except (OptionError, ProblemError):
            return None  # PyTorch's own says what is wrong, if anything is
        if not has_its_bias(problem, bias):
            return None
        convolution = decide(backend, problem)
        if convolution is None or convolution.is_own:
            return None
        return Route(convolution, image is not plain.image, dtype)

    def _remember(self, key: Hashable, route: Route | None) -> None:
        """Put a route among the others, of which the oldest go when there are many; any thread may do so."""
        while len(self._routes) >= _MOST_ROUTES:
            oldest = next(iter([*self._routes]), None)
            self._routes.pop(oldest, None)
        self._routes[key] = route


class NotingRouter(Router):
    """A router that tells of the calls which something that was decided serves.

    Attributes:
        is_asked: whether there was any call, whoever served it.
        served_problems: the problems of the forward passes of those that were served.
    """

    def __init__(self, like: Router) -> None:
        """Find what `like` finds; know of no shape yet."""
        super().__init__(like._backends, like._module, like._tell_device)
        self.is_asked = False
        self.served_problems: set[ConvProblem] = set()

    def pass_by(self) -> None:
        """Know that there was a call."""
        self.is_asked = True

    def found(self, call: Call, decide: Decide, needs: Hashable = None) -> Route | None:
        """Return what runs the call, and note of what problem that is."""
        self.is_asked = True
        route = super().found(call, decide, needs)
        if route is not None:
            self.served_problems.add(route.convolution.problem)
        return route


@dataclasses.dataclass(frozen=True)
class Memory:
    """How a plan's sites take memory.

    Attributes:
        environment: for which the plan was made.
        own: id of PyTorch's own convolution, which takes its workspace outside of the buffer.
        is_sharing: whether each site owns a buffer, rather than all one in common.
        limit_bytes: of the plan.
        buffer_bytes: what the common buffer may come to.
        capacity_bytes: what it grows to at once.
    """

    environment: Environment
    own: str
    is_sharing: bool
    limit_bytes: int
    buffer_bytes: int
    capacity_bytes: int

    @classmethod
    def of(cls, plan: Plan, own: str, *, is_growing: bool) -> "Memory":
        """Return what `plan` says of memory; where more is tuned later, the buffer may grow to the limit."""
        known = common_buffer_bytes([(each.problem, each.division) for each in plan.assignments], own)
        is_sharing = plan.mode is Mode.SHARING
        return cls(
            environment=plan.environment,
            own=own,
            is_sharing=is_sharing,
            limit_bytes=plan.limit_bytes,
            buffer_bytes=plan.limit_bytes if is_growing else known,
            capacity_bytes=0 if is_sharing else known,
        )

    def has_room(self, division: Division, n_bytes: int) -> bool:
        """Return whether a site of that division may take so much beside the buffer."""
        return has_room(
            n_bytes, division, self.own, self.limit_bytes, self.buffer_bytes, is_sharing=self.is_sharing
        )

    def bound(self, division: Division, sum_bytes: int = 0) -> int | None:
        """Return what buffer and PyTorch's own workspace may take together, or None if they always fit.

        Args:
            division: that is to run.
            sum_bytes: of the sum in which its parts add up.
        """
        return tight_limit(
            division,
            self.own,
            self.limit_bytes,
            self.buffer_bytes,
            is_sharing=self.is_sharing,
            sum_bytes=sum_bytes,
        )


def is_own(division: Division, memory: Memory) -> bool:
    """Return whether a division is PyTorch's own convolution, as it would run anyway."""
    is_plain = division.is_undivided and all(part.algorithm == memory.own for part in division.parts)
    return is_plain and memory.bound(division) is None


def divided(
    backend: Backend,
    problem: ConvProblem,
    assignments: Mapping[ConvOp, Assignment],
    memory: Memory,
    owners: Mapping[ConvOp, Owner] | None = None,
    tell_untuned: Callable[[], None] | None = None,
) -> DividedConvolution:
    """Return what computes a forward pass and its gradients as its sites' assignments have it.

    Args:
        backend: that runs it.
        problem: of the forward pass, of at most the tuned batch.
        assignments: what each op runs; the others run PyTorch's own convolution.
        memory: of the plan.
        owners: of the workspaces, in sharing mode.
        tell_untuned: is told when the weight's gradient is computed; None if nobody wants to know.

    Raises:
        BackendError: the batch cannot be made of sizes that were measured, or its parts are not computed or
            need more than their site may take.
    """
    shares = {
        op: assigned.division.workspace_bytes if memory.is_sharing else memory.limit_bytes
        for op, assigned in assignments.items()
    }
    common_bytes = None if memory.is_sharing else memory.buffer_bytes
    divisions = {
        op: division_for(assigned, problem.batch, backend.own, shares[op], common_bytes)
        for op, assigned in assignments.items()
    }
    problems = problems_of(problem)
    bounds = {
        op: memory.bound(division, running_sum_bytes(problems[op], division))
        for op, division in divisions.items()
    }
    limits = {op: bound for op, bound in bounds.items() if bound is not None}
    result = DividedConvolution(
        backend, problem, divisions, owners, limits, memory.capacity_bytes, tell_untuned
    )
    for op, share_bytes in shares.items():
        if result.buffer_bytes[op] > share_bytes:
            raise BackendError(
                f"{problems[op]} needs {result.buffer_bytes[op]} bytes in parts, and may take {share_bytes}."
            )
    return result


def division_for(
    assigned: Assignment, batch: int, own: str, share_bytes: int, common_bytes: int | None = None
) -> Division:
    """Return what a site runs for a mini-batch of at most the tuned size, without measuring.

    The tuned size runs its division. A smaller one gets the best division by the same profile, within the
    workspace of the site's own, or of a single sample where that takes more, or PyTorch's own convolution
    undivided: where that has won, since it was confirmed and takes less the smaller the batch, and where
    nothing should be faster, going by its time for more samples. A division that comes without a profile is
    cut off at its end.

    Args:
        assigned: the site's division and profile.
        batch: samples, from 1 to the tuned number.
        own: id of PyTorch's own convolution.
        share_bytes: what it may take.
        common_bytes: what the common buffer may come to: others reckon with no more. None if there is none.

    Raises:
        BackendError: the profile's sizes do not add up to the batch, and PyTorch's own takes too much.
    """
    division = assigned.division
    if batch == division.batch:
        return division
    has_own_won = division.is_undivided and division.parts[0].algorithm == own
    if has_own_won or not assigned.candidates:
        return _cut(division, batch)
    single_bytes = _single_bytes(assigned, own, share_bytes)
    limit_bytes = max(division.workspace_bytes, single_bytes)
    held_bytes = limit_bytes if common_bytes is None else min(limit_bytes, common_bytes)
    fitting = [
        each
        for each in assigned.candidates
        if each.workspace_bytes <= (limit_bytes if each.algorithm == own else held_bytes)
        and (each.batch == batch or assigned.problem.running_sum_bytes <= held_bytes)
    ]
    able = [
        ReuseTable(fitting, batch, limit_bytes).division(batch),
        _own_undivided(assigned.candidates, batch, own, share_bytes),
    ]
    found = [each for each in able if each is not None]
    if not found:
        sizes = ", ".join(str(size) for size in sorted({each.batch for each in fitting})) or "none"
        raise BackendError(f"{batch} samples cannot be made of the sizes that were measured and fit: {sizes}")
    return min(found, key=lambda each: each.time_s)


def _single_bytes(assigned: Assignment, own: str, share_bytes: int) -> int:
    """Return what one sample takes within a site's share: by PyTorch's own, else by what takes least.

    Every smaller batch can be made of single samples; 0 if none was measured, or none fits.
    """
    singles = [
        each for each in assigned.candidates if each.batch == 1 and each.workspace_bytes <= share_bytes
    ]
    found = min(singles, key=lambda each: (each.algorithm != own, each.workspace_bytes), default=None)
    return 0 if found is None else found.workspace_bytes


def _own_undivided(
    candidates: Sequence[Candidate], batch: int, own: str, share_bytes: int
) -> Division | None:
    """Return PyTorch's own convolution of so many samples, with the next larger size's time in proportion.

    Fewer samples are taken to need no more workspace, which nothing has weighed, and no less time each: what
    beats this is faster in earnest.
    """
    able = [
        each
        for each in candidates
        if each.algorithm == own and each.batch >= batch and each.workspace_bytes <= share_bytes
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
