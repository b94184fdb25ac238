"""Algorithms have names that say all about them, and what is offered is worth trying and divides all work."""

import dataclasses
import math
from collections.abc import Iterator

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given

from mucudnn.algorithms import Algorithm, named, offered
from mucudnn.algorithms.tile_geometry import Block, Box, TileGeometry
from mucudnn.algorithms.tiles import TileAlgorithm
from mucudnn.problem import ConvOp, ConvProblem, Layout
from tests.operands import a_convolution

# Names.

NONSENSE = (
    *("", "winograd", "winograd3", "winograd7", "winograd44", "tiles", "Winograd4"),
    *("fft", "fft8", "fft17", "fft66"),
    *("winograd4_rows0", "winograd4_rows01", "winograd4_rows", "winograd4_rows-1", "winograd4_rows1.5"),
    *(
        "winograd4_mt0",
        "winograd4_mt1",
        "winograd4_mt01",
        "winograd4_k0",
        "winograd4_images0",
        "fft16_slices0",
    ),
    *(
        "winograd4_rows2_images2",
        "winograd4_mt2_rows1",
        "winograd4_k2_rows2",
        "winograd4_c2_k2",
        "winograd4_c0",
    ),
    *(
        " winograd4",
        "winograd4 ",
        "winograd4\n",
        "winograd4_",
        "_winograd4",
        "cpu:winograd4",
        "winograd4__k2",
    ),
    *("winograd4_rows1\u0661", "winograd4_k1\uff12", "winograd4_mt1\u0662", "im2col_mt2", "gemm_rows2"),
    *(
        "im2col_rows0",
        "im2col_rows01",
        "im2col_rows\u0661",
        "cc_winograd4_rows0",
        "cc_winograd4_rows2_images2",
    ),
)
"""The digits of the last row are Arabic and wide ones, which `int` understands."""

FAMILIES = ("winograd2", "winograd4", "winograd5", "winograd6", "fft16", "fft28", "fft64")


@pytest.mark.parametrize("name", NONSENSE)
def test_what_is_no_name_of_an_algorithm_has_none(name: str) -> None:
    assert named(name) is None


@pytest.mark.parametrize(
    "name",
    [
        *("im2col", "im2col_rows12", "gemm", *FAMILIES),
        *("winograd4_rows8_mt2", "fft16_images4_k64", "fft16_rows2_c13", "cc_winograd4_rows8_mt2"),
    ],
)
def test_an_algorithm_is_found_by_its_name(name: str) -> None:
    found = named(name)

    assert found is not None
    assert found.name == name


@given(
    st.from_regex(r"(winograd|fft)[0-9]{1,2}(_(images|slices|rows|k|c|mt)[0-9]{1,3}){0,5}", fullmatch=True)
)
def test_no_algorithm_is_found_by_another_name(name: str) -> None:
    found = named(name)

    assert found is None or found.name == name


NUMBERS = st.integers(0, 1000)


@given(st.sampled_from(FAMILIES), NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.integers(1, 300))
def test_every_algorithm_by_tiles_is_found_by_its_name(
    name: str, images: int, slices: int, rows: int, channels: int, summed: int, workers: int
) -> None:
    family = named(name)
    assert isinstance(family, TileAlgorithm)
    algorithm = dataclasses.replace(
        family, images=images, slices=slices, rows=rows, channels=channels, summed=summed, workers=workers
    )

    assert named(algorithm.name) == algorithm


# What is offered.

LONG = a_convolution(
    batch=4, in_channels=64, out_channels=64, input_size=(56, 56), kernel_size=(15, 15), padding=(7, 7)
)


