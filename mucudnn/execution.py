"""Running a division: one micro-batch after another, in one buffer, on slices of the operands.

The buffer grows to the largest part's need once and is then reused by every part and every layer; after that
nothing is allocated but results (and what PyTorch's own convolution takes by itself). Every thread has
buffers of its own on the processor; on a device all threads that put work on one stream share one.
"""

import dataclasses
import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mucudnn.algorithms import GradientSum
from mucudnn.algorithms.base import ALIGNMENT_BYTES, memory_format
from mucudnn.algorithms.own import operands, result_bytes, unread_operand
from mucudnn.backends import Backend, Job, PartKernel, PartSumKernel, Queue, backend_of
from mucudnn.errors import BackendError
from mucudnn.plan import Division
from mucudnn.problem import ConvOp, ConvProblem, Layout
from mucudnn.profile import Candidate


def sum_dtype(problem: ConvProblem) -> torch.dtype:
    """Return the type in which the weight gradients of parts add up: float32 for 16-bit ones."""
    own: torch.dtype = getattr(torch, problem.dtype)
    return torch.float32 if own.itemsize == 2 else own


class Workspace:
    """One buffer, and the kernels that are bound to it. Serves one queue, and one runner at a time.

    A kernel goes with the runner that it was made for.

    Attributes:
        lock: whoever runs a division holds it, from its first part to its last.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.Lock()
        self._buffer = _bytes(0, device)
        self._touched_bytes = 0
        self._captured: list[Tensor] = []
        self._is_captured = False
        self._slice_kernels: WeakKeyDictionary[_Step, PartKernel] = WeakKeyDictionary()
        self._sum_kernels: WeakKeyDictionary[_Step, PartSumKernel] = WeakKeyDictionary()

    @property
    def n_bytes(self) -> int:
        """Bytes that the buffer takes."""
        return self._buffer.numel()

    def reserve(self, n_bytes: int, capacity_bytes: int = 0) -> None:
        """Make the buffer hold at least `n_bytes`; if it must grow, all kernels are bound anew later.

        Args:
            n_bytes: that are needed now.
            capacity_bytes: what it grows to at once, if it must grow: what later layers are known to need.
        """
        if self._buffer.is_cuda:
            self._is_captured |= torch.cuda.is_current_stream_capturing()
        if n_bytes > self.n_bytes:
            self._grow(max(n_bytes, capacity_bytes))
        storage = self._buffer.untyped_storage()
        if storage.nbytes() < self.n_bytes:
            storage.resize_(self.n_bytes)  # it was given back
        # Host memory is taken page by page, as it is written to; a device's at once.
        taken_bytes = self.n_bytes if self._buffer.is_cuda else n_bytes
        self._touched_bytes = max(self._touched_bytes, taken_bytes)

    def _grow(self, n_bytes: int) -> None:
        device = self._buffer.device
        self._slice_kernels.clear()
        self._sum_kernels.clear()
        if self._is_captured:
            self._captured.append(self._buffer)  # a graph that is replayed works in it still
        self._is_captured = False
        self._buffer = _bytes(0, device)  # the old one goes before the new comes
        self._buffer = _bytes(n_bytes, device)

    def make_room(self, n_bytes: int, limit_bytes: int, backend: Backend) -> None:
        """Let `n_bytes` be taken elsewhere, so that they and what the buffer holds stay within the limit.

        What lies behind in the buffer goes back to the system, and comes again when it is written to. A
        buffer in which a captured graph works stays.
        """
        kept_bytes = max(limit_bytes - n_bytes, 0)
        if self._touched_bytes > kept_bytes and not self._is_captured:
            backend.release(self._buffer[kept_bytes : self._touched_bytes])
            self._touched_bytes = kept_bytes

    def head(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor at the start of the buffer."""
        elements = torch.Size(shape).numel()
        return self._buffer[: elements * dtype.itemsize].view(dtype).view(shape)

    def slice_kernel(self, step: "_Step") -> PartKernel:
        """Return the kernel of a step of fprop or dgrad, bound to this buffer."""
        kernel = self._slice_kernels.get(step)
        if kernel is None:
            with _lasting():
                kernel = step.backend.slice_kernel(step.problem, step.algorithm, self._buffer)
            self._slice_kernels[step] = kernel
        return kernel

    def sum_kernel(self, step: "_Step", skipped_bytes: int) -> PartSumKernel:
        """Return the kernel of a step of wgrad, bound to this buffer behind `skipped_bytes`."""
        kernel = self._sum_kernels.get(step)
        if kernel is None:
            with _lasting():
                kernel = step.backend.sum_kernel(step.problem, step.algorithm, self._buffer[skipped_bytes:])
            self._sum_kernels[step] = kernel
        return kernel


