"""What is launched, and on what: addresses, betas, workspaces, streams and threads, as a double sees it."""

import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mucudnn.algorithms import GradientSum
from mucudnn.backends.cudnn.backend import CudnnBackend
from mucudnn.backends.cudnn.constants import Attribute, Kind
from mucudnn.backends.cudnn.graph import UID_W, UID_X, UID_Y
from mucudnn.backends.cudnn.launch import Packs
from mucudnn.backends.cudnn.library import CudnnError, Library
from mucudnn.choices import Search
from mucudnn.division import Division
from mucudnn.errors import BackendError
from mucudnn.execution.runner import Runner
from mucudnn.execution.workspace import Workspace
from mucudnn.problem import ConvOp, ConvProblem, Layout
from mucudnn.profile import Candidate, Trial
from tests.cudnn.paper import PaperCard, PaperLibrary, paper_backend
from tests.operands import a_convolution, operands_of, reference, relative_error, small_integers

pytestmark = [pytest.mark.deviceless, pytest.mark.usefixtures("one_thread")]

CPU = torch.device("cpu")
SIZES = (4, 8, 1)
"""Uneven parts, of which the first to run are those that keep every later start aligned."""


@pytest.fixture
def paper(library: Library) -> PaperLibrary:
    return PaperLibrary(library)


@pytest.fixture
def card() -> PaperCard:
    return PaperCard()


@pytest.fixture
def backend(paper: PaperLibrary, card: PaperCard) -> CudnnBackend:
    return paper_backend(paper, card)


def conv(op: ConvOp = ConvOp.FPROP, **changes: object) -> ConvProblem:
    return a_convolution(**{"op": op, "batch": 13, "in_channels": 8, "out_channels": 8, **changes})


def first_engine(backend: CudnnBackend, problem: ConvProblem, *, with_workspace: bool = False) -> str:
    """The first engine that computes parts of all sizes, if so wished with a workspace of its own."""
    whole = backend.algorithms(problem)[1:]
    return next(
        name
        for name in whole
        if all(backend.computes(problem.part(size), name) for size in SIZES)
        and (not with_workspace or backend.buffer_bytes(problem.part(8), name) > 0)
    )


def divided(backend: CudnnBackend, problem: ConvProblem, algorithm: str, *sizes: int) -> Runner:
    parts = tuple(Candidate(algorithm, size, 0.0, 0) for size in sizes or SIZES)
    return Runner(backend, problem, Division(parts))


@pytest.mark.parametrize("op", ConvOp)
def test_a_plan_that_takes_more_than_was_declared_is_refused(backend: CudnnBackend, op: ConvOp) -> None:
    problem = conv(op)
    name = first_engine(backend, problem, with_workspace=True)
    workshop = backend._engines._workshop
    assert workshop is not None
    found = workshop.configuration(problem, name)
    modest = dataclasses.replace(found, overwriting_bytes=found.workspace_bytes - 1, accumulating_bytes=None)
    kernel = workshop.sum_kernel if op is ConvOp.WGRAD else workshop.kernel

    buffer = torch.empty(found.workspace_bytes, dtype=torch.uint8)
    kernel(problem, found, buffer)
    with pytest.raises(BackendError, match=r"must take at most what its configuration declares, \d+ bytes"):
        kernel(problem, modest, buffer)


class Whole:
    """Binds the whole buffer."""

    def bind(self, buffer: Tensor) -> Tensor:
        return buffer


def workspace() -> Workspace:
    return Workspace(CPU)


@pytest.mark.parametrize("op", [ConvOp.FPROP, ConvOp.DGRAD])
def test_each_part_is_launched_at_the_start_of_its_samples(
    backend: CudnnBackend, paper: PaperLibrary, op: ConvOp
) -> None:
    problem = conv(op)
    first, second, _ = operands_of(problem)

    result = divided(backend, problem, first_engine(backend, problem))(workspace(), first, second)

    starts = [0, 4, 12]
    uid_in, uid_out = (UID_X, UID_Y) if op is ConvOp.FPROP else (UID_Y, UID_X)
    assert [each.addresses[uid_in] for each in paper.executions] == [first[n].data_ptr() for n in starts]
    assert [each.addresses[uid_out] for each in paper.executions] == [result[n].data_ptr() for n in starts]
    assert {each.addresses[UID_W] for each in paper.executions} == {second.data_ptr()}