@pytest.mark.parametrize(
    ("changes", "families"),
    [
        ({}, ["fft24", "fft28", "fft34"]),
        ({"kernel_size": (11, 11), "padding": (5, 5)}, ["fft24"]),
        ({"kernel_size": (7, 7), "padding": (3, 3), "input_size": (14, 14)}, ["fft16", "fft20"]),
        ({"kernel_size": (31, 31), "padding": (15, 15)}, ["fft44"]),
        ({"kernel_size": (5, 5), "padding": (2, 2)}, []),
    ],
)
def test_fourier_tiles_are_of_a_size_that_fits_the_image(
    changes: dict[str, tuple[int, int]], families: list[str]
) -> None:
    problem = dataclasses.replace(LONG, **changes)
    names = [each.name for each in offered_tiles(problem, 1, whole=False)]

    assert [name for name in names if name.startswith("fft") and "_" not in name] == families


def test_an_exhaustive_search_meets_the_smallest_fourier_tiles_of_each_number() -> None:
    every = offered(LONG, 1, whole=False, exhaustive=True)
    lengths = [each.inputs for each in every if isinstance(each, TileAlgorithm) and each == family_of(each)]

    assert lengths == [16, 18, 20, 22, 24, 26, 28, 34, 42]


def family_of(algorithm: TileAlgorithm) -> TileAlgorithm:
    return TileAlgorithm(outputs=algorithm.outputs, inputs=algorithm.inputs)


CHANNELS = st.sampled_from((1, 2, 3, 6, 16, 64, 128, 512))
BATCHES = st.sampled_from((1, 2, 3, 4, 6, 8, 12, 32))
DTYPES = st.sampled_from(("float32", "float64"))
TAPS = st.sampled_from((1, 2, 3, 3, 3, 5, 7, 9, 15))
SLICES_OF_FILTER = st.integers(1, 3)


@st.composite
def problems(draw: st.DrawFn, most_padding: int = 0, strides: tuple[int, ...] = (1, 1, 1, 2)) -> ConvProblem:
    """In one to three dimensions; padding to r - 1 and so much beyond."""
    rank = draw(st.integers(1, 3))
    taps = [*([draw(SLICES_OF_FILTER)] if rank == 3 else []), *(draw(TAPS) for _ in range(min(rank, 2)))]
    padding = [draw(st.integers(0, r - 1 + most_padding)) for r in taps]
    sizes = [draw(st.integers(max(r - 2 * p, 1), r + 30)) for r, p in zip(taps, padding, strict=True)]
    return a_convolution(
        op=draw(st.sampled_from(ConvOp)),
        batch=draw(BATCHES),
        in_channels=draw(CHANNELS),
        out_channels=draw(CHANNELS),
        input_size=tuple(sizes),
        kernel_size=tuple(taps),
        padding=tuple(padding),
        stride=(draw(st.sampled_from(strides)),) * rank,
        dilation=(1,) * rank,
        dtype=draw(DTYPES),
        layout=draw(st.sampled_from(Layout)),
        filter_layout=draw(st.sampled_from(Layout)),
    )


THREADS = st.integers(1, 4)


def some_offered(problem: ConvProblem, threads: int, whole: bool) -> list[Algorithm]:
    """What is offered, for problems for which anything is."""
    found = [*offered(problem, threads, whole)]
    assume(found)
    return found


def offered_tiles(problem: ConvProblem, threads: int, whole: bool = True) -> list[TileAlgorithm]:
    return [each for each in offered(problem, threads, whole) if isinstance(each, TileAlgorithm)]


def has_blocks(algorithm: TileAlgorithm) -> bool:
    return bool(algorithm.images or algorithm.slices or algorithm.rows)


@given(problems(most_padding=2), THREADS, st.booleans())
def test_what_is_offered_is_found_by_its_name(problem: ConvProblem, threads: int, whole: bool) -> None:
    for each in some_offered(problem, threads, whole):
        assert named(each.name) == each


@given(problems(most_padding=2), THREADS, st.booleans())
def test_what_is_offered_computes_the_problem(problem: ConvProblem, threads: int, whole: bool) -> None:
    for each in some_offered(problem, threads, whole):
        assert each.refusal(problem) is None


@given(problems(most_padding=2), THREADS, st.booleans())
def test_nothing_is_offered_twice(problem: ConvProblem, threads: int, whole: bool) -> None:
    names = [each.name for each in some_offered(problem, threads, whole)]

    assert len(names) == len(set(names))


