"""Copies between the layouts: right for all strides, and without memory."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mucudnn.algorithms.layouts import to_channels_last, to_contiguous
from tests.algorithms.allocations import ALLOCATION_BOUND, allocated_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

Copy = Callable[[Tensor, Tensor], None]
Shape = tuple[int, ...]

BACK: dict[Copy, Copy] = {to_channels_last: to_contiguous, to_contiguous: to_channels_last}

LARGE: Shape = (2, 20, 96, 97)
SHAPES: dict[str, Shape] = {
    "planes a page apart": (3, 72, 32, 32),
    "planes no pages apart": (2, 40, 7, 9),
    "pixels a page apart": (2, 1024, 3, 40),
    "a line of channels": (2, 16, 16, 17),
    "three channels": (2, 3, 16, 17),
    "one channel": (2, 1, 5, 6),
    "one pixel": (2, 70, 1, 1),
    "large images": LARGE,
    "a long row": (2, 64, 1, 1100),
    "one dimension": (2, 66, 1024),
    "three dimensions": (2, 40, 4, 16, 16),
    "three dimensions, few pixels": (2, 40, 2, 3, 5),
    "no image": (0, 64, 8, 8),
    "no pixel": (2, 64, 0, 8),
}
"""Of contiguous images (n, c, *size)."""

copies = pytest.mark.parametrize("copy", [to_channels_last, to_contiguous])
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)

UNTOUCHED = -1.0


def operands(copy: Copy, shape: Shape, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A dense source of rising numbers, as far as the type tells them apart, and a dense target."""
    last = (shape[0], *shape[2:], shape[1])
    source, target = (shape, last) if copy is to_channels_last else (last, shape)
    numbers = torch.arange(torch.Size(source).numel()).view(source).to(dtype)
    return numbers, torch.full(target, UNTOUCHED, dtype=dtype)


def moved(copy: Copy, source: Tensor) -> Tensor:
    """What `copy` makes of `source`."""
    return source.movedim(1, -1) if copy is to_channels_last else source.movedim(-1, 1)


def framed(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A larger tensor, and a view of it that holds `tensor`: all axes but the first have a frame of two."""
    sizes = [tensor.shape[0], *(size + 4 for size in tensor.shape[1:])]
    whole = torch.full(sizes, UNTOUCHED, dtype=tensor.dtype)
    view = whole
    for axis, size in enumerate(tensor.shape[1:], start=1):
        view = view.narrow(axis, 2, size)
    return whole, view.copy_(tensor)


@copies
@shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_dense_images_come_over(copy: Copy, shape: Shape, dtype: torch.dtype) -> None:
    source, target = operands(copy, shape, dtype)

    copy(source, target)

    assert torch.equal(target, moved(copy, source))


@copies
@shapes
def test_images_within_larger_ones_come_over_and_nothing_beside_them_is_touched(
    copy: Copy, shape: Shape
) -> None:
    numbers, empty = operands(copy, shape)
    (_, source), (whole, target) = framed(numbers), framed(empty)

    copy(source, target)

    assert torch.equal(target, moved(copy, numbers))
    target.fill_(UNTOUCHED)
    assert bool((whole == UNTOUCHED).all())


@copies
@shapes
def test_a_source_that_lies_as_the_target_does_comes_over(copy: Copy, shape: Shape) -> None:
    numbers, target = operands(copy, shape)
    source = moved(BACK[copy], moved(copy, numbers).contiguous())

    copy(source, target)

    assert torch.equal(target, moved(copy, numbers))


@copies
@shapes
def test_a_source_comes_over_to_a_target_that_lies_as_it_does(copy: Copy, shape: Shape) -> None:
    source, _ = operands(copy, shape)
    target = moved(copy, torch.full_like(source, UNTOUCHED))

    copy(source, target)

    assert torch.equal(target, moved(copy, source))


@copies
@shapes
def test_every_bit_comes_over(copy: Copy, shape: Shape) -> None:
    like, target = operands(copy, shape)
    bits = torch.randint(-(2**31), 2**31, like.shape, dtype=torch.int32)

    copy(bits.view(torch.float32), target)

    assert torch.equal(target.view(torch.int32), moved(copy, bits))


@copies
@shapes
def test_nothing_is_allocated(copy: Copy, shape: Shape) -> None:
    source, target = operands(copy, shape)

    assert allocated_bytes(lambda: copy(source, target)) <= ALLOCATION_BOUND
