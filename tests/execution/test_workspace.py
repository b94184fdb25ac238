"""What becomes of buffers that captured graphs use; capturing is played here."""

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mucudnn.backends import PartKernel, Queue, backend_of
from mucudnn.backends.cpu.backend import CpuBackend
from mucudnn.division import Division
from mucudnn.errors import BackendWarning
from mucudnn.execution import workspace as room
from mucudnn.execution.runner import Runner
from mucudnn.execution.workspace import Owner, Workspace, release_workspaces, workspace_of
from mucudnn.problem import ConvOp, ConvProblem
from mucudnn.profile import Candidate
from tests.devices import Device
from tests.operands import a_convolution, operands_of

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("few_to_collect")


class Capture:
    """Whether a graph is being captured."""

    is_on = False


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Capture]:
    played = Capture()
    monkeypatch.setattr(CpuBackend, "is_capturing", property(lambda _: played.is_on))
    monkeypatch.setattr(room, "_kept_for_graphs", [])
    yield played
    release_workspaces()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each buffer that is made, but for empty ones."""
    seen: list[int] = []
    make = room._bytes

    def taken(n_bytes: int, device: torch.device) -> Tensor:
        seen.extend([n_bytes] if n_bytes else [])
        return make(n_bytes, device)

    monkeypatch.setattr(room, "_bytes", taken)
    return seen


class Address:
    """Binds the buffer, as a weak reference and its address."""

    def __init__(self) -> None:
        self.seen: weakref.ref[Tensor] | None = None

    def bind(self, buffer: Tensor) -> int:
        self.seen = weakref.ref(buffer)
        return buffer.data_ptr()


def lives(binder: Address) -> bool:
    gc.collect()
    return binder.seen is not None and binder.seen() is not None


def test_a_buffer_goes_when_a_larger_one_comes(capture: Capture) -> None:
    workspace, binder = Workspace(CPU), Address()
    workspace.reserve(100)
    workspace.bound(binder)

    workspace.reserve(200)

    assert not lives(binder)


def of_graphs() -> Workspace:
    return Workspace(CPU, is_for_graphs=True)


def test_a_buffer_that_a_graph_uses_stays_when_a_larger_one_comes(capture: Capture) -> None:
    workspace, binder = of_graphs(), Address()
    workspace.reserve(100)
    workspace.bound(binder)

    workspace.reserve(200)

    assert lives(binder)


def test_what_a_stream_captures_works_in_buffers_in_which_nothing_else_does(capture: Capture) -> None:
    backend, owner = backend_of("cpu:"), Owner()
    eager = workspace_of(backend), workspace_of(backend, owner)
    capture.is_on = True
    captured = workspace_of(backend), workspace_of(backend, owner)
    again = workspace_of(backend), workspace_of(backend, owner)
    capture.is_on = False

    assert again == captured
    assert (workspace_of(backend), workspace_of(backend, owner)) == eager
    assert len({*map(id, (*eager, *captured))}) == 4
    for one, other in zip(eager, captured, strict=True):
        addresses = []
        for workspace in (other, one):
            workspace.reserve(100)
            addresses.append(workspace.bound(Address()))
        assert addresses[0] != addresses[1]


def test_a_signal_handler_that_computes_during_a_capture_has_such_a_buffer_too(capture: Capture) -> None:
    workspace, binder = of_graphs().another(), Address()
    workspace.reserve(100)
    workspace.bound(binder)
    del workspace

    assert lives(binder)


def test_a_buffer_that_a_graph_uses_survives_the_release_of_all_others(capture: Capture) -> None:
    binder = Address()
    capture.is_on = True
    workspace = workspace_of(backend_of("cpu:"))
    workspace.reserve(100)
    workspace.bound(binder)
    capture.is_on = False

    del workspace
    release_workspaces()

    assert lives(binder)


class Kernel:
    """Something that is bound."""


class Kernels:
    """Binds one kernel."""

    def bind(self, buffer: Tensor) -> Kernel:
        return Kernel()


def test_kernels_that_a_graph_was_captured_with_stay_with_it(capture: Capture) -> None:
    workspace, binder = of_graphs(), Kernels()
    workspace.reserve(100)
    kernel = weakref.ref(workspace.bound(binder))

    workspace.reserve(200)
    gc.collect()

    assert kernel() is not None


def test_a_device_gives_back_a_whole_buffer_and_takes_what_is_needed_next(capture: Capture) -> None:
    workspace, backend = Workspace(CPU), Device()
    workspace.reserve(1000)

    workspace.make_room(900, 1000, backend)
    workspace.reserve(50)
    workspace.make_room(900, 1000, backend)  # 50 and 900 fit
    workspace.reserve(500)
    workspace.make_room(900, 1000, backend)

    assert backend.released == [900, 400]


class Watched(Device):
    """Such a device that notes of what sizes other blocks are there while a buffer is given back."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.UntypedStorage]] = []
        self.beside: list[int] = []

    def living(self) -> list[int]:
        return [block.nbytes() for each in self.made if (block := each()) is not None]

    def release(self, tail: Tensor) -> None:
        self.beside += self.living()
        super().release(tail)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    device, take = Watched(), Workspace._another_block

    def noted(workspace: Workspace, n_bytes: int) -> torch.UntypedStorage | None:
        block = take(workspace, n_bytes)
        assert block is not None
        device.made.append(weakref.ref(block))
        return block

    monkeypatch.setattr(Workspace, "_another_block", noted)
    return device