def _bytes(n_bytes: int, device: torch.device) -> Tensor:
    with _lasting():
        return torch.zeros(n_bytes, dtype=torch.uint8, device=device)


def _lasting() -> torch.inference_mode:
    """Have tensors made that can be written to at any time: those of inference mode only inside of it."""
    return torch.inference_mode(mode=False)


class DivisionJob:
    """A division with operands of its own in place, to be weighed in another process."""

    def __init__(self, payload: Mapping[str, object]) -> None:
        """Take the values that `division_job` gave."""
        self._problem = ConvProblem.from_json(cast("Mapping[str, object]", payload["problem"]))
        parts = cast("list[tuple[str, int]]", payload["parts"])
        division = Division(tuple(Candidate(name, batch, 0.0, 0) for name, batch in parts))
        self._device = torch.device(str(payload["device"]))
        backend = backend_of(division.parts[0].algorithm, self._device)
        first, second, bias = operands(self._problem, torch.Generator(self._device), self._device)
        is_fprop = self._problem.op is ConvOp.FPROP
        unread = None if is_fprop else unread_operand(self._problem, self._device)
        self._operands = (first, second, bias, unread)
        self._runner = Runner(backend, self._problem, division)

    @property
    def result_bytes(self) -> int:
        """Bytes of the tensor that `run` returns."""
        return result_bytes(self._problem)

    def run(self) -> Tensor:
        """Run the division in a workspace of its own, which goes with the run."""
        return self._runner(Workspace(self._device), *self._operands)


def division_job(problem: ConvProblem, division: Division, device: torch.device | None = None) -> Job:
    """Return the job that weighs a whole division: its buffer, and whatever else it takes.

    Without a device it runs on the processor.
    """
    parts = [[part.algorithm, part.batch] for part in division.parts]
    payload = {"problem": problem.to_json(), "parts": parts, "device": str(device or torch.device("cpu"))}
    return Job("mucudnn.execution:DivisionJob", payload)


class Owner:
    """Whoever owns a workspace of its own; the workspace goes when its owner goes."""