@given(problems(), THREADS, st.booleans())
def test_workers_are_as_many_as_the_threads_that_there_are(
    problem: ConvProblem, threads: int, whole: bool
) -> None:
    tiles = offered_tiles(problem, threads, whole)
    assume(tiles)

    assert {each.workers for each in tiles} <= {1, threads}


@given(problems(), THREADS)
def test_blocks_are_offered_for_whole_batches_and_single_images_only(
    problem: ConvProblem, threads: int
) -> None:
    has_any = any(has_blocks(each) for each in offered_tiles(problem, threads, whole=False))

    assert problem.batch == 1 or not has_any


LARGE_FILTER_BYTES = 4 * 2**20
"""Transformed filters that are no larger stay in a second-level cache, or nearly so."""


@given(problems(), THREADS, st.booleans())
def test_some_channels_at_a_time_are_offered_for_large_filters_only(
    problem: ConvProblem, threads: int, whole: bool
) -> None:
    tiles = offered_tiles(problem, threads, whole)
    assume(tiles)

    for each in tiles:
        geometry = TileGeometry(dataclasses.replace(each, channels=0), problem)
        values = geometry.taps[0] * geometry.planes * geometry.x_channels * geometry.y_channels
        assert not each.channels or values * problem.itemsize > LARGE_FILTER_BYTES


@given(problems(), THREADS, st.booleans())
def test_sums_in_parts_are_offered_only_where_the_filter_is_large_and_x_has_more_channels_than_y(
    problem: ConvProblem, threads: int, whole: bool
) -> None:
    tiles = offered_tiles(problem, threads, whole)
    assume(tiles)

    for each in tiles:
        geometry = TileGeometry(dataclasses.replace(each, summed=0), problem)
        values = geometry.taps[0] * geometry.planes * geometry.x_channels * geometry.y_channels
        is_large = values * problem.itemsize > LARGE_FILTER_BYTES
        assert not each.summed or (is_large and geometry.x_channels > geometry.y_channels)


NARROWING = a_convolution(
    batch=16, in_channels=832, out_channels=128, input_size=(7, 7), kernel_size=(5, 5), padding=(2, 2)
)
"""From which few channels are made of many, by a large filter."""


@pytest.mark.parametrize("batch", [16, 4])
def test_sums_in_parts_of_a_few_mib_are_offered_at_every_size(batch: int) -> None:
    names = {each.name for each in offered_tiles(NARROWING.with_batch(batch), 1, batch == 16)}

    assert "winograd4_c104" in names
    assert TileAlgorithm(outputs=4, summed=104).workspace_bytes(NARROWING) < 9 * 2**20


@pytest.mark.parametrize("channels", [521, 514])
def test_numbers_of_channels_without_a_fitting_divisor_are_not_summed_in_parts(channels: int) -> None:
    problem = dataclasses.replace(NARROWING, in_channels=channels)

    assert not any(each.summed for each in offered_tiles(problem, 1, whole=True))


@pytest.mark.parametrize(
    ("name", "problem", "refusal"),
    [
        ("winograd4_c104", NARROWING.with_op(ConvOp.WGRAD), "a weight gradient has no sum over channels"),
        ("winograd4_c100", NARROWING, "the channels are no multiple of that"),
        ("winograd4_c832", NARROWING, "there are no more channels than that"),
        ("winograd4_k128", NARROWING, "there are no more channels than that"),
        ("winograd4_k100", NARROWING, "the channels are no multiple of that"),
        ("winograd4_k64_c104", NARROWING, "some channels at a time are those of one side"),
        ("winograd4_c104_mt2", NARROWING, "some channels at a time are for one thread"),
    ],
)
def test_sums_in_other_parts_are_refused(name: str, problem: ConvProblem, refusal: str) -> None:
    algorithm = named(name)

    assert algorithm is not None
    assert algorithm.refusal(problem) == refusal