@pytest.mark.parametrize("op", ConvOp)
def test_a_signal_handler_may_launch_the_plan_that_it_interrupts(
    paper: PaperLibrary, card: PaperCard, op: ConvOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute, armed = paper._execute, [False]

    def interrupted(*arguments: Any) -> int:
        if armed[0]:
            armed[0] = False
            signal.raise_signal(signal.SIGUSR1)
        return execute(*arguments)

    monkeypatch.setattr(paper, "_execute", interrupted)
    backend, problem = paper_backend(paper, card), conv(op)
    runner = divided(backend, problem, first_engine(backend, problem))
    operands, others = operands_of(problem)[:2], operands_of(problem, seed=7)[:2]
    room = workspace()
    expected, expected_inside = runner(room, *operands), runner(room, *others)
    inside: list[Tensor] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: inside.append(runner(room, *others)))
    try:
        armed[0] = True
        result = runner(room, *operands)
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert torch.equal(result, expected)
    assert [torch.equal(each, expected_inside) for each in inside] == [True]


def test_a_weight_gradient_reads_its_samples_of_both_operands(
    backend: CudnnBackend, paper: PaperLibrary
) -> None:
    problem = conv(ConvOp.WGRAD)
    image, gradient, _ = operands_of(problem)

    dw = divided(backend, problem, first_engine(backend, problem))(workspace(), image, gradient)

    starts = [0, 4, 12]
    assert [each.addresses[UID_X] for each in paper.executions] == [image[n].data_ptr() for n in starts]
    assert [each.addresses[UID_Y] for each in paper.executions] == [gradient[n].data_ptr() for n in starts]
    assert {each.addresses[UID_W] for each in paper.executions} == {dw.data_ptr()}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_first_part_overwrites_the_gradient_and_the_others_add_to_it(
    backend: CudnnBackend, paper: PaperLibrary, dtype: str
) -> None:
    problem = conv(ConvOp.WGRAD, dtype=dtype)

    divided(backend, problem, first_engine(backend, problem))(workspace(), *operands_of(problem)[:2])

    assert [each.beta for each in paper.executions] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("op", [ConvOp.FPROP, ConvOp.DGRAD])
def test_parts_of_disjoint_results_all_overwrite(
    backend: CudnnBackend, paper: PaperLibrary, op: ConvOp
) -> None:
    problem = conv(op)

    divided(backend, problem, first_engine(backend, problem))(workspace(), *operands_of(problem)[:2])

    assert [each.beta for each in paper.executions] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_16_bit_gradient_is_written_apart_and_summed_in_32_bits(
    backend: CudnnBackend, paper: PaperLibrary, dtype: str
) -> None:
    problem = conv(ConvOp.WGRAD, dtype=dtype)
    image, gradient, _ = operands_of(problem, small_integers)
    where = workspace()

    dw = divided(backend, problem, first_engine(backend, problem))(where, image, gradient)

    # The result itself, of no use before the end, is where the parts are written: no scratch is allocated.
    assert {each.addresses[UID_W] for each in paper.executions} == {dw.data_ptr()}
    assert [each.beta for each in paper.executions] == [0.0, 0.0, 0.0]
    total = (
        where.bound(Whole())[: 4 * math.prod(problem.filter_shape)]
        .view(torch.float32)
        .view(problem.filter_shape)
    )
    assert torch.equal(total.double(), reference(problem, image, gradient))
    assert torch.equal(dw, total.to(dw.dtype))


def test_a_16_bit_gradient_of_one_part_needs_no_sum(backend: CudnnBackend) -> None:
    problem = conv(ConvOp.WGRAD, dtype="bfloat16")
    runner = divided(backend, problem, first_engine(backend, problem), 13)

    assert runner.buffer_bytes == backend.buffer_bytes(problem, first_engine(backend, problem))


def test_another_algorithms_parts_add_to_what_the_first_ones_left(
    backend: CudnnBackend, paper: PaperLibrary
) -> None:
    problem = conv(ConvOp.WGRAD)
    one, other = [
        name
        for name in backend.algorithms(problem)[1:]
        if backend.computes(problem.part(8), name) and backend.computes(problem.part(5), name)
    ][:2]
    image, gradient, _ = operands_of(problem, small_integers)
    division = Division((Candidate(one, 8, 0.0, 0), Candidate(other, 5, 0.0, 0)))

    dw = Runner(backend, problem, division)(workspace(), image, gradient)

    assert [each.beta for each in paper.executions] == [0.0, 1.0]
    assert torch.equal(dw.double(), reference(problem, image, gradient))


