"""Problems for all algorithms, and running one of them: what the tests of kernels share."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator
from typing import TypeAlias

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from mucudnn.algorithms import Algorithm, GradientSum, SliceKernel, SumKernel, named
from mucudnn.problem import ConvOp, ConvProblem, Layout
from tests.operands import a_convolution, poisoned_result

POISON = 0xFF
"""Bytes that make every float NaN."""

GUARD_BYTES = 256
GUARD = 0xA5

FLOAT64_BOUND = 1e-12
"""Any wrong tap, pixel or channel is off by far more, and the worst form loses three of 16 digits."""

WINOGRAD4_BOUND = 1e-5
"""F(4), F(5) and F(6) lose a digit: their matrices have entries from 1/90 to 8 and more."""

FAMILIES = (
    *("im2col", "winograd2", "winograd4", "winograd5", "winograd6", "fft16", "fft32"),
    *("cc_winograd2", "cc_winograd4", "cc_winograd4_fma", "cc_depthwise"),
)

VARIANTS = (
    *("im2col_rows1", "im2col_rows2", "im2col_rows5"),
    *("winograd4_rows1", "winograd4_rows2", "winograd6_rows1", "fft16_rows1"),
    *("winograd4_images1", "winograd4_images2"),
    *("winograd4_slices1", "winograd4_slices2"),
    *("winograd4_k1", "winograd4_k2", "winograd5_k2", "fft16_k2"),
    *("winograd4_c1", "winograd4_c2", "winograd4_images1_c2", "winograd4_rows1_c2", "fft16_c2"),
    *("winograd4_mt2", "winograd4_rows1_mt2", "winograd4_images1_mt2"),
    *("cc_winograd4_rows1", "cc_winograd4_rows3_mt2", "cc_winograd4_mt2", "cc_winograd6_rows2"),
    *("cc_winograd4_k2", "cc_winograd4_k16", "cc_winograd4_k4_mt2"),
    *("cc_winograd4_fma_rows3_mt2", "cc_winograd4_fma_k2", "cc_winograd6_fma_rows2"),
    *("cc_depthwise_mt2", "cc_depthwise_mt3"),
)
"""In blocks, by channels, and on workers: of each kind of family one or more."""

KINDS = (
    "im2col_rows2",
    *("winograd4_rows1", "winograd4_images1", "winograd4_slices1", "winograd4_k2"),
    *("winograd4_c2", "winograd4_mt2", "winograd4_rows1_mt2"),
    *("cc_winograd4_rows1", "cc_winograd4_mt2", "cc_winograd4_k2", "cc_depthwise_mt2"),
)
"""One variant of each kind."""

COMPILED = tuple(name for name in (*FAMILIES, *VARIANTS) if name.startswith("cc_"))

OF_TORCH = tuple(name for name in VARIANTS if not name.startswith("cc_"))
"""Those that are composed of torch's operations."""

IN_BLOCKS = tuple(name for name in OF_TORCH if any(axis in name for axis in ("rows", "images", "slices")))

EVERY = (*FAMILIES, *VARIANTS)

TILES = tuple(name for name in (*FAMILIES, *KINDS) if not name.startswith(("im2col", "cc_depthwise")))

GROUPED = tuple(name for name in VARIANTS if "_k" in name)
"""These cut a micro-batch into equal chunks, whose size is not a matter of its size alone."""

SUMMED = tuple(name for name in VARIANTS if "_c" in name)

SAME_LAYOUTS = tuple((layout, layout) for layout in Layout)
MIXED_LAYOUTS = tuple(itertools.permutations(Layout))
"""Of images and filters."""

SQUARE = a_convolution(dtype="float64")


def a_double(**changes: object) -> ConvProblem:
    """In as many dimensions as its kernel has."""
    taps = changes.get("kernel_size", SQUARE.kernel_size)
    ones = (1,) * len(taps)
    return a_convolution(**{"dtype": "float64", "stride": ones, "dilation": ones, **changes})


