"""A card on paper: the real cuDNN describes, lists and plans; what it would execute is computed here.

The double reads from the descriptors that cuDNN was given what a plan computes, on which strides and with
which beta, and computes that on the addresses of the variant pack. Whatever is described wrongly comes out
wrongly.
"""

import contextlib
import ctypes
import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping, Sequence, Set

import torch
from torch import Tensor

from mucudnn.algorithms.own import own_convolution
from mucudnn.backends import Job, Queue
from mucudnn.backends.cudnn.backend import CudnnBackend
from mucudnn.backends.cudnn.compiler import KernelLaunch
from mucudnn.backends.cudnn.configurations import Rules
from mucudnn.backends.cudnn.constants import Attribute, AttributeType, Kind
from mucudnn.backends.cudnn.devices import device_described
from mucudnn.backends.cudnn.environment import Obstacle
from mucudnn.backends.cudnn.graph import UID_W, UID_X, UID_Y
from mucudnn.backends.cudnn.handles import Handle
from mucudnn.backends.cudnn.library import Library
from mucudnn.backends.cudnn.workshop import Workshop
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.profile import Environment
from tests.cudnn.by_gcc import compiled
from tests.kept import KeptResults

_C_TYPES = {
    AttributeType.INT64: ctypes.c_int64,
    AttributeType.FLOAT: ctypes.c_float,
    AttributeType.DOUBLE: ctypes.c_double,
    AttributeType.VOID_POINTER: ctypes.c_void_p,
    AttributeType.DESCRIPTOR: ctypes.c_void_p,
}
_DTYPES = {0: torch.float32, 1: torch.float64, 2: torch.float16, 9: torch.bfloat16}

_OPERATIONS = {
    Kind.FORWARD: (ConvOp.FPROP, 700),
    Kind.BACKWARD_DATA: (ConvOp.DGRAD, 706),
    Kind.BACKWARD_FILTER: (ConvOp.WGRAD, 712),
}
"""By kind of descriptor, the op and its first attribute: alpha, beta and the convolution follow in order."""


@dataclasses.dataclass(frozen=True)
class Execution:
    """One launch, as the library saw it.

    Attributes:
        op: which of the three.
        beta: 0 or 1.
        addresses: of x, w and y.
        alignment_bytes: which was promised for them.
        workspace: its address.
        workspace_bytes: what the plan declares.
        stream: of the handle.
        handle: its address.
    """

    op: ConvOp
    beta: float
    addresses: Mapping[int, int]
    alignment_bytes: int
    workspace: int | None
    workspace_bytes: int
    stream: int | None
    handle: int | None


