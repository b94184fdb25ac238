"""Products by panels in C: vectors, threads, workspace, and where they are tried. More: test_pointwise.py."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

from mucudnn.algorithms import GradientSum, named
from mucudnn.algorithms.compiled.compiler import compiler
from mucudnn.algorithms.panels import PanelAlgorithm, algorithm, kernels, offers
from mucudnn.algorithms.panels.shares import Shares
from mucudnn.algorithms.panels.source import source_of
from mucudnn.errors import BackendError
from mucudnn.problem import ConvOp, ConvProblem, Layout
from tests.algorithms.allocations import allocated_bytes
from tests.algorithms.kernels import GuardedBuffer, compute
from tests.algorithms.strict_c import assert_is_c_without_a_warning
from tests.algorithms.tried import names, pointwise
from tests.algorithms.vectors import lengths_of_vectors
from tests.operands import operands_of, poisoned_result, reference, relative_error

pytestmark = pytest.mark.usefixtures("one_thread")

BOUNDS = {"float32": 1e-6, "float64": 1e-12}


def a_layer(**changes: object) -> ConvProblem:
    shape = {"in_channels": 70, "out_channels": 37, "dtype": "float32"}
    return pointwise(9, 11, **{**shape, **changes})


vector_bytes = lengths_of_vectors(kernels, algorithm)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("layout", "filter_layout"), [*itertools.product(Layout, Layout)])
@pytest.mark.parametrize("op", ConvOp)
def test_vectors_of_any_length_compute_the_same(
    vector_bytes: int, op: ConvOp, layout: Layout, filter_layout: Layout, dtype: str
) -> None:
    problem = a_layer(op=op, layout=layout, filter_layout=filter_layout, dtype=dtype, bias=op is ConvOp.FPROP)
    operands, each = operands_of(problem), PanelAlgorithm(2)

    result, is_good = compute(each, problem, *operands)

    width = (4 if vector_bytes == 64 else 2) * vector_bytes // (8 if dtype == "float64" else 4)
    assert each.shares(problem).width == width
    assert is_good
    assert relative_error(result, reference(problem, *operands)) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("n_bytes", [16, 32, 64])
def test_the_source_is_c_without_a_warning(dtype: str, n_bytes: int, tmp_path: Path) -> None:
    assert_is_c_without_a_warning(source_of(dtype, n_bytes), tmp_path)


def test_long_sums_do_not_pile_up_roundings() -> None:
    problem = a_layer(op=ConvOp.WGRAD, batch=8, in_channels=16, out_channels=16, input_size=(160, 160))
    operands = operands_of(problem)

    result, _ = compute(PanelAlgorithm(), problem, *operands)

    assert problem.terms > 10**5
    assert relative_error(result, reference(problem, *operands)) <= 1e-6  # though 3.5e-6 are allowed


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("op", [ConvOp.FPROP, ConvOp.DGRAD])
def test_nothing_is_written_beside_a_result_that_is_part_of_a_larger_one(op: ConvOp, layout: Layout) -> None:
    problem = a_layer(op=op, layout=layout, filter_layout=layout)
    first, second, _ = operands_of(problem)
    shape = problem.output_shape if op is ConvOp.FPROP else problem.input_shape
    last = {Layout.CONTIGUOUS: torch.contiguous_format, Layout.CHANNELS_LAST: torch.channels_last}[layout]
    around = torch.full((shape[0] + 2, *shape[1:]), 7.0).contiguous(memory_format=last)

    result, _ = compute(PanelAlgorithm(2), problem, first, second, out=around[1:-1])

    assert (around[0] == 7).all()
    assert (around[-1] == 7).all()
    assert relative_error(result, reference(problem, first, second)) <= BOUNDS["float32"]


def test_what_is_not_what_it_was_tuned_for_is_refused_before_c_reads_it() -> None:
    problem = a_layer()
    image, weight, _ = operands_of(problem)

    with pytest.raises(BackendError, match="is needed, but got"):
        compute(PanelAlgorithm(), problem, image[..., 1:], weight)
    with pytest.raises(BackendError, match="is needed, but got"):
        compute(PanelAlgorithm(), problem, image, weight[1:])


@pytest.mark.parametrize("layout", Layout)
def test_the_filter_alone_takes_workspace_where_pixels_are_rows(layout: Layout) -> None:
    ops = [a_layer(op=op, layout=layout, out_channels=128, in_channels=64, batch=64) for op in ConvOp]

    taken = [PanelAlgorithm(2).workspace_bytes(each) for each in ops]

    is_packed = layout is Layout.CHANNELS_LAST
    assert taken == [4 * 64 * 128 * is_packed, 4 * 64 * 128 * is_packed, 0]


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("op", [ConvOp.FPROP, ConvOp.DGRAD])
def test_parts_of_several_sizes_share_what_one_has_packed_and_keep_to_the_workspace(
    op: ConvOp, layout: Layout
) -> None:
    problem = a_layer(op=op, layout=layout, batch=7)
    image, weight, _ = operands_of(problem)
    out, each = poisoned_result(problem), PanelAlgorithm(2)
    sizes = [problem.with_batch(6), problem.with_batch(1)]
    buffer = GuardedBuffer(max(map(each.workspace_bytes, sizes)))
    kernels_of_parts = [each.slice_kernel(part, buffer.inside) for part in sizes]

    kernels_of_parts[0].prepare(weight)
    for kernel, here in zip(kernels_of_parts, (slice(0, 6), slice(6, 7)), strict=True):
        kernel.run(image[here], weight, out[here], None)

    assert relative_error(out, reference(problem, image, weight)) <= BOUNDS["float32"]
    assert buffer.is_intact


@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("layout", Layout)
def test_filters_biases_and_gradients_of_any_strides(op: ConvOp, layout: Layout) -> None:
    problem = a_layer(op=op, layout=layout, bias=op is ConvOp.FPROP)
    first, second, bias = operands_of(problem)
    out = poisoned_result(problem)
    if op is ConvOp.WGRAD:
        out = torch.full((problem.in_channels, 2 * problem.out_channels, 1, 1), 7.0).transpose(0, 1)[::2]
    else:
        second = torch.stack([second, second], -1)[..., 0]
    gapped = None if bias is None else bias.repeat_interleave(3)[::3]

    result, _ = compute(PanelAlgorithm(2), problem, first, second, gapped, out=out)

    assert relative_error(result, reference(problem, first, second, bias)) <= BOUNDS["float32"]


@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("layout", Layout)
def test_nothing_is_allocated(op: ConvOp, layout: Layout) -> None:
    problem = a_layer(op=op, layout=layout)
    first, second, _ = operands_of(problem)
    out, each = poisoned_result(problem), PanelAlgorithm()
    buffer = GuardedBuffer(each.workspace_bytes(problem)).inside
    if op is ConvOp.WGRAD:
        sums = each.sum_kernel(problem, buffer)

        def call() -> None:
            sums.add(first, second, GradientSum(out), first=True)
    else:
        slices = each.slice_kernel(problem, buffer)

        def call() -> None:
            slices.prepare(second)
            slices.run(first, second, out, None)

    assert allocated_bytes(call) == 0


@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("channels", [24, 128])
@pytest.mark.parametrize("workers", [2, 5])
def test_threads_share_the_units_or_the_channels_of_a_sum(
    op: ConvOp, layout: Layout, channels: int, workers: int
) -> None:
    shares = Shares(a_layer(op=op, layout=layout, in_channels=channels), 64, workers)

    units, parts = [[*spans] for spans in zip(*shares.all, strict=True)]

    is_by_channels = op is ConvOp.WGRAD and not (channels == 128 and workers == 2)
    assert (len({*units}) == 1) == is_by_channels
    cut = parts if is_by_channels else units
    assert [first for first, _ in cut] == [0, *(last for _, last in cut[:-1])]


def test_a_name_tells_what_runs() -> None:
    assert [PanelAlgorithm(each).name for each in (1, 2)] == ["cc_gemm", "cc_gemm_mt2"]
    assert all(named(PanelAlgorithm(each).name) == PanelAlgorithm(each) for each in (1, 2, 12))
    assert named("cc_gemm_mt1") is None


def test_without_a_compiler_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithm, "compiler", lambda: None)

    assert PanelAlgorithm().refusal(a_layer()) == "there is no C compiler"


@pytest.mark.parametrize(
    ("is_narrow", "vector_bytes", "tried"),
    [(True, 64, (True, True)), (False, 64, (False, True)), (True, 32, (False, False))],
)
def test_it_is_tried_where_blas_does_not_use_whole_vectors(
    is_narrow: bool, vector_bytes: int, tried: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compiler()
    assert found is not None
    monkeypatch.setattr(offers, "compiler", lambda: found._replace(vector_bytes=vector_bytes))
    monkeypatch.setattr(offers, "has_narrow_products", lambda: is_narrow)

    seen = [
        "cc_gemm_mt2" in names(a_layer(), threads=2, compiles=True, exhaustive=is_exhaustive)
        for is_exhaustive in (False, True)
    ]

    assert tuple(seen) == tried
    assert "cc_gemm" not in names(dataclasses.replace(a_layer(), stride=(2, 2)), compiles=True)