class _Workspaces:
    """The workspaces of one queue: one that all share, and those that have an owner."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.common = Workspace(device)
        self.owned: WeakKeyDictionary[Owner, Workspace] = WeakKeyDictionary()


_workspaces: WeakKeyDictionary[Queue, _Workspaces] = WeakKeyDictionary()
_making = threading.Lock()


def workspace_of(backend: Backend, owner: Owner | None = None) -> Workspace:
    """Return the workspace of this thread's present queue: the common one, or the one of `owner`.

    In reuse mode all sites share the common one; in sharing mode each site owns its own.
    """
    queue = backend.queue()
    here = _workspaces.get(queue)
    if here is None:
        with _making:
            here = _workspaces.setdefault(queue, _Workspaces(backend.device))
    if owner is None:
        return here.common
    owned = here.owned.get(owner)
    if owned is None:
        with _making:
            owned = here.owned.setdefault(owner, Workspace(here.device))
    return owned


def release_workspaces() -> None:
    """Give back the memory of all workspaces that nobody runs in; they grow anew when needed."""
    _workspaces.clear()


class _Step:
    """One distinct part of a division: kernels are kept by it, so it is compared by identity."""

    def __init__(self, backend: Backend, problem: ConvProblem, algorithm: str) -> None:
        if not backend.computes(problem, algorithm):
            able = ", ".join(backend.algorithms(problem))
            raise BackendError(f"For {problem} the algorithm must be one of {able}, but got {algorithm!r}.")
        self.backend = backend
        self.problem = problem
        self.algorithm = algorithm


class _Part(NamedTuple):
    """What one part runs, and on which samples."""

    step: _Step
    here: slice


class Runner:
    """Runs one division of one problem, again and again."""

    def __init__(
        self,
        backend: Backend,
        problem: ConvProblem,
        division: Division,
        limit_bytes: int | None = None,
        capacity_bytes: int = 0,
    ) -> None:
        """Work out the slices.

        Args:
            backend: that runs the parts.
            problem: of the whole mini-batch.
            division: its parts; PyTorch's own take their workspace outside of the buffer.
            limit_bytes: what the buffer and that workspace may take together; None for no such bound.
            capacity_bytes: what the buffer may grow to at once, since other divisions need it.

        Raises:
            ValueError: the division is of another batch.
            BackendError: one of its algorithms does not compute the problem.
        """
        if division.batch != problem.batch:
            raise ValueError(f"The division must be of {problem.batch} samples, but got {division.batch}.")
        self.problem = problem
        self._backend = backend
        self._groups = _groups(backend, problem, division)
        self.is_own = division.is_undivided and all(self._is_own(group) for group in self._groups)
        self._sum_bytes = _running_sum_bytes(problem, division)
        buffers = [
            backend.buffer_bytes(part.step.problem, part.step.algorithm)
            for part in itertools.chain.from_iterable(self._groups)
        ]
        self.buffer_bytes = self._sum_bytes + max(buffers, default=0)
        owns = [part.workspace_bytes for part in division.parts if part.algorithm == backend.own]
        self._elsewhere_bytes = max(owns, default=0)
        self._limit_bytes = limit_bytes
        self._capacity_bytes = capacity_bytes
        self._second_layout = problem.layout if problem.op is ConvOp.WGRAD else problem.filter_layout

    def __call__(
        self,
        workspace: Workspace,
        first: Tensor,
        second: Tensor,
        bias: Tensor | None = None,
        unread: Tensor | None = None,
    ) -> Tensor:
        """Return y from (x, w), dx from (dy, w), or dw from (x, dy), as the problem's op says.

        Args:
            workspace: of this thread's present queue.
            first: x or dy, of the problem's shape and layout.
            second: w, or dy for wgrad.
            bias: of fprop, shape (k,); None for none.
            unread: x for dgrad, w for wgrad, whatever it holds; without it PyTorch's own makes one.
        """
        with workspace.lock:
            if self._elsewhere_bytes and self._limit_bytes is not None:
                workspace.make_room(self._elsewhere_bytes, self._limit_bytes, self._backend)
            if self.is_own:
                return self._backend.own_convolution(self.problem, first, second, bias, unread)
            first = self._backend.operand(first, self.problem.layout)
            second = self._backend.operand(second, self._second_layout)
            workspace.reserve(self.buffer_bytes, self._capacity_bytes)
            if self.problem.op is ConvOp.WGRAD:
                return self._sum(workspace, first, second, unread)
            return self._slices(workspace, first, second, bias, unread)

    def _is_own(self, group: list[_Part]) -> bool:
        return group[0].step.algorithm == self._backend.own

    def _slices(
        self, workspace: Workspace, image: Tensor, weight: Tensor, bias: Tensor | None, unread: Tensor | None
    ) -> Tensor:
        problem = self.problem
        shape = problem.output_shape if problem.op is ConvOp.FPROP else problem.input_shape
        out = _empty(shape, problem.layout, image)
        for group in self._groups:
            if self._is_own(group):
                self._own_slices(group, image, weight, bias, unread, out)
                continue
            workspace.slice_kernel(group[0].step).prepare(weight)
            for part in group:
                kernel = workspace.slice_kernel(part.step)
                if not kernel.run(image, weight, out, bias, part.here):
                    self._own_slices([self._by_own(part)], image, weight, bias, unread, out)
        return out

    def _sum(self, workspace: Workspace, image: Tensor, gradient: Tensor, unread: Tensor | None) -> Tensor:
        problem = self.problem
        dw = _empty(problem.filter_shape, problem.filter_layout, image)
        total = self._running_sum(workspace) if self._sum_bytes else dw
        for number, group in enumerate(self._groups):
            into = GradientSum(total, number > 0, None if total is dw else dw)
            if self._is_own(group):
                self._own_sum(group, image, gradient, unread, into)
                continue
            for place, part in enumerate(group):
                kernel = workspace.sum_kernel(part.step, self._sum_bytes)
                kernel.add(image, gradient, into, place == 0, part.here)
            if not kernel.finish(into):
                self._own_sum([self._by_own(part) for part in group], image, gradient, unread, into)
        return dw if total is dw else dw.copy_(total)

    def _running_sum(self, workspace: Workspace) -> Tensor:
        """The sum at the start of the buffer, laid out as dw, so that adding runs through both in step."""
        problem = self.problem
        k, c, *taps = problem.filter_shape
        if problem.filter_layout is Layout.CONTIGUOUS:
            return workspace.head((k, c, *taps), sum_dtype(problem))
        return workspace.head((k, *taps, c), sum_dtype(problem)).movedim(-1, 1)

    def _by_own(self, part: _Part) -> _Part:
        """Return a part that PyTorch's own convolution computes: all of its samples at once.

        One sample at a time would take less, but PyTorch may compute a single image by another algorithm,
        which leaves other marks of what is not finite.
        """
        return _Part(_Step(self._backend, part.step.problem, self._backend.own), part.here)

    def _own_slices(
        self,
        parts: list[_Part],
        image: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        unread: Tensor | None,
        out: Tensor,
    ) -> None:
        """Write PyTorch's own convolution of `parts` to their slices of `out`."""
        for step, here in parts:
            ignored = None if unread is None else unread[here]
            out[here].copy_(self._backend.own_convolution(step.problem, image[here], weight, bias, ignored))

    def _own_sum(
        self,
        parts: list[_Part],
        image: Tensor,
        gradient: Tensor,
        unread: Tensor | None,
        into: GradientSum,
    ) -> None:
        """Write the sum of PyTorch's own dw of `parts` to `into`, or add it."""
        for step, here in parts:
            dw = self._backend.own_convolution(step.problem, image[here], gradient[here], None, unread)
            into.take(dw)
            del dw  # before the next one is made
            into = dataclasses.replace(into, accumulate=True)


