"""The convolutions of these tests: one that is changed where a test needs it, and those of the table."""

import dataclasses
from collections.abc import Iterator

from bench.gpu.layers import Layer
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


def problems_of(layer: Layer, dtype: str) -> Iterator[ConvProblem]:
    """Yield the table's problems of a layer in one type: both layouts, the three ops, the batches."""
    batches = (256, 64, 16, 2, 1) if len(layer.input_size) == 3 else (256, 64, 16)
    for layout in Layout:
        for op in ConvOp:
            for batch in batches:
                yield layer.problem(op, dtype, layout).with_batch(batch)
