"""Families of tiles: a bilinear form for each number of taps, and the blocks in which tiles are computed."""

import dataclasses
import functools

from mucudnn.algorithms.forms import BilinearForm, cook_toom, fourier, identity


@dataclasses.dataclass(frozen=True)
class Tiling:
    """A family of tiles, with a form for each number of taps, and the blocks in which they are computed.

    Attributes:
        outputs: m of Winograd's forms; 0 for Fourier's.
        inputs: t of Fourier's forms; 0 for Winograd's.
        images: images of a block; 0 for all.
        slices: slices along the depth of a block; 0 for all.
        rows: tile rows of a block; 0 for all.
        channels: channels of y that are computed at once; 0 for all.
        summed: channels of x whose products are summed at once; 0 for all.
        workers: threads of one block each; 1 for the caller's own, which share every operation.
    """

    outputs: int = 0
    inputs: int = 0
    images: int = 0
    slices: int = 0
    rows: int = 0
    channels: int = 0
    summed: int = 0
    workers: int = 1

    def form(self, taps: int) -> BilinearForm:
        """Return the form for an axis along which the filter has `taps` taps."""
        return _form(self.outputs, self.inputs, taps)


@functools.cache
def _form(outputs: int, inputs: int, taps: int) -> BilinearForm:
    if taps == 1:
        return identity()
    return fourier(inputs, taps) if inputs else cook_toom(outputs, taps)
