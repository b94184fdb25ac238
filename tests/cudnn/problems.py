"""The convolutions of these tests: one that is changed where a test needs it, and the layers of the table."""

import dataclasses
from collections.abc import Iterator

from mucudnn.problem import ConvOp, ConvProblem, Layout


def conv(op: ConvOp = ConvOp.FPROP, **changes: object) -> ConvProblem:
    """Return the 3x3 convolution of 64 channels on 56x56 pixels, batch 16, bfloat16 in NHWC, with changes."""
    problem = ConvProblem(
        op=op,
        batch=16,
        in_channels=64,
        out_channels=64,
        input_size=(56, 56),
        kernel_size=(3, 3),
        stride=(1, 1),
        padding=(1, 1),
        dilation=(1, 1),
        dtype="bfloat16",
        layout=Layout.CHANNELS_LAST,
        filter_layout=Layout.CHANNELS_LAST,
    )
    return dataclasses.replace(problem, **changes)


def conv_in(dimensions: int, op: ConvOp = ConvOp.FPROP, **changes: object) -> ConvProblem:
    """Return a 3-tap convolution of 64 channels in any number of dimensions, 16 pixels along each."""
    return conv(
        op,
        **{
            "input_size": (16,) * dimensions,
            "kernel_size": (3,) * dimensions,
            "stride": (1,) * dimensions,
            "padding": (1,) * dimensions,
            "dilation": (1,) * dimensions,
            **changes,
        },
    )


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer of the table, with dilation 1: c, size, k, kernel, padding, stride, groups."""

    in_channels: int
    input_size: tuple[int, ...]
    out_channels: int
    kernel_size: tuple[int, ...]
    padding: int
    stride: int
    groups: int = 1

    @property
    def batches(self) -> tuple[int, ...]:
        return (256, 64, 16, 2, 1) if len(self.input_size) == 3 else (256, 64, 16)

    def problems(self, dtype: str) -> Iterator[ConvProblem]:
        """Yield its problems of one type: both layouts, the three ops, the batches."""
        rank = len(self.input_size)
        for layout in Layout:
            for op in ConvOp:
                for batch in self.batches:
                    yield ConvProblem(
                        op=op,
                        batch=batch,
                        in_channels=self.in_channels,
                        out_channels=self.out_channels,
                        input_size=self.input_size,
                        kernel_size=self.kernel_size,
                        stride=(self.stride,) * rank,
                        padding=(self.padding,) * rank,
                        dilation=(1,) * rank,
                        groups=self.groups,
                        dtype=dtype,
                        layout=layout,
                        filter_layout=layout,
                    )


LAYERS = {
    "alex2": Layer(64, (27, 27), 192, (5, 5), 2, 1),
    "vgg_c12": Layer(64, (224, 224), 64, (3, 3), 1, 1),
    "rn50_3x3": Layer(64, (56, 56), 64, (3, 3), 1, 1),
    "rn50_c1": Layer(3, (224, 224), 64, (7, 7), 3, 2),
    "rn50_1x1": Layer(256, (56, 56), 64, (1, 1), 0, 1),
    "rn50_s2": Layer(128, (56, 56), 128, (3, 3), 1, 2),
    "dw7x7": Layer(96, (56, 56), 96, (7, 7), 3, 1, groups=96),
    "grp32": Layer(256, (28, 28), 256, (3, 3), 1, 1, groups=32),
    "conv3d": Layer(128, (17, 60, 104), 128, (3, 3, 3), 1, 1),
    "unet3d": Layer(32, (128, 128, 128), 32, (3, 3, 3), 1, 1),
}
DTYPES = ("bfloat16", "float32")
