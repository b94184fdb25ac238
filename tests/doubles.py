"""A backend whose algorithms, workspaces and times are made up, and whose numbers are right."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from typing import NoReturn, cast

import torch
from torch import Tensor

from mucudnn.algorithms import GradientSum
from mucudnn.algorithms.own import own_convolution, recorded_convolution
from mucudnn.algorithms.packed import Pack, Packed
from mucudnn.backends import Job, PartKernel, PartSumKernel, Queue
from mucudnn.backends.base import Neighbours, NoNeighbours, OnSlices, SumOnSlices
from mucudnn.backends.own import packed_job
from mucudnn.choices import Search
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.profile import Environment, Trial, own_of
from mucudnn.timing import Clock
from tests.worlds import World

MS = 1_000_000
"""Nanoseconds of a millisecond."""

_loads = itertools.count()
"""Another whenever somebody asks: no answer may depend on it."""

Damage = Callable[[ConvProblem, Tensor, Tensor], None]
"""What an algorithm does wrong, to its result or to the memory from its workspace on."""

Nanoseconds = Callable[[int], float]
"""Nanoseconds of a part of so many samples."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A made-up algorithm; for wgrad it needs room for the sum besides.

    Attributes:
        ns: of a part, by its samples.
        sample_bytes: of workspace for each sample of a part.
        setup_ns: once per mini-batch; of nothing at all, a span would hold tens of thousands.
        damage: done after every part.
        harm: done to both operands after every part.
        unforeseen_bytes: what a finished division that has a part of it takes beyond what is declared.
        is_deterministic: whether it gives equal bits in every run.
    """

    ns: Nanoseconds
    sample_bytes: int = 0
    setup_ns: float = 0.1 * MS
    damage: Damage | None = None
    harm: Callable[[Tensor, Tensor], None] | None = None
    unforeseen_bytes: int = 0
    is_deterministic: bool = True


def rate(ns: float) -> Nanoseconds:
    """So many nanoseconds for each sample."""
    return lambda samples: ns * samples


class ScriptedBackend:
    """A device in a world whose clock moves when something runs, and only then.

    Attributes:
        world: with the clock.
        largest_bytes: the most workspace with which anything has run so far.
        weighed: how often something was weighed.
        packed: PyTorch's own in graphs that are frozen; None where it is there as elsewhere.
        is_exact_timed: whether time passes for PyTorch's own in float64: it competes where a model computes
            in that, and elsewhere is the reference alone.
    """

    name = "scripted"
    own = own_of(name)
    device = torch.device("cpu")
    alignment_bytes = 1
    least_span_ns = 50_000
    takes_memory_by_pages = True
    is_capturing = False

    def __init__(
        self,
        recipes: Mapping[str, Recipe],
        own: Recipe | None = None,
        world: World | None = None,
    ) -> None:
        """Offer PyTorch's own convolution, and an algorithm for each recipe.

        Args:
            recipes: by the algorithms' ids without the prefix.
            own: of PyTorch's own; 1 ms and 1000 bytes a sample by default.
            world: in which it all happens.
        """
        self._recipes = {f"scripted:{name}": recipe for name, recipe in recipes.items()}
        self._recipes[self.own] = own or Recipe(rate(MS), sample_bytes=1000)
        self.world = world or World()
        self._queue = Queue()
        self.largest_bytes = 0
        self.weighed = 0
        self.packed: Recipe | None = None
        self.is_exact_timed = False

    @property
    def clock(self) -> Clock:
        return self.world.clock

    def queue(self) -> Queue:
        return self._queue

    def current(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def flags(self) -> Hashable:
        return None

    def operand(self, tensor: Tensor, *_: object) -> Tensor:
        return tensor

    def environment(self) -> Environment:
        conditions = {"load": str(next(_loads))}
        return Environment(self.name, {"name": "made up"}, {"torch": torch.__version__}, {}, conditions)

    def neighbours(self) -> Neighbours:
        return NoNeighbours()

    def algorithms(
        self,
        problem: ConvProblem,
        search: Search = Search.HEURISTIC,
        whole: bool = True,  # in both roles the same
    ) -> tuple[str, ...]:
        return (self.own, *(name for name in self._recipes if name != self.own))

    def computes(self, problem: ConvProblem, algorithm: str) -> bool:
        return algorithm in self._recipes

    def refusal(self, problem: ConvProblem, algorithm: str) -> str | None:
        return None

    def get_ready(self, problem: ConvProblem, algorithm: str) -> None:
        pass

    def declares(self, algorithm: str) -> bool:
        return algorithm != self.own

    def workspace_bytes(self, trial: Trial, limit_bytes: int) -> int | None:
        self.weighed += 1
        needed = self._needed(trial.problem, trial.algorithm)
        if trial.algorithm != self.own:
            return needed
        if needed > limit_bytes:
            # The whole would have to run to be known; of a part, the result alone may be too large.
            return None if trial.whole else needed
        return self._ran(needed)

    def footprint(self, job: Job, limit_bytes: int) -> int | None:
        self.weighed += 1
        problem = ConvProblem.from_json(cast("Mapping[str, object]", job.payload["problem"]))
        if self.packed is not None and job == packed_job(problem):
            needed = self.packed.sample_bytes * problem.batch
            return None if needed > limit_bytes else self._ran(needed)
        parts = cast("list[tuple[str, int]]", job.payload["parts"])
        needed = max(
            self._needed(problem.with_batch(size), name) + self._recipes[name].unforeseen_bytes
            for name, size in parts
        )
        return None if needed > limit_bytes else self._ran(needed)

    def release(self, tail: Tensor) -> None:
        tail.fill_(0xFF)  # whoever reads it afterwards finds no numbers

    def is_deterministic(self, problem: ConvProblem, algorithm: str) -> bool:
        return self._recipes[algorithm].is_deterministic

    def error_bound(self, problem: ConvProblem, algorithm: str) -> float:
        return 1e-5

    def own_convolution(
        self,
        problem: ConvProblem,
        first: Tensor,
        second: Tensor,
        bias: Tensor | None = None,
        unread: Tensor | None = None,
    ) -> Tensor:
        if problem.dtype != "float64" or self.is_exact_timed:
            self.ran(problem, self.own, self._needed(problem, self.own))
        return own_convolution(problem, first, second, bias, unread)

    def packing(self, problem: ConvProblem) -> Pack | None:
        return None if self.packed is None else functools.partial(self._pack, problem, self.packed)

    def _pack(self, problem: ConvProblem, recipe: Recipe, weight: Tensor, bias: Tensor | None) -> Packed:
        def convolve(image: Tensor) -> Tensor:
            self.world.ran.append(f"packed@{problem.batch}")
            self.world.now_ns += round(recipe.ns(problem.batch))
            return recorded_convolution(problem, image, weight, bias)

        return convolve

    def recorded_convolution(
        self, problem: ConvProblem, image: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        result = recorded_convolution(problem, image, weight, bias)
        self.ran(problem, self.own, self._needed(problem, self.own))

        def pass_back(gradient: Tensor) -> None:
            for each in (image, weight):
                if each.requires_grad:
                    self.ran(problem, self.own, self._needed(problem, self.own))

        if result.requires_grad:
            result.register_hook(pass_back)
        return result

    def slice_kernel(self, problem: ConvProblem, algorithm: str, buffer: Tensor) -> PartKernel:
        return OnSlices(_Slices(self, problem, algorithm, buffer))

    def sum_kernel(self, problem: ConvProblem, algorithm: str, buffer: Tensor) -> PartSumKernel:
        return SumOnSlices(_Sum(self, problem, algorithm, buffer))

    def buffer_bytes(self, problem: ConvProblem, algorithm: str) -> int:
        return 0 if algorithm == self.own else self._needed(problem, algorithm)

    def recipe(self, algorithm: str) -> Recipe:
        return self._recipes[algorithm]

    def ran(self, problem: ConvProblem, algorithm: str, n_bytes: int) -> None:
        """Let the time of a part pass, in a workspace of `n_bytes`."""
        self._ran(n_bytes)
        self.world.ran.append(f"{algorithm}@{problem.batch}")
        self.world.now_ns += round(self._recipes[algorithm].ns(problem.batch))

    def _ran(self, n_bytes: int) -> int:
        self.largest_bytes = max(self.largest_bytes, n_bytes)
        return n_bytes

    def _needed(self, problem: ConvProblem, algorithm: str) -> int:
        kept = problem.filter_bytes if problem.op is ConvOp.WGRAD and algorithm != self.own else 0
        return kept + self._recipes[algorithm].sample_bytes * problem.batch


class _Kernel:
    """What both kinds of kernels share: their place, and the time that they take."""

    def __init__(
        self, backend: ScriptedBackend, problem: ConvProblem, algorithm: str, buffer: Tensor
    ) -> None:
        self._backend = backend
        self._problem = problem
        self._algorithm = algorithm
        self._recipe = backend.recipe(algorithm)
        self._needed = backend.buffer_bytes(problem, algorithm)
        self._buffer = buffer
        if buffer.numel() < self._needed:
            raise ValueError(f"The workspace must have {self._needed} bytes, but got {buffer.numel()}.")

    def _compute(self, first: Tensor, second: Tensor, bias: Tensor | None = None) -> Tensor:
        self._backend.ran(self._problem, self._algorithm, self._needed)
        result = own_convolution(self._problem, first, second, bias)
        if self._recipe.harm is not None:
            self._recipe.harm(first, second)
        return result

    def _set_up(self) -> None:
        self._backend.world.now_ns += round(self._recipe.setup_ns)

    def _spoil(self, result: Tensor) -> None:
        if self._recipe.damage is not None:
            storage = torch.empty(0, dtype=torch.uint8).set_(self._buffer.untyped_storage())
            behind = storage[self._buffer.storage_offset() + self._needed :]
            self._recipe.damage(self._problem, result, behind)


class _Slices(_Kernel):
    """fprop and dgrad."""

    def prepare(self, weight: Tensor) -> None:
        self._backend.world.ran.append(f"{self._algorithm} set-up")
        self._set_up()

    def run(self, image: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> bool:
        result = self._compute(image, weight, bias)
        self._spoil(result)
        out.copy_(result)
        return bool(result.isfinite().all())


class _Sum(_Kernel):
    """wgrad; the sum lies at the start of the workspace, where kernels of all sizes find it."""

    def __init__(
        self, backend: ScriptedBackend, problem: ConvProblem, algorithm: str, buffer: Tensor
    ) -> None:
        super().__init__(backend, problem, algorithm, buffer)
        dtype = getattr(torch, problem.sum_dtype)
        n_bytes = torch.Size(problem.filter_shape).numel() * dtype.itemsize
        self._sum = buffer[:n_bytes].view(dtype).view(problem.filter_shape)

    def add(self, image: Tensor, gradient: Tensor, into: GradientSum, first: bool) -> None:
        result = self._compute(image, gradient)
        self._spoil(result)
        if first:
            self._sum.copy_(result)
        else:
            self._sum.add_(result)

    def finish(self, into: GradientSum) -> bool:
        self._set_up()
        if not self._sum.isfinite().all():
            return False
        into.take(self._sum)
        return True


class BreakableBackend(ScriptedBackend):
    """A device whose clock, too, fails once an algorithm has broken it."""

    is_broken = False

    def fail(self, reason: str, *, is_fatal: bool) -> NoReturn:
        """Break the device if that is fatal, and raise in any case."""
        self.is_broken = is_fatal
        raise RuntimeError(reason)

    @property
    def clock(self) -> Clock:
        def read() -> int:
            if self.is_broken:
                raise RuntimeError("an illegal memory access was encountered")
            return self.world.clock()

        return read
