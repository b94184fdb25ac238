"""Images in the two layouts, and copies between them: transposed ones where pixels lie evenly apart."""

import math

from torch import Tensor

from mucudnn.algorithms.transposition import transpose
from mucudnn.problem import Layout


def laid_out(flat: Tensor, shape: tuple[int, ...], layout: Layout) -> Tensor:
    """View `flat` as a tensor (n, c, *size) in `layout`."""
    if layout is Layout.CONTIGUOUS:
        return flat.view(shape)
    return flat.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def to_channels_last(source: Tensor, target: Tensor) -> None:
    """Copy images (n, c, *size) to (n, *size, c); any strides are right, and nothing is allocated."""
    pixels, there = _pixels(source.movedim(1, -1)), _pixels(target)
    if pixels is None or there is None or source.stride(1) == 1:
        target.movedim(-1, 1).copy_(source)
    else:
        transpose(pixels.transpose(1, 2), there)


def to_contiguous(source: Tensor, target: Tensor) -> None:
    """Copy images (n, *size, c) to (n, c, *size); any strides are right, and nothing is allocated."""
    pixels, there = _pixels(source), _pixels(target.movedim(1, -1))
    if pixels is None or there is None or target.stride(1) == 1:
        target.copy_(source.movedim(-1, 1))
    else:
        transpose(pixels, there.transpose(1, 2))


def _pixels(image: Tensor) -> Tensor | None:
    """View images (n, *size, c) as (n, pixels, c); None where the pixels do not lie evenly apart."""
    try:
        return image.view(image.shape[0], math.prod(image.shape[1:-1]), image.shape[-1])
    except RuntimeError:
        return None
