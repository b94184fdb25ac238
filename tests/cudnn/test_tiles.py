"""Convolution by tiles on a card: the kernels' own source, run by gcc on a card on paper."""

import ctypes
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from mucudnn.algorithms.base import total_bytes
from mucudnn.algorithms.forms import BilinearForm, cook_toom, fourier
from mucudnn.algorithms.tile_geometry import TileGeometry
from mucudnn.algorithms.tiles import TileAlgorithm
from mucudnn.backends.cudnn import compiler
from mucudnn.backends.cudnn.backend import CudnnBackend
from mucudnn.backends.cudnn.configurations import Rules
from mucudnn.backends.cudnn.tile_planes import CardSumKernel, Launcher, regions_of
from mucudnn.backends.cudnn.tile_source import INT_LIMIT, THREADS, Kind, Transform
from mucudnn.backends.cudnn.tiles import Tiles
from mucudnn.choices import Search
from mucudnn.division import Division
from mucudnn.errors import BackendError
from mucudnn.execution.runner import Runner
from mucudnn.execution.workspace import Workspace
from mucudnn.problem import ConvOp, ConvProblem, Layout
from mucudnn.profile import Candidate
from tests.cudnn import by_gcc
from tests.cudnn.paper import PaperCard
from tests.operands import a_convolution, operands_of, reference, relative_error

pytestmark = pytest.mark.usefixtures("one_thread")

STRICT = Rules(allow_tf32=False)

SHAPES = {
    "3x3": {},
    "whole tiles": {"input_size": (8, 12)},
    "no padding": {"padding": (0, 0)},
    "much padding": {"padding": (2, 2)},
    "one row": {"input_size": (1, 9)},
    "one channel": {"in_channels": 1, "out_channels": 1},
    "5x5": {"kernel_size": (5, 5), "padding": (2, 2)},
    "5x3": {"kernel_size": (5, 3), "padding": (2, 0)},
    "1x3": {"kernel_size": (1, 3), "padding": (0, 1)},
    "one dimension": {
        "input_size": (9,), "kernel_size": (3,), "padding": (1,), "stride": (1,), "dilation": (1,),
    },
    "9x9": {"kernel_size": (9, 9), "padding": (4, 4)},
    "9x9, several tiles": {"input_size": (11, 37), "kernel_size": (9, 9), "padding": (2, 4)},
    "31x7": {"input_size": (17, 9), "kernel_size": (31, 7), "padding": (15, 0)},
    "9x1": {"kernel_size": (9, 1), "padding": (4, 0)},
    "one dimension, 9": {
        "input_size": (40,), "kernel_size": (9,), "padding": (4,), "stride": (1,), "dilation": (1,),
    },
}  # fmt: skip

WITH_ALL = ("3x3", "5x5", "9x9")


def problem_of(op: ConvOp, **changes: object) -> ConvProblem:
    shape = {"batch": 5, "in_channels": 5, "out_channels": 7, "input_size": (11, 14)}
    return a_convolution(**{"op": op, "bias": op is ConvOp.FPROP, **shape, **changes})


def backend_with(card: PaperCard | None = None) -> CudnnBackend:
    """A backend without cuDNN's library."""
    return CudnnBackend(card or PaperCard(STRICT), None)


def computed(backend: CudnnBackend, problem: ConvProblem, algorithm: str, *sizes: int) -> torch.Tensor:
    """The result of parts of these sizes."""
    division = Division(tuple(Candidate(algorithm, size, 0.0, 0) for size in sizes))
    return Runner(backend, problem, division)(Workspace(backend.device), *operands_of(problem))


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("name", SHAPES)
def test_parts_of_any_size_are_right(name: str, op: ConvOp, layout: Layout) -> None:
    shape = SHAPES[name]
    if layout is Layout.CHANNELS_LAST and len(shape.get("input_size", (1, 1))) == 1:
        layout = Layout.CONTIGUOUS  # there is no other in one dimension
    backend, problem = backend_with(), problem_of(op, layout=layout, filter_layout=layout, **shape)
    search = Search.EXHAUSTIVE if name in WITH_ALL else Search.HEURISTIC  # gcc takes a while for each
    names = backend.algorithms(problem, search)[1:]
    assert names

    for each in names:
        error = relative_error(
            computed(backend, problem, each, 2, 2, 1), reference(problem, *operands_of(problem))
        )
        assert error <= backend.error_bound(problem, each), each


