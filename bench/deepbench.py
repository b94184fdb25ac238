"""DeepBench's layers as models, for `mucudnn tune bench.deepbench:b16`.

Each name of the list is a model of one convolution, such as `speaker2_b16`; `b4`, `b8`, `b16` and `b32` are
models of all that the list has with that batch. Their input is one number a sample: `--input 16`.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from bench.deepbench_list import LAYERS, Row


class Layers(nn.Module):
    """Convolutions side by side: y = sum of the means of conv_i(scale x), where x fills images of each size.

    x has shape (n,), y is one number. Images have a gradient, as behind another layer, which is the scale's.
    They are laid out as the module is, by `to(memory_format=...)`.
    """

    layout: Tensor

    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("layout", torch.zeros(1, 2, 2, 2), persistent=False)  # filters of 1x1 have both
        self.layers = nn.ModuleDict({row[0]: conv_of(row) for row in rows})
        self._sizes = {name: (c, *size) for name, _, c, size, *_ in rows}

    def forward(self, x: Tensor) -> Tensor:
        """Return y.

        Raises:
            ValueError: x has another shape.
        """
        if x.dim() != 1:
            raise ValueError(f"x must have shape (n,), one number a sample, but got {tuple(x.shape)}.")
        n = len(x)
        samples = (self.scale * x).view(n, 1, 1, 1)
        is_last = self.layout.is_contiguous(memory_format=torch.channels_last)
        dense = torch.channels_last if is_last else torch.contiguous_format
        means = []
        for name, conv in self.layers.items():
            images = samples.expand(n, *self._sizes[name]).contiguous(memory_format=dense)
            means.append(conv(images).mean())
        return torch.stack(means).sum()


def conv_of(row: Row) -> nn.Conv2d:
    """Return the convolution of a row of the list, without bias."""
    _, _, c, _, k, taps, padding, stride = row
    return nn.Conv2d(c, k, taps, stride, padding, bias=False)


def __getattr__(name: str) -> Callable[[], nn.Module]:
    """Return what makes the model of that name.

    Raises:
        AttributeError: the list has no such layer and no such batch.
    """
    rows = [row for row in LAYERS if name in (row[0], f"b{row[1]}")]
    if not rows:
        *batches, last = (f"b{batch}" for batch in sorted({row[1] for row in LAYERS}))
        raise AttributeError(
            f"A model of {__name__} must be all of one batch, {', '.join(batches)} or {last}, or a layer of "
            f"DeepBench's list, whose name ends with its batch, such as speaker2_b16, but got {name!r}."
        )
    return partial(Layers, rows)
