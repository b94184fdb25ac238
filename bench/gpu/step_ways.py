"""A training step as a call, and ways to run it in a thread."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name that PyTorch's users know it by

from bench.gpu.ground import Ground
from bench.precision import benchmark
from bench.training import perturbed
from bench.workloads import Setting, Workload, operands
from mucudnn import apply
from mucudnn.execution.runner import Runner
from mucudnn.execution.workspace import Workspace
from mucudnn.plan import Plan

Result = TypeVar("Result")


class Step:
    """Forward, loss, backward and update of a network on one batch."""

    def __init__(self, model: nn.Module, images: Tensor, targets: Tensor) -> None:
        """Take a model in training mode, images (n, ...) and classes of all that is scored."""
        self.model = model
        self.images = images
        self._targets = targets
        self._optimiser = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def train(self) -> Tensor:
        """Run the step; return the loss."""
        self._optimiser.zero_grad(set_to_none=True)
        loss = F.cross_entropy(self.model(self.images).float(), self._targets)
        loss.backward()
        self._optimiser.step()
        return loss.detach()

    def differs(self, other: "Step") -> float:
        """Return how far parameters and buffers are from another step's at most, relative, in the 2-norm."""
        states = (step.model.state_dict().values() for step in (self, other))
        pairs = [(one.double(), two.double()) for one, two in zip(*states, strict=True)]
        return max(float((one - two).norm() / max(float(two.norm()), 1e-30)) for one, two in pairs)

    def perturbed(self) -> "Step":
        """Return the step of a copy of the model, each weight of which is off by a rounding of its type."""
        relative = torch.finfo(self.images.dtype).eps
        return Step(perturbed(self.model, seed=1, relative=relative), self.images, self._targets)

    def copy(self, plan: Plan | None = None) -> "Step":
        """Return the step of a copy of the model, which runs as the plan says if there is one."""
        model = copy.deepcopy(self.model)
        return Step(model if plan is None else apply(model, plan), self.images, self._targets)


def step_of(workload: Workload, setting: Setting, device: torch.device) -> Step:
    """Return the step of a fresh network; the same arguments give the same weights, images and classes."""
    model, images = operands(workload, setting, device)
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    with torch.no_grad():
        scores = copy.deepcopy(model)(images[:2])
    shape = (len(images), *scores.shape[2:])
    return Step(model, images, torch.randint(scores.size(1), shape, device=device))


class Room(NamedTuple):
    """Bytes that an op takes beside operands and result, its buffer included.

    Attributes:
        allocated: the most that the allocator gives it.
        used: how much more of the card's memory is in use afterwards, but for a segment of the allocator's in
            which the result would lie alone, and with whatever libraries load. No less than `allocated`, as
            the result's segment may serve the op too. None if nobody tells.
    """

    allocated: int
    used: int | None


_MIB = 2**20


def segment_bytes(n_bytes: int) -> int:
    """Return what PyTorch's allocator asks a card for, for a tensor that finds no room in what it has.

    By c10/cuda/CUDACachingAllocator, unless it was told otherwise: of what is rounded up to 512 bytes, 2 MiB
    up to 1 MiB, 20 MiB below 10 MiB, else multiples of 2 MiB.
    """
    rounded = _multiple(n_bytes, 512)
    if rounded <= _MIB:
        return 2 * _MIB
    return 20 * _MIB if rounded < 10 * _MIB else _multiple(rounded, 2 * _MIB)


def _multiple(n_bytes: int, unit: int) -> int:
    return -(-n_bytes // unit) * unit


@contextlib.contextmanager
def rooms_seen(ground: Ground) -> Iterator[list[Room]]:
    """Note what each op of a patched module takes which runs meanwhile, PyTorch's own in it too.

    That is its buffer, which was there before, and what it is given beside the result. The allocator has
    nothing left over when the op begins.
    """
    taken: list[Room] = []
    run = Runner.__call__
    allocator = ground.allocator

    def weighed(runner: Runner, workspace: Workspace, *args: Any, **kwargs: Any) -> Tensor:
        allocator.settle()
        held_bytes, before_bytes = workspace.held_bytes, allocator.allocated_bytes()
        used_bytes = ground.used_bytes()
        result = run(runner, workspace, *args, **kwargs)
        allocated = held_bytes + allocator.peak_bytes() - before_bytes - result.nbytes
        after_bytes = ground.used_bytes()
        used = None
        if used_bytes is not None and after_bytes is not None:
            used = max(allocated, held_bytes + after_bytes - used_bytes - segment_bytes(result.nbytes))
        taken.append(Room(allocated, used))
        return result

    Runner.__call__ = weighed  # type: ignore[method-assign,assignment]  # for as long as it is looked at
    try:
        yield taken
    finally:
        Runner.__call__ = run  # type: ignore[method-assign]


class Way:
    """One way to train: a step, the thread in which it runs, and PyTorch's flag meanwhile.

    PyTorch keeps for every thread which of cuDNN's plans it has found, with the flag or without it. Ways
    without it are to share a thread: each has its own speed for some seconds, as its processor has, and of
    two equal steps in threads of their own one was seen to be faster by a seventh.
    """

    def __init__(
        self, ground: Ground, step: Step, thread: ThreadPoolExecutor, has_benchmark: bool = False
    ) -> None:
        self.step = step
        self._ground = ground
        self._thread = thread
        self._has_benchmark = has_benchmark

    def run(self, call: Callable[[], Result]) -> Result:
        """Return what `call` returns, in the thread."""
        with benchmark(self._has_benchmark):
            return self._thread.submit(self._in_thread, call).result()

    def __call__(self) -> None:
        """Run the step."""
        self.run(self.step.train)

    def _in_thread(self, call: Callable[[], Result]) -> Result:
        """Autograd would run the backward passes of all ways in one thread of its own."""
        with self._ground.current(), torch.autograd.set_multithreading_enabled(False):
            return call()