EACH = {"cuda:winograd4": (3, 3), "cuda:fft16": (5, 7)}
"""One of each family, with taps that it is for."""


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("op", ConvOp)
def test_float64_is_computed_in_float64(op: ConvOp, name: str) -> None:
    backend, problem = backend_with(), problem_of(op, dtype="float64", kernel_size=EACH[name])

    result = computed(backend, problem, name, 3, 2)

    assert relative_error(result, reference(problem, *operands_of(problem))) <= 1e-14


@pytest.mark.parametrize("filter_layout", Layout)
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("name", EACH)
def test_images_and_filters_may_differ_in_layout(
    name: str, op: ConvOp, layout: Layout, filter_layout: Layout
) -> None:
    changes = {"layout": layout, "filter_layout": filter_layout, "kernel_size": EACH[name]}
    backend, problem = backend_with(), problem_of(op, **changes)

    result = computed(backend, problem, name, 5)

    assert relative_error(result, reference(problem, *operands_of(problem))) <= 1e-5


@pytest.mark.parametrize("kind", Kind)
def test_planes_of_many_elements_are_counted_in_64_bits(kind: Kind) -> None:
    form = cook_toom(4, 3)
    matrix = form.input_transform if kind is Kind.GATHER else form.output_transform
    transform = Transform(kind, matrix, matrix, (4, 4), "float32")
    generator = torch.Generator().manual_seed(0)
    results = []
    for is_long in (False, True):
        planes = torch.randn(36, 2 * 4 * 3, generator=generator.manual_seed(1))
        image = torch.randn(2, 3, 8, 8, generator=generator.manual_seed(2))
        first = [image.data_ptr(), planes.data_ptr()]
        if kind is Kind.SCATTER:
            first = [planes.data_ptr(), 0, image.data_ptr(), 0, 0, 1]
        launch = by_gcc.compiled(transform.source(is_long), kind.value)
        numbers = [*first, 24, 8, 3, 0, 2, 2, 8, 8, *image.stride(), 1, 1]
        launch(0, 1, THREADS, tuple(numbers))
        results.append(planes if kind is Kind.GATHER else image)

    assert "unsigned long long" in transform.source(is_long=True)
    assert torch.equal(*results)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("sizes", [(5,), (2, 2, 1)])
@pytest.mark.parametrize("groups", [2, 3, 12])
def test_a_weight_gradient_of_groups_of_tiles_is_right(
    groups: int, sizes: tuple[int, ...], layout: Layout
) -> None:
    backend, problem = backend_with(), problem_of(ConvOp.WGRAD, layout=layout)  # of 3 x 4 tiles

    result = computed(backend, problem, f"cuda:winograd4_sums{groups}", *sizes)

    assert relative_error(result, reference(problem, *operands_of(problem))) <= 1e-5


def test_a_weight_gradient_of_groups_is_added_to_that_of_another_algorithm() -> None:
    backend, problem = backend_with(), problem_of(ConvOp.WGRAD)
    parts = Candidate("cudnn:aten", 2, 0.0, 0), Candidate("cuda:winograd4_sums3", 3, 0.0, 0)

    result = Runner(backend, problem, Division(parts))(Workspace(backend.device), *operands_of(problem))

    assert relative_error(result, reference(problem, *operands_of(problem))) <= 1e-5


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("cuda:winograd4_rows1", {}),
        ("cuda:winograd4_rows2", {"padding": (2, 0)}),  # of 3 or 4: the last block has less, or nothing below
        ("cuda:winograd2_rows4", {"input_size": (15, 6)}),
        ("cuda:fft16_rows1", {"kernel_size": (9, 9), "padding": (4, 4), "input_size": (21, 11)}),
    ],
)
def test_some_rows_of_tiles_at_a_time_give_the_same(
    name: str, shape: dict[str, object], op: ConvOp, layout: Layout
) -> None:
    backend, problem = backend_with(), problem_of(op, layout=layout, **shape)
    assert backend.computes(problem, name)

    result = computed(backend, problem, name, 1, 3, 1)

    assert relative_error(result, reference(problem, *operands_of(problem))) <= 1e-5


