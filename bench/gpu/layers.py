"""The layers that are asked about: what networks of today and of before are made of."""

import dataclasses
from collections.abc import Iterator, Mapping

from mucudnn.problem import ConvOp, ConvProblem, Layout

DTYPES = ("bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class Layer:
    """A convolution without batch, type and layout; the same number stands for every dimension.

    Attributes:
        in_channels: c.
        input_size: spatial size of x.
        out_channels: k.
        kernel: taps of w along each dimension.
        padding: zeros on each side.
        stride: step of the filter.
        groups: number of groups.
        batch: the mini-batch at which it is measured.
    """

    in_channels: int
    input_size: tuple[int, ...]
    out_channels: int
    kernel: int
    padding: int
    stride: int = 1
    groups: int = 1
    batch: int = 64

    def problem(self, op: ConvOp, dtype: str, layout: Layout) -> ConvProblem:
        """Return one op of it, without a bias."""
        rank = len(self.input_size)
        return ConvProblem(
            op=op,
            batch=self.batch,
            in_channels=self.in_channels,
            out_channels=self.out_channels,
            input_size=self.input_size,
            kernel_size=(self.kernel,) * rank,
            stride=(self.stride,) * rank,
            padding=(self.padding,) * rank,
            dilation=(1,) * rank,
            groups=self.groups,
            dtype=dtype,
            layout=layout,
            filter_layout=layout,
        )


LAYERS: Mapping[str, Layer] = {
    "alex2": Layer(64, (27, 27), 192, kernel=5, padding=2),
    "vgg_c12": Layer(64, (224, 224), 64, kernel=3, padding=1),
    "rn50_3x3": Layer(64, (56, 56), 64, kernel=3, padding=1),
    "rn50_c1": Layer(3, (224, 224), 64, kernel=7, padding=3, stride=2),
    "rn50_1x1": Layer(256, (56, 56), 64, kernel=1, padding=0),
    "rn50_s2": Layer(128, (56, 56), 128, kernel=3, padding=1, stride=2),
    "dw7x7": Layer(96, (56, 56), 96, kernel=7, padding=3, groups=96),
    "grp32": Layer(256, (28, 28), 256, kernel=3, padding=1, groups=32),
    "conv3d": Layer(128, (17, 60, 104), 128, kernel=3, padding=1, batch=2),
    "unet3d": Layer(32, (128, 128, 128), 32, kernel=3, padding=1, batch=2),
}

TILED: Mapping[str, Layer] = {
    "3x3_64": Layer(64, (56, 56), 64, kernel=3, padding=1),
    "3x3_128": Layer(128, (28, 28), 128, kernel=3, padding=1),
    "3x3_256": Layer(256, (14, 14), 256, kernel=3, padding=1),
    "3x3_512": Layer(512, (7, 7), 512, kernel=3, padding=1),
    "vgg_c32": Layer(256, (56, 56), 256, kernel=3, padding=1),
    "vgg_c12_1": Layer(64, (224, 224), 64, kernel=3, padding=1, batch=1),
    "9x9_128": Layer(128, (56, 56), 128, kernel=9, padding=4, batch=16),
}
"""Filters of stride 1 from 3x3 on, which tiles compute: ResNet's, VGG's (one on an image), and a long one."""

MIDDLING = LAYERS["rn50_3x3"]
"""For questions that one layer answers as well as ten."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One op of a layer in one type and layout.

    Attributes:
        layer: its name.
        problem: what is computed.
        allow_tf32: whether float32 may be multiplied in TF32.
    """

    layer: str
    problem: ConvProblem
    allow_tf32: bool = True

    @property
    def setting(self) -> str:
        """Type and layout, for a table: "float32 NCHW, no TF32"."""
        layout = "NCHW" if self.problem.layout is Layout.CONTIGUOUS else "NHWC"
        precision = "" if self.problem.dtype != "float32" or self.allow_tf32 else ", no TF32"
        return f"{self.problem.dtype} {layout}{precision}"


def cases(layers: Mapping[str, Layer], dtype: str, layout: Layout, allow_tf32: bool = True) -> Iterator[Case]:
    """Yield the three ops of every layer in one type and layout."""
    for name, layer in layers.items():
        for op in ConvOp:
            yield Case(name, layer.problem(op, dtype, layout), allow_tf32)


def all_cases(layers: Mapping[str, Layer]) -> Iterator[Case]:
    """Yield the three ops of every layer in both types and both layouts."""
    for dtype in DTYPES:
        for layout in Layout:
            yield from cases(layers, dtype, layout)
