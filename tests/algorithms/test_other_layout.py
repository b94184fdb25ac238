"""PyTorch's own convolution between copies to the other layout and back."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mucudnn.algorithms.base import GradientSum
from mucudnn.algorithms.other_layout import OtherLayoutAlgorithm
from mucudnn.algorithms.own import result_bytes
from mucudnn.backends import backend_of
from mucudnn.backends.cpu.backend import CpuBackend
from mucudnn.backends.own import own_job
from mucudnn.execution.runner import Runner
from mucudnn.execution.workspace import Workspace
from mucudnn.plan import Division
from mucudnn.problem import ConvOp, ConvProblem, Layout
from mucudnn.profile import Candidate, Trial
from tests.operands import (
    a_convolution,
    finite_mask,
    normal,
    operands_of,
    own_result,
    poisoned_result,
    reference,
    relative_error,
)

pytestmark = pytest.mark.usefixtures("one_thread")

NHWC, NCHW = OtherLayoutAlgorithm(Layout.CHANNELS_LAST), OtherLayoutAlgorithm(Layout.CONTIGUOUS)

FOR_LAYOUT = {Layout.CONTIGUOUS: NHWC, Layout.CHANNELS_LAST: NCHW}
"""The algorithm for tensors of a layout."""

BOUNDS = {"float64": 1e-12, "float32": 4e-6, "float16": 4e-3, "bfloat16": 3e-2}
"""What PyTorch's own loses in its longest chains of additions; a wrong tap is off by far more."""

POISON = 0xFF
"""Bytes that make every float NaN."""

GUARD_BYTES = 256
GUARD = 0xA5

PROBLEMS = {
    "3x3": a_convolution(),
    "stride": a_convolution(stride=(2, 1)),
    "dilation": a_convolution(dilation=(2, 1)),
    "groups": a_convolution(in_channels=4, out_channels=6, groups=2),
    "depthwise": a_convolution(in_channels=8, out_channels=8, groups=8),
    "no padding, 5x2": a_convolution(kernel_size=(5, 2), padding=(0, 0)),
    "1x1": a_convolution(kernel_size=(1, 1), padding=(0, 0)),
    "one pixel": a_convolution(input_size=(1, 1)),
    "one channel": a_convolution(in_channels=1, out_channels=1),
    "many channels": a_convolution(in_channels=40, out_channels=24, input_size=(16, 16)),
    "large image": a_convolution(batch=1, in_channels=20, out_channels=18, input_size=(91, 97)),
    "one dimension": a_convolution(
        input_size=(9,), kernel_size=(3,), stride=(2,), padding=(1,), dilation=(1,)
    ),
    "three dimensions": a_convolution(
        input_size=(4, 5, 6), kernel_size=(3, 2, 1), stride=(1, 2, 1), padding=(1, 0, 0), dilation=(1, 1, 2)
    ),
}


def variants(*names: str, ops: tuple[ConvOp, ...] = tuple(ConvOp)) -> pytest.MarkDecorator:
    """These problems, or all, for these ops, in both layouts of the images and of the filter."""
    cases = [
        pytest.param(
            dataclasses.replace(
                PROBLEMS[name], op=op, layout=layout, filter_layout=filter_layout, bias=op is ConvOp.FPROP
            ),
            id=f"{op}-{layout}-{filter_layout}-{name}",
        )
        for name in names or PROBLEMS
        for op in ops
        for layout in Layout
        for filter_layout in Layout
    ]
    return pytest.mark.parametrize("problem", cases)


def a_workspace(problem: ConvProblem, filling: int = POISON) -> Tensor:
    n_bytes = FOR_LAYOUT[problem.layout].workspace_bytes(problem)
    return torch.full((n_bytes,), filling, dtype=torch.uint8)