@pytest.mark.parametrize("op", ConvOp)
def test_an_image_that_takes_much_is_cut_into_rows(op: ConvOp) -> None:
    shape = {"in_channels": 64, "out_channels": 64, "input_size": (224, 224), "bias": False}
    backend, problem = backend_with(), problem_of(op, batch=64, **shape)

    found = backend.algorithms(problem.part(1))

    assert {"cuda:winograd4_rows4", "cuda:winograd6_rows3"} < {*found}
    assert not any("rows" in each for each in backend.algorithms(problem.part(2)))
    whole, cut = (backend.buffer_bytes(problem.part(1), f"cuda:winograd4{rows}") for rows in ("", "_rows4"))
    assert whole > 50 * 2**20
    assert cut < 5 * 2**20


def test_an_image_that_takes_little_is_not_cut() -> None:
    assert not any("rows" in each for each in backend_with().algorithms(problem_of(ConvOp.FPROP, batch=1)))


def test_the_sums_of_groups_have_room() -> None:
    tiles, problem = Tiles(PaperCard(STRICT)), problem_of(ConvOp.WGRAD)

    of_one, of_three = (tiles.workspace_bytes(problem, f"cuda:winograd4{sums}") for sums in ("", "_sums3"))

    assert of_three - of_one == pytest.approx(36 * 2 * (5 * 7) * 4, abs=64)


def test_a_sum_that_goes_through_the_axes_one_by_one_has_no_groups() -> None:
    problem = problem_of(ConvOp.WGRAD, kernel_size=(9, 9), padding=(4, 4))
    geometry = TileGeometry(TileAlgorithm(inputs=16), problem)
    buffer = torch.empty(total_bytes(regions_of(geometry, 2)), dtype=torch.uint8)

    with pytest.raises(ValueError, match="one sum of planes that axes go through one by one, not 2"):
        CardSumKernel(geometry, Launcher(PaperCard(STRICT)), buffer, 2)


@pytest.mark.parametrize(
    ("op", "groups"),
    [(ConvOp.FPROP, 3), (ConvOp.DGRAD, 3), (ConvOp.WGRAD, 5)],
    ids=["forward", "input gradient", "12 tiles do not make 5 groups"],
)
def test_there_are_no_groups_but_equal_ones_of_a_weight_gradient(op: ConvOp, groups: int) -> None:
    backend, algorithm = backend_with(), f"cuda:winograd4_sums{groups}"

    assert not backend.computes(problem_of(op), algorithm)
    assert f"no {groups} groups of equal size" in (backend.refusal(problem_of(op), algorithm) or "")
    assert backend.computes(problem_of(ConvOp.WGRAD), "cuda:winograd4_sums3")
    assert not backend.computes(problem_of(ConvOp.WGRAD, kernel_size=(9, 9)), "cuda:fft16_sums2")


@pytest.mark.parametrize(
    ("channels", "size", "expected"),
    [
        (
            64,
            56,
            ["cuda:winograd4", "cuda:winograd4_sums7"],
        ),  # 36 products of one block each: 7 times as many
        (256, 56, ["cuda:winograd4", "cuda:winograd4_sums2"]),
        (512, 28, ["cuda:winograd4"]),
        (512, 14, ["cuda:winograd4", "cuda:winograd5"]),  # 9 tiles of 5 x 5 instead of 16 of 4 x 4
        (64, 224, ["cuda:winograd4", "cuda:winograd4_sums7", "cuda:winograd6", "cuda:winograd6_sums4"]),
        (64, 7, ["cuda:winograd4", "cuda:winograd4_sums4"]),  # there are but four tiles
    ],
)
def test_a_weight_gradient_is_tried_in_groups_where_few_channels_would_leave_the_card_idle(
    channels: int, size: int, expected: list[str]
) -> None:
    shape = {"in_channels": channels, "out_channels": channels, "input_size": (size, size)}

    found = backend_with().algorithms(problem_of(ConvOp.WGRAD, batch=64, **shape))

    assert list(found[1:]) == expected