@pytest.mark.parametrize("op", ConvOp)
def test_a_launch_gets_at_least_the_workspace_that_its_plan_declares_inside_the_buffer(
    backend: CudnnBackend, paper: PaperLibrary, op: ConvOp
) -> None:
    problem = conv(op)
    runner, where = (
        divided(backend, problem, first_engine(backend, problem, with_workspace=True)),
        workspace(),
    )

    runner(where, *operands_of(problem)[:2])

    start = where.bound(Whole()).data_ptr()
    assert where.n_bytes == runner.buffer_bytes
    declared = [each for each in paper.executions if each.workspace_bytes]
    assert declared
    for each in declared:
        assert each.workspace is not None
        assert start <= each.workspace <= start + runner.buffer_bytes - each.workspace_bytes


def test_a_buffer_that_is_too_small_is_refused_before_anything_runs(
    backend: CudnnBackend, paper: PaperLibrary
) -> None:
    problem = conv()
    name = first_engine(backend, problem, with_workspace=True)
    needed = backend.buffer_bytes(problem, name)

    with pytest.raises(BackendError, match=f"at least {needed} bytes, but got {needed - 1}"):
        backend.slice_kernel(problem, name, torch.empty(needed - 1, dtype=torch.uint8))
    assert paper.executions == []


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("op", ConvOp)
def test_a_division_computes_what_the_whole_does(
    backend: CudnnBackend, op: ConvOp, dtype: str, layout: Layout
) -> None:
    bias = op is ConvOp.FPROP
    problem = conv(op, dtype=dtype, layout=layout, filter_layout=layout, bias=bias)
    operands = operands_of(problem)

    result = divided(backend, problem, first_engine(backend, problem))(workspace(), *operands)

    bound = {"float64": 1e-14, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    assert relative_error(result, reference(problem, *operands)) <= bound
    assert result.dtype is getattr(torch, dtype)


SHAPES = {
    "groups": {"groups": 4},
    "depthwise": {"groups": 8},
    "stride and dilation": {"stride": (2, 1), "dilation": (1, 2)},
    "filter in the other layout": {"layout": Layout.CHANNELS_LAST},
    "1x1 in channels-last": {
        "kernel_size": (1, 1), "padding": (0, 0),
        "layout": Layout.CHANNELS_LAST, "filter_layout": Layout.CONTIGUOUS,
    },
    "one dimension": {
        "input_size": (24,), "kernel_size": (3,), "stride": (1,), "padding": (1,), "dilation": (1,)
    },
    "three dimensions": {
        "input_size": (4, 6, 6), "kernel_size": (3, 3, 3), "stride": (1, 1, 1),
        "padding": (1, 1, 1), "dilation": (1, 1, 1),
    },
}  # fmt: skip


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("op", ConvOp)
def test_every_shape_is_described_as_it_lies_in_memory(
    backend: CudnnBackend, op: ConvOp, changes: dict[str, object]
) -> None:
    problem = conv(op, **changes)
    first, second, _ = operands_of(problem, small_integers)

    result = divided(backend, problem, first_engine(backend, problem))(workspace(), first, second)

    assert torch.equal(result.double(), reference(problem, first, second))


def test_parts_of_odd_sizes_start_as_aligned_as_their_plans_were_told(
    backend: CudnnBackend, paper: PaperLibrary
) -> None:
    problem = conv(in_channels=3, out_channels=5, input_size=(5, 5), dtype="bfloat16")
    name = first_engine(backend, problem)

    divided(backend, problem, name, 1, 8, 4)(workspace(), *operands_of(problem)[:2])

    assert [each.alignment_bytes for each in paper.executions] == [16, 8, 2]


def test_an_operand_that_starts_off_alignment_is_copied_to_where_it_may_be_read(
    backend: CudnnBackend, paper: PaperLibrary
) -> None:
    problem = conv()
    image, weight, _ = operands_of(problem, small_integers)
    shifted = torch.empty(image.numel() + 1)[1:].view_as(image).copy_(image)
    assert shifted.data_ptr() % 16 == 4

    result = divided(backend, problem, first_engine(backend, problem))(workspace(), shifted, weight)

    assert torch.equal(result.double(), reference(problem, image, weight))
    assert all(each.addresses[UID_X] != shifted.data_ptr() for each in paper.executions)


@pytest.mark.parametrize(
    "change", [Tensor.double, Tensor.bfloat16, lambda tensor: tensor[1:], lambda tensor: tensor.to("meta")]
)
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("op", ConvOp)
def test_what_is_no_such_operand_is_refused_before_anything_is_launched(
    backend: CudnnBackend, paper: PaperLibrary, op: ConvOp, place: int, change: Callable[[Tensor], Tensor]
) -> None:
    problem = conv().with_op(op)
    operands = list(operands_of(problem)[:2])
    operands[place] = change(operands[place])
    run = divided(backend, problem, first_engine(backend, problem))

    with pytest.raises(BackendError, match="is needed, but got one of"):
        run(workspace(), *operands)
    assert not paper.executions


@pytest.mark.parametrize("op", ConvOp)
def test_values_that_do_not_lie_in_memory_as_they_are_read_are_copied(
    backend: CudnnBackend, paper: PaperLibrary, op: ConvOp
) -> None:
    problem = conv().with_op(op)
    first, second, _ = operands_of(problem, small_integers)
    negative = torch._neg_view(-first)
    nothing = torch._efficientzerotensor(first.shape, dtype=first.dtype, device=first.device)
    run = divided(backend, problem, first_engine(backend, problem))

    assert torch.equal(run(workspace(), negative, second).double(), reference(problem, first, second))
    assert not run(workspace(), nothing, second).any()
    assert paper.executions


def test_an_address_off_alignment_is_never_launched(backend: CudnnBackend, paper: PaperLibrary) -> None:
    problem = conv()
    image, weight, _ = operands_of(problem)
    out = torch.empty(problem.output_shape)
    kernel = backend.slice_kernel(
        problem, first_engine(backend, problem), torch.empty(2**24, dtype=torch.uint8)
    )
    shifted = torch.empty(image.numel() + 1)[1:].view_as(image)

    with pytest.raises(BackendError, match=r"must lie at multiples of 16 bytes, but got the addresses 0x"):
        kernel.run(shifted, weight, out, None, slice(0, 13))
    assert paper.executions == []


def test_a_handle_is_told_its_stream_only_when_that_changes(
    backend: CudnnBackend, paper: PaperLibrary, card: PaperCard
) -> None:
    problem = conv()
    runner, operands = divided(backend, problem, first_engine(backend, problem)), operands_of(problem)[:2]

    runner(workspace(), *operands)
    with card.on_stream(9):
        runner(workspace(), *operands)
    runner(workspace(), *operands)

    assert paper.streams == [7, 9, 7]
    assert [each.stream for each in paper.executions] == [7] * 3 + [9] * 3 + [7] * 3


def test_every_thread_has_a_handle_of_its_own(backend: CudnnBackend, paper: PaperLibrary) -> None:
    problem = conv()
    runner, operands = divided(backend, problem, first_engine(backend, problem)), operands_of(problem)[:2]
    barrier = threading.Barrier(3)

    def run(_: int) -> None:
        barrier.wait(timeout=60)
        runner(workspace(), *operands)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, range(3)))

    assert len({each.handle for each in paper.executions}) == 3
    assert len(paper.executions) == 9