def for_blocks(**changes: object) -> ConvProblem:
    """One that can be cut into blocks: of 4 images, 3 tile rows of F(4), and even numbers of channels."""
    even = {"batch": 4, "in_channels": 4, "out_channels": 6, "input_size": (12, 9)}
    return a_double(**{**even, **changes})


def depthwise(channels: int, **changes: object) -> ConvProblem:
    return a_double(in_channels=channels, out_channels=channels, groups=channels, **changes)


PROBLEMS = {
    "3x3": SQUARE,
    "whole tiles": a_double(input_size=(8, 12)),
    "no padding": a_double(padding=(0, 0)),
    "padding r-1": a_double(padding=(2, 2)),
    "padding r": a_double(padding=(3, 3)),
    "padding beyond the filter": a_double(padding=(4, 3)),
    "1x1": a_double(kernel_size=(1, 1), padding=(0, 0)),
    "padded 1x1": a_double(kernel_size=(1, 1)),
    "1x3": a_double(kernel_size=(1, 3), padding=(0, 1)),
    "5x3": a_double(kernel_size=(5, 3), padding=(2, 1)),
    "1x7": a_double(kernel_size=(1, 7), padding=(0, 3)),
    "5x5, padding 4": a_double(kernel_size=(5, 5), padding=(4, 4)),
    "9x9": a_double(kernel_size=(9, 9), padding=(4, 4), input_size=(20, 9)),
    "9x9, large filter": a_double(kernel_size=(9, 9), padding=(4, 4), in_channels=24, out_channels=40),
    "15x2": a_double(kernel_size=(15, 2), padding=(7, 0)),
    "31x31": a_double(kernel_size=(31, 31), padding=(15, 15), in_channels=2, out_channels=1),
    "filter as large as the image": a_double(kernel_size=(9, 11), padding=(0, 0)),
    "one pixel": a_double(input_size=(1, 1)),
    "one pixel, 9x9": a_double(input_size=(1, 1), kernel_size=(9, 9), padding=(4, 4)),
    "one row": a_double(input_size=(1, 9)),
    "one channel": a_double(in_channels=1, out_channels=1),
    "one channel in": a_double(in_channels=1),
    "one channel out": a_double(out_channels=1),
    "one sample": a_double(batch=1),
    "bias": a_double(bias=True),
    "large image": a_double(batch=1, in_channels=1, out_channels=2, input_size=(97, 101)),
    "planes a multiple of 4 KiB": a_double(batch=1, in_channels=4, out_channels=4, input_size=(16, 32)),
    "stride 2": a_double(stride=(2, 2), bias=True),
    "stride 2, rest": a_double(stride=(2, 3), input_size=(10, 10)),
    "dilation": a_double(dilation=(2, 3), padding=(2, 3)),
    "groups": a_double(in_channels=4, out_channels=6, groups=2, bias=True),
    "depthwise": a_double(in_channels=3, out_channels=6, groups=3, padding=(0, 0)),
    "channels apart": depthwise(20, bias=True),
    "few channels apart": depthwise(3, kernel_size=(2, 6), padding=(0, 3)),
    "channels apart, 7x7": depthwise(9, kernel_size=(7, 7), padding=(3, 3), input_size=(10, 8)),
    "channels apart, 5x5, stride 2": depthwise(16, kernel_size=(5, 5), stride=(2, 2), padding=(2, 2)),
    "channels apart, stride 3": depthwise(17, kernel_size=(4, 5), stride=(3, 1), padding=(2, 1), bias=True),
    "channels apart, gaps": depthwise(10, kernel_size=(2, 2), stride=(3, 4), padding=(0, 0)),
    "channels apart, dilation": depthwise(12, dilation=(2, 3), padding=(2, 1)),
    "channels apart, padding beyond": depthwise(8, kernel_size=(2, 3), padding=(4, 5), input_size=(3, 2)),
    "channels apart, large image": depthwise(18, batch=1, input_size=(97, 101), bias=True),
    "channels apart, large image, stride 2": depthwise(
        16, batch=1, input_size=(97, 102), stride=(2, 2), kernel_size=(4, 4)
    ),
    "channels apart, long rows": depthwise(9, batch=1, input_size=(5, 3001), bias=True),
    "channels apart, long rows, stride 3": depthwise(
        10, batch=1, input_size=(4, 4099), kernel_size=(3, 4), stride=(2, 3), padding=(1, 2)
    ),
    "channels apart, 1-D": depthwise(11, input_size=(50,), kernel_size=(17,), padding=(8,), bias=True),
    "channels apart, 3-D": depthwise(
        9, input_size=(5, 6, 7), kernel_size=(3, 3, 3), stride=(2, 1, 2), padding=(1, 1, 0)
    ),
    "1-D, stride 2": a_double(input_size=(9,), kernel_size=(3,), stride=(2,), padding=(1,)),
    "1-D, 3 taps": a_double(input_size=(11,), kernel_size=(3,), padding=(1,), bias=True),
    "1-D, 9 taps": a_double(input_size=(50,), kernel_size=(9,), padding=(4,)),
    "3-D, stride 2": a_double(
        input_size=(4, 5, 6), kernel_size=(3, 2, 1), stride=(1, 2, 1), padding=(1, 0, 0), dilation=(1, 1, 2)
    ),
    "3x3x3": a_double(input_size=(5, 9, 8), kernel_size=(3, 3, 3), padding=(1, 1, 1), bias=True),
    "3x3x3, no padding": a_double(input_size=(4, 5, 6), kernel_size=(3, 3, 3), padding=(0, 0, 0)),
    "3x3x3, depth padding 2": a_double(input_size=(3, 7, 5), kernel_size=(3, 3, 3), padding=(2, 1, 1)),
    "3x3x3, depth padding 4": a_double(input_size=(2, 7, 5), kernel_size=(3, 3, 3), padding=(4, 1, 1)),
    "3x3x3, one slice": a_double(input_size=(1, 6, 5), kernel_size=(3, 3, 3), padding=(1, 1, 1)),
    "1x3x3": a_double(input_size=(3, 5, 6), kernel_size=(1, 3, 3), padding=(0, 1, 1)),
    "3x1x3": a_double(input_size=(4, 5, 6), kernel_size=(3, 1, 3), padding=(1, 0, 2)),
    "3x1x1": a_double(input_size=(9, 3, 4), kernel_size=(3, 1, 1), padding=(1, 0, 0)),
    "3x2x2": a_double(input_size=(6, 5, 7), kernel_size=(3, 2, 2), padding=(1, 0, 1), bias=True),
    "2x5x9": a_double(input_size=(3, 7, 25), kernel_size=(2, 5, 9), padding=(0, 2, 4)),
}

