"""What only a card can show: that plans are executed as described, on streams, in threads, in graphs."""

import dataclasses
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from bench.gpu.ground import collected, same_stream
from bench.gpu.trials import checked_in_parts
from bench.precision import tf32
from mucudnn.algorithms import GradientSum
from mucudnn.backends import Backend, backend_of
from mucudnn.backends.cudnn import compiler
from mucudnn.backends.cudnn.backend import CudnnBackend
from mucudnn.backends.cudnn.constants import NumericalNote
from mucudnn.backends.cudnn.devices import live_device
from mucudnn.backends.cudnn.engines import Enumerator
from mucudnn.backends.cudnn.footprint import TorchAllocator
from mucudnn.backends.cudnn.library import load_library
from mucudnn.choices import Search
from mucudnn.division import Division
from mucudnn.execution.runner import Runner
from mucudnn.execution.workspace import Workspace, workspace_of
from mucudnn.functional import divided_conv
from mucudnn.live.reference import relative_error
from mucudnn.live.stand import Stand
from mucudnn.problem import ConvOp, ConvProblem, Layout
from mucudnn.profile import Candidate
from tests.operands import operands_of, reference

pytestmark = pytest.mark.gpu

BATCH = 16
PART = 4


@pytest.fixture
def backend() -> Backend:
    return backend_of("cudnn:")


@pytest.fixture
def strict_float32() -> Iterator[None]:
    """Multiply float32 as float32."""
    with tf32(is_allowed=False):
        yield