def test_threads_on_one_stream_share_a_queue_and_streams_do_not(
    backend: CudnnBackend, card: PaperCard
) -> None:
    here = backend.queue()
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(backend.queue).result()
    with card.on_stream(9):
        elsewhere = backend.queue()

    assert there is here
    assert elsewhere is not here


class NoTorch(TorchDispatchMode):
    """Inside, whoever calls an operation of torch fails."""

    def __torch_dispatch__(
        self, func: object, types: object, args: object = (), kwargs: object = None
    ) -> object:
        raise AssertionError(f"{func} was called.")


@pytest.mark.parametrize("op", ConvOp)
def test_a_launch_calls_no_operation_of_torch_and_so_allocates_no_memory(
    paper: PaperLibrary, op: ConvOp
) -> None:
    launches: list[int] = []
    paper._execute = lambda _handle, plan, _pack: launches.append(plan) or 0  # type: ignore[method-assign]
    backend, problem = paper_backend(paper), conv(op)
    first, second, _ = operands_of(problem)
    name, buffer = first_engine(backend, problem), torch.empty(2**24, dtype=torch.uint8)
    here = slice(0, 13)
    if op is ConvOp.WGRAD:
        into = GradientSum(torch.empty(problem.filter_shape))
        add = backend.sum_kernel(problem, name, buffer)
        with backend.current(), NoTorch():
            add.add(first, second, into, first=True, here=here)
            add.add(first, second, into, first=False, here=here)
    else:
        out = torch.empty(problem.output_shape if op is ConvOp.FPROP else problem.input_shape)
        kernel = backend.slice_kernel(problem, name, buffer)
        with backend.current(), NoTorch():
            kernel.run(first, second, out, None, here)
            kernel.run(first, second, out, None, here)

    assert len(launches) == 2