BLOCKED = {
    "3x3": for_blocks(bias=True),
    "whole tiles": for_blocks(input_size=(12, 8)),
    "5 tile rows": for_blocks(input_size=(17, 10), padding=(0, 2)),
    "padding r": for_blocks(padding=(3, 3)),
    "padding longer than a block": for_blocks(padding=(7, 1)),
    "2x3": for_blocks(kernel_size=(2, 3), padding=(0, 1)),
    "7x7, large filter": for_blocks(in_channels=24, out_channels=40, kernel_size=(7, 7), padding=(3, 3)),
    "7x7": for_blocks(input_size=(21, 22), kernel_size=(7, 7), padding=(3, 3), bias=True),
    "1-D, 3 taps": for_blocks(input_size=(11,), kernel_size=(3,), padding=(1,), bias=True),
    "1-D, 7 taps": for_blocks(input_size=(25,), kernel_size=(7,), padding=(2,)),
    "3x3x3": for_blocks(input_size=(5, 9, 8), kernel_size=(3, 3, 3), padding=(1, 1, 1), bias=True),
    "3x3x3, depth padding 2": for_blocks(input_size=(3, 9, 7), kernel_size=(3, 3, 3), padding=(2, 1, 1)),
    "vectors of channels and a rest": for_blocks(in_channels=22, out_channels=38, bias=True),
    "vectors of channels, 5x3": for_blocks(in_channels=32, out_channels=17, kernel_size=(5, 3)),
    "chunks of some images": for_blocks(batch=12, in_channels=16, out_channels=16, input_size=(20, 20)),
    "chunks of some rows": for_blocks(batch=2, in_channels=16, out_channels=16, input_size=(64, 64)),
    "3x3x3, one sample": for_blocks(batch=1, input_size=(3, 9, 7), kernel_size=(3, 3, 3), padding=(0, 1, 0)),
    "1x3x3": for_blocks(input_size=(3, 9, 8), kernel_size=(1, 3, 3), padding=(0, 1, 1)),
    "1x3x3, depth padding 2": for_blocks(input_size=(2, 9, 8), kernel_size=(1, 3, 3), padding=(2, 1, 1)),
    "3x3x3, vectors of channels and a rest": for_blocks(
        batch=2,
        in_channels=22,
        out_channels=38,
        input_size=(9, 9, 6),
        kernel_size=(3, 3, 3),
        padding=(1, 1, 0),
        bias=True,
    ),
    "stride 2": for_blocks(stride=(2, 2), bias=True),
    "channels apart": for_blocks(in_channels=20, out_channels=20, groups=20, bias=True),
    "channels apart, 7x7, stride 2": for_blocks(
        in_channels=9, out_channels=9, groups=9, kernel_size=(7, 7), padding=(3, 3), stride=(2, 2)
    ),
    "stride 3, rows between": for_blocks(
        input_size=(17, 11), kernel_size=(2, 2), stride=(3, 3), padding=(0, 0)
    ),
    "dilation and groups": for_blocks(dilation=(2, 1), padding=(2, 1), groups=2),
    "2x2x2, stride 2": for_blocks(
        input_size=(7, 4, 6), kernel_size=(2, 2, 2), stride=(2, 2, 2), padding=(0, 0, 0)
    ),
    "3x1x1": for_blocks(input_size=(17, 3, 4), kernel_size=(3, 1, 1), padding=(2, 0, 0), bias=True),
    "3x1x3": for_blocks(input_size=(6, 5, 7), kernel_size=(3, 1, 3), padding=(1, 0, 1), bias=True),
}
"""For variants, of which each accepts some."""