def test_the_transform_of_5x5_is_one_product_and_that_of_larger_filters_two() -> None:
    large = dataclasses.replace(NARROWING, kernel_size=(7, 7), padding=(3, 3))

    assert TileGeometry(TileAlgorithm(outputs=4), NARROWING).has_short_filter
    assert not TileGeometry(TileAlgorithm(inputs=16), large).has_short_filter


LAYER = a_convolution(batch=32, in_channels=64, out_channels=64, input_size=(112, 112))
"""One whose images are some blocks each."""

DEEP = a_convolution(
    batch=2,
    in_channels=32,
    out_channels=32,
    input_size=(16, 28, 28),
    kernel_size=(3, 3, 3),
    stride=(1, 1, 1),
    padding=(1, 1, 1),
    dilation=(1, 1, 1),
)
LATE = a_convolution(batch=32, in_channels=512, out_channels=512, input_size=(7, 7))
"""One whose images are a small part of a block each, with a large filter."""


@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize(
    ("problem", "axis"), [(LAYER, "rows"), (LAYER.with_batch(1), "rows"), (DEEP, "slices"), (LATE, "images")]
)
def test_blocks_are_of_rows_of_large_images_slices_of_deep_ones_and_several_small_ones(
    problem: ConvProblem, axis: str, op: ConvOp
) -> None:
    in_blocks = [each for each in offered_tiles(problem.with_op(op), threads=1) if has_blocks(each)]

    assert in_blocks
    assert all(getattr(each, axis) for each in in_blocks)