def test_while_a_buffer_is_given_back_there_is_another_block_for_the_result(
    capture: Capture, watched: Watched
) -> None:
    workspace = Workspace(CPU)
    workspace.reserve(1000)

    workspace.make_room(900, 1000, watched, 70)
    workspace.make_room(900, 1000, watched, 80)  # nothing is there to be given back

    assert watched.beside == [70]
    assert watched.living() == []


@pytest.mark.parametrize("op", ConvOp)
def test_pytorchs_own_finds_a_block_for_its_result(capture: Capture, watched: Watched, op: ConvOp) -> None:
    problem = a_convolution(batch=4, op=op)
    runner = Runner(watched, problem, Division((Candidate("cpu:aten", 4, 0.0, 900),)), limit_bytes=1000)
    workspace = Workspace(CPU)
    workspace.reserve(1000)

    result = runner(workspace, *operands_of(problem)[:2])

    assert watched.beside == [result.nbytes]


full_card = pytest.mark.parametrize(
    "failure",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/c10/cuda/CUDACachingAllocator.cpp":1154'),
    ],
    ids=["a card", "a slice of one"],
)
"""What PyTorch's allocator raises where a card has no more memory."""


def refused(failure: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that are asked for from now on, and not given."""
    asked: list[int] = []

    def fail(n_bytes: int, device: torch.device) -> None:
        asked.append(n_bytes)
        raise failure

    monkeypatch.setattr(torch, "UntypedStorage", fail)
    return asked


@full_card
def test_where_there_is_no_memory_for_another_block_the_buffer_is_given_back_all_the_same(
    failure: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace, backend, asked = Workspace(CPU), Device(), refused(failure, monkeypatch)
    for result_bytes in (70, 80):
        workspace.reserve(1000)
        workspace.make_room(900, 1000, backend, result_bytes)

        assert workspace.held_bytes == 0
    assert asked == [70]  # what costs all that the allocator has left over is not tried again


@full_card
def test_where_there_was_no_memory_for_another_block_one_is_tried_again_once_the_buffer_grows(
    failure: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace, backend, asked = Workspace(CPU), Device(), refused(failure, monkeypatch)
    for n_bytes, result_bytes in ((1000, 70), (2000, 80)):
        workspace.reserve(n_bytes)
        workspace.make_room(900, 1000, backend, result_bytes)

    assert asked == [70, 80]


def test_a_device_grows_before_what_does_not_fit_beside_its_block_and_for_nothing_else(
    capture: Capture,
) -> None:
    workspace, backend = Workspace(CPU), Device()

    workspace.make_room(50, 1000, backend, 70, 950)  # just fits beside it
    before = workspace.n_bytes
    workspace.make_room(60, 1000, backend, 70, 950)

    assert (before, workspace.n_bytes, workspace.held_bytes) == (0, 950, 0)
    assert backend.released == [10]  # the end of it, and all goes


def test_a_device_that_has_grown_so_does_not_take_its_block_again_for_the_same(capture: Capture) -> None:
    workspace, backend = Workspace(CPU), Device()

    for _ in range(2):
        workspace.make_room(60, 1000, backend, 70, 950)

    assert backend.released == [10]


def test_what_graphs_use_is_kept_once_however_often_it_is_captured(capture: Capture) -> None:
    workspace, binder = of_graphs(), Address()
    workspace.reserve(64)
    for _ in range(3):
        workspace.bound(binder)

    assert len(room._kept_for_graphs) == 2  # the buffer, and what was made for it


def test_what_graphs_use_does_not_grow_early(capture: Capture) -> None:
    workspace = of_graphs()
    workspace.reserve(100)
    address = workspace.bound(Address())

    workspace.make_room(900, 1000, Device(), 70, 950)

    assert workspace.n_bytes == 100
    assert workspace.bound(Address()) == address


def test_the_processor_grows_when_it_must() -> None:
    workspace = Workspace(CPU)

    workspace.make_room(900, 1000, Pages(), 70, 950)

    assert workspace.n_bytes == 0


@full_card
def test_where_there_is_no_memory_to_grow_early_that_is_not_tried_again_until_it_must_be(
    failure: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    make, is_full = room._bytes, [True]

    def taken(n_bytes: int, device: torch.device) -> Tensor:
        asked.append(n_bytes)
        if is_full[0] and n_bytes:
            raise failure
        return make(n_bytes, device)

    workspace, backend = Workspace(CPU), Device()
    monkeypatch.setattr(room, "_bytes", taken)
    for _ in range(2):
        workspace.make_room(900, 1000, backend, 70, 950)
    is_full[0] = False
    workspace.reserve(950)

    assert [each for each in asked if each] == [950, 950]
    assert workspace.n_bytes == 950


@full_card
def test_where_there_is_memory_for_what_is_needed_alone_the_buffer_has_that(
    failure: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, resize = room._bytes, torch.UntypedStorage.resize_

    def taken(n_bytes: int, device: torch.device) -> Tensor:
        if n_bytes > 500:
            raise failure
        return make(n_bytes, device)

    def resized(storage: torch.UntypedStorage, n_bytes: int) -> None:
        if n_bytes > 300:
            raise failure
        resize(storage, n_bytes)

    workspace, backend = Workspace(CPU), Device()
    monkeypatch.setattr(room, "_bytes", taken)
    monkeypatch.setattr(torch.UntypedStorage, "resize_", resized)

    workspace.reserve(400, 900)
    grown = workspace.n_bytes
    workspace.make_room(900, 1000, backend)
    workspace.reserve(200, 900)

    assert (grown, workspace.held_bytes) == (400, 200)
    with pytest.raises(type(failure)):
        workspace.reserve(600)


def test_a_division_that_takes_both_grows_to_its_own_buffer_alone(capture: Capture) -> None:
    problem, workspace, backend = a_convolution(batch=4), Workspace(CPU), Device()
    needed = backend.buffer_bytes(problem.with_batch(2), "cpu:im2col")
    parts = Candidate("cpu:aten", 2, 0.0, needed), Candidate("cpu:im2col", 2, 0.0, needed)
    runner = Runner(backend, problem, Division(parts), limit_bytes=2 * needed, capacity_bytes=2 * needed)

    runner(workspace, *operands_of(problem))

    assert workspace.n_bytes == needed


@pytest.mark.parametrize(
    ("other", "is_limited"),
    [("cpu:im2col", True), ("cpu:aten", False)],
    ids=["nothing taken elsewhere", "no limit"],
)
def test_a_division_that_makes_no_room_grows_to_what_others_need(other: str, is_limited: bool) -> None:
    problem, workspace, backend = a_convolution(batch=4), Workspace(CPU), CpuBackend()
    needed = backend.buffer_bytes(problem.with_batch(2), "cpu:im2col")
    parts = tuple(Candidate(name, 2, 0.0, needed) for name in (other, "cpu:im2col"))
    limit_bytes = 3 * needed if is_limited else None
    runner = Runner(backend, problem, Division(parts), limit_bytes, capacity_bytes=2 * needed)

    runner(workspace, *operands_of(problem))

    assert workspace.n_bytes == 2 * needed


def test_a_device_makes_room_before_any_part_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, asked, make_room = a_convolution(batch=4), list[bool](), Workspace.make_room

    def noted(workspace: Workspace, *given: Any, is_in_use: bool = False) -> None:
        asked.append(is_in_use)
        make_room(workspace, *given, is_in_use=is_in_use)

    monkeypatch.setattr(Workspace, "make_room", noted)
    parts = Candidate("cpu:im2col", 2, 0.0, 400_000), Candidate("cpu:aten", 2, 0.0, 600_000)
    runner = Runner(Device(), problem, Division(parts), limit_bytes=1_000_000)

    runner(Workspace(CPU), *operands_of(problem))

    assert asked == [False]


def test_the_processor_gives_memory_back_without_a_block_for_the_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workspace = Workspace(CPU)
    workspace.reserve(1000)
    monkeypatch.delattr(Workspace, "_another_block")

    workspace.make_room(900, 1000, Pages(), 70)

    assert workspace.held_bytes == 1000


def test_a_device_takes_a_buffer_back_in_one_piece(capture: Capture, resizes: list[tuple[int, int]]) -> None:
    workspace, backend = Workspace(CPU), Device()
    workspace.reserve(500, 800)
    workspace.make_room(900, 1000, backend)

    workspace.reserve(100, 800)
    workspace.make_room(950, 1000, backend)
    workspace.reserve(100, 900)  # others' layers may need more than there is

    assert [after for _, after in resizes if after] == [800, 800]


def test_what_could_not_be_taken_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace, binder = Workspace(CPU), Address()
    workspace.reserve(100)
    make = room._bytes

    def fail(n_bytes: int, device: torch.device) -> Tensor:
        if n_bytes > 100:
            raise RuntimeError("out of memory")
        return make(n_bytes, device)

    monkeypatch.setattr(room, "_bytes", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        workspace.reserve(1000)

    workspace.reserve(50)

    assert workspace.held_bytes >= 50
    workspace.bound(binder)


def test_what_did_not_come_again_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace, backend = Workspace(CPU), Device()
    workspace.reserve(1000)
    workspace.make_room(1000, 1000, backend)
    workspace.reserve(10)
    resize = torch.UntypedStorage.resize_

    def fail(storage: torch.UntypedStorage, n_bytes: int) -> None:
        if n_bytes > 100:
            raise RuntimeError("out of memory")
        resize(storage, n_bytes)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        workspace.reserve(500)

    workspace.reserve(10)

    assert workspace.held_bytes >= 10


class Pages(CpuBackend):
    """The processor; it notes which bytes it is given back."""

    def __init__(self) -> None:
        super().__init__()
        self.released: list[tuple[int, int]] = []

    def release(self, tail: Tensor) -> None:
        self.released.append((tail.storage_offset(), tail.numel()))


def test_a_new_buffer_counts_as_touched_to_its_end_since_an_allocator_hands_out_used_pages() -> None:
    workspace, backend = Workspace(CPU), Pages()

    workspace.reserve(100, 1000)
    workspace.make_room(900, 1000, backend)
    workspace.make_room(900, 1000, backend)

    assert backend.released == [(100, 900)]


class Locked(CpuBackend):
    """A processor whose kernel takes no pages back."""

    tried = 0

    def release(self, tail: Tensor) -> None:
        self.tried += 1
        raise OSError(22, "locked")


@pytest.mark.parametrize("next_bytes", [50, 1000])
def test_where_pages_are_locked_in_memory_the_whole_buffer_goes(next_bytes: int) -> None:
    workspace, binder = Workspace(CPU), Address()
    workspace.reserve(1000)
    workspace.bound(binder)

    workspace.make_room(900, 1000, Locked())

    assert workspace.n_bytes == 0
    assert not lives(binder)
    workspace.reserve(next_bytes)
    assert workspace.held_bytes == next_bytes


ORDERS = [("cpu:im2col", "cpu:aten"), ("cpu:aten", "cpu:im2col")]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("op", ConvOp)
def test_parts_go_on_in_their_buffer_where_pages_are_locked_in_memory(
    op: ConvOp, order: tuple[str, str], made: list[int]
) -> None:
    problem = a_convolution(batch=4, op=op)
    needed = Locked().buffer_bytes(problem.with_batch(1), "cpu:im2col") + problem.running_sum_bytes
    parts = tuple(Candidate(name, 1, 0.0, needed) for name in order for _ in range(2))
    locked, given, workspace = Locked(), operands_of(problem)[:2], Workspace(CPU)
    expected = Runner(CpuBackend(), problem, Division(parts))(Workspace(CPU), *given)
    runner = Runner(locked, problem, Division(parts), limit_bytes=needed)
    made.clear()

    with pytest.warns(BackendWarning, match="limit does not hold") as told:
        results = [runner(workspace, *given) for _ in range(2)]

    assert (locked.tried, len(told)) == (2, 1)
    assert made == [needed]
    assert all(torch.equal(each, expected) for each in results)


def test_where_pages_are_locked_parts_that_use_no_buffer_have_the_whole_of_it_go() -> None:
    problem, workspace = a_convolution(batch=4), Workspace(CPU)
    parts = tuple(Candidate("cpu:aten", 2, 0.0, 900) for _ in range(2))
    runner = Runner(Locked(), problem, Division(parts), limit_bytes=1000)
    workspace.reserve(1000)

    runner(workspace, *operands_of(problem))

    assert workspace.n_bytes == 0


def test_on_the_processor_the_end_goes_back_once_and_again_when_it_was_touched() -> None:
    workspace, backend = Workspace(CPU), Pages()
    workspace.reserve(1000)

    workspace.make_room(0, 1000, backend)  # all fits
    workspace.make_room(900, 1000, backend)
    workspace.make_room(900, 1000, backend)  # has gone already
    workspace.make_room(950, 1000, backend)
    workspace.reserve(500)
    workspace.make_room(900, 1000, backend)

    assert backend.released == [(100, 900), (50, 50), (100, 400)]


def test_on_the_processor_the_end_stays_until_a_part_needs_its_room() -> None:
    problem, workspace, backend = a_convolution(batch=4), Workspace(CPU), Pages()
    needed = backend.buffer_bytes(problem.with_batch(2), "cpu:im2col")
    parts = Candidate("cpu:im2col", 2, 0.0, needed), Candidate("cpu:aten", 2, 0.0, 1000)
    runner = Runner(backend, problem, Division(parts), limit_bytes=needed)
    workspace.reserve(needed)

    runner(workspace, *operands_of(problem))

    assert backend.released == [(needed - 1000, 1000)]


def test_where_more_is_to_be_taken_than_the_limit_all_of_the_buffer_goes_back() -> None:
    workspace, backend = Workspace(CPU), Pages()
    workspace.reserve(1000)

    workspace.make_room(1100, 1000, backend)

    assert backend.released == [(0, 1000)]


def test_what_a_part_touches_after_room_was_made_for_one_before_it_goes_back_again() -> None:
    problem, workspace, backend = a_convolution(batch=4), Workspace(CPU), Pages()
    needed = backend.buffer_bytes(problem.with_batch(2), "cpu:im2col")
    parts = Candidate("cpu:aten", 2, 0.0, 1000), Candidate("cpu:im2col", 2, 0.0, needed)
    mixed, own = (
        Runner(backend, problem, division, limit_bytes=needed)
        for division in (Division(parts), Division((Candidate("cpu:aten", 4, 0.0, 1000),)))
    )
    mixed(workspace, *operands_of(problem))
    before = [*backend.released]

    own(workspace, *operands_of(problem))

    assert before == [(needed - 1000, 1000)]
    assert backend.released == before * 2


@pytest.mark.parametrize("op", ConvOp)
def test_a_part_has_room_beside_what_a_larger_one_of_its_own_algorithm_has_touched(op: ConvOp) -> None:
    """A single sample may take more elsewhere than several, which PyTorch computes by another algorithm."""
    problem, algorithm, backend = a_convolution(batch=4, op=op), "cpu:onednn_nhwc", Pages()
    three, one = (backend.buffer_bytes(problem.with_batch(size), algorithm) for size in (3, 1))
    limit, elsewhere = three + 1000, three + 1000 - one
    parts = Candidate(algorithm, 3, 0.0, three + 500), Candidate(algorithm, 1, 0.0, one + elsewhere)
    runner, workspace = Runner(backend, problem, Division(parts), limit_bytes=limit), Workspace(CPU)

    for _ in range(2):
        runner(workspace, *operands_of(problem))

    assert backend.released == [(one, three - one)] * 2


class Preparing(CpuBackend):
    """The processor; it notes how often a filter is prepared."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared = 0

    def slice_kernel(self, problem: ConvProblem, algorithm: str, buffer: Tensor) -> PartKernel:
        kernel = super().slice_kernel(problem, algorithm, buffer)

        def prepare(weight: Tensor) -> None:
            self.prepared += 1
            kernel.prepare(weight)

        return SimpleNamespace(prepare=prepare, run=kernel.run, finish=kernel.finish)  # type: ignore[return-value]


@pytest.mark.parametrize("op", [ConvOp.FPROP, ConvOp.DGRAD])
def test_the_filter_is_prepared_once_for_all_parts_of_an_algorithm(op: ConvOp) -> None:
    problem, backend = a_convolution(batch=4, op=op), Preparing()
    division = Division((Candidate("cpu:onednn_nhwc", 1, 0.0, 2**20),) * 4)

    Runner(backend, problem, division)(Workspace(CPU), *operands_of(problem))

    assert backend.prepared == 1


@pytest.mark.parametrize("op", ConvOp)
def test_equal_parts_of_an_algorithm_that_takes_memory_elsewhere_give_nothing_back(op: ConvOp) -> None:
    problem, algorithm, backend = a_convolution(batch=4, op=op), "cpu:onednn_nhwc", Pages()
    needed = backend.buffer_bytes(problem.with_batch(2), algorithm) + problem.running_sum_bytes
    parts = (Candidate(algorithm, 2, 0.0, needed + 500),) * 2
    runner, workspace = Runner(backend, problem, Division(parts), limit_bytes=needed + 500), Workspace(CPU)

    runner(workspace, *operands_of(problem))

    assert backend.released == []


class Streams(CpuBackend):
    """The processor, as if it had streams, of which one is the present one."""

    def __init__(self) -> None:
        super().__init__()
        self.present = Queue()

    def queue(self) -> Queue:
        return self.present


@pytest.mark.parametrize("owner", [None, Owner()], ids=["common", "owned"])
def test_a_buffer_of_graphs_begins_with_what_eager_runs_have_needed_wherever_they_warmed_up(
    capture: Capture, made: list[int], owner: Owner | None
) -> None:
    backend, another = Streams(), Owner()
    queues = {300: Queue(), 100: Queue(), 0: backend.present}
    workspace_of(backend, another).reserve(5000)
    for n_bytes, queue in queues.items():
        backend.present = queue
        workspace_of(backend, owner).reserve(n_bytes, 1000)
    capture.is_on = True
    made.clear()

    for n_bytes in (50, 200, 300):
        workspace_of(backend, owner).reserve(n_bytes, 1000)

    assert made == [300]


def test_a_buffer_of_graphs_that_needs_all_of_what_is_expected_at_once_grows_no_further(
    capture: Capture, made: list[int]
) -> None:
    backend = Streams()
    workspace_of(backend).reserve(300, 1000)
    capture.is_on = True
    made.clear()

    workspace_of(backend).reserve(300, 1000)

    assert made == [300]


class Elsewhere(Streams):
    """Such streams of another device."""

    device = torch.device("meta")


@pytest.mark.parametrize("owner", [None, Owner()], ids=["common", "owned"])
def test_what_another_device_or_another_owner_has_needed_is_not_expected_of_a_buffer_of_graphs(
    capture: Capture, owner: Owner | None
) -> None:
    backend, elsewhere, another = Streams(), Elsewhere(), Owner()
    queues = backend.present, Queue()
    workspace_of(elsewhere, owner).reserve(5000)
    workspace_of(backend, another).reserve(3000)
    backend.present = queues[1]
    workspace_of(backend, owner).reserve(100)
    capture.is_on = True

    assert workspace_of(backend, owner).expected_bytes == 100


def test_what_warm_runs_did_not_need_a_buffer_of_graphs_grows_to_as_any_does(
    capture: Capture, made: list[int]
) -> None:
    backend = Streams()
    workspace_of(backend).reserve(300, 1000)
    capture.is_on = True
    made.clear()

    for n_bytes in (50, 400, 500):
        workspace_of(backend).reserve(n_bytes, 900)

    assert made == [300, 900]


def test_a_block_for_pytorchs_own_is_not_expected_of_a_buffer_of_graphs(
    capture: Capture, made: list[int]
) -> None:
    backend = Device()
    workspace = workspace_of(backend)
    workspace.make_room(60, 1000, backend, 70, 950)
    workspace.reserve(300)
    capture.is_on = True
    made.clear()

    workspace_of(backend).reserve(50)

    assert workspace.n_bytes == 950
    assert made == [300]


def test_where_there_is_no_memory_for_what_is_expected_a_buffer_of_graphs_has_what_it_needs(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, make = Streams(), room._bytes
    workspace_of(backend).reserve(300)
    capture.is_on = True

    def taken(n_bytes: int, device: torch.device) -> Tensor:
        if n_bytes > 200:
            raise torch.OutOfMemoryError
        return make(n_bytes, device)

    monkeypatch.setattr(room, "_bytes", taken)
    workspace_of(backend).reserve(50)

    assert workspace_of(backend).n_bytes == 50


def test_what_a_graph_uses_is_not_given_back_to_make_room(capture: Capture) -> None:
    workspace, backend = of_graphs(), Device()
    workspace.reserve(1000)

    workspace.make_room(900, 1000, backend)

    assert backend.released == []


@pytest.fixture
def resizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """From how many bytes to how many any storage is resized."""
    seen: list[tuple[int, int]] = []
    own = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, n_bytes: int) -> None:
        seen.append((storage.nbytes(), n_bytes))
        own(storage, n_bytes)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize)
    return seen