VARIED = {
    name: PROBLEMS[name]
    for name in (
        *("3x3", "whole tiles", "5x3", "9x9", "1x1", "large image", "stride 2", "groups", "3-D, stride 2"),
        *("1-D, 3 taps", "3x3x3", "1x3x3", "channels apart", "channels apart, 5x5, stride 2"),
    )
}
"""One of each kind: for what does not depend on every detail of the shape."""

BLOCKED_NAMES = (
    *("3x3", "5 tile rows", "7x7", "1-D, 3 taps", "3x3x3", "vectors of channels and a rest"),
    *("3x3x3, vectors of channels and a rest", "stride 2", "dilation and groups", "channels apart"),
)

BLOCKED_VARIED = {name: BLOCKED[name] for name in BLOCKED_NAMES}


Test: TypeAlias = Callable[..., None]


def accepted(
    problems: dict[str, ConvProblem],
    *ops: ConvOp,
    blocked: dict[str, ConvProblem] = BLOCKED_VARIED,
    dtype: str = "float64",
    names: tuple[str, ...] = (*FAMILIES, *KINDS),
    layouts: tuple[tuple[Layout, Layout], ...] = SAME_LAYOUTS,
) -> Callable[[Test], Test]:
    """Have a test see what algorithms accept of `problems`, or variants of `blocked`, in all ops and layouts.

    These are looked at within one test, one after another: thousands of tests cost more than what they do.
    Without --thorough, an algorithm computes an op of a problem in one layout; but each algorithm computes
    each op in every layout that it accepts, and so is each problem computed.
    """
    forms = {
        (name, key): _accepted_forms(algorithm_of(name), base, ops or tuple(ConvOp), dtype, layouts)
        for name in names
        for key, base in (blocked if name in VARIANTS else problems).items()
    }
    cases = [*_cases(forms)]

    def in_all_forms(test: Test) -> Test:
        @functools.wraps(test)
        def in_each(algorithm: Algorithm, problem: list[ConvProblem], **others: object) -> None:
            for form in problem:
                try:
                    test(algorithm=algorithm, problem=form, **others)
                except BaseException as error:
                    error.add_note(f"This was {form.op}, {_layouts(form)}.")
                    raise

        return pytest.mark.parametrize(("algorithm", "problem"), cases)(in_each)

    return in_all_forms


