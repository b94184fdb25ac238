"""Copies of images between the two layouts, in blocks that stay in the first-level cache.

Such a copy walks one of its operands with long steps: from channel to channel of contiguous images, from
pixel to pixel of channels-last ones. Each step touches a line of the cache that is needed again for the next
elements, so it must survive until then. Steps that are a multiple of many lines fall into few sets of the
cache, and the lines throw one another out; hence blocks of so many steps as the cache can hold.

Microseconds an image on an Intel Xeon (family 6, model 207), float32, 1 to 16 images at once: of one
`permute().copy_`, of torch's blocked 2-D transposition of each image, and of these functions; one thread,
and in brackets two:

| c, side | to channels last | to contiguous |
|---|---|---|
| 64, 32²  | 82, 71, **58** (44, 78, **35**) | 93, 73, **53** (54, 84, **53**) |
| 64, 64²  | 297, 261, **216** (189, 280, **194**) | 382, 275, **233** (223, 309, **208**) |
| 64, 56²  | 162, 205, **166** (113, 222, **115**) | 306, 211, **193** (146, 200, **116**) |
| 128, 28² | 70, 103, **75** (38, 107, **42**) | 151, 109, **91** (78, 111, **54**) |
| 256, 14² | 29, 57, **31** (16, 60, **21**) | 79, 60, **47** (37, 60, **26**) |
| 512, 7²  | 15, 30, **16** (15, 33, **18**) | 21, 30, **22** (17, 30, **17**) |
| 3, 224²  | 148, 339, **159** (100, 345, **111**) | 85, 412, **86** (55, 403, **98**) |
| 64, 112² | 733, 883, **649** (390, 914, **357**) | 4507, 1196, **1054** (2308, 929, **895**) |
| 64, 256² | 5074, 4562, **3528** (2875, 4417, **2767**) | 28651, 5708, **6206** (11080, 5202, **5899**) |
"""

import math
from collections.abc import Iterator

from torch import Tensor

LARGE_IMAGE = 8192
"""Pixels from which a dense image goes to NCHW by itself: torch's 2-D transposition reads it in order."""

TRANSPOSING_ELEMENTS = 60 * 60
"""What such a copy takes from torch's allocator while it runs: one block."""

_LINE_BYTES = 64
"""What a cache fetches at once."""

_PERIOD_BYTES = 4096
"""Addresses so far apart share a set of the first-level cache, which has 64 sets of one line each."""

_WAYS = 8
"""Lines that a set holds at least: 8 or 12 in the processors of today."""

_LEAST_STEPS = 32
"""Steps of a loop below which starting it costs more than the first-level cache saves: 16 took longer."""


def to_channels_last(source: Tensor, target: Tensor) -> None:
    """Copy images (n, c, *size) to (n, *size, c); nothing is allocated.

    Any strides are right. It is fast where the pixels of a row of `source` and the channels of a pixel of
    `target` lie next to each other, whatever lies between rows, and where both are channels-last.
    """
    place = target.movedim(-1, 1)
    if source.stride(1) == 1 or target.stride(-1) != 1:
        place.copy_(source)
        return
    channels = steps_in_cache(source.stride(1) * source.itemsize)
    for some, there in zip(source.split(channels, 1), place.split(channels, 1), strict=True):
        there.copy_(some)


def to_contiguous(source: Tensor, target: Tensor) -> None:
    """Copy images (n, *size, c) to (n, c, *size).

    Any strides are right; which of them are fast, `to_channels_last` says. Nothing is allocated, except
    that torch takes `TRANSPOSING_ELEMENTS` while it copies dense images of `LARGE_IMAGE` pixels or more.
    """
    image = source.movedim(-1, 1)
    is_one_line = source.shape[-1] * source.itemsize <= _LINE_BYTES  # the next channel is in the cache
    if is_one_line or source.stride(-1) != 1 or target.stride(1) == 1:
        target.copy_(image)
    elif _is_large_and_dense(source, target):
        for one, there in zip(source.flatten(1, -2), target.flatten(2), strict=True):
            there.copy_(one.t())
    else:
        pixels = steps_in_cache(source.stride(-2) * source.itemsize)
        for some, there in _pixel_blocks(image, target, pixels, axis=2):
            there.copy_(some)


def steps_in_cache(step_bytes: int) -> int:
    """Return how many lines that lie `step_bytes` apart the first-level cache holds at once."""
    sets = _PERIOD_BYTES // max(_LINE_BYTES, math.gcd(step_bytes, _PERIOD_BYTES))
    return max(_LEAST_STEPS, _WAYS * sets)


def _is_large_and_dense(source: Tensor, target: Tensor) -> bool:
    """Whether torch copies an image of these by its blocked transposition, and other ways are slower."""
    is_large = math.prod(source.shape[1:-1]) >= LARGE_IMAGE
    return is_large and source[0].is_contiguous() and target[0].is_contiguous()


def _pixel_blocks(image: Tensor, target: Tensor, pixels: int, axis: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of so many pixels of both, or less, that cover them from the spatial `axis` inwards."""
    inner = max(1, math.prod(image.shape[axis + 1 :]))
    if inner <= pixels:
        rows = pixels // inner
        yield from zip(image.split(rows, axis), target.split(rows, axis), strict=True)
        return
    for some, there in zip(image.split(1, axis), target.split(1, axis), strict=True):
        yield from _pixel_blocks(some, there, pixels, axis + 1)