def test_on_the_processor_the_end_comes_again_where_it_was(resizes: list[tuple[int, int]]) -> None:
    workspace = Workspace(CPU)
    workspace.reserve(1000)
    workspace.make_room(900, 1000, Pages())

    workspace.reserve(1000)

    assert resizes == []


def test_a_device_never_holds_a_buffer_of_two_sizes_at_once(
    capture: Capture, resizes: list[tuple[int, int]]
) -> None:
    workspace, backend = Workspace(CPU), Device()
    workspace.reserve(1000)
    workspace.make_room(900, 1000, backend)

    workspace.reserve(50)
    workspace.reserve(500)

    assert resizes[0] == (1000, 0)
    assert [after for before, after in resizes if before == 0] == [0, 50, 500]
    assert all(before == 0 or after == 0 for before, after in resizes)


def test_what_comes_again_holds_nobodys_filter(capture: Capture) -> None:
    workspace, backend = Workspace(CPU), Device()
    workspace.reserve(1000)
    workspace.make_room(900, 1000, backend)
    workspace.reserve(50)
    workspace.holder = object()

    workspace.reserve(500)

    assert workspace.holder is None


def test_a_buffer_that_a_graph_uses_never_moves(capture: Capture) -> None:
    workspace, backend = of_graphs(), Device()
    workspace.reserve(50)
    captured = workspace.bound(Whole())
    address = captured.data_ptr()

    workspace.make_room(1000, 1000, backend)
    workspace.reserve(500)

    assert (captured.data_ptr(), captured.numel()) == (address, 50)
    assert workspace.bound(Whole()).data_ptr() != address


@pytest.mark.parametrize("op", ConvOp)
def test_buffer_and_elsewhere_are_within_the_limit_on_a_device_from_the_first_run_on(
    capture: Capture, op: ConvOp
) -> None:
    problem = a_convolution(batch=4, op=op)
    parts = Candidate("cpu:aten", 2, 0.0, 600_000), Candidate("cpu:im2col", 2, 0.0, 400_000)
    runner = Runner(Device(), problem, Division(parts), limit_bytes=1_000_000, capacity_bytes=900_000)
    workspace, other = Workspace(CPU), 900_000

    for _ in range(2):
        runner(workspace, *operands_of(problem)[:2])
        assert runner.buffer_bytes <= workspace.bound(Whole()).untyped_storage().nbytes() <= 400_000
        workspace.reserve(other, other)


class Whole:
    """Binds the whole buffer."""

    def bind(self, buffer: Tensor) -> Tensor:
        return buffer