@pytest.mark.parametrize(("side", "rows"), [(56, {7}), (112, {2, 7}), (64, {4})])
def test_blocks_of_rows_leave_no_rest_where_there_is_a_part_that_leaves_none(
    side: int, rows: set[int]
) -> None:
    problem = dataclasses.replace(LAYER, input_size=(side, side))
    offered_rows = {each.rows for each in offered_tiles(problem, threads=1) if each.outputs == 4}

    assert offered_rows - {0} == rows
    assert all(-(-side // 4) % each == 0 for each in rows)


@pytest.mark.parametrize("op", ConvOp)
def test_workers_are_offered_where_there_are_threads(op: ConvOp) -> None:
    workers = {each.workers for each in offered_tiles(LAYER.with_op(op), threads=3)}

    assert workers == {1, 3}


@pytest.mark.parametrize("op", ConvOp)
def test_some_channels_at_a_time_are_offered_for_a_large_filter(op: ConvOp) -> None:
    assert any(each.channels for each in offered_tiles(LATE.with_op(op), threads=1))


@pytest.mark.parametrize("op", ConvOp)
def test_rows_come_with_few_channels_where_memory_is_short(op: ConvOp) -> None:
    problem = a_convolution(op=op, batch=16, in_channels=128, out_channels=256, input_size=(56, 56))
    of_rows = [each for each in offered_tiles(problem, threads=1) if each.rows]
    whole, some = (
        min(each.workspace_bytes(problem) for each in of_rows if bool(each.channels) is has_channels)
        for has_channels in (False, True)
    )

    assert some < 6.1 * 2**20 < whole  # an eighth of what PyTorch's own hides there


def test_filters_of_one_tap_are_no_matter_of_tiles() -> None:
    problem = dataclasses.replace(LAYER, kernel_size=(1, 1), padding=(0, 0))

    assert not offered_tiles(problem, threads=2)
    assert "gemm" in [each.name for each in offered(problem, threads=2)]


# How blocks divide the work.

BLOCKS = (
    *({axis: number} for axis in ("images", "slices", "rows") for number in (1, 2, 3)),
    *({axis: number} for axis in ("channels", "summed") for number in (1, 2)),
    {},
)
VARIANTS = (*({**blocks, "workers": workers} for workers in (2, 3) for blocks in BLOCKS), *BLOCKS)

Case = tuple[TileAlgorithm, ConvProblem]


@st.composite
def tilings(draw: st.DrawFn) -> Case:
    """An algorithm by tiles, and a problem that it computes."""
    problem = draw(problems(most_padding=4, strides=(1,)))
    families = [each for each in map(named, FAMILIES) if each is not None and each.refusal(problem) is None]
    assume(families)
    family = draw(st.sampled_from(families))
    assert isinstance(family, TileAlgorithm)
    variants = [dataclasses.replace(family, **each) for each in VARIANTS]
    fitting = [each for each in variants if each.refusal(problem) is None]
    return draw(st.sampled_from(fitting)), problem


@given(tilings())
def test_the_workers_together_compute_all_blocks_once(tiling: Case) -> None:
    geometry = TileGeometry(*tiling)
    of_workers = [geometry.blocks_of(worker) for worker in range(geometry.workers)]

    assert max(map(len, of_workers)) <= min(map(len, of_workers)) + 1
    assert [block for some in of_workers for block in some] == geometry.blocks


@given(tilings())
def test_every_pixel_of_y_is_computed_once(tiling: Case) -> None:
    geometry = TileGeometry(*tiling)
    times = np.zeros((geometry.batch, *geometry.y_size[:2]), dtype=int)
    for block in geometry.blocks:
        times[place(block.y, geometry.images)] += 1

    assert (times == 1).all()
    assert all(end <= size for block in geometry.blocks for end, size in ends(block.y, geometry.y_size))


@given(tilings())
def test_a_block_reads_all_that_its_outputs_need(tiling: Case) -> None:
    geometry = TileGeometry(*tiling)

    for block in geometry.blocks:
        assert not (needed(block, geometry) & ~read(block, geometry)).any()


@given(tilings())
def test_what_a_block_reads_lies_in_the_image_and_in_its_own_padding(tiling: Case) -> None:
    geometry = TileGeometry(*tiling)
    room = geometry.chunk_shape[1:3]

    boxes = [box for block in geometry.blocks for box in block.chunks]
    for box in (box for box in boxes if math.prod(box.size)):  # others lie wholly in the padding
        assert all(end <= size for end, size in ends(box, geometry.x_size))
        for before, size, most in zip(box.before, box.size, room, strict=True):
            assert 0 <= before <= before + size <= most


@pytest.mark.parametrize("op", ConvOp)
def test_workers_that_transform_the_filter_do_so_in_memory_of_their_own(op: ConvOp) -> None:
    problem = a_convolution(op=op, batch=4, in_channels=4, out_channels=4)
    algorithm = TileAlgorithm(outputs=4, channels=2, workers=2)
    regions = {region.name for region in TileGeometry(algorithm, problem).regions}

    assert algorithm.refusal(problem) is not None or {"filter", "filter1"} <= regions


Mask = npt.NDArray[np.bool_]


def place(box: Box, images: int) -> tuple[slice, slice, slice]:
    """Images, slices and rows of a box."""
    d, h = box.size
    return (
        slice(box.image, box.image + images),
        slice(box.slice, box.slice + d),
        slice(box.row, box.row + h),
    )


def ends(box: Box, size: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Where the box ends, and where the image does, along d and h."""
    return zip((box.slice + box.size[0], box.row + box.size[1]), size[:2], strict=True)


def read(block: Block, geometry: TileGeometry) -> Mask:
    """Images, slices and rows of x that a block reads, chunk by chunk."""
    mask = np.zeros((geometry.batch, *geometry.x_size[:2]), dtype=bool)
    for box in block.chunks:
        mask[place(box, geometry.chunk[0])] = True
    return mask


def needed(block: Block, geometry: TileGeometry) -> Mask:
    """Those that the correlation's sum runs over: x at output - padding + tap, as far as x reaches."""
    mask = np.zeros((geometry.batch, *geometry.x_size[:2]), dtype=bool)
    first = [
        start - padding
        for start, padding in zip((block.y.slice, block.y.row), geometry.padding[:2], strict=True)
    ]
    last = [
        start + size + taps - 1
        for start, size, taps in zip(first, block.y.size, geometry.taps[:2], strict=True)
    ]
    deep, high = (slice(max(begin, 0), max(end, 0)) for begin, end in zip(first, last, strict=True))
    mask[block.y.image : block.y.image + geometry.images, deep, high] = True
    return mask