def test_strict_float32_and_float64_are_what_it_is_tried_for() -> None:
    strict, rounding = backend_with(), backend_with(PaperCard(Rules(allow_tf32=True)))

    assert strict.algorithms(problem_of(ConvOp.FPROP)) == ("cudnn:aten", "cuda:winograd4", "cuda:winograd6")
    assert rounding.algorithms(problem_of(ConvOp.FPROP)) == ("cudnn:aten",)
    assert rounding.algorithms(problem_of(ConvOp.FPROP, dtype="float64"))[1:] == (
        "cuda:winograd4",
        "cuda:winograd6",
    )
    assert "cuda:winograd2" in rounding.algorithms(problem_of(ConvOp.FPROP), Search.EXHAUSTIVE)


REFUSED = {
    "16 bits": {"dtype": "bfloat16"},
    "stride": {"stride": (2, 2)},
    "groups": {"in_channels": 4, "out_channels": 6, "groups": 2},
    "nothing": {"batch": 0},
    "longer filter than a tile": {"kernel_size": (33, 33), "padding": (16, 16)},
    "three dimensions": {
        "input_size": (5, 6, 7), "kernel_size": (3, 3, 3), "padding": (1, 1, 1), "stride": (1, 1, 1),
        "dilation": (1, 1, 1),
    },
}  # fmt: skip


@pytest.mark.parametrize("changes", REFUSED.values(), ids=REFUSED)
def test_what_it_does_not_compute_is_left_to_others(changes: dict[str, object]) -> None:
    backend, problem = backend_with(), problem_of(ConvOp.FPROP, **changes)

    assert backend.algorithms(problem, Search.EXHAUSTIVE) == (backend.own,)
    assert not backend.computes(problem, "cuda:winograd4")
    assert backend.refusal(problem, "cuda:winograd4")  # says why


def test_nothing_is_computed_so_where_matrix_products_may_round_to_10_bits() -> None:
    card = PaperCard(STRICT)
    card.rounding = {"float32"}
    backend = backend_with(card)

    assert not backend.computes(problem_of(ConvOp.FPROP), "cuda:winograd4")
    assert backend.computes(problem_of(ConvOp.FPROP, dtype="float64"), "cuda:winograd4")


@pytest.mark.parametrize("op", ConvOp)
def test_pytorchs_own_takes_over_when_products_may_be_rounded_later(op: ConvOp) -> None:
    card = PaperCard(STRICT)
    backend, problem = backend_with(card), problem_of(op)
    runner = Runner(
        backend,
        problem,
        Division((Candidate("cuda:winograd4", 3, 0.0, 0),) * 1 + (Candidate("cuda:winograd4", 2, 0.0, 0),)),
    )
    first, second, bias = operands_of(problem)
    before = runner(Workspace(backend.device), first, second, bias)
    card.rounding = {"float32"}

    after = runner(Workspace(backend.device), first, second, bias)

    assert not torch.equal(after, before)
    assert relative_error(after, reference(problem, first, second, bias)) <= 1e-6


@pytest.mark.parametrize(
    "bias", [torch.ones(1).expand(7), torch.arange(14.0)[::2]], ids=["one", "every second"]
)
def test_a_bias_may_lie_anywhere(bias: torch.Tensor) -> None:
    backend, problem = backend_with(), problem_of(ConvOp.FPROP)
    first, second, _ = operands_of(problem)
    runner = Runner(backend, problem, Division((Candidate("cuda:winograd4", 5, 0.0, 0),)))

    result = runner(Workspace(backend.device), first, second, bias)

    assert relative_error(result, reference(problem, first, second, bias.clone())) <= 1e-5


def test_flags_of_matrix_products_are_flags_of_the_backend() -> None:
    card = PaperCard(STRICT)
    backend = backend_with(card)
    before = backend.flags()

    card.rounding = {"float32"}

    assert backend.flags() != before


