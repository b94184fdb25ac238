"""Layers with enough channels for tiles in C, pointwise ones, and the names of what is tried of a problem."""

from mucudnn.algorithms import offered
from mucudnn.problem import ConvProblem
from tests.operands import a_convolution

ONES = {"stride": (1, 1), "dilation": (1, 1)}


def a_layer(**changes: object) -> ConvProblem:
    shape = {"batch": 4, "in_channels": 64, "out_channels": 64, "input_size": (16, 16), "padding": (1, 1)}
    return a_convolution(**{"kernel_size": (3, 3), **ONES, **shape, **changes})


def a_volume(channels: int, **changes: object) -> ConvProblem:
    threes, ones = (3, 3, 3), (1, 1, 1)
    shape = {"batch": 2, "in_channels": channels, "out_channels": channels, "input_size": (16, 24, 24)}
    return a_convolution(
        **{**shape, "kernel_size": threes, "stride": ones, "dilation": ones, "padding": ones, **changes}
    )


def pointwise(*size: int, **changes: object) -> ConvProblem:
    """A filter of one tap on images of this size, in float64."""
    ones, none = (1,) * len(size), (0,) * len(size)
    shape = {"input_size": size, "kernel_size": ones, "stride": ones, "padding": none, "dilation": ones}
    return a_convolution(**{"dtype": "float64", "batch": 3, **shape, **changes})


def names(problem: ConvProblem, threads: int = 1, *, compiles: bool, exhaustive: bool = False) -> list[str]:
    return [each.name for each in offered(problem, threads, exhaustive=exhaustive, compiles=compiles)]


def winograd(found: list[str]) -> list[str]:
    return [name for name in found if "winograd" in name]