@dataclasses.dataclass(frozen=True)
class _Lying:
    """How a tensor lies in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def at(self, address: int) -> Tensor:
        elements = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        memory = (ctypes.c_char * (elements * self.dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=self.dtype).as_strided(self.shape, self.strides)


@dataclasses.dataclass(frozen=True)
class _Planned:
    """What a plan computes, as its descriptors say: they are finalised, so it stays that."""

    problem: ConvProblem
    beta: float
    tensors: Mapping[int, _Lying]
    alignment_bytes: int
    workspace_bytes: int
    operands: Set[int]


class PaperLibrary:
    """The real library, but for handles and executions.

    Attributes:
        card: which must be current whenever cuDNN would ask it.
        executions: in the order in which they came.
        streams: the addresses that handles were set to, in that order.
    """

    def __init__(self, real: Library) -> None:
        self.card: PaperCard | None = None
        self.executions: list[Execution] = []
        self.streams: list[int | None] = []
        self._real = real
        self._kinds: dict[int, int] = {}
        self._attributes: dict[int, dict[int, list[int | float]]] = {}
        self._stream_of: dict[int | None, int | None] = {}
        self._lock = threading.Lock()
        self._results = KeptResults[Tensor](64, 4)
        self._planned: dict[int, _Planned] = {}

    @property
    def library(self) -> Library:
        return dataclasses.replace(
            self._real,
            create_descriptor=self._create,
            destroy_descriptor=self._destroy,
            set_attribute=self._set,
            finalize=self._finalize,
            execute=self._execute,
            create_handle=self._create_handle,
            set_stream=self._set_stream,
        )

    def _create(self, kind: int, slot: int) -> int:
        status = self._real.create_descriptor(kind, slot)
        pointer = ctypes.c_void_p.from_address(slot).value
        if pointer is not None:
            self._kinds[pointer], self._attributes[pointer] = kind, {}
        return status

    def _destroy(self, pointer: int) -> int:
        self._kinds.pop(pointer, None)
        self._attributes.pop(pointer, None)
        self._planned.pop(pointer, None)
        return self._real.destroy_descriptor(pointer)

    def _set(self, pointer: int, name: int, kind: int, count: int, address: int | None) -> int:
        c_type = _C_TYPES.get(AttributeType(kind), ctypes.c_int)
        if kind != AttributeType.CHAR and address is not None:
            self._attributes[pointer][name] = list((c_type * count).from_address(address))
        return self._real.set_attribute(pointer, name, kind, count, address)

    def _create_handle(self, slot: int) -> int:
        with self._lock:
            pointer = 0xC0DE0000 + len(self._stream_of)
            self._stream_of[pointer] = None
        ctypes.c_void_p.from_address(slot).value = pointer
        return 0

    def _set_stream(self, handle: int, stream: int | None) -> int:
        self._stream_of[handle] = stream
        self.streams.append(stream)
        return 0

    def _execute(self, handle: int | None, plan: int, pack: int) -> int:
        self._check_current()
        ids, pointers, (workspace,) = (self._attributes[pack][name] for name in (1000, 1001, 1003))
        addresses = dict(zip(ids, pointers, strict=True))
        planned = self._planned.get(plan) or self._planned.setdefault(plan, self._planned_of(plan))
        assert planned.operands <= self._kinds.keys(), "what a plan refers to lives as long as it"
        declared_bytes, alignment = planned.workspace_bytes, planned.alignment_bytes
        tensors = {uid: lying.at(addresses[uid]) for uid, lying in planned.tensors.items()}
        assert all(address % alignment == 0 for address in addresses.values())
        if declared_bytes:
            ctypes.memset(
                workspace, 0xFF, declared_bytes
            )  # whoever relies on what was there finds no numbers
        op, beta = planned.problem.op, planned.beta
        self._compute(op, beta, planned.problem, tensors)
        execution = Execution(
            op, beta, addresses, alignment, workspace, declared_bytes, self._stream_of.get(handle), handle
        )
        self.executions.append(execution)
        return 0

    def _check_current(self) -> None:
        assert self.card is None or self.card.is_current, "the card is not current"

    def _finalize(self, pointer: int) -> int:
        if self._kinds.get(pointer) in (Kind.HEURISTICS, Kind.EXECUTION_PLAN):
            self._check_current()
        return self._real.finalize(pointer)

    def _operation_of(self, plan: int) -> int:
        pointer = plan
        for name in (401, 300, 1300, 801):  # plan, configuration, engine, graph
            (pointer,) = self._attributes[pointer][name]
        return pointer

    def _workspace_bytes(self, plan: int) -> int:
        value, count = ctypes.c_int64(), ctypes.c_int64()
        addresses = ctypes.addressof(count), ctypes.addressof(value)
        status = self._real.get_attribute(plan, Attribute.PLAN_WORKSPACE, AttributeType.INT64, 1, *addresses)
        self._real.check(status, "Reading a plan's workspace")
        return value.value

    def _tensor_named(self, operation: int, uid: int) -> int:
        children = (pointer for values in self._attributes[operation].values() for pointer in values)
        tensors = (each for each in children if self._kinds.get(each) == Kind.TENSOR)
        return next(each for each in tensors if self._attributes[each][906] == [uid])

    def _planned_of(self, plan: int) -> _Planned:
        operation = self._operation_of(plan)
        op, first = _OPERATIONS[Kind(self._kinds[operation])]
        (alpha,), (beta,), (convolution,) = (
            self._attributes[operation][first + offset] for offset in range(3)
        )
        assert alpha == 1.0
        pointers = {uid: self._tensor_named(operation, uid) for uid in (UID_X, UID_W, UID_Y)}
        tensors = {uid: self._lying(pointer) for uid, pointer in pointers.items()}
        x, w, described = tensors[UID_X].shape, tensors[UID_W].shape, self._attributes[convolution]
        problem = ConvProblem(
            op=op,
            batch=x[0],
            in_channels=x[1],
            out_channels=w[0],
            input_size=x[2:],
            kernel_size=w[2:],
            stride=tuple(described[103]),
            padding=tuple(described[105]),
            dilation=tuple(described[102]),
            groups=x[1] // w[1],
            dtype="float64",
        )
        (alignment,) = self._attributes[pointers[UID_X]][900]
        operands = frozenset({operation, convolution, *pointers.values()})
        return _Planned(problem, beta, tensors, alignment, self._workspace_bytes(plan), operands)

    def _lying(self, tensor: int) -> _Lying:
        described = self._attributes[tensor]
        return _Lying(_DTYPES[described[901][0]], tuple(described[902]), tuple(described[903]))

    def _compute(self, op: ConvOp, beta: float, problem: ConvProblem, tensors: Mapping[int, Tensor]) -> None:
        x, w, y = tensors[UID_X], tensors[UID_W], tensors[UID_Y]
        first, second, out = {ConvOp.FPROP: (x, w, y), ConvOp.DGRAD: (y, w, x), ConvOp.WGRAD: (x, y, w)}[op]
        kind = problem, *((each.dtype, each.stride()) for each in (first, second))
        result = self._results.of(
            kind, (first, second), lambda: own_convolution(problem, first.double(), second.double())
        )
        out.copy_(result + beta * out.double() if beta else result)


class _Here(threading.local):
    is_current = False


class PaperCard:
    """A card whose tensors lie in the host's memory.

    Attributes:
        kind: the name of the card.
        present_stream: the stream on which every thread puts its work.
        rounding: types of which products may be rounded more than that.
        is_capturing: whether that stream is being captured.
    """

    device = torch.device("cpu")
    uses_cudnn = True
    tries_plans = False
    plans_tried = 1
    can_compile = True

    def __init__(self, rules: Rules | None = None, kind: str = "paper") -> None:
        self.kind = kind
        self.rules = rules or Rules()
        self.rounding: set[str] = set()
        self.present_stream = 7
        self.is_capturing = False
        self._here = _Here()
        self._queues: dict[int, Queue] = {}

    def clock(self) -> int:
        return time.perf_counter_ns()

    def runs_cudnn(self, problem: ConvProblem) -> bool:
        return True

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        before, self._here.is_current = self._here.is_current, True
        yield
        self._here.is_current = before

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is inside of `current`."""
        return self._here.is_current

    def stream(self) -> int:
        return self.present_stream

    def queue(self) -> Queue:
        return self._queues.setdefault(self.present_stream, Queue())

    def handle(self, library: Library) -> Handle:
        return Handle(library)

    def compiled(self, source: str, kernel: str) -> KernelLaunch:
        assert self.is_current
        run = compiled(source, kernel)

        def launch(stream: int, blocks: int, threads: int, arguments: Sequence[int]) -> None:
            assert self.is_current
            assert stream == self.stream()
            run(stream, blocks, threads, arguments)

        return launch

    def obstacle_to_products(self, dtype: str) -> Obstacle | None:
        return Obstacle("products", f"{dtype} may be rounded") if dtype in self.rounding else None

    def environment(self, cudnn_version: int | None) -> Environment:
        return Environment("cudnn", {"name": self.kind}, {"cuDNN": str(cudnn_version)}, {})

    def weigh(self, job: Job, limit_bytes: int) -> int | None:
        job.prepare().run()
        return 0

    @contextlib.contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        before, self.present_stream = self.present_stream, stream
        yield
        self.present_stream = before


def paper_backend(paper: PaperLibrary, card: PaperCard | None = None) -> CudnnBackend:
    """Return the backend for a described H200 whose executions `paper` computes."""
    card = paper.card = card or PaperCard()
    return CudnnBackend(card, Workshop(paper.library, card, device_described("h200")))