def algorithm_of(name: str) -> Algorithm:
    algorithm = named(name)
    assert algorithm is not None
    return algorithm


Forms = dict[tuple[str, str], list[ConvProblem]]
"""By the names of an algorithm and of a problem."""


def _cases(forms: Forms) -> Iterator[ParameterSet]:
    """Yield the forms that are always tried, and those that are with --thorough."""
    tried = _tried(forms)
    for (name, key), all_forms in forms.items():
        usual = [form for form in all_forms if (name, key, form) in tried]
        rest = [form for form in all_forms if (name, key, form) not in tried]
        if usual:
            yield pytest.param(algorithm_of(name), usual, id=f"{name}-{key}")
        if rest:
            yield pytest.param(algorithm_of(name), rest, id=f"{name}-{key}-rest", marks=pytest.mark.thorough)


def _tried(forms: Forms) -> set[tuple[str, str, ConvProblem]]:
    """Choose for each op of a problem the layout in which algorithm and problem were tried least so far.

    What was never tried of an algorithm, or a problem, is tried then.
    """
    times: collections.Counter[Hashable] = collections.Counter()
    tried = set()
    for is_last in (False, True):
        for (name, key), all_forms in forms.items():
            for op, of_op in itertools.groupby(all_forms, key=lambda form: form.op):
                uses = {form: [(each, op, _layouts(form)) for each in (name, key)] for form in of_op}
                scarce = [form for form, pairs in uses.items() if not all(times[pair] for pair in pairs)]
                least = min(uses, key=lambda form: sum(times[pair] for pair in uses[form]))
                for form in scarce if is_last else [least]:
                    tried.add((name, key, form))
                    times.update(uses[form])
    return tried


def _accepted_forms(
    algorithm: Algorithm,
    base: ConvProblem,
    ops: tuple[ConvOp, ...],
    dtype: str,
    layouts: tuple[tuple[Layout, Layout], ...],
) -> list[ConvProblem]:
    forms = (_form(base, op, dtype, *each) for op, each in itertools.product(ops, layouts))
    return [form for form in forms if algorithm.refusal(form) is None]


@functools.cache  # all algorithms are asked about the same
def _form(base: ConvProblem, op: ConvOp, dtype: str, layout: Layout, filter_layout: Layout) -> ConvProblem:
    bias = base.bias and op is ConvOp.FPROP
    return dataclasses.replace(
        base, op=op, dtype=dtype, layout=layout, filter_layout=filter_layout, bias=bias
    )


def _layouts(problem: ConvProblem) -> str:
    is_mixed = problem.layout is not problem.filter_layout
    return f"{problem.layout}, filter {problem.filter_layout}" if is_mixed else problem.layout


class GuardedBuffer:
    """A workspace of exactly the declared bytes, full of poison, with guards before and behind."""

    def __init__(self, n_bytes: int, filling: int = POISON) -> None:
        self._all = torch.full((n_bytes + 2 * GUARD_BYTES,), GUARD, dtype=torch.uint8)
        self.inside = self._all[GUARD_BYTES : GUARD_BYTES + n_bytes].fill_(filling)

    @property
    def is_intact(self) -> bool:
        guards = torch.cat([self._all[:GUARD_BYTES], self._all[GUARD_BYTES + self.inside.numel() :]])
        return bool((guards == GUARD).all())