def test_what_is_not_finite_spreads_over_its_tile_and_no_further() -> None:
    backend, problem = backend_with(), problem_of(ConvOp.FPROP, bias=False)
    first, second, _ = operands_of(problem)
    first[2, 1, 5, 5] = float("nan")  # in the windows of the tiles (0, 0), (0, 1), (1, 0) and (1, 1)
    runner = Runner(backend, problem, Division((Candidate("cuda:winograd4", 5, 0.0, 0),)))

    spread = runner(Workspace(backend.device), first, second, None).isnan()

    assert spread[2, :, 4:7, 4:7].all()  # where any convolution has one
    spread[2, :, :8, :8] = False
    assert not spread.any()


def test_a_workspace_that_was_given_back_is_used_again_where_it_comes_to_lie() -> None:
    backend, problem = backend_with(), problem_of(ConvOp.FPROP)
    runner, workspace = (
        Runner(backend, problem, Division((Candidate("cuda:winograd4", 5, 0.0, 0),))),
        Workspace(backend.device),
    )
    operands = operands_of(problem)
    before = runner(workspace, *operands)
    workspace.make_room(1, 1, backend)

    assert torch.equal(runner(workspace, *operands), before)


def test_without_a_compiler_there_is_no_such_algorithm() -> None:
    card = PaperCard(STRICT)
    card.can_compile = False

    assert backend_with(card).algorithms(problem_of(ConvOp.FPROP)) == ("cudnn:aten",)


def test_a_name_that_is_none_is_refused_by_all_names_there_are() -> None:
    backend, problem = backend_with(), problem_of(ConvOp.FPROP)

    with pytest.raises(
        BackendError,
        match=r"cudnn:aten, cuda:winograd4, cuda:winograd6 and so on .* but got 'cuda:winograd3'",
    ):
        backend.buffer_bytes(problem, "cuda:winograd3")


SHORT, LONG = "typedef unsigned count_t;", "typedef unsigned long long count_t;"