def compute(
    problem: ConvProblem,
    first: Tensor,
    second: Tensor,
    bias: Tensor | None = None,
    *,
    buffer: Tensor | None = None,
) -> tuple[Tensor, bool]:
    """Return the result, poisoned before, and what the kernel says of it."""
    algorithm, out = FOR_LAYOUT[problem.layout], poisoned_result(problem)
    buffer = a_workspace(problem) if buffer is None else buffer
    if problem.op is ConvOp.WGRAD:
        sums, into = algorithm.sum_kernel(problem, buffer), GradientSum(out)
        sums.add(first, second, into, first=True)
        return out, sums.finish(into)
    slices = algorithm.slice_kernel(problem, buffer)
    slices.prepare(second)
    return out, slices.run(first, second, out, bias)


@pytest.mark.parametrize("dtype", BOUNDS)
@variants()
def test_the_result_is_that_of_pytorch(problem: ConvProblem, dtype: str) -> None:
    problem = dataclasses.replace(problem, dtype=dtype)
    operands = operands_of(problem)

    result, is_sound = compute(problem, *operands)

    assert is_sound
    assert relative_error(result, reference(problem, *operands)) <= BOUNDS[dtype]


@variants()
def test_nothing_is_written_beyond_the_declared_workspace(problem: ConvProblem) -> None:
    n_bytes = FOR_LAYOUT[problem.layout].workspace_bytes(problem)
    guarded = torch.full((n_bytes + 2 * GUARD_BYTES,), GUARD, dtype=torch.uint8)
    inside = guarded[GUARD_BYTES : GUARD_BYTES + n_bytes].fill_(POISON)

    compute(problem, *operands_of(problem), buffer=inside)

    inside.fill_(GUARD)
    assert bool((guarded == GUARD).all())


@variants("3x3", "groups", "one dimension", "three dimensions")
def test_what_the_workspace_held_before_makes_no_difference(problem: ConvProblem) -> None:
    operands = operands_of(problem)

    poisoned, zeroed = (
        compute(problem, *operands, buffer=a_workspace(problem, filling))[0] for filling in (POISON, 0)
    )

    assert torch.equal(poisoned, zeroed)


@variants("3x3")
def test_a_workspace_that_is_too_small_is_refused(problem: ConvProblem) -> None:
    algorithm = FOR_LAYOUT[problem.layout]
    make = algorithm.sum_kernel if problem.op is ConvOp.WGRAD else algorithm.slice_kernel
    needed = algorithm.workspace_bytes(problem)

    with pytest.raises(ValueError, match=f"must have at least {needed} bytes, but got {needed - 1}"):
        make(problem, a_workspace(problem)[1:])


class _Convolutions(TorchDispatchMode):
    """Keeps the tensors that PyTorch convolves."""

    def __init__(self) -> None:
        super().__init__()
        self.operands: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution" in str(func):
            self.operands += [each for each in args[:3] if isinstance(each, Tensor) and each.dim() > 1]
        return func(*args, **(kwargs or {}))


@variants("3x3", "stride", "groups", "one dimension", "three dimensions")
def test_pytorch_computes_in_the_other_layout(problem: ConvProblem) -> None:
    with _Convolutions() as seen:
        compute(problem, *operands_of(problem))

    is_last = FOR_LAYOUT[problem.layout] is NHWC
    assert len(seen.operands) == (2 if problem.op is ConvOp.FPROP else 3)
    for each in seen.operands:
        assert (each.movedim(1, -1) if is_last else each).is_contiguous()
        assert each.dim() == 4 or len(problem.input_size) != 1 or not is_last


@variants("3x3", ops=(ConvOp.FPROP, ConvOp.DGRAD))
def test_the_filter_is_copied_once_per_mini_batch(problem: ConvProblem) -> None:
    first, second, bias = operands_of(problem)
    kernel = FOR_LAYOUT[problem.layout].slice_kernel(problem, a_workspace(problem))
    once, again = poisoned_result(problem), poisoned_result(problem)

    kernel.prepare(second)
    kernel.run(first, second, once, bias)
    kernel.run(first, torch.full_like(second, math.nan), again, bias)

    assert torch.equal(once, again)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": Layout.CHANNELS_LAST}, "the tensors are channels_last as they are"),
        ({"dtype": "complex64"}, "copies between layouts are for float16, bfloat16, float32, float64"),
        ({"batch": 0}, "there is nothing to compute"),
    ],
)
def test_what_needs_no_copy_or_has_none_is_refused(changes: dict[str, object], reason: str) -> None:
    assert NHWC.refusal(a_convolution(**changes)) == reason