def compute(
    algorithm: Algorithm,
    problem: ConvProblem,
    first: Tensor,
    second: Tensor,
    bias: Tensor | None = None,
    *,
    buffer: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, bool]:
    """Run the whole batch in one part; return the result, poisoned before, and what the kernel says of it."""
    if buffer is None:
        buffer = GuardedBuffer(algorithm.workspace_bytes(problem)).inside
    out = poisoned_result(problem) if out is None else out
    if problem.op is ConvOp.WGRAD:
        sums = algorithm.sum_kernel(problem, buffer)
        into = GradientSum(out)
        sums.add(first, second, into, first=True)
        return out, sums.finish(into)
    slices = algorithm.slice_kernel(problem, buffer)
    slices.prepare(second)
    return out, slices.run(first, second, out, bias)


PART_SIZES = ((6, 1, 6, 1), (4, 6, 4))
"""Of blocks of several images, and of several workers, a single sample is too small a part."""

DIVIDED = {
    name: PROBLEMS[name].with_batch(14)
    for name in (
        "3x3",
        "5x3",
        "9x9",
        "bias",
        "stride 2",
        "groups",
        "3-D, stride 2",
        "1x1",
        "1-D, 3 taps",
        "3x3x3",
        "channels apart",
        "channels apart, 5x5, stride 2",
    )
}
DIVIDED_BLOCKS = {
    name: BLOCKED[name].with_batch(14)
    for name in ("3x3", "7x7", "1-D, 3 taps", "3x3x3", "channels apart", "channels apart, 7x7, stride 2")
}

Part = tuple[int, slice]


def parts_of(algorithm: Algorithm, problem: ConvProblem) -> list[Part]:
    """The sizes of unequal parts that the algorithm accepts, and their samples."""
    sizes = next(
        sizes
        for sizes in PART_SIZES
        if all(algorithm.refusal(problem.with_batch(size)) is None for size in sizes)
    )
    ends = list(itertools.accumulate(sizes))
    return [(size, slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def shared_buffer(algorithm: Algorithm, problem: ConvProblem, parts: list[Part]) -> Tensor:
    needed = max(algorithm.workspace_bytes(problem.with_batch(size)) for size, _ in parts)
    return GuardedBuffer(needed).inside


def slice_kernels(algorithm: Algorithm, problem: ConvProblem, parts: list[Part]) -> dict[int, SliceKernel]:
    """Kernels for parts of each size, in one poisoned buffer."""
    buffer = shared_buffer(algorithm, problem, parts)
    return {size: algorithm.slice_kernel(problem.with_batch(size), buffer) for size, _ in parts}


def sum_kernels(algorithm: Algorithm, problem: ConvProblem, parts: list[Part]) -> dict[int, SumKernel]:
    buffer = shared_buffer(algorithm, problem, parts)
    return {size: algorithm.sum_kernel(problem.with_batch(size), buffer) for size, _ in parts}


def add_up(
    kernels: dict[int, SumKernel], parts: list[Part], image: Tensor, gradient: Tensor, into: GradientSum
) -> bool:
    """Sum the parts; return whether `into` has a sound sum."""
    for number, (size, here) in enumerate(parts):
        kernels[size].add(image[here], gradient[here], into, first=number == 0)
    return kernels[parts[-1][0]].finish(into)


def sum_parts(
    algorithm: Algorithm, problem: ConvProblem, image: Tensor, gradient: Tensor, into: GradientSum
) -> bool:
    """The same in one poisoned buffer, the running sum too."""
    parts = parts_of(algorithm, problem)
    return add_up(sum_kernels(algorithm, problem, parts), parts, image, gradient, into)