@pytest.fixture
def destroyed(paper: PaperLibrary, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Descriptors that cuDNN has destroyed, as far as they are variant packs."""
    seen: list[int] = []
    destroy = paper._destroy

    def noted(pointer: int) -> int:
        if paper._kinds.get(pointer) == Kind.VARIANT_PACK:
            seen.append(pointer)
        return destroy(pointer)

    monkeypatch.setattr(paper, "_destroy", noted)
    return seen


def _packs_of(paper: PaperLibrary) -> list[int]:
    return [pointer for pointer, kind in paper._kinds.items() if kind == Kind.VARIANT_PACK]


def test_a_refused_launch_says_what_cudnn_said(paper: PaperLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "_execute", lambda *_: 5000)
    backend, problem = paper_backend(paper), conv()
    runner = divided(backend, problem, first_engine(backend, problem))

    with pytest.raises(CudnnError, match=r"Launching a convolution must succeed, but cuDNN gave .*\(5000\)"):
        runner(workspace(), *operands_of(problem)[:2])


@pytest.mark.parametrize("attribute", [Attribute.PACK_IDS, Attribute.PACK_POINTERS, Attribute.PACK_WORKSPACE])
def test_a_refused_pack_is_an_error_and_is_not_left_behind(
    paper: PaperLibrary, destroyed: list[int], monkeypatch: pytest.MonkeyPatch, attribute: Attribute
) -> None:
    told = paper._set
    monkeypatch.setattr(
        paper, "_set", lambda pointer, name, *rest: 2000 if name == attribute else told(pointer, name, *rest)
    )
    pack_of = Packs(paper.library).of_a_plan()

    with pytest.raises(
        CudnnError, match=r"Setting attribute pack .* must succeed, but cuDNN gave .*\(2000\)"
    ):
        pack_of(16, 32, 48, 0)

    assert len(destroyed) == 1
    assert _packs_of(paper) == []
    assert paper.executions == []


def test_the_packs_of_the_last_addresses_are_kept_and_others_destroyed(
    paper: PaperLibrary, destroyed: list[int]
) -> None:
    pack_of = Packs(paper.library, most=2).of_a_plan()

    first, second = pack_of(16, 32, 48, 64).pointer, pack_of(16, 32, 48, 80).pointer
    again = pack_of(16, 32, 48, 64).pointer
    third = pack_of(16, 32, 48, 96).pointer  # for which the second goes

    assert again == first != second
    assert destroyed == [second]
    assert set(_packs_of(paper)) == {first, third}
    assert [paper._attributes[first][name] for name in (1000, 1001, 1003)] == [
        [UID_X, UID_W, UID_Y], [16, 32, 48], [64],
    ]  # fmt: skip


@pytest.mark.parametrize("op", ConvOp)
def test_threads_never_execute_one_plan_at_once(
    paper: PaperLibrary, card: PaperCard, op: ConvOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute, inside, most = paper._execute, [0], [0]

    def counted(*arguments: Any) -> int:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.002)  # in which the other thread runs
        status = execute(*arguments)
        inside[0] -= 1
        return status

    monkeypatch.setattr(paper, "_execute", counted)
    backend, problem = paper_backend(paper, card), conv(op)
    runner, operands = divided(backend, problem, first_engine(backend, problem), 13), operands_of(problem)[:2]
    expected = runner(workspace(), *operands)

    with ThreadPoolExecutor(2) as pool:
        results = [*pool.map(lambda _: runner(workspace(), *operands), range(8))]

    assert most == [1]
    assert all(torch.equal(result, expected) for result in results)


def test_what_runs_on_the_same_addresses_again_needs_no_other_pack(
    paper: PaperLibrary, backend: CudnnBackend
) -> None:
    problem = conv()
    image, weight, _ = operands_of(problem)
    outs = [torch.empty(problem.output_shape) for _ in range(2)]
    name = first_engine(backend, problem)
    kernel = backend.slice_kernel(problem, name, torch.empty(2**24, dtype=torch.uint8))

    with backend.current():
        for out in (*outs, *outs):
            kernel.run(image, weight, out, None, slice(0, 13))

    assert [each.addresses[UID_Y] for each in paper.executions] == [out.data_ptr() for out in (*outs, *outs)]
    assert len(_packs_of(paper)) == 2


@pytest.mark.parametrize("op", ConvOp)
def test_no_pack_is_executed_with_two_plans(
    paper: PaperLibrary, monkeypatch: pytest.MonkeyPatch, op: ConvOp
) -> None:
    """Whatever addresses they share: a plan leaves its alpha and beta in the pack."""
    execute = paper._execute
    plans_of: dict[int, set[int]] = {}

    def noted(handle: int, plan: int, pack: int) -> int:
        plans_of.setdefault(pack, set()).add(plan)
        return execute(handle, plan, pack)

    monkeypatch.setattr(paper, "_execute", noted)
    backend, problem, buffer = paper_backend(paper), conv(op), torch.empty(2**24, dtype=torch.uint8)
    first, second, _ = operands_of(problem)
    shapes = {ConvOp.FPROP: problem.output_shape, ConvOp.DGRAD: problem.input_shape}
    out = torch.empty(shapes.get(op, problem.filter_shape))
    engines = [name for name in backend.algorithms(problem)[1:] if backend.engine(problem, name)]

    with backend.current():
        for name in engines:
            if op is ConvOp.WGRAD:
                kernel = backend.sum_kernel(problem, name, buffer)
                for into in (GradientSum(out), GradientSum(out, accumulate=True)):
                    kernel.add(first, second, into, first=True, here=slice(0, 13))
            else:
                backend.slice_kernel(problem, name, buffer).run(first, second, out, None, slice(0, 13))

    assert len({plan for plans in plans_of.values() for plan in plans}) >= len(engines) > 1
    assert all(len(plans) == 1 for plans in plans_of.values())


def test_a_plan_is_built_once_however_many_buffers_there_are(
    backend: CudnnBackend, paper: PaperLibrary
) -> None:
    problem = conv()
    runner, operands = (
        divided(backend, problem, first_engine(backend, problem), 4, 4, 4, 1),
        operands_of(problem)[:2],
    )
    runner(workspace(), *operands)
    plans = sum(kind == 5 for kind in paper._kinds.values())

    runner(workspace(), *operands)

    assert plans == 2
    assert sum(kind == 5 for kind in paper._kinds.values()) == plans


def test_what_an_engine_takes_is_what_it_declares_and_the_sum_besides(backend: CudnnBackend) -> None:
    problem = conv(ConvOp.WGRAD, dtype="bfloat16")
    name = first_engine(backend, problem, with_workspace=True)
    part = problem.part(8)

    whole_bytes = backend.workspace_bytes(Trial(problem, name, whole=True), 2**40)
    part_bytes = backend.workspace_bytes(Trial(part, name, whole=False), 2**40)

    sum_bytes = 2560  # 4·8·8·3·3 = 2304 in whole multiples of 512
    assert whole_bytes == backend.buffer_bytes(problem, name)
    assert part_bytes == backend.buffer_bytes(part, name) + sum_bytes
    runner = divided(backend, problem, name)
    assert runner.buffer_bytes - sum_bytes == max(
        backend.buffer_bytes(problem.part(size), name) for size in SIZES
    )


def test_the_declared_workspace_is_the_larger_of_overwriting_and_adding(backend: CudnnBackend) -> None:
    problem = conv(ConvOp.WGRAD, in_channels=64, out_channels=64, input_size=(56, 56))
    assert backend._engines._workshop is not None
    found = backend._engines._workshop.candidates(problem, Search.HEURISTIC)

    grown = [each for each in found if each.workspace_bytes == each.accumulating_bytes]

    assert grown
    assert all(backend.buffer_bytes(problem, each.id) == each.workspace_bytes for each in grown)


def test_flags_that_change_change_what_is_offered(paper: PaperLibrary) -> None:
    card = PaperCard()
    backend, problem = paper_backend(paper, card), conv(in_channels=64, out_channels=64)
    with_tf32 = backend.algorithms(problem)
    card.rules = dataclasses.replace(card.rules, allow_tf32=False)

    strict = backend.algorithms(problem)

    assert set(with_tf32) - set(strict)
    forbidden = next(name for name in with_tf32 if name not in strict and not backend.computes(problem, name))
    with pytest.raises(
        BackendError, match=f"the algorithm must be one of cudnn:aten, .* but got '{forbidden}'"
    ):
        divided(backend, problem, forbidden, 13)


def test_flags_that_change_break_nothing_that_runs(paper: PaperLibrary) -> None:
    card = PaperCard()
    backend, problem = paper_backend(paper, card), conv(in_channels=64, out_channels=64)
    runner, operands = divided(backend, problem, first_engine(backend, problem)), operands_of(problem)[:2]
    before = runner(workspace(), *operands)

    card.rules, card.uses_cudnn = dataclasses.replace(card.rules, allow_tf32=False, deterministic=True), False

    assert torch.equal(runner(workspace(), *operands), before)
    assert backend.flags() != CudnnBackend(PaperCard(), None).flags()


def test_whoever_launches_has_made_the_card_the_current_one(paper: PaperLibrary) -> None:
    backend, problem = paper_backend(paper), conv()
    name, out = first_engine(backend, problem), torch.empty(problem.output_shape)
    image, weight, _ = operands_of(problem)
    kernel = backend.slice_kernel(problem, name, torch.empty(2**24, dtype=torch.uint8))

    with pytest.raises(AssertionError, match="the card is not current"):
        kernel.run(image, weight, out, None, slice(0, 13))
    with backend.current():
        assert kernel.run(image, weight, out, None, slice(0, 13))


def test_what_may_not_happen_in_a_capture_says_what_to_do_before(
    backend: CudnnBackend, card: PaperCard
) -> None:
    problem = conv()
    name, other = first_engine(backend, problem), conv(batch=12)
    runner, operands = divided(backend, problem, name), operands_of(problem)[:2]
    runner(workspace(), *operands)
    card.is_capturing = True

    runner(workspace(), *operands)  # what has run once may be captured, in another buffer too
    with pytest.raises(BackendError, match=r"^Building a plan of cuDNN must happen before"):
        divided(backend, other, name, 12)(workspace(), *operands_of(other)[:2])


def test_the_handles_of_threads_that_have_ended_serve_the_next_ones(
    backend: CudnnBackend, paper: PaperLibrary
) -> None:
    problem = conv()
    runner, operands = divided(backend, problem, first_engine(backend, problem)), operands_of(problem)[:2]

    for _ in range(5):
        thread = threading.Thread(target=lambda: runner(workspace(), *operands))
        thread.start()
        thread.join()

    assert len({each.handle for each in paper.executions}) == 1
    assert len(paper.executions) == 15


def test_a_bias_is_added_once_for_all_parts(backend: CudnnBackend) -> None:
    problem = conv(bias=True)
    runner, operands = divided(backend, problem, first_engine(backend, problem)), operands_of(problem)
    runner(workspace(), *operands)
    calls: list[str] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: object, types: object, args: tuple[object, ...] = (), kwargs: object = None
        ) -> object:
            calls.append(str(func))
            return func(*args, **(kwargs or {}))  # type: ignore[operator, dict-item]

    with Noting():
        runner(workspace(), *operands)

    assert sum("add_" in call for call in calls) == 1


def test_without_the_library_pytorchs_own_on_slices_is_all_there_is(card: PaperCard) -> None:
    backend, problem = CudnnBackend(card, None), conv(ConvOp.WGRAD)
    image, gradient, _ = operands_of(problem, small_integers)

    dw: Tensor = divided(backend, problem, backend.own)(workspace(), image, gradient)

    assert backend.algorithms(problem) == ("cudnn:aten",)
    assert torch.equal(dw.double(), reference(problem, image, gradient))


def test_where_pytorch_may_not_use_cudnn_neither_do_we(backend: CudnnBackend, card: PaperCard) -> None:
    card.uses_cudnn = False

    assert backend.algorithms(conv()) == ("cudnn:aten",)