def _empty(shape: tuple[int, ...], layout: Layout, like: Tensor) -> Tensor:
    order = memory_format(layout, len(shape))
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=order)


def _groups(backend: Backend, problem: ConvProblem, division: Division) -> list[list[_Part]]:
    """The parts of each algorithm, each with the slice of the batch that it covers."""
    groups = []
    start = 0
    parts = _aligned_first(backend, problem, division)
    for algorithm, candidates in itertools.groupby(parts, key=lambda part: part.algorithm):
        steps: dict[int, _Step] = {}
        group = []
        for each in candidates:
            if each.batch not in steps:
                steps[each.batch] = _Step(backend, problem.part(each.batch), algorithm)
            group.append(_Part(steps[each.batch], slice(start, start + each.batch)))
            start += each.batch
        groups.append(group)
    return groups


def _aligned_first(backend: Backend, problem: ConvProblem, division: Division) -> Sequence[Candidate]:
    """The parts in an order in which each starts where its problem says: odd sizes go last."""
    if backend.alignment_bytes == 1:
        return division.parts
    return sorted(division.parts, key=lambda part: -problem.part(part.batch).alignment_bytes)


def _running_sum_bytes(problem: ConvProblem, division: Division) -> int:
    """Bytes of the float32 sum in which 16-bit weight gradients add up; a single part needs none."""
    if division.is_undivided:
        return 0
    return -(-problem.running_sum_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