@pytest.mark.parametrize(
    ("form", "elements", "counts"),
    [
        (cook_toom(4, 3), INT_LIMIT, [SHORT]),
        (cook_toom(4, 3), INT_LIMIT + 1, [LONG]),
        (fourier(16, 9), INT_LIMIT // 23, [SHORT, SHORT]),  # 16 lines of 16 numbers become 23 each
        (fourier(16, 9), INT_LIMIT // 16, [SHORT, LONG]),
        (fourier(16, 9), INT_LIMIT // 16 + 1, [LONG, LONG]),
    ],
)
def test_many_threads_have_kernels_of_their_own(form: BilinearForm, elements: int, counts: list[str]) -> None:
    card = PaperCard(STRICT)
    compiled = counting(card)
    matrix = form.input_transform

    Launcher(card).launches(Transform(Kind.GATHER, matrix, matrix, (4, 4), "float32"), elements)

    assert all(count in source for (source, _), count in zip(compiled, counts, strict=True))


def counting(card: PaperCard) -> list[tuple[str, str]]:
    """Have the card note what it compiles."""
    compiled: list[tuple[str, str]] = []
    compile_ = card.compiled

    def noting(source: str, kernel: str) -> compiler.KernelLaunch:
        compiled.append((source, kernel))
        return compile_(source, kernel)

    card.compiled = noting
    return compiled


def test_a_kernel_is_compiled_once_for_all_sizes() -> None:
    card = PaperCard(STRICT)
    backend, compiled = backend_with(card), counting(card)

    computed(backend, problem_of(ConvOp.FPROP), "cuda:winograd4", 5)
    computed(backend, problem_of(ConvOp.FPROP, in_channels=3, input_size=(20, 9)), "cuda:winograd4", 3, 2)

    assert [kernel for _, kernel in compiled] == ["gather", "gather", "scatter"]
    computed(backend, problem_of(ConvOp.DGRAD), "cuda:winograd4", 5)
    assert len(compiled) == 4  # of a filter that is turned round


def test_nothing_is_compiled_while_a_graph_is_captured_and_what_is_runs_there() -> None:
    card = PaperCard(STRICT)
    backend, problem = backend_with(card), problem_of(ConvOp.FPROP)
    runner = Runner(backend, problem, Division((Candidate("cuda:winograd4", 5, 0.0, 0),)))
    operands, workspace = operands_of(problem), Workspace(backend.device)
    warm = runner(workspace, *operands)
    card.is_capturing = True

    assert torch.equal(runner(workspace, *operands), warm)
    with pytest.raises(BackendError, match="Compiling a kernel"):
        computed(backend, problem_of(ConvOp.FPROP, dtype="float64"), "cuda:winograd4", 5)


def test_a_filter_is_transformed_once_for_all_parts() -> None:
    card = PaperCard(STRICT)
    launched: list[str] = []
    compile_ = card.compiled

    def noting(source: str, kernel: str) -> compiler.KernelLaunch:
        launch = compile_(source, kernel)

        def noted(*arguments: int) -> None:
            launched.append(kernel)
            launch(*arguments)

        return noted

    card.compiled = noting

    computed(backend_with(card), problem_of(ConvOp.FPROP), "cuda:winograd4", 2, 2, 1)

    assert launched == ["gather", *["gather", "scatter"] * 3]


def test_long_filters_go_through_the_axes_one_by_one() -> None:
    card = PaperCard(STRICT)
    compiled = counting(card)

    computed(
        backend_with(card), problem_of(ConvOp.WGRAD, kernel_size=(9, 9), padding=(4, 4)), "cuda:fft16", 5
    )

    assert sorted(kernel for _, kernel in compiled) == ["gather", "gather", "mix", "mix", "mix", "scatter"]


def test_long_filters_are_tried_in_the_tiles_that_multiply_least() -> None:
    backend = backend_with()
    long = problem_of(ConvOp.FPROP, kernel_size=(15, 15), padding=(7, 7), input_size=(56, 56))

    assert backend.algorithms(long) == ("cudnn:aten", "cuda:fft24", "cuda:fft28")
    assert backend.algorithms(problem_of(ConvOp.FPROP, kernel_size=(5, 5))) == (
        "cudnn:aten",
        "cuda:winograd4",
    )
    assert "cuda:fft16" in backend.algorithms(problem_of(ConvOp.FPROP, kernel_size=(5, 5)), Search.EXHAUSTIVE)


def test_the_workspace_holds_the_filter_and_both_images_and_nothing_else() -> None:
    tiles, problem = Tiles(PaperCard(STRICT)), problem_of(ConvOp.FPROP)

    n_bytes = tiles.workspace_bytes(problem, "cuda:winograd4")

    elements = 36 * (5 * 7 + 5 * (3 * 4) * 5 + 5 * (3 * 4) * 7)  # of 3 x 4 tiles of 5 images
    assert elements * 4 <= n_bytes <= elements * 4 + 3 * 64


def test_lines_on_their_way_to_planes_have_room_once() -> None:
    tiles, problem = Tiles(PaperCard(STRICT)), problem_of(ConvOp.FPROP, kernel_size=(9, 9), padding=(4, 4))

    n_bytes = tiles.workspace_bytes(problem, "cuda:fft16")

    filter_, x, y = 5 * 7, 5 * (2 * 2) * 5, 5 * (2 * 2) * 7  # of 2 x 2 tiles of 5 images
    lines = max(9 * 23 * filter_, 16 * 23 * x, 8 * 23 * y)
    elements = 23 * 23 * (filter_ + x + y) + lines
    assert elements * 4 <= n_bytes <= elements * 4 + 4 * 64


@pytest.fixture
def versions() -> Iterator[None]:
    compiler.version.cache_clear()
    yield
    compiler.version.cache_clear()


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, versions: None) -> types.ModuleType:
    """A double of CuPy, which does nothing."""
    double = types.ModuleType("cupy")
    double.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
    monkeypatch.setitem(sys.modules, "cupy", double)
    return double


class CuPy:
    """What CuPy does with kernels, as it is seen from outside.

    Attributes:
        events: sources compiled, and launches by CuPy itself and by its driver.
    """

    def __init__(self, module: types.ModuleType) -> None:
        self.events: list[object] = []
        module.RawModule = self.compiled

    def compiled(self, code: str) -> types.SimpleNamespace:
        self.events.append(code)
        return types.SimpleNamespace(get_function=self.function)

    def function(self, name: str) -> types.SimpleNamespace:
        assert type(name) is str  # which CuPy insists on
        return types.SimpleNamespace(kernel=_Function(name, self.events))

    def launch_kernel(self, function: int, *numbers: int) -> None:
        """The driver's, with its grid, block, shared memory, stream and addresses of arguments."""
        *grid_and_stream, parameters, extra = numbers
        assert extra == 0
        addresses = (ctypes.c_void_p * 2).from_address(parameters)
        values = [ctypes.c_int64.from_address(address).value for address in addresses]
        self.events.append(("driver", function, *grid_and_stream, values))


class _Function:
    """A kernel as CuPy has it."""

    ptr = 1234

    def __init__(self, name: str, events: list[object]) -> None:
        self._name, self._events = name, events

    def __call__(
        self, blocks: tuple[int], threads: tuple[int], arguments: tuple[np.int64, ...], stream: object
    ) -> None:
        assert all(isinstance(each, np.int64) for each in arguments)
        self._events.append((self._name, blocks, threads, [int(each) for each in arguments], stream.ptr))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A double of the module in which CuPy has the driver's functions: it has none."""
    for name in ("cupy_backends", "cupy_backends.cuda", "cupy_backends.cuda.api"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    double = types.ModuleType("cupy_backends.cuda.api.driver")
    monkeypatch.setitem(sys.modules, double.__name__, double)
    compiler._driver.cache_clear()
    yield double
    compiler._driver.cache_clear()


ARGUMENTS = (2**40, 5)


def test_kernels_are_compiled_by_cupy_and_put_on_the_stream_that_is_named(
    cupy: types.ModuleType, driver: types.ModuleType
) -> None:
    events = CuPy(cupy).events
    launch = compiler.compiled("the source", "gather")

    launch(77, 3, 128, ARGUMENTS)
    launch(77, 3, 128, ARGUMENTS)

    assert events == ["the source", *[("gather", (3,), (128,), [2**40, 5], 77)] * 2]


def test_the_driver_is_called_directly_once_a_threads_context_is_there(
    cupy: types.ModuleType, driver: types.ModuleType
) -> None:
    double = CuPy(cupy)
    driver.launchKernel = double.launch_kernel
    launch = compiler.compiled("the source", "gather")
    by_cupy, by_driver = (
        ("gather", (3,), (128,), [2**40, 5], 77),
        ("driver", 1234, 4, 1, 1, 128, 1, 1, 0, 78, [-1, 2**62]),
    )

    for _ in range(2):  # each thread once
        with ThreadPoolExecutor(1) as thread:
            thread.submit(launch, 77, 3, 128, ARGUMENTS).result()
            thread.submit(launch, 78, 4, 128, (-1, 2**62)).result()

    assert double.events == ["the source", by_cupy, by_driver, by_cupy, by_driver]


@pytest.mark.parametrize("is_direct", [False, True], ids=["by CuPy", "by the driver"])
def test_a_kernel_that_cannot_be_launched_is_an_error_of_ours(
    is_direct: bool, cupy: types.ModuleType, driver: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")

    CuPy(cupy)
    driver.launchKernel = fail
    launch = compiler.compiled("the source", "gather")
    if is_direct:
        launch(77, 3, 128, ARGUMENTS)
    else:
        monkeypatch.setattr(_Function, "__call__", fail)

    with pytest.raises(BackendError, match="could not be launched: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"):
        launch(77, 3, 128, ARGUMENTS)


def test_a_compiler_that_fails_is_an_error_of_ours(cupy: types.ModuleType) -> None:
    def fail(code: str) -> None:
        raise RuntimeError("libnvrtc.so.13 is missing\nand so on")

    cupy.RawModule = fail

    with pytest.raises(BackendError, match=r"could not compile a kernel: libnvrtc\.so\.13 is missing$"):
        compiler.compiled("the source", "gather")


@pytest.mark.usefixtures("versions")
@pytest.mark.parametrize(
    ("installed", "expected"),
    [({"cupy-cuda13x": "14.0.0"}, "14.0.0"), ({"cupy": "15.1"}, "15.1"), ({}, "unknown")],
)
def test_cupys_version_is_known_without_importing_it(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], expected: str
) -> None:
    def version_of(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(importlib.metadata, "version", version_of)

    assert compiler.version() == expected


@pytest.mark.usefixtures("versions")
def test_without_cupy_there_is_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

    assert compiler.version() is None
