"""What every backend must compute."""

from mucudnn.problem import Layout
from tests.operands import a_convolution

PROBLEMS = {
    "3x3": a_convolution(),
    "bias": a_convolution(bias=True),
    "5x5": a_convolution(kernel_size=(5, 5), padding=(2, 2)),
    "9x9": a_convolution(kernel_size=(9, 9), padding=(4, 4)),
    "1x1": a_convolution(kernel_size=(1, 1), padding=(0, 0)),
    "stride": a_convolution(stride=(2, 1)),
    "dilation": a_convolution(dilation=(2, 1)),
    "groups": a_convolution(in_channels=4, out_channels=6, groups=2),
    "channels last": a_convolution(layout=Layout.CHANNELS_LAST, filter_layout=Layout.CHANNELS_LAST),
    "one dimension": a_convolution(
        input_size=(9,), kernel_size=(3,), stride=(1,), padding=(1,), dilation=(1,)
    ),
    "three dimensions": a_convolution(
        input_size=(3, 4, 5), kernel_size=(3, 3, 3), stride=(1, 1, 1), padding=(1, 1, 1), dilation=(1, 1, 1)
    ),
    "double": a_convolution(dtype="float64"),
    "half": a_convolution(dtype="float16"),
    "bfloat16": a_convolution(dtype="bfloat16"),
}