@pytest.mark.parametrize("algorithm", [NHWC, NCHW])
@pytest.mark.parametrize("has_unit", [True, False])
def test_what_may_break_memory_is_refused_where_there_is_no_matrix_unit(
    algorithm: OtherLayoutAlgorithm, has_unit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "mucudnn.algorithms.other_layout.refusal_of_processor", lambda: None if has_unit else "there is none"
    )
    (layout,) = {*Layout} - {algorithm.layout}
    volumes = a_convolution(
        input_size=(8, 1, 8), kernel_size=(3, 3, 3), stride=(2, 2, 2), padding=(1, 1, 1), dilation=(1, 1, 1),
        op=ConvOp.WGRAD, dtype="bfloat16", layout=layout, filter_layout=layout,
    )  # fmt: skip
    others = [dataclasses.replace(volumes, op=ConvOp.DGRAD), dataclasses.replace(volumes, dtype="float32")]
    others += [a_convolution(op=ConvOp.WGRAD, dtype="bfloat16", layout=layout, filter_layout=layout)]

    assert (algorithm.refusal(volumes) is None) is has_unit
    assert [algorithm.refusal(each) for each in others] == [None] * 3


def _pixel(**changes: Any) -> ConvProblem:
    return a_convolution(
        **{
            "in_channels": 3, "out_channels": 16, "input_size": (12, 12), "kernel_size": (1, 1), "groups": 1,
            "stride": (2, 2), "padding": (0, 0), "dilation": (1, 1), "op": ConvOp.WGRAD, **changes,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    "changes", [{}, {"in_channels": 1}, {"in_channels": 15}, {"stride": (1, 2)}, {"dtype": "bfloat16"}]
)
def test_gradients_of_strided_pixels_of_few_channels_that_may_break_memory_are_refused(
    changes: dict[str, Any],
) -> None:
    assert "of fewer than 16 channels" in str(NHWC.refusal(_pixel(**changes)))


@pytest.mark.parametrize(
    "changes", [{"op": ConvOp.FPROP}, {"in_channels": 16}, {"stride": (1, 1)}, {"kernel_size": (3, 3)}]
)
def test_others_are_not(changes: dict[str, Any]) -> None:
    assert NHWC.refusal(_pixel(**changes)) is None


def test_in_contiguous_tensors_nor_are_such_gradients() -> None:
    assert NCHW.refusal(_pixel(layout=Layout.CHANNELS_LAST, filter_layout=Layout.CHANNELS_LAST)) is None


def test_contiguous_tensors_are_refused_by_the_algorithm_that_would_make_them() -> None:
    assert NCHW.refusal(a_convolution()) == "the tensors are contiguous as they are"


def test_images_of_one_dimension_become_rows_where_they_are_to_be_channels_last() -> None:
    problem = PROBLEMS["one dimension"]

    inside = NHWC.own_problem(problem)

    assert inside.layout is inside.filter_layout is Layout.CHANNELS_LAST
    assert inside.input_shape == (2, 3, 1, 9)
    assert inside.output_shape == (2, 5, 1, 5)


def parts(problem: ConvProblem) -> Iterator[tuple[ConvProblem, slice]]:
    """Parts of 3, 1 and 3 samples."""
    for here in (slice(0, 3), slice(3, 4), slice(4, 7)):
        yield problem.with_batch(here.stop - here.start), here


def shared_workspace(problem: ConvProblem) -> Tensor:
    return a_workspace(problem.with_batch(3))


@variants("3x3", "one dimension", "large image", ops=(ConvOp.FPROP, ConvOp.DGRAD))
def test_kernels_of_all_sizes_share_the_filter_that_one_prepared(problem: ConvProblem) -> None:
    problem = dataclasses.replace(problem, batch=7, dtype="float64")
    image, weight, bias = operands_of(problem)
    buffer, out, algorithm = shared_workspace(problem), poisoned_result(problem), FOR_LAYOUT[problem.layout]

    algorithm.slice_kernel(problem.with_batch(1), buffer).prepare(weight)
    answers = [
        algorithm.slice_kernel(part, buffer).run(image[here], weight, out[here], bias)
        for part, here in parts(problem)
    ]

    assert all(answers)
    assert relative_error(out, reference(problem, image, weight, bias)) <= BOUNDS["float64"]


def sum_parts(problem: ConvProblem, image: Tensor, gradient: Tensor, into: GradientSum) -> bool:
    """Sum the parts in one poisoned workspace; return whether `into` has a sound sum."""
    buffer, algorithm = shared_workspace(problem), FOR_LAYOUT[problem.layout]
    for number, (part, here) in enumerate(parts(problem)):
        kernel = algorithm.sum_kernel(part, buffer)
        kernel.add(image[here], gradient[here], into, first=number == 0)
    return kernel.finish(into)


@variants("3x3", "one dimension", "large image", ops=(ConvOp.WGRAD,))
def test_the_parts_of_a_weight_gradient_add_up(problem: ConvProblem) -> None:
    problem = dataclasses.replace(problem, batch=7, dtype="float64")
    image, gradient, _ = operands_of(problem)
    total = poisoned_result(problem)

    assert sum_parts(problem, image, gradient, GradientSum(total))

    assert relative_error(total, reference(problem, image, gradient)) <= BOUNDS["float64"]


@variants("3x3", "one dimension", ops=(ConvOp.WGRAD,))
def test_a_weight_gradient_is_added_to_what_is_there(problem: ConvProblem) -> None:
    problem = dataclasses.replace(problem, batch=7, dtype="float64")
    image, gradient, _ = operands_of(problem)
    total = normal(problem.filter_shape, torch.Generator().manual_seed(1))
    expected = reference(problem, image, gradient) + total

    assert sum_parts(problem, image, gradient, GradientSum(total, accumulate=True))

    assert relative_error(total, expected) <= BOUNDS["float64"]


@variants("many channels", ops=(ConvOp.WGRAD,))
def test_a_16_bit_weight_gradient_is_summed_in_32_bits(problem: ConvProblem) -> None:
    problem = dataclasses.replace(problem, batch=32, dtype="bfloat16")
    image, gradient, _ = operands_of(problem)
    total = torch.full(problem.filter_shape, float("nan"))
    one, algorithm = problem.with_batch(1), FOR_LAYOUT[problem.layout]
    kernel, into = algorithm.sum_kernel(one, a_workspace(one)), GradientSum(total)

    for sample in range(32):
        here = slice(sample, sample + 1)
        kernel.add(image[here], gradient[here], into, first=sample == 0)
    kernel.finish(into)

    # Each part is rounded to bfloat16, by 2**-9 at most; a sum in bfloat16 is off by 7e-3 (measured).
    assert relative_error(total, reference(problem, image, gradient)) <= 2.5e-3


STRANGE = ("3x3", "stride", "dilation", "groups", "depthwise", "many channels", "three dimensions")
VALUES = (float("nan"), float("inf"), float("-inf"))
SLICES = (ConvOp.FPROP, ConvOp.DGRAD)


@pytest.mark.parametrize("value", VALUES)
@variants(*STRANGE, ops=SLICES)
def test_strange_numbers_of_an_image_come_out_where_pytorch_has_them(
    problem: ConvProblem, value: float
) -> None:
    image, weight, bias = operands_of(problem)
    image[0, 0, 1], image[1, 2, 0] = value, value

    result, is_sound = compute(problem, image, weight, bias)

    assert is_sound
    assert not result.isfinite().all()
    assert torch.equal(finite_mask(result), finite_mask(own_result(problem, image, weight, bias)))


@pytest.mark.parametrize("value", VALUES)
@variants(*STRANGE, "one dimension", ops=SLICES)
def test_a_strange_filter_is_reported_and_then_forgotten(problem: ConvProblem, value: float) -> None:
    image, weight, bias = operands_of(problem)
    strange = weight.clone()
    strange[0, 0, 0] = value
    kernel = FOR_LAYOUT[problem.layout].slice_kernel(problem, a_workspace(problem))
    out = poisoned_result(problem)

    kernel.prepare(strange)
    assert not kernel.run(image, strange, out, bias)
    kernel.prepare(weight)
    assert kernel.run(image, weight, out, bias)

    assert torch.equal(out, compute(problem, image, weight, bias)[0])


@pytest.mark.parametrize("place", ["image", "gradient"])
@variants(*STRANGE, ops=(ConvOp.WGRAD,))
def test_a_sum_that_is_not_finite_leaves_the_total_alone(problem: ConvProblem, place: str) -> None:
    problem = problem.with_batch(7)
    image, gradient, _ = operands_of(problem)
    {"image": image, "gradient": gradient}[place][4, 0] = float("nan")
    total = torch.ones(problem.filter_shape)

    is_sound = sum_parts(problem, image, gradient, GradientSum(total, accumulate=True))

    assert not is_sound
    assert torch.equal(total, torch.ones(problem.filter_shape))


# What it takes, as the backend tells.

BACKEND = backend_of("cpu:")
UNLIMITED = 2**40
NOISE_BYTES = 64 * 2**10
"""By how much two weighings of one convolution may differ."""

LARGE = a_convolution(
    batch=4, in_channels=64, out_channels=64, input_size=(64, 64), layout=Layout.CHANNELS_LAST
)
"""In contiguous tensors PyTorch's own makes blocked copies of images of 4 MiB."""


@pytest.mark.parametrize("op", ConvOp)
def test_the_workspace_is_the_buffer_and_a_result_and_what_pytorchs_own_hides(op: ConvOp) -> None:
    problem = LARGE.with_op(op)
    hidden = BACKEND.footprint(own_job(NCHW.own_problem(problem)), UNLIMITED)

    needed = BACKEND.workspace_bytes(Trial(problem, "cpu:onednn_nchw", whole=True), UNLIMITED)

    assert hidden is not None
    assert needed is not None
    expected = NCHW.workspace_bytes(problem) + result_bytes(problem) + hidden
    assert hidden > 2**20
    assert abs(needed - expected) <= NOISE_BYTES


@pytest.mark.parametrize("op", ConvOp)
def test_pytorchs_own_is_not_run_above_the_limit_in_the_other_layout(op: ConvOp) -> None:
    trial = Trial(LARGE.with_op(op).with_batch(16), "cpu:onednn_nchw", whole=True)

    assert BACKEND.workspace_bytes(trial, 2**20) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_part_of_a_weight_gradient_counts_the_running_sum(dtype: str) -> None:
    """The sum takes 2.25 MiB; what is seen of either trial may be off by the noise."""
    problem = dataclasses.replace(
        PROBLEMS["many channels"],
        op=ConvOp.WGRAD,
        dtype=dtype,
        in_channels=256,
        out_channels=256,
        input_size=(8, 8),
    )

    whole, part = (
        BACKEND.workspace_bytes(Trial(problem, "cpu:onednn_nhwc", is_whole), UNLIMITED)
        for is_whole in (True, False)
    )

    assert whole is not None
    assert part is not None
    assert abs(part - whole - problem.running_sum_bytes) <= 2 * NOISE_BYTES


class _Rooms(Workspace):
    """Keeps what is asked to have room for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.asked: list[int] = []

    def make_room(self, n_bytes: int, *more: Any, **others: Any) -> None:
        self.asked.append(n_bytes)
        super().make_room(n_bytes, *more, **others)


@pytest.mark.parametrize("op", ConvOp)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_room_is_made_for_what_parts_take_beside_the_buffer(op: ConvOp, dtype: str) -> None:
    problem = dataclasses.replace(PROBLEMS["many channels"], op=op, dtype=dtype)
    part, besides = problem.part(1), 12_345
    sums = problem.running_sum_bytes if op is ConvOp.WGRAD else 0
    needed = BACKEND.buffer_bytes(part, "cpu:onednn_nhwc") + sums + besides
    division = Division((Candidate("cpu:onednn_nhwc", 1, 0.0, needed),) * 2)
    workspace = _Rooms()

    Runner(BACKEND, problem, division, limit_bytes=needed)(workspace, *operands_of(problem))

    assert workspace.asked == [besides] * 2


def test_no_room_is_made_for_what_works_in_the_buffer_alone() -> None:
    problem = PROBLEMS["3x3"]
    needed = BACKEND.buffer_bytes(problem, "cpu:im2col")
    division = Division((Candidate("cpu:im2col", problem.batch, 0.0, needed),))
    workspace = _Rooms()

    Runner(BACKEND, problem, division, limit_bytes=needed)(workspace, *operands_of(problem))

    assert workspace.asked == []


@pytest.mark.parametrize(
    ("algorithm", "is_all"),
    [
        ("cpu:aten", False),
        ("cpu:onednn_nhwc", False),
        ("cpu:onednn_nchw", False),
        ("cpu:gemm", True),
        ("cpu:im2col", True),
        ("cpu:winograd4", True),
    ],
)
def test_what_pytorchs_own_takes_part_in_does_not_declare_all_that_it_takes(
    algorithm: str, is_all: bool
) -> None:
    assert CpuBackend().declares(algorithm) is is_all


def test_what_a_part_of_another_size_was_measured_to_take_makes_no_room() -> None:
    problem = PROBLEMS["3x3"]
    measured = 10 * BACKEND.buffer_bytes(problem, "cpu:im2col")
    division = Division((Candidate("cpu:im2col", problem.batch, 0.0, measured),))
    workspace = _Rooms()

    Runner(BACKEND, problem, division, limit_bytes=measured)(workspace, *operands_of(problem))

    assert workspace.asked == []


@pytest.mark.parametrize("op", ConvOp)
def test_room_is_made_for_a_later_group_as_well(op: ConvOp) -> None:
    problem, besides = dataclasses.replace(PROBLEMS["many channels"], op=op), 12_345
    part = problem.part(1)
    needed = {name: BACKEND.buffer_bytes(part, f"cpu:{name}") for name in ("im2col", "onednn_nhwc")}
    parts = (
        Candidate("cpu:im2col", 1, 0.0, needed["im2col"]),
        Candidate("cpu:onednn_nhwc", 1, 0.0, needed["onednn_nhwc"] + besides),
    )
    workspace, operands = _Rooms(), operands_of(problem)
    assert problem.batch == len(parts)

    result = Runner(BACKEND, problem, Division(parts), limit_bytes=sum(needed.values()) + besides)(
        workspace, *operands
    )

    assert workspace.asked == [besides]
    assert relative_error(result, reference(problem, *operands)) <= 1e-5


def test_a_sum_of_the_filter_that_overflows_16_bits_is_no_reason_to_compute_again() -> None:
    problem = a_convolution(
        batch=1,
        in_channels=128,
        out_channels=128,
        input_size=(4, 4),
        dtype="float16",
        layout=Layout.CONTIGUOUS,
    )
    algorithm = OtherLayoutAlgorithm(Layout.CHANNELS_LAST)
    image, weight, _ = operands_of(problem)
    weight = torch.full_like(weight, 0.5)  # 73,728 in all; the largest number of 16 bits is 65,504
    kernel = algorithm.slice_kernel(
        problem, torch.zeros(algorithm.workspace_bytes(problem), dtype=torch.uint8)
    )

    kernel.prepare(weight)

    assert kernel.run(image, weight, torch.empty(problem.output_shape, dtype=torch.float16), None)
