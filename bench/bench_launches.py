"""What a division on cuDNN costs the host in Python and cuDNN's descriptors, so no GPU need be there.

Operators of a few microseconds wait for the host, not for the card: whatever is spent here is added to them.
cuDNN is the real one and plans for a described H200. Left out are the execution itself, asking CUDA for
the present device and stream, and its allocator: operands lie in the host's memory. They are the same in
every call, as they mostly are in training.
"""

import ctypes
import dataclasses
from contextlib import nullcontext

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from mucudnn.backends import Queue
from mucudnn.backends.cudnn.backend import CudnnBackend
from mucudnn.backends.cudnn.card import TorchCard
from mucudnn.backends.cudnn.configurations import Rules
from mucudnn.backends.cudnn.devices import device_described
from mucudnn.backends.cudnn.handles import Handle
from mucudnn.backends.cudnn.library import Library, load_library
from mucudnn.backends.cudnn.workshop import Workshop
from mucudnn.division import Division
from mucudnn.execution.runner import Runner
from mucudnn.execution.workspace import Workspace
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.profile import Candidate

BATCH = 8


class NoCard(TorchCard):
    """What the backend asks of a card while it runs, where there is none."""

    device = torch.device("cpu")
    rules = Rules(allow_tf32=False)
    can_compile = False
    is_capturing = False
    uses_cudnn = True

    def __init__(self) -> None:
        self._queue = Queue()

    def current(self) -> nullcontext[None]:
        """It is."""
        return nullcontext()

    def stream(self) -> int:
        """CUDA's default stream."""
        return 0

    def queue(self) -> Queue:
        """There is one."""
        return self._queue

    def handle(self, library: Library) -> Handle:
        """Return what stands for a handle."""
        return Handle(library)


def _create_handle(slot: int) -> int:
    ctypes.c_void_p.from_address(slot).value = 1
    return 0


def a_backend() -> CudnnBackend:
    """Return the backend on cuDNN, but for handles and executions."""
    card = NoCard()
    library = dataclasses.replace(
        load_library(), create_handle=_create_handle, set_stream=lambda *_: 0, execute=lambda *_: 0
    )
    return CudnnBackend(card, Workshop(library, card, device_described("h200")))


def operands(problem: ConvProblem) -> tuple[Tensor, Tensor]:
    """Return x and w, dy and w, or x and dy."""
    x, w, y = (
        torch.randn(shape) for shape in (problem.input_shape, problem.filter_shape, problem.output_shape)
    )
    return {ConvOp.FPROP: (x, w), ConvOp.DGRAD: (y, w), ConvOp.WGRAD: (x, y)}[problem.op]


@pytest.mark.parametrize("parts", [1, 4, 8])
@pytest.mark.parametrize("op", ConvOp)
def test_division_but_for_the_card(op: ConvOp, parts: int, benchmark: BenchmarkFixture) -> None:
    """Time a division in so many parts, by the first engine on cuDNN's list."""
    benchmark.group = f"{op} on cuDNN, but for the card"
    torch.set_num_threads(1)
    problem = ConvProblem(
        op=op, batch=BATCH, in_channels=4, out_channels=4, input_size=(8, 8), kernel_size=(3, 3),
        stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1, dtype="float32",
    )  # fmt: skip
    backend = a_backend()
    each = Candidate(backend.algorithms(problem)[1], BATCH // parts, 0.0, 0)
    runner = Runner(backend, problem, Division((each,) * parts))
    first, second = operands(problem)
    benchmark.pedantic(  # type: ignore[no-untyped-call]  # not in the library's hints
        runner, (Workspace(backend.device), first, second), iterations=200, rounds=100, warmup_rounds=5
    )