def problem_of(
    op: ConvOp, dtype: str = "float32", layout: Layout = Layout.CONTIGUOUS, taps: int = 3
) -> ConvProblem:
    """A convolution of 32 channels on 28x28 pixels."""
    return ConvProblem(
        op=op,
        batch=BATCH,
        in_channels=32,
        out_channels=32,
        input_size=(28, 28),
        kernel_size=(taps, taps),
        stride=(1, 1),
        padding=(taps // 2, taps // 2),
        dilation=(1, 1),
        dtype=dtype,
        layout=layout,
        filter_layout=layout,
    )


ENGINE = "cudnn:eng"

TILES = {"cuda:winograd4": 3, "cuda:winograd4_rows2": 3, "cuda:winograd4_sums7": 3, "cuda:fft": 5}

TAPS = {ENGINE: 3, **(TILES if compiler.version() else {})}
"""By what ids of a kind begin with, the taps of the filters that it is tested on. CuPy compiles some."""


def division(backend: Backend, problem: ConvProblem, kind: str = ENGINE) -> Division:
    """Four equal parts of an algorithm, or the first of a kind; in several sums is a weight gradient only."""
    part = problem.part(PART)
    names = [kind] if backend.computes(part, kind) else backend.algorithms(part, Search.EXHAUSTIVE)
    algorithm = next(name for name in names if name.startswith(kind.removesuffix("_sums7")))
    return Division((Candidate(algorithm, PART, 0.0, 0),) * (BATCH // PART))


def divisions(backend: Backend, kind: str = ENGINE) -> dict[str, Division]:
    return {str(op): division(backend, problem_of(op, taps=TAPS[kind]), kind) for op in ConvOp}


def operands(taps: int = 3) -> tuple[Tensor, Tensor]:
    """Image and filter of these problems, which want gradients."""
    generator = torch.Generator("cuda").manual_seed(0)
    image = torch.randn(BATCH, 32, 28, 28, device="cuda", generator=generator)
    weight = torch.randn(32, 32, taps, taps, device="cuda", generator=generator)
    return image.requires_grad_(), weight.requires_grad_()


@pytest.mark.parametrize("kind", TAPS)
@pytest.mark.usefixtures("strict_float32")
def test_a_divided_convolution_has_the_gradients_of_the_undivided_one(backend: Backend, kind: str) -> None:
    image, weight = operands(TAPS[kind])
    expected = torch.autograd.grad(
        nn.functional.conv2d(image, weight, padding=TAPS[kind] // 2).square().sum(), (image, weight)
    )

    y = divided_conv(image, weight, padding=TAPS[kind] // 2, **divisions(backend, kind))
    gradients = torch.autograd.grad(y.square().sum(), (image, weight))

    for gradient, other in zip(gradients, expected, strict=True):
        # Both passes round, by an engine each; a part that is lost or counted twice is a tenth and more.
        assert relative_error(gradient, other.double()) < 1e-4


@pytest.mark.parametrize("kind", TAPS)
def test_a_division_is_captured_after_a_warm_run_and_replayed_on_new_values(
    backend: Backend, kind: str
) -> None:
    image, weight = (tensor.detach() for tensor in operands(TAPS[kind]))
    parts = divisions(backend, kind)["fprop"]
    divided_conv(image, weight, padding=TAPS[kind] // 2, fprop=parts)
    graph = torch.cuda.CUDAGraph()
    with collected(), same_stream(), torch.cuda.graph(graph):
        y = divided_conv(image, weight, padding=TAPS[kind] // 2, fprop=parts)

    image.normal_()
    y.fill_(float("nan"))
    graph.replay()

    expected = divided_conv(image, weight, padding=TAPS[kind] // 2, fprop=parts)
    assert relative_error(y, expected.double()) < 1e-6


@pytest.mark.parametrize("kind", TAPS)
def test_a_side_stream_gives_the_same_result(backend: Backend, kind: str) -> None:
    image, weight = (tensor.detach() for tensor in operands(TAPS[kind]))
    parts = divisions(backend, kind)["fprop"]
    expected = divided_conv(image, weight, padding=TAPS[kind] // 2, fprop=parts)
    torch.cuda.synchronize()

    with torch.cuda.stream(torch.cuda.Stream()):
        result = divided_conv(image, weight, padding=TAPS[kind] // 2, fprop=parts)
        torch.cuda.current_stream().synchronize()

    assert relative_error(result, expected.double()) < 1e-6


def test_a_side_stream_has_a_workspace_of_its_own(backend: Backend) -> None:
    common = workspace_of(backend)

    with torch.cuda.stream(torch.cuda.Stream()):
        assert workspace_of(backend) is not common


def test_the_backward_pass_works_in_the_buffer_of_the_forward_pass(backend: Backend) -> None:
    image, weight = operands()
    seen: list[tuple[int, object]] = []
    y = divided_conv(image, weight, padding=1, **divisions(backend))
    y.register_hook(lambda _: seen.append((threading.get_ident(), workspace_of(backend))))

    y.sum().backward()

    ((thread, workspace),) = seen
    assert thread != threading.get_ident()
    assert workspace is workspace_of(backend)


@pytest.mark.parametrize("kind", TAPS)
def test_two_threads_compute_the_same_at_once(backend: Backend, kind: str) -> None:
    image, weight = (tensor.detach() for tensor in operands(TAPS[kind]))
    parts = divisions(backend, kind)["fprop"]
    expected = divided_conv(image, weight, padding=TAPS[kind] // 2, fprop=parts)
    results: list[Tensor] = []

    def work() -> None:
        results.extend(divided_conv(image, weight, padding=TAPS[kind] // 2, fprop=parts) for _ in range(10))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    torch.cuda.synchronize()
    assert len(results) == 20
    assert max(relative_error(result, expected.double()) for result in results) < 1e-6


@pytest.mark.parametrize("kind", TAPS)
@pytest.mark.parametrize("op", ConvOp)
def test_a_division_takes_no_more_than_its_workspace_from_the_allocator(
    backend: Backend, op: ConvOp, kind: str
) -> None:
    # Plans for tensor cores need copies of the image.
    problem = problem_of(op, "bfloat16" if kind == ENGINE else "float32", taps=TAPS[kind])
    parts = division(backend, problem, kind)
    part = problem.part(PART)
    declared = backend.buffer_bytes(part, parts.parts[0].algorithm) + problem.running_sum_bytes
    stand = Stand(backend, problem, 0)
    run = stand.division(parts)
    if kind != ENGINE:
        torch.cuda.current_blas_handle()  # cuBLAS is given a workspace that PyTorch keeps
    allocator = TorchAllocator(backend.device)  # which counts what is asked for; blocks may be 1 MiB larger
    allocator.settle()
    before = allocator.allocated_bytes()

    run()

    assert allocator.peak_bytes() - before - stand.out.nbytes <= declared


def test_the_card_describes_itself_for_lists_without_it() -> None:
    library = load_library()
    device_index = torch.cuda.current_device()
    device = live_device(library, device_index)

    listed = Enumerator(library, device).listed(problem_of(ConvOp.FPROP))

    assert device.name == torch.cuda.get_device_name()
    assert device.multiprocessors == torch.cuda.get_device_properties(device_index).multi_processor_count
    assert listed


ROUNDED = 0.1
"""Of sums of some thousand products in 16 bits, which the tuner may refuse; what was there before is NaN."""


def adds_in_16_bits(backend: Backend, problem: ConvProblem, algorithm: str) -> bool:
    """Tell whether cuDNN says of an engine that it rounds the sums on the way."""
    assert isinstance(backend, CudnnBackend)
    engine = backend.engine(problem, algorithm)
    return engine is not None and NumericalNote.REDUCED_PRECISION_REDUCTION.name in engine.notes


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("op", ConvOp)
def test_beta_0_overwrites_nan_and_beta_1_adds(
    backend: Backend, op: ConvOp, dtype: str, layout: Layout
) -> None:
    problem = problem_of(op, dtype, layout)
    algorithms = [
        name for name in backend.algorithms(problem)[1:] if backend.computes(problem.part(PART), name)
    ]
    assert algorithms
    needs = [backend.buffer_bytes(problem.part(PART), name) for name in algorithms]
    stand = Stand(backend, problem, max(needs))

    seen = {algorithm: checked_in_parts(stand, algorithm) for algorithm in algorithms}

    rounded = {name for name in algorithms if adds_in_16_bits(backend, problem.part(PART), name)}
    assert [
        each for each in {*algorithms} - rounded if not seen[each].error <= backend.error_bound(problem, each)
    ] == []
    assert [each for each in rounded if not seen[each].error <= ROUNDED] == []
    assert [each for each in algorithms if not seen[each].is_guard_intact] == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("op", ConvOp)
def test_parts_of_16_bits_that_begin_anywhere_are_right(backend: Backend, op: ConvOp, dtype: str) -> None:
    # A sample of 3x9x11 has 594 bytes, so that parts begin at multiples of 4 bytes and no more.
    shape = {"batch": 5, "in_channels": 3, "out_channels": 5, "input_size": (9, 11)}
    problem = dataclasses.replace(problem_of(op, dtype), **shape)
    algorithm = next(
        name
        for name in backend.algorithms(problem.part(2))
        if name != backend.own and backend.computes(problem.part(1), name)
    )
    stand = Stand(backend, problem, 0)
    parts = [Candidate(algorithm, size, 0.0, 0) for size in (2, 2, 1)]

    result = Runner(backend, problem, Division(tuple(parts)))(
        Workspace(backend.device), stand.first, stand.second, stand.bias
    )

    error = relative_error(result, stand.reference.of(slice(0, problem.batch)))
    assert error <= backend.error_bound(problem, algorithm)


@pytest.mark.usefixtures("strict_float32")
def test_plans_on_the_same_addresses_keep_their_own_beta(backend: Backend) -> None:
    problem = problem_of(ConvOp.WGRAD)
    engines = [name for name in backend.algorithms(problem) if name.startswith("cudnn:eng")]
    needed_bytes = max(backend.buffer_bytes(problem, name) for name in engines)
    buffer = torch.empty(needed_bytes, dtype=torch.uint8, device=backend.device)
    image, gradient, _ = operands_of(problem)
    expected = reference(problem, image, gradient)
    image, gradient = image.to(backend.device), gradient.to(backend.device)
    total = torch.empty(problem.filter_shape, device=backend.device)

    errors = {}
    with backend.current():
        for name in engines:
            kernel = backend.sum_kernel(problem, name, buffer)
            for accumulate in (False, True, False):
                kernel.add(image, gradient, GradientSum(total, accumulate), first=True, here=slice(0, BATCH))
            errors[name] = relative_error(total.cpu(), expected)

    assert {name: error for name, error in errors.items() if error > backend.error_bound(problem, name)} == {}


def test_what_takes_the_buffers_place_needs_no_more_of_the_cards_memory(backend: Backend) -> None:
    """What is given back is large enough, and no other tensor is cut out of it meanwhile."""
    mib = 2**20
    torch.cuda.empty_cache()
    workspace = Workspace(backend.device)
    workspace.reserve(64 * mib, 96 * mib)
    reserved_bytes = torch.cuda.memory_reserved(backend.device)

    workspace.make_room(96 * mib, 100 * mib, backend, 30 * mib)
    tensors = [torch.empty(size * mib, dtype=torch.uint8, device=backend.device) for size in (30, 96)]

    assert torch.cuda.memory_reserved(backend.device) - reserved_bytes == 30 * mib
    del tensors
    workspace.reserve(64 * mib, 96 * mib)
    assert torch.cuda.memory_reserved(backend.device) - reserved_bytes == 30 * mib
